"""Measures the host time of one SlotTable call: 128 experts, 64 slots, 8 demanded.

Not measured: copies, and the device table in `graphs`.
"""

from itertools import count

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from prefetch_runtime.policies import HOST_POLICY_NAMES, POLICY_NAMES, create_policy
from prefetch_runtime.slots import SlotTable

NUM_EXPERTS, NUM_SLOTS, TOP_K, STEPS = 128, 64, 8, 500


def _demands(zipf: float) -> list[np.ndarray]:
    """Token sets [1, TOP_K] int32 with a popularity of rank ** -zipf."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, NUM_EXPERTS + 1) ** -zipf
    weights /= weights.sum()
    return [
        rng.choice(NUM_EXPERTS, (1, TOP_K), replace=False, p=weights).astype(np.int32)
        for _ in range(STEPS)
    ]


@pytest.mark.benchmark(group=f"plan x {STEPS}")
@pytest.mark.parametrize("zipf", [0.0, 1.0], ids=["uniform", "zipf-1.0"])
@pytest.mark.parametrize("policy", POLICY_NAMES + HOST_POLICY_NAMES)
def bench_plan(benchmark: BenchmarkFixture, policy: str, zipf: float) -> None:
    """Time of STEPS plans; divide by STEPS."""
    table = SlotTable(NUM_EXPERTS, NUM_SLOTS, create_policy(policy))
    demands = _demands(zipf)
    clock = count(1)

    def replay() -> None:
        for ids in demands:
            table.plan(ids, next(clock))

    benchmark(replay)
    benchmark.extra_info["hit_rate"] = round(table.counters.hit_rate, 3)
    if benchmark.stats is not None:
        per_plan_us = benchmark.stats.stats.median / STEPS * 1e6
        benchmark.extra_info["per_plan_us"] = round(per_plan_us, 1)
    table.check_integrity()
    assert table.counters.hits > 0
    assert table.counters.misses > 0


@pytest.mark.benchmark(group=f"plan, all resident x {STEPS}")
@pytest.mark.parametrize("policy", POLICY_NAMES + HOST_POLICY_NAMES)
def bench_plan_of_residents(benchmark: BenchmarkFixture, policy: str) -> None:
    """The common case of a warm cache: nothing to load."""
    table = SlotTable(NUM_EXPERTS, NUM_EXPERTS, create_policy(policy))
    table.plan(range(NUM_EXPERTS), 1)
    demands = _demands(1.0)
    clock = count(2)

    def replay() -> None:
        for ids in demands:
            table.plan(ids, next(clock))

    benchmark(replay)
    assert table.counters.misses == NUM_EXPERTS


@pytest.mark.benchmark(group=f"reserve, commit, plan x {STEPS}")
def bench_prefetch(benchmark: BenchmarkFixture) -> None:
    """One speculative expert per step beside the demand."""
    table = SlotTable(NUM_EXPERTS, NUM_SLOTS, create_policy("lru"))
    demands = _demands(1.0)
    clock = count(1)

    def replay() -> None:
        for ids in demands:
            now = next(clock)
            taken, _ = table.reserve(ids, now, 1)
            table.commit(taken, now)
            table.plan(ids, now)

    benchmark(replay)
    table.check_integrity()
    assert table.counters.prefetch_used > 0
