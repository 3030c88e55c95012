"""A recorded run replayed by the simulator, and what prediction changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from prefetch_runtime.recorder import TraceRecorder
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.stats import RuntimeStats
from prefetch_runtime.trace import Trace, load_trace
from tests.engine.conftest import BATCHES, EXPERT_BYTES, PREDICTED

COUNTERS = (
    "hits",
    "late",
    "misses",
    "evictions",
    "prefetched",
    "prefetch_used",
    "prefetch_dropped",
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def stats_of(record: dict[str, Any]) -> RuntimeStats:
    """The counters behind an engine's last batch."""
    assert "error" not in record, record["error"]
    *_, last = record["batches"].values()
    return RuntimeStats.from_dict(last["rpc"]["prefetch_stats"])


def check_counters(
    stats: RuntimeStats,
    trace: Trace,
    wide_steps: Literal["token", "expert"] = "token",
    **settings: Any,
) -> None:
    """Replay the trace, and compare every layer's counters with the engine's."""
    simulated = simulate(
        trace,
        SimulationSettings(
            num_slots=stats.layers[0].num_slots,
            policy=stats.policy,
            link_gbs=float("inf"),  # host copies are there at once
            expert_bytes=EXPERT_BYTES,
            wide_steps=wide_steps,
            **settings,
        ),
    )
    for engine, model in zip(stats.layers, simulated.layers, strict=True):
        for counter in COUNTERS:
            assert getattr(engine, counter) == getattr(model, counter), (engine.layer_idx, counter)


PREDICTION = {
    "predictor": PREDICTED["predictor"],
    "budget_bytes": int(PREDICTED["prefetch_budget_mib"] * 2**20),
}
"""The settings of `predicted-8`, as the simulator calls them."""


@pytest.mark.parametrize(("name", "settings"), [("lru-16", {}), ("predicted-8", PREDICTION)])
def test_the_simulator_counts_what_the_engine_counted(
    name: str, settings: dict[str, Any], cached: dict[str, Any]
) -> None:
    stats = stats_of(cached[name])
    check_counters(stats, load_trace(cached[name]["trace"]), **settings)
    assert bool(stats.total("prefetch_used")) == (name == "predicted-8")
    assert stats.total("bytes_copied") == stats.total("misses") * EXPERT_BYTES
    assert stats.total("bytes_prefetched") == stats.total("prefetched") * EXPERT_BYTES


@pytest.mark.parametrize("name", ["lru-16", "predicted-8"])
def test_a_trace_holds_every_token_and_who_asked_for_it(name: str, cached: dict[str, Any]) -> None:
    trace = load_trace(cached[name]["trace"])
    assert trace.num_layers == 8
    assert trace.num_experts == 32
    assert trace.next_gate is not None
    requests = sum(len(batch["prompts"]) for batch in BATCHES)
    assert set(trace.sequence.tolist()) == set(range(requests))
    # The last token of each request is never fed back.
    generated = sum(len(batch["prompts"]) * batch["max_tokens"] for batch in BATCHES)
    assert trace.num_tokens > generated - requests


def test_prediction_raises_the_hit_rate(cached: dict[str, Any]) -> None:
    assert stats_of(cached["predicted-8"]).hit_rate > stats_of(cached["lfru-8"]).hit_rate


def test_a_trace_that_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    from prefetch_runtime.vllm import PrefetchWorker

    recorder = TraceRecorder(num_layers=1, num_experts=4, max_tokens=8)
    recorder.record(0, np.array([[0, 3]], dtype=np.int32), None)
    scheduler = SimpleNamespace(recorder=recorder)
    worker: Any = SimpleNamespace(prefetch_engine=SimpleNamespace(scheduler=scheduler))
    with pytest.raises(FileNotFoundError):
        PrefetchWorker.prefetch_trace_save(worker, str(tmp_path / "gone" / "t.npz"))
    held = PrefetchWorker.prefetch_trace_save(worker, str(tmp_path / "t.npz"))
    assert held["tokens"] == 1
    assert load_trace(tmp_path / "t.npz").topk.tolist() == [[[0, 3]]]
    with pytest.raises(RuntimeError, match="no trace is being recorded"):
        PrefetchWorker.prefetch_trace_save(worker, str(tmp_path / "t.npz"))
