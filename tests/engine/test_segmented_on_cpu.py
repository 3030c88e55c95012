"""Mode `segmented` through the real engine: same bits, sound slots, and Python only at the breaks.

There are no CUDA graphs on a CPU. `tests/helpers/replayed_ops.py` stands in for them: it records
the operations of a decode step and replays them, so that what vLLM's Python and ours did between
them does not happen again, unless a segment ended there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from predictors import PredictorShape, TransitionPredictor
from prefetch_runtime.stats import RuntimeStats
from tests.engine.gpu_runs import (
    NUM_LAYERS,
    TOP_K,
    Plan,
    assert_same,
    batch,
    engine,
    prompt,
    record_of,
    run_plans,
    runs_of,
    stats_of,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the graphs are real"),
]

RUNS = [
    batch("one", [5], 16, seed=1),
    batch("two", [5, 40], 6, seed=3),
    {
        "name": "mixed",
        "requests": [[0, prompt(5, 1), 12], [4, prompt(40, 2), 6], [6, prompt(9, 3), 4]],
    },
]
SHAPE = PredictorShape(num_layers=NUM_LAYERS, num_experts=32, top_k=TOP_K)
BUDGET = {"prefetch_budget_mib": 16.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "lru-8": {"slots_per_layer": 8},
    "predicted-16": {"slots_per_layer": 16, "policy": "lfru", "predictor": "next_gate", **BUDGET},
    "learned-16": {
        "slots_per_layer": 16,
        "policy": "forecast",
        "predictor": "transition",
        **BUDGET,
    },
}


BEFORE = 1000
"""What every count of the table is with which the predictor of `learned-16` begins."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where that table is (before.npz), and what is saved at the end (after.npz)."""
    folder = tmp_path_factory.mktemp("tables")
    before = TransitionPredictor(SHAPE)
    before.counts[:] = BEFORE
    before.save(folder / "before.npz")
    return folder


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> dict[str, Any]:
    def cached(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        if name == "learned-16":
            of_table = {"predictor_table": "before", "save_table": "after"}
            settings = {**settings, **{k: str(tables / f"{v}.npz") for k, v in of_table.items()}}
        made = engine(name, RUNS, settings, llm={"enforce_eager": True})
        made["llm"]["worker_cls"] = "tests.engine.segmented_worker.SegmentedWorker"
        return made

    plan = Plan(
        "segmented",
        [
            engine("resident", RUNS, llm={"enforce_eager": True}),
            *(cached(name, settings) for name, settings in SETTINGS.items()),
        ],
        steps=64,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Threads that wait for each other take twenty times as long.
            "OMP_NUM_THREADS": "1",
        },
    )
    return run_plans([plan], tmp_path_factory.mktemp("segmented"), budget_s=240)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    name: str, records: dict[str, Any]
) -> None:
    assert_same(runs_of(records, name), runs_of(records, "resident"))


@pytest.mark.parametrize("name", SETTINGS)
def test_decode_steps_that_fit_are_replayed_and_others_are_not(
    name: str, records: dict[str, Any]
) -> None:
    record = record_of(records, name)
    slots = SETTINGS[name]["slots_per_layer"]
    replays = captures = 0
    for run in record["runs"].values():
        for tokens, widest, calls in run["steps"]:
            if widest == 1 and tokens * TOP_K <= slots:
                # A capture is a warm-up and the capture itself.
                assert calls in (0, 2 * NUM_LAYERS)
                replays += calls == 0
                captures += calls > 0
            else:
                assert calls == NUM_LAYERS
        assert run["audit"] == []
    assert captures == {8: 2, 16: 3}[slots], "one for each batch size"
    assert replays > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_the_host_planned_in_every_replay(name: str, records: dict[str, Any]) -> None:
    stats = stats_of(runs_of(records, name)["one"])
    assert stats.mode == "segmented"
    for layer in stats.layers:
        assert layer.steps == len(runs_of(records, name)["one"]["steps"])
        assert layer.misses + layer.prefetched > 0
        assert layer.hits > 0


def test_predictions_were_made_between_segments(records: dict[str, Any]) -> None:
    def predicted(name: str) -> RuntimeStats:
        return stats_of(runs_of(records, name)["one"])

    assert predicted("lru-8").total("prefetched") == 0
    assert predicted("predicted-16").total("prefetch_used") > 50
    assert predicted("learned-16").total("prefetch_used") > 0


@pytest.mark.usefixtures("records")
def test_what_was_learned_goes_on_from_a_table_and_is_saved_at_the_end(tables: Path) -> None:
    learned = TransitionPredictor.load(tables / "after.npz", SHAPE).counts - BEFORE
    assert (learned >= 0).all()
    fed = 0  # the last token of a request is never fed back
    for run in RUNS:
        asked = run.get("requests") or [[0, p, run["max_tokens"]] for p in run["prompts"]]
        fed += sum(len(prompt) + new - 1 for _, prompt, new in asked)
    # No more than that: what vLLM's warm-up routed is forgotten.
    assert learned.sum(axis=(1, 2)).tolist() == [fed * TOP_K**2] * (NUM_LAYERS - 1)
