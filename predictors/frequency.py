"""The experts that the layer has used most, learned while it runs."""

from typing import ClassVar

import numpy as np

from .base import Evidence, IdArray, PredictorShape, RunsOn, highest
from .learned import LearnedPredictor

_LIMIT = 1 << 30


class FrequencyPredictor(LearnedPredictor):
    """Uses of every expert, per layer. Counts of a layer are halved before one could overflow."""

    name: ClassVar[str] = "frequency"
    runs_on: ClassVar[RunsOn] = RunsOn.HOST
    needs_guesses: ClassVar[bool] = False
    highest: ClassVar[int] = _LIMIT

    def __init__(self, shape: PredictorShape) -> None:
        self._shape = shape
        self.counts = np.zeros(self.table_shape(shape), dtype=np.int32)
        """[layers, experts] int32."""

    @classmethod
    def table_shape(cls, shape: PredictorShape) -> tuple[int, ...]:
        return shape.num_layers, shape.num_experts

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:  # noqa: ARG002
        self._shape.check_target(layer_idx)
        return highest(self.counts[layer_idx], count)

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        self._shape.check_layer(layer_idx)
        counts = self.counts[layer_idx]
        ids = topk_ids[topk_ids >= 0]
        counts += np.bincount(ids, minlength=counts.size).astype(np.int32)
        if counts.max() >= _LIMIT:
            counts >>= 1
