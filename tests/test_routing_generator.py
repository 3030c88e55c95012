"""Generated routing: calibrated where it should be, patternless where it should be."""

from dataclasses import replace

import numpy as np
import pytest

from prefetch_runtime.routing_generator import (
    PRESETS,
    RoutingModel,
    create_routing_model,
    generate_routing,
)
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.trace import Trace

PLAIN = RoutingModel(
    num_layers=3, num_experts=64, top_k=4,
    zipf=0.0, topic=0.0, context=0.0, persistence=0.0, layer_dependence=0.0, accuracy=None,
)  # fmt: skip


def _lru_percent(trace: Trace, num_slots: int) -> float:
    return 100 * simulate(trace, SimulationSettings(num_slots=num_slots)).hit_rate


def _overlap(trace: Trace, lag: int = 1) -> float:
    """Share of a token's experts that the token `lag` earlier had used in the same layer."""
    same = trace.topk[lag:, :, :, None] == trace.topk[:-lag, :, None, :]
    return float(same.any(axis=3).mean())


def _recall(trace: Trace, width: int) -> float:
    """Share of the chosen experts among the first `width` guesses."""
    assert trace.next_gate is not None
    named = trace.topk[:, 1:, :, None] == trace.next_gate[:, :, None, :width]
    return float(named.any(axis=3).mean())


def test_cold_hit_rates_of_the_qwen_preset_are_the_published_ones() -> None:
    model = create_routing_model("qwen3-30b-a3b", num_layers=6)
    traces = [generate_routing(model, 256, seed=seed) for seed in range(6)]
    for num_slots, percent in ((8, 36.6), (24, 74.1), (49, 89.4), (81, 96.2)):
        measured = np.mean([_lru_percent(trace, num_slots) for trace in traces])
        assert measured == pytest.approx(percent, abs=2), num_slots


def test_warm_hit_rate_of_the_qwen_preset_at_40_percent_residency_is_90_to_95() -> None:
    trace = generate_routing(create_routing_model("qwen3-30b-a3b", num_layers=4), 1500)
    cold = Trace(topk=trace.topk[:300], sequence=trace.sequence[:300], num_experts=128)
    misses = [simulate(t, SimulationSettings(num_slots=51)).total("misses") for t in (trace, cold)]
    warm_percent = 100 * (1 - (misses[0] - misses[1]) / (1200 * 4 * 8))
    assert 90 <= warm_percent <= 95


def test_preset_has_the_sizes_and_the_predictor_channel_of_the_model() -> None:
    model = PRESETS["qwen3-30b-a3b"]
    assert (model.num_layers, model.num_experts, model.top_k) == (48, 128, 8)
    trace = generate_routing(replace(model, num_layers=4), 600)
    trace.require_model(num_layers=4, num_experts=128, top_k=8)
    assert _recall(trace, 8) == pytest.approx(0.886, abs=0.01)
    assert _recall(trace, 16) > 0.95


def test_uniform_control_has_no_pattern_to_use() -> None:
    trace = generate_routing(create_routing_model("uniform", num_layers=3), 1500)
    assert _lru_percent(trace, 32) == pytest.approx(25, abs=1.5)
    assert _recall(trace, 8) == pytest.approx(8 / 128, abs=0.01)
    for predictor in ("next_gate", "transition", "frequency"):
        settings = SimulationSettings(num_slots=32, predictor=predictor, budget_bytes=0)
        recall = simulate(trace, settings).recall_among_misses
        assert recall == pytest.approx(16 / 128, abs=0.03), predictor


def test_equal_seeds_give_equal_traces_and_others_differ() -> None:
    first, again, other = (
        generate_routing(replace(PLAIN, accuracy=0.5), 50, batch_size=2, seed=seed)
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first.topk, again.topk)
    np.testing.assert_array_equal(first.next_gate, again.next_gate)
    assert (first.topk != other.topk).any()


def test_every_token_chooses_different_experts_and_guesses_differ_too() -> None:
    trace = generate_routing(replace(PRESETS["qwen3-30b-a3b"], num_layers=3), 100)
    for array in (trace.topk, trace.next_gate):
        ordered = np.sort(array, axis=2)
        assert (ordered[:, :, 1:] > ordered[:, :, :-1]).all()


def test_zipf_makes_some_experts_popular_in_every_layer() -> None:
    def top_share(zipf: float) -> float:
        trace = generate_routing(replace(PLAIN, zipf=zipf), 800)
        counts = np.stack([np.bincount(trace.topk[:, i].ravel(), minlength=64) for i in range(3)])
        assert zipf == 0 or len(set(counts.argmax(axis=1).tolist())) > 1  # not the same expert
        return float(counts.max(axis=1).mean() / counts.sum(axis=1).mean())

    assert top_share(0) < 0.03
    assert top_share(1) > 2 * top_share(0.3) > 2 * top_share(0)


def test_context_makes_neighbours_alike_and_persistence_makes_it_last() -> None:
    overlaps = {
        persistence: [
            _overlap(generate_routing(replace(PLAIN, context=1.5, persistence=persistence), 800), n)
            for n in (1, 16)
        ]
        for persistence in (0.0, 0.8, 0.99)
    }
    chance = 4 / 64
    assert overlaps[0.0][0] == pytest.approx(chance, abs=0.03)
    assert overlaps[0.8][0] > 2 * chance
    assert overlaps[0.8][1] == pytest.approx(chance, abs=0.04)
    assert overlaps[0.99][1] > 2 * chance


def test_topics_switch_as_often_as_they_are_told() -> None:
    def late_overlap(topic_tokens: float) -> float:
        model = replace(PLAIN, topic=2.0, topic_tokens=topic_tokens)
        return _overlap(generate_routing(model, 1500), lag=60)

    assert late_overlap(1000) > late_overlap(60) > late_overlap(10) - 0.01
    assert late_overlap(10) < 0.12


def test_layer_dependence_lets_one_layer_tell_about_the_next() -> None:
    def transition_recall(dependence: float) -> float:
        trace = generate_routing(replace(PLAIN, layer_dependence=dependence), 1200)
        settings = SimulationSettings(num_slots=8, predictor="transition", budget_bytes=0)
        recall = simulate(trace, settings).recall_among_misses
        assert recall is not None
        return recall

    assert transition_recall(0.95) > transition_recall(0.0) + 0.1


@pytest.mark.parametrize("accuracy", [0.3, 0.7, 0.95, 1.0])
def test_guesses_are_as_accurate_as_asked(accuracy: float) -> None:
    trace = generate_routing(replace(PLAIN, zipf=0.5, accuracy=accuracy), 600)
    assert _recall(trace, 4) == pytest.approx(accuracy, abs=0.02)
    assert _recall(trace, 8) >= _recall(trace, 4)


def test_batch_is_steps_of_independent_requests() -> None:
    model = replace(PLAIN, topic=3.0, topic_tokens=1e9)
    trace = generate_routing(model, 100, batch_size=3)
    assert trace.step_bounds().tolist() == list(range(0, 301, 3))
    assert trace.sequence.tolist() == [0, 1, 2] * 100
    same_request = (trace.topk[3:, :, :, None] == trace.topk[:-3, :, None, :]).any(3).mean()
    other_request = (trace.topk[1::3, :, :, None] == trace.topk[::3, :, None, :]).any(3).mean()
    assert same_request > 0.4 > 0.3 > other_request


def test_all_experts_and_one_layer_are_possible() -> None:
    trace = generate_routing(replace(PLAIN, num_experts=4, num_layers=1, accuracy=None), 10)
    assert trace.next_gate is None
    assert (np.sort(trace.topk, axis=2) == np.arange(4)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "1 <= top_k <= num_experts, got 3 layers, top_k=0 of 64 experts"),
        ({"top_k": 65}, "top_k=65 of 64"),
        ({"num_layers": 0}, "num_layers >= 1"),
        ({"zipf": -1.0}, "zipf must be 0 to 100, got -1.0"),
        ({"topic": float("nan")}, "topic must be 0 to 100, got nan"),
        ({"persistence": 1.5}, "persistence must be 0 to 1, got 1.5"),
        ({"layer_dependence": -0.1}, "layer_dependence must be 0 to 1"),
        ({"topic_tokens": 0.5}, "topic_tokens must be at least 1"),
        ({"accuracy": 1.1}, r"accuracy must lie above chance \(0.062\) and at most at 1, got 1.1"),
        ({"accuracy": 0.01}, "None guesses at random"),
    ],
)
def test_impossible_models_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


def test_unknown_preset_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'qwen3-30b'; .*; did you mean 'qwen3-30b-a3b'\?"):
        create_routing_model("qwen3-30b")
    with pytest.raises(ValueError, match=r"needs at least one step of one token, got 0 x 1"):
        generate_routing(PLAIN, 0)
    with pytest.raises(ValueError, match=r"got 5 x 0"):
        generate_routing(PLAIN, 5, batch_size=0)
