"""The experts that the layer used in the previous step."""

from typing import ClassVar

from .base import Evidence, IdArray, PredictorShape, RunsOn, by_rank


class PreviousTokenPredictor:
    """What was used a moment ago is mostly resident still: a baseline, rarely worth its bytes."""

    name: ClassVar[str] = "previous_token"
    runs_on: ClassVar[RunsOn] = RunsOn.HOST
    needs_guesses: ClassVar[bool] = False

    def __init__(self, shape: PredictorShape) -> None:
        self._shape = shape
        self._last: list[list[int]] = [[] for _ in range(shape.num_layers)]

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:  # noqa: ARG002
        self._shape.check_target(layer_idx)
        return self._last[layer_idx][:count]

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        self._shape.check_layer(layer_idx)
        self._last[layer_idx] = by_rank(topk_ids, self._shape.num_experts)
