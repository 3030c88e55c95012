"""How many slots "auto" finds on a GPU: what else the cache and vLLM need has its place first."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime.config import PrefetchConfig
from prefetch_runtime.vllm.engine import PrefetchEngine

MIB = 1 << 20
LAYERS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 64, 8, 2048, 2048
EXPERT_BYTES = 9 * MIB
WAVE_ROWS = TOKENS * TOP_K * HIDDEN * 2
RING = 32 * EXPERT_BYTES


def slots_on(gib: float, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Slots per layer on a GPU of that size, where a GiB is taken and the KV cache gets another."""
    device = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**30)
    layout = SimpleNamespace(payload_bytes=EXPERT_BYTES)
    store = SimpleNamespace(num_experts=EXPERTS, layout=layout)
    engine: Any = PrefetchEngine.__new__(PrefetchEngine)
    engine.device = torch.device("cuda", 0)
    engine.config = PrefetchConfig(slots_per_layer="auto", **settings)
    engine.mode = "full"
    engine._top_k, engine._auto, engine._slot_bytes = 0, None, None
    engine.host_store = SimpleNamespace(
        layers=[store] * LAYERS, total_bytes=LAYERS * EXPERTS * EXPERT_BYTES
    )
    engine._vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=2**30),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
    )
    slots: int = engine.slots_for("layers.0", store, top_k=TOP_K, is_first=True)
    return slots


def within(gib: float, *taken: int) -> float:
    """Slots per layer that what is left of a GPU holds."""
    return (gib * 2**30 * 0.9 * 0.9 - 2 * 2**30 - sum(taken)) / (LAYERS * EXPERT_BYTES)


def test_the_ring_and_the_rows_of_waves_have_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots_on(4.0, monkeypatch) == int(within(4.0, WAVE_ROWS, RING)) < int(within(4.0))
    ring = 2 * EXPERT_BYTES
    assert slots_on(4.0, monkeypatch, staging_slots=2) == int(within(4.0, WAVE_ROWS, ring))


def test_where_all_experts_have_slots_there_is_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 5.4
    assert within(gib, WAVE_ROWS, RING) < EXPERTS < within(gib, WAVE_ROWS)
    assert slots_on(gib, monkeypatch) == EXPERTS
