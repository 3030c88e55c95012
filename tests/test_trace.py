"""Traces: reading, writing, and refusing what cannot be one."""

from pathlib import Path

import numpy as np
import pytest

from prefetch_runtime.trace import Trace, TraceError, load_trace, save_trace

RECORDED = Path(__file__).resolve().parent.parent / "models" / "tiny-moe-trace.npz"


def _arrays(tokens: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "topk": rng.integers(0, 8, (tokens, 3, 2)).astype(np.int16),
        "sequence": np.arange(tokens, dtype=np.int16) // 3,
        "next_gate": rng.integers(0, 8, (tokens, 2, 4)).astype(np.int16),
        "step": np.arange(tokens, dtype=np.int32) // 2,
    }


def _trace(**changes: object) -> Trace:
    return Trace(**{**_arrays(), "num_experts": 8, **changes})


def test_recorded_trace_loads_with_its_sizes() -> None:
    trace = load_trace(RECORDED)
    trace.require_model(num_layers=8, num_experts=32, top_k=4)
    assert trace.num_tokens == 4096
    assert trace.next_gate is not None
    assert trace.next_gate.shape == (4096, 7, 8)
    assert trace.step is None
    assert trace.topk.dtype == np.int16


@pytest.mark.parametrize("with_optional", [True, False])
def test_saved_trace_loads_as_it_was(tmp_path: Path, with_optional: bool) -> None:
    trace = _trace() if with_optional else _trace(next_gate=None, step=None)
    save_trace(tmp_path / "t.npz", trace)
    loaded = load_trace(tmp_path / "t.npz")
    assert loaded.num_experts == 8
    for name in ("topk", "sequence", "next_gate", "step"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
    assert (loaded.next_gate is not None) == with_optional


def test_unknown_arrays_are_ignored_whatever_they_are(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "t.npz", **_arrays(), notes=np.array([{"a": 1}], dtype=object), gates=np.ones(3)
    )
    assert load_trace(tmp_path / "t.npz").num_tokens == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": None}, "has no array 'topk'"),
        ({"sequence": None}, "has no array 'sequence'"),
        ({"topk": np.zeros((6, 3), np.int16)}, r"'topk' has shape \[6, 3\], expected"),
        ({"topk": np.zeros((0, 3, 2), np.int16)}, r"'topk' is empty: shape \[0, 3, 2\]"),
        ({"topk": np.zeros((6, 3, 2))}, "'topk' must be integers, got float64"),
        ({"topk": np.zeros((6, 3, 2), object)}, "'topk' holds pickled objects"),
        ({"topk": np.full((6, 3, 2), -1)}, "'topk' holds -1, which is out of range"),
        ({"topk": np.full((6, 3, 2), 40000)}, "'topk' holds 40000, which is out of range"),
        ({"sequence": np.zeros(5, np.int16)}, r"sequence must be \[6\] like topk, got \[5\]"),
        ({"sequence": np.full(6, 2**40)}, "'sequence' holds 1099511627776"),
        ({"step": np.zeros(7, np.int32)}, r"step must be \[6\] like topk, got \[7\]"),
        ({"step": np.array([0, 0, 2, 1, 3, 3])}, "step must never decrease"),
        ({"next_gate": np.zeros((6, 3, 4), int)}, r"must be \[6, 2, guesses\] to fit topk"),
        ({"next_gate": np.full((6, 2, 4), -3)}, "'next_gate' holds -3"),
        ({"num_experts": np.array(6)}, "topk names expert 7, .* experts 0 to 5"),
        ({"num_experts": np.array(0)}, "'num_experts' holds 0, which is out of range"),
    ],
)
def test_malformed_trace_is_refused_with_the_array_and_the_file(
    tmp_path: Path, changes: dict[str, np.ndarray | None], message: str
) -> None:
    arrays = {k: v for k, v in {**_arrays(), **changes}.items() if v is not None}
    np.savez_compressed(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError, match=message) as e:
        load_trace(tmp_path / "t.npz")
    assert "t.npz" in str(e.value)


def test_truncated_trace_is_refused(tmp_path: Path) -> None:
    whole = RECORDED.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "t.npz").write_bytes(whole[:size])
        with pytest.raises(TraceError, match="damaged or not an npz file"):
            load_trace(tmp_path / "t.npz")


def test_trace_larger_than_the_limit_is_refused() -> None:
    with pytest.raises(TraceError, match="'topk' claims 262144 bytes, more than the 100000"):
        load_trace(RECORDED, max_bytes=100_000)


def test_missing_trace_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "t.npz")


def test_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="another model: num_layers 3 instead of 4, top_k 2 inst"):
        _trace().require_model(num_layers=4, num_experts=8, top_k=3)
    save_trace(tmp_path / "t.npz", _trace())
    with pytest.raises(TraceError, match="another model: it has 8 experts, not 16"):
        load_trace(tmp_path / "t.npz", num_experts=16)


def test_number_of_experts_may_be_given_for_a_file_that_does_not_state_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **_arrays())
    assert load_trace(tmp_path / "t.npz", num_experts=64).num_experts == 64
    with pytest.raises(TraceError, match="experts 0 to 3"):
        load_trace(tmp_path / "t.npz", num_experts=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": np.zeros((6, 0, 2), np.int16)}, "none of them 0"),
        ({"topk": np.full((6, 3, 2), 8)}, "names expert 8, which is out of range"),
        ({"topk": np.full((6, 3, 2), -1)}, "names expert -1"),
        ({"topk": np.zeros((6, 3, 9), np.int16)}, "top_k=9 exceeds the 8 experts"),
        ({"next_gate": np.zeros((6, 2, 0), np.int16)}, "next_gate must be"),
    ],
)
def test_trace_checks_itself_when_it_is_made(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        _trace(**changes)


def test_steps_are_the_rows_with_one_number() -> None:
    assert _trace().step_bounds().tolist() == [0, 2, 4, 6]
    assert _trace(step=None).step_bounds().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert _trace(step=np.full(6, 9)).step_bounds().tolist() == [0, 6]


def test_batched_trace_decodes_several_streams_side_by_side() -> None:
    trace = _trace(step=None)
    batched = trace.batched(2)
    assert batched.step_bounds().tolist() == [0, 2, 4, 6]
    np.testing.assert_array_equal(batched.topk, trace.topk[[0, 3, 1, 4, 2, 5]])
    np.testing.assert_array_equal(batched.next_gate, trace.next_gate[[0, 3, 1, 4, 2, 5]])
    assert batched.sequence.tolist() == [0, 1, 0, 1, 0, 1]
    assert trace.batched(4).num_tokens == 4
    for batch_size in (0, 7, -1):
        with pytest.raises(TraceError, match="batch_size must be between 1 and the 6 tokens"):
            trace.batched(batch_size)


def test_streams_of_one_recorded_request_are_sequences_of_their_own() -> None:
    trace = _trace(step=None, sequence=np.zeros(6, np.int32))
    assert trace.batched(3).sequence.tolist() == [0, 1, 2, 0, 1, 2]
