"""Measures bringing experts from the host store into slots: until the bytes are there, and the
host's time to issue it. Also page-locking a filled slab.

Shape: Qwen3-30B-A3B's experts (9.4 MB in two tensors, bf16), one or sixteen per submit.
Not measured: overlap with compute, two GPUs on one link. Baseline, by the same id: `Tensor.copy_`
from memory that torch pinned; for page-locking, torch's pinned allocator and the filling of it.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.clocks import synced_clock
from prefetch_runtime.copier import Copier, CopyJob, HostCopier
from prefetch_runtime.cuda_copier import BatchedCopies, CudaCopier, SingleCopies, TorchCopies
from prefetch_runtime.cudart import load_cuda_python
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.slot_buffers import SlotBuffers

HIDDEN, WIDTH = 2048, 768
LAYOUT = RecordLayout.from_tensors(
    {
        "w13_weight": ((2 * WIDTH, HIDDEN), torch.bfloat16),
        "w2_weight": ((HIDDEN, WIDTH), torch.bfloat16),
    }
)
NUM_EXPERTS, NUM_SLOTS = 64, 16
PIN_BYTES = 1 << 30

by_count = pytest.mark.parametrize(
    "num_experts", [1, 16], ids=lambda n: f"{n}-expert{'s' * (n > 1)}"
)


class Kit:
    """A layer of random experts on the host, and slots on `device`."""

    def __init__(self, device: torch.device, num_experts: int) -> None:
        self.store = HostStore(pinning=device.type == "cuda")
        self.layer = self.store.add_layer(0, num_experts, LAYOUT)
        # Not the same number twice within 64 bits of each other, and quick to make.
        made = torch.randint(0, 256, (LAYOUT.record_bytes + num_experts * 8,), dtype=torch.uint8)
        for expert_id in range(num_experts):
            start = expert_id * 8
            self.layer.record(expert_id).copy_(made[start : start + LAYOUT.record_bytes])
        self.store.pin_all(progress=False)
        self.slots = SlotBuffers(NUM_SLOTS, LAYOUT, device)
        self._turn = count()

    def jobs(self, num_experts: int) -> list[CopyJob]:
        """Other experts in every call, into the first slots."""
        first = next(self._turn) * num_experts
        return [
            CopyJob(self.layer, (first + slot) % self.layer.num_experts, self.slots, slot)
            for slot in range(num_experts)
        ]

    def check(self, jobs: list[CopyJob]) -> None:
        for job in jobs:
            record = self.layer.record(job.expert_id)
            for field in LAYOUT.fields:
                expected = record[field.offset : field.offset + field.nbytes]
                assert torch.equal(self.slots.row_bytes(field.name, job.slot_id).cpu(), expected)


@pytest.fixture(scope="module")
def gpu_kit() -> Iterator[Kit]:
    kit = Kit(torch.device("cuda", torch.cuda.current_device()), NUM_EXPERTS)
    yield kit
    kit.store.close()


def _copier(kit: Kit, way: str) -> CudaCopier:
    if way == "torch":
        return CudaCopier(kit.slots.device, calls=TorchCopies())
    cuda = load_cuda_python()
    if cuda is None:
        pytest.skip("cuda-python is not installed")
    calls = BatchedCopies(cuda) if way == "batched" else SingleCopies(cuda)
    return CudaCopier(kit.slots.device, calls=calls)


def _device_us(stream: torch.cuda.Stream, issue: Callable[[], object]) -> float:
    """Median time on the stream from the first to the last byte."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(stream)
        issue()
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def _note(benchmark: BenchmarkFixture, num_experts: int, device_us: float) -> None:
    num_bytes = num_experts * LAYOUT.payload_bytes
    benchmark.extra_info.update(
        bytes=num_bytes,
        device_us=round(device_us, 1),
        gbps=round(num_bytes / device_us / 1e3, 1),
    )


@pytest.mark.gpu
@pytest.mark.benchmark(group="h2d until the bytes are there", timer=synced_clock, min_rounds=20)
@by_count
@pytest.mark.parametrize("way", ["batched", "single", "torch"])
def bench_copier(benchmark: BenchmarkFixture, gpu_kit: Kit, way: str, num_experts: int) -> None:
    """Submit and wait through the copier, by the way its copies are enqueued."""
    copier = _copier(gpu_kit, way)

    def submit() -> None:
        copier.wait(copier.submit(gpu_kit.jobs(num_experts)))

    jobs = gpu_kit.jobs(num_experts)
    copier.submit(jobs)
    copier.synchronize()
    gpu_kit.check(jobs)
    _note(benchmark, num_experts, _device_us(copier.copy_stream, submit))
    benchmark(submit)
    copier.close()


@pytest.mark.gpu
@pytest.mark.benchmark(group="h2d until the bytes are there", timer=synced_clock, min_rounds=20)
@by_count
def bench_torch_pinned(benchmark: BenchmarkFixture, gpu_kit: Kit, num_experts: int) -> None:
    """Baseline: `Tensor.copy_` from torch's own pinned memory on the current stream."""
    tensors = gpu_kit.slots.tensors
    pinned = {name: gpu_kit.layer.tensor(name).contiguous().pin_memory() for name in tensors}

    def copy(jobs: list[CopyJob]) -> None:
        for job in jobs:
            for name, tensor in tensors.items():
                tensor[job.slot_id].copy_(pinned[name][job.expert_id], non_blocking=True)

    jobs = gpu_kit.jobs(num_experts)
    copy(jobs)
    gpu_kit.check(jobs)
    stream = torch.cuda.current_stream()
    _note(benchmark, num_experts, _device_us(stream, lambda: copy(gpu_kit.jobs(num_experts))))
    benchmark(lambda: copy(gpu_kit.jobs(num_experts)))


@pytest.mark.gpu
@pytest.mark.benchmark(group="host time to issue a submit and its wait")
@by_count
@pytest.mark.parametrize("way", ["batched", "single", "torch"])
def bench_issue(benchmark: BenchmarkFixture, gpu_kit: Kit, way: str, num_experts: int) -> None:
    """The host's clock alone; the device is idle when each round starts."""
    copier = _copier(gpu_kit, way)
    issued: list[CopyJob] = []

    def idle() -> tuple[tuple[list[CopyJob]], dict[str, object]]:
        torch.cuda.synchronize()
        issued[:] = gpu_kit.jobs(num_experts)
        return (issued,), {}

    def issue(jobs: list[CopyJob]) -> None:
        copier.wait(copier.submit(jobs))

    benchmark.pedantic(issue, setup=idle, rounds=200, warmup_rounds=5)
    copier.synchronize()
    gpu_kit.check(issued)
    copier.close()


@pytest.mark.gpu
@pytest.mark.benchmark(group="pinned GiB")
def bench_pin_filled(benchmark: BenchmarkFixture, gpu_kit: Kit) -> None:
    """Page-lock 1 GiB that has been written before."""
    assert gpu_kit.layer.pinned  # CUDA is up
    layout = RecordLayout.from_tensors({"w": ((PIN_BYTES // 64,), torch.uint8)})
    stores: list[HostStore] = []

    def filled() -> tuple[tuple[HostStore], dict[str, object]]:
        for old in stores:
            old.close()
        stores[:] = [HostStore()]
        stores[0].add_layer(0, 64, layout).slab.fill_(1)
        return (stores[0],), {}

    benchmark.pedantic(lambda store: store.pin(0), setup=filled, rounds=5)
    assert stores[0].pinned_bytes == PIN_BYTES
    stores[0].close()


@pytest.mark.gpu
@pytest.mark.benchmark(group="pinned GiB")
def bench_pin_with_torch(benchmark: BenchmarkFixture) -> None:
    """Baseline: 1 GiB from torch's pinned allocator; filling it is not included."""
    kept: list[torch.Tensor] = []  # all of them, or the allocator would hand one out again

    def pin() -> None:
        kept.append(torch.empty(PIN_BYTES, dtype=torch.uint8, pin_memory=True))

    benchmark.pedantic(pin, rounds=3)
    assert all(tensor.is_pinned() for tensor in kept)


@pytest.mark.benchmark(group="copies in host memory")
@by_count
def bench_host_copier(benchmark: BenchmarkFixture, num_experts: int) -> None:
    """The copier of CPU devices: plain copies, here for the smoke run of machines without a GPU."""
    kit = Kit(torch.device("cpu"), NUM_SLOTS)
    copier: Copier = HostCopier()
    jobs = kit.jobs(num_experts)
    benchmark(copier.submit, jobs)
    benchmark.extra_info["bytes"] = num_experts * LAYOUT.payload_bytes
    kit.check(jobs)
    kit.store.close()
