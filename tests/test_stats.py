"""Counters: sums, rates, and the way over RPC and back."""

import dataclasses
import json

import pytest

from prefetch_runtime.stats import LayerStats, RuntimeStats


def _layer(layer_idx: int, **counters: int) -> LayerStats:
    return LayerStats(
        layer_idx=layer_idx,
        layer_name=f"model.layers.{layer_idx}.mlp.experts",
        num_experts=32,
        num_slots=8,
        **counters,
    )


def _stats(*layers: LayerStats) -> RuntimeStats:
    return RuntimeStats(
        mode="eager",
        policy="lru",
        slot_bytes=1,
        staging_bytes=2,
        host_bytes=3,
        pinned_bytes=4,
        layers=list(layers),
    )


def test_totals_and_rates_are_over_all_layers() -> None:
    stats = _stats(
        _layer(0, hits=3, misses=1, bytes_copied=10), _layer(1, hits=0, misses=4, bytes_copied=40)
    )
    assert stats.total("hits") == 3
    assert stats.total("misses") == 5
    assert stats.total("bytes_copied") == 50
    assert stats.hit_rate == 3 / 8
    assert [layer.hit_rate for layer in stats.layers] == [0.75, 0.0]


def test_rates_before_any_demand_are_zero() -> None:
    assert _layer(0).hit_rate == 0.0
    assert _stats().hit_rate == 0.0
    assert _stats(_layer(0)).hit_rate == 0.0


def test_a_snapshot_survives_json() -> None:
    stats = _stats(_layer(0, hits=3, waves=2), _layer(1, evictions=7))
    assert RuntimeStats.from_dict(json.loads(json.dumps(stats.as_dict()))) == stats


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _layer(0).hits = 1  # type: ignore[misc]


def test_a_counter_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        _stats(_layer(0)).total("hit")
