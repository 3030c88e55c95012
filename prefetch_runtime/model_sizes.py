"""How large a model's parts are, computed from its `config.json` alone.

Shapes: E = experts, H = hidden, I = intermediate of one expert.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prefetch_runtime.model_refusals import NEAREST, quant_method, skipped_modules
from prefetch_runtime.model_shape import (
    NUM_EXPERTS,
    TOP_K,
    ModelError,
    check_whole,
    expert_shape,
    first_int,
    sources,
)

KNOWN_FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Values of `model_type` whose layers `model_sizes` counts as vLLM builds them."""

_WITHOUT_KV = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
"""Entries of `layer_types` whose layers keep a state of one size."""

_LINEAR_KEYS = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
)

_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNT = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)
"""What the models that vLLM serves call the experts that every token takes."""

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_RECORD_ALIGNMENT = 256
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What of a model takes room and is moved. Bytes are as loaded, without kernels' padding."""

    model_type: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_format: str
    """A dtype, or the name of a quantised format."""
    expert_bytes: int
    """One expert: weights, scales, zero points and biases; what a slot takes and a miss moves."""
    record_bytes: int
    """One expert in the host store, where each tensor starts at a multiple of 256."""
    dense_bytes: int
    """All other weights: embeddings, attention, routers, shared experts, dense layers."""
    dense_read_bytes: int
    """Those that every decode step reads: all but an input embedding of its own."""
    kv_token_bytes: int
    """KV cache of one token in the layers that attend to everything."""
    kv_window_token_bytes: int
    """The same in the layers that attend to `window` tokens."""
    window: int
    max_context: int | None
    notes: tuple[str, ...]
    """What the config does not say and was assumed."""

    @property
    def experts_bytes(self) -> int:
        """All experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_bytes

    @property
    def pinned_bytes(self) -> int:
        """The host store, page-locked on a machine with a GPU."""
        return self.num_moe_layers * self.num_experts * self.record_bytes

    def slot_bytes(self, slots_per_layer: int) -> int:
        """Slots of all layers on the device."""
        return self.num_moe_layers * slots_per_layer * self.expert_bytes

    def kv_bytes(self, context: int) -> int:
        """KV cache of one sequence of `context` tokens."""
        windowed = min(context, self.window) * self.kv_window_token_bytes
        return context * self.kv_token_bytes + windowed


@dataclass(frozen=True, slots=True)
class _Format:
    """How a matrix is stored."""

    name: str
    bits: int
    block: tuple[int | None, int | None] = (None, None)
    """Rows and columns that share a scale; None: all."""
    scale_bytes: int = 0
    zero_bits: int = 0

    def tensors(self, rows: int, columns: int) -> Iterator[int]:
        """Bytes of the tensors that hold a [rows, columns] matrix."""
        yield math.ceil(rows * columns * self.bits / 8)
        scales = math.ceil(rows / (self.block[0] or rows)) * math.ceil(
            columns / (self.block[1] or columns)
        )
        if self.scale_bytes:
            yield scales * self.scale_bytes
        if self.zero_bits:
            yield math.ceil(scales * self.zero_bits / 8)

    def nbytes(self, rows: int, columns: int) -> int:
        return sum(self.tensors(rows, columns))


def model_sizes(config: dict[str, Any]) -> ModelSizes:
    """Sizes of a model with experts, from its config alone.

    Norms are counted, biases of attention are not. Vision and audio parts are left out.

    Raises:
        ModelError: a dense model, a number that is missing or absurd, or an unknown format.
    """
    if expert_shape(config) is None:
        for part in sources(config):
            check_whole(part, *NUM_EXPERTS)
        raise ModelError(
            "the config.json declares no experts (a dense model), so there is nothing to plan; "
            "serve it with plain vllm serve"
        )
    text = next(s for s in reversed(sources(config)) if first_int(s, *NUM_EXPERTS))
    notes: list[str] = []
    family = text.get("model_type")
    if family not in KNOWN_FAMILIES:
        family = family if isinstance(family, str) and family.isidentifier() else "unnamed"
        notes.append(
            f"the layers of model type {family[:40]} are taken to be those of a plain decoder: "
            "attention by num_attention_heads, experts of three matrices"
        )
    if text is not config:
        notes.append("only the text model is counted, not its vision or audio parts")
    num_experts = _bounded(text, *NUM_EXPERTS, most=1 << 20)
    top_k = _bounded(text, *TOP_K)
    if top_k > num_experts:
        raise ModelError(f"the config.json routes to {top_k} of {num_experts} experts")

    hidden = _bounded(text, "hidden_size")
    num_layers = _bounded(text, "num_hidden_layers", most=10_000)
    moe_layers = sum(_has_experts(text, index) for index in range(num_layers))
    if not moe_layers:
        raise ModelError("the config.json declares experts, but no layer has them")
    plain = _plain_format(config, text, notes)
    stored, dense = _formats(config, text, plain, notes)

    inner = _bounded(text, "moe_intermediate_size", "intermediate_size")
    tensors = [*stored.tensors(2 * inner, hidden), *stored.tensors(hidden, inner)]
    if family == "gpt_oss":
        tensors += [*plain.tensors(2 * inner, 1), *plain.tensors(hidden, 1)]

    attention, kv_elements = _attention(text, hidden, dense)
    attending = sum(_keeps_kv(text, index) for index in range(num_layers))
    linear = _linear_attention(text, hidden, dense, plain)
    if attending < num_layers:
        taken = ", and their weights are taken to be those of attention" if linear is None else ""
        notes.append(
            f"{num_layers - attending} of the {num_layers} layers keep a state in place of a KV "
            f"cache; it is not counted{taken}"
        )
    shared = _shared_intermediate(text, family, inner)
    vocabulary = plain.nbytes(_bounded(text, "vocab_size"), hidden)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True
    dense_layers = num_layers - moe_layers
    read = (
        vocabulary
        + num_layers * plain.nbytes(2, hidden)
        + attending * attention
        + (num_layers - attending) * (attention if linear is None else linear)
        + plain.nbytes(1, hidden)
        + moe_layers * plain.nbytes(num_experts, hidden)
        + (moe_layers * dense.nbytes(3 * shared, hidden) if shared else 0)
        + (dense_layers and dense_layers * dense.nbytes(3 * _dense_inner(text), hidden))
    )
    windowed = _windowed_layers(text, num_layers)
    kv_layer = kv_elements * (plain.bits // 8)
    return ModelSizes(
        model_type=family,
        num_layers=num_layers,
        num_moe_layers=moe_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_format=stored.name,
        expert_bytes=sum(tensors),
        record_bytes=sum(-(-n // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT for n in tensors),
        dense_bytes=read if tied else read + vocabulary,
        dense_read_bytes=read,
        kv_token_bytes=(attending - windowed) * kv_layer,
        kv_window_token_bytes=windowed * kv_layer,
        window=_bounded(text, "sliding_window") if windowed else 0,
        max_context=_optional(text, "max_position_embeddings"),
        notes=tuple(notes),
    )


def _bounded(config: dict[str, Any], *names: str, most: int = _LARGEST) -> int:
    """The first positive number under one of the names; ModelError if there is none, or absurd."""
    check_whole(config, *names)
    value = _optional(config, *names, most=most)
    if value is None:
        raise ModelError(f"the config.json has no positive whole number {' or '.join(names)}")
    return value


def _optional(config: dict[str, Any], *names: str, most: int = _LARGEST) -> int | None:
    """The same where it may be missing."""
    value = first_int(config, *names)
    if value is not None and value > most:
        raise ModelError(f"the config.json has an absurd {names[0]}, more than {most}")
    return value


def _has_experts(text: dict[str, Any], layer: int) -> bool:
    only_dense = text.get("mlp_only_layers")
    if isinstance(only_dense, list) and layer in only_dense:
        return False
    if layer < (_optional(text, "first_k_dense_replace", "moe_layer_start_index") or 0):
        return False
    last = _optional(text, "moe_layer_end_index")  # ERNIE 4.5, as the two beside it
    if (last is not None and layer > last) or (layer + 1) % (
        _optional(text, "moe_layer_interval") or 1
    ):
        return False
    every = text.get("moe_layer_freq")
    if isinstance(every, list):  # one flag per layer
        return layer < len(every) and bool(every[layer])
    if layer % (_optional(text, "moe_layer_freq") or 1):
        return False
    if (layer + 1) % (_optional(text, "interleave_moe_layer_step") or 1):  # Llama 4
        return False
    period = _optional(text, "expert_layer_period")  # Jamba
    if period is not None and layer % period != (_optional(text, "expert_layer_offset") or 0):
        return False
    return (layer + 1) % (_optional(text, "decoder_sparse_step") or 1) == 0


def _keeps_kv(text: dict[str, Any], layer: int) -> bool:
    """Whether a layer has a KV cache: linear attention and Mamba keep a state of one size."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return kinds[layer] not in _WITHOUT_KV
    linear = text.get("linear_attn_config")  # Kimi Linear; its numbers begin at 1
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        return layer + 1 not in linear["kda_layers"]
    period = _optional(text, "attn_layer_period")  # Jamba
    if period is not None:
        return layer % period == (_optional(text, "attn_layer_offset") or 0)
    return (layer + 1) % (_optional(text, "full_attention_interval") or 1) == 0  # Qwen3-Next


def _attention(text: dict[str, Any], hidden: int, linear: _Format) -> tuple[int, int]:
    """Bytes of one layer's attention weights, and elements that a token adds to its KV cache."""
    heads = _bounded(text, "num_attention_heads")
    latent = _optional(text, "kv_lora_rank")
    if latent is None:
        size = _optional(text, "head_dim") or max(1, hidden // heads)
        groups = _optional(text, "num_key_value_heads") or heads
        # Qwen3-Next and 3.5 gate what attention yields, by as many columns as there are queries.
        gated = _LINEAR_KEYS[0] in text and text.get("attn_output_gate", True)
        fused = ((2 if gated else 1) * heads + 2 * groups) * size
        return linear.nbytes(fused, hidden) + linear.nbytes(hidden, heads * size), 2 * groups * size
    # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds the latent.
    nope, rope = _bounded(text, "qk_nope_head_dim"), _bounded(text, "qk_rope_head_dim")
    value = _bounded(text, "v_head_dim")
    queries = heads * (nope + rope)
    rank = _optional(text, "q_lora_rank")
    nbytes = (
        linear.nbytes(queries, hidden)
        if rank is None
        else linear.nbytes(rank, hidden) + linear.nbytes(queries, rank)
    )
    nbytes += linear.nbytes(latent + rope, hidden)
    nbytes += linear.nbytes(heads * (nope + value), latent)
    return nbytes + linear.nbytes(hidden, heads * value), latent + rope


def _linear_attention(
    text: dict[str, Any], hidden: int, dense: _Format, plain: _Format
) -> int | None:
    """Bytes of one gated delta net's weights (Qwen3-Next); None where the config has no such."""
    if any(_optional(text, name) is None for name in _LINEAR_KEYS):
        return None
    key_heads, key, value_heads, value = (_bounded(text, name) for name in _LINEAR_KEYS)
    keys, values = key_heads * key, value_heads * value
    kernel = _optional(text, "linear_conv_kernel_dim") or 4
    nbytes = dense.nbytes(2 * keys + 2 * values, hidden) + dense.nbytes(hidden, values)
    return nbytes + plain.nbytes(2 * value_heads, hidden) + plain.nbytes(2 * keys + values, kernel)


def _shared_intermediate(text: dict[str, Any], family: str, inner: int) -> int:
    """Intermediate size of the experts that every token takes, together; 0 without any."""
    if family == "llama4_text":  # always one; no key says so
        return inner
    return _optional(text, *_SHARED_WIDTH) or (_optional(text, *_SHARED_COUNT) or 0) * inner


def _dense_inner(text: dict[str, Any]) -> int:
    return _bounded(text, "intermediate_size_mlp", "intermediate_size")


def _windowed_layers(text: dict[str, Any], num_layers: int) -> int:
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        return 0
    return kinds.count("sliding_attention")


def _plain_format(config: dict[str, Any], text: dict[str, Any], notes: list[str]) -> _Format:
    for source in (text, config):
        for name in ("dtype", "torch_dtype"):
            dtype = source.get(name)
            if isinstance(dtype, str) and dtype in _DTYPE_BYTES:
                return _Format(dtype, 8 * _DTYPE_BYTES[dtype])
    notes.append("the config names no dtype of two or four bytes; bfloat16 is taken")
    return _Format("bfloat16", 16)


def _formats(
    config: dict[str, Any], text: dict[str, Any], plain: _Format, notes: list[str]
) -> tuple[_Format, _Format]:
    """How experts are stored, and how the other linear layers are."""
    quantization = config.get("quantization_config", text.get("quantization_config"))
    if quantization is None:
        return plain, plain
    if not isinstance(quantization, dict):
        raise ModelError("the config.json has a quantization_config that is no object")
    experts = _quantised(quantization)
    notes.append(f"{experts.name}: sizes as in the checkpoint; kernels may pad or repack them")
    skipped = skipped_modules(quantization)
    if experts.name == "mxfp4" or any("attn" in name for name in skipped):
        return experts, plain
    return experts, experts


def _quantised(quantization: dict[str, Any]) -> _Format:
    method = quant_method(quantization)
    group = _optional(quantization, "group_size")
    match method:
        case "fp8":
            sides = quantization.get("weight_block_size")
            if sides is None:
                return _Format("fp8", 8, (None, None), 4)
            return _Format("fp8 in blocks", 8, _pair(sides, "weight_block_size"), 4)
        case "mxfp4":
            return _Format("mxfp4", 4, (1, 32), 1)
        case "gptq" | "awq":
            bits = _bounded(quantization, "bits", most=16)
            has_zeros = quantization.get("zero_point", not quantization.get("sym", True))
            return _Format(f"{method} {bits} bits", bits, (1, group), 2, bits if has_zeros else 0)
        case "modelopt" if quantization.get("quant_algo") in ("FP8", "NVFP4"):
            if quantization["quant_algo"] == "FP8":
                return _Format("modelopt fp8", 8, (None, None), 4)
            return _Format("modelopt nvfp4", 4, (1, 16), 1)
        case "compressed-tensors":
            return _compressed_tensors(quantization)
    raise ModelError(
        f"the config.json has the quant_method {str(method)[:40]!r}, whose size per expert is not "
        f"known; {NEAREST}"
    )


def _compressed_tensors(quantization: dict[str, Any]) -> _Format:
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        raise ModelError("the config.json has compressed-tensors without config_groups.*.weights")
    bits = _bounded(weights, "num_bits", most=16)
    is_float = weights.get("type") == "float"
    group = _optional(weights, "group_size")
    name = f"compressed-tensors {'float' if is_float else 'int'} {bits} bits"
    if is_float and bits == 4:
        return _Format(name, 4, (1, group or 16), 1)
    match weights.get("strategy"):
        case "tensor":
            block: tuple[int | None, int | None] = (None, None)
        case "block":
            block = _pair(weights.get("block_structure"), "block_structure")
        case _:
            block = (1, group)
    zero_bits = bits if weights.get("symmetric") is False else 0
    return _Format(name, bits, block, 4 if is_float else 2, zero_bits)


def _pair(value: Any, name: str) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(side) is int and side > 0 for side in value)
    ):
        raise ModelError(f"the config.json has a {name} that is not two positive numbers")
    return value[0], value[1]
