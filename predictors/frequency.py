"""The experts that the layer has used most, learned while it runs."""

from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from .base import Evidence, IdArray, PredictorShape, RunsOn, highest
from .npz import ArraySpec, read_arrays, write_arrays

_LIMIT = 1 << 30


class FrequencyPredictor:
    """Uses of every expert, per layer. Counts of a layer are halved before one could overflow."""

    name: ClassVar[str] = "frequency"
    runs_on: ClassVar[RunsOn] = RunsOn.HOST
    needs_guesses: ClassVar[bool] = False

    def __init__(self, shape: PredictorShape) -> None:
        self._shape = shape
        self.counts = np.zeros((shape.num_layers, shape.num_experts), dtype=np.int32)
        """[layers, experts] int32."""

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

    def save(self, path: Path) -> None:
        """Write the counts as npz, replacing the file in one move."""
        write_arrays(path, frequency_counts=self.counts)

    @classmethod
    def load(cls, path: Path, shape: PredictorShape) -> Self:
        """Read what `save` wrote. Raises ValueError if it is damaged or for another model."""
        predictor = cls(shape)
        spec = ArraySpec(shape=predictor.counts.shape, highest=_LIMIT)
        predictor.counts[:] = read_arrays(path, {"frequency_counts": spec})["frequency_counts"]
        return predictor
