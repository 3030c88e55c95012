"""Collects what every layer's router chose, as a trace that the simulator and the predictors read.

Shapes: T = tokens of a step, L = MoE layers, K = top_k, G = guesses.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prefetch_runtime.trace import Trace, TraceError

IntArray = npt.NDArray[np.int32]
Count: TypeAlias = Any
"""An int, or an integer tensor."""


class Recorder(Protocol):
    """What is asked of a recorder when steps have run, wherever it keeps what the routers chose."""

    @property
    def num_dropped(self) -> int:
        """Tokens of the steps that were left out: the first one without room, and all after it."""

    @property
    def num_dropped_steps(self) -> int:
        """How many steps these were."""

    def end_step(self, requests: Sequence[tuple[str, int]]) -> None:
        """Which request each row of the last step belongs to: (id, number of rows), in order."""

    def stop(self) -> None:
        """Record nothing from the next step on."""

    def trace(self) -> Trace:
        """What has been recorded. Raises TraceError if nothing has."""


def has_room(used: Count, tokens: Count, most: Count, dropped: Count) -> Count:
    """Whether a step's tokens are kept, as bool: of numbers, or of tensors while a graph runs.

    A recording ends with the first step that does not fit, even if a later one would: what is kept
    has no hole, so what follows a token in the trace followed it in the model.
    """
    return (used + tokens <= most) & (dropped == 0)


def check_recorded(num_tokens: int, num_dropped: int) -> None:
    """Raise TraceError, with the reason, if a recording has no token."""
    if num_tokens:
        return
    why = (
        "the first step had more tokens than there was room for, and a recording ends with such a "
        "step; raise --max-trace-tokens"
        if num_dropped
        else "no step has run since prefetch_trace_start"
    )
    raise TraceError(f"nothing was recorded: {why}")


class TraceRecorder:
    """Fed by the scheduler, layer by layer; a step is kept when all its layers have come."""

    def __init__(self, num_layers: int, num_experts: int, max_tokens: int) -> None:
        """`max_tokens`: in all; the first step that is too wide for what is left of them is left
        out whole, and so is what follows (see `has_room`).

        Raises:
            ValueError: a size below 1.
        """
        for name, value in (("num_layers", num_layers), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._max_tokens = max_tokens
        self._layers: list[IntArray] = []
        self._guesses: list[IntArray] = []
        self._steps: list[tuple[int, npt.NDArray[np.int16], npt.NDArray[np.int16] | None]] = []
        self._sequences: list[npt.NDArray[np.int32]] = []
        self._numbers: dict[str, int] = {}
        self._num_tokens = 0
        self._step = 0
        self.num_dropped = 0
        self.num_dropped_steps = 0

    def record(self, layer_idx: int, topk_ids: IntArray, guesses: IntArray | None) -> None:
        """One layer's choice, [T, K], -1 in padding rows; guesses [T, G] for the next layer."""
        if layer_idx == 0:
            self._layers, self._guesses = [], []
            self._step += 1
        if layer_idx != len(self._layers):
            self._layers = []  # the step began before the recording did
            return
        self._layers.append(topk_ids.copy())
        if guesses is not None:
            self._guesses.append(guesses.copy())
        if layer_idx + 1 == self._num_layers:
            self._keep()

    def stop(self) -> None:
        """Nothing: what is not shown is not recorded."""

    def end_step(self, requests: Sequence[tuple[str, int]]) -> None:
        """Which request each row of the last step belongs to: (id, number of rows), in order."""
        total = sum(count for _, count in requests)
        if not self._steps or len(self._sequences) >= len(self._steps):
            return
        step, topk, guesses = self._steps[-1]
        if 0 < total < len(topk):
            # Rows of padding come last. Where they are planned like tokens, they look like some.
            self._num_tokens -= len(topk) - total
            self._steps[-1] = (step, topk[:total], None if guesses is None else guesses[:total])
        elif total != len(topk):
            return  # rows of another order: their requests are not known
        numbers = [self._numbers.setdefault(name, len(self._numbers)) for name, _ in requests]
        self._sequences.append(
            np.repeat(np.array(numbers, dtype=np.int32), [count for _, count in requests])
        )

    def trace(self) -> Trace:
        """What has been recorded.

        Raises:
            TraceError: nothing has.
        """
        check_recorded(self._num_tokens, self.num_dropped)
        topk = [topk for _, topk, _ in self._steps]
        guesses = [guess for _, _, guess in self._steps if guess is not None]
        steps = [np.full(topk.shape[0], number, dtype=np.int32) for number, topk, _ in self._steps]
        known = len(self._sequences) == len(self._steps)
        all_topk = np.concatenate(topk)
        return Trace(
            topk=all_topk,
            sequence=(
                np.concatenate(self._sequences)
                if known and self._sequences
                else np.zeros(all_topk.shape[0], dtype=np.int32)
            ),
            num_experts=self._num_experts,
            next_gate=np.concatenate(guesses) if guesses else None,
            step=np.concatenate(steps),
        )

    def _keep(self) -> None:
        topk = np.stack(self._layers, axis=1)
        real = (topk >= 0).all(axis=(1, 2))
        tokens = int(real.sum())
        if tokens == 0:
            return
        if not has_room(self._num_tokens, tokens, self._max_tokens, self.num_dropped):
            self.num_dropped += tokens
            self.num_dropped_steps += 1
            return
        guesses: npt.NDArray[np.int16] | None = None
        if len(self._guesses) == self._num_layers - 1 and self._guesses:
            guesses = np.stack(self._guesses, axis=1)[real].astype(np.int16)
        self._num_tokens += tokens
        self._steps.append((self._step, topk[real].astype(np.int16), guesses))
