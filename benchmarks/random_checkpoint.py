"""Writes checkpoints of Qwen3-MoE's layout with random numbers, as fast as the disk takes them.

Needs numpy alone. A layer is one file and one buffer of random bits; masks make numbers of sensible
size of them, in place: bf16 and fp32 keep their sign and mantissa and are given one exponent, fp8
loses the top bit of its exponent, which leaves magnitudes below 2 and no NaN, four-bit integers are
random as they are. So all experts differ, and activations stay near 1.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GROUP, BLOCK = 128, 128
INDEX = "model.safetensors.index.json"

_RMS = 1.53  # of magnitudes that are uniform in [1, 2)
_INT4_RMS, _FP8_RMS = 4.6, 0.6  # of -8 to 7, and of what the mask leaves of fp8
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its header, and what makes numbers of random bits, in place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    finish: Callable[[np.ndarray], None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def _exponent(size: float) -> int:
    """The biased exponent that gives numbers of about that size."""
    return 127 + round(math.log2(size / _RMS))


def _bf16(name: str, shape: tuple[int, ...], size: float, *, signed: bool = True) -> Entry:
    keep, exponent = (0x807F if signed else 0x007F), _exponent(size) << 7

    def finish(raw: np.ndarray) -> None:
        bits = raw.view(np.uint16)
        bits &= np.uint16(keep)
        bits |= np.uint16(exponent)

    return Entry(name, "BF16", shape, finish)


def _ones(name: str, *shape: int) -> Entry:
    return Entry(name, "BF16", shape, lambda raw: raw.view(np.uint16).fill(0x3F80))


def _scales_f32(name: str, shape: tuple[int, ...], size: float) -> Entry:
    exponent = _exponent(size) << 23

    def finish(raw: np.ndarray) -> None:
        bits = raw.view(np.uint32)
        bits &= np.uint32(0x007FFFFF)
        bits |= np.uint32(exponent)

    return Entry(name, "F32", shape, finish)


def _fp8(name: str, shape: tuple[int, ...]) -> Entry:
    def finish(raw: np.ndarray) -> None:
        raw &= np.uint8(0xBF)

    return Entry(name, "F8_E4M3", shape, finish)


def _matrix_bf16(name: str, rows: int, columns: int) -> list[Entry]:
    return [_bf16(f"{name}.weight", (rows, columns), columns**-0.5)]


def _matrix_fp8(name: str, rows: int, columns: int) -> list[Entry]:
    blocks = (rows // BLOCK, columns // BLOCK)
    return [
        _fp8(f"{name}.weight", (rows, columns)),
        _scales_f32(f"{name}.weight_scale", blocks, columns**-0.5 / _FP8_RMS),
    ]


def _matrix_int4(name: str, rows: int, columns: int) -> list[Entry]:
    shape = np.array([rows, columns], np.int64)

    def shape_itself(raw: np.ndarray) -> None:
        raw.view(np.int64)[:] = shape

    groups = (rows, columns // GROUP)
    size = columns**-0.5 / _INT4_RMS
    return [
        Entry(f"{name}.weight_packed", "I32", (rows, columns // 8), lambda raw: None),  # noqa: ARG005
        _bf16(f"{name}.weight_scale", groups, size, signed=False),
        Entry(f"{name}.weight_shape", "I64", (2,), shape_itself),
    ]


FORMATS: dict[str, Callable[[str, int, int], list[Entry]]] = {
    "bf16": _matrix_bf16,
    "fp8": _matrix_fp8,
    "int4": _matrix_int4,
}
"""One expert's matrix [out, in] in each format: bf16, fp8 in blocks of 128 x 128 with fp32 scales,
packed 4-bit integers with a bf16 scale per 128 of a row (compressed-tensors)."""


def layer_entries(config: dict[str, Any], index: int, experts: str) -> Iterator[Entry]:
    """The tensors of one decoder layer."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head, heads = config["head_dim"], config["num_attention_heads"]
    key_value = config["num_key_value_heads"] * head
    at = f"model.layers.{index}"
    matrix = FORMATS[experts]
    for expert in range(config["num_experts"]):
        of = f"{at}.mlp.experts.{expert}"
        yield from matrix(f"{of}.gate_proj", inner, hidden)
        yield from matrix(f"{of}.up_proj", inner, hidden)
        yield from matrix(f"{of}.down_proj", hidden, inner)
    yield from _matrix_bf16(f"{at}.self_attn.q_proj", heads * head, hidden)
    yield from _matrix_bf16(f"{at}.self_attn.k_proj", key_value, hidden)
    yield from _matrix_bf16(f"{at}.self_attn.v_proj", key_value, hidden)
    yield from _matrix_bf16(f"{at}.self_attn.o_proj", hidden, heads * head)
    yield from _matrix_bf16(f"{at}.mlp.gate", config["num_experts"], hidden)
    yield _ones(f"{at}.self_attn.q_norm.weight", head)
    yield _ones(f"{at}.self_attn.k_norm.weight", head)
    yield _ones(f"{at}.input_layernorm.weight", hidden)
    yield _ones(f"{at}.post_attention_layernorm.weight", hidden)


def other_entries(config: dict[str, Any]) -> Iterator[Entry]:
    """The tensors outside the layers."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield _bf16("model.embed_tokens.weight", (vocabulary, hidden), 1.0)
    yield _ones("model.norm.weight", hidden)
    yield _bf16("lm_head.weight", (vocabulary, hidden), 3 * hidden**-0.5)


def write_checkpoint(target: Path, config: dict[str, Any], experts: str) -> int:
    """Write `config` and random weights into `target`, unless that very checkpoint is there.

    Args:
        config: what config.json holds, of model_type qwen3_moe.
        experts: a key of `FORMATS`, which `config`'s quantization_config must describe.

    Returns:
        Bytes of its tensors.

    Raises:
        ValueError: an unknown format, another model, or sizes that its blocks do not divide.
        OSError: the disk has no room for it.
    """
    _check(config, experts)
    text = json.dumps(config, indent=1)
    config_file, index_file = target / "config.json", target / INDEX
    if config_file.is_file() and config_file.read_text() == text:
        return int(json.loads(index_file.read_text())["metadata"]["total_size"])
    target.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    layers = config["num_hidden_layers"]
    files = {
        f"model-{number + 1:05}-of-{layers + 1:05}.safetensors": entries
        for number, entries in enumerate(
            [
                list(other_entries(config)),
                *(list(layer_entries(config, index, experts)) for index in range(layers)),
            ]
        )
    }
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    free = shutil.disk_usage(target).free
    if total > free:
        raise OSError(f"{target} has {free / 1e9:.1f} GB free, the checkpoint takes {total / 1e9}")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda item: _write_file(target / item[0], item[1]), files.items()):
            pass
    names = {entry.name: file for file, entries in files.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": names}
    index_file.write_text(json.dumps(index))
    config_file.write_text(text)  # last, so that half a checkpoint is none
    return total


def _check(config: dict[str, Any], experts: str) -> None:
    if experts not in FORMATS:
        raise ValueError(f"unknown format {experts!r}; choose one of {', '.join(FORMATS)}")
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"only qwen3_moe can be written, not {config.get('model_type')!r}")
    for name in ("hidden_size", "moe_intermediate_size"):
        if experts != "bf16" and config[name] % BLOCK:
            raise ValueError(f"{name} {config[name]} is no multiple of {BLOCK}, which {experts} is")


def _write_file(path: Path, entries: list[Entry]) -> None:
    """One safetensors file: the length of a JSON header, the header, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    random = np.random.Generator(np.random.SFC64(zlib.crc32(path.name.encode())))
    buffer = random.integers(0, 2**64, -(-end // 8), np.uint64).view(np.uint8)[:end]
    for entry in entries:
        start, stop = header[entry.name]["data_offsets"]
        entry.finish(buffer[start:stop])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(buffer.data)
