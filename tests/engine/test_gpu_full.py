"""Mode `full` on a GPU: decode as vLLM's own FULL graphs, bit for bit what vLLM alone does.

Exact means: against vLLM with the same graphs. A batch that vLLM pads to a captured size, or runs
compiled otherwise, adds up in another order; so the reference runs FULL_DECODE_ONLY too. Seven
at once: vLLM alone, the cache with many and with few slots, both under torch.compile, and both with
vLLM's V2 runner, whose graphs cannot be captured twice in one process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference import differences
from tests.engine.gpu_runs import (
    NUM_EXPERTS,
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

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

SIZES = [1, 2, 4, 8, 16]
GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": SIZES,
    }
}
# What Inductor chooses by timing differs from one start to the next, and with it the order of
# additions; vLLM alone differs from itself (seen: in one token of 512, or from the 19th on). These
# choices are fixed, the rest is vLLM's default. See also TORCHINDUCTOR_DETERMINISTIC below. That is
# not always enough, so what must be equal is the traced pair.
COMPILED = {
    "cudagraph_capture_sizes": SIZES,
    "inductor_compile_config": {"combo_kernels": False, "benchmark_combo_kernel": False},
}
# Traced and cut as by default, but run without Inductor: nothing is chosen by timing.
TRACED = {"compilation_config": {**COMPILED, "backend": "eager"}}
LIKE_OURS = {"compilation_config": {**COMPILED, "cudagraph_mode": "FULL_DECODE_ONLY"}}
DEFAULT = {"compilation_config": COMPILED}

# Requests that come while others decode: prompts of 300 tokens are read between replays, together
# with the next tokens of the others, and there are batches of 1 to 13 tokens that are decoded.
MIXED = {
    "name": "mixed",
    "requests": [
        [at, prompt(length, 100 + at), max_tokens]
        for at, length, max_tokens in (
            (0, 5, 160),
            (8, 300, 96),
            (16, 37, 64),
            (17, 300, 64),
            (40, 129, 48),
            (60, 300, 40),
            (61, 5, 40),
            (62, 64, 24),
            *((90 + index, 20 + 13 * index, 20) for index in range(8)),
        )
    ],
}
TOKENS = 512
ONE = batch("one", [5], TOKENS, seed=1)
SAMPLED = batch("one-sampled", [40], TOKENS, seed=2, temperature=0.8)
FOUR = batch("four", [5, 37, 129, 300], TOKENS, seed=10)
RUN_OF_16 = [5 + round(index * 395 / 15) for index in range(16)]
SIXTEEN = batch("sixteen", RUN_OF_16, TOKENS, seed=30)
SHORT_FOUR = batch("four", [5, 37, 129, 300], 96, seed=10)
RUNS = [ONE, FOUR, SIXTEEN, SAMPLED, MIXED]
SHORT_RUNS = [ONE, SHORT_FOUR, MIXED]

SLOTS = {"full-8": 8, "full-32": 32, "full-16": 16, "full-4": 4}
SEVERAL_WAVES = {"staging_slots": 16}  # where "auto" holds all of such small experts
MORE = {
    "full-lfru-8": {"slots_per_layer": 8, "policy": "lfru"},
    "full-predicted-8": {"slots_per_layer": 8, "predictor": "next_gate"},
}


def cache(name: str, runs: Any, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An engine with the cache in full mode."""
    return engine(name, runs, {"mode": "full", **settings}, **more)


def plans(folder: Path) -> Iterator[Plan]:
    """All engines; the names say what they are."""
    steps = TOKENS + 64
    yield Plan(
        "reference",
        [
            engine("resident", RUNS, llm=GRAPHS),
            engine("repeat", [ONE, FOUR, SAMPLED, MIXED], llm=GRAPHS),
        ],
        steps=steps,
    )
    yield Plan(
        "cached",
        [
            *(
                cache(
                    name,
                    RUNS,
                    {"slots_per_layer": slots, **SEVERAL_WAVES},
                    llm=GRAPHS,
                    mislead=name == "full-32",
                )
                for name, slots in SLOTS.items()
                if slots != TOP_K
            ),
        ],
        steps=steps,
    )
    yield Plan(
        "more",
        [
            *(
                cache(name, [ONE, SAMPLED, MIXED], settings, llm=GRAPHS)
                for name, settings in MORE.items()
            ),
            cache("full-4", RUNS, {"slots_per_layer": TOP_K, **SEVERAL_WAVES}, llm=GRAPHS),
        ],
        steps=steps,
    )
    yield Plan(
        "compiled",
        [
            engine("off", SHORT_RUNS, llm=LIKE_OURS, limit_s=200),
            cache("on", SHORT_RUNS, {"slots_per_layer": 8}, llm=DEFAULT, limit_s=200),
            engine("off-again", SHORT_RUNS, llm=LIKE_OURS, limit_s=200),
        ],
        steps=steps,
        environment={
            "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
            "TORCHINDUCTOR_DETERMINISTIC": "1",
        },
    )
    traced_alone = {
        "compilation_config": {
            **TRACED["compilation_config"],
            "cudagraph_mode": "FULL_DECODE_ONLY",
        }
    }
    yield Plan(
        "traced",
        [
            engine("traced-off", SHORT_RUNS, llm=traced_alone),
            cache("traced-on", SHORT_RUNS, {"slots_per_layer": 8}, llm=TRACED),
        ],
        steps=steps,
        environment={"VLLM_CACHE_ROOT": str(folder / "vllm-cache-traced")},
    )
    eager = {"enforce_eager": True}
    in_eager = {"slots_per_layer": 8, "mode": "eager"}
    for name, engines in (
        (
            "v2-alone",
            [
                engine("v2-resident-eager", [SHORT_FOUR, MIXED], llm=eager),
                engine("v2-resident", SHORT_RUNS, llm=GRAPHS),
            ],
        ),
        (
            "v2-cached",
            [
                engine("v2-eager-8", [SHORT_FOUR, MIXED], in_eager, llm=eager),
                cache("v2-full-8", SHORT_RUNS, {"slots_per_layer": 8}, llm=GRAPHS),
            ],
        ),
    ):
        yield Plan(name, engines, steps=steps, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of every engine, and the compile cache that the compiled ones left."""
    folder = tmp_path_factory.mktemp("full")
    records = run_plans(list(plans(folder)), folder, budget_s=290)
    compiled = folder / "vllm-cache" / "torch_compile_cache"
    aot = compiled / "torch_aot_compile"
    kept = aot if aot.is_dir() else compiled
    records["compile cache"] = {
        "folders": sorted(entry.name for entry in kept.iterdir()) if kept.is_dir() else []
    }
    return records


def assert_decoding_was_replayed(runs: dict[str, Any]) -> None:
    """Batches that only decode were replays without a call of ours, all other steps were not."""
    for name, run in runs.items():
        for at, (tokens, widest, calls) in enumerate(run["steps"]):
            decodes = widest == 1 and tokens <= SIZES[-1]
            assert calls == (0 if decodes else NUM_LAYERS), f"{name}, step {at}: {tokens} tokens"


# The reference


@pytest.mark.parametrize("name", ["resident", "repeat", "off", "v2-resident-eager", "v2-resident"])
def test_the_reference_ran_before_any_of_our_code_was_loaded(
    name: str, records: dict[str, Any]
) -> None:
    assert record_of(records, name)["loaded"] == []


def test_the_reference_repeats_itself(records: dict[str, Any]) -> None:
    again = runs_of(records, "repeat")
    resident = runs_of(records, "resident")
    assert_same(again, {name: resident[name] for name in again})


def test_the_reference_replayed_too(records: dict[str, Any]) -> None:
    runs = runs_of(records, "resident")
    assert list(runs) == [run["name"] for run in RUNS]
    assert_decoding_was_replayed(runs)


def test_the_runs_are_what_they_are_meant_to_be(records: dict[str, Any]) -> None:
    runs = runs_of(records, "resident")
    for run in (ONE, FOUR, SIXTEEN, SAMPLED):
        assert {len(tokens) for tokens in runs[run["name"]]["tokens"]} == {TOKENS}
    steps = runs["mixed"]["steps"]
    decoding = [at for at, (_, widest, _) in enumerate(steps) if widest == 1]
    reading = [at for at, (_, widest, _) in enumerate(steps) if widest > 1]
    between = [at for at in reading if decoding[0] < at < decoding[-1]]
    assert len(between) > 8, "prompts are read between replays"
    assert any(tokens > widest > 250 for tokens, widest, _ in steps), "in mixed batches"
    decoded = {tokens for tokens, widest, _ in steps if widest == 1}
    assert {1, 2, 3} <= decoded, "captured sizes, and one that is padded"
    assert max(decoded) > 8


# The cache


@pytest.mark.parametrize("name", SLOTS)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    name: str, records: dict[str, Any]
) -> None:
    ours, reference = runs_of(records, name), runs_of(records, "resident")
    assert list(ours) == list(reference)
    assert_same(ours, reference)


@pytest.mark.parametrize("name", MORE)
def test_another_policy_and_prediction_change_nothing(name: str, records: dict[str, Any]) -> None:
    ours, reference = runs_of(records, name), runs_of(records, "resident")
    assert_same(ours, {run: reference[run] for run in ours})


def test_another_policy_and_prediction_were_at_work(records: dict[str, Any]) -> None:
    assert stats_of(runs_of(records, "full-lfru-8")["one"]).policy == "lfru"
    predicted = stats_of(runs_of(records, "full-predicted-8")["one"])
    assert predicted.total("prefetched") > predicted.total("prefetch_used") > 0


@pytest.mark.parametrize("name", [*SLOTS, *MORE, "on", "v2-eager-8", "v2-full-8"])
def test_every_slot_holds_its_expert_after_every_run(name: str, records: dict[str, Any]) -> None:
    for run in runs_of(records, name).values():
        assert run["audit"] == []


@pytest.mark.parametrize(
    ("name", "slots"),
    [*SLOTS.items(), *((name, 8) for name in MORE), ("on", 8), ("v2-full-8", 8)],
)
def test_every_decode_batch_is_one_graph_and_prompts_run_as_waves(
    name: str, slots: int, records: dict[str, Any]
) -> None:
    record = record_of(records, name)
    assert record["about"]["captured"] == SIZES, "also those that may not fit the slots"
    assert_decoding_was_replayed(record["runs"])
    for run in record["runs"].values():
        assert stats_of(run).mode == "full"
        # Counted by the cache, and by the recorder around it: the host was called as often.
        assert run["host_calls"] == sum(calls for _, _, calls in run["steps"])
    if slots < NUM_EXPERTS:
        waves = [layer.waves for layer in stats_of(record["runs"]["mixed"]).layers]
        assert min(waves) > 0, "prompts of 300 tokens need more experts than there are slots"


@pytest.mark.parametrize(("name", "least"), [("full-4", 2.0), ("full-8", 1.5), ("full-16", 1.0)])
def test_wide_batches_decoded_in_waves_inside_the_graph(
    name: str, least: float, records: dict[str, Any]
) -> None:
    runs = runs_of(records, name)
    before, after = (stats_of(runs[run]) for run in ("four", "sixteen"))
    waves = after.total("waves") - before.total("waves")
    assert waves > least * TOKENS * NUM_LAYERS, "of sixteen tokens with four experts each"
    assert runs["sixteen"]["host_calls"] < TOKENS * NUM_LAYERS / 4, "not by the host"


@pytest.mark.parametrize("name", ["resident", "full-8", "on", "v2-full-8"])
def test_scheduling_was_asynchronous(name: str, records: dict[str, Any]) -> None:
    assert record_of(records, name)["about"]["async_scheduling"]


def test_experts_were_missed_and_evicted_inside_the_graphs(records: dict[str, Any]) -> None:
    for name in ("full-4", "full-8", "full-16"):
        runs = runs_of(records, name)
        # These decode one token at a time, in graphs; `mixed` comes after them.
        before, after = (stats_of(runs[run]) for run in ("sixteen", "one-sampled"))
        assert after.total("evictions") - before.total("evictions") > TOKENS, name
        assert after.total("hits") - before.total("hits") > TOKENS, name


# The proofs themselves


def test_a_wrong_entry_of_the_device_table_is_seen_by_the_audit(records: dict[str, Any]) -> None:
    misled = record_of(records, "full-32")["misled"]
    found = "\n".join(misled["audit_exchanged"])
    for expert in misled["experts"]:
        assert f"layer {misled['layer']}: expert {expert} is in slot" in found
        assert f"should hold expert {expert}, but" in found
    assert misled["audit_restored"] == []


def test_a_wrong_device_table_changes_tokens_and_layer_outputs(records: dict[str, Any]) -> None:
    reference = runs_of(records, "resident")
    for name, run in record_of(records, "full-32")["misled"]["runs"].items():
        assert run["audit"]
        assert run["tokens"] != reference[name]["tokens"]
        assert run["layers"][0] != reference[name]["layers"][0]


# Under torch.compile: off, on, off, with a compile cache of their own


def test_compiled_by_inductor_they_agree_where_vllm_agrees_with_itself(
    records: dict[str, Any],
) -> None:
    off, again = runs_of(records, "off"), runs_of(records, "off-again")
    unsteady = differences(again, off)
    if unsteady:  # seen from the 19th, 98th and 407th forward on; nothing can be said of ours then
        pytest.skip(f"vLLM alone differs between two starts under Inductor: {unsteady[0]}")
    assert_same(runs_of(records, "on"), off)


def test_traced_and_cut_without_inductor_they_agree(records: dict[str, Any]) -> None:
    assert_same(runs_of(records, "traced-on"), runs_of(records, "traced-off"))


def test_the_third_start_found_its_compile_cache_and_nobody_elses(records: dict[str, Any]) -> None:
    loaded = [
        record_of(records, name)["about"]["aot_artifacts_loaded"]
        for name in ("off", "on", "off-again")
    ]
    assert loaded == [0, 0, 1]
    assert len(records["compile cache"]["folders"]) == 2


def test_decoding_was_left_to_full_graphs_whatever_the_default_is(records: dict[str, Any]) -> None:
    for name in ("off", "on", "off-again"):
        about = record_of(records, name)["about"]
        assert about["cudagraph_mode"] == "FULL_DECODE_ONLY"


# vLLM's V2 runner


@pytest.mark.parametrize("name", ["v2-resident-eager", "v2-resident", "v2-eager-8", "v2-full-8"])
def test_the_runner_was_the_second(name: str, records: dict[str, Any]) -> None:
    runner = record_of(records, name)["about"]["runner"]
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in runner


def test_the_second_runner_serves_the_cache_eagerly(records: dict[str, Any]) -> None:
    assert_same(runs_of(records, "v2-eager-8"), runs_of(records, "v2-resident-eager"))


def test_the_second_runner_serves_the_cache_in_full_graphs(records: dict[str, Any]) -> None:
    assert_same(runs_of(records, "v2-full-8"), runs_of(records, "v2-resident"))
