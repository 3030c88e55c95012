"""Which models the cache refuses, as far as their `config.json` tells, before vLLM is started."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefetch_runtime.model_shape import NUM_EXPERTS, first_int, sources

SERVED_FORMATS = (
    "bfloat16",
    "float16",
    "fp8",
    "fp8 in blocks",
    "gptq 4 bits",
    "gptq 8 bits",
    "awq 4 bits",
    "compressed-tensors float 8 bits",
    "compressed-tensors int 4 bits",
    "compressed-tensors int 8 bits",
    "mxfp4",
)
"""Formats of experts that this version's worker serves; it refuses the others at start."""

NEAREST = (
    "use an unquantised, fp8, GPTQ, AWQ, compressed-tensors fp8 or int4, or (gpt-oss) MXFP4 "
    "checkpoint"
)
ALONE = "serve it with plain vllm serve, without the cache"

OWN_EXPERTS = {"dbrx": "DbrxExperts"}
"""Values of `model_type` whose layers bring a class of their own, which cannot be replaced."""
OWN_KERNEL_CALLS = ("minicpm",)
"""Those whose layers call an expert kernel themselves."""

MARLIN_GROUPS = (-1, 32, 64, 128)
"""Group sizes that vLLM gives to Marlin; what it does not, it runs in a kernel that is refused."""


_SAME_AS = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
}
"""Other names of a `quant_method` in vLLM."""
PER_LAYER = ("auto-round", "fbgemm_fp8", "fp_quant", "inc", "modelopt_mixed", "torchao")
"""Values of `quant_method` of which vLLM decides layer by layer, or leaves the experts alone."""

SKIPPED_MODULES = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
)
"""Keys of a `quantization_config` under which stands what is not quantised."""
_EXPERTS = re.compile(r"(?<!shared_)expert|(?:mlp|moe|feed_forward|ffn)\W*$", re.IGNORECASE)
"""In the name or pattern of modules: experts may be among them."""
_MATRICES = re.compile(r"\b(?:gate|up|down)\b.*_proj|(?:gate|up|down)_proj|\bw\W?[123]")
"""The same in a pattern, which does not name all that is before them."""
_NO_EXPERTS = re.compile(r"att(?:entio)?n|shared_expert")


def quant_method(quantization: Mapping[str, Any]) -> object:
    """The method that a `quantization_config` names, by vLLM's name for it; None: it names none."""
    method = quantization.get("quant_method")
    if not isinstance(method, str):
        return method
    method = method.lower().replace("_tensors", "-tensors")
    return _SAME_AS.get(method, method) or None


def refused_line(why: str) -> str:
    """How a refusal is said, `why` being `why_refused`'s."""
    return f"the cache refuses this: {why}"


def why_refused(config: Mapping[str, Any]) -> str | None:
    """Why the runtime would refuse a model at start, and the nearest that works; None if nothing in
    the config says so. What only a GPU or the weights show is not seen."""
    reason = refused_family(config)
    quantization = _quantization(config)
    if reason is not None or quantization is None:
        return reason
    text, family = _text(config)
    reason = _of_format(quantization, text, family)
    return None if reason is None else f"{reason}; {NEAREST}"


def refused_family(config: Mapping[str, Any]) -> str | None:
    """The same of the model's family alone, whatever its format."""
    text, family = _text(config)
    if isinstance(family, str) and family in OWN_EXPERTS:
        return (
            f"models of type {family} bring an experts class of their own ({OWN_EXPERTS[family]}), "
            f"which it cannot replace; {ALONE}"
        )
    if isinstance(family, str) and family in OWN_KERNEL_CALLS and first_int(text, *NUM_EXPERTS):
        return f"models of type {family} call their expert kernel past vLLM's layer; {ALONE}"
    return None


def _text(config: Mapping[str, Any]) -> tuple[dict[str, Any], object]:
    """What speaks of the experts, and the model's type."""
    parts = sources(dict(config))
    text = next((part for part in reversed(parts) if first_int(part, *NUM_EXPERTS)), parts[-1])
    return text, text.get("model_type", config.get("model_type"))


def moe_backend(config: Mapping[str, Any]) -> str | None:
    """The `--moe-backend` that serves a quantised model wherever vLLM would choose another; None
    for an unquantised one."""
    quantization = _quantization(config)
    if quantization is None:
        return None
    weights, activations = next(iter(_groups(quantization)), ({}, {}))
    if quant_method(quantization) == "fp8":
        scales_the_batch = (
            quantization.get("weight_block_size") is None
            and quantization.get("activation_scheme", "dynamic") == "dynamic"
        )
    elif weights.get("type") == "float":
        scales_the_batch = activations.get("strategy") == "tensor" and bool(
            activations.get("dynamic")
        )
    else:
        return "marlin"
    return "marlin" if scales_the_batch else "triton"


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for part in sources(dict(config)):
        found = part.get("quantization_config")
        if isinstance(found, dict):
            return found
    return None


def skipped_modules(quantization: Mapping[str, Any]) -> Iterator[str]:
    """Names and patterns of what a `quantization_config` says is not quantised."""
    for key in SKIPPED_MODULES:
        names = quantization.get(key)
        if isinstance(names, list):
            yield from map(str, names)


def _groups(
    quantization: Mapping[str, Any],
) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Weights and activations of compressed-tensors' groups, those that may hold experts."""
    groups = quantization.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict) or not _may_hold_experts(group.get("targets")):
            continue
        weights, activations = group.get("weights"), group.get("input_activations")
        found.append(
            (
                weights if isinstance(weights, dict) else {},
                activations if isinstance(activations, dict) else {},
            )
        )
    return found


def _may_hold_experts(targets: object) -> bool:
    if not isinstance(targets, list):
        return True
    return any(target == "Linear" or _may_name_experts(str(target)) for target in targets)


def _may_name_experts(modules: str) -> bool:
    """Whether a name or pattern of modules may be that of experts."""
    if _EXPERTS.search(modules):
        return True
    is_pattern = modules.startswith("re:") or "*" in modules
    return bool(is_pattern and _MATRICES.search(modules) and _NO_EXPERTS.search(modules) is None)


def _of_format(
    quantization: Mapping[str, Any], text: Mapping[str, Any], family: object
) -> str | None:
    if any(map(_may_name_experts, skipped_modules(quantization))):
        return None  # all of them, or some: the worker sees each layer's
    method = quant_method(quantization)
    match method:
        case None | "fp8":
            return None
        case str() if method in PER_LAYER:
            return None
        case "mxfp4":
            if family == "gpt_oss":
                return None
            return "MXFP4 experts are served for gpt-oss alone"
        case "gptq" | "awq":
            bits = quantization.get("bits")
            allowed = (4,) if method == "awq" else (4, 8)
            if type(bits) is int and bits not in allowed:
                words = " or ".join(map(str, allowed))
                return f"{method} experts of {bits} bits are not served, {words} are"
            if method == "gptq" and quantization.get("sym") is False:
                return "gptq experts with zero points (sym false) are not served"
            return _of_marlin(method, quantization, text)
        case "compressed-tensors":
            return _of_compressed_tensors(quantization)
        case "modelopt" | "modelopt_fp4":
            algorithm = str(quantization.get("quant_algo"))[:20].upper()
            if algorithm == "MIXED_PRECISION":  # it names the layers, which may be all others
                return None
            return f"experts in modelopt's {algorithm} have no kernel that it serves"
    return f"experts of quant_method {str(method)[:40]!r} have no kernel that it serves"


def _of_marlin(method: str, quantization: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    group, hidden = quantization.get("group_size"), first_int(dict(text), "hidden_size")
    if group in (None, *MARLIN_GROUPS) and (hidden is None or hidden % 128 == 0):
        return None
    return (
        f"vLLM does not give these {method} experts to Marlin, which needs a hidden size that is a "
        "multiple of 128 and group size 32, 64 or 128"
    )


def _of_compressed_tensors(quantization: Mapping[str, Any]) -> str | None:
    """Why none of the groups that may hold the experts would be served."""
    reasons = [_of_group(weights, activations) for weights, activations in _groups(quantization)]
    return None if None in reasons else next(iter(reasons), None)


def _of_group(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> str | None:
    bits, kind = weights.get("num_bits"), str(weights.get("type"))[:10]
    if type(bits) is not int:  # the sizes' own error
        return None
    name = f"compressed-tensors {kind} {bits} bits"
    if kind == "float":
        if bits == 8 and weights.get("strategy") in (None, "tensor", "channel", "block"):
            return None
        return f"{name} (NVFP4, MXFP4, MXFP8) experts have no kernel that it serves"
    if bits not in (4, 8):
        return f"{name} experts are not served, 4 and 8 are"
    if activations:
        return f"{name} experts with quantised activations have no kernel that it serves"
    return None
