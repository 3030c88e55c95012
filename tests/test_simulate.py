"""The simulator: known values of the recorded trace, its accounts, its bound, and bad input."""

import itertools
import json
import math
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import prefetch_runtime.simulate as simulator
from predictors import LEARNED, Evidence, OraclePredictor
from prefetch_runtime.simulate import (
    SimulationResult,
    SimulationSettings,
    belady_hit_rate,
    learn,
    plot,
    simulate,
    simulate_grid,
    to_json,
)
from prefetch_runtime.trace import Trace, load_trace
from prefetch_runtime.waves import cut_by_token

RECORDED = Path(__file__).resolve().parent.parent / "models" / "tiny-moe-trace.npz"
MIB = 1 << 20


@cache
def _recorded(num_tokens: int = 4096) -> Trace:
    trace = load_trace(RECORDED)
    assert trace.next_gate is not None
    return Trace(
        topk=trace.topk[:num_tokens],
        sequence=trace.sequence[:num_tokens],
        num_experts=trace.num_experts,
        next_gate=trace.next_gate[:num_tokens],
    )


def _trace(*tokens: list[list[int]], num_experts: int = 8, **arrays: np.ndarray) -> Trace:
    """A trace out of tokens, each a list of layers, each a list of experts."""
    topk = np.array(tokens, dtype=np.int16)
    return Trace(
        topk=topk, sequence=np.zeros(len(topk), np.int32), num_experts=num_experts, **arrays
    )


def _random(seed: int, tokens: int, layers: int, num_experts: int, top_k: int) -> Trace:
    rng = np.random.default_rng(seed)
    shape = (tokens, layers, num_experts)
    topk = rng.random(shape).argsort(axis=2)[:, :, :top_k].astype(np.int16)
    guesses = rng.random(shape).argsort(axis=2)[:, 1:, : 2 * top_k].astype(np.int16)
    return Trace(
        topk=topk,
        sequence=np.zeros(tokens, np.int32),
        num_experts=num_experts,
        next_gate=guesses if layers > 1 else None,
    )


@pytest.mark.parametrize(
    ("num_slots", "policy", "percent"),
    [(8, "lru", 50.1), (16, "lru", 77.8), (8, "belady", 66.0), (16, "belady", 89.1)],
)
def test_recorded_trace_gives_its_known_hit_rates(
    num_slots: int, policy: str, percent: float
) -> None:
    result = simulate(_recorded(), SimulationSettings(num_slots=num_slots, policy=policy))
    assert 100 * result.hit_rate == pytest.approx(percent, abs=0.5)
    assert result.total("hits") + result.total("misses") == 4096 * 8 * 4


def test_recall_is_nothing_where_nothing_was_predicted_or_had_to_come() -> None:
    settings = SimulationSettings(num_slots=8)
    none = simulate(_recorded(64), settings)
    assert none.recall_among_misses is None
    assert json.loads(to_json([none]))[0]["recall_among_misses"] is None
    guessed = simulate(_recorded(64), replace(settings, predictor="previous_token"))
    assert guessed.recall_among_misses is not None, "0 would be a number"
    all_there = replace(guessed, absent_when_predicted=0, absent_and_predicted=0)
    assert all_there.recall_among_misses is None


@pytest.mark.parametrize(("widen", "percent"), [(1, 70), (2, 90)])
def test_next_gate_names_the_known_share_of_what_lru_misses(widen: int, percent: float) -> None:
    settings = SimulationSettings(num_slots=8, predictor="next_gate", widen=widen, budget_bytes=0)
    result = simulate(_recorded(), settings)
    assert result.recall_among_misses is not None
    assert 100 * result.recall_among_misses == pytest.approx(percent, abs=1)
    assert result.hit_rate == simulate(_recorded(), SimulationSettings(num_slots=8)).hit_rate
    assert result.useful_bytes == result.late_bytes == result.wasted_bytes == 0


def test_lfru_and_prediction_both_raise_the_recorded_hit_rate() -> None:
    trace = _recorded(1024)
    settings = SimulationSettings(num_slots=8, expert_bytes=2 * MIB)
    lru, lfru, predicted, oracle = (
        simulate(trace, replace(settings, **change))
        for change in (
            {},
            {"policy": "lfru"},
            {"predictor": "next_gate"},
            {"predictor": "oracle"},
        )
    )
    assert lfru.hit_rate > lru.hit_rate + 0.02
    assert predicted.stall_us_per_step < 0.7 * lru.stall_us_per_step
    assert oracle.stall_us_per_step < predicted.stall_us_per_step
    assert oracle.wasted_bytes == 0


@pytest.mark.parametrize("predictor", ["none", "next_gate"])
def test_a_setting_takes_less_than_five_seconds(predictor: str) -> None:
    settings = SimulationSettings(num_slots=8, predictor=predictor, expert_bytes=2 * MIB)
    seconds = []
    for _ in range(3):  # the least disturbed of three on a shared machine
        start = time.process_time()
        simulate(_recorded(), settings)
        seconds.append(time.process_time() - start)
        if seconds[-1] < 5:
            return
    raise AssertionError(f"took {seconds} s")


def _least_misses(sets: list[frozenset[int]], num_slots: int) -> int:
    """Fewest misses of any eviction, by trying every set of experts to keep."""
    states = {frozenset[int](): 0}
    for demanded in sets:
        after: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            now = misses + len(demanded - held)
            others = sorted(held - demanded)
            room = min(num_slots - len(demanded), len(others))
            for kept in itertools.combinations(others, room):
                state = demanded | frozenset(kept)
                after[state] = min(after.get(state, now), now)
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_least_that_any_eviction_can_miss(seed: int) -> None:
    trace = _random(seed, tokens=14, layers=1, num_experts=6, top_k=2)
    for num_slots in (2, 3, 4):
        result = simulate(trace, SimulationSettings(num_slots=num_slots, policy="belady"))
        sets = [frozenset(row[0].tolist()) for row in trace.topk]
        assert result.total("misses") == _least_misses(sets, num_slots)
        for policy in ("lru", "lfru", "forecast"):
            other = simulate(trace, SimulationSettings(num_slots=num_slots, policy=policy))
            assert other.hit_rate <= belady_hit_rate(trace, num_slots)


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_bound_of_steps_that_are_split_by_token(seed: int) -> None:
    one_each = _random(seed, tokens=14, layers=1, num_experts=6, top_k=2)
    trace = replace(one_each, step=np.repeat(np.arange(4, dtype=np.int32), 4)[:14])
    for num_slots in (2, 3, 4):
        settings = SimulationSettings(num_slots=num_slots, wide_steps="token")
        runs = []
        for start, stop in itertools.pairwise(trace.step_bounds().tolist()):
            ids = trace.topk[start:stop, 0]
            runs += [frozenset(ids[run].ravel().tolist()) for run in cut_by_token(ids, num_slots)]
        result = simulate(trace, replace(settings, policy="belady"))
        assert result.total("misses") == _least_misses(runs, num_slots)
        for policy in ("lru", "lfru", "forecast"):
            other = simulate(trace, replace(settings, policy=policy))
            assert other.hit_rate <= result.hit_rate


def _check_accounts(trace: Trace, result: SimulationResult) -> None:
    settings = result.settings
    missing = result.total("misses") + result.total("late")
    assert result.demand_bytes + result.late_bytes == missing * settings.expert_bytes
    stall_us = result.demand_bytes / (settings.link_gbs * 1e3)
    assert result.stall_us_per_step * result.num_steps == pytest.approx(stall_us)
    assert result.useful_bytes == result.total("prefetch_used") * settings.expert_bytes
    ended = sum(result.total(n) for n in ("prefetch_used", "late", "prefetch_dropped"))
    resident_unused = result.total("prefetched") - ended
    assert 0 <= resident_unused <= trace.num_layers * settings.num_slots
    assert result.wasted_bytes <= result.total("prefetch_dropped") * settings.expert_bytes
    assert result.late_bytes <= result.total("late") * settings.expert_bytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("predictor", ["next_gate", "transition", "previous_token", "oracle"])
def test_bytes_and_counts_add_up(seed: int, lookahead: int, predictor: str) -> None:
    if predictor == "next_gate" and lookahead > 1:
        return
    trace = _random(seed, tokens=120, layers=4, num_experts=16, top_k=3)
    for batch_size, compute_us, budget in ((1, 85, None), (2, 30, None), (4, 400, 3 * MIB)):
        settings = SimulationSettings(
            num_slots=12, predictor=predictor, lookahead=lookahead, expert_bytes=2 * MIB,
            compute_us=compute_us, budget_bytes=budget, policy="lfru",
        )  # fmt: skip
        batched = trace.batched(batch_size)
        _check_accounts(batched, simulate(batched, settings))


def test_no_time_on_the_link_makes_every_prefetch_late_or_dropped() -> None:
    trace = _random(0, tokens=60, layers=3, num_experts=16, top_k=3)
    settings = SimulationSettings(
        num_slots=6, predictor="next_gate", compute_us=1e-9, budget_bytes=100 << 20
    )
    result = simulate(trace, settings)
    assert result.total("prefetch_used") == 0
    assert result.total("late") > 0
    assert result.late_bytes == result.wasted_bytes == result.useful_bytes == 0


def test_endless_link_and_a_perfect_forecast_leave_misses_to_the_first_layer() -> None:
    trace = _random(0, tokens=60, layers=3, num_experts=16, top_k=3)
    settings = SimulationSettings(num_slots=6, predictor="oracle", link_gbs=float("inf"))
    result = simulate(trace, settings)
    assert [layer.hit_rate for layer in result.layers[1:]] == [1.0, 1.0]
    assert result.layers[0].hit_rate < 1
    assert result.recall_among_misses == 1.0
    assert result.stall_us_per_step == 0.0
    assert json.loads(to_json([result]))[0]["link_gbs"] is None


def test_partial_prefetch_is_finished_at_demand_and_a_useless_one_is_wasted() -> None:
    guesses = np.array([[[2, 5]], [[6, 7]]], dtype=np.int16)
    trace = _trace([[0, 1], [2, 3]], [[0, 1], [2, 3]], next_gate=guesses)
    settings = SimulationSettings(
        num_slots=4, predictor="next_gate", expert_bytes=1_000_000, link_gbs=1.0,
        compute_us=1500.0, widen=1,
    )  # fmt: skip
    result = simulate(trace, settings)
    first, second = result.layers
    # Token 1: 2 arrives whole, half of 5 is dropped, 3 is missed. Token 2: 6 arrives whole into an
    # empty slot and stays, half of 7 is dropped.
    assert (second.prefetched, second.prefetch_used, second.prefetch_dropped) == (4, 1, 2)
    assert (second.hits, second.misses, second.late, second.evictions) == (3, 1, 0, 0)
    assert (result.useful_bytes, result.late_bytes) == (1_000_000, 0)
    assert result.wasted_bytes == 1_000_000
    assert first.stall_us == pytest.approx(2000)
    assert second.stall_us == pytest.approx(1000)
    assert result.step_us == pytest.approx(2 * 1500 + 1500)

    late = simulate(trace, replace(settings, compute_us=250.0, budget_bytes=1))
    assert late.layers[1].late == 1
    assert late.late_bytes == 1  # the budget stops the copy, the demand finishes it
    assert late.layers[1].stall_us == pytest.approx(2000 - 1e-3)


@pytest.mark.parametrize(
    ("link_gbs", "compute_us", "budget_bytes"),
    [(1.0, 2500.0, 10_000_000), (float("inf"), 1.0, 2_500_000)],
    ids=["link", "budget"],
)
def test_two_and_a_half_prefetches_fit_in_turn(
    link_gbs: float, compute_us: float, budget_bytes: int
) -> None:
    guesses = np.array([[[2, 3, 4]]], dtype=np.int16)
    trace = _trace([[0, 1, 5], [2, 3, 4]], next_gate=guesses)
    settings = SimulationSettings(
        num_slots=4, predictor="next_gate", expert_bytes=1_000_000, link_gbs=link_gbs,
        compute_us=compute_us, budget_bytes=budget_bytes,
    )  # fmt: skip
    result = simulate(trace, settings)
    assert (result.layers[1].hits, result.layers[1].late) == (2, 1)
    assert (result.useful_bytes, result.late_bytes) == (2_000_000, 500_000)


def test_the_nearest_layer_is_carried_first() -> None:
    trace = _trace([[0], [1], [2], [3]], [[4], [5], [6], [7]])
    settings = SimulationSettings(
        num_slots=1, predictor="oracle", lookahead=2, expert_bytes=1_000_000, link_gbs=1.0,
        compute_us=750.0, budget_bytes=10_000_000,
    )  # fmt: skip
    result = simulate(trace, settings)
    # Layer 2 has two windows and takes 1.0 of their 1.5; layer 3 has the rest and one of its own.
    assert [layer.hits for layer in result.layers] == [0, 0, 2, 2]


def test_unused_prefetch_that_is_evicted_is_wasted_whole() -> None:
    guesses = np.array([[[6, 7]], [[1, 2]]], dtype=np.int16)
    trace = _trace([[0, 1], [2, 3]], [[0, 1], [4, 5]], next_gate=guesses)
    settings = SimulationSettings(
        num_slots=4, predictor="next_gate", widen=1, link_gbs=float("inf"), expert_bytes=MIB
    )
    result = simulate(trace, settings)
    # 6 and 7 arrive and stay; then 1 and 2 are fetched over them, 4 and 5 over the oldest two.
    assert result.total("prefetch_used") == 0
    assert result.layers[1].prefetch_dropped >= 2
    assert result.wasted_bytes == result.layers[1].prefetch_dropped * MIB


def test_a_wide_step_gives_up_prefetches_that_are_not_whole() -> None:
    tokens = [[[0, 1], [2, 3]], [[0, 1], [4, 5]], [[0, 1], [6, 7]]]
    trace = _trace(*tokens, step=np.zeros(3, np.int32))
    settings = SimulationSettings(num_slots=4, predictor="oracle", compute_us=1.0)
    result = simulate(trace, settings)
    assert result.layers[1].prefetch_dropped == result.layers[1].prefetched == 1
    assert result.layers[1].late == 0
    assert result.wasted_bytes == round(settings.window_bytes)


def test_budget_bounds_what_is_reserved_and_copied() -> None:
    trace = _random(0, tokens=200, layers=2, num_experts=32, top_k=4)
    settings = SimulationSettings(
        num_slots=16, predictor="oracle", link_gbs=float("inf"), expert_bytes=MIB
    )
    for budget, most in ((0, 0), (MIB, 1), (2 * MIB + 1, 3)):
        result = simulate(trace, replace(settings, budget_bytes=budget))
        assert result.layers[1].prefetched <= 200 * most
        assert (result.layers[1].prefetched > 0) == (most > 0)
        copied = result.useful_bytes + result.late_bytes + result.wasted_bytes
        assert copied <= 200 * budget


@pytest.mark.parametrize("wide_steps", ["expert", "token"])
def test_wide_steps_are_split_and_read_absent_experts(wide_steps: str) -> None:
    rows = [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 1]]]
    trace = _trace(*rows, step=np.array([0, 0, 0, 1]))
    result = simulate(trace, SimulationSettings(num_slots=4, wide_steps=wide_steps))
    assert result.num_steps == 2
    assert result.total("misses") == {"expert": 6, "token": 6 + 2}[wide_steps]
    assert result.total("hits") == {"expert": 2, "token": 0}[wide_steps]
    assert result.demand_bytes == result.total("misses") * (9 * MIB)


def test_a_wide_step_of_one_requests_streams_decodes_and_so_evicts() -> None:
    # Three streams of one request; each step demands six experts of its own, for four slots.
    tokens = [[[2 * i, 2 * i + 1]] for i in (0, 3, 0, 1, 4, 1, 2, 5, 2)]
    batched = _trace(*tokens, num_experts=12).batched(3)
    assert simulate(batched, SimulationSettings(num_slots=4)).total("evictions") > 0


def test_nothing_is_predicted_from_a_wide_step() -> None:
    tokens = [[[i, i + 1], [i, i + 1]] for i in range(5)]
    trace = _trace(*tokens, step=np.zeros(5, np.int32))
    result = simulate(trace, SimulationSettings(num_slots=4, predictor="oracle"))
    assert result.total("prefetched") == 0


def test_experts_of_one_step_count_once() -> None:
    trace = _trace([[1, 2]], [[2, 1]], [[3, 2]], step=np.zeros(3, np.int32))
    assert simulate(trace, SimulationSettings(num_slots=4)).total("misses") == 3


def test_grid_has_every_combination_and_the_bound_beside_it(tmp_path: Path) -> None:
    trace = _random(0, tokens=60, layers=3, num_experts=16, top_k=3)
    results = simulate_grid(
        trace, SimulationSettings(num_slots=4),
        num_slots=[4, 8], policies=["lru", "lfru", "belady"], predictors=["none", "oracle"],
    )  # fmt: skip
    assert len(results) == 12
    for result in results:
        slots = result.settings.num_slots
        assert result.belady_hit_rate == belady_hit_rate(trace, slots)
    rows = json.loads(to_json(results))
    assert {(r["num_slots"], r["policy"], r["predictor"]) for r in rows} == set(
        itertools.product([4, 8], ["lru", "lfru", "belady"], ["none", "oracle"])
    )
    for row, result in zip(rows, results, strict=True):
        assert 0 <= row["hit_rate"] <= 1
        assert row["hit_rate"] == result.hit_rate
        assert row["stall_us_per_step"] == result.stall_us_per_step
        assert len(row["layers"]) == 3
        assert row["misses"] == sum(layer["misses"] for layer in row["layers"])
    pytest.importorskip("matplotlib")
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"expert_bytes": 0}, "expert_bytes must be at least 1"),
        ({"widen": 0}, "widen must be at least 1"),
        ({"lookahead": 0}, "lookahead must be at least 1"),
        ({"link_gbs": 0.0}, "link_gbs must be positive, got 0.0"),
        ({"link_gbs": float("nan")}, "link_gbs must be positive, got nan"),
        ({"compute_us": -1.0}, "compute_us must be positive"),
        ({"compute_us": float("inf")}, "compute_us must be finite"),
        ({"budget_bytes": -1}, "budget_bytes must not be negative"),
        ({"wide_steps": "layer"}, "wide_steps must be 'expert' or 'token', got 'layer'"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationSettings(**{"num_slots": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 1}, "num_slots=1 cannot hold one token's 2 experts; use at least 2"),
        ({"num_slots": 9}, "num_slots must be between 1 and the layer's 8 experts, got 9"),
        ({"policy": "lur"}, r"'lur'; choose one of lru, lfru, .*; did you mean .*belady"),
        ({"predictor": "orcale"}, r"unknown predictor 'orcale'; .* did you mean 'oracle'\?"),
        ({"predictor": "next_gate"}, "needs the array next_gate, which this trace does not have"),
        ({"lookahead": 3}, "lookahead=3 reaches past the last of 3 MoE layers; use at most 2"),
        ({"predictor": "oracle", "lookahead": 3}, "lookahead=3 reaches past the last"),
    ],
)
def test_settings_that_do_not_fit_the_trace_are_refused(
    changes: dict[str, object], message: str
) -> None:
    trace = _trace([[0, 1], [2, 3], [4, 5]])
    with pytest.raises(ValueError, match=message):
        simulate(trace, SimulationSettings(**{"num_slots": 4, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": [4, 9]}, "num_slots must be between 1 and the layer's 8 experts, got 9"),
        ({"num_slots": [4, 1]}, "num_slots=1 cannot hold"),
        ({"policies": ["lru", "belady", "lur"]}, "unknown eviction policy 'lur'"),
        ({"predictors": ["none", "next_gate"]}, "needs the array next_gate"),
    ],
)
def test_a_grid_is_refused_before_any_of_it_is_replayed(
    changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(simulator, "_replay")
    trace = _trace([[0, 1], [2, 3], [4, 5]])
    grid: dict[str, object] = {"num_slots": [4], "policies": ["lru"], "predictors": ["none"]}
    with pytest.raises(ValueError, match=message):
        simulate_grid(trace, SimulationSettings(num_slots=4), **{**grid, **changes})


def test_a_grid_checks_each_cache_and_each_predictor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    create, check = simulator.create_predictor, simulator._check_cache

    def created(name: str, *given: object, **more: object) -> object:
        made.append(name)
        return create(name, *given, **more)  # type: ignore[arg-type]

    def checked(trace: Trace, settings: SimulationSettings) -> None:
        made.append(f"{settings.num_slots} {settings.policy}")
        check(trace, settings)

    monkeypatch.setattr(simulator, "create_predictor", created)
    monkeypatch.setattr(simulator, "_check_cache", checked)
    monkeypatch.setattr(simulator, "belady_hit_rate", lambda *_, **__: 0.0)
    trace = _random(0, tokens=4, layers=3, num_experts=8, top_k=2)
    grid = {"num_slots": [4, 5], "policies": ["lru", "lfru"], "predictors": ["oracle", "frequency"]}
    simulate_grid(trace, SimulationSettings(num_slots=4), **grid)
    checks = ["4 lru", "4 lfru", "5 lru", "5 lfru", "oracle", "frequency"]
    assert made == checks + ["oracle", "frequency"] * 4  # a new one for each replay


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noext", r"must end in \.png"),  # matplotlib would draw into noext.png
        ("a.txt", r"must end in \.png"),
        ("folder.png", "it is a folder"),
        ("nowhere/a.png", "there is no folder .*nowhere"),
    ],
)
def test_a_plot_goes_into_the_file_that_was_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    result = simulate(_trace([[0, 1]]), SimulationSettings(num_slots=4))
    with pytest.raises(ValueError, match=message):
        plot([result], tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_predictor_is_told_no_guesses_of_layers_that_have_not_been_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []

    class Mine(OraclePredictor):
        name = "mine"
        needs_guesses = True

        def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
            told.append(evidence.next_gate is not None)
            return super().predict(layer_idx, evidence, count)

    monkeypatch.setattr(simulator, "create_predictor", lambda _, shape, **__: Mine(shape))
    trace = _random(0, tokens=3, layers=4, num_experts=8, top_k=2)
    for lookahead in (1, 2):
        told.clear()
        settings = SimulationSettings(num_slots=4, predictor="mine", lookahead=lookahead)
        simulate(trace, settings)
        assert told == [lookahead == 1] * 3 * (4 - lookahead)
    with pytest.raises(ValueError, match="predictor 'mine' needs the array next_gate"):
        simulate(replace(trace, next_gate=None), replace(settings, lookahead=1))


def test_one_layer_has_nothing_to_predict() -> None:
    trace = _trace([[0, 1]], [[1, 2]])
    assert simulate(trace, SimulationSettings(num_slots=4)).total("hits") == 1
    with pytest.raises(ValueError, match="one MoE layer has no later one to predict"):
        simulate(trace, SimulationSettings(num_slots=4, predictor="oracle"))


@pytest.mark.parametrize("name", LEARNED)
def test_a_table_learned_from_a_trace_is_gone_on_from(name: str, tmp_path: Path) -> None:
    trace = _random(0, tokens=40, layers=3, num_experts=8, top_k=2)
    settings = SimulationSettings(num_slots=4, predictor=name, link_gbs=math.inf)
    table = tmp_path / "t.npz"
    once = learn(trace, settings)
    once.save(table)
    twice = learn(trace, replace(settings, predictor_table=table))
    np.testing.assert_array_equal(twice.counts, 2 * once.counts)
    assert once.counts.sum() > 0
    grid = {"num_slots": [4], "policies": ["lru"], "predictors": ["none", name]}
    plain, new = simulate_grid(trace, settings, **grid)
    same, learned = simulate_grid(trace, replace(settings, predictor_table=table), **grid)
    assert plain.layers == same.layers
    assert new.absent_and_predicted < learned.absent_and_predicted
    assert learned.as_dict()["predictor_table"] == str(table)


def test_a_table_that_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    trace = _random(0, tokens=4, layers=3, num_experts=8, top_k=2)
    settings = SimulationSettings(num_slots=4, predictor="frequency")
    learn(trace, settings).save(tmp_path / "t.npz")
    np.savez(tmp_path / "p.npz", frequency_counts=np.array([{}], dtype=object))
    other = _random(0, tokens=4, layers=4, num_experts=8, top_k=2)
    for table, of, predictor, message in (
        ("t.npz", other, "frequency", r"shape \[3, 8\], expected \[4, 8\]; give a table that"),
        ("t.npz", trace, "transition", "no array 'transition_counts'; give a table that predictor"),
        ("p.npz", trace, "frequency", "pickled objects"),
        ("t.npz", trace, "next_gate", "'next_gate' has no table; .* transition and frequency"),
    ):
        changed = replace(settings, predictor_table=tmp_path / table, predictor=predictor)
        with pytest.raises(ValueError, match=message):
            simulate(of, changed)
        with pytest.raises(ValueError, match=message):
            simulate_grid(of, changed, num_slots=[4], policies=["lru"], predictors=[predictor])
    with pytest.raises(FileNotFoundError):
        simulate(trace, replace(settings, predictor_table=tmp_path / "gone.npz"))
    with pytest.raises(ValueError, match="predictor 'none' has no table"):
        learn(trace, SimulationSettings(num_slots=4))


def test_a_plot_of_one_number_of_slots_shows_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    figures = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    result = simulate(_trace([[0, 1]]), SimulationSettings(num_slots=4))
    plot([replace(result, belady_hit_rate=0.5)], tmp_path / "a.png")
    (figure,) = drawn
    hits, stall = figure.axes
    *_, bound = hits.get_lines()
    assert bound.get_label() == "belady, none"
    assert bound.get_marker() == "_", "a dashed line through one point shows nothing"
    for axis in (hits, stall):
        assert all(tick == round(tick) for tick in axis.get_xticks()), "slots are whole"
