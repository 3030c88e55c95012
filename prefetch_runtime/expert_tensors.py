"""Whether a checkpoint's experts are of the sizes that `config.json` declares, by its headers.

vLLM's loader of gpt-oss takes of a larger tensor the part that fits, and says nothing; experts past
the declared number are left out by every loader. Here the headers of the files are read, no
weights. What has a name, a family or a layout that is not known is left to the loader.

Shapes: E = experts, H = hidden size, I = intermediate size of one expert.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefetch_runtime.checkpoint_files import files_read, read_header
from prefetch_runtime.model_refusals import quant_method
from prefetch_runtime.model_shape import NUM_EXPERTS

_INNER = {
    "deepseek_v2": "moe_intermediate_size",
    "deepseek_v3": "moe_intermediate_size",
    "glm4_moe": "moe_intermediate_size",
    "gpt_oss": "intermediate_size",
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
"""What each family calls I. Another family may give its experts other sizes by other names."""

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d{1,6})\.(?:mlp|block_sparse_moe)\.experts\."
    r"(?:(?P<expert>\d{1,6})\.)?(?P<matrix>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)"
    r"(?P<ending>\.weight|\.weight_packed|\.qweight|_blocks|_scales|_bias|)"
)
_DOWN = ("down_proj", "w2")
_PLAIN = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8")
"""dtypes of a weight that is not packed: one number is one weight."""
_REMEDY = "they are of two models; get both from one place"
_MX_BLOCK = 32
"""Weights that share a scale in MXFP4; their codes are 16 bytes."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a config says of its experts."""

    family: str
    num_experts: int
    hidden: int
    inner: int
    num_layers: int
    packed: tuple[str, int] | None
    """How int weights are packed: "gptq", "awq" or "compressed-tensors", and their bits."""

    def __str__(self) -> str:
        return (
            f"{self.num_experts} experts, hidden size {self.hidden}, "
            f"{_INNER[self.family]} {self.inner}"
        )

    def shapes(self, found: re.Match[str], dtype: str) -> list[tuple[int, ...]] | None:
        """The shapes that a tensor of this name and dtype may have; None: of no known layout."""
        matrix, ending = found["matrix"], found["ending"]
        rows, columns = (self.hidden, self.inner) if matrix in _DOWN else (self.inner, self.hidden)
        if found["expert"] is None:
            rows *= 1 if matrix in _DOWN else 2
            return self._of_all(matrix, ending, dtype, rows, columns)
        if matrix == "gate_up_proj":
            return None
        if ending == ".weight" and dtype in _PLAIN:
            return [(rows, columns)]
        if self.packed is None or dtype != "I32":
            return None
        method, bits = self.packed
        match method, ending:
            case "compressed-tensors", ".weight_packed":
                return [(rows, math.ceil(columns * bits / 32))]
            case "gptq", ".qweight":
                return [(math.ceil(columns * bits / 32), rows)]
            case "awq", ".qweight":
                return [(columns, math.ceil(rows * bits / 32))]
        return None

    def _of_all(
        self, matrix: str, ending: str, dtype: str, rows: int, columns: int
    ) -> list[tuple[int, ...]] | None:
        """The same for a tensor that holds this matrix of all experts."""
        num_experts = self.num_experts
        if matrix not in ("gate_up_proj", "down_proj"):
            return None
        if self.family != "gpt_oss":
            # Written so by newer transformers, in either order.
            either: list[tuple[int, ...]] = [
                (num_experts, rows, columns),
                (num_experts, columns, rows),
            ]
            return either if ending == "" and dtype in _PLAIN else None
        blocks = math.ceil(columns / _MX_BLOCK)
        match ending:
            case "" if dtype in _PLAIN:
                return [(num_experts, columns, rows)]
            case "_blocks" if dtype == "U8":
                return [
                    (num_experts, rows, blocks, _MX_BLOCK // 2),
                    (num_experts, rows, blocks * _MX_BLOCK // 2),
                ]
            case "_scales" if dtype == "U8":
                return [(num_experts, rows, blocks)]
            case "_bias" if dtype in _PLAIN:
                return [(num_experts, rows)]
        return None


def misfit(folder: Path, config: Mapping[str, Any]) -> str | None:
    """What of a folder's experts is not as its config declares, as a sentence; None: nothing that
    is known to be wrong.

    Args:
        config: that of a text model, as in `config.json`.
    """
    declared = _declared(config)
    if declared is None:
        return None
    files, all_there = files_read(folder)
    experts: dict[int, set[int]] = {}
    for path in files:
        for found, dtype, shape in _expert_tensors(path, declared.num_layers):
            if found["expert"] is not None:
                experts.setdefault(int(found["layer"]), set()).add(int(found["expert"]))
            expected = declared.shapes(found, dtype)
            if expected is not None and shape not in expected:
                return (
                    f"{found[0]!r} in {path.name} is {str(list(shape))[:80]}, but config.json "
                    f"({declared}) makes it {list(expected[0])}; {_REMEDY}"
                )
    for layer, ids in sorted(experts.items()):
        if max(ids) >= declared.num_experts:
            return _other_number(layer, max(ids) + 1, declared)
    # One layer that lacks some is a damaged checkpoint, which the loader names by the tensor.
    counts = {max(ids) + 1 if len(ids) == max(ids) + 1 else 0 for ids in experts.values()}
    if all_there and len(counts) == 1 and 0 < max(counts) < declared.num_experts:
        return _other_number(min(experts), max(counts), declared)
    return None


def _other_number(layer: int, number: int, declared: _Declared) -> str:
    return (
        f"layer {layer} has {number} experts in the checkpoint, but config.json declares "
        f"{declared.num_experts}; {_REMEDY}"
    )


def _expert_tensors(
    path: Path, num_layers: int
) -> Iterator[tuple[re.Match[str], str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of experts; layers past the last predict drafts."""
    for name, tensor in (read_header(path) or {}).items():
        found = _NAME.fullmatch(name)
        if found is None or int(found["layer"]) >= num_layers:
            continue
        dtype, shape = tensor.get("dtype"), tensor.get("shape")
        if isinstance(dtype, str) and isinstance(shape, list):
            yield found, dtype, tuple(shape)


def _declared(config: Mapping[str, Any]) -> _Declared | None:
    """What the config says of its experts; None where it does not say all, or says it twice."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _INNER:
        return None
    numbers = {config[name] for name in NUM_EXPERTS if _is_count(config.get(name))}
    sizes = [config.get(name) for name in ("hidden_size", _INNER[family], "num_hidden_layers")]
    if len(numbers) != 1 or not all(_is_count(size) for size in sizes):
        return None
    hidden, inner, num_layers = (int(size) for size in sizes if isinstance(size, int))
    return _Declared(family, numbers.pop(), hidden, inner, num_layers, _packed(config))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _packed(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """How the config says that int weights are packed, if it says one thing of all of them."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method, bits = quant_method(quantization), quantization.get("bits")
    match method:
        case "gptq":
            usual = quantization.get("checkpoint_format") in (None, "gptq", "gptq_v2")
            if not usual or quantization.get("dynamic"):
                return None
        case "awq":
            if str(quantization.get("version", "gemm")).lower() != "gemm":
                return None
        case "compressed-tensors":
            groups = quantization.get("config_groups")
            if not isinstance(groups, dict) or len(groups) != 1:
                return None
            (group,) = groups.values()
            weights = group.get("weights") if isinstance(group, dict) else None
            bits = weights.get("num_bits") if isinstance(weights, dict) else None
            named = [part.get("format") for part in (quantization, group) if isinstance(part, dict)]
            if any(name not in (None, "pack-quantized") for name in named):
                return None
        case _:
            return None
    return (str(method), bits) if type(bits) is int and bits in (4, 8) else None
