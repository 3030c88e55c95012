"""Eviction policies. To add one: a file with the class, and its name in `create_policy`."""

import difflib

from .base import (
    EMPTY_SCORE,
    LOWEST_SCORE,
    REBASE_SCORE,
    DeviceForm,
    EvictionPolicy,
    IdArray,
    IntArray,
    rebase_scores,
)
from .forecast import Forecast
from .lfru import LFRU
from .lru import LRU

__all__ = [
    "EMPTY_SCORE",
    "HOST_POLICY_NAMES",
    "LFRU",
    "LOWEST_SCORE",
    "LRU",
    "POLICY_NAMES",
    "REBASE_SCORE",
    "DeviceForm",
    "EvictionPolicy",
    "Forecast",
    "IdArray",
    "IntArray",
    "create_device_form",
    "create_policy",
    "rebase_scores",
]

POLICY_NAMES = ("lru", "lfru")
"""Policies that run on the host and on the device."""

HOST_POLICY_NAMES = ("forecast",)
"""Policies that run on the host only, in `segmented` and `eager` modes and in the simulator."""


def create_policy(name: str) -> EvictionPolicy:
    """A new policy object for one slot table. Raises ValueError for an unknown name."""
    match name:
        case "lru":
            return LRU()
        case "lfru":
            return LFRU()
        case "forecast":
            return Forecast()
    raise _unknown(name, POLICY_NAMES + HOST_POLICY_NAMES)


def create_device_form(name: str) -> DeviceForm:
    """The Triton functions of a policy; imports triton. Raises ValueError for an unknown name."""
    match name:
        case "lru":
            from .lru import device_form
        case "lfru":
            from .lfru import device_form
        case _:
            raise _unknown(name, POLICY_NAMES)
    return device_form()


def _unknown(name: str, choices: tuple[str, ...]) -> ValueError:
    close = difflib.get_close_matches(str(name), choices, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if name in HOST_POLICY_NAMES:
        hint = f"; {name!r} runs on the host only"
    return ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(choices)}{hint}")
