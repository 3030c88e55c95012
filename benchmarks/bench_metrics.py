"""Measures: host time of one write of the cache's Prometheus series, into the files that vLLM's API
servers read (once a second, by a thread of its own).
Not: what that thread takes from the one that steps the engine; copies from a device.
Baseline: a write when nothing has moved (id `idle`).
"""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector
from pytest_benchmark.fixture import BenchmarkFixture

from prefetch_runtime.config import METRICS_FOLDER_VARIABLE
from prefetch_runtime.metrics import LAYER_COUNTERS, CacheSeries
from prefetch_runtime.stats import LayerStats, RuntimeStats


def _stats(num_layers: int, count: int) -> RuntimeStats:
    counters = {series.field: count for series in LAYER_COUNTERS}
    layers = [
        LayerStats(layer_idx=index, layer_name="", num_experts=128, num_slots=32, **counters)
        for index in range(num_layers)
    ]
    return RuntimeStats(
        mode="eager",
        policy="lru",
        slot_bytes=0,
        staging_bytes=0,
        host_bytes=0,
        pinned_bytes=0,
        layers=layers,
    )


@pytest.mark.benchmark(group="metrics write")
@pytest.mark.parametrize("moving", [True, False], ids=["all-moved", "idle"])
@pytest.mark.parametrize("num_layers", [8, 48], ids=lambda n: f"{n}-layers")
def bench_write(
    benchmark: BenchmarkFixture,
    num_layers: int,
    moving: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(METRICS_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())
    series = CacheSeries()
    snapshots = [_stats(num_layers, count) for count in (1000, 2000)]
    series.write(snapshots[0])
    writes = 0

    def write() -> None:
        nonlocal writes
        writes += moving
        # Back at the first snapshot counts as a restart: every counter moves by 1000 each time.
        series.write(snapshots[writes % 2])

    benchmark(write)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    labels = {"layer": str(num_layers - 1)}
    counted = registry.get_sample_value("prefetch_runtime_expert_hits_total", labels)
    assert counted == 1000 * (writes + 1)
    values.ValueClass.close_all_files()
