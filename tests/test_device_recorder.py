"""Routing recorded on the device: the same trace as the host's recorder makes."""

import numpy as np
import pytest
import torch

from prefetch_runtime.device_recorder import DeviceRecorder
from prefetch_runtime.recorder import TraceRecorder
from prefetch_runtime.trace import TraceError

LAYERS, EXPERTS, TOP_K, GUESSES = 3, 16, 2, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Rig:
    """A recorder and the clock that the scheduler would move."""

    def __init__(self, max_tokens: int = 20, *, num_guesses: int = GUESSES) -> None:
        self.clock = torch.ones(1, dtype=torch.int32, device=DEVICE)
        self.recorder = DeviceRecorder(
            num_layers=LAYERS,
            num_experts=EXPERTS,
            top_k=TOP_K,
            num_guesses=num_guesses,
            max_tokens=max_tokens,
            step=self.clock,
        )
        self.random = np.random.default_rng(0)

    def step(self, tokens: int, padding: torch.Tensor | None = None) -> tuple[list, list]:
        """One step of random choices; returns them by layer."""
        self.clock.add_(1)
        chosen, guessed = [], []
        for layer_idx in range(LAYERS):
            ids = self._ids(tokens, TOP_K)
            guesses = self._ids(tokens, GUESSES) if layer_idx + 1 < LAYERS else None
            self.recorder.record(layer_idx, ids, guesses, padding)
            chosen.append(ids.cpu().numpy())
            guessed.append(None if guesses is None else guesses.cpu().numpy())
        return chosen, guessed

    def _ids(self, tokens: int, count: int) -> torch.Tensor:
        rows = [self.random.choice(EXPERTS, count, replace=False) for _ in range(tokens)]
        return torch.from_numpy(np.stack(rows).astype(np.int32)).to(DEVICE)


def test_it_makes_the_trace_that_the_host_makes() -> None:
    rig, host = Rig(), TraceRecorder(LAYERS, EXPERTS, 20)
    rig.recorder.start(20)
    for number, tokens in enumerate((5, 2, 1, 2)):
        chosen, guessed = rig.step(tokens)
        requests = [("a", tokens - 1), ("b", 1)] if tokens > 1 else [("b", 1)]
        rig.recorder.end_step(requests)
        for layer_idx in range(LAYERS):
            host.record(layer_idx, chosen[layer_idx], guessed[layer_idx])
        host.end_step(requests)
        assert number < 4
    ours, theirs = rig.recorder.trace(), host.trace()
    np.testing.assert_array_equal(ours.topk, theirs.topk)
    np.testing.assert_array_equal(ours.next_gate, theirs.next_gate)  # type: ignore[arg-type]
    np.testing.assert_array_equal(ours.sequence, theirs.sequence)
    np.testing.assert_array_equal(ours.step_bounds(), theirs.step_bounds())
    assert ours.sequence.tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 0, 1]
    assert rig.recorder.num_dropped == 0


def test_padding_is_left_out() -> None:
    rig = Rig()
    rig.recorder.start(20)
    padding = torch.tensor([7, -1, 9, -1], device=DEVICE)
    chosen, _ = rig.step(4, padding)
    trace = rig.recorder.trace()
    assert trace.num_tokens == 2
    np.testing.assert_array_equal(trace.topk[:, 1], chosen[1][[0, 2]])


def test_padding_that_is_planned_like_tokens_is_left_out_by_the_host_too() -> None:
    rig, host = Rig(), TraceRecorder(LAYERS, EXPERTS, 20)
    for tokens, padded in ((2, 4), (1, 1)):
        chosen, guessed = rig.step(padded)
        for layer_idx in range(LAYERS):
            host.record(layer_idx, chosen[layer_idx], guessed[layer_idx])
        host.end_step([("a", tokens)])
    trace = host.trace()
    assert trace.num_tokens == 3
    assert trace.sequence.tolist() == [0, 0, 0]
    assert trace.next_gate is not None
    assert len(trace.next_gate) == 3
    assert trace.step_bounds().tolist() == [0, 2, 3]


def test_nothing_is_recorded_before_the_start_and_after_the_stop() -> None:
    rig = Rig()
    rig.step(3)
    with pytest.raises(TraceError):
        rig.recorder.trace()
    rig.recorder.start(20)
    rig.step(2)
    rig.recorder.stop()
    rig.step(3)
    assert rig.recorder.trace().num_tokens == 2
    assert rig.recorder.num_dropped == 0
    rig.recorder.start(20)
    rig.step(1)
    assert rig.recorder.trace().num_tokens == 1


def test_a_recording_ends_with_the_first_step_that_has_no_room() -> None:
    rig, host = Rig(), TraceRecorder(LAYERS, EXPERTS, 6)
    rig.recorder.start(6)
    widths = (4, 3, 2, 1)  # the second does not fit, the others would
    first: list[np.ndarray] = []
    for tokens in widths:
        chosen, guessed = rig.step(tokens)
        first = first or chosen
        for layer_idx in range(LAYERS):
            host.record(layer_idx, chosen[layer_idx], guessed[layer_idx])
        for recorder in (rig.recorder, host):
            recorder.end_step([("a", tokens - 1), ("b", 1)])
    rig.step(3, torch.full((3,), -1, device=DEVICE))  # nothing but padding is no step
    for recorder in (rig.recorder, host):
        trace = recorder.trace()
        np.testing.assert_array_equal(trace.topk, np.stack(first, axis=1))
        assert trace.sequence.tolist() == [0, 0, 0, 1]
        assert trace.step_bounds().tolist() == [0, 4]
        assert (recorder.num_dropped, recorder.num_dropped_steps) == (6, 3)
    rig.recorder.start(6)
    rig.step(5)
    assert (rig.recorder.num_dropped, rig.recorder.num_dropped_steps) == (0, 0)
    assert rig.recorder.trace().num_tokens == 5


def test_a_recording_without_a_token_says_why() -> None:
    rig, host = Rig(), TraceRecorder(LAYERS, EXPERTS, 2)
    for recorder in (rig.recorder, host):
        with pytest.raises(TraceError, match="nothing was recorded: no step has run since"):
            recorder.trace()
    rig.recorder.start(2)
    rig.step(3)
    for layer_idx in range(LAYERS):
        host.record(layer_idx, np.zeros((3, TOP_K), np.int32), None)
    for recorder in (rig.recorder, host):
        with pytest.raises(TraceError, match=r"the first step had .*; raise --max-trace-tokens"):
            recorder.trace()


def test_requests_that_do_not_match_the_rows_are_not_believed() -> None:
    rig = Rig()
    rig.recorder.start(20)
    rig.step(2)
    rig.recorder.end_step([("a", 1), ("b", 2)])
    assert rig.recorder.trace().sequence.tolist() == [0, 0]


def test_without_guesses_there_are_none_in_the_trace() -> None:
    rig = Rig(num_guesses=0)
    rig.recorder.start(20)
    rig.step(2)
    assert rig.recorder.trace().next_gate is None


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="room for a trace of 1 to 8 tokens, not 9"):
        Rig(max_tokens=8).recorder.start(9)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Rig(max_tokens=0)


@pytest.mark.gpu
def test_a_captured_step_is_recorded_at_every_replay() -> None:
    rig = Rig()
    ids = torch.zeros(2, TOP_K, dtype=torch.int32, device=DEVICE)
    guesses = torch.zeros(2, GUESSES, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        rig.clock.add_(1)
        for layer_idx in range(LAYERS):
            last = layer_idx + 1 == LAYERS
            rig.recorder.record(layer_idx, ids + layer_idx, None if last else guesses)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rig.recorder.start(20)
    for value in (3, 5, 7):
        ids.fill_(value)
        graph.replay()
    trace = rig.recorder.trace()
    assert trace.topk[:, 2, 0].tolist() == [5, 5, 7, 7, 9, 9]
    assert len(trace.step_bounds()) - 1 == 3
