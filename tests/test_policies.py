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


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_created_policy_has_the_name_it_was_asked_for(name: str) -> None:
    assert create_policy(name).name == name


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_scores_are_int32_also_when_there_are_none(name: str) -> None:
    policy = create_policy(name)
    none = np.empty(0, dtype=np.int32)
    assert policy.hit(none, none, 1).dtype == np.int32
    assert policy.insert(none, 1).shape == (0,)
    assert policy.hit(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), 7).dtype == np.int32


@pytest.mark.parametrize("create", [create_policy, create_device_form])
def test_unknown_policy_is_refused_with_the_choices_and_a_guess(create) -> None:
    with pytest.raises(ValueError, match=r"'lrfu'; choose lru or lfru; did you mean 'l\w+u'"):
        create("lrfu")
    with pytest.raises(ValueError, match=r"'belady'; choose lru or lfru$"):
        create("belady")


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


@pytest.mark.parametrize("num_slots", [8, 16])
def test_lfru_is_not_worse_than_lru_on_the_recorded_trace(num_slots: int) -> None:
    with np.load(ROOT / "models" / "tiny-moe-trace.npz", allow_pickle=False) as trace:
        topk = trace["topk"]
    rates = {}
    for name in POLICY_NAMES:
        tables = [SlotTable(32, num_slots, create_policy(name)) for _ in range(topk.shape[1])]
        for now, row in enumerate(topk, start=1):
            for table, ids in zip(tables, row, strict=True):
                table.plan(ids, now)
        rates[name] = np.mean([table.counters.hit_rate for table in tables])
    assert rates["lfru"] >= rates["lru"] + 0.02  # 53.2 to 50.5 and 80.3 to 78.0 % when chosen


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
