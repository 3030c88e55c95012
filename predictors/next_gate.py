"""The next layer's router, applied as it is to this layer's input.

Hidden states change little from layer to layer, so the router of layer L + 1 gives nearly its own
answer when it is shown the input of layer L's experts (FATE, arXiv 2502.12224; Mixtral offloading,
arXiv 2312.17238). The small matrix product is done where the hidden states are; this file turns its
rankings, or those that a trace recorded, into one forecast.
"""

from typing import ClassVar

from .base import Evidence, IdArray, PredictorShape, RunsOn, by_rank


class NextGatePredictor:
    """Merges the tokens' rankings: every token's best guess first, then every second, and so on."""

    name: ClassVar[str] = "next_gate"
    runs_on: ClassVar[RunsOn] = RunsOn.BOTH
    needs_guesses: ClassVar[bool] = True

    def __init__(self, shape: PredictorShape) -> None:
        """Raises ValueError for a lookahead other than 1."""
        if shape.lookahead != 1:
            raise ValueError(
                f"predictor 'next_gate' looks 1 layer ahead, not {shape.lookahead}; "
                "set lookahead to 1"
            )
        self._shape = shape

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
        self._shape.check_target(layer_idx)
        if evidence.next_gate is None:
            raise ValueError(
                "predictor 'next_gate' needs the next router's guesses, and there are none; "
                "record the trace with them or choose another predictor"
            )
        return by_rank(evidence.next_gate, count)

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        pass
