"""The experts that the layer will really choose: the bound for every other predictor."""

from typing import ClassVar

from .base import Evidence, IdArray, PredictorShape, RunsOn, by_rank


class OraclePredictor:
    """Reads the answer from the trace that is being replayed."""

    name: ClassVar[str] = "oracle"
    runs_on: ClassVar[RunsOn] = RunsOn.HOST
    needs_guesses: ClassVar[bool] = False

    def __init__(self, shape: PredictorShape) -> None:
        self._shape = shape

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
        self._shape.check_target(layer_idx)
        if evidence.truth is None:
            raise ValueError(
                "predictor 'oracle' reads the routing from a trace; a running model cannot use it"
            )
        return by_rank(evidence.truth, count)

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        pass
