"""How large a model's parts are, computed from its `config.json` alone.

Shapes: E = experts, H = hidden, I = intermediate of one expert.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefetch_runtime.model_refusals import NEAREST, quant_method, skipped_modules
from prefetch_runtime.model_shape import (
    NUM_EXPERTS,
    TOP_K,
    ModelError,
    bounded,
    check_whole,
    expert_shape,
    first_int,
    optional,
    sources,
)
from prefetch_runtime.state_layers import state_layer

KNOWN_FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Values of `model_type` whose layers are counted as vLLM builds them, to the parameter."""

OTHER_FAMILIES = (
    "dots1",
    "ernie4_5_moe",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "jamba",
    "kimi_k2",
    "kimi_linear",
    "lfm2_moe",
    "llama4_text",
    "minimax_m2",
    "nemotron_h",
    "phimoe",
    "qwen3_next",
    "qwen3_vl_moe_text",
)
"""Those of which it may miss some norms and biases."""

_WITHOUT_KV = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
"""Entries of `layer_types` whose layers keep a state of one size."""

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
_MOST_LAYERS = 10_000
_FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
"""What models call the number of layers at the front without experts."""


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
    dense_int4_bytes: int
    """All of them in a checkpoint that has its linear layers in int4; routers, embeddings and norms
    are as they are here."""
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


_INT4 = _Format("int4", 4, (1, 64), 2)


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
    if family not in KNOWN_FAMILIES + OTHER_FAMILIES:
        family = family if isinstance(family, str) and family.isidentifier() else "unnamed"
        heads = "num_attention_heads" if optional(text, "kv_lora_rank") is None else "kv_lora_rank"
        notes.append(
            f"the layers of model type {family[:40]} are taken to be those of a plain decoder: "
            f"attention by {heads}, experts of three matrices"
        )
    if text is not config:
        notes.append("only the text model is counted, not its vision or audio parts")
    num_experts = bounded(text, *NUM_EXPERTS, most=1 << 20)
    top_k = bounded(text, *TOP_K)
    if top_k > num_experts:
        raise ModelError(f"the config.json routes to {top_k} of {num_experts} experts")

    hidden = bounded(text, "hidden_size")
    layers = _layers(text, family)
    if not layers.moe:
        raise ModelError("the config.json declares experts, but no layer has them")
    plain = _plain_format(config, text, notes)
    stored, dense = _formats(config, text, plain, notes)

    inner = _inner(text)
    latent = optional(text, "moe_latent_size") or hidden
    tensors = [
        *stored.tensors((1 + _gates(family)) * inner, latent),
        *stored.tensors(latent, inner),
    ]
    if family == "gpt_oss":
        tensors += [*plain.tensors(2 * inner, 1), *plain.tensors(hidden, 1)]

    _, kv = _attention(text, hidden, dense)
    _, full_kv = _attention(_full_attention(text), hidden, dense)
    if layers.keeping:
        unknown = state_layer(text, hidden) is None
        taken = ", and their weights are taken to be those of attention" if unknown else ""
        notes.append(
            f"{layers.keeping} of the {layers.total} layers keep a state in place of a KV "
            f"cache; it is not counted{taken}"
        )
    vocabulary = plain.nbytes(bounded(text, "vocab_size"), hidden)
    read, read_int4 = (
        vocabulary + _layer_bytes(text, family, layers, plain, linear) for linear in (dense, _INT4)
    )
    input_embedding = 0 if _is_tied(config, text, family) else vocabulary
    return ModelSizes(
        model_type=family,
        num_layers=layers.total,
        num_moe_layers=layers.moe,
        num_experts=num_experts,
        top_k=top_k,
        expert_format=stored.name,
        expert_bytes=sum(tensors),
        record_bytes=sum(-(-n // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT for n in tensors),
        dense_bytes=read + input_embedding,
        dense_read_bytes=read,
        dense_int4_bytes=read_int4 + input_embedding,
        kv_token_bytes=(layers.attending - layers.windowed) * full_kv * (plain.bits // 8),
        kv_window_token_bytes=layers.windowed * kv * (plain.bits // 8),
        window=bounded(text, "sliding_window") if layers.windowed else 0,
        max_context=optional(text, "max_position_embeddings"),
        notes=tuple(notes),
    )


def _layer_bytes(
    text: dict[str, Any], family: str, layers: "_Layers", plain: _Format, linear: _Format
) -> int:
    """Bytes of all layers without their experts, and of the last norm.

    Args:
        plain: the format of norms, routers and what else is not quantised.
        linear: that of attention, shared experts and MLPs.
    """
    hidden = bounded(text, "hidden_size")
    gates = _gates(family)
    latent = optional(text, "moe_latent_size") or hidden
    attention, _ = _attention(text, hidden, linear)
    full_attention, _ = _attention(_full_attention(text), hidden, linear)
    keeping = state_layer(text, hidden)
    state = attention
    if keeping is not None:
        state = plain.nbytes(1, keeping.plain) + sum(linear.nbytes(*m) for m in keeping.linear)
    shared = _shared_intermediate(text, family, _inner(text))
    return (
        layers.norms * plain.nbytes(1, hidden)
        + layers.windowed * attention
        + (layers.attending - layers.windowed) * full_attention
        + layers.keeping * state
        + plain.nbytes(1, hidden)
        + layers.moe * plain.nbytes(bounded(text, *NUM_EXPERTS, most=1 << 20), hidden)
        + (layers.moe * linear.nbytes((2 + gates) * shared, hidden) if shared else 0)
        + (layers.moe * linear.nbytes(2 * latent, hidden) if latent != hidden else 0)
        + (layers.mlp and layers.mlp * linear.nbytes((2 + gates) * _dense_inner(text), hidden))
    )


def _inner(text: dict[str, Any]) -> int:
    return bounded(text, "moe_intermediate_size", "intermediate_size")


def _gates(family: str) -> int:
    """Matrices of an expert or MLP beside up and down."""
    return 0 if family == "nemotron_h" else 1


class _Layers(NamedTuple):
    """How many there are of each kind; a plain decoder's attend and have experts or an MLP."""

    total: int
    moe: int
    mlp: int
    attending: int
    windowed: int
    """Those of them that attend to a window."""
    keeping: int
    """Those with a state in place of a KV cache."""
    norms: int


def _layers(text: dict[str, Any], family: str) -> _Layers:
    blocks = _blocks(text)
    if blocks is not None:
        moe, mlp, attending = (blocks.count(kind) for kind in ("moe", "mlp", "attention"))
        total = len(blocks)
        keeping = total - moe - mlp - attending
        return _Layers(total, moe, mlp, attending, 0, keeping, norms=total)
    total = bounded(text, "num_hidden_layers", most=_MOST_LAYERS)
    moe = sum(_has_experts(text, index) for index in range(total))
    attending = sum(_keeps_kv(text, index) for index in range(total))
    mlp = total if family == "gemma4_text" else total - moe  # Gemma 4 has one beside its experts
    windowed = _windowed_layers(text, total)
    return _Layers(total, moe, mlp, attending, windowed, total - attending, norms=2 * total)


def _blocks(text: dict[str, Any]) -> list[str] | None:
    """Where a layer is one thing alone (Nemotron-H): moe, mlp, attention, or another name for one
    that keeps a state. None for all other models."""
    pattern = text.get("hybrid_override_pattern")
    kinds = _kinds(text)
    if isinstance(pattern, str) and pattern:
        names = {"E": "moe", "-": "mlp", "*": "attention", "M": "mamba"}
        unknown = next((letter for letter in pattern if letter not in names), None)
        if unknown is not None:
            raise ModelError(
                f"the config.json has a hybrid_override_pattern with {unknown!r}, which is no "
                f"kind of layer that is known: {', '.join(names)}"
            )
        blocks = [names[letter] for letter in pattern]
    elif kinds is not None and "moe" in kinds:
        blocks = ["attention" if kind == "full_attention" else str(kind) for kind in kinds]
    else:
        return None
    if len(blocks) > _MOST_LAYERS:
        raise ModelError(f"the config.json has more than {_MOST_LAYERS} layers")
    return blocks


def _kinds(text: dict[str, Any]) -> list[Any] | None:
    """What the config calls each layer."""
    kinds = text.get("layer_types", text.get("layers_block_type"))
    return kinds if isinstance(kinds, list) else None


def _has_experts(text: dict[str, Any], layer: int) -> bool:
    only_dense = text.get("mlp_only_layers")
    if isinstance(only_dense, list) and layer in only_dense:
        return False
    if layer < (optional(text, *_FIRST_DENSE) or 0):
        return False
    last = optional(text, "moe_layer_end_index")  # ERNIE 4.5, as the two beside it
    if (last is not None and layer > last) or (layer + 1) % (
        optional(text, "moe_layer_interval") or 1
    ):
        return False
    every = text.get("moe_layer_freq")
    if isinstance(every, list):  # one flag per layer
        return layer < len(every) and bool(every[layer])
    if layer % (optional(text, "moe_layer_freq") or 1):
        return False
    if (layer + 1) % (optional(text, "interleave_moe_layer_step") or 1):  # Llama 4
        return False
    period = optional(text, "expert_layer_period")  # Jamba
    if period is not None and layer % period != (optional(text, "expert_layer_offset") or 0):
        return False
    return (layer + 1) % (optional(text, "decoder_sparse_step") or 1) == 0


def _keeps_kv(text: dict[str, Any], layer: int) -> bool:
    """Whether a layer has a KV cache: linear attention and Mamba keep a state of one size."""
    kinds = _kinds(text)
    if kinds is not None and layer < len(kinds):
        return kinds[layer] not in _WITHOUT_KV
    linear = text.get("linear_attn_config")  # Kimi Linear; its numbers begin at 1
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        return layer + 1 not in linear["kda_layers"]
    period = optional(text, "attn_layer_period")  # Jamba
    if period is not None:
        return layer % period == (optional(text, "attn_layer_offset") or 0)
    return (layer + 1) % (optional(text, "full_attention_interval") or 1) == 0  # Qwen3-Next


def _attention(text: dict[str, Any], hidden: int, linear: _Format) -> tuple[int, int]:
    """Bytes of one layer's attention weights, and elements that a token adds to its KV cache."""
    heads = bounded(text, "num_attention_heads")
    latent = optional(text, "kv_lora_rank")
    if latent is None:
        size = optional(text, "head_dim") or max(1, hidden // heads)
        groups = optional(text, "num_key_value_heads") or heads
        # Qwen3-Next and 3.5 gate what attention yields, by as many columns as there are queries.
        gated = "linear_num_key_heads" in text and text.get("attn_output_gate", True)
        fused = ((2 if gated else 1) * heads + 2 * groups) * size
        return linear.nbytes(fused, hidden) + linear.nbytes(hidden, heads * size), 2 * groups * size
    # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds the latent.
    nope, rope = bounded(text, "qk_nope_head_dim"), bounded(text, "qk_rope_head_dim")
    value = bounded(text, "v_head_dim")
    queries = heads * (nope + rope)
    rank = optional(text, "q_lora_rank")
    nbytes = (
        linear.nbytes(queries, hidden)
        if rank is None
        else linear.nbytes(rank, hidden) + linear.nbytes(queries, rank)
    )
    nbytes += linear.nbytes(latent + rope, hidden)
    nbytes += linear.nbytes(heads * (nope + value), latent)
    return nbytes + linear.nbytes(hidden, heads * value), latent + rope


def _shared_intermediate(text: dict[str, Any], family: str, inner: int) -> int:
    """Intermediate size of the experts that every token takes, together; 0 without any."""
    if family == "llama4_text":  # always one; no key says so
        return inner
    each = optional(text, "moe_shared_expert_intermediate_size") or inner
    return optional(text, *_SHARED_WIDTH) or (optional(text, *_SHARED_COUNT) or 0) * each


def _full_attention(text: dict[str, Any]) -> dict[str, Any]:
    """The config as it stands for the layers that attend to everything (Gemma 4)."""
    size = optional(text, "global_head_dim")
    if size is None:
        return text
    groups = optional(text, "num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    own = {} if groups is None else {"num_key_value_heads": groups}
    return {**text, "head_dim": size, **own}


def _is_tied(config: dict[str, Any], text: dict[str, Any], family: str) -> bool:
    """Whether the output embedding is the input's."""
    for part in (text, config):
        for name in ("tie_word_embeddings", "tie_embedding"):
            if name in part:
                return part[name] is True
    return family in ("gemma4_text", "lfm2_moe")  # what vLLM takes where none says it


def _dense_inner(text: dict[str, Any]) -> int:
    return bounded(text, "intermediate_size_mlp", "intermediate_size")


def _windowed_layers(text: dict[str, Any], num_layers: int) -> int:
    kinds = _kinds(text)
    if kinds is None or len(kinds) != num_layers:
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
    group = optional(quantization, "group_size")
    match method:
        case "fp8":
            sides = quantization.get("weight_block_size")
            if sides is None:
                return _Format("fp8", 8, (None, None), 4)
            return _Format("fp8 in blocks", 8, _pair(sides, "weight_block_size"), 4)
        case "mxfp4":
            return _Format("mxfp4", 4, (1, 32), 1)
        case "gptq" | "awq":
            bits = bounded(quantization, "bits", most=16)
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
    bits = bounded(weights, "num_bits", most=16)
    is_float = weights.get("type") == "float"
    group = optional(weights, "group_size")
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
