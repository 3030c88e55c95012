"""The cache against vLLM alone: same tokens, same bits out of every MoE layer, sound slots."""

from typing import Any

import pytest
import torch

from benchmarks.reference import differences
from prefetch_runtime.stats import RuntimeStats
from tests.engine.conftest import BATCHES, GIB_OF_23_EXPERTS, LAYERS, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

SLOTS = {"lru-4": 4, "lru-8": 8, "lru-16": 16, "lru-32": 32, "lfru-4": 4, "lfru-8": 8}
AUTO = 32 if torch.cuda.is_available() else 16
EXACT = [*SLOTS, "predicted-8", "gib", "auto"]
VLLM_EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"


def _batches(cached: dict[str, Any], name: str) -> dict[str, Any]:
    assert "error" not in cached[name], cached[name]["error"]
    batches: dict[str, Any] = cached[name]["batches"]
    return batches


def _differences(cached: dict[str, Any], name: str, resident: dict[str, Any]) -> list[str]:
    batches = _batches(cached, name)
    return differences(batches, {batch: resident[batch] for batch in batches})


def _stats(cached: dict[str, Any], name: str, batch: str) -> RuntimeStats:
    return RuntimeStats.from_dict(_batches(cached, name)[batch]["rpc"]["prefetch_stats"])


# The reference


def test_the_reference_repeats_itself(reference: dict[str, Any]) -> None:
    assert differences(reference["repeat"], reference["resident"]) == []


def test_the_reference_recorded_what_is_compared(resident: dict[str, Any]) -> None:
    assert list(resident) == [batch["name"] for batch in BATCHES]
    for batch in BATCHES:
        record = resident[batch["name"]]
        assert [len(tokens) for tokens in record["tokens"]] == [batch["max_tokens"]] * len(
            batch["prompts"]
        )
        assert list(record["layers"]) == LAYERS
        for outputs in record["layers"].values():
            assert len(set(outputs)) == len(outputs), "every forward gives something else"


def test_a_prompt_among_them_was_cut_into_chunks(resident: dict[str, Any]) -> None:
    def forwards(batch: str) -> int:
        return len(resident[batch]["layers"][0])

    assert forwards("one-short") == 24  # a prompt in one piece, then a forward per token
    assert forwards("one-chunked") == 1 + 16
    assert forwards("sixteen") > 1 + 16


# The cache


@pytest.mark.parametrize("name", EXACT)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    name: str, cached: dict[str, Any], resident: dict[str, Any]
) -> None:
    assert _differences(cached, name, resident) == []


def test_the_large_matrix_ran_every_batch(cached: dict[str, Any]) -> None:
    for name in ("lru-4", "lru-8", "lru-16", "lru-32", "lfru-8"):
        assert list(_batches(cached, name)) == [batch["name"] for batch in BATCHES]


@pytest.mark.parametrize("name", EXACT)
def test_every_slot_holds_its_expert_after_every_batch(name: str, cached: dict[str, Any]) -> None:
    for batch in _batches(cached, name).values():
        assert batch["rpc"]["prefetch_audit"] == []


@pytest.mark.parametrize(("name", "slots"), [*SLOTS.items(), ("gib", 12), ("auto", AUTO)])
def test_the_cache_had_the_slots_that_were_asked_for(
    name: str, slots: int, cached: dict[str, Any]
) -> None:
    stats = _stats(cached, name, "four")
    assert [layer.num_slots for layer in stats.layers] == [slots] * 8
    assert [layer.num_experts for layer in stats.layers] == [32] * 8
    assert stats.policy == name.partition("-")[0].replace("gib", "lru").replace("auto", "lru")
    expert_bytes = 3 * 64 * 128 * 2
    assert stats.slot_bytes == 8 * slots * expert_bytes
    assert stats.host_bytes == 8 * 32 * expert_bytes


def test_fewer_slots_miss_more_and_a_slot_for_each_expert_evicts_nothing(
    cached: dict[str, Any],
) -> None:
    stats = [_stats(cached, f"lru-{slots}", "sixteen") for slots in (4, 8, 16, 32)]
    misses = [entry.total("misses") for entry in stats]
    assert misses == sorted(misses, reverse=True)
    assert len(set(misses)) == 4
    assert stats[0].total("evictions") > 0
    assert stats[3].total("evictions") == 0
    assert stats[3].total("misses") == 0, "all were brought in before the first request"
    for entry in stats:
        assert entry.total("bytes_copied") == entry.total("misses") * 3 * 64 * 128 * 2


def test_what_vllm_routed_to_warm_up_is_not_counted(cached: dict[str, Any]) -> None:
    stats = _stats(cached, "lru-32", "one-short")
    assert [layer.steps for layer in stats.layers] == [24] * 8


# The proofs themselves


@pytest.mark.parametrize("name", ["corrupt-8", "corrupt-32"])
def test_a_wrong_mapping_is_seen_in_tokens_layers_and_audit(
    name: str, cached: dict[str, Any], resident: dict[str, Any]
) -> None:
    found = _differences(cached, name, resident)
    assert any("tokens differ" in line for line in found)
    for batch in ("one-short", "four"):
        assert any(line.startswith(f"{batch}: layer 7: ") for line in found)
        assert _batches(cached, name)[batch]["rpc"]["prefetch_audit"]


# Trouble


def test_requests_aborted_or_refused_leave_later_ones_exact(
    cached: dict[str, Any], resident: dict[str, Any]
) -> None:
    assert _differences(cached, "trouble", resident) == []
    for batch in _batches(cached, "trouble").values():
        assert batch["rpc"]["prefetch_audit"] == []


def test_the_aborts_came_in_the_middle(cached: dict[str, Any]) -> None:
    assert cached["trouble"]["before"]["generated"] == {"decoding": 3, "other": 40}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("reload", "UnsupportedError: reloading weights is not supported with the expert cache"),
        ("update", "UnsupportedError: updating weights is not supported with the expert cache"),
        ("sleep", "UnsupportedError: sleep mode is not supported with the expert cache"),
        ("sleep", "no request runs until wake_up (POST /wake_up) is called"),
        ("reset", "UnsupportedError: resetting weights is not supported with the expert cache"),
        ("checksums", "UnsupportedError: computing checksums of weights is not supported"),
        ("save", "UnsupportedError: saving weights is not supported with the expert cache"),
        ("tensorize", "UnsupportedError: saving weights is not supported with the expert cache"),
        ("too long", "maximum context length is 512 tokens"),
    ],
)
def test_calls_that_would_break_the_cache_are_refused(
    call: str, message: str, cached: dict[str, Any]
) -> None:
    assert message in cached["trouble"]["before"]["refused"][call]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too-few",
            "ConfigError: 'slots_per_layer' (--moe-expert-cache-size) 3 gives 3 slots to "
            f"each MoE layer of {MODEL}, but one token needs 4 experts at once; "
            "set 'slots_per_layer' (--moe-expert-cache-size) between 4 and 32",
        ),
        (
            # While layers are built, with nothing loaded: after that it would be 2 slots for all 8.
            "too-little",
            f"ConfigError: 'expert_cache_gib' (--moe-expert-cache-gib) {GIB_OF_23_EXPERTS:g} gives "
            "at most 3 slots to model.layers.5.mlp.experts, but one token needs 4 experts at once; "
            "set 'slots_per_layer' (--moe-expert-cache-size) between 4 and 32",
        ),
        (
            "too-many",
            "ConfigError: 'slots_per_layer' (--moe-expert-cache-size) 33 asks for 33 slots, but "
            f"each MoE layer of {MODEL} has only 32 experts; "
            "set 'slots_per_layer' (--moe-expert-cache-size) between 4 and 32",
        ),
    ],
)
def test_slots_that_cannot_work_end_the_start(
    name: str, message: str, cached: dict[str, Any]
) -> None:
    assert cached[name]["error"].rstrip().endswith(message)


# On and off


def test_with_the_cache_on_every_layer_is_ours_with_as_many_rows_as_slots(
    cached: dict[str, Any],
) -> None:
    found = cached["lru-8"]["before"]
    assert set(found["experts"]) == {"prefetch_runtime.vllm.routed_experts.PrefetchRoutedExperts"}
    assert found["rows"] == [8] * 8
    assert found["runner"].startswith("prefetch_runtime.vllm.model_runner.Prefetch")
    assert "prefetch_engine" in found["attributes"]


@pytest.mark.parametrize("name", ["off", "zero"])
def test_with_the_cache_off_nothing_of_ours_is_on_the_path(
    name: str, cached: dict[str, Any], resident: dict[str, Any]
) -> None:
    assert _differences(cached, name, resident) == []
    found = cached[name]["before"]
    assert set(found["experts"]) == {VLLM_EXPERTS}
    assert found["rows"] == [32] * 8
    assert found["runner"].startswith("vllm.")
    assert set(found["attributes"]) == set()
    assert found["patched"] == []
    assert found["rpc"] == {"prefetch_stats": None, "prefetch_audit": []}


def test_an_engine_that_has_ended_leaves_vllms_classes_as_they_were(
    cached: dict[str, Any],
) -> None:
    for name, record in cached.items():
        assert record["registered"] == [], name


def test_an_engine_that_has_ended_leaves_none_of_its_memory(cached: dict[str, Any]) -> None:
    assert {name: record["left"] for name, record in cached.items() if record["left"]} == {}


def test_so_does_one_that_vllm_gives_up_when_the_experts_are_loaded(cached: dict[str, Any]) -> None:
    assert "prefetch_runtime" not in cached["no-room"]["error"], "vLLM's own refusal"
    assert "cache" in cached["no-room"]["error"].splitlines()[-1]
