"""Limits of host memory, on made-up kernel files; pages and page-locking, on a made-up CUDA."""

import ctypes
import gc
import mmap
import os
import re
import resource
from pathlib import Path

import pytest

from prefetch_runtime import pinned
from prefetch_runtime.cudart import CudaError
from prefetch_runtime.host_memory import (
    HostMemoryError,
    MemoryLimit,
    check_room,
    gib,
    lock_limit,
    memory_limits,
)
from prefetch_runtime.pinned import Pages, Pinner

GIB = 1 << 30
MIB = 1 << 20


class FakePages:
    """Registers up to `limit` bytes, or refuses."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.registered.values()) + nbytes > self.limit:
            raise CudaError("cudaHostRegister", 2, "cudaErrorMemoryAllocation (out of memory)")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        if self.registered.pop(address, None) is None:
            raise CudaError("cudaHostUnregister", 713, "cudaErrorHostMemoryNotRegistered (no)")

    def device_pointer(self, address: int) -> int:
        return address + 1


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of a page-aligned range that are in memory, as the kernel sees it."""
    pages = -(-nbytes // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), seen):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in seen) * mmap.PAGESIZE


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A machine with 8 GiB available and no cgroups."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * MIB} kB\n"})
    return tmp_path


def limits(kernel: Path) -> dict[str, int]:
    found = memory_limits(kernel / "proc", kernel / "cgroup")
    return {limit.name.replace(f"{kernel}/", ""): limit.available_bytes for limit in found}


def test_available_memory_is_a_limit(kernel: Path) -> None:
    assert limits(kernel) == {"MemAvailable": 8 * GIB}


def test_every_level_of_cgroup_v2_is_a_limit_and_clean_file_pages_are_free(kernel: Path) -> None:
    write(
        kernel,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "cgroup/pod/container/memory.max": "max\n",
            "cgroup/pod/container/memory.current": f"{GIB}\n",
            "cgroup/pod/memory.max": f"{4 * GIB}\n",
            "cgroup/pod/memory.current": f"{3 * GIB}\n",
            "cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
        },
    )
    assert limits(kernel) == {
        "MemAvailable": 8 * GIB,
        "cgroup memory.max of cgroup/pod": 5 * GIB // 2,
    }


def test_cgroup_v1_is_a_limit_and_its_huge_number_is_none(kernel: Path) -> None:
    write(
        kernel,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "5\n",
            "cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "cgroup/memory/job/memory.stat": f"total_inactive_file {GIB // 4}\ninactive_file 1\n",
        },
    )
    assert limits(kernel) == {
        "MemAvailable": 8 * GIB,
        "cgroup memory.limit_in_bytes of cgroup/memory/job": 5 * GIB // 4,
    }


def test_a_container_that_sees_its_group_as_the_mount_is_limited_by_it(kernel: Path) -> None:
    write(
        kernel,
        {
            "proc/self/cgroup": "0::/docker/outside/path\n",
            "cgroup/memory.max": f"{GIB}\n",
            "cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert limits(kernel)["cgroup memory.max of cgroup"] == 0


def test_the_limits_of_this_machine_can_be_read() -> None:
    assert all(limit.available_bytes >= 0 and limit.remedy for limit in memory_limits())


def test_too_much_names_the_amounts_the_tightest_limit_and_the_remedy() -> None:
    found = [MemoryLimit("wide", 8 * GIB, "x"), MemoryLimit("tight", 2 * GIB, "open the window")]
    check_room(2 * GIB, found, "the experts")
    with pytest.raises(
        HostMemoryError,
        match=re.escape(
            "the experts need 2.50 GiB of host memory, but only 2.00 GiB are left by tight; "
            "open the window"
        ),
    ):
        check_room(5 * GIB // 2, found, "the experts")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(3 * GIB // 2, "1.50 GiB"), (3 * MIB, "3.00 MiB"), (0, "0.00 MiB")]
)
def test_sizes_read_well(num_bytes: int, text: str) -> None:
    assert gib(num_bytes) == text


@pytest.mark.parametrize(
    ("soft", "uid", "capabilities", "expected"),
    [
        (8 * MIB, 1000, 0, 8 * MIB),
        (8 * MIB, 0, 0, None),
        (8 * MIB, 1000, 1 << 14, None),
        (8 * MIB, 1000, 1 << 13, 8 * MIB),
        (resource.RLIM_INFINITY, 1000, 0, None),
    ],
    ids=["user", "root", "CAP_IPC_LOCK", "other capability", "unlimited"],
)
def test_the_lock_limit_binds_only_whom_it_should(
    soft: int,
    uid: int,
    capabilities: int,
    expected: int | None,
    kernel: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    write(kernel, {"proc/self/status": f"Name: x\nCapEff:\t{capabilities:016x}\n"})
    assert lock_limit(kernel / "proc") == expected


def test_a_lock_limit_that_is_enforced_is_found_before_loading() -> None:
    api = FakePages(limit=MIB)
    with pytest.raises(
        HostMemoryError,
        match=r"need 3\.00 GiB of page-locked memory, but RLIMIT_MEMLOCK allows 1\.00 MiB.*"
        r"ulimit -l unlimited.*memlock=-1.*CAP_IPC_LOCK",
    ):
        Pinner(api).check_lock_limit(3 * GIB, MIB)
    assert not api.registered


def test_a_lock_limit_that_is_enforced_refuses_every_time() -> None:
    pinner = Pinner(FakePages(limit=MIB))
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="RLIMIT_MEMLOCK"):
            pinner.check_lock_limit(3 * GIB, MIB)


@pytest.mark.parametrize("limit", [MIB, None, 4 * GIB], ids=["not enforced", "none", "wide"])
def test_a_lock_limit_that_does_not_bind_stops_nobody(limit: int | None) -> None:
    api = FakePages()
    Pinner(api).check_lock_limit(3 * GIB, limit)
    assert not api.registered


def test_a_large_lock_limit_is_not_tried_but_told(caplog: pytest.LogCaptureFixture) -> None:
    Pinner(FakePages(limit=0)).check_lock_limit(3 * GIB, 2 * GIB)
    assert "RLIMIT_MEMLOCK is 2.00 GiB, less than the 3.00 GiB" in caplog.text


def test_untouched_pages_take_no_memory() -> None:
    pages = Pages(64 * MIB)
    assert resident_bytes(pages.address, pages.nbytes) == 0
    pages.tensor[: 10 * MIB] = 1
    assert 10 * MIB <= resident_bytes(pages.address, pages.nbytes) <= 12 * MIB
    assert not pages.tensor[-MIB:].any()


def test_pages_start_on_a_huge_page() -> None:
    assert Pages(5 * MIB).address % (2 * MIB) == 0


def test_a_view_outlives_its_pages_and_the_memory_goes_with_the_last_view() -> None:
    pages = Pages(32 * MIB)
    pages.tensor.fill_(7)
    address, view = pages.address, pages.tensor[5:1005].view(10, 100)
    del pages
    gc.collect()
    assert (view == 7).all()
    del view
    gc.collect()
    with pytest.raises(OSError, match="mincore"):  # nothing is mapped there any more
        resident_bytes(address, 32 * MIB)


def test_impossible_amounts_are_an_error_of_ours() -> None:
    with pytest.raises(HostMemoryError, match=r"refuses .* GiB of address space"):
        Pages(1 << 62)


def vm_flags(address: int) -> str | None:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", first):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line
    return None


def test_locked_pages_stay_out_of_forked_children() -> None:
    pages = Pages(2 * MIB)
    pages.tensor.fill_(1)
    if vm_flags(pages.address) is None:
        pytest.skip("this kernel does not show VmFlags")
    assert " dc" not in str(vm_flags(pages.address))
    Pinner(FakePages()).pin(pages, "x", 0)
    assert " dc" in str(vm_flags(pages.address))


def test_what_is_pinned_is_counted_and_given_back() -> None:
    api = FakePages()
    pinner = Pinner(api)
    first, second = Pages(MIB), Pages(2 * MIB)
    assert pinner.pin(first, "a", 3 * MIB) == first.address + 1
    pinner.pin(second, "b", 3 * MIB)
    assert pinner.pinned_bytes == sum(api.registered.values()) == 3 * MIB
    pinner.unpin(first)
    assert pinner.pinned_bytes == 2 * MIB
    pinner.close()
    pinner.close()
    assert pinner.pinned_bytes == 0
    assert not api.registered


def test_a_refused_pin_says_how_much_was_pinned_the_limits_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        pinned, "memory_limits", lambda: [MemoryLimit("MemAvailable", 9 * GIB, "free some")]
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    pinner = Pinner(FakePages(limit=5 * MIB))
    kept = Pages(4 * MIB)
    pinner.pin(kept, "layer 0", 3 * GIB)
    with pytest.raises(HostMemoryError) as raised:
        pinner.pin(Pages(2 * MIB), "the experts of layer 1", 3 * GIB)
    text = str(raised.value)
    for part in (
        "cannot page-lock the experts of layer 1 (2.00 MiB)",
        "cudaErrorMemoryAllocation (out of memory)",
        "4.00 MiB of 3.00 GiB were pinned before it",
        "MemAvailable 9.00 GiB",
        "RLIMIT_MEMLOCK 8.00 MiB",
        "ulimit -l unlimited",
        "memory limit",
    ):
        assert part in text
    assert pinner.pinned_bytes == 4 * MIB


def test_closing_unlocks_everything_else_when_one_range_fails() -> None:
    api = FakePages()
    pinner = Pinner(api)
    ranges = [Pages(MIB) for _ in range(3)]
    for pages in ranges:
        pinner.pin(pages, "x", 0)
    del api.registered[ranges[1].address]
    with pytest.raises(CudaError, match="cudaHostUnregister"):
        pinner.close()
    assert not api.registered
    pinner.close()
