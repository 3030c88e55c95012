"""Guess which experts a later layer will ask for. To add one: a file, and its name below."""

import difflib
from pathlib import Path

from .base import MAX_FORECAST, Evidence, IdArray, Predictor, PredictorShape, RunsOn
from .frequency import FrequencyPredictor
from .learned import LearnedPredictor
from .next_gate import NextGatePredictor
from .none import NoPrediction
from .oracle import OraclePredictor
from .previous_token import PreviousTokenPredictor
from .transition import TransitionPredictor

__all__ = [
    "LEARNED",
    "MAX_FORECAST",
    "PREDICTOR_NAMES",
    "Evidence",
    "FrequencyPredictor",
    "IdArray",
    "LearnedPredictor",
    "NextGatePredictor",
    "NoPrediction",
    "OraclePredictor",
    "Predictor",
    "PredictorShape",
    "PreviousTokenPredictor",
    "RunsOn",
    "TransitionPredictor",
    "create_predictor",
    "learned_class",
]

PREDICTOR_NAMES = (
    "none",
    "next_gate",
    "previous_token",
    "transition",
    "frequency",
    "oracle",
)

LEARNED: dict[str, type[LearnedPredictor]] = {
    cls.name: cls for cls in (TransitionPredictor, FrequencyPredictor)
}
"""Those whose table can be saved and loaded."""


def learned_class(name: str) -> type[LearnedPredictor]:
    """The class of a predictor with a table. Raises ValueError for one without."""
    if name not in LEARNED:
        raise ValueError(
            f"predictor {name!r} has no table; those that learn are {' and '.join(LEARNED)}"
        )
    return LEARNED[name]


def create_predictor(name: str, shape: PredictorShape, *, table: Path | None = None) -> Predictor:
    """A new predictor that has learned nothing yet, or what is in the file `table`.

    Raises:
        ValueError: an unknown name, a shape that the predictor cannot work with, a table that is
            not its own or of another model, or a predictor without one.
        OSError: the table cannot be opened.
    """
    if table is not None:
        return learned_class(name).load(table, shape)
    match name:
        case "none":
            return NoPrediction()
        case "next_gate":
            return NextGatePredictor(shape)
        case "previous_token":
            return PreviousTokenPredictor(shape)
        case "transition":
            return TransitionPredictor(shape)
        case "frequency":
            return FrequencyPredictor(shape)
        case "oracle":
            return OraclePredictor(shape)
    close = difflib.get_close_matches(str(name), PREDICTOR_NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown predictor {name!r}; choose one of {', '.join(PREDICTOR_NAMES)}{hint}"
    )
