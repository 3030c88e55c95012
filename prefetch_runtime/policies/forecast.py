"""Keeps what is predicted soon: decayed use counts, and which experts follow which.

An expert is worth its exponentially decayed number of uses, as in `lfru` but remembered while it is
absent, plus what the running demand says about the layer's next one: the sum, over the demanded
experts e, of how much likelier f is in the step after e than at any other time. Both are learned
while running. On the host only: the order of eviction changes with every demand.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .base import EMPTY_SCORE, LOWEST_SCORE, EvictionPolicy, IntArray

HALF_LIFE_STEPS = 12
UNITS_PER_STEP = 32
_OCTAVE = HALF_LIFE_STEPS * UNITS_PER_STEP
_FORECAST_WEIGHT = 5.0  # uses that an expert which is certain to follow is worth
_PRIOR_STEPS = 20  # evidence before a pair of experts is believed
_SMALLEST_COUNT = 2.0**-20
_FULL = 1 << 15  # steps of an expert after which everything learned counts half


class Forecast(EvictionPolicy):
    """Evicts the expert that its past and the running demand make the least likely to be next."""

    name: ClassVar[str] = "forecast"
    units_per_step: ClassVar[int] = UNITS_PER_STEP

    def reset(self, num_experts: int) -> None:
        self._remembered = np.full(num_experts, LOWEST_SCORE, dtype=np.int64)
        self._followed = np.zeros((num_experts, num_experts), dtype=np.float32)  # [e, next f]
        self._steps = np.zeros(num_experts, dtype=np.float32)  # steps that demanded e
        self._all_steps = 0.0
        self._now = 0
        self._demand: list[IntArray] = []  # of the running step, in parts
        self._previous = np.empty(0, dtype=np.int32)
        self._missed = np.zeros(num_experts, dtype=np.bool_)
        self._gain: npt.NDArray[np.float32] | None = None  # of the present demand, once computed

    def hit(self, scores: IntArray, expert_ids: IntArray, now: int) -> IntArray:  # noqa: ARG002
        self._hear(expert_ids, now)
        return self._used(expert_ids, now)

    def miss(self, expert_ids: IntArray, now: int) -> None:
        self._hear(expert_ids, now)
        self._missed[expert_ids] = True

    def insert(self, expert_ids: IntArray, now: int) -> IntArray:
        demanded = self._missed[expert_ids]
        if demanded.all():
            return self._used(expert_ids, now)
        # A prefetch is as new as a use, but is none.
        recent = np.maximum(self._remembered[expert_ids], now * UNITS_PER_STEP)
        recent[demanded] = self._used(expert_ids[demanded], now)
        scores: IntArray = recent.astype(np.int32)
        return scores

    def order(self, scores: IntArray, owner: IntArray, now: int) -> IntArray:
        base = now * UNITS_PER_STEP
        uses = np.exp2((scores.astype(np.float64) - base) / _OCTAVE)
        worth = uses + _FORECAST_WEIGHT * self._foretold()[owner]
        order = base + _OCTAVE * np.log2(np.maximum(worth, _SMALLEST_COUNT))
        kept: IntArray = np.where(scores == EMPTY_SCORE, EMPTY_SCORE, order).astype(np.int32)
        return kept

    def rebase(self, units: int) -> None:
        self._remembered = np.maximum(self._remembered - units, LOWEST_SCORE)

    def _used(self, expert_ids: IntArray, now: int) -> IntArray:
        """Count a use and remember the score."""
        base = now * UNITS_PER_STEP
        ahead = (self._remembered[expert_ids] - base) / _OCTAVE
        scores = base + np.rint(_OCTAVE * np.logaddexp2(ahead, 0.0)).astype(np.int64)
        self._remembered[expert_ids] = scores
        self._missed[expert_ids] = False
        used: IntArray = scores.astype(np.int32)
        return used

    def _hear(self, expert_ids: IntArray, now: int) -> None:
        """Note a part of a step's demand; learn from the step before when a new one begins."""
        if now != self._now:
            self._now = now
            demand = np.concatenate(self._demand) if self._demand else self._previous
            if self._previous.size and demand.size:
                self._followed[np.ix_(self._previous, demand)] += 1
            self._steps[demand] += 1
            self._all_steps += 1
            if self._all_steps >= _FULL:
                self._followed /= 2
                self._steps /= 2
                self._all_steps /= 2
            self._previous = demand
            self._demand.clear()
        self._demand.append(expert_ids)
        self._gain = None

    def _foretold(self) -> npt.NDArray[np.float32]:
        """[experts]: how much likelier than usual each is in the next step, summed."""
        if self._gain is None:
            usual = self._steps / max(self._all_steps, 1.0)
            ids = np.concatenate(self._demand) if self._demand else self._previous
            evidence = self._followed[ids] + _PRIOR_STEPS * usual
            likely = evidence / (self._steps[ids, None] + _PRIOR_STEPS)
            self._gain = np.add.reduce(likely, axis=0) - ids.size * usual
        return self._gain
