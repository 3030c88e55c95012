"""Host memory that a device can read: how much there is, getting it, and page-locking it."""

import errno
import logging
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from prefetch_runtime.cudart import CudaError, HostPages

_HUGE_PAGE_BYTES = 2 << 20
_CAP_IPC_LOCK = 14
_PROBE_AT_MOST_BYTES = 1 << 30

logger = logging.getLogger(__name__)


class HostMemoryError(RuntimeError):
    """Host memory cannot be had or page-locked; says how much, the limit and the remedy."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on the memory that this process may still take."""

    name: str
    available_bytes: int
    remedy: str


def gib(num_bytes: int) -> str:
    """A size for people: GiB with two decimals, MiB below 0.1 GiB."""
    if num_bytes * 10 >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def memory_limits(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """Free memory of the machine and of every cgroup (v1 or v2) that this process is in.

    Clean file pages count as free in both: loading weights fills them, and the kernel drops them.
    """
    limits = [
        MemoryLimit(
            "MemAvailable",
            _meminfo_bytes(proc, "MemAvailable"),
            "free host memory or use a machine with more",
        )
    ]
    for folder, limit_file, usage_file, prefix in _memory_cgroups(proc, cgroup):
        text = _read(folder / limit_file)
        usage = _read(folder / usage_file)
        # Without a limit v2 says "max" and v1 a number near 2**63.
        if text is None or usage is None or text == "max" or int(text) >= 1 << 60:
            continue
        reclaimable = _stat_bytes(folder, f"{prefix}inactive_file", f"{prefix}active_file")
        limits.append(
            MemoryLimit(
                f"cgroup {limit_file} of {folder}",
                max(0, int(text) - max(0, int(usage) - reclaimable)),
                "raise the container's memory limit (docker run --memory, Kubernetes "
                "resources.limits.memory)",
            )
        )
    return limits


def lock_limit(proc: Path = Path("/proc")) -> int | None:
    """RLIMIT_MEMLOCK in bytes; None when there is none or this process is exempt from it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    for line in (_read(proc / "self" / "status") or "").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    return soft


def check_room(needed_bytes: int, limits: Iterable[MemoryLimit], what: str) -> None:
    """Raise `HostMemoryError` naming the tightest limit if `needed_bytes` does not fit them all."""
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and needed_bytes > tightest.available_bytes:
        raise HostMemoryError(
            f"{what} need {gib(needed_bytes)} of host memory, but only "
            f"{gib(tightest.available_bytes)} are left by {tightest.name}; {tightest.remedy}"
        )


class Pages:
    """Zeroed anonymous memory on a huge-page boundary; untouched pages take no room.

    `tensor` keeps the memory alive for as long as it or any view of it is referenced.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._mapping = mmap.mmap(
                -1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise HostMemoryError(
                f"the kernel refuses {gib(nbytes)} of address space ({error.strerror}); raise "
                "`ulimit -v`, or set vm.overcommit_memory to 0 or 1"
            ) from error
        # The tensor's storage holds the mapping object, which unmaps when it is collected. Never
        # close it by hand: torch keeps no buffer export that would refuse.
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._offset = -whole.data_ptr() % _HUGE_PAGE_BYTES
        self.tensor = whole[self._offset : self._offset + nbytes]
        self.address = self.tensor.data_ptr()
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE, self._offset, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.debug("this kernel has no transparent huge pages: %s", error)

    def forbid_fork(self) -> None:
        """Leave these pages out of forked children.

        A fork would copy page-locked pages at once, all of them, or under older kernels let the
        parent's next write move to a page that the device does not read.
        """
        self._mapping.madvise(mmap.MADV_DONTFORK, self._offset, self.nbytes)


class Pinner:
    """Owns the page-locked ranges of a process; `close` unlocks them."""

    def __init__(self, pages_api: HostPages) -> None:
        self._api = pages_api
        self._pinned: dict[int, int] = {}
        self._is_limit_known = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(self._pinned.values())

    def check_lock_limit(self, needed_bytes: int, limit: int | None) -> None:
        """Find out now, not after the weights are loaded, whether RLIMIT_MEMLOCK applies.

        NVIDIA's Linux driver does not charge what it pins to that limit, other platforms may; so a
        range just over the limit is page-locked for a try, once.

        Raises:
            HostMemoryError: the limit is too small, and it is enforced.
        """
        if limit is None or needed_bytes <= limit or self._is_limit_known:
            return
        if limit >= _PROBE_AT_MOST_BYTES:
            self._is_limit_known = True
            logger.warning(
                "RLIMIT_MEMLOCK is %s, less than the %s to page-lock", gib(limit), gib(needed_bytes)
            )
            return
        probe = Pages(limit + mmap.PAGESIZE)
        try:
            self._api.register(probe.address, probe.nbytes)
        except CudaError as error:
            raise HostMemoryError(
                f"the experts need {gib(needed_bytes)} of page-locked memory, but RLIMIT_MEMLOCK "
                f"allows {gib(limit)} ({error}); run `ulimit -l unlimited` before starting "
                "(docker run --ulimit memlock=-1:-1) or grant CAP_IPC_LOCK"
            ) from error
        self._api.unregister(probe.address)
        self._is_limit_known = True

    def pin(self, pages: Pages, what: str, planned_bytes: int) -> int:
        """Page-lock `pages` and return their device address. Fill them first: it is faster.

        Args:
            what: whose pages they are, for the error.
            planned_bytes: all that is to be pinned in the end, for the error.

        Raises:
            HostMemoryError: CUDA refused.
        """
        before = self.pinned_bytes
        try:
            self._api.register(pages.address, pages.nbytes)
        except CudaError as error:
            raise HostMemoryError(
                _pin_failure(what, pages.nbytes, before, planned_bytes, error)
            ) from error
        # From here on the range is ours to unlock, whatever the next calls say.
        self._pinned[pages.address] = pages.nbytes
        pages.forbid_fork()
        return self._api.device_pointer(pages.address)

    def unpin(self, pages: Pages) -> None:
        """Unlock `pages`; nothing on the device may still read them."""
        del self._pinned[pages.address]
        self._api.unregister(pages.address)

    def close(self) -> None:
        """Unlock every range. Safe to call twice; raises the first failure after trying all."""
        failures: list[CudaError] = []
        for address in list(self._pinned):
            del self._pinned[address]
            try:
                self._api.unregister(address)
            except CudaError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _pin_failure(
    what: str, nbytes: int, pinned_bytes: int, planned_bytes: int, error: CudaError
) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    left = [f"{limit.name} {gib(limit.available_bytes)}" for limit in memory_limits()]
    left.append(f"RLIMIT_MEMLOCK {'unlimited' if soft == resource.RLIM_INFINITY else gib(soft)}")
    return (
        f"cannot page-lock {what} ({gib(nbytes)}): {error}. {gib(pinned_bytes)} of "
        f"{gib(planned_bytes)} were pinned before it; left now: {', '.join(left)}. Free host "
        "memory, raise the container's memory limit, or run `ulimit -l unlimited` (docker run "
        "--ulimit memlock=-1:-1); under WSL raise `memory` in .wslconfig"
    )


def _memory_cgroups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folder, limit file, usage file and key prefix of each memory cgroup, innermost first."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
            files = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = cgroup / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # A container often sees its own group as the mount, under a path from outside, which then
        # has no files here.
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield (folder, *files)
            folder = folder.parent
        yield (mount, *files)


def _read(path: Path) -> str | None:
    """The text of a kernel file, or None where this kernel does not have it."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def _meminfo_bytes(proc: Path, key: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise HostMemoryError(f"{proc / 'meminfo'} has no line {key}; Linux 3.14 or later is needed")


def _stat_bytes(folder: Path, *keys: str) -> int:
    stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    return sum(int(stat.get(key, 0)) for key in keys)
