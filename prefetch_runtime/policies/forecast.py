"""Keeps what is predicted soon: decayed use counts, and what followed steps like the running one.

An expert is worth its exponentially decayed number of uses, as in `lfru` but remembered while it is
absent, plus what followed the earlier steps of the layer, on average over those most like the
running one: the sooner an expert came after them, the more. Two steps are alike as far as they
demanded the same experts (the cosine of the two sets), and so did, with falling weight, the steps
before them. That serves routing that repeats exactly, as that of text does (prediction by partial
matching: Cleary and Witten, IEEE Transactions on Communications 32(4), 1984), as well as roughly
(a mean weighted by likeness: Nadaraya, Theory of Probability & Its Applications 9(1), 1964).

All is learned while running, from demands before and of the running step. The constants were
chosen on the first half of models/tiny-moe-trace.npz; benchmarks/README.md has both halves. On the
host only: the order of eviction changes with every demand.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .base import EMPTY_SCORE, LOWEST_SCORE, EvictionPolicy, IdArray, IntArray, rebase_scores

HALF_LIFE_STEPS = 8
UNITS_PER_STEP = 32
_OCTAVE = HALF_LIFE_STEPS * UNITS_PER_STEP
_FORECAST_WEIGHT = 16.0  # uses that an expert is worth which always came in the next step
MAX_STEPS = 512  # of a layer that are remembered; then the older half is forgotten
_CARRY = 0.5  # what likeness of the steps before counts, per step back
_SHARPNESS = 7.0  # a step less alike by x weighs exp(-7 x) times as much
_SPREAD = 0.6  # steps less alike than the best by more are left out, ...
_MAX_ALIKE = 32  # ... and of the others all but so many, the latest
_SOON_STEPS = 8  # what came later is not looked at
_SOON_DECAY = 0.75  # per step until it came
_ORDER_BITS = 18  # below the point of a worth as an integer; 2**13 uses at most
_ORDER_OF_CERTAIN = _FORECAST_WEIGHT * 2**_ORDER_BITS
_FARTHEST = 16 * _OCTAVE
# [score - now + _FARTHEST]: what the score, so far from now, becomes by one more use.
_DISTANCES = np.arange(-_FARTHEST, _FARTHEST + 1)
_ONE_MORE = np.rint(_OCTAVE * np.logaddexp2(_DISTANCES / _OCTAVE, 0.0)).astype(np.int32)
# [_SOON_STEPS, 1]: what a use is worth to each of the steps before it, the oldest first.
_WORTH_BEFORE = _SOON_DECAY ** np.arange(_SOON_STEPS - 1, -1, -1, dtype=np.float32)[:, None]

FloatArray = npt.NDArray[np.float32]


class Forecast(EvictionPolicy):
    """Evicts the expert that its past and the running demand make the least likely to be next."""

    name: ClassVar[str] = "forecast"
    units_per_step: ClassVar[int] = UNITS_PER_STEP

    def reset(self, num_experts: int) -> None:
        self._remembered: IntArray = np.full(num_experts, LOWEST_SCORE, dtype=np.int32)
        self._missed = np.zeros(num_experts, dtype=np.bool_)
        self._now = 0
        self._demand: list[IdArray] = []  # of the running step, in parts
        self._ids: IdArray = np.empty(0, dtype=np.intp)  # the same in one, when compared
        self._num_past = 0  # steps before it, each with a column and a row in these:
        # 1 / sqrt(number of experts) where the step demanded the expert.
        self._demanded: FloatArray = np.zeros((num_experts, MAX_STEPS), dtype=np.float32)
        # _SOON_DECAY ** (n - 1) where the expert came n steps later, 0 where it did not come soon.
        self._soon: FloatArray = np.zeros((MAX_STEPS, num_experts), dtype=np.float32)
        self._marks: FloatArray = np.zeros(num_experts, dtype=np.float32)  # scratch
        self._before: FloatArray = np.zeros(0, dtype=np.float32)  # likeness, of the step before
        self._likeness: FloatArray | None = None  # [steps before], once computed
        self._foretold: FloatArray | None = None  # [experts], once computed

    def hit(self, scores: IntArray, expert_ids: IdArray, now: int) -> IntArray:  # noqa: ARG002
        if expert_ids.size:
            self._hear(expert_ids, now)
        return self._used(expert_ids, now)

    def miss(self, expert_ids: IdArray, now: int) -> None:
        if expert_ids.size:
            self._hear(expert_ids, now)
            self._missed[expert_ids] = True

    def insert(self, expert_ids: IdArray, now: int) -> IntArray:
        demanded = self._missed[expert_ids]
        num_demanded = np.count_nonzero(demanded)
        if num_demanded == expert_ids.size:
            self._missed[expert_ids] = False
            return self._used(expert_ids, now)
        # A prefetch is as new as a use, but is none.
        recent: IntArray = np.maximum(self._remembered[expert_ids], now * UNITS_PER_STEP)
        if num_demanded:
            both = expert_ids[demanded]
            self._missed[both] = False
            recent[demanded] = self._used(both, now)
        return recent

    def order(self, scores: IntArray, owner: IdArray, now: int) -> IntArray:
        if self._foretold is None:
            self._foretold = self._foretell()
        unit_count = np.float64(now * UNITS_PER_STEP - _ORDER_BITS * _OCTAVE)
        worth = np.exp2((scores - unit_count) * (1 / _OCTAVE))
        worth += self._foretold[owner]
        order: IntArray = worth.astype(np.int32)
        order[scores == EMPTY_SCORE] = EMPTY_SCORE
        return order

    def rebase(self, units: int) -> None:
        self._remembered = rebase_scores(self._remembered, units)

    def _used(self, expert_ids: IdArray, now: int) -> IntArray:
        """Count a use and remember the score."""
        base = now * UNITS_PER_STEP
        ahead = self._remembered[expert_ids] - (base - _FARTHEST)
        scores: IntArray = _ONE_MORE.take(ahead, mode="clip") + base
        self._remembered[expert_ids] = scores
        return scores

    def _hear(self, expert_ids: IdArray, now: int) -> None:
        """Note a part of a step's demand; the step before ends when a new one begins."""
        if now != self._now:
            if self._demand:
                self._end_step()
            self._now = now
        self._demand.append(expert_ids)
        self._likeness = self._foretold = None

    def _end_step(self) -> None:
        """The running step becomes one of the past."""
        self._before = self._compare() if self._likeness is None else self._likeness
        if self._num_past == MAX_STEPS:
            self._forget()
        self._demanded[self._ids, self._num_past] = self._ids.size**-0.5
        self._num_past += 1
        self._demand.clear()

    def _forget(self) -> None:
        """Drop the older half of the past."""
        half = MAX_STEPS // 2
        self._demanded[:, :half] = self._demanded[:, half:]
        self._demanded[:, half:] = 0
        self._soon[:half] = self._soon[half:]
        self._soon[half:] = 0
        self._before = self._before[half:]
        self._num_past = half

    def _compare(self) -> FloatArray:
        """[steps before]: how much each is like the running one, whose demand they learn of."""
        parts = self._demand
        ids = self._ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        steps = min(self._num_past, _SOON_STEPS)
        latest = self._soon[self._num_past - steps : self._num_past]
        self._marks[ids] = 1
        np.maximum(latest, _WORTH_BEFORE[_SOON_STEPS - steps :] * self._marks, out=latest)
        self._marks[ids] = 0
        common = np.add.reduce(self._demanded.take(ids, axis=0), axis=0)
        likeness: FloatArray = common[: self._num_past] * ids.size**-0.5
        likeness[1:] += self._before * _CARRY
        return likeness

    def _foretell(self) -> FloatArray:
        """[experts]: what came after the steps that are most like the running one, as ordered."""
        if self._likeness is None and self._demand:
            self._likeness = self._compare()
        if self._likeness is None or not self._likeness.size:
            return np.zeros(self._remembered.size, dtype=np.float32)
        behind = self._likeness - np.maximum.reduce(self._likeness)
        alike = (behind >= -_SPREAD).nonzero()[0][-_MAX_ALIKE:]
        weight = np.exp(_SHARPNESS * behind[alike])
        weight *= _ORDER_OF_CERTAIN / np.add.reduce(weight)
        foretold: FloatArray = weight @ self._soon.take(alike, axis=0)
        return foretold
