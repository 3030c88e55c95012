"""The safetensors files of a model folder: their headers, and which of them vLLM reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"

GGUF_IS_NOT_READ = "GGUF is not read; take the model's safetensors files"

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*/*.safetensors")
"""Where vLLM's default loader, or a model's own, may find weights."""
_MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format."""


def read_header(path: Path) -> Mapping[str, Any] | None:
    """What a file says of its tensors, by their names; None: its size is not what that says.

    Of each tensor only `data_offsets` was looked at; its dtype and shape may be anything.
    """
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if length > _MOST_HEADER_BYTES or start > size:
            return None
        try:
            header = json.loads(file.read(length))
            tensors = {name: of for name, of in header.items() if name != "__metadata__"}
            ends = [of["data_offsets"][1] for of in tensors.values()]
            expected = start + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
    return tensors if expected == size else None


def damaged_file(folder: Path) -> str | None:
    """The first safetensors file that vLLM reads whose size is not what its header says, or None.

    Other files in the folder may be anything.
    """
    found = _found(folder)
    own_layout = [path for path in found if _is_consolidated(path)]
    named = None if own_layout else _named_in_index(folder)
    read = own_layout or [path for path in found if named is None or path.name in named]
    return next((path.name for path in read if read_header(path) is None), None)


def gguf_hint(folder: Path) -> str:
    """What to do instead, where a folder has the model as GGUF; else empty."""
    return f"; {GGUF_IS_NOT_READ}" if next(folder.glob("*.gguf"), None) else ""


def absent_files(folder: Path) -> str | None:
    """Which files with weights a folder lacks that vLLM would look for, in a few words; or None."""
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        return f"no weights (*.safetensors){gguf_hint(folder) or '; download them'}"
    found = _found(folder)
    if not found or any(map(_is_consolidated, found)):
        return None
    absent = sorted((_named_in_index(folder) or set()) - {path.name for path in found})
    if not absent:
        return None
    more = len(absent) - 1
    others = f" and {more} more file{'s' if more > 1 else ''}" if more else ""
    return f"no {absent[0]}{others} of those that {INDEX} names; download what is missing"


def files_read(folder: Path) -> tuple[Sequence[Path], bool]:
    """The safetensors files that vLLM's default loader reads, and whether surely all are there.

    Where an index names files, only those are read. Files of Mistral's own layout come before all
    others; of them nothing is known here.
    """
    found = _found(folder)
    if any(map(_is_consolidated, found)):
        return [], False
    if not (folder / INDEX).is_file():
        return found, len(found) == 1
    named = _named_in_index(folder)
    if named is None:
        return [], False
    read = [path for path in found if path.name in named]
    return read, len(read) == len(named)


def in_mistrals_layout(folder: Path) -> bool:
    """Whether vLLM reads `params.json` and not `config.json`."""
    return (folder / "params.json").is_file() and any(map(_is_consolidated, _found(folder)))


def _found(folder: Path) -> Sequence[Path]:
    """As vLLM's glob finds them: without names that start with a dot, as macOS leaves them behind
    for every file that it copies."""
    found = folder.glob("*.safetensors")
    return sorted(path for path in found if not path.name.startswith("."))


def _is_consolidated(path: Path) -> bool:
    return path.name.startswith("consolidated")


def _named_in_index(folder: Path) -> set[str] | None:
    """Names of files in the index; None: there is none, or it cannot be read."""
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
        named = set(json.loads(text)["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return named if all(isinstance(name, str) for name in named) else None
