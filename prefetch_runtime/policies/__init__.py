"""Eviction policies. To add one: a file with the class, and its name in `create_policy`."""

import difflib

from .base import (
    EMPTY_SCORE,
    LOWEST_SCORE,
    REBASE_SCORE,
    DeviceForm,
    EvictionPolicy,
    IntArray,
    rebase_scores,
)
from .lfru import LFRU
from .lru import LRU

__all__ = [
    "EMPTY_SCORE",
    "LFRU",
    "LOWEST_SCORE",
    "LRU",
    "POLICY_NAMES",
    "REBASE_SCORE",
    "DeviceForm",
    "EvictionPolicy",
    "IntArray",
    "create_device_form",
    "create_policy",
    "rebase_scores",
]

POLICY_NAMES = ("lru", "lfru")


def create_policy(name: str) -> EvictionPolicy:
    """A new policy object for one slot table. Raises ValueError for an unknown name."""
    match name:
        case "lru":
            return LRU()
        case "lfru":
            return LFRU()
    raise _unknown(name)


def create_device_form(name: str) -> DeviceForm:
    """The Triton functions of a policy; imports triton. Raises ValueError for an unknown name."""
    match name:
        case "lru":
            from .lru import device_form
        case "lfru":
            from .lfru import device_form
        case _:
            raise _unknown(name)
    return device_form()


def _unknown(name: str) -> ValueError:
    close = difflib.get_close_matches(str(name), POLICY_NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown eviction policy {name!r}; choose {' or '.join(POLICY_NAMES)}{hint}")
