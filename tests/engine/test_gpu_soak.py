"""Mode `full` for ten thousand replayed steps of changing routing and batch sizes, on a GPU."""

from typing import Any

import pytest

from tests.engine.gpu_runs import (
    Plan,
    assert_same,
    batch,
    engine,
    record_of,
    run_plans,
    runs_of,
    stats_of,
)
from tests.engine.test_gpu_full import GRAPHS

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

SLOTS = 16
TOKENS = 512
RUNS = [
    batch(
        f"{index}-{1 + index % 4}",
        [5 + 17 * index + 40 * row for row in range(1 + index % 4)],
        TOKENS,
        seed=1000 + 10 * index,
        temperature=0.8,
    )
    for index in range(21)
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same runs by vLLM alone and by the cache, in a process each."""
    settings = {"slots_per_layer": SLOTS, "mode": "full", "predictor": "next_gate"}
    plans = [
        Plan("alone", [engine("alone", RUNS, llm=GRAPHS, limit_s=250)]),
        Plan("cached", [engine("cached", RUNS, settings, llm=GRAPHS, limit_s=250)]),
    ]
    return run_plans(plans, tmp_path_factory.mktemp("soak"), budget_s=280)


def test_ten_thousand_steps_were_replays(records: dict[str, Any]) -> None:
    runs = runs_of(records, "cached")
    replayed = 0
    for run in runs.values():
        prompts = len(run["tokens"])
        steps = {len(tokens) for tokens in run["tokens"]}
        assert steps == {TOKENS}
        # Every prompt may have cost a step or two of the host, in all eight layers.
        assert run["host_calls"] <= 8 * 3 * prompts
        replayed += TOKENS - 3 * prompts
    assert replayed > 10_000
    stats = stats_of(list(runs.values())[-1])
    assert stats.total("evictions") > 10_000
    assert stats.total("prefetched") > 1_000


def test_tokens_are_those_of_resident_experts(records: dict[str, Any]) -> None:
    assert_same(runs_of(records, "cached"), runs_of(records, "alone"))


def test_every_slot_held_its_expert_after_every_run(records: dict[str, Any]) -> None:
    for run in runs_of(records, "cached").values():
        assert run["audit"] == []


def test_no_memory_was_lost_on_the_way(records: dict[str, Any]) -> None:
    allocated = [run["allocated"] for run in record_of(records, "cached")["runs"].values()]
    # From the fifth run on every batch size has been seen.
    assert set(allocated[4:]) == {allocated[4]}
