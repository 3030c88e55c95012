"""Frequency-weighted recency: uses count, and every count halves in HALF_LIFE_STEPS steps.

The idea is LRFU (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used
and least frequently used policies", IEEE Transactions on Computers 50(12), 2001): an expert is
worth the sum of its past uses, each decayed by its age. All counts decay alike, so their order
does not change between uses, and the logarithm of the count, expressed in absolute time, is a
score that is written only when the expert is used.

With the score S in units of 1 / UNITS_PER_STEP step, an expert's decayed count at step `now` is
2 ** ((S - now * UNITS_PER_STEP) / OCTAVE). A use adds one to it, so that

    base = now * UNITS_PER_STEP
    S_new = max(S, base) + OCTAVE * log2(1 + 2 ** (-|S - base| / OCTAVE))

The last term is taken by halving per whole octave of the distance and linearly inside one: at most
0.09 octaves off, monotone, and the same integers everywhere.
"""

from typing import Any, ClassVar

import numpy as np

from .base import DeviceForm, EvictionPolicy, IdArray, IntArray

tl: Any  # triton.language, once device_form() has been called

HALF_LIFE_STEPS = 8
UNITS_PER_STEP = 32
OCTAVE = HALF_LIFE_STEPS * UNITS_PER_STEP
_OCTAVE_BITS = OCTAVE.bit_length() - 1
_MAX_OCTAVES = _OCTAVE_BITS + 2  # further away, a use adds less than one unit
assert OCTAVE == 1 << _OCTAVE_BITS


class LFRU(EvictionPolicy):
    """Evicts the expert with the smallest exponentially decayed number of uses."""

    name: ClassVar[str] = "lfru"
    units_per_step: ClassVar[int] = UNITS_PER_STEP

    def hit(self, scores: IntArray, expert_ids: IdArray, now: int) -> IntArray:  # noqa: ARG002
        base = np.int32(now * UNITS_PER_STEP)
        top = np.maximum(scores, base)
        distance = top - np.minimum(scores, base)
        octaves = np.minimum(distance >> _OCTAVE_BITS, _MAX_OCTAVES)
        gain: IntArray = (2 * OCTAVE - (distance & (OCTAVE - 1))) >> (octaves + 1)
        return top + gain

    def insert(self, expert_ids: IdArray, now: int) -> IntArray:
        scores = np.empty(len(expert_ids), dtype=np.int32)
        scores.fill(now * UNITS_PER_STEP)
        return scores


def device_form() -> DeviceForm:
    """The same policy for a Triton kernel. Raises ImportError where triton is not installed."""
    global tl  # Triton's interpreter looks for its language among a function's globals
    import triton
    import triton.language as tl

    @triton.jit
    def lfru_hit(  # type: ignore[no-untyped-def]
        old_score,
        now,
        units_per_step: tl.constexpr = UNITS_PER_STEP,
        octave: tl.constexpr = OCTAVE,
        octave_bits: tl.constexpr = _OCTAVE_BITS,
        max_octaves: tl.constexpr = _MAX_OCTAVES,
    ):
        base = now * units_per_step
        top = tl.maximum(old_score, base)
        distance = top - tl.minimum(old_score, base)
        octaves = tl.minimum(distance >> octave_bits, max_octaves)
        return top + ((2 * octave - (distance & (octave - 1))) >> (octaves + 1))

    @triton.jit
    def lfru_insert(now, units_per_step: tl.constexpr = UNITS_PER_STEP):  # type: ignore[no-untyped-def]
        return now * units_per_step

    return DeviceForm(hit=lfru_hit, insert=lfru_insert)
