"""Eviction policies: scores, their order, and the Triton form of each."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prefetch_runtime.policies import (
    EMPTY_SCORE,
    HOST_POLICY_NAMES,
    LFRU,
    LOWEST_SCORE,
    LRU,
    POLICY_NAMES,
    REBASE_SCORE,
    create_device_form,
    create_policy,
    rebase_scores,
)
from prefetch_runtime.policies.lfru import HALF_LIFE_STEPS, OCTAVE, UNITS_PER_STEP
from prefetch_runtime.slots import SlotTable

ROOT = Path(__file__).resolve().parent.parent
IDS = np.arange(1, dtype=np.int32)


def _uses(policy: LFRU, steps: list[int]) -> int:
    """Score of one expert that was used at the given steps."""
    score = policy.insert(IDS, steps[0])
    for now in steps[1:]:
        score = policy.hit(score, IDS, now)
    return int(score[0])


@pytest.mark.parametrize("name", [*POLICY_NAMES, *HOST_POLICY_NAMES])
def test_created_policy_has_the_name_it_was_asked_for(name: str) -> None:
    assert create_policy(name).name == name


@pytest.mark.parametrize("name", [*POLICY_NAMES, *HOST_POLICY_NAMES])
def test_scores_are_int32_also_when_there_are_none(name: str) -> None:
    policy = create_policy(name)
    policy.reset(8)
    none = np.empty(0, dtype=np.int32)
    assert policy.hit(none, none, 1).dtype == np.int32
    assert policy.insert(none, 1).shape == (0,)
    assert policy.hit(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), 7).dtype == np.int32


@pytest.mark.parametrize("create", [create_policy, create_device_form])
def test_unknown_policy_is_refused_with_the_choices_and_a_guess(create) -> None:
    with pytest.raises(ValueError, match=r"'lrfu'; choose one of lru, lfru.*did you mean 'l\w+u'"):
        create("lrfu")
    with pytest.raises(ValueError, match=r"'belady'; choose one of lru, lfru(, \w+)*$"):
        create("belady")


@pytest.mark.parametrize("name", HOST_POLICY_NAMES)
def test_a_policy_of_the_host_has_no_device_form_and_says_so(name: str) -> None:
    choices = ", ".join(POLICY_NAMES)
    with pytest.raises(ValueError, match=f"one of {choices}; {name!r} runs on the host only"):
        create_device_form(name)


def test_no_policy_is_named_twice() -> None:
    names = [*POLICY_NAMES, *HOST_POLICY_NAMES]
    assert len(set(names)) == len(names)
    assert "forecast" in HOST_POLICY_NAMES


def test_lru_scores_the_last_use() -> None:
    scores = np.array([3, 9], dtype=np.int32)
    assert LRU().hit(scores, np.array([4, 5], np.int32), 12).tolist() == [12, 12]
    assert LRU().insert(np.array([4, 5], np.int32), 12).tolist() == [12, 12]


def test_lfru_prefers_many_uses_to_one_that_is_slightly_newer() -> None:
    often = _uses(LFRU(), [1, 2, 3, 4])
    assert often > _uses(LFRU(), [10])


def test_lfru_forgets_old_uses() -> None:
    often_but_old = _uses(LFRU(), list(range(1, 101)))
    assert often_but_old < _uses(LFRU(), [100 + 5 * HALF_LIFE_STEPS])


def test_lfru_counts_one_more_use_as_log2_of_the_decayed_count() -> None:
    distances = np.arange(-4000, 4001)
    base = 1000 * UNITS_PER_STEP
    new = LFRU().hit((base + distances).astype(np.int32), distances.astype(np.int32), 1000)
    exact = [base + OCTAVE * math.log2(1 + 2 ** (d / OCTAVE)) for d in distances]
    assert np.abs(new - exact).max() <= 0.09 * OCTAVE


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("now", [1, 77, 1 << 20])
def test_a_hit_never_lowers_a_score_nor_reorders_experts_hit_together(name: str, now: int) -> None:
    policy = create_policy(name)
    base = now * policy.units_per_step
    old = np.arange(max(base - 5000, LOWEST_SCORE), base + 1, dtype=np.int32)
    new = policy.hit(old, old, now)
    assert (new >= old).all()
    assert (np.diff(new) >= 0).all()
    assert (new >= policy.insert(old, now)).all()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_scores_do_not_overflow_at_the_last_step_before_a_rebase(name: str) -> None:
    policy = create_policy(name)
    now = (REBASE_SCORE - 1) // policy.units_per_step
    score = np.array([LOWEST_SCORE], dtype=np.int32)
    for _ in range(100_000 // 100):
        score = policy.hit(score, IDS, now)
    assert now * policy.units_per_step <= int(score[0]) < 2**31 - 2


def test_rebase_keeps_the_order_and_the_empty_slots() -> None:
    scores = np.array([EMPTY_SCORE, 5, 900, 70, LOWEST_SCORE], dtype=np.int32)
    moved = rebase_scores(scores, 60)
    assert moved.tolist() == [EMPTY_SCORE, -55, 840, 10, LOWEST_SCORE]
    assert rebase_scores(scores, 1 << 40).tolist() == [EMPTY_SCORE] + [LOWEST_SCORE] * 4
    assert scores[2] == 900


@pytest.mark.parametrize("name", [*POLICY_NAMES, *HOST_POLICY_NAMES])
def test_order_leaves_the_scores_and_the_empty_slots_alone(name: str) -> None:
    table = SlotTable(8, 4, create_policy(name))
    for now in range(1, 6):
        table.plan([now % 2, 2], now)
    before = table.score.copy()
    order = table.policy.order(table.score, table.owner, 6)
    assert order.dtype == np.int32
    assert (order[3:] == EMPTY_SCORE).all()
    order[:] = 0
    assert (table.score == before).all()


def _hit_rates(num_slots: int) -> dict[str, float]:
    with np.load(ROOT / "models" / "tiny-moe-trace.npz", allow_pickle=False) as trace:
        topk = trace["topk"]
    rates = {}
    for name in [*POLICY_NAMES, *HOST_POLICY_NAMES]:
        tables = [SlotTable(32, num_slots, create_policy(name)) for _ in range(topk.shape[1])]
        for now, row in enumerate(topk, start=1):
            for table, ids in zip(tables, row, strict=True):
                table.plan(ids, now)
        rates[name] = float(np.mean([table.counters.hit_rate for table in tables]))
    return rates


@pytest.mark.parametrize(
    ("num_slots", "lfru_gains", "forecast_gains"), [(8, 0.02, 0.065), (16, 0.02, 0.038)]
)
def test_frequency_and_forecast_raise_the_hit_rate_on_the_recorded_trace(
    num_slots: int, lfru_gains: float, forecast_gains: float
) -> None:
    rates = _hit_rates(num_slots)
    # When chosen: 50.5, 53.2 and 57.3 % with 8 slots, 78.0, 80.3 and 82.1 % with 16.
    assert rates["lfru"] >= rates["lru"] + lfru_gains
    assert rates["forecast"] >= rates["lru"] + forecast_gains


def _cycled(table: SlotTable, rounds: int) -> None:
    """0 is always followed by 1, 2 by 3; which pair comes is random."""
    rng = np.random.default_rng(0)
    for now in range(1, 2 * rounds, 2):
        first = int(rng.choice([0, 2, 4, 6]))
        table.plan([first], now)
        table.plan([first + 1], now + 1)


def test_forecast_keeps_what_follows_the_running_demand_until_it_is_cleared() -> None:
    table = SlotTable(8, 2, create_policy("forecast"))
    all_alike = np.zeros(8, dtype=np.int32)
    everyone = np.arange(8, dtype=np.int32)
    _cycled(table, 300)
    for first in (0, 2, 4, 6):
        now = 1000 + 2 * first
        table.plan([first], now)
        assert table.policy.order(all_alike, everyone, now).argmax() == first + 1
        table.plan([first + 1], now + 1)
    table.clear()
    table.plan([0], 1)
    order = table.policy.order(all_alike, everyone, 1)
    assert len(set(order.tolist())) == 1


def test_forecast_remembers_uses_while_an_expert_is_absent() -> None:
    table = SlotTable(8, 2, create_policy("forecast"))
    for now in range(1, 9):
        table.plan([0, now % 2 + 1], now)
    kept = int(table.score[table.mapping[0]])
    table.plan([6, 7], 9)
    table.plan([0, 6], 10)
    assert int(table.score[table.mapping[0]]) > kept


def test_forecast_counts_a_prefetch_as_new_but_not_as_a_use() -> None:
    table = SlotTable(8, 4, create_policy("forecast"))
    table.plan([0, 5], 1)
    table.clear()
    table.plan([5], 1)
    table.plan([1, 2, 3, 4], 2)  # 5 has been used, and is gone
    table.reserve([5], 100, 1)
    table.commit([5], 100)
    assert table.score[table.mapping[5]] == 100 * UNITS_PER_STEP
    table.clear()
    table.plan([0], 1)
    table.reserve([5], 1, 1)
    table.commit([5], 1)
    assert table.score[table.mapping[5]] == table.score[table.mapping[0]]
    table.plan([5], 1)
    assert table.score[table.mapping[5]] == table.score[table.mapping[0]]


def test_forecast_decides_alike_after_the_clock_has_moved_back() -> None:
    rng = np.random.default_rng(3)
    young, old = (SlotTable(32, 8, create_policy("forecast")) for _ in range(2))
    start = REBASE_SCORE // UNITS_PER_STEP - 200
    for offset in range(1, 400):
        ids = rng.zipf(1.4, 6).clip(1, 32) - 1
        ours, theirs = young.plan(ids, offset), old.plan(ids, start + offset)
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs], offset
        old.check_integrity()


def _check_device_form(device: str, interpret: str) -> None:
    script = ROOT / "tests" / "helpers" / "policy_forms.py"
    environment = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_triton_form_equals_the_numpy_form_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    _check_device_form("cpu", interpret="1")


@pytest.mark.gpu
def test_triton_form_equals_the_numpy_form_on_the_gpu() -> None:
    _check_device_form("cuda", interpret="0")


def test_forecast_keeps_what_followed_the_same_demands_before() -> None:
    # 1, then 2 follow (0, 5) and 3, then 4 follow (0, 6), several times over: what each of 0, 5 and
    # 6 is followed by in the next step is the same, so only the two demands in a row can tell.
    policy = create_policy("forecast")
    policy.reset(8)
    now = 0

    def demand(expert: int) -> None:
        nonlocal now
        now += 1
        policy.miss(np.array([expert], dtype=np.int32), now)
        policy.insert(np.array([expert], dtype=np.int32), now)

    for _ in range(6):
        for expert in (5, 0, 1, 2, 6, 0, 3, 4):
            demand(expert)
    scores = np.zeros(4, dtype=np.int32)
    owner = np.array([1, 2, 3, 4], dtype=np.int32)
    demand(5)
    demand(0)
    one, two, three, four = policy.order(scores, owner, now).tolist()
    assert one > three
    assert two > four
