"""Eviction policies: scores, their order, and the Triton form of each."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eviction_bounds import hit_rates
from prefetch_runtime.policies import (
    EMPTY_SCORE,
    HOST_POLICY_NAMES,
    LFRU,
    LOWEST_SCORE,
    LRU,
    POLICY_NAMES,
    REBASE_SCORE,
    EvictionPolicy,
    create_device_form,
    create_policy,
    rebase_scores,
)
from prefetch_runtime.policies import forecast as forecast_module
from prefetch_runtime.policies.lfru import HALF_LIFE_STEPS, OCTAVE, UNITS_PER_STEP
from prefetch_runtime.slots import SlotTable
from prefetch_runtime.trace import load_trace

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


def _recorded() -> tuple[np.ndarray, int]:
    trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
    return trace.topk, trace.num_experts


# Whole trace, first half, second half; the constants of forecast were chosen on the first half.
@pytest.mark.parametrize(
    ("num_slots", "name", "expected"),
    [
        (8, "lru", (50.5, 51.4, 49.5)),
        (8, "lfru", (53.2, 54.0, 52.5)),
        (8, "forecast", (58.4, 59.7, 57.2)),
        (16, "lru", (78.0, 78.2, 77.9)),
        (16, "lfru", (80.3, 80.7, 80.0)),
        (16, "forecast", (83.0, 83.7, 82.3)),
    ],
)
def test_hit_rates_on_the_recorded_trace_are_known(
    num_slots: int, name: str, expected: tuple[float, float, float]
) -> None:
    rates = hit_rates(name, *_recorded(), num_slots)
    # Scores are integers, but what forecast adds to them is rounded as the machine does.
    tolerance = 0.2 if name == "forecast" else 0.05
    assert [100 * rate for rate in rates] == pytest.approx(expected, abs=tolerance)


def test_knowing_the_next_step_lies_between_forecast_and_the_bound() -> None:
    topk, num_experts = _recorded()
    names = ("forecast", "next 1 known", "next 2 known", "next 8 known", "belady")
    found = [hit_rates(name, topk[:512], num_experts, 8)[0] for name in names]
    assert found[:4] == sorted(found[:4])
    assert found[1] > found[0] + 0.01
    assert found[4] >= found[3] > found[4] - 0.005


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


def test_forecast_takes_a_demanded_expert_for_used_once_beside_a_prefetched_one() -> None:
    policy = create_policy("forecast")
    policy.reset(8)
    policy.miss(np.array([1]), 5)
    demanded, prefetched = policy.insert(np.array([1, 2]), 5).tolist()
    assert demanded == prefetched == 5 * UNITS_PER_STEP
    assert policy.insert(np.array([1, 2]), 5).tolist() == [demanded, prefetched]


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


def _demand(policy: EvictionPolicy, expert_ids: list[int], now: int) -> None:
    """As a table does it when nothing is resident."""
    ids = np.array(expert_ids, dtype=np.intp)
    policy.miss(ids, now)
    policy.insert(ids, now)


def _foretold(policy: EvictionPolicy, num_experts: int, now: int) -> list[int]:
    """Worth of every expert to come, with its own past left out."""
    alike = np.full(num_experts, LOWEST_SCORE, dtype=np.int32)
    return policy.order(alike, np.arange(num_experts), now).tolist()


def _worth_as_described(demands: list[list[int]], num_experts: int, most_steps: int) -> list[float]:
    """What the module's text says, without any of its code: uses, the last demand running."""
    likeness: dict[int, float] = {}
    first = 0
    for now, running in enumerate(demands):
        if now - first > most_steps:
            first += most_steps // 2
        before = {then: x for then, x in likeness.items() if then >= first}
        likeness = {}
        for then in range(first, now):
            common = len({*running} & {*demands[then]})
            cosine = common / math.sqrt(len(running) * len(demands[then]))
            likeness[then] = cosine + 0.5 * before.get(then - 1, 0.0)
    best = max(likeness.values(), default=0.0)
    alike = [then for then, x in likeness.items() if x >= best - 0.6][-32:]
    weights = {then: math.exp(7 * (likeness[then] - best)) for then in alike}
    worth = []
    for expert in range(num_experts):
        count = sum(
            2 ** -((len(demands) - 1 - at) / 8) for at, ids in enumerate(demands) if expert in ids
        )
        mean = 0.0
        for then, weight in weights.items():
            soon = demands[then + 1 : then + 9]
            waits = [wait for wait, ids in enumerate(soon) if expert in ids]
            mean += weight * (0.75 ** waits[0] if waits else 0.0)
        worth.append(count + 16 * mean / (sum(weights.values()) or 1.0))
    return worth


@pytest.mark.parametrize("most_steps", [512, 16])
def test_forecast_is_worth_what_its_text_says(
    most_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_module, "MAX_STEPS", most_steps)
    rng = np.random.default_rng(5)
    policy = create_policy("forecast")
    policy.reset(12)
    table = SlotTable(12, 6, policy)
    demands: list[list[int]] = []
    for now in range(1, 120):
        demands.append(rng.permutation(12)[: rng.integers(1, 6)].tolist())
        if now > 3 and now % 3 == 0:
            demands[-1] = list(demands[-3])
        table.plan(demands[-1], now)
        residents = table.owner[table.owner >= 0]
        order = policy.order(table.score, table.owner, now)[table.owner >= 0] / 2**18
        expected = np.array(_worth_as_described(demands, 12, most_steps))[residents]
        assert order == pytest.approx(expected, abs=0.02, rel=0.01), now


def test_forecast_tells_more_by_demands_that_are_alike_in_part() -> None:
    policy = create_policy("forecast")
    policy.reset(16)
    steps = [[0, 1, 2], [8], [3, 4, 5], [9]] * 4 + [[0, 1, 6]]
    for now, ids in enumerate(steps, start=1):
        _demand(policy, ids, now)
    worth = _foretold(policy, 16, len(steps))
    assert worth[8] > 1.5 * worth[9] > 0


def test_forecast_values_what_comes_sooner() -> None:
    policy = create_policy("forecast")
    policy.reset(16)
    for now, expert in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0], start=1):
        _demand(policy, [expert], now)
    worth = _foretold(policy, 16, 12)
    assert worth[1] > worth[2] > worth[3] > worth[8] > 0
    assert worth[9] == worth[11] == 0  # too late, and never


def test_forecast_forgets_the_oldest_steps_and_still_tells() -> None:
    policy = create_policy("forecast")
    policy.reset(32)
    most = forecast_module.MAX_STEPS
    rng = np.random.default_rng(11)
    for now, expert in enumerate([30, 31, *rng.integers(0, 20, most - 3)], start=1):
        _demand(policy, [expert], now)
    _demand(policy, [30], most)
    assert _foretold(policy, 32, most)[31] > 0
    for now in range(most + 1, 3 * most):
        _demand(policy, [now % 4], now)
    assert np.argmax(_foretold(policy, 32, now)) == (now + 1) % 4
    _demand(policy, [30], 3 * most)
    assert _foretold(policy, 32, 3 * most)[31] == 0


@pytest.mark.parametrize("width", [1, 3])
def test_forecast_hears_a_demand_in_parts_as_in_one(width: int) -> None:
    rng = np.random.default_rng(7)
    whole, parts = create_policy("forecast"), create_policy("forecast")
    whole.reset(16)
    parts.reset(16)
    for now in range(1, 60):
        ids = rng.permutation(16)[:6].tolist()
        _demand(whole, ids, now)
        for first in range(0, 6, width):
            _demand(parts, ids[first : first + width], now)
            _foretold(parts, 16, now)  # asked in the middle of a demand
        assert _foretold(parts, 16, now) == pytest.approx(_foretold(whole, 16, now), abs=64)
