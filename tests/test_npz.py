"""The npz reader refuses what is damaged, pickled or too large, before it takes memory for it."""

import io
import itertools
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from predictors.npz import ArraySpec, NpzError, read_arrays, write_arrays

ANY_ROW = ArraySpec(shape=(None,))


def _npy(array: np.ndarray, *, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def _header(text: str, data: bytes = b"") -> bytes:
    encoded = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(encoded)) + encoded + data


def _archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
    ],
    ids=["int16", "fortran", "big-endian", "uint8"],
)
@pytest.mark.parametrize("compressed", [True, False])
def test_every_integer_array_reads_as_it_was_written(
    tmp_path: Path, array: np.ndarray, compressed: bool
) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if compressed else np.savez)(path, a=array)
    read = read_arrays(path, {"a": ArraySpec(shape=(2, None))})["a"]
    np.testing.assert_array_equal(read, array)


def test_scalar_is_an_array_of_no_dimensions(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", a=np.array(7))
    assert int(read_arrays(tmp_path / "a.npz", {"a": ArraySpec(shape=())})["a"]) == 7


def test_other_arrays_are_not_looked_at(tmp_path: Path) -> None:
    path = _archive(
        tmp_path / "a.npz",
        {"a.npy": _npy(np.arange(3)), "b.npy": b"rubbish", "notes.txt": b"hello"},
    )
    optional = ArraySpec(shape=(None,), required=False)
    assert list(read_arrays(path, {"a": ANY_ROW, "c": optional})) == ["a"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"", "truncated or not an npy array"),
        (b"\x93NUMPX\x01\x00\x10\x00" + b" " * 16, "not an npy array"),
        (_npy(np.arange(9))[:-1], "truncated: 71 of 72 bytes"),
        (_npy(np.arange(9)) + b"!", "more data than its header says"),
        (_npy(np.arange(9), version=(2, 0)), "npy version 2.0, expected 1.0"),
        (_npy(np.arange(9), version=(3, 0)), "npy version 3.0"),
        (b"\x93NUMPY\x01\x00\xff\xff", "header of 65535 bytes, more than 4096"),
        (_header("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}"), "pickled objects"),
        (_npy(np.arange(3.0)), "must be integers, got float64"),
        (_npy(np.array([True])), "must be integers, got bool"),
        (_npy(np.array(["a"])), "must be integers, got <U1"),
        (_npy(np.zeros(3, dtype="m8[s]")), "must be integers, got timedelta64"),
        (_npy(np.zeros((3, 2), dtype=int)), r"shape \[3, 2\], expected \[any\]"),
        (_npy(np.zeros(0, dtype=int)), r"is empty: shape \[0\]"),
        (_npy(np.array([3, -1, 5])), "holds -1, which is out of range: 0"),
        (_header("not a dict"), "malformed header"),
        (_header("[1, 2]"), "malformed header"),
        (_header("{'descr': '<i8', 'shape': (3,)}"), "malformed header"),
        (_header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (3,)}"), "malformed"),
        (_header("{'descr': '<i8', 'fortran_order': False, 'shape': 3}"), "malformed header"),
        (_header("{'descr': '<i8', 'fortran_order': False, 'shape': (1.5,)}"), "malformed"),
        (_header("{'descr': '<i8', 'fortran_order': False, 'shape': (-3,)}"), "negative size"),
        (_header("(" * 2000), "malformed header"),
        (_header("__import__('os').abort()"), "malformed header"),
    ],
)
def test_damaged_array_is_refused_with_its_name(
    tmp_path: Path, member: bytes, message: str
) -> None:
    path = _archive(tmp_path / "a.npz", {"a.npy": member})
    with pytest.raises(NpzError, match=message) as e:
        read_arrays(path, {"a": ANY_ROW})
    assert str(path) in str(e.value)
    assert "'a'" in str(e.value)


def test_a_message_holds_little_of_a_damaged_file(tmp_path: Path) -> None:
    path = _archive(tmp_path / "a.npz", {"a.npy": _npy(np.arange(9000))})
    data = bytearray(path.read_bytes())
    data[26:28] = b"\xff\xff"  # so long is the member's name, by its own header
    path.write_bytes(data)
    with pytest.raises(NpzError, match="damaged or not an npz file") as e:
        read_arrays(path, {"a": ANY_ROW})
    assert len(str(e.value)) < len(str(path)) + 300


def test_pickle_is_never_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(NpzError, match="pickled objects, which are never loaded"):
        read_arrays(tmp_path / "a.npz", {"a": ANY_ROW})


def test_missing_and_doubled_arrays_are_refused(tmp_path: Path) -> None:
    path = _archive(tmp_path / "a.npz", {"b.npy": _npy(np.arange(3))})
    with pytest.raises(NpzError, match="has no array 'a'"):
        read_arrays(path, {"a": ANY_ROW})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("b.npy", _npy(np.arange(4)))
    with pytest.raises(NpzError, match="has 'b' more than once"):
        read_arrays(path, {"b": ANY_ROW})


def test_values_above_the_bound_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", a=np.array([5, 6]))
    with pytest.raises(NpzError, match="holds 6, which is out of range: 0 to 5"):
        read_arrays(tmp_path / "a.npz", {"a": ArraySpec(shape=(2,), highest=5)})


def test_claimed_sizes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    claim = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000, 1000000, 1000000)}"
    path = _archive(tmp_path / "a.npz", {"a.npy": _header(claim)})
    with pytest.raises(NpzError, match="claims 8000000000000000000 bytes, more than the"):
        read_arrays(path, {"a": ArraySpec(shape=(None, None, None))})


def test_the_limit_holds_for_all_arrays_together(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(1000, np.int8), b=np.zeros(1000, np.int8))
    specs = {"a": ANY_ROW, "b": ANY_ROW}
    assert len(read_arrays(path, specs, max_bytes=2000)) == 2
    with pytest.raises(NpzError, match="'b' claims 1000 bytes, more than the 999 bytes allowed"):
        read_arrays(path, specs, max_bytes=1999)


@pytest.mark.parametrize("content", [b"", b"PK", b"text, not an archive", b"\x93NUMPY" * 40])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(NpzError, match=r"a\.npz is damaged or not an npz file"):
        read_arrays(path, {"a": ANY_ROW})


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_no_file_is_refused_unread(path: str) -> None:
    with pytest.raises(NpzError, match="is not a file"):
        read_arrays(path, {"a": ANY_ROW})


def test_a_file_cut_or_changed_anywhere_is_refused_or_reads_right(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    array = np.arange(500, dtype=np.int16)
    np.savez_compressed(path, a=array)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(NpzError):
            read_arrays(path, {"a": ANY_ROW})
    for at, flip in itertools.product(range(len(whole)), (0x01, 0x5A, 0xFF)):
        changed = bytearray(whole)
        changed[at] ^= flip
        path.write_bytes(changed)
        try:
            read = read_arrays(path, {"a": ANY_ROW})["a"]
        except NpzError:
            continue
        np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_unpacks_without_bound_is_refused(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.npy", _npy(np.arange(3)))
    with pytest.raises(NpzError, match="'a' must be stored or deflated"):
        read_arrays(path, {"a": ANY_ROW})


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "a.npz", {"a": ANY_ROW})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_arrays(path, a=np.arange(3))

    class Unwritable:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_arrays(path, a=Unwritable())  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
    assert read_arrays(path, {"a": ANY_ROW})["a"].tolist() == [0, 1, 2]


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    with pytest.raises(NpzError, match="no plain file"):
        write_arrays(pipe, a=np.arange(3))
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe.npz"]


def test_a_file_is_made_as_the_umask_says_without_touching_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:  # other threads make files meanwhile
            patched.setattr(os, "umask", lambda _: pytest.fail("the umask is the whole process's"))
            write_arrays(tmp_path / "a.npz", a=np.arange(3))
    finally:
        os.umask(before)
    assert (tmp_path / "a.npz").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, target in (("old", "there/old.npz"), ("new", "there/new.npz")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "there" / "old.npz").write_bytes(b"")
    for name in ("old", "new"):
        write_arrays(tmp_path / name, a=np.arange(3))
        assert (tmp_path / name).is_symlink()
        assert read_arrays(tmp_path / "there" / f"{name}.npz", {"a": ANY_ROW})["a"].size == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "there"]


def test_a_link_to_itself_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "loop.npz"
    path.symlink_to(path)
    write_arrays(path, a=np.arange(3))
    assert read_arrays(path, {"a": ANY_ROW})["a"].size == 3
