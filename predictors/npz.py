"""Reads and writes npz files of integer arrays without trusting them.

Nothing is unpickled, and nothing is decompressed before the array's header has been read and its
size checked, so a small file cannot claim a large memory.
"""

import ast
import math
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_BYTES = 1 << 30
_MAX_HEADER_BYTES = 4096
_MAX_MEMBERS = 1024
_MOST_QUOTED = 200
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others unpack more than is asked for
# How zipfile reports broken, encrypted (RuntimeError) or foreign archives, offsets that lie outside
# the file among them.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    OSError,
)


class NpzError(ValueError):
    """A file that cannot be used; the message names the file, the array and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """What one array of a file must be. All arrays are integers."""

    shape: tuple[int | None, ...]
    """Size of each dimension; None leaves it open."""
    required: bool = True
    lowest: int = 0
    highest: int | None = None
    """Bounds of the values, both included."""


def read_arrays(
    path: Path | str, specs: Mapping[str, ArraySpec], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> dict[str, npt.NDArray[np.integer]]:
    """The arrays of `specs` that the file has; whatever else it holds is not looked at.

    Raises:
        NpzError: not an npz file, truncated, pickled, of another type or shape, values out of
            bounds, or `max_bytes` exceeded by the arrays together.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise NpzError(f"{path} is not a file")  # a device has no end
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read_members(path, archive, specs, max_bytes)
        except NpzError:
            raise
        except _DAMAGE as e:
            # What zipfile says may quote the file, at length.
            said = str(e)[:_MOST_QUOTED]
            raise NpzError(f"{path} is damaged or not an npz file: {said}") from e


def write_arrays(path: Path | str, **arrays: npt.NDArray[np.integer]) -> None:
    """Write a compressed npz beside `path`, then move it there, so that no reader sees a part.

    Raises:
        NpzError: what is there is no plain file.
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays
    if path.exists() and not path.is_file():
        raise NpzError(f"{path} is no plain file, and is not replaced")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = beside.open("xb")
    try:
        with file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        beside.replace(path)
    except BaseException:
        beside.unlink()
        raise


def _read_members(
    path: Path, archive: zipfile.ZipFile, specs: Mapping[str, ArraySpec], max_bytes: int
) -> dict[str, npt.NDArray[np.integer]]:
    if len(archive.infolist()) > _MAX_MEMBERS:
        raise NpzError(f"{path} has more than {_MAX_MEMBERS} members")
    names = archive.namelist()
    arrays = {}
    budget = max_bytes
    for name, spec in specs.items():
        member = f"{name}.npy"
        if member not in names:
            if spec.required:
                raise NpzError(f"{path} has no array {name!r}")
            continue
        if names.count(member) > 1:
            raise NpzError(f"{path} has {name!r} more than once")
        if archive.getinfo(member).compress_type not in _COMPRESSION:
            raise NpzError(f"{path}: {name!r} must be stored or deflated, as numpy writes it")
        with archive.open(member) as stream:
            arrays[name] = _read_array(f"{path}: {name!r}", stream, spec, budget)
        budget -= arrays[name].nbytes
    return arrays


def _read_array(
    where: str, stream: IO[bytes], spec: ArraySpec, budget: int
) -> npt.NDArray[np.integer]:
    shape, fortran_order, dtype = _read_header(where, stream)
    if dtype.hasobject:
        raise NpzError(f"{where} holds pickled objects, which are never loaded")
    if dtype.kind not in "iu":
        raise NpzError(f"{where} must be integers, got {dtype}")
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in spec.shape) + "]"
    if len(shape) != len(spec.shape) or any(
        want not in (None, have) for want, have in zip(spec.shape, shape, strict=True)
    ):
        raise NpzError(f"{where} has shape {list(shape)}, expected {wanted}")
    if 0 in shape:
        raise NpzError(f"{where} is empty: shape {list(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > budget:
        raise NpzError(f"{where} claims {nbytes} bytes, more than the {budget} bytes allowed")
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise NpzError(f"{where} is truncated: {len(data)} of {nbytes} bytes")
    if stream.read(1):
        raise NpzError(f"{where} holds more data than its header says")
    flat = np.frombuffer(data, dtype=dtype)
    array = flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
    low, high = int(array.min()), int(array.max())
    if low < spec.lowest or (spec.highest is not None and high > spec.highest):
        bound = "" if spec.highest is None else f" to {spec.highest}"
        value = low if low < spec.lowest else high
        raise NpzError(f"{where} holds {value}, which is out of range: {spec.lowest}{bound}")
    return array


def _read_header(
    where: str, stream: IO[bytes]
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    prefix = stream.read(10)
    if len(prefix) < 10 or not prefix.startswith(b"\x93NUMPY"):
        raise NpzError(f"{where} is truncated or not an npy array")
    if prefix[6:8] != b"\x01\x00":
        # Later versions exist for structured types, with headers of up to 4 GiB.
        raise NpzError(f"{where} has npy version {prefix[6]}.{prefix[7]}, expected 1.0")
    size = int.from_bytes(prefix[8:10], "little")
    if size > _MAX_HEADER_BYTES:
        raise NpzError(f"{where} has a header of {size} bytes, more than {_MAX_HEADER_BYTES}")
    try:
        header = ast.literal_eval(stream.read(size).decode("latin-1"))
        shape, fortran_order = header["shape"], header["fortran_order"]
        dtype = np.dtype(header["descr"])
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as e:
        raise NpzError(f"{where} has a malformed header: {e!r}") from e
    if not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        raise NpzError(f"{where} has a malformed header: shape {shape!r}")
    if any(n < 0 for n in shape):
        raise NpzError(f"{where} has a negative size: shape {list(shape)}")
    return shape, bool(fortran_order), dtype
