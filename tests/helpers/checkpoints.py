"""Small checkpoints of random weights: each family, and Qwen3-MoE in each format, as files.

Written in the layout of Hugging Face, with the `quantization_config` that the format's own tools
write, and quantised here with plain torch. A folder is written once and found again by its name.

    python -m tests.helpers.checkpoints FOLDER [CASE ...]
"""

import json
import math
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 256, 128, 4, 2048
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
GROUP = 32
Tensors = dict[str, torch.Tensor]


class Maker:
    """Random tensors of sensible scale; the same for the same name, whatever else is made."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int, std: float | None = None) -> torch.Tensor:
        """bf16 [..., out, in] with a standard deviation that keeps activations near 1."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        scale = 1.0 / math.sqrt(shape[-1]) if std is None else std
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return 1.0 + self.normal(name, size, std=0.1)


# Formats of one expert's matrix [out, in]: tensors by the ending of their names


def plain(weight: torch.Tensor) -> Tensors:
    return {"weight": weight}


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().max() / 448
    return {"weight": _fp8(weight, scale), "weight_scale": scale.reshape(1)}


def fp8_static(weight: torch.Tensor) -> Tensors:
    # Another scale in every expert, so that one for all must be found: about 4 / 448.
    spread = float(weight.float().abs().mean() * 100) % 1.0
    return {**fp8_tensor(weight), "input_scale": torch.tensor([(4 + spread) / 448])}


def fp8_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def fp8_block(weight: torch.Tensor, name: str = "weight_scale_inv") -> Tensors:
    rows, columns = weight.shape[0] // 128, weight.shape[1] // 128
    blocks = weight.float().view(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return {
        "weight": _fp8(blocks, scale).view(weight.shape),
        name: scale.view(rows, columns).clone(),
    }


def fp8_block_ct(weight: torch.Tensor) -> Tensors:
    return fp8_block(weight, "weight_scale")


def _int4(
    weight: torch.Tensor, *, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 [out, in], scales and zero points [out, groups]."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    if has_zeros:
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).to(torch.bfloat16)
        zeros = (-low / scale.float()).round().clamp(0, 15).to(torch.int32)
    else:
        scale = (groups.abs().amax(2) / 7).to(torch.bfloat16)
        zeros = torch.full(scale.shape, 8, dtype=torch.int32)
    values = (groups / scale.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return values.clamp(0, 15).to(torch.int32).view(weight.shape), scale, zeros


def pack(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 with as many values each along `dim` as `order` has, the first in the lowest bits."""
    moved = values.movedim(dim, -1).to(torch.int64)
    groups = moved.reshape(*moved.shape[:-1], -1, len(order))
    bits = 32 // len(order)
    packed = sum(groups[..., place] << (bits * index) for index, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def wna16(weight: torch.Tensor) -> Tensors:
    values, scale, _ = _int4(weight, has_zeros=False)
    return {
        "weight_packed": pack(values, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def wna16_zeros(weight: torch.Tensor) -> Tensors:
    values, scale, zeros = _int4(weight, has_zeros=True)
    return {
        "weight_packed": pack(values, 1),
        "weight_scale": scale,
        "weight_zero_point": pack(zeros, 0),
        "weight_shape": torch.tensor(weight.shape),
    }


def gptq(weight: torch.Tensor) -> Tensors:
    values, scale, zeros = _int4(weight, has_zeros=False)
    return {
        "qweight": pack(values.t(), 0),
        "qzeros": pack(zeros.t() - 1, 1),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def gptq_8(weight: torch.Tensor) -> Tensors:
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(2) / 127).to(torch.bfloat16)
    values = (groups / scale.float().unsqueeze(2)).round() + 128
    values = values.clamp(0, 255).to(torch.int32).view(weight.shape)
    zeros, fours = torch.full(scale.shape, 127, dtype=torch.int32), tuple(range(4))
    return {
        "qweight": pack(values.t(), 0, fours),
        "qzeros": pack(zeros.t(), 1, fours),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: torch.Tensor) -> Tensors:
    values, scale, zeros = _int4(weight, has_zeros=True)
    return {
        "qweight": pack(values.t(), 1, AWQ_ORDER),
        "qzeros": pack(zeros.t(), 1, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [..., in / 32, 16] and scales uint8 [..., in / 32] of [..., in]."""
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-20))) - 2
    scaled = blocks / torch.exp2(exponent).unsqueeze(-1)
    grid = torch.tensor(E2M1)
    code = (scaled.abs().unsqueeze(-1) - grid).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.to(torch.uint8).view(*code.shape[:-1], 16, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponent + 127).to(torch.uint8)


# What stands in config.json

DENSE = ["self_attn", "mlp.gate", "lm_head"]


def _dense_modules(layers: int) -> list[str]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [
        *(f"model.layers.{i}.self_attn.{name}" for i in range(layers) for name in names),
        *(f"model.layers.{i}.mlp.gate" for i in range(layers)),
        "lm_head",
    ]


def _fp8_config(scheme: str, block: list[int] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "modules_to_not_convert": _dense_modules(LAYERS),
    }
    return config if block is None else {**config, "weight_block_size": block}


def _compressed(
    layout: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp[.]gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": activations,
                "output_activations": None,
                "format": layout,
            }
        },
    }


FP8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
BLOCK = [128, 128]
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}


@dataclass(frozen=True)
class Format:
    """How experts are stored, and which `--moe-backend` serves them."""

    name: str
    quantise: Callable[[torch.Tensor], Tensors]
    config: Mapping[str, Any] | None
    backend: str = "triton"
    bits: float = 16
    """Bits of a weight, without its scales."""


FORMATS = {
    one.name: one
    for one in (
        Format("bf16", plain, None),
        Format("fp8-static", fp8_static, _fp8_config("static"), bits=8),
        Format("fp8-dynamic", fp8_tensor, _fp8_config("dynamic"), bits=8),
        Format("fp8-dynamic-marlin", fp8_tensor, _fp8_config("dynamic"), "marlin", 8),
        Format("fp8-block", fp8_block, _fp8_config("dynamic", BLOCK), bits=8),
        Format("fp8-block-marlin", fp8_block, _fp8_config("dynamic", BLOCK), "marlin", 8),
        Format(
            "ct-fp8-tensor",
            fp8_static,
            _compressed(
                "float-quantized",
                {**FP8, "strategy": "tensor"},
                {**FP8, "strategy": "tensor", "symmetric": True, "dynamic": False},
            ),
            bits=8,
        ),
        Format(
            "ct-fp8-channel",
            fp8_channel,
            _compressed(
                "float-quantized",
                {**FP8, "strategy": "channel"},
                {**FP8, "strategy": "token", "symmetric": True, "dynamic": True},
            ),
            bits=8,
        ),
        Format(
            "ct-fp8-block",
            fp8_block_ct,
            _compressed(
                "float-quantized",
                {**FP8, "strategy": "block", "block_structure": BLOCK},
                {
                    **FP8,
                    "strategy": "group",
                    "group_size": 128,
                    "symmetric": True,
                    "dynamic": True,
                },
            ),
            bits=8,
        ),
        Format("ct-int4", wna16, _compressed("pack-quantized", INT4, None), "marlin", 4),
        Format(
            "ct-int4-zeros",
            wna16_zeros,
            _compressed("pack-quantized", {**INT4, "symmetric": False}, None),
            "marlin",
            4,
        ),
        Format(
            "gptq",
            gptq,
            GPTQ,
            "marlin",
            4,
        ),
        Format("gptq-8", gptq_8, {**GPTQ, "bits": 8}, "marlin", 8),
        Format(
            "awq",
            awq,
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": GROUP,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": DENSE,
            },
            "marlin",
            4,
        ),
        Format(
            "mxfp4",
            plain,  # gpt-oss stores all experts of a layer in one tensor, see `_gpt_oss`
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            "marlin",
            4,
        ),
    )
}


# Families

BASE: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One architecture: its config, and the names and shapes of its tensors."""

    name: str
    config: Mapping[str, Any]
    num_experts: int
    top_k: int
    moe_layers: int
    layer: Callable[[Maker, str, int, Format], Tensors]


def _attention(
    make: Maker, at: str, *, bias: tuple[str, ...] = (), head_dim: int = HEAD_DIM
) -> Tensors:
    sizes = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
    made = {f"{at}.{n}_proj.weight": make.normal(f"{at}.{n}", s, HIDDEN) for n, s in sizes.items()}
    made[f"{at}.o_proj.weight"] = make.normal(f"{at}.o", HIDDEN, HEADS * head_dim)
    for name in bias:
        size = sizes.get(name, HIDDEN)
        made[f"{at}.{name}_proj.bias"] = make.normal(f"{at}.{name}.bias", size, std=0.1)
    return made


def _mlp(make: Maker, at: str, size: int) -> Tensors:
    return {
        f"{at}.gate_proj.weight": make.normal(f"{at}.gate", size, HIDDEN),
        f"{at}.up_proj.weight": make.normal(f"{at}.up", size, HIDDEN),
        f"{at}.down_proj.weight": make.normal(f"{at}.down", HIDDEN, size),
    }


def _experts(
    make: Maker,
    at: str,
    num_experts: int,
    how: Format,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    made: Tensors = {}
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    for expert in range(num_experts):
        first: torch.Tensor | None = None
        for name, shape in zip(names, shapes, strict=True):
            stem = f"{at}.{expert}.{name}"
            tensors = how.quantise(make.normal(stem, *shape))
            if "input_scale" in tensors and name == names[0]:
                first = tensors["input_scale"]
            if first is not None and name == names[1]:
                tensors["input_scale"] = first.clone()  # gate and up read the same activations
            made |= {f"{stem}.{ending}": tensor for ending, tensor in tensors.items()}
    return made


def _gate(make: Maker, at: str, num_experts: int) -> Tensors:
    return {f"{at}.weight": make.normal(at, num_experts, HIDDEN, std=2 / math.sqrt(HIDDEN))}


def _qwen3(make: Maker, at: str, index: int, how: Format) -> Tensors:  # noqa: ARG001
    return {
        **_attention(make, f"{at}.self_attn"),
        f"{at}.self_attn.q_norm.weight": make.norm(f"{at}.q_norm", HEAD_DIM),
        f"{at}.self_attn.k_norm.weight": make.norm(f"{at}.k_norm", HEAD_DIM),
        **_gate(make, f"{at}.mlp.gate", 32),
        **_experts(make, f"{at}.mlp.experts", 32, how),
    }


def _qwen2(make: Maker, at: str, index: int, how: Format) -> Tensors:  # noqa: ARG001
    return {
        **_attention(make, f"{at}.self_attn", bias=("q", "k", "v")),
        **_gate(make, f"{at}.mlp.gate", 16),
        **_experts(make, f"{at}.mlp.experts", 16, how),
        **_mlp(make, f"{at}.mlp.shared_expert", 2 * INTERMEDIATE),
        f"{at}.mlp.shared_expert_gate.weight": make.normal(f"{at}.shared_gate", 1, HIDDEN),
    }


def _mixtral(make: Maker, at: str, index: int, how: Format) -> Tensors:  # noqa: ARG001
    moe = f"{at}.block_sparse_moe"
    return {
        **_attention(make, f"{at}.self_attn"),
        **_gate(make, f"{moe}.gate", 8),
        **_experts(make, f"{moe}.experts", 8, how, ("w1", "w3", "w2")),
    }


def _olmoe(make: Maker, at: str, index: int, how: Format) -> Tensors:  # noqa: ARG001
    return {
        **_attention(make, f"{at}.self_attn"),
        f"{at}.self_attn.q_norm.weight": make.norm(f"{at}.q_norm", HEADS * HEAD_DIM),
        f"{at}.self_attn.k_norm.weight": make.norm(f"{at}.k_norm", KV_HEADS * HEAD_DIM),
        **_gate(make, f"{at}.mlp.gate", 16),
        **_experts(make, f"{at}.mlp.experts", 16, how),
    }


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _deepseek(make: Maker, at: str, index: int, how: Format) -> Tensors:
    rank, nope, rope, value = MLA.values()
    attention = f"{at}.self_attn"
    made = {
        f"{attention}.q_proj.weight": make.normal(f"{at}.q", HEADS * (nope + rope), HIDDEN),
        f"{attention}.kv_a_proj_with_mqa.weight": make.normal(f"{at}.kv_a", rank + rope, HIDDEN),
        f"{attention}.kv_a_layernorm.weight": make.norm(f"{at}.kv_a_norm", rank),
        f"{attention}.kv_b_proj.weight": make.normal(f"{at}.kv_b", HEADS * (nope + value), rank),
        f"{attention}.o_proj.weight": make.normal(f"{at}.o", HIDDEN, HEADS * value),
    }
    if index == 0:
        return {**made, **_mlp(make, f"{at}.mlp", 2 * HIDDEN)}
    return {
        **made,
        **_gate(make, f"{at}.mlp.gate", 16),
        **_experts(make, f"{at}.mlp.experts", 16, how),
        **_mlp(make, f"{at}.mlp.shared_experts", INTERMEDIATE),
    }


def _deepseek_v3(make: Maker, at: str, index: int, how: Format) -> Tensors:
    made = _deepseek(make, at, index, how)
    if index == 0:
        return made
    bias = make.normal(f"{at}.correction", 16, std=0.05).float()
    return {**made, f"{at}.mlp.gate.e_score_correction_bias": bias}


def _gpt_oss(make: Maker, at: str, index: int, how: Format) -> Tensors:  # noqa: ARG001
    num_experts, moe = 16, f"{at}.mlp"
    made = {
        **_attention(make, f"{at}.self_attn", bias=("q", "k", "v", "o")),
        f"{at}.self_attn.sinks": make.normal(f"{at}.sinks", HEADS, std=1.0),
        **_gate(make, f"{moe}.router", num_experts),
        f"{moe}.router.bias": make.normal(f"{at}.router.bias", num_experts, std=0.1),
    }
    for name, out, inner in (
        ("gate_up_proj", 2 * INTERMEDIATE, HIDDEN),
        ("down_proj", HIDDEN, INTERMEDIATE),
    ):
        stem = f"{moe}.experts.{name}"
        weight = make.normal(stem, num_experts, out, inner)
        if how.name == "mxfp4":
            made[f"{stem}_blocks"], made[f"{stem}_scales"] = mxfp4(weight)
        else:
            made[stem] = weight.transpose(1, 2).contiguous()
        made[f"{stem}_bias"] = make.normal(f"{stem}.bias", num_experts, out, std=0.1)
    return made


DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": None,
    **MLA,
}
FAMILIES = {
    one.name: one
    for one in (
        Family(
            "qwen3",
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "head_dim": HEAD_DIM,
                "intermediate_size": 2 * HIDDEN,
                "moe_intermediate_size": INTERMEDIATE,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            32, 4, LAYERS, _qwen3,
        ),
        Family(
            "qwen2",
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "model_type": "qwen2_moe",
                "intermediate_size": 2 * HIDDEN,
                "moe_intermediate_size": INTERMEDIATE,
                "shared_expert_intermediate_size": 2 * INTERMEDIATE,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            16, 4, LAYERS, _qwen2,
        ),
        Family("deepseek", DEEPSEEK, 16, 4, LAYERS - 1, _deepseek),
        Family(
            "deepseek-v3",
            {
                **DEEPSEEK,
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "num_nextn_predict_layers": 0,
            },
            16, 4, LAYERS - 1, _deepseek_v3,
        ),
        Family(
            "mixtral",
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "intermediate_size": INTERMEDIATE,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "sliding_window": None,
            },
            8, 2, LAYERS, _mixtral,
        ),
        Family(
            "olmoe",
            {
                "architectures": ["OlmoeForCausalLM"],
                "model_type": "olmoe",
                "intermediate_size": INTERMEDIATE,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "norm_topk_prob": False,
            },
            16, 4, LAYERS, _olmoe,
        ),
        Family(
            "gpt-oss",
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "head_dim": HEAD_DIM,
                "intermediate_size": INTERMEDIATE,
                "num_local_experts": 16,
                "num_experts_per_tok": 4,
                "attention_bias": True,
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 4096,
                    "truncate": False,
                },
                "max_position_embeddings": 131072,
            },
            16, 4, LAYERS, _gpt_oss,
        ),
    )
}  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    """(family, format) of every cell: each family in bf16, Qwen3-MoE in each format of its own,
    gpt-oss in MXFP4."""
    yield from ((name, "bf16") for name in FAMILIES)
    yield from (("qwen3", name) for name in FORMATS if name not in ("bf16", "mxfp4"))
    yield "gpt-oss", "mxfp4"


def tensors_of(family: Family, how: Format) -> Iterator[Tensors]:
    """The checkpoint's tensors, a file's worth at a time."""
    make = Maker(family.name)
    yield {
        "model.embed_tokens.weight": make.normal("embed", VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": make.norm("norm", HIDDEN),
        "lm_head.weight": make.normal("lm_head", VOCAB, HIDDEN, std=3 / math.sqrt(HIDDEN)),
    }
    for index in range(LAYERS):
        at = f"model.layers.{index}"
        yield {
            **family.layer(make, at, index, how),
            f"{at}.input_layernorm.weight": make.norm(f"{at}.in", HIDDEN),
            f"{at}.post_attention_layernorm.weight": make.norm(f"{at}.post", HIDDEN),
        }


def write(
    folder: Path,
    family: str,
    how: str = "bf16",
    *,
    change: Callable[[Tensors], Tensors] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a checkpoint, written into `folder` unless it is there.

    Args:
        change: what is done to the tensors of each file, to spoil a checkpoint.
        config: what is changed in config.json.
    """
    target = folder / f"{family}-{how}"
    if (target / "config.json").is_file():
        return target
    of, format_ = FAMILIES[family], FORMATS[how]
    part = folder / f".{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    files, total = {}, 0
    for index, tensors in enumerate(tensors_of(of, format_)):
        name = f"model-{index + 1:05}-of-{LAYERS + 1:05}.safetensors"
        kept = tensors if change is None else change(tensors)
        save_file(
            {key: tensor.contiguous() for key, tensor in kept.items()}, part / name,
            metadata={"format": "pt"},
        )  # fmt: skip
        files |= dict.fromkeys(kept, name)
        total += sum(tensor.nbytes for tensor in kept.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": files}
    (part / "model.safetensors.index.json").write_text(json.dumps(index_file))
    written = {**BASE, **of.config, **(config or {})}
    if format_.config is not None:
        written["quantization_config"] = format_.config
    (part / "config.json").write_text(json.dumps(written, indent=1))
    part.rename(target)
    return target


def main() -> int:
    folder, *chosen = sys.argv[1:]
    for family, how in cases():
        if not chosen or f"{family}-{how}" in chosen:
            print(write(Path(folder), family, how))
    return 0


if __name__ == "__main__":
    sys.exit(main())
