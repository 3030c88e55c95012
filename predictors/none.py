"""Predicts nothing: every absent expert is fetched when it is demanded."""

from typing import ClassVar

from .base import Evidence, IdArray, RunsOn


class NoPrediction:
    """The control for every other predictor."""

    name: ClassVar[str] = "none"
    runs_on: ClassVar[RunsOn] = RunsOn.BOTH
    needs_guesses: ClassVar[bool] = False

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:  # noqa: ARG002
        return []

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        pass
