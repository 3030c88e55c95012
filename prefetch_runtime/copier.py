"""Moves experts from the host store into slots: the contract, and the copier for host memory."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from prefetch_runtime.host_store import LayerStore
from prefetch_runtime.slot_buffers import SlotBuffers


class CopyError(RuntimeError):
    """A copy failed, so slots may hold anything: fatal for the copier, and for what reads them."""


class CopyJob(NamedTuple):
    """One expert into one slot."""

    store: LayerStore
    expert_id: int
    buffers: SlotBuffers
    slot_id: int


class CopyTicket(NamedTuple):
    """What `Copier.submit` has issued; `Copier.wait` takes it, any number of times."""

    serial: int
    copy_done: torch.cuda.Event | None
    """Recorded after the last byte; None where the bytes are there already. Belongs to the copier,
    which records it again for a later submit once it has completed: give the ticket to `wait`."""
    num_bytes: int


class Copier(Protocol):
    """Issues copies and joins them with the compute stream. For one thread."""

    bytes_copied: int
    """Bytes issued so far."""

    def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
        """Issue the copies of `jobs`, in any order among themselves. Never blocks on the device.

        Args:
            after_compute: copy only after all that the compute stream has been given so far, since
                it may read the slots. False where nothing there can.

        Raises:
            ValueError: no such expert or slot, one slot twice, or records that do not fit the
                slots. Nothing has been issued.
            RuntimeError: the copier or a store is closed, a store is not pinned, or a graph is
                being captured. Nothing has been issued.
            CopyError: a copy has failed, now or before.
        """

    def wait(self, ticket: CopyTicket) -> None:
        """Make the compute stream wait for the copies. The host does not wait on CUDA.

        Raises:
            CopyError: a copy has failed before.
        """

    def is_done(self, ticket: CopyTicket) -> bool:
        """Whether the copies have been seen complete; the host may publish them then. Asks the
        device without waiting for it.

        Raises:
            CopyError: a copy has failed before.
        """

    def synchronize(self) -> None:
        """Make the host wait for every copy.

        Raises:
            CopyError: a copy has failed, now or before.
        """

    def close(self) -> None:
        """Wait for every copy and let go. Safe to call twice, and after a failure.

        Raises:
            CopyError: a copy has failed and no call has said so yet.
        """


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Copies as plain addresses and sizes."""

    dsts: list[int]
    srcs: list[int]
    sizes: list[int]


def byte_ranges(jobs: Sequence[CopyJob]) -> ByteRanges:
    """The byte ranges of `jobs`, checked as `Copier.submit` says."""
    ranges = ByteRanges([], [], [])
    taken: set[tuple[int, int]] = set()
    for store, expert_id, buffers, slot_id in jobs:
        if store.address == 0:
            raise RuntimeError(f"the host store of layer {store.layer_idx} is closed")
        if not 0 <= expert_id < store.num_experts:
            raise ValueError(
                f"layer {store.layer_idx} has experts 0 to {store.num_experts - 1}, not {expert_id}"
            )
        if not 0 <= slot_id < buffers.num_slots:
            raise ValueError(f"slot {slot_id} is not one of {buffers.num_slots} slots")
        if (id(buffers), slot_id) in taken:
            raise ValueError(f"two copies of one submit go to slot {slot_id}")
        taken.add((id(buffers), slot_id))
        record = store.address + int(expert_id) * store.layout.record_bytes
        for _, offset, nbytes, address, stride in buffers.ranges(store.layout):
            ranges.dsts.append(address + int(slot_id) * stride)
            ranges.srcs.append(record + offset)
            ranges.sizes.append(nbytes)
    return ranges


class HostCopier:
    """Copies at once, on the host: for slots in host memory.

    One thread and plain memmove: torch's parallel copy is no faster for an expert on an idle
    machine, and several times slower where other threads keep the cores busy.
    """

    def __init__(self) -> None:
        self.bytes_copied = 0
        self._submitted = 0
        self._closed = False

    def submit(
        self,
        jobs: Sequence[CopyJob],
        *,
        after_compute: bool = True,  # noqa: ARG002 - computing is over when the host gets here
    ) -> CopyTicket:
        self._check_usable()
        check_device(jobs, torch.device("cpu"))
        ranges = byte_ranges(jobs)
        for dst, src, size in zip(ranges.dsts, ranges.srcs, ranges.sizes, strict=True):
            ctypes.memmove(dst, src, size)
        num_bytes = sum(ranges.sizes)
        self._submitted += 1
        self.bytes_copied += num_bytes
        return CopyTicket(self._submitted, None, num_bytes)

    def wait(self, ticket: CopyTicket) -> None:  # noqa: ARG002 - the bytes are there
        self._check_usable()

    def is_done(self, ticket: CopyTicket) -> bool:  # noqa: ARG002 - the bytes are there
        self._check_usable()
        return True

    def synchronize(self) -> None:
        self._check_usable()

    def close(self) -> None:
        self._closed = True

    def _check_usable(self) -> None:
        check_usable(None, self._closed)


def create_copier(device: torch.device) -> Copier:
    """The copier for slots on `device`.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    match device.type:
        case "cpu":
            return HostCopier()
        case "cuda":
            from prefetch_runtime.cuda_copier import CudaCopier

            return CudaCopier(device)
    raise ValueError(f"cannot copy experts to {device}; use a cuda or cpu device")


def check_device(jobs: Sequence[CopyJob], device: torch.device) -> None:
    """Raise ValueError unless the slots of all jobs are on `device`."""
    for job in jobs:
        if job.buffers.device != device:
            raise ValueError(f"slots on {job.buffers.device}, but the copier is for {device}")


def check_usable(failure: CopyError | None, closed: bool) -> None:
    """Raise what a copier that has failed or is closed must raise in every call."""
    if failure is not None:
        raise CopyError(str(failure)) from failure
    if closed:
        raise RuntimeError("the copier is closed")
