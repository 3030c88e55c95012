"""A recorded routing: which experts every layer chose for every token, kept as one npz file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from predictors.npz import DEFAULT_MAX_BYTES, ArraySpec, NpzError, read_arrays, write_arrays

_MAX_ID = int(np.iinfo(np.int16).max)
_MAX_STEP = int(np.iinfo(np.int32).max)


class TraceError(ValueError):
    """A trace that cannot be used; the message says what is wrong with which array."""


@dataclass(frozen=True, slots=True)
class Trace:
    """T = tokens in the order they were computed, L = MoE layers, K = top_k, G = guesses.

    Checked when it is made: TraceError for shapes that do not fit, ids out of range, no tokens.
    """

    topk: npt.NDArray[np.int16]
    """[T, L, K]: experts chosen."""
    sequence: npt.NDArray[np.int32]
    """[T]: which request the token belongs to."""
    num_experts: int
    next_gate: npt.NDArray[np.int16] | None = None
    """[T, L-1, G]: router of layer l + 1 on the input of layer l's experts, best first."""
    step: npt.NDArray[np.int32] | None = None
    """[T], never decreasing: tokens with one number were computed together. None: one each."""

    def __post_init__(self) -> None:
        if self.topk.ndim != 3 or 0 in self.topk.shape:
            raise TraceError(
                f"trace: topk must be [tokens, layers, top_k], none of them 0, got "
                f"{list(self.topk.shape)}"
            )
        _check_ids("topk", self.topk, self.num_experts)
        tokens, layers, top_k = self.topk.shape
        if top_k > self.num_experts:
            raise TraceError(f"trace: top_k={top_k} exceeds the {self.num_experts} experts")
        for name, array in (("sequence", self.sequence), ("step", self.step)):
            if array is not None and array.shape != (tokens,):
                raise TraceError(
                    f"trace: {name} must be [{tokens}] like topk, got {list(array.shape)}"
                )
        if self.step is not None and (np.diff(self.step) < 0).any():
            raise TraceError("trace: step must never decrease")
        guesses = self.next_gate
        if guesses is not None:
            if guesses.ndim != 3 or guesses.shape[:2] != (tokens, layers - 1) or not guesses.size:
                raise TraceError(
                    f"trace: next_gate must be [{tokens}, {layers - 1}, guesses] to fit topk, got "
                    f"{list(guesses.shape)}"
                )
            _check_ids("next_gate", guesses, self.num_experts)

    @property
    def num_tokens(self) -> int:
        return int(self.topk.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.topk.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.topk.shape[2])

    def step_bounds(self) -> npt.NDArray[np.intp]:
        """[steps + 1]: the tokens of step i are rows bounds[i] to bounds[i + 1] - 1."""
        if self.step is None:
            return np.arange(self.num_tokens + 1)
        starts = np.flatnonzero(np.diff(self.step)) + 1
        return np.concatenate([[0], starts, [self.num_tokens]])

    def batched(self, batch_size: int) -> Self:
        """The same tokens as `batch_size` streams of equal length that decode side by side.

        Each stream is a sequence of its own, whichever requests its tokens belonged to: a step
        with two tokens of one sequence would be a prompt. Tokens that do not fill a step at the
        end are left out.
        """
        steps = self.num_tokens // batch_size if batch_size > 0 else 0
        if steps < 1:
            raise TraceError(
                f"trace: batch_size must be between 1 and the {self.num_tokens} tokens, got "
                f"{batch_size}"
            )
        rows = np.arange(batch_size * steps).reshape(batch_size, steps).T.ravel()
        return type(self)(
            topk=self.topk[rows],
            sequence=np.tile(np.arange(batch_size, dtype=np.int32), steps),
            num_experts=self.num_experts,
            next_gate=None if self.next_gate is None else self.next_gate[rows],
            step=np.repeat(np.arange(steps, dtype=np.int32), batch_size),
        )

    def require_model(self, *, num_layers: int, num_experts: int, top_k: int) -> None:
        """Raise TraceError unless the trace was recorded from a model of these sizes."""
        expected = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
        wrong = [
            f"{name} {getattr(self, name)} instead of {value}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise TraceError(f"the trace belongs to another model: {', '.join(wrong)}")


def load_trace(
    path: Path | str, *, num_experts: int | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> Trace:
    """Read a trace. Nothing is unpickled; sizes are checked before anything is decompressed.

    Args:
        num_experts: experts of a layer. None takes the number that the file states, or else one
            more than the highest id in it.
        max_bytes: most memory that the arrays may take together.

    Raises:
        TraceError: the file is damaged, misses an array, or holds what cannot be a trace.
        OSError: the file cannot be opened.
    """
    specs = {
        "topk": ArraySpec(shape=(None, None, None), highest=_MAX_ID),
        "sequence": ArraySpec(shape=(None,), highest=_MAX_STEP),
        "next_gate": ArraySpec(shape=(None, None, None), required=False, highest=_MAX_ID),
        "step": ArraySpec(shape=(None,), required=False, highest=_MAX_STEP),
        "num_experts": ArraySpec(shape=(), required=False, lowest=1, highest=_MAX_ID + 1),
    }
    try:
        arrays = read_arrays(path, specs, max_bytes=max_bytes)
    except NpzError as e:
        raise TraceError(str(e)) from e
    topk, next_gate, step = arrays["topk"], arrays.get("next_gate"), arrays.get("step")
    if "num_experts" in arrays:
        stated = int(arrays["num_experts"])
        if num_experts not in (None, stated):
            raise TraceError(
                f"{path}: the trace belongs to another model: it has {stated} experts, not "
                f"{num_experts}"
            )
        num_experts = stated
    if num_experts is None:
        num_experts = 1 + max(int(a.max()) for a in (topk, next_gate) if a is not None)
    try:
        return Trace(
            topk=topk.astype(np.int16),
            sequence=arrays["sequence"].astype(np.int32),
            num_experts=num_experts,
            next_gate=None if next_gate is None else next_gate.astype(np.int16),
            step=None if step is None else step.astype(np.int32),
        )
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from e


def save_trace(path: Path | str, trace: Trace) -> None:
    """Write a trace as compressed npz; a reader never sees a part of it."""
    arrays: dict[str, npt.NDArray[np.integer]] = {
        "topk": trace.topk.astype(np.int16),
        "sequence": trace.sequence.astype(np.int32),
        "num_experts": np.array(trace.num_experts, dtype=np.int32),
    }
    if trace.next_gate is not None:
        arrays["next_gate"] = trace.next_gate.astype(np.int16)
    if trace.step is not None:
        arrays["step"] = trace.step.astype(np.int32)
    write_arrays(path, **arrays)


def _check_ids(name: str, ids: npt.NDArray[np.integer], num_experts: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_experts:
        raise TraceError(
            f"trace: {name} names expert {low if low < 0 else high}, which is out of range: the "
            f"model has experts 0 to {num_experts - 1}"
        )
