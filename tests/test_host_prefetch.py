"""Prediction by the host: what is brought in, how much of it, and how it is counted."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import prefetch_runtime
from predictors import NextGatePredictor, PredictorShape, create_predictor
from prefetch_runtime.audit import audit
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.copier import CopyTicket, HostCopier
from prefetch_runtime.host_prefetch import UNLIMITED_BYTES, HostPrefetcher
from tests.helpers.small_cache import LAYOUT, RecordingCopier, SmallCache, small_cache

NUM_EXPERTS, NUM_SLOTS, TOP_K = 12, 5, 2
EXPERT_BYTES = LAYOUT.payload_bytes


def cache_with(budget_bytes: int = UNLIMITED_BYTES, **more: object) -> SmallCache:
    cache = small_cache(NUM_EXPERTS, NUM_SLOTS, num_layers=2, **more)  # type: ignore[arg-type]
    shape = PredictorShape(num_layers=2, num_experts=NUM_EXPERTS, top_k=TOP_K)
    cache.scheduler.attach_prefetcher(
        HostPrefetcher(
            create_predictor("next_gate", shape),
            HostCopier(),
            num_layers=2,
            top_k=TOP_K,
            budget_bytes=budget_bytes,
        )
    )
    return cache


@pytest.mark.parametrize("needs", [False, True])
def test_any_predictor_may_ask_for_the_next_routers_guesses(needs: bool) -> None:
    class Mine(NextGatePredictor):
        name = "mine"
        needs_guesses = needs

    shape = PredictorShape(num_layers=2, num_experts=NUM_EXPERTS, top_k=TOP_K)
    cache = small_cache(NUM_EXPERTS, NUM_SLOTS, num_layers=2)
    assert not cache.scheduler.needs_guesses
    assert cache.scheduler.stats().predictor == "none"
    cache.scheduler.attach_prefetcher(
        HostPrefetcher(Mine(shape), HostCopier(), num_layers=2, top_k=TOP_K)
    )
    assert cache.scheduler.needs_guesses == needs
    assert cache.scheduler.stats().predictor == "mine"


def step(cache: SmallCache, chosen: list[int], guesses: list[int], then: list[int]) -> None:
    scheduler = cache.scheduler
    scheduler.begin_step()
    ids = torch.tensor([chosen], dtype=torch.int32)
    scheduler.fetch(0, ids, guesses=lambda: torch.tensor([guesses]))
    scheduler.fetch(1, torch.tensor([then], dtype=torch.int32))


def test_rows_of_padding_guess_nothing() -> None:
    cache = cache_with()
    scheduler = cache.scheduler
    scheduler.begin_step()
    guesses = torch.tensor([[5, 6], [9, 10], [11, 10]])
    padding = torch.tensor([3, -1, -1])
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]], dtype=torch.int32)
    scheduler.fetch(0, ids, padding=padding, guesses=lambda: guesses)
    table = cache.layer(1).table
    assert sorted(int(owner) for owner in table.owner if owner >= 0) == [5, 6]


def test_a_forecast_is_there_when_it_is_demanded() -> None:
    cache = cache_with()
    step(cache, [1, 2], [9, 3, 4], [9, 5])
    layer = cache.scheduler.stats().layers[1]
    assert (layer.hits, layer.misses, layer.prefetched, layer.prefetch_used) == (1, 1, 3, 1)
    assert audit(cache.scheduler) == []


@pytest.mark.parametrize(
    ("budget_bytes", "prefetched"),
    [(0, 0), (1, 1), (EXPERT_BYTES, 1), (EXPERT_BYTES + 1, 2), (UNLIMITED_BYTES, 3)],
)
def test_the_last_expert_that_the_budget_starts_is_copied_whole(
    budget_bytes: int, prefetched: int
) -> None:
    cache = cache_with(budget_bytes)
    step(cache, [1, 2], [9, 3, 4], [9, 5])
    layers = cache.scheduler.stats().layers
    assert layers[1].prefetched == prefetched
    assert [layer.prefetch_budget_bytes for layer in layers] == [0, budget_bytes]


def test_prefetches_that_were_demanded_at_once_are_told_from_those_that_waited() -> None:
    cache = cache_with()
    step(cache, [1, 2], [9, 3], [9, 5])
    step(cache, [1, 2], [-1, -1], [3, 5])
    layer = cache.scheduler.stats().layers[1]
    assert (layer.prefetch_used, layer.prefetch_at_once) == (2, 1)


def test_the_link_is_free_from_prediction_to_demand() -> None:
    cache = cache_with(0)
    scheduler = cache.scheduler
    for _ in range(2):
        scheduler.begin_step()
        ids = torch.tensor([[1, 2]], dtype=torch.int32)
        scheduler.fetch(0, ids, guesses=lambda: torch.tensor([[9]]))
        time.sleep(0.02)
        scheduler.fetch(1, ids)
    first, second = scheduler.stats().layers
    assert first.link_free_seconds == 0
    assert 0.04 <= second.link_free_seconds < 1


class SlowCopier(RecordingCopier):
    """Copies take 10 ms when they are waited for."""

    def wait(self, ticket: CopyTicket) -> None:
        time.sleep(0.01)
        super().wait(ticket)


def test_a_layer_stalls_for_the_copies_of_its_demand_alone() -> None:
    cache = cache_with(copier=SlowCopier())
    step(cache, [1, 2], [9, 3], [9, 3])
    first, second = cache.scheduler.stats().layers
    assert 0.01 <= first.stall_seconds < 0.5
    assert second.stall_seconds == 0
    step(cache, [1, 2], [9, 3], [9, 3])
    assert cache.scheduler.stats().layers[0].stall_seconds == first.stall_seconds
    assert cache.scheduler.stats().stall_seconds == first.stall_seconds
    cache.scheduler.reset()
    assert cache.scheduler.stats().stall_seconds == 0


def interrupted(run: Callable[[], object], line: int) -> bool:
    """Call `run`, as if Ctrl-C came at the given line, counted from 0, of those of the package that
    it executes. Returns False if it has fewer."""
    package, left = str(Path(prefetch_runtime.__file__).parent), line

    def at_line(_: FrameType, event: str, __: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, _: str, __: object) -> Any:
        return at_line if frame.f_code.co_filename.startswith(package) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_wherever_a_step_is_cut_short_the_slots_are_sound_or_not_trusted() -> None:
    line, refused, there_are_more = 0, 0, True
    while there_are_more:
        cache = cache_with()
        step(cache, [1, 2], [9, 3, 4], [9, 5])
        step(cache, [6, 7], [0, 10], [3, 11])
        scheduler, guesses = cache.scheduler, torch.tensor([[7, 8, 2]])
        scheduler.begin_step()
        scheduler.fetch(0, torch.tensor([[0, 1]]), guesses=partial(torch.clone, guesses))
        there_are_more = interrupted(partial(scheduler.fetch, 1, torch.tensor([[7, 6]])), line)
        line += 1
        if scheduler._is_torn:
            with pytest.raises(RuntimeError, match="cut short"):
                scheduler.begin_step()
            refused += 1
            continue
        step(cache, [0, 1], [5, 3], [4, 7])
        assert audit(scheduler) == [], f"line {line}"
        for layer_idx in range(2):
            cache.layer(layer_idx).table.check_integrity()
    assert 0 < refused < line
    assert line > 100


def test_a_controller_switches_off_what_never_comes_true() -> None:
    cache = cache_with()
    controller = BudgetController([EXPERT_BYTES] * 2, min_steps=16)
    cache.scheduler.control_budgets(controller)
    assert cache.scheduler.stats().layers[1].prefetch_budget_bytes == EXPERT_BYTES
    for i in range(400):
        demand = [1, 2] if i % 2 else [3, 4]
        step(cache, demand, [5 + (i // 4) % 7], demand)
    layer = cache.scheduler.stats().layers[1]
    assert layer.prefetched >= 16
    assert layer.prefetch_budget_bytes == 0
    assert controller.is_on[1] is False


def test_a_controller_leaves_on_what_comes_true() -> None:
    cache = cache_with()
    cache.scheduler.control_budgets(BudgetController([EXPERT_BYTES] * 2, min_steps=16))
    for i in range(400):
        demand = [i % NUM_EXPERTS, (i + 5) % NUM_EXPERTS]
        step(cache, [1, 2], demand, demand)
    assert cache.scheduler.stats().layers[1].prefetch_budget_bytes > 0


def test_budgets_are_not_controlled_where_nothing_predicts() -> None:
    cache = small_cache(NUM_EXPERTS, NUM_SLOTS, num_layers=2)
    with pytest.raises(RuntimeError, match="attach a prefetcher before"):
        cache.scheduler.control_budgets(BudgetController([EXPERT_BYTES] * 2))
