"""The safetensors files of a model folder: their headers, and which of them vLLM reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"

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
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(size, _MOST_HEADER_BYTES):
            return None
        try:
            header = json.loads(file.read(start - 8))
            tensors = {name: of for name, of in header.items() if name != "__metadata__"}
            ends = [of["data_offsets"][1] for of in tensors.values()]
            expected = start + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
    return tensors if expected == size else None


def damaged_file(folder: Path) -> str | None:
    """The first safetensors file in a folder whose size is not what its header says, or None."""
    return next(
        (path.name for path in sorted(folder.glob("*.safetensors")) if read_header(path) is None),
        None,
    )


def files_read(folder: Path) -> tuple[list[Path], bool]:
    """The safetensors files that vLLM's default loader reads, and whether surely all are there.

    Where an index names files, only those are read. Files of Mistral's own layout come before all
    others; of them nothing is known here.
    """
    found = sorted(folder.glob("*.safetensors"))
    if any(path.name.startswith("consolidated") for path in found):
        return [], False
    index = folder / INDEX
    if not index.is_file():
        return found, len(found) == 1
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [], False
    read = [path for path in found if path.name in named]
    return read, len(read) == len(named)
