"""Mode `segmented` on a GPU: vLLM's FULL decode graphs, broken where the host decides, bit for bit.

The same comparison as for `full` (see `test_gpu_full.py`): the reference replays the same batch
sizes as whole graphs, and every token and layer output must be equal. Seven processes at once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gpu_runs import (
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    Plan,
    assert_same,
    batch,
    engine,
    record_of,
    run_plans,
    runs_of,
    stats_of,
)
from tests.engine.test_gpu_full import (
    DEFAULT,
    GRAPHS,
    MIXED,
    ONE,
    SHORT_FOUR,
    SIZES,
    TOKENS,
    TRACED,
)

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

SIXTEEN = batch("sixteen", [5 + round(index * 395 / 15) for index in range(16)], 192, seed=30)
RUNS = [ONE, SHORT_FOUR, SIXTEEN, MIXED]
SHORT_RUNS = [ONE, MIXED]
SLOTS = {"segmented-8": 8, "segmented-32": 32, "segmented-16": 16, "segmented-4": 4}
WIDEST = {slots: max(size for size in SIZES if size * TOP_K <= slots) for slots in (4, 8, 16, 32)}
"""Most tokens of a batch whose experts fit so many slots, whatever they are."""
WIDEST[32] = SIZES[-1]  # a slot for every expert
BUDGET = {"prefetch_budget_mib": 16.0}
MORE: dict[str, dict[str, Any]] = {
    # `auto`: these rule out one whole graph, not graphs.
    "forecast-8": {"mode": "auto", "slots_per_layer": 8, "policy": "forecast"},
    "next-gate-8": {"slots_per_layer": 8, "policy": "lfru", "predictor": "next_gate", **BUDGET},
    "transition-16": {"slots_per_layer": 16, "predictor": "transition", **BUDGET},
    "frequency-8": {"mode": "auto", "slots_per_layer": 8, "predictor": "frequency", **BUDGET},
    "previous-token-16": {"slots_per_layer": 16, "predictor": "previous_token", **BUDGET},
}


def cache(name: str, runs: Any, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An engine with the cache in segmented mode, unless the settings name another."""
    return engine(name, runs, {"mode": "segmented", **settings}, **more)


def plans(folder: Path) -> Iterator[Plan]:
    """All engines; the names say what they are."""
    steps = TOKENS + 64
    yield Plan(
        "reference",
        [engine("resident", RUNS, llm=GRAPHS, widest=sorted(set(WIDEST.values())))],
        steps=steps,
    )
    cached = [
        cache(name, RUNS, {"slots_per_layer": slots}, llm=GRAPHS, mislead=name[-2:] == "32")
        for name, slots in SLOTS.items()
    ]
    more = [cache(name, SHORT_RUNS, settings, llm=GRAPHS) for name, settings in MORE.items()]
    yield Plan("many", cached[:2], steps=steps)
    yield Plan("few", cached[2:], steps=steps)
    yield Plan("more", more, steps=steps)
    # What Inductor makes adds up in another order at each start, so nothing is compared with "on":
    # it shows that compiled code is captured and broken alike. The traced pair is compared.
    traced = {**TRACED["compilation_config"], "cudagraph_mode": "FULL_DECODE_ONLY"}
    yield Plan(
        "compiled",
        [
            engine("traced-off", SHORT_RUNS, llm={"compilation_config": traced}, widest=[2]),
            cache("traced-on", SHORT_RUNS, {"slots_per_layer": 8}, llm=TRACED),
            cache("on", SHORT_RUNS, {"slots_per_layer": 8}, llm=DEFAULT, limit_s=200),
        ],
        steps=steps,
        environment={"VLLM_CACHE_ROOT": str(folder / "vllm-cache")},
    )
    for second in (  # its graphs cannot be captured twice in one process
        engine("v2-resident", SHORT_RUNS, llm=GRAPHS, widest=[2]),
        cache("v2-segmented-8", SHORT_RUNS, {"slots_per_layer": 8}, llm=GRAPHS),
    ):
        yield Plan(
            str(second["name"]),
            [second],
            steps=steps,
            environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        )


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of every engine."""
    folder = tmp_path_factory.mktemp("segmented")
    return run_plans(list(plans(folder)), folder, budget_s=400)


def reference_for(records: dict[str, Any], slots: int) -> dict[str, Any]:
    """What vLLM alone does when it replays the batch sizes that fit so many slots."""
    return runs_of(records, "resident", WIDEST[slots])


def slots_of(name: str) -> int:
    return SLOTS[name] if name in SLOTS else int(MORE[name]["slots_per_layer"])


EVERY = [*SLOTS, *MORE]


@pytest.mark.parametrize("name", EVERY)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    name: str, records: dict[str, Any]
) -> None:
    assert_same(runs_of(records, name), reference_for(records, slots_of(name)))


def test_traced_and_cut_by_torch_compile_they_are_too(records: dict[str, Any]) -> None:
    assert_same(runs_of(records, "traced-on"), runs_of(records, "traced-off", 2))


def test_with_the_second_runner_they_are_too(records: dict[str, Any]) -> None:
    runner = record_of(records, "v2-segmented-8")["about"]["runner"]
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in runner
    assert_same(runs_of(records, "v2-segmented-8"), runs_of(records, "v2-resident", 2))


@pytest.mark.parametrize("name", [*EVERY, "traced-on", "on", "v2-segmented-8"])
def test_batches_that_fit_are_replayed_in_segments_and_others_run_as_waves(
    name: str, records: dict[str, Any]
) -> None:
    record = record_of(records, name)
    slots = slots_of(name) if name in EVERY else 8
    kept = [size for size in SIZES if size <= WIDEST[slots]]
    assert record["about"]["captured"] == kept
    assert record["about"]["segments"] == [NUM_LAYERS + 1] * len(kept), "broken at prepare only"
    for key, run in record["runs"].items():
        assert run["audit"] == []
        for at, (tokens, widest, calls) in enumerate(run["steps"]):
            fits = widest == 1 and tokens <= WIDEST[slots]
            assert calls == (0 if fits else NUM_LAYERS), f"{key}, step {at}: {tokens} tokens"
        stats = stats_of(run)
        assert stats.mode == "segmented"
        assert min(layer.steps for layer in stats.layers) > 0
    if slots < NUM_EXPERTS:
        waves = [layer.waves - layer.steps for layer in stats_of(record["runs"]["mixed"]).layers]
        assert min(waves) > 0, "prompts of 300 tokens need more experts than there are slots"


@pytest.mark.parametrize("name", SLOTS)
def test_the_host_planned_every_step(name: str, records: dict[str, Any]) -> None:
    run = runs_of(records, name)["one"]
    for layer in stats_of(run).layers:
        assert layer.steps == len(run["steps"])
        assert layer.hits + layer.late + layer.misses >= TOP_K * len(run["steps"])


def test_predictions_were_made(records: dict[str, Any]) -> None:
    # The last token's experts are resident under LRU, so that there is nothing to bring in.
    predicted = {"next-gate-8", "transition-16", "frequency-8"}
    for name in MORE:
        stats = stats_of(runs_of(records, name)["one"])
        assert (stats.total("prefetched") > 0) == (name in predicted), name


def test_scheduling_was_asynchronous(records: dict[str, Any]) -> None:
    for name in ("segmented-8", "on", "v2-segmented-8"):
        assert record_of(records, name)["about"]["async_scheduling"]


def test_a_wrong_mapping_is_seen_by_the_audit_and_changes_tokens(records: dict[str, Any]) -> None:
    misled = record_of(records, "segmented-32")["misled"]
    found = "\n".join(misled["audit_exchanged"])
    for expert in misled["experts"]:
        assert f"layer {misled['layer']}: expert {expert} is in slot" in found
    assert misled["audit_restored"] == []
    reference = reference_for(records, 32)
    for name, run in misled["runs"].items():
        assert run["audit"]
        assert run["tokens"] != reference[name]["tokens"]


def test_the_reference_ran_before_any_of_our_code_was_loaded(records: dict[str, Any]) -> None:
    for name in ("resident", "traced-off", "v2-resident"):
        assert record_of(records, name)["loaded"] == []
