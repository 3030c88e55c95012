"""Synthetic histories: what one layer's counters would say, step for step."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from prefetch_runtime.budget import FIRST_RETRY_STEPS, BudgetController
from prefetch_runtime.stats import LayerStats

EXPERT_BYTES = 1_000_000
LINK = 50e9
DEMANDED = 4
FREE_S = 60e-6  # three experts' time on the link
EMPTY = LayerStats(layer_idx=1, layer_name="", num_experts=128, num_slots=32)

Precision = Callable[[int], float]


class History:
    """Two layers under a controller that looks every 32 steps; the second is predicted.

    Without prediction each demands DEMANDED absent experts a step.
    """

    def __init__(self, *, free_s: float = FREE_S, link: float = LINK, num_slots: int = 32) -> None:
        self.controller = BudgetController([EXPERT_BYTES] * 2)
        self.num_slots = num_slots
        self.free_s = free_s
        self.link = link
        self.budgets: list[int] = []
        self.steps = 0
        self._at_once = self._late = self._prefetched = self._saved = 0.0

    @property
    def stats(self) -> list[LayerStats]:
        stall_s = DEMANDED * self.steps * EXPERT_BYTES / self.link
        copied = DEMANDED * self.steps * EXPERT_BYTES
        both = replace(EMPTY, num_slots=self.num_slots, steps=self.steps, bytes_copied=copied)
        predicted = replace(
            both,
            misses=DEMANDED * self.steps - int(self._at_once),
            link_free_seconds=self.steps * self.free_s,
            prefetch_at_once=int(self._at_once),
            bytes_late=int(self._late * EXPERT_BYTES),
            bytes_prefetched=int(self._prefetched * EXPERT_BYTES),
            stall_seconds=stall_s - self._saved * EXPERT_BYTES / self.link,
        )
        return [replace(both, misses=DEMANDED * self.steps, stall_seconds=stall_s), predicted]

    def run(
        self, steps: int, precision: float | Precision, *, late: float = 0.0, saves: float = 1.0
    ) -> None:
        """`precision`: share of what is prefetched that is there when its demand comes; `late`:
        share that is half there; `saves`: how much of those bytes' time the stall is shorter."""
        for _ in range(steps):
            share = precision(self.steps) if callable(precision) else precision
            experts = self.controller.budgets[1] / EXPERT_BYTES
            self._at_once += share * experts
            self._late += late * experts / 2
            self._saved += saves * (share + late / 2) * experts
            self._prefetched += experts
            self.steps += 1
            if self.steps % 32 == 0:
                self.controller.observe(self.stats)
                self.budgets.append(self.controller.budgets[1])

    def restart(self) -> None:
        self.controller.restarted()
        self.steps = 0
        self._at_once = self._late = self._prefetched = self._saved = 0.0

    @property
    def is_on(self) -> bool:
        return self.controller.is_on[1]

    @property
    def switches(self) -> int:
        on = [budget > 0 for budget in self.budgets]
        return sum(a != b for a, b in itertools.pairwise(on))


def test_the_budget_is_what_the_link_has_time_for() -> None:
    history = History()
    assert history.controller.budgets[1] == EXPERT_BYTES  # until it is known
    history.run(1024, 0.7)
    assert history.controller.budgets[1] == pytest.approx(FREE_S * LINK, rel=0.02)


def test_the_link_is_as_fast_as_demanded_copies_were() -> None:
    controller = BudgetController([EXPERT_BYTES], link_bytes_per_s=10e9)
    for i in range(1, 40):
        copied, stall = i * 64 << 20, i * (64 << 20) / 25e9
        controller.observe([replace(EMPTY, steps=i, bytes_copied=copied, stall_seconds=stall)])
    assert controller.link_bytes_per_s == pytest.approx(25e9, rel=0.01)


def test_copies_of_wide_steps_say_nothing_about_the_link() -> None:
    controller = BudgetController([EXPERT_BYTES], link_bytes_per_s=10e9)
    for i in range(1, 40):  # nearly all hidden behind compute
        copied, stall = i * 64 << 20, i * 1e-4
        controller.observe(
            [replace(EMPTY, steps=i, waves=5 * i, bytes_copied=copied, stall_seconds=stall)]
        )
    assert controller.link_bytes_per_s == 10e9


def test_a_good_predictor_stays_on_with_one_budget() -> None:
    history = History()
    history.run(100_000, lambda step: 0.6 if step % 7 else 0.2)
    assert history.is_on
    assert history.switches == 0
    assert len(set(history.budgets[10:])) == 1


def test_late_bytes_pay_for_themselves() -> None:
    history = History()
    history.run(20_000, 0.0, late=0.9)
    assert history.is_on


def test_garbage_goes_off_and_is_retried_at_growing_intervals() -> None:
    history = History()
    history.run(200_000, 0.06)
    on = [i * 32 for i, budget in enumerate(history.budgets) if budget]
    assert sum(budget > 0 for budget in history.budgets) < 0.01 * len(history.budgets)
    begun = [at for at, before in zip(on[1:], on, strict=False) if at - before > 32]
    assert 4 <= len(begun) <= 9
    gaps = [b - a for a, b in itertools.pairwise(begun)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_it_is_said_once_that_prediction_pays_in_no_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    history = History()
    history.run(6_000, 0.05)
    assert not caplog.records, "two trials say little"
    history.run(100_000, 0.05)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "tried 3 times in every layer and did not pay" in record.getMessage()


def test_nothing_is_said_where_it_pays_in_some_layer(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = History(), History()
    both = BudgetController([EXPERT_BYTES] * 3)
    for _ in range(1000):
        good.run(32, 0.7)
        bad.run(32, 0.0)
        both.observe([*good.stats, bad.stats[1]])
    assert both.is_on[1:] == [True, False]
    assert len(caplog.records) == 1, "the controller of `bad` alone, where it is the only layer"


def test_what_begins_to_pay_is_found_out() -> None:
    history = History()
    history.run(3_000, 0.05)
    assert not history.is_on
    history.run(10_000, 0.7)
    assert history.is_on


def test_what_stops_paying_goes_off_soon_however_long_it_paid() -> None:
    history = History()
    history.run(50_000, 0.7)
    assert history.is_on
    history.run(1_000, 0.02)
    assert not history.is_on
    history.run(2 * FIRST_RETRY_STEPS, 0.7)  # and is not held against it
    assert history.is_on


@pytest.mark.parametrize("period", [64, 200, 1000, 3000])
def test_an_alternating_workload_does_not_flap(period: int) -> None:
    history = History()
    history.run(300_000, lambda step: 0.7 if step // period % 2 else 0.02)
    assert history.switches <= 16


def test_balances_around_the_threshold_do_not_flap() -> None:
    history = History()
    history.run(300_000, lambda step: 0.22 + (0.12 if step // 64 % 2 else -0.12))
    assert history.switches <= 16


def test_a_window_too_short_for_a_tenth_of_an_expert_is_none() -> None:
    history = History(free_s=1e-6)
    history.run(1024, 0.9)
    assert history.controller.budgets[1] == 0


def test_without_a_clock_one_expert_is_tried() -> None:
    history = History(free_s=0.0)
    history.run(1024, 0.9)
    assert history.controller.budgets[1] == EXPERT_BYTES


def test_layers_are_judged_one_by_one() -> None:
    good, bad = History(), History()
    both = BudgetController([EXPERT_BYTES] * 3)
    for _ in range(40):
        good.run(32, 0.7)
        bad.run(32, 0.0)
        both.observe([*good.stats, bad.stats[1]])
    assert both.is_on[1:] == [True, False]


def test_bytes_that_are_there_and_shorten_no_stall_do_not_pay() -> None:
    history = History()
    history.run(20_000, 0.7, saves=0.1)
    assert not history.is_on
    assert history.switches <= 10


def test_what_is_copied_behind_the_demand_slows_nothing() -> None:
    # The window holds 0.4 of an expert. A demanded one is copied to its end, and counts as there;
    # 0.15 of its time is saved.
    controller = BudgetController([EXPERT_BYTES] * 2)
    for steps in range(64, 4096, 64):
        stall_s = DEMANDED * steps * EXPERT_BYTES / LINK
        first = replace(
            EMPTY, steps=steps, misses=DEMANDED * steps, stall_seconds=stall_s,
            bytes_copied=DEMANDED * steps * EXPERT_BYTES,
        )  # fmt: skip
        predicted = replace(
            first,
            misses=(DEMANDED - 1) * steps,
            prefetch_at_once=steps,
            bytes_prefetched=steps * EXPERT_BYTES,
            link_free_seconds=steps * 0.4 * EXPERT_BYTES / LINK,
            stall_seconds=stall_s - 0.15 * steps * EXPERT_BYTES / LINK,
        )
        controller.observe([first, predicted])
    assert controller.is_on[1]
    assert controller.budgets[1] == pytest.approx(0.4 * EXPERT_BYTES, rel=0.02)


@pytest.mark.parametrize(("num_slots", "pays"), [(32, True), (111, False)])
def test_a_guess_that_is_right_by_chance_is_no_better_than_what_made_room(
    num_slots: int, pays: bool
) -> None:
    # Of 96 absent experts, and of 17, four are demanded in a step: guesses are right in 23 %.
    history = History(num_slots=num_slots)
    history.run(20_000, 4 / 17)
    assert history.is_on is pays


def test_stalls_are_judged_by_the_speed_of_this_link() -> None:
    history = History(link=10e9, free_s=300e-6)
    history.run(20_000, 0.7, saves=0.9)
    assert history.controller.link_bytes_per_s == pytest.approx(10e9, rel=0.01)
    assert history.is_on


def test_counters_that_start_again_are_no_evidence() -> None:
    history = History()
    history.run(1024, 0.7)
    history.restart()
    history.run(2048, 0.7)
    assert history.is_on
    assert history.switches == 0


def test_it_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="expert_bytes must be positive, got \\[\\]"):
        BudgetController([])
    with pytest.raises(ValueError, match="min_steps must be positive, got 0"):
        BudgetController([1], min_steps=0)
    with pytest.raises(ValueError, match="counters of 2 layers, expected 1"):
        BudgetController([1]).observe([EMPTY, EMPTY])
