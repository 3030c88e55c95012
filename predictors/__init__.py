"""Guess which experts a later layer will ask for. To add one: a file, and its name below."""

import difflib

from .base import MAX_FORECAST, Evidence, IdArray, Predictor, PredictorShape, RunsOn
from .frequency import FrequencyPredictor
from .next_gate import NextGatePredictor
from .none import NoPrediction
from .oracle import OraclePredictor
from .previous_token import PreviousTokenPredictor
from .transition import TransitionPredictor

__all__ = [
    "MAX_FORECAST",
    "PREDICTOR_NAMES",
    "Evidence",
    "FrequencyPredictor",
    "IdArray",
    "NextGatePredictor",
    "NoPrediction",
    "OraclePredictor",
    "Predictor",
    "PredictorShape",
    "PreviousTokenPredictor",
    "RunsOn",
    "TransitionPredictor",
    "create_predictor",
]

PREDICTOR_NAMES = (
    "none",
    "next_gate",
    "previous_token",
    "transition",
    "frequency",
    "oracle",
)


def create_predictor(name: str, shape: PredictorShape) -> Predictor:
    """A new predictor that has learned nothing yet.

    Raises ValueError for an unknown name, or a shape that the predictor cannot work with.
    """
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
