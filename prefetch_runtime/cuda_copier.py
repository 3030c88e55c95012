"""Moves experts into slots on a GPU: owns the copy stream, its events, and the order.

A copy writes a slot only after the slot's readers, and readers wait for whole experts.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from prefetch_runtime.copier import (
    ByteRanges,
    CopyError,
    CopyJob,
    CopyTicket,
    byte_ranges,
    check_device,
    check_usable,
)
from prefetch_runtime.cudart import CudaPython, load_cuda_python

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CopyCalls(Protocol):
    """Enqueues the copies of one submit on a stream; raises RuntimeError when CUDA refuses."""

    def __call__(
        self, ranges: ByteRanges, jobs: Sequence[CopyJob], stream: torch.cuda.Stream
    ) -> None: ...


class BatchedCopies:
    """One `cudaMemcpyBatchAsync` for all copies of a submit."""

    def __init__(self, cuda: CudaPython) -> None:
        self._cuda = cuda

    def __call__(
        self,
        ranges: ByteRanges,
        jobs: Sequence[CopyJob],  # noqa: ARG002 - the ranges say it all
        stream: torch.cuda.Stream,
    ) -> None:
        self._cuda.copy_batch(ranges.dsts, ranges.srcs, ranges.sizes, stream.cuda_stream)


class SingleCopies:
    """One `cudaMemcpyAsync` for each byte range."""

    def __init__(self, cuda: CudaPython) -> None:
        self._cuda = cuda

    def __call__(
        self,
        ranges: ByteRanges,
        jobs: Sequence[CopyJob],  # noqa: ARG002 - the ranges say it all
        stream: torch.cuda.Stream,
    ) -> None:
        self._cuda.copy_each(ranges.dsts, ranges.srcs, ranges.sizes, stream.cuda_stream)


class TorchCopies:
    """One `Tensor.copy_` for each byte range: the slowest to issue, but needs only torch."""

    def __call__(
        self,
        ranges: ByteRanges,  # noqa: ARG002 - torch copies tensors
        jobs: Sequence[CopyJob],
        stream: torch.cuda.Stream,
    ) -> None:
        with torch.cuda.stream(stream):
            for job in jobs:
                _copy_with_torch(job)


class CudaStreams(Protocol):
    """The streams and events that a `CudaCopier` orders its copies with."""

    copy_stream: torch.cuda.Stream

    def compute_stream(self) -> torch.cuda.Stream:
        """The stream whose kernels read the slots."""

    def new_event(self) -> torch.cuda.Event:
        """An event that nothing has recorded."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""


class TorchStreams:
    """A copy stream of its own, and a compute stream that is borrowed."""

    def __init__(
        self, device: torch.device, compute_stream: torch.cuda.Stream | None = None
    ) -> None:
        """`compute_stream` None: whichever is current on `device` when the copier is called."""
        self.copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._compute_stream = compute_stream

    def compute_stream(self) -> torch.cuda.Stream:
        if self._compute_stream is not None:
            return self._compute_stream
        return torch.cuda.current_stream(self._device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _InFlight(NamedTuple):
    serial: int
    copy_done: torch.cuda.Event
    jobs: Sequence[CopyJob]
    """Held until the copies are seen done, so that neither end's memory goes before."""


class CudaCopier:
    """Copies on a stream of its own, one call for a submit. For one thread.

    Copies of later submits follow those of earlier ones; for a lane that nothing can hold up, make
    a second copier. The calling thread's current device must be the copier's.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        compute_stream: torch.cuda.Stream | None = None,
        calls: CopyCalls | None = None,
        streams: CudaStreams | None = None,
    ) -> None:
        """
        Args:
            compute_stream: the stream whose kernels read the slots; None: whichever is current on
                `device` at each call.
            calls: how the copies are enqueued; None: batched where cuda-python and the driver can
                (CUDA 12.8), else the next best, and a warning says why.
            streams: for tests; None: a copy stream is created.
        """
        self.bytes_copied = 0
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._streams: CudaStreams = streams or TorchStreams(device, compute_stream)
        self._calls = calls or _best_calls(device, self._streams.copy_stream)
        self._compute_reached = self._streams.new_event()
        self._in_flight: deque[_InFlight] = deque()
        self._free_events: list[torch.cuda.Event] = []
        self._submitted = 0
        self._completed = 0
        self._failure: CopyError | None = None
        self._closed = False

    @property
    def copy_stream(self) -> torch.cuda.Stream:
        """The stream that the copies run on."""
        return self._streams.copy_stream

    @property
    def calls(self) -> CopyCalls:
        """How the copies are enqueued."""
        return self._calls

    def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
        self._check_usable()
        for job in jobs:
            if not job.store.pinned:
                raise RuntimeError(
                    f"the host store of layer {job.store.layer_idx} is not pinned; call "
                    f"HostStore.pin({job.store.layer_idx}) once the layer is filled"
                )
        check_device(jobs, self._device)
        ranges = byte_ranges(jobs)
        if not ranges.sizes:
            return CopyTicket(self._completed, None, 0)
        if self._streams.is_capturing():
            raise RuntimeError(
                "copies cannot be submitted while a CUDA graph is captured: every replay would "
                "repeat them; submit before the capture or the replay"
            )
        return self._issuing(lambda: self._submit(ranges, jobs, after_compute))

    def _submit(
        self, ranges: ByteRanges, jobs: Sequence[CopyJob], after_compute: bool
    ) -> CopyTicket:
        self._retire()
        copy_stream = self._streams.copy_stream
        if after_compute:
            # WAR: the slots' last readers are on the compute stream; write only after them.
            self._compute_reached.record(self._streams.compute_stream())
            copy_stream.wait_event(self._compute_reached)
        self._calls(ranges, jobs, copy_stream)
        copy_done = self._free_events.pop() if self._free_events else self._streams.new_event()
        copy_done.record(copy_stream)
        num_bytes = sum(ranges.sizes)
        self._submitted += 1
        self.bytes_copied += num_bytes
        self._in_flight.append(_InFlight(self._submitted, copy_done, tuple(jobs)))
        return CopyTicket(self._submitted, copy_done, num_bytes)

    def wait(self, ticket: CopyTicket) -> None:
        self._check_usable()
        if ticket.copy_done is None or ticket.serial <= self._completed:
            return
        copy_done = ticket.copy_done
        # RAW: a kernel must see whole experts.
        self._issuing(lambda: self._streams.compute_stream().wait_event(copy_done))

    def is_done(self, ticket: CopyTicket) -> bool:
        self._check_usable()
        if ticket.serial > self._completed:
            self._issuing(self._retire)
        return ticket.serial <= self._completed

    def synchronize(self) -> None:
        self._check_usable()
        self._issuing(self._drain)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._failure is None:
                self._issuing(self._drain)
        finally:
            self._in_flight.clear()
            self._free_events.clear()

    def _drain(self) -> None:
        self._streams.copy_stream.synchronize()
        self._retire()

    def _retire(self) -> None:
        """Take note of the copies that have completed; this is where a late failure shows."""
        while self._in_flight:
            if not self._in_flight[0].copy_done.query():  # type: ignore[no-untyped-call]
                return
            done = self._in_flight.popleft()
            self._completed = done.serial
            self._free_events.append(done.copy_done)

    def _issuing(self, action: Callable[[], T]) -> T:
        """Run CUDA calls; any failure among them is the end of this copier."""
        try:
            return action()
        except RuntimeError as error:
            self._failure = CopyError(
                f"a copy to {self._device} failed, so its slots may hold anything: {error}"
            )
            raise self._failure from error

    def _check_usable(self) -> None:
        check_usable(self._failure, self._closed)


def _copy_with_torch(job: CopyJob) -> None:
    record = job.store.record(job.expert_id)
    for name, offset, nbytes, _, _ in job.buffers.ranges(job.store.layout):
        row = job.buffers.row_bytes(name, job.slot_id)
        row.copy_(record[offset : offset + nbytes], non_blocking=True)


def _best_calls(device: torch.device, copy_stream: torch.cuda.Stream) -> CopyCalls:
    cuda = load_cuda_python()
    if cuda is None:
        logger.warning(
            "cuda-python is not installed: copies are issued one by one by torch, at a tenth of "
            "the speed; pip install 'prefetch-runtime[cuda]'"
        )
        return TorchCopies()
    try:
        _try_batch(cuda, device, copy_stream)
    except CopyError:
        raise
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.warning(
            "batched copies do not work here (%s): copies are issued one by one; they need "
            "cuda-python and a driver for CUDA 12.8 or later",
            error,
        )
        return SingleCopies(cuda)
    return BatchedCopies(cuda)


def _try_batch(cuda: CudaPython, device: torch.device, copy_stream: torch.cuda.Stream) -> None:
    """Copy a few bytes in one batch, and look at them."""
    source = torch.arange(256, dtype=torch.uint8).pin_memory()
    target = torch.zeros(256, dtype=torch.uint8, device=device)
    # WAW: the zeros are written on the current stream.
    copy_stream.wait_stream(torch.cuda.current_stream(device))
    half = 128
    cuda.copy_batch(
        [target.data_ptr(), target.data_ptr() + half],
        [source.data_ptr(), source.data_ptr() + half],
        [half, half],
        copy_stream.cuda_stream,
    )
    copy_stream.synchronize()
    if not torch.equal(target.cpu(), source):
        raise CopyError("a batched copy brought wrong bytes; check the driver and cuda-python")
