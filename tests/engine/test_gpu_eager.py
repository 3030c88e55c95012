"""The cache on a GPU in eager mode against vLLM alone: same tokens, same bits of every layer.

Two processes at once. vLLM alone runs first in one of them, before any of our code is loaded.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import LOAD_FORMAT, write_shape
from tests.engine.gpu_runs import (
    EXPERT_BYTES,
    LAYERS,
    NUM_EXPERTS,
    NUM_LAYERS,
    Plan,
    assert_same,
    batch,
    engine,
    record_of,
    run_plans,
    runs_of,
    stats_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

EAGER = {"enforce_eager": True}
TOKENS = 128
RUNS = [
    batch("one", [5], TOKENS, seed=1),
    batch("four", [5, 37, 129, 250], TOKENS, seed=10),
    batch("one-chunked", [400], TOKENS, seed=20),
    batch("one-sampled", [40], TOKENS, seed=25, temperature=0.8),
    batch("sixteen", [5 + round(index * 395 / 15) for index in range(16)], TOKENS, seed=30),
]
SLOTS = {"lru-4": 4, "lru-8": 8, "lru-16": 16, "lru-32": 32, "lfru-8": 8, "lru-predicted-8": 8}

# A shape whose experts, 9 GiB, do not fit where their slots do. vLLM has tuned its kernels for 128
# experts of this size, which tiny-moe's are not.
SHAPE_LAYERS, SHAPE_EXPERTS, SHAPE_SLOTS = 8, 128, 32
SHAPE_EXPERT_BYTES = 3 * 2048 * 768 * 2
GIB = 2**30
MEMORY_GIB = 6.0
SHAPE_RUNS = [
    batch("prompt", [600], 1, seed=50),
    batch("one", [64], 16, seed=51),
    batch("four", [64, 80, 96, 112], 16, seed=52),
]


def shape_engine(
    name: str, folder: Path, settings: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """An engine of the large shape with random weights, the same bytes wherever they are kept."""
    llm: dict[str, Any] = {
        **EAGER,
        "model": str(folder),
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
    }
    layers = [0, SHAPE_LAYERS - 1]
    more |= {"weights": "random", "layers": layers}
    return engine(name, SHAPE_RUNS, settings, llm=llm, **more)


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of every engine."""
    shape = write_shape(
        "qwen3-30b-a3b",
        tmp_path_factory.mktemp("shape"),
        num_hidden_layers=SHAPE_LAYERS,
        vocab_size=32768,
    )
    alone: dict[str, Any] = {"llm": EAGER, "layers": LAYERS}

    def cached(name: str) -> dict[str, Any]:
        settings = {
            "slots_per_layer": SLOTS[name],
            "policy": name.partition("-")[0],
            "predictor": "next_gate" if "predicted" in name else "none",
            "mode": "eager",
            "staging_slots": 16,  # several waves, where "auto" holds all of such small experts
        }
        return engine(name, RUNS, settings, mislead=name == "lru-32", **alone)

    first = [
        engine("resident", RUNS, **alone),
        engine("repeat", RUNS, **alone),
        shape_engine("shape", shape),
        cached("lfru-8"),
        cached("lru-predicted-8"),
        shape_engine("shape-cramped", shape, memory_gib=MEMORY_GIB),
    ]
    second = [
        shape_engine("shape-32", shape, {"slots_per_layer": SHAPE_SLOTS}, memory_gib=MEMORY_GIB),
        *(cached(name) for name in ("lru-8", "lru-4", "lru-16", "lru-32")),
    ]
    return run_plans(
        [Plan("first", first), Plan("second", second)],
        tmp_path_factory.mktemp("eager"),
        budget_s=280,
    )


@pytest.fixture
def resident(records: dict[str, Any]) -> dict[str, Any]:
    """What vLLM alone does."""
    return runs_of(records, "resident")


# The reference


@pytest.mark.parametrize("name", ["resident", "repeat", "shape"])
def test_the_reference_ran_before_any_of_our_code_was_loaded(
    name: str, records: dict[str, Any]
) -> None:
    assert record_of(records, name)["loaded"] == []


def test_the_reference_repeats_itself(records: dict[str, Any], resident: dict[str, Any]) -> None:
    assert_same(runs_of(records, "repeat"), resident)


def test_the_reference_recorded_what_is_compared(resident: dict[str, Any]) -> None:
    assert list(resident) == [run["name"] for run in RUNS]
    for run in RUNS:
        record = resident[run["name"]]
        assert [len(tokens) for tokens in record["tokens"]] == [TOKENS] * len(run["prompts"])
        assert list(record["layers"]) == LAYERS
        for outputs in record["layers"].values():
            assert len(set(outputs)) > 10, "forwards differ from each other"


def test_prompts_among_them_were_cut_into_chunks(resident: dict[str, Any]) -> None:
    def forwards(run: str) -> int:
        return len(resident[run]["layers"][0])

    assert forwards("one") == TOKENS
    assert forwards("one-chunked") == TOKENS + 1
    assert forwards("sixteen") > TOKENS + 1


# The cache


@pytest.mark.parametrize("name", SLOTS)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    name: str, records: dict[str, Any], resident: dict[str, Any]
) -> None:
    ours = runs_of(records, name)
    assert list(ours) == list(resident)
    assert_same(ours, resident)


@pytest.mark.parametrize("name", [*SLOTS, "shape-32"])
def test_every_slot_holds_its_expert_after_every_run(name: str, records: dict[str, Any]) -> None:
    for run in runs_of(records, name).values():
        assert run["audit"] == []


@pytest.mark.parametrize(("name", "slots"), SLOTS.items())
def test_the_cache_had_the_slots_and_the_policy_that_were_asked_for(
    name: str, slots: int, records: dict[str, Any]
) -> None:
    stats = stats_of(runs_of(records, name)["sixteen"])
    assert stats.mode == "eager"
    assert stats.policy == name.partition("-")[0]
    assert [layer.num_slots for layer in stats.layers] == [slots] * NUM_LAYERS
    assert stats.slot_bytes == NUM_LAYERS * slots * EXPERT_BYTES
    assert stats.host_bytes == NUM_LAYERS * NUM_EXPERTS * EXPERT_BYTES


def test_fewer_slots_miss_more_and_a_slot_for_each_expert_evicts_nothing(
    records: dict[str, Any],
) -> None:
    names = ("lru-4", "lru-8", "lru-16", "lru-32")
    stats = [stats_of(runs_of(records, name)["sixteen"]) for name in names]
    misses = [entry.total("misses") for entry in stats]
    assert misses == sorted(misses, reverse=True)
    assert len(set(misses)) == len(misses)
    assert stats[0].total("evictions") > 0
    assert stats[-1].total("evictions") == 0
    assert all(layer.misses <= NUM_EXPERTS for layer in stats[-1].layers)


def test_the_next_layers_experts_were_predicted(records: dict[str, Any]) -> None:
    stats = stats_of(runs_of(records, "lru-predicted-8")["sixteen"])
    assert stats.total("prefetched") > 0
    assert stats.total("prefetch_used") > 0


# The proofs themselves


def test_a_wrong_entry_of_the_mapping_is_seen_by_the_audit(records: dict[str, Any]) -> None:
    misled = record_of(records, "lru-32")["misled"]
    first, second = misled["experts"]
    found = "\n".join(misled["audit_exchanged"])
    for expert in (first, second):
        assert f"layer {misled['layer']}: expert {expert} is in slot" in found
        assert f"should hold expert {expert}, but" in found
    assert misled["audit_restored"] == []


def test_a_wrong_mapping_changes_tokens_and_layer_outputs(
    records: dict[str, Any], resident: dict[str, Any]
) -> None:
    for name, run in record_of(records, "lru-32")["misled"]["runs"].items():
        assert run["audit"]
        assert run["tokens"] != resident[name]["tokens"]
        assert run["layers"][0] != resident[name]["layers"][0]


# Memory


def test_experts_that_do_not_fit_are_served_bit_for_bit(records: dict[str, Any]) -> None:
    ours, reference = runs_of(records, "shape-32"), runs_of(records, "shape")
    assert list(ours) == [run["name"] for run in SHAPE_RUNS]
    assert_same(ours, reference)


def test_they_do_not_fit_without_the_cache(records: dict[str, Any]) -> None:
    assert "out of memory" in records["shape-cramped"].get("error", "it ran").lower()
    resident = record_of(records, "shape")
    assert resident["about"]["memory"]["experts"] > MEMORY_GIB * GIB
    assert resident["peak_reserved"] > MEMORY_GIB * GIB


def test_device_memory_is_the_slots_and_little_else(records: dict[str, Any]) -> None:
    record = record_of(records, "shape-32")
    slots = SHAPE_LAYERS * SHAPE_SLOTS * SHAPE_EXPERT_BYTES
    stats = stats_of(record["runs"]["one"])
    assert stats.slot_bytes == pytest.approx(slots, rel=0.02)
    memory = record["about"]["memory"]
    assert memory["experts"] == pytest.approx(slots, rel=0.02)
    assert record["peak_reserved"] <= MEMORY_GIB * GIB
    # Dense weights, slots, ring and KV cache; the rest is what vLLM works with, and our rows.
    known = memory["dense"] + slots + stats.staging_bytes + (1 << 30)
    assert known <= record["allocated"] <= known + GIB // 2


def test_pinned_memory_is_the_experts_and_little_else(records: dict[str, Any]) -> None:
    stats = stats_of(runs_of(records, "shape-32")["one"])
    experts = SHAPE_LAYERS * SHAPE_EXPERTS * SHAPE_EXPERT_BYTES
    assert stats.pinned_bytes == pytest.approx(experts, rel=0.03)
    assert stats.host_bytes == pytest.approx(experts, rel=0.03)
