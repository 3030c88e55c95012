"""Host memory that a device can read: getting it, and page-locking it."""

import errno
import logging
import mmap
import resource

import torch

from prefetch_runtime.cudart import CudaError, HostPages
from prefetch_runtime.host_memory import HostMemoryError, gib, memory_limits

_HUGE_PAGE_BYTES = 2 << 20
_PROBE_AT_MOST_BYTES = 1 << 30

logger = logging.getLogger(__name__)


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
