"""Measures the host's part of one wide layer: 128 experts, 64 slots, 8 of them for each token.

Time of mode `eager` without kernels and copies; for both modes, in `extra_info`, what the device
would be given: torch's operations, kernel launches, copies by call, and reads that wait.
Not measured: vLLM's own part of a wave, and the time of mode `full` (its kernels run interpreted).
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from graphs import slot_table
from prefetch_runtime.copier import CopyTicket, HostCopier, byte_ranges
from prefetch_runtime.demand_reader import DemandReader
from prefetch_runtime.device_scheduler import DeviceScheduler
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.scheduler import LayerCache, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.staging import StagingRing

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_SLOTS, TOP_K, RING_ROWS = 128, 64, 8, 16
LAYOUT = RecordLayout.from_tensors(
    {"w13_weight": ((8, 4), torch.bfloat16), "w2_weight": ((4, 4), torch.bfloat16)}
)
STEPS = 40
VIEWS = {"view", "slice", "select", "unsqueeze", "unbind", "alias", "detach", "lift_fresh"}
KERNELS = ("count_kernel", "choose_kernel", "resolve_kernel", "advance_kernel")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts on the host alone")


class NoCopies(HostCopier):
    """Prepares the calls, and makes none."""

    jobs_of: list[int]

    def submit(self, jobs: Any, *, after_compute: bool = True) -> CopyTicket:  # noqa: ARG002
        byte_ranges(jobs)
        self.jobs_of.append(len(jobs))
        return CopyTicket(1, None, 0)


class Operations(TorchDispatchMode):
    """Counts what would be a launch on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.are_of_a_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not self.are_of_a_kernel and name not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts calls that make the host wait for a device."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        moves = name == "to" and any(
            isinstance(value, torch.device | str) for value in (*args[1:], *kwargs.values())
        )
        if (
            name in ("cpu", "cuda", "item", "tolist") or (moves and not kwargs.get("non_blocking"))
        ) and not self._operations.are_of_a_kernel:
            self.names[name] += 1
        return func(*args, **kwargs)


def _build(kind: type[Scheduler]) -> Scheduler:
    class WithRing(kind):  # type: ignore[valid-type,misc]
        """With the ring that a GPU has."""

        def _staging_of(self, _: LayerCache) -> StagingRing:
            if not self._staging:
                halves = [SlotBuffers(RING_ROWS // 2, LAYOUT, CPU) for _ in range(2)]
                self._staging[()] = StagingRing(halves)
            return self._staging[()]

    store = HostStore(pinning=False)
    copier = NoCopies()
    copier.jobs_of = []
    scheduler: Scheduler = WithRing(
        copier=copier, host_store=store, device=CPU, id_for_padding=0, mode="counted"
    )
    for index in range(2):
        layer = store.add_layer(index, NUM_EXPERTS, LAYOUT)
        slots = SlotBuffers(NUM_SLOTS, LAYOUT, CPU)
        scheduler.add_layer(index, f"layer {index}", layer, slots)
    scheduler.seal()
    return scheduler


def _demands(num_tokens: int) -> list[torch.Tensor]:
    """[num_tokens, TOP_K] each, with a popularity that gives about 70 % hits at 16 tokens."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, NUM_EXPERTS + 1) ** -0.9
    weights /= weights.sum()

    def token() -> Any:
        return rng.choice(NUM_EXPERTS, TOP_K, replace=False, p=weights)

    return [
        torch.from_numpy(np.stack([token() for _ in range(num_tokens)]).astype(np.int32))
        for _ in range(STEPS)
    ]


def _layer(scheduler: Scheduler, layer_idx: int, ids: torch.Tensor) -> int:
    scheduler.fits(layer_idx, ids)
    return sum(1 for _ in scheduler.expert_waves(layer_idx, ids))


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Counts within this context; filled in when it ends."""
    operations, launches, reads = Operations(), Counter[str](), []
    waits = Waits(operations)
    receive = DemandReader.receive

    def received(reader: DemandReader, sent: Any) -> Any:
        reads.append(sent)
        return receive(reader, sent)

    class Launch:
        def __init__(self, kernel: Any, name: str) -> None:
            self._kernel, self._name = kernel, name

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                launches[self._name] += 1
                operations.are_of_a_kernel = True
                self._kernel[grid](*args, **kwargs)
                operations.are_of_a_kernel = False

            return launch

    found: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(DemandReader, "receive", received)
        for name in KERNELS:
            if hasattr(slot_table, name):
                patch.setattr(slot_table, name, Launch(getattr(slot_table, name), name))
        made = slot_table.resolve_kernel_of
        patch.setattr(
            slot_table, "resolve_kernel_of", lambda *of: Launch(made(*of), "resolve_kernel")
        )
        found["start"] = lambda: (operations.names.clear(), launches.clear(), reads.clear())
        found["modes"] = (operations, waits)
        yield found
    found.update(
        operations=sum(operations.names.values()),
        launches=sum(launches.values()),
        reads=len(reads),
        waits=sum(waits.names.values()),
    )


@pytest.mark.benchmark(group="host time of a wide layer")
@pytest.mark.parametrize("num_tokens", [16, 32, 256])
def bench_host_time(benchmark: BenchmarkFixture, num_tokens: int) -> None:
    """Time of STEPS layers in mode `eager`; divide by STEPS."""
    scheduler, demands = _build(Scheduler), _demands(num_tokens)
    waves = 0

    def replay() -> None:
        nonlocal waves
        waves = 0
        for ids in demands:
            scheduler.begin_step(decodes=num_tokens <= 32)
            waves += _layer(scheduler, 0, ids)

    benchmark(replay)
    benchmark.extra_info["waves_per_layer"] = waves / STEPS
    if benchmark.stats is not None:
        per_layer_us = benchmark.stats.stats.median / STEPS * 1e6
        benchmark.extra_info["per_layer_us"] = round(per_layer_us, 1)
    assert scheduler.stats().layers[0].misses > 0


@pytest.mark.parametrize("num_tokens", [16, 32, 256])
@pytest.mark.parametrize("kind", [Scheduler, DeviceScheduler], ids=["eager", "full"])
def bench_counts(
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Scheduler],
    num_tokens: int,
) -> None:
    """What the second layer of the last of a few steps gives the device."""
    demands = _demands(num_tokens)[:6]
    with _counted(monkeypatch) as found:
        scheduler = _build(kind)
        copies: list[int] = scheduler._copier.jobs_of  # type: ignore[attr-defined]
        for ids in demands:
            scheduler.begin_step(decodes=num_tokens <= 32)
            _layer(scheduler, 0, ids)
            if ids is not demands[-1]:
                _layer(scheduler, 1, ids)
        before = scheduler.stats().layers[1]
        found["start"]()
        copies.clear()
        operations, waits = found["modes"]
        with operations, waits:
            num_waves = benchmark.pedantic(_layer, (scheduler, 1, demands[-1]), rounds=1)
        after = scheduler.stats().layers[1]
    hits, misses = after.hits - before.hits, after.misses - before.misses
    benchmark.extra_info.update(
        waves=num_waves,
        hits=hits,
        misses=misses,
        copy_calls=len(copies),
        copies=sum(copies),
        **{name: found[name] for name in ("operations", "launches", "reads", "waits")},
    )
    assert hits > 0
    assert sum(copies) <= misses
    assert found["reads"] == 1, "the ids come to the host once"
    assert found["waits"] == 0, "and nothing else is waited for"


def bench_the_counter_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement: a count that cannot rise would say nothing."""
    with _counted(monkeypatch) as found, found["modes"][0], found["modes"][1]:
        torch.zeros(3).to(CPU)
        torch.zeros(3).sum().item()
    assert found["waits"] == 2
