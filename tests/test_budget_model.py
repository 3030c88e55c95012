"""The controller of budgets in a modelled engine: what pays comes on, what does not goes off."""

import pytest

from benchmarks.budget_model import EXPERT_BYTES, PRESETS, Engine, replay, routing


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("slots", "expert_bytes", "batch"), [
    (32, EXPERT_BYTES[0], 1),  # the link has time for less than half of an expert
    (64, EXPERT_BYTES[1], 1),  # little is missed
    (64, EXPERT_BYTES[1], 4),  # a quarter of all experts is demanded: guesses are right by chance
])  # fmt: skip
def test_a_step_takes_no_longer_than_the_better_of_on_and_off(
    slots: int, expert_bytes: int, batch: int, preset: str
) -> None:
    trace = routing(preset, layers=6, steps=320, batch=batch)
    engine = Engine(slots, expert_bytes)
    none, whole, auto = (replay(trace, engine, budget) for budget in ("none", "whole", "auto"))
    assert (whole.step_s < none.step_s) is (preset != "uniform"), "what is to be found out"
    assert auto.step_s <= 1.01 * min(none.step_s, whole.step_s)
