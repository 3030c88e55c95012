"""Copies and their order: on streams played on the CPU, on host memory, and on a GPU.

The played streams run only when told to and honour events as CUDA does, so a missing wait shows as
wrong bytes.
"""

import ctypes
import gc
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch_runtime import cuda_copier
from prefetch_runtime.copier import (
    ByteRanges,
    CopyError,
    CopyJob,
    CopyTicket,
    HostCopier,
    byte_ranges,
    create_copier,
)
from prefetch_runtime.cuda_copier import BatchedCopies, CudaCopier, SingleCopies, TorchCopies
from prefetch_runtime.cudart import CudaError, load_cuda_python
from prefetch_runtime.host_store import HostStore, LayerStore, RecordLayout
from prefetch_runtime.slot_buffers import CopyRange, SlotBuffers

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
LAYOUT = RecordLayout.from_tensors(
    {
        "w": ((30, 17), torch.bfloat16),
        "q": ((64, 33), torch.float8_e4m3fn),
        "scale": ((), torch.float32),
        "g_idx": ((0,), torch.int32),
    }
)
POISON = 0xEE


class FakePages:
    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def device_pointer(self, address: int) -> int:
        return address


class PlayedEvent:
    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0
        self.failure: RuntimeError | None = None

    def record(self, stream: "PlayedStream") -> None:
        self.recorded += 1
        count = self.recorded
        stream.ops.append(lambda: setattr(self, "reached", count) or True)

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.reached >= self.recorded


class PlayedStream:
    """Operations that return False when they cannot run yet."""

    def __init__(self, cuda: "PlayedCuda") -> None:
        self.ops: deque[Callable[[], bool]] = deque()
        self.held = False
        self._cuda = cuda
        self.cuda_stream = 7

    def wait_event(self, event: PlayedEvent) -> None:
        count = event.recorded
        self.ops.append(lambda: event.reached >= count)

    def do(self, action: Callable[[], Any]) -> None:
        self.ops.append(lambda: (action(), True)[1])

    def synchronize(self) -> None:
        self._cuda.run()
        assert not self.ops, "a real stream would wait for ever"


class PlayedCuda:
    """`CudaStreams` that run on the CPU when `run` is called."""

    def __init__(self) -> None:
        self.copy_stream: Any = PlayedStream(self)
        self.compute = PlayedStream(self)
        self.events: list[PlayedEvent] = []
        self.capturing = False

    def compute_stream(self) -> Any:
        return self.compute

    def new_event(self) -> Any:
        self.events.append(PlayedEvent())
        return self.events[-1]

    def is_capturing(self) -> bool:
        return self.capturing

    def run(self) -> None:
        """Run every stream as far as it goes."""
        progress = True
        while progress:
            progress = False
            for stream in (self.copy_stream, self.compute):
                while stream.ops and not stream.held and stream.ops[0]():
                    stream.ops.popleft()
                    progress = True


class PlayedCopies:
    """`CopyCalls` that move the bytes when the stream gets there."""

    def __init__(self) -> None:
        self.failure: RuntimeError | None = None
        self.batches: list[ByteRanges] = []

    def __call__(self, ranges: ByteRanges, jobs: Sequence[CopyJob], stream: Any) -> None:
        if self.failure is not None:
            raise self.failure
        assert jobs
        self.batches.append(ranges)

        def move() -> None:
            for dst, src, size in zip(ranges.dsts, ranges.srcs, ranges.sizes, strict=True):
                ctypes.memmove(dst, src, size)

        stream.do(move)


def filled_store(num_layers: int = 2, num_experts: int = 8, **options: Any) -> HostStore:
    """Layers of random bytes, pinned where that is possible."""
    store = HostStore(**options)
    generator = torch.Generator().manual_seed(7)
    for layer_idx in range(num_layers):
        layer = store.add_layer(layer_idx, num_experts, LAYOUT)
        layer.slab.random_(0, 256, generator=generator)
    store.pin_all(progress=False)
    return store


def poisoned(num_slots: int, layout: RecordLayout, device: torch.device) -> SlotBuffers:
    buffers = SlotBuffers(num_slots, layout, device)
    for tensor in buffers.tensors.values():
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(POISON)
    return buffers


def slot_bytes(buffers: SlotBuffers, slot_id: int) -> torch.Tensor:
    """All bytes of one slot, field after field, on the host."""
    return torch.cat([buffers.row_bytes(name, slot_id).cpu() for name in buffers.tensors])


def expert_bytes(layer: LayerStore, expert_id: int) -> torch.Tensor:
    """The same bytes of an expert in the store."""
    record = layer.record(expert_id)
    fields = layer.layout.fields
    return torch.cat([record[field.offset : field.offset + field.nbytes] for field in fields])


def is_poison(buffers: SlotBuffers, slot_id: int) -> bool:
    return bool((slot_bytes(buffers, slot_id) == POISON).all())


def holds(buffers: SlotBuffers, slot_id: int, layer: LayerStore, expert_id: int) -> bool:
    return torch.equal(slot_bytes(buffers, slot_id), expert_bytes(layer, expert_id))


class Played:
    """A `CudaCopier` on played streams, with two layers and two sets of slots."""

    def __init__(self) -> None:
        self.cuda = PlayedCuda()
        self.copies = PlayedCopies()
        self.store = filled_store(host_pages=FakePages())
        self.layer = self.store.layer(0)
        self.slots = poisoned(4, LAYOUT, CPU)
        self.copier = CudaCopier(CPU, calls=self.copies, streams=self.cuda)

    def job(self, expert_id: int, slot_id: int) -> CopyJob:
        return CopyJob(self.layer, expert_id, self.slots, slot_id)


@pytest.fixture
def played() -> Iterator[Played]:
    kit = Played()
    yield kit
    kit.cuda.copy_stream.held = kit.cuda.compute.held = False
    kit.cuda.run()
    kit.copier.close()
    kit.store.close()


# On the host


def test_the_host_copier_brings_the_right_bytes_and_touches_no_other_slot() -> None:
    with filled_store(pinning=False) as store:
        first, second = store.layers
        slots, others = poisoned(4, LAYOUT, CPU), poisoned(3, LAYOUT, CPU)
        copier = HostCopier()
        ticket = copier.submit(
            [
                CopyJob(first, 7, slots, 0),
                CopyJob(first, 2, slots, 3),
                CopyJob(second, 7, others, 1),
            ]
        )
        copier.wait(ticket)
        assert holds(slots, 0, first, 7)
        assert holds(slots, 3, first, 2)
        assert holds(others, 1, second, 7)
        assert all(is_poison(slots, slot_id) for slot_id in (1, 2))
        assert all(is_poison(others, slot_id) for slot_id in (0, 2))
        assert ticket.num_bytes == copier.bytes_copied == 3 * LAYOUT.payload_bytes
        copier.synchronize()
        copier.close()
        copier.close()
        with pytest.raises(RuntimeError, match="the copier is closed"):
            copier.submit([])


def test_the_host_copier_refuses_bad_jobs_and_slots_elsewhere() -> None:
    with filled_store(pinning=False) as store:
        slots = poisoned(4, LAYOUT, CPU)
        copier = HostCopier()
        meta = SlotBuffers(4, LAYOUT, torch.device("meta"))
        for job, message in [
            (CopyJob(store.layer(0), 8, slots, 0), "layer 0 has experts 0 to 7, not 8"),
            (CopyJob(store.layer(0), 0, slots, 4), "slot 4 is not one of 4 slots"),
            (CopyJob(store.layer(0), 0, meta, 0), "slots on meta, but the copier is for cpu"),
        ]:
            with pytest.raises(ValueError, match=message):
                copier.submit([CopyJob(store.layer(0), 1, slots, 1), job])
        assert all(is_poison(slots, slot_id) for slot_id in range(4))


def test_a_closed_store_is_no_source() -> None:
    store = filled_store(pinning=False)
    job = CopyJob(store.layer(0), 0, poisoned(4, LAYOUT, CPU), 0)
    store.close()
    copier = HostCopier()
    with pytest.raises(RuntimeError, match="the host store of layer 0 is closed") as raised:
        copier.submit([job])
    assert not isinstance(raised.value, CopyError)
    copier.synchronize()  # nothing was issued, so nothing failed


def test_the_device_chooses_the_copier() -> None:
    assert isinstance(create_copier(CPU), HostCopier)
    with pytest.raises(ValueError, match="cannot copy experts to meta; use a cuda or cpu device"):
        create_copier(torch.device("meta"))


# Order, on played streams


def test_one_submit_is_one_batch_of_the_right_bytes(played: Played) -> None:
    ticket = played.copier.submit([played.job(5, 0), played.job(6, 3)])
    played.cuda.run()
    assert len(played.copies.batches) == 1
    assert len(played.copies.batches[0].sizes) == 2 * 3  # the empty field is left out
    assert holds(played.slots, 0, played.layer, 5)
    assert holds(played.slots, 3, played.layer, 6)
    assert all(is_poison(played.slots, slot_id) for slot_id in (1, 2))
    assert ticket.num_bytes == played.copier.bytes_copied == 2 * LAYOUT.payload_bytes


def test_a_slot_is_overwritten_only_after_its_readers(played: Played) -> None:
    seen = []
    played.cuda.compute.held = True
    played.cuda.compute.do(lambda: seen.append(slot_bytes(played.slots, 1)))
    played.copier.submit([played.job(5, 1)])
    played.cuda.run()
    assert is_poison(played.slots, 1)
    played.cuda.compute.held = False
    played.cuda.run()
    assert (seen[0] == POISON).all()
    assert holds(played.slots, 1, played.layer, 5)


def test_a_copy_that_nothing_reads_need_not_wait_for_compute(played: Played) -> None:
    played.cuda.compute.held = True
    played.cuda.compute.do(lambda: None)
    played.copier.submit([played.job(5, 1)], after_compute=False)
    played.cuda.run()
    assert holds(played.slots, 1, played.layer, 5)


@pytest.mark.parametrize("waits", [1, 2])
def test_readers_wait_for_the_copy(played: Played, waits: int) -> None:
    seen = []
    played.cuda.copy_stream.held = True
    ticket = played.copier.submit([played.job(5, 1)])
    for _ in range(waits):
        played.copier.wait(ticket)
    played.cuda.compute.do(lambda: seen.append(slot_bytes(played.slots, 1)))
    played.cuda.run()
    assert not seen
    played.cuda.copy_stream.held = False
    played.cuda.run()
    assert torch.equal(seen[0], expert_bytes(played.layer, 5))


def test_a_ticket_waits_for_its_own_copies_only(played: Played) -> None:
    """The events are used again: an old ticket must not wait for a newer copy."""
    first = played.copier.submit([played.job(5, 1)])
    played.cuda.run()
    played.copier.submit([])
    second = played.copier.submit([played.job(6, 2)])  # takes note that the first is done
    played.cuda.run()
    played.cuda.copy_stream.held = True
    third = played.copier.submit([played.job(7, 3)])
    assert third.copy_done in (first.copy_done, second.copy_done)
    for ticket in (first, second):
        played.copier.wait(ticket)
    reached: list[bool] = []
    played.cuda.compute.do(lambda: reached.append(True))
    played.cuda.run()
    assert reached


def test_events_are_pooled(played: Played) -> None:
    for step in range(50):
        played.copier.wait(played.copier.submit([played.job(step % 8, step % 4)]))
        played.cuda.run()
    assert len(played.cuda.events) <= 4


def test_synchronize_waits_for_everything(played: Played) -> None:
    played.copier.submit([played.job(5, 1)])
    assert is_poison(played.slots, 1)
    played.copier.synchronize()
    assert holds(played.slots, 1, played.layer, 5)


def test_nothing_to_copy_is_nothing_to_wait_for(played: Played) -> None:
    played.copier.wait(played.copier.submit([]))
    assert not played.cuda.compute.ops
    assert not played.cuda.copy_stream.ops


def test_slots_are_kept_until_their_copies_are_done(played: Played) -> None:
    slots = poisoned(2, LAYOUT, CPU)
    alive = weakref.ref(slots)
    played.cuda.copy_stream.held = True
    played.copier.submit([CopyJob(played.layer, 1, slots, 0)])
    del slots
    gc.collect()
    assert alive() is not None
    played.cuda.copy_stream.held = False
    played.copier.synchronize()
    gc.collect()
    assert alive() is None


# Failures, on played streams


def every_call(copier: CudaCopier, job: CopyJob, ticket: CopyTicket) -> list[Callable[[], Any]]:
    return [lambda: copier.submit([job]), lambda: copier.wait(ticket), copier.synchronize]


def test_a_refused_copy_is_fatal_for_every_later_call(played: Played) -> None:
    ticket = played.copier.submit([played.job(5, 1)])
    played.copies.failure = CudaError("cudaMemcpyBatchAsync", 1, "cudaErrorInvalidValue (bad)")
    with pytest.raises(CopyError, match=r"copy to cpu failed.*cudaMemcpyBatchAsync returned cudaE"):
        played.copier.submit([played.job(6, 2)])
    played.copies.failure = None
    for call in every_call(played.copier, played.job(6, 2), ticket):
        with pytest.raises(CopyError, match="cudaErrorInvalidValue"):
            call()
    played.copier.close()  # it has been said
    played.copier.close()


def test_a_copy_that_fails_later_is_fatal_too(played: Played) -> None:
    ticket = played.copier.submit([played.job(5, 1)])
    assert ticket.copy_done is not None
    ticket.copy_done.failure = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(CopyError, match="illegal memory access"):
        played.copier.submit([played.job(6, 2)])
    for call in every_call(played.copier, played.job(6, 2), ticket):
        with pytest.raises(CopyError, match="illegal memory access"):
            call()


def test_close_tells_of_a_failure_that_nobody_has_heard_of() -> None:
    kit = Played()
    ticket = kit.copier.submit([kit.job(5, 1)])
    assert ticket.copy_done is not None
    ticket.copy_done.failure = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(CopyError, match="illegal memory access"):
        kit.copier.close()
    kit.copier.close()
    kit.store.close()


def test_a_bad_job_is_refused_and_harms_nothing(played: Played) -> None:
    other = SlotBuffers(2, RecordLayout.from_tensors({"w": ((3,), torch.int8)}), CPU)
    bad: list[tuple[list[CopyJob], str]] = [
        ([played.job(8, 0)], "layer 0 has experts 0 to 7, not 8"),
        ([played.job(-1, 0)], "layer 0 has experts 0 to 7, not -1"),
        ([played.job(0, 4)], "slot 4 is not one of 4 slots"),
        ([played.job(0, -1)], "slot -1 is not one of 4 slots"),
        ([played.job(0, 2), played.job(1, 2)], "two copies of one submit go to slot 2"),
        ([CopyJob(played.layer, 0, other, 0)], "slots and records differ in"),
        (
            [CopyJob(played.layer, 0, SlotBuffers(2, LAYOUT, torch.device("meta")), 0)],
            "slots on meta, but the copier is for cpu",
        ),
    ]
    for jobs, message in bad:
        with pytest.raises(ValueError, match=message):
            played.copier.submit(jobs)
    assert not played.copies.batches
    played.copier.submit([played.job(5, 1)])
    played.copier.synchronize()
    assert holds(played.slots, 1, played.layer, 5)


def test_memory_that_is_not_pinned_is_refused(played: Played) -> None:
    with filled_store(pinning=False) as store:
        job = CopyJob(store.layer(1), 0, played.slots, 0)
        with pytest.raises(RuntimeError, match=r"layer 1 is not pinned; call HostStore.pin\(1\)"):
            played.copier.submit([job])


def test_copies_are_refused_while_a_graph_is_captured(played: Played) -> None:
    played.cuda.capturing = True
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        played.copier.submit([played.job(0, 0)])
    assert not played.cuda.copy_stream.ops


def test_a_closed_copier_takes_no_work(played: Played) -> None:
    ticket = played.copier.submit([played.job(5, 1)])
    played.copier.close()
    assert holds(played.slots, 1, played.layer, 5)
    for call in every_call(played.copier, played.job(6, 2), ticket):
        with pytest.raises(RuntimeError, match="the copier is closed"):
            call()


# Which calls


class SeenCuda:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def copy_batch(self, *args: Any) -> None:
        self.seen.append(("batch", *args))

    def copy_each(self, *args: Any) -> None:
        self.seen.append(("each", *args))


@pytest.mark.parametrize(("kind", "name"), [(BatchedCopies, "batch"), (SingleCopies, "each")])
def test_the_calls_get_the_ranges_and_the_copy_stream(kind: Any, name: str) -> None:
    cuda = SeenCuda()
    kind(cuda)(ByteRanges([1], [2], [3]), [], PlayedStream(PlayedCuda()))
    assert cuda.seen == [(name, [1], [2], [3], 7)]


def test_without_cuda_python_torch_copies_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_copier, "load_cuda_python", lambda: None)
    assert isinstance(CudaCopier(CPU, streams=PlayedCuda()).calls, TorchCopies)
    assert "cuda-python is not installed" in caplog.text


@pytest.mark.parametrize(
    "failure", [CudaError("cudaMemcpyBatchAsync", 36, "cudaErrorCallRequiresNewerDriver (old)")]
)
def test_where_batches_do_not_work_copies_go_one_by_one_and_the_log_says_so(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(cuda_copier, "load_cuda_python", SeenCuda)
    monkeypatch.setattr(cuda_copier, "_try_batch", refuse)
    assert isinstance(CudaCopier(CPU, streams=PlayedCuda()).calls, SingleCopies)
    assert len(caplog.records) == 1
    assert "batched copies do not work here" in caplog.text
    assert "cudaErrorCallRequiresNewerDriver" in caplog.text


def test_a_batch_that_brings_wrong_bytes_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise CopyError("a batched copy brought wrong bytes")

    monkeypatch.setattr(cuda_copier, "load_cuda_python", SeenCuda)
    monkeypatch.setattr(cuda_copier, "_try_batch", wrong)
    with pytest.raises(CopyError, match="wrong bytes"):
        CudaCopier(CPU, streams=PlayedCuda())


# On a GPU


class Latch:
    """Holds a CUDA stream until `release`; lets go by itself after 20 s, and then fails.

    Nothing between the two may need the whole device to be idle: no allocation by CUDA, no first
    use of a kernel.
    """

    def __init__(self, stream: torch.cuda.Stream, flag: torch.Tensor) -> None:
        """`flag` is one pinned int32 of value 0."""
        self._flag = flag
        self.expired = False
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000_000)  # about half a second
        else:
            at_least = 0
            result = driver.cuStreamWaitValue32(stream.cuda_stream, flag.data_ptr(), 1, at_least)
            assert int(result[0]) == 0, result
        self._watchdog = threading.Timer(20, self._expire)
        self._watchdog.start()

    def _expire(self) -> None:
        self.expired = True
        self._flag.fill_(1)

    def release(self) -> None:
        self._watchdog.cancel()
        self._flag.fill_(1)
        assert not self.expired, "something waited for the held stream"


class OnGpu:
    """A pinned store of two layers, slots of 0xEE, and a copier with a compute stream given."""

    def __init__(self, make_calls: Callable[[], Any] | None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.store = filled_store()
        self.layer = self.store.layer(0)
        self.slots = poisoned(4, LAYOUT, self.device)
        self.compute = torch.cuda.Stream(self.device)
        self.seen = torch.zeros(30, 17, dtype=torch.bfloat16, device=self.device)
        self.flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        calls = make_calls() if make_calls is not None else None
        self.copier = CudaCopier(self.device, compute_stream=self.compute, calls=calls)
        torch.cuda.synchronize()  # the poison, which is not on the compute stream
        # What the held tests will call, once, so that nothing is loaded or allocated then.
        self.copier.wait(self.copier.submit([CopyJob(self.layer, 0, self.slots, 0)]))
        self.read_slot(0)
        torch.cuda.synchronize()

    def read_slot(self, slot_id: int) -> None:
        with torch.cuda.stream(self.compute):
            self.seen.copy_(self.slots.row("w", slot_id))

    def job(self, expert_id: int, slot_id: int) -> CopyJob:
        return CopyJob(self.layer, expert_id, self.slots, slot_id)

    def seen_bytes(self) -> torch.Tensor:
        return self.seen.cpu().view(-1).view(torch.uint8)

    def expert_w(self, expert_id: int) -> torch.Tensor:
        return self.layer.record(expert_id)[: LAYOUT.fields[0].nbytes]


def cuda_python_calls(kind: Any) -> Any:
    cuda = load_cuda_python()
    if cuda is None:
        pytest.skip("cuda-python is not installed")
    return kind(cuda)


WAYS: dict[str, Callable[[], Any]] = {
    "batched": lambda: cuda_python_calls(BatchedCopies),
    "single": lambda: cuda_python_calls(SingleCopies),
    "torch": TorchCopies,
}


@pytest.fixture(params=WAYS)
def on_gpu(request: pytest.FixtureRequest) -> Iterator[OnGpu]:
    kit = OnGpu(WAYS[request.param])
    yield kit
    kit.flag.fill_(1)
    kit.copier.close()
    kit.store.close()


@pytest.mark.gpu
def test_copies_are_batched_where_cuda_python_is_installed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if load_cuda_python() is None:
        pytest.skip("cuda-python is not installed")
    with caplog.at_level(logging.WARNING):
        copier = create_copier(torch.device("cuda"))
    assert isinstance(copier, CudaCopier)
    assert isinstance(copier.calls, BatchedCopies), caplog.text
    copier.close()


@pytest.mark.gpu
def test_the_right_bytes_arrive_on_the_gpu_and_no_other_slot_changes(on_gpu: OnGpu) -> None:
    first, second = on_gpu.store.layers
    slots, others = (poisoned(count, LAYOUT, on_gpu.device) for count in (9, 3))
    torch.cuda.synchronize()  # the poison, which is not on the compute stream
    jobs = [CopyJob(first, expert_id, slots, 7 - expert_id) for expert_id in range(8)]
    ticket = on_gpu.copier.submit([*jobs, CopyJob(second, 3, others, 1)])
    on_gpu.copier.wait(ticket)
    on_gpu.compute.synchronize()
    for expert_id in range(8):
        assert holds(slots, 7 - expert_id, first, expert_id), expert_id
    assert holds(others, 1, second, 3)
    assert is_poison(slots, 8)
    assert is_poison(others, 0)
    assert is_poison(others, 2)
    assert ticket.num_bytes == 9 * LAYOUT.payload_bytes


@pytest.mark.gpu
def test_compute_waits_for_the_copy_on_the_gpu(on_gpu: OnGpu) -> None:
    latch = Latch(on_gpu.copier.copy_stream, on_gpu.flag)
    ticket = on_gpu.copier.submit([on_gpu.job(5, 1)], after_compute=False)
    on_gpu.copier.wait(ticket)
    on_gpu.read_slot(1)
    read = on_gpu.compute.record_event()
    time.sleep(0.05)
    assert not read.query()  # the copy is held, so the reader must be too
    latch.release()
    read.synchronize()
    assert torch.equal(on_gpu.seen_bytes(), on_gpu.expert_w(5))


@pytest.mark.gpu
def test_a_reader_without_the_wait_shows_that_the_latch_holds(on_gpu: OnGpu) -> None:
    """The counterpart of the test above: without `wait` the reader overtakes the copy."""
    latch = Latch(on_gpu.copier.copy_stream, on_gpu.flag)
    ticket = on_gpu.copier.submit([on_gpu.job(5, 1)], after_compute=False)
    on_gpu.read_slot(1)
    on_gpu.compute.synchronize()
    assert not ticket.copy_done.query()
    latch.release()
    on_gpu.copier.synchronize()
    assert (on_gpu.seen_bytes() == POISON).all()
    assert holds(on_gpu.slots, 1, on_gpu.layer, 5)


@pytest.mark.gpu
def test_a_slot_is_overwritten_only_after_its_readers_on_the_gpu(on_gpu: OnGpu) -> None:
    latch = Latch(on_gpu.compute, on_gpu.flag)
    on_gpu.read_slot(1)
    ticket = on_gpu.copier.submit([on_gpu.job(5, 1)])
    time.sleep(0.05)
    assert not ticket.copy_done.query()  # the reader is held, so the copy must be too
    latch.release()
    on_gpu.copier.synchronize()
    assert (on_gpu.seen_bytes() == POISON).all()
    assert holds(on_gpu.slots, 1, on_gpu.layer, 5)


@pytest.mark.gpu
def test_a_copy_that_nothing_reads_runs_beside_compute_on_the_gpu(on_gpu: OnGpu) -> None:
    latch = Latch(on_gpu.compute, on_gpu.flag)
    ticket = on_gpu.copier.submit([on_gpu.job(5, 1)], after_compute=False)
    ticket.copy_done.synchronize()
    latch.release()
    assert holds(on_gpu.slots, 1, on_gpu.layer, 5)


@pytest.mark.gpu
def test_the_current_stream_is_the_compute_stream_unless_one_is_given() -> None:
    kit = OnGpu(None)
    copier = CudaCopier(kit.device)
    kit.copier.wait(kit.copier.submit([kit.job(0, 1)]))
    torch.cuda.synchronize()
    latch = Latch(copier.copy_stream, kit.flag)
    with torch.cuda.stream(kit.compute):
        copier.wait(copier.submit([kit.job(5, 1)], after_compute=False))
    kit.read_slot(1)
    read = kit.compute.record_event()
    time.sleep(0.05)
    assert not read.query()
    latch.release()
    read.synchronize()
    assert torch.equal(kit.seen_bytes(), kit.expert_w(5))
    for each in (copier, kit.copier):
        each.close()
    kit.store.close()


@pytest.mark.gpu
def test_copies_beside_many_steps_leave_every_slot_right(on_gpu: OnGpu) -> None:
    """Five hundred submits without a host wait, each slot read before it is overwritten."""
    reads: list[torch.Tensor] = []
    for step in range(500):
        expert_id, slot_id = step % 8, step % 4
        on_gpu.copier.wait(on_gpu.copier.submit([on_gpu.job(expert_id, slot_id)]))
        with torch.cuda.stream(on_gpu.compute):
            reads.append(on_gpu.slots.row("w", slot_id).clone())
    on_gpu.copier.synchronize()
    torch.cuda.synchronize()
    for step, read in enumerate(reads):
        assert torch.equal(read.cpu().view(-1).view(torch.uint8), on_gpu.expert_w(step % 8)), step


@pytest.mark.gpu
def test_a_submit_in_a_capture_is_refused_on_the_gpu(on_gpu: OnGpu) -> None:
    graph = torch.cuda.CUDAGraph()
    target = torch.zeros(8, device=on_gpu.device)
    target.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        target.add_(1)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            on_gpu.copier.submit([on_gpu.job(5, 1)])
    graph.replay()
    on_gpu.copier.submit([on_gpu.job(5, 1)])
    on_gpu.copier.synchronize()
    assert holds(on_gpu.slots, 1, on_gpu.layer, 5)
    assert target.tolist() == [2.0] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["refused", "late"])
def test_a_failed_copy_is_fatal_on_the_gpu(how: str) -> None:
    """In a process of its own: a failure may leave its CUDA context unusable."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "helpers" / "failing_copy.py"), how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "submit, wait and synchronize raise CopyError" in result.stdout


@pytest.mark.gpu
def test_sixteen_copies_of_5_mb_run_at_20_gb_per_second_or_more() -> None:
    layout = RecordLayout.from_tensors({"w": ((4_718_592,), torch.uint8)})
    device = torch.device("cuda", torch.cuda.current_device())
    with HostStore() as store:
        layer = store.add_layer(0, 48, layout)
        layer.slab.random_(0, 256)
        store.pin(0)
        slots = SlotBuffers(16, layout, device)
        copier = CudaCopier(device)
        rates = []
        for run in range(6):
            jobs = [CopyJob(layer, (run * 16 + slot) % 48, slots, slot) for slot in range(16)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(copier.copy_stream)
            ticket = copier.submit(jobs, after_compute=False)
            end.record(copier.copy_stream)
            end.synchronize()
            rates.append(ticket.num_bytes / start.elapsed_time(end) / 1e6)
        for slot in range(16):
            assert holds(slots, slot, layer, (5 * 16 + slot) % 48)
        copier.close()
    gbps = sorted(rates[1:])[2]
    assert gbps >= 20, f"{type(copier.calls).__name__}: {rates} GB/s"


def test_ranges_are_named_tuples_of_plain_numbers() -> None:
    """What goes to CUDA is Python's own int, whatever number the job held."""
    with filled_store(pinning=False) as store:
        slots = poisoned(2, LAYOUT, CPU)
        ids = torch.tensor([1], dtype=torch.int32).numpy()
        ranges = byte_ranges([CopyJob(store.layer(0), ids[0], slots, ids[0])])
        numbers = [*ranges.dsts, *ranges.srcs, *ranges.sizes]
        assert all(type(number) is int for number in numbers)
        assert isinstance(slots.ranges(LAYOUT)[0], CopyRange)
