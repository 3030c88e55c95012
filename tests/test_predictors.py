"""Predictors: the contract, each one's ranking, and the learned tables."""

import time
from pathlib import Path

import numpy as np
import pytest

import graphs.prefetch
from predictors import (
    LEARNED,
    MAX_FORECAST,
    PREDICTOR_NAMES,
    Evidence,
    FrequencyPredictor,
    PredictorShape,
    RunsOn,
    TransitionPredictor,
    create_predictor,
)
from predictors.npz import write_arrays

SHAPE = PredictorShape(num_layers=3, num_experts=8, top_k=2)


def _ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int16)


def _evidence() -> Evidence:
    return Evidence(
        topk_ids=_ids([0, 1], [-1, -1]),
        next_gate=_ids([4, 5, 6], [5, 7, 4]),
        truth=_ids([2, 3], [3, 7]),
    )


def _learned(name: str, shape: PredictorShape = SHAPE):
    predictor = create_predictor(name, shape)
    rng = np.random.default_rng(0)
    for _ in range(50):
        for layer_idx in range(shape.num_layers):
            ids = rng.integers(0, shape.num_experts, (3, shape.top_k)).astype(np.int16)
            predictor.observe(layer_idx, ids)
    return predictor


@pytest.mark.parametrize("name", PREDICTOR_NAMES)
def test_created_predictor_has_the_name_it_was_asked_for(name: str) -> None:
    assert create_predictor(name, SHAPE).name == name
    assert isinstance(create_predictor(name, SHAPE).runs_on, RunsOn)


def test_host_and_kernels_name_as_many_experts_at_most() -> None:
    assert MAX_FORECAST == graphs.prefetch.MAX_FORECAST


def test_only_what_has_kernels_runs_in_a_captured_graph() -> None:
    made = [create_predictor(name, SHAPE) for name in PREDICTOR_NAMES]
    assert {p.name for p in made if p.runs_on is RunsOn.BOTH} == {"none", "next_gate"}


@pytest.mark.parametrize("name", PREDICTOR_NAMES)
def test_predictor_that_needs_no_guesses_predicts_without_them(name: str) -> None:
    predictor = _learned(name)
    evidence = _evidence()._replace(next_gate=None)
    if predictor.needs_guesses:
        with pytest.raises(ValueError, match="needs the next router's guesses"):
            predictor.predict(1, evidence, 4)
    else:
        assert predictor.predict(1, evidence, 4) == predictor.predict(1, _evidence(), 4)


@pytest.mark.parametrize("name", PREDICTOR_NAMES)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 100])
def test_forecast_has_no_repeats_nothing_out_of_range_and_at_most_count(
    name: str, count: int
) -> None:
    forecast = _learned(name).predict(1, _evidence(), count)
    assert len(forecast) <= count
    assert len(set(forecast)) == len(forecast)
    assert all(type(expert) is int and 0 <= expert < 8 for expert in forecast)


@pytest.mark.parametrize("name", PREDICTOR_NAMES)
def test_predicting_changes_nothing(name: str) -> None:
    predictor = _learned(name)
    first = predictor.predict(1, _evidence(), 4)
    predictor.predict(2, _evidence(), 8)
    assert predictor.predict(1, _evidence(), 4) == first


@pytest.mark.parametrize("name", sorted(set(PREDICTOR_NAMES) - {"none"}))
@pytest.mark.parametrize("layer_idx", [-1, 0, 3])
def test_layer_that_cannot_be_predicted_is_refused(name: str, layer_idx: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer_idx} cannot be predicted 1 layers ahead"):
        create_predictor(name, SHAPE).predict(layer_idx, _evidence(), 4)


@pytest.mark.parametrize("name", ["previous_token", "transition", "frequency"])
def test_layer_that_does_not_exist_cannot_be_observed(name: str) -> None:
    with pytest.raises(ValueError, match="layer 3 is not one of 0 to 2"):
        create_predictor(name, SHAPE).observe(3, _ids([0, 1]))


def test_unknown_predictor_is_refused_with_the_choices_and_a_guess() -> None:
    with pytest.raises(ValueError, match=r"'nextgate'; .*oracle.*; did you mean 'next_gate'\?"):
        create_predictor("nextgate", SHAPE)
    with pytest.raises(ValueError, match=r"choose one of none, next_gate, .*, \w+$"):
        create_predictor("xyz", SHAPE)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"lookahead": 3}, "lookahead=3 reaches past the last of 3 MoE layers; use at most 2"),
        ({"lookahead": 0}, "lookahead must be at least 1, got 0"),
        ({"num_layers": 1}, "one MoE layer has no later one to predict; use predictor 'none'"),
        ({"top_k": 9}, "top_k=9 exceeds the 8 experts"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PredictorShape(**{"num_layers": 3, "num_experts": 8, "top_k": 2, **sizes})


def test_none_predicts_nothing() -> None:
    assert _learned("none").predict(1, _evidence(), 8) == []


def test_next_gate_takes_every_tokens_best_guess_first() -> None:
    predictor = create_predictor("next_gate", SHAPE)
    assert predictor.predict(1, _evidence(), 8) == [4, 5, 7, 6]
    assert predictor.predict(1, _evidence(), 2) == [4, 5]


def test_next_gate_needs_guesses_and_a_lookahead_of_one() -> None:
    with pytest.raises(ValueError, match="needs the next router's guesses"):
        create_predictor("next_gate", SHAPE).predict(1, Evidence(_ids([0, 1])), 4)
    ahead = PredictorShape(num_layers=3, num_experts=8, top_k=2, lookahead=2)
    with pytest.raises(ValueError, match="looks 1 layer ahead, not 2; set lookahead to 1"):
        create_predictor("next_gate", ahead)


def test_oracle_is_right_and_needs_a_trace() -> None:
    predictor = create_predictor("oracle", SHAPE)
    assert sorted(predictor.predict(2, _evidence(), 8)) == [2, 3, 7]
    with pytest.raises(ValueError, match="a running model cannot use it"):
        predictor.predict(2, Evidence(_ids([0, 1])), 4)


def test_previous_token_repeats_the_layers_last_step() -> None:
    predictor = create_predictor("previous_token", SHAPE)
    assert predictor.predict(1, _evidence(), 4) == []
    predictor.observe(1, _ids([6, 2], [5, -1]))
    predictor.observe(2, _ids([1, 0], [0, 3]))
    assert predictor.predict(1, _evidence(), 4) == [6, 5, 2]
    assert predictor.predict(2, _evidence(), 2) == [1, 0]


def test_frequency_ranks_by_uses_then_by_the_lower_expert() -> None:
    predictor = create_predictor("frequency", SHAPE)
    for row in ([5, 2], [5, 7], [5, 2], [-1, -1]):
        predictor.observe(1, _ids(row))
    predictor.observe(1, np.full((40, 2), 7, dtype=np.int16))
    assert predictor.predict(1, _evidence(), 8) == [7, 5, 2]
    assert predictor.predict(2, _evidence(), 8) == []


def test_frequency_halves_before_it_overflows() -> None:
    predictor = FrequencyPredictor(SHAPE)
    predictor.counts[1, [3, 4]] = [2**30 - 1, 2**29]
    predictor.observe(1, _ids([3, 3]))
    assert predictor.counts[1, [3, 4]].tolist() == [2**29, 2**28]


def test_transition_follows_what_came_after_the_chosen_experts() -> None:
    predictor = create_predictor("transition", SHAPE)
    for left, right in (([0, 1], [6, 7]), ([0, 1], [6, 5]), ([2, 3], [4, 4])):
        predictor.observe(0, _ids(left))
        predictor.observe(1, _ids(right))
        predictor.observe(2, _ids([0, 0]))
    assert predictor.predict(1, Evidence(_ids([0, 1])), 8) == [6, 5, 7]
    assert predictor.predict(1, Evidence(_ids([2, -1])), 8) == [4]
    assert predictor.predict(1, Evidence(_ids([0, 2])), 2) == [4, 6]  # 4 always followed 2
    assert predictor.predict(2, Evidence(_ids([4, 4])), 8) == [0]


def test_transition_pairs_only_experts_of_the_same_token_and_step() -> None:
    predictor = TransitionPredictor(SHAPE)
    predictor.observe(0, _ids([0, 1], [2, -1]))
    predictor.observe(1, _ids([4, -1], [5, 6]))
    pairs = {tuple(pair) for pair in np.argwhere(predictor.counts[0]).tolist()}
    assert pairs == {(0, 4), (1, 4), (2, 5), (2, 6)}
    predictor.observe(0, _ids([7, 7], [7, 7]))  # a new step, of which layer 1 is not shown
    predictor.observe(2, _ids([3, 3], [3, 3]))
    assert predictor.counts[1].sum() == 0


def test_transition_counts_every_pair_of_one_token_and_of_several() -> None:
    one, several = TransitionPredictor(SHAPE), TransitionPredictor(SHAPE)
    for left, right in (([0, 1], [6, 7]), ([0, 1], [6, 5]), ([2, 3], [4, 4]), ([2, -1], [5, 6])):
        one.observe(0, _ids(left))
        one.observe(1, _ids(right))
        several.observe(0, _ids(left, [-1, -1]))
        several.observe(1, _ids(right, [-1, -1]))
    assert (one.counts == several.counts).all()
    assert one.counts[0, 0, 6] == 2
    assert one.counts[0, 2].tolist() == [0, 0, 0, 0, 2, 1, 1, 0]


def test_transition_learns_a_wide_step_for_little_more_than_a_token() -> None:
    shape = PredictorShape(num_layers=2, num_experts=128, top_k=8)
    rng = np.random.default_rng(0)
    seconds: dict[int, float] = {}
    for tokens in (1, 64):
        predictor = create_predictor("transition", shape)
        topk_ids = rng.random((tokens, 128)).argsort(axis=1)[:, :8]
        rounds = []
        for _ in range(10):  # the least disturbed of them
            start = time.process_time()
            for _ in range(20):
                predictor.observe(0, topk_ids)
                predictor.observe(1, topk_ids)
            rounds.append(time.process_time() - start)
        seconds[tokens] = min(rounds)
    assert seconds[64] < 10 * seconds[1]


def test_transition_looks_as_far_ahead_as_it_is_told() -> None:
    shape = PredictorShape(num_layers=4, num_experts=8, top_k=2, lookahead=2)
    predictor = TransitionPredictor(shape)
    for layer_idx in range(4):
        predictor.observe(layer_idx, _ids([layer_idx, layer_idx]))
    assert predictor.counts.shape == (2, 8, 8)
    assert predictor.predict(2, Evidence(_ids([0, 0])), 8) == [2]
    assert predictor.predict(3, Evidence(_ids([1, 1])), 8) == [3]


def test_transition_refuses_layers_that_saw_different_tokens() -> None:
    predictor = create_predictor("transition", SHAPE)
    predictor.observe(0, _ids([0, 1]))
    with pytest.raises(ValueError, match="layer 1 has 2 tokens where layer 0 had 1"):
        predictor.observe(1, _ids([0, 1], [2, 3]))


def test_transition_halves_rows_so_that_no_count_overflows() -> None:
    predictor = TransitionPredictor(PredictorShape(num_layers=2, num_experts=2, top_k=1))
    many = np.zeros((1 << 18, 1), dtype=np.int16)
    for _ in range(20):
        predictor.observe(0, many)
        predictor.observe(1, many)
    assert 2**18 <= predictor.counts.max() <= 2**21


def test_what_transition_has_learned_can_be_loaded_however_even_the_routing_was(
    tmp_path: Path,
) -> None:
    shape = PredictorShape(num_layers=2, num_experts=2, top_k=1)
    predictor = TransitionPredictor(shape)
    many = np.zeros((8191, 1), dtype=np.int16)  # 129 steps until rows are looked at, not 128
    while predictor.counts.max() <= 2**21:
        predictor.observe(0, many)
        predictor.observe(1, many)
    predictor.save(tmp_path / "table.npz")
    loaded = TransitionPredictor.load(tmp_path / "table.npz", shape)
    assert np.array_equal(loaded.counts, predictor.counts)


@pytest.mark.parametrize("kind", [FrequencyPredictor, TransitionPredictor])
def test_learned_table_predicts_the_same_after_saving_and_loading(
    kind: type[FrequencyPredictor] | type[TransitionPredictor], tmp_path: Path
) -> None:
    learned = _learned(kind.name)
    learned.save(tmp_path / "table.npz")
    loaded = kind.load(tmp_path / "table.npz", SHAPE)
    for layer_idx in (1, 2):
        forecast = loaded.predict(layer_idx, _evidence(), 8)
        assert forecast == learned.predict(layer_idx, _evidence(), 8)
        assert forecast
    for layer_idx in range(3):  # and goes on learning
        loaded.observe(layer_idx, _ids([0, 1]))


@pytest.mark.parametrize("kind", [FrequencyPredictor, TransitionPredictor])
def test_learned_table_of_another_model_or_kind_is_refused(
    kind: type[FrequencyPredictor] | type[TransitionPredictor], tmp_path: Path
) -> None:
    path = tmp_path / "table.npz"
    _learned(kind.name).save(path)
    other = PredictorShape(num_layers=3, num_experts=16, top_k=2)
    with pytest.raises(
        ValueError, match=r"table\.npz: '\w+_counts' has shape .*8\], expected .*16"
    ):
        kind.load(path, other)
    write_arrays(path, something=np.arange(3))
    with pytest.raises(ValueError, match=r"has no array '(frequency|transition)_counts'"):
        kind.load(path, SHAPE)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="damaged or not an npz file"):
        kind.load(path, SHAPE)


def test_those_that_learn_have_a_table_and_no_others(tmp_path: Path) -> None:
    made = {name: type(create_predictor(name, SHAPE)) for name in PREDICTOR_NAMES}
    assert dict(LEARNED) == {name: cls for name, cls in made.items() if hasattr(cls, "save")}
    for name in PREDICTOR_NAMES:
        if name in LEARNED:
            _learned(name).save(tmp_path / name)
            loaded = create_predictor(name, SHAPE, table=tmp_path / name)
            assert loaded.predict(1, _evidence(), 8) == _learned(name).predict(1, _evidence(), 8)
            continue
        with pytest.raises(ValueError, match=f"predictor '{name}' has no table; those that learn"):
            create_predictor(name, SHAPE, table=tmp_path / "none")


@pytest.mark.parametrize("name", LEARNED)
def test_a_table_is_checked_before_the_number_of_layers_is_known(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    _learned(name).save(path)
    for num_experts in (8, None):
        LEARNED[name].check_table(path, num_experts)
    with pytest.raises(ValueError, match=r"8\], expected \[any, .*16\]; give a table"):
        LEARNED[name].check_table(path, 16)
    with pytest.raises(FileNotFoundError):
        LEARNED[name].check_table(tmp_path / "gone", 8)


def test_transition_refuses_a_table_that_could_not_be_loaded_again() -> None:
    sizes = {"num_layers": 8, "num_experts": 1 << 15, "top_k": 2}
    with pytest.raises(ValueError, match=r"28.0 GiB for 32768 experts in 8 layers, more than 1;"):
        create_predictor("transition", PredictorShape(**sizes))


def test_learned_table_with_impossible_counts_is_refused(tmp_path: Path) -> None:
    counts = np.zeros((3, 8), dtype=np.int64)
    for value in (-1, 2**40):
        counts[1, 1] = value
        write_arrays(tmp_path / "table.npz", frequency_counts=counts)
        with pytest.raises(ValueError, match=f"holds {value}, which is out of range"):
            FrequencyPredictor.load(tmp_path / "table.npz", SHAPE)
