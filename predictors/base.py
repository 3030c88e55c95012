"""The contract of a predictor: which experts will a later layer of the running step ask for?"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.signedinteger]
"""Expert ids in any signed integer type; -1 stands for a padding row."""

MAX_FORECAST = 64
"""Most experts that one prediction names, however many tokens the step has. `graphs.prefetch` has
the same number, which kernels are built for."""


class RunsOn(Enum):
    """Where a predictor can do its work."""

    HOST = "host"
    """On the host between layers: `segmented` and `eager` modes."""
    BOTH = "both"
    """There, and as kernels inside a captured graph (`full` mode)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorShape:
    """The model that a predictor works for, and how many layers ahead it looks."""

    num_layers: int
    num_experts: int
    top_k: int
    lookahead: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} exceeds the {self.num_experts} experts")
        if self.num_layers == 1:
            raise ValueError(
                "a model with one MoE layer has no later one to predict; use predictor 'none'"
            )
        if self.lookahead >= self.num_layers:
            raise ValueError(
                f"lookahead={self.lookahead} reaches past the last of {self.num_layers} MoE "
                f"layers; use at most {self.num_layers - 1}"
            )

    def check_target(self, layer_idx: int) -> None:
        """Raise ValueError unless the layer can be predicted from an earlier one of the step."""
        if not self.lookahead <= layer_idx < self.num_layers:
            raise ValueError(
                f"layer {layer_idx} cannot be predicted {self.lookahead} layers ahead: the model "
                f"has MoE layers 0 to {self.num_layers - 1}"
            )

    def check_layer(self, layer_idx: int) -> None:
        """Raise ValueError unless the layer exists."""
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer {layer_idx} is not one of 0 to {self.num_layers - 1}")


class Evidence(NamedTuple):
    """What is known when a layer is predicted. T = tokens of the step, K = top_k, G = guesses."""

    topk_ids: IdArray
    """[T, K]: what the layer `lookahead` earlier has just chosen."""
    next_gate: IdArray | None = None
    """[T, G]: the predicted layer's router on the earlier layer's input, best first. For predictors
    that set `needs_guesses`, with a lookahead of 1; others may get None."""
    truth: IdArray | None = None
    """[T, K]: what the predicted layer will choose. Only a replayed trace knows it."""


class Predictor(Protocol):
    """Guesses the experts of a layer before its router has run.

    In each step, `observe` hears every layer in ascending order, and `predict` may be asked for
    layer `l + lookahead` after layer `l` has been observed. Neither blocks nor touches a device.
    """

    name: ClassVar[str]
    runs_on: ClassVar[RunsOn]
    needs_guesses: ClassVar[bool]
    """Whether `predict` reads `Evidence.next_gate`, for which an engine runs the next router."""

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
        """At most `count` experts of the layer, best first, without repeats. Changes nothing.

        Raises ValueError for a layer that cannot be predicted, or evidence that is missing.
        """
        ...

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        """Learn what a layer chose: [T, K], the same T for all layers of a step."""
        ...


def first_unique(ids: Iterable[int], count: int) -> list[int]:
    """The first `count` different ids, -1 left out, in the order given."""
    unique = dict.fromkeys(ids)
    unique.pop(-1, None)
    return list(unique)[:count]


def by_rank(guesses: IdArray, count: int) -> list[int]:
    """One ranking out of one per token, [T, G] best first: all first guesses, then all second."""
    return first_unique(guesses.T.ravel().tolist(), count)


def highest(scores: npt.NDArray[np.floating] | npt.NDArray[np.integer], count: int) -> list[int]:
    """Indices of the `count` highest positive scores [E], best first, ties to the lower index."""
    order = (-scores).argsort(kind="stable")[:count]
    if order.size and not scores[order[-1]] > 0:
        order = order[scores[order] > 0]
    best: list[int] = order.tolist()
    return best
