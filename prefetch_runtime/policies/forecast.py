"""Keeps what is predicted soon: decayed use counts, what follows which expert, and what came next.

An expert is worth its exponentially decayed number of uses, as in `lfru` but remembered while it is
absent, plus what the running demand says about the layer's next ones:

- the sum, over the demanded experts e, of how much likelier f is in the step after e than at any
  other time;
- what followed when the layer's last three, two or one demands were last the same, as text repeats
  itself: the sooner it came, the more it is worth (the idea of prediction by partial matching,
  Cleary and Witten, IEEE Transactions on Communications 32(4), 1984).

All is learned while running, from demands before and of the running step. On the host only: the
order of eviction changes with every demand.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .base import EMPTY_SCORE, LOWEST_SCORE, EvictionPolicy, IdArray, IntArray

HALF_LIFE_STEPS = 12
UNITS_PER_STEP = 32
_OCTAVE = HALF_LIFE_STEPS * UNITS_PER_STEP
_FORECAST_WEIGHT = 5.0  # uses that an expert which is certain to follow is worth
_PRIOR_STEPS = 20  # evidence before a pair of experts is believed
_REPEAT_WEIGHTS = (2.0, 3.0, 4.0)  # uses that a recurrence of 1, 2, 3 demands is worth
_REPEAT_STEPS = 6  # what came later is not looked at
_REPEAT_DECAY = 0.8  # per step until it came
_ORDER_SCALE = float(1 << 18)  # a worth as an integer; 2**13 uses at most
_FULL = 1 << 15  # steps of an expert after which everything learned counts half
_FARTHEST = 16 * _OCTAVE
# [score - now + _FARTHEST]: what the score, so far from now, becomes by one more use.
_DISTANCES = np.arange(-_FARTHEST, _FARTHEST + 1)
_ONE_MORE = np.rint(_OCTAVE * np.logaddexp2(_DISTANCES / _OCTAVE, 0.0)).astype(np.int64)

Ending = tuple[bytes, ...]
"""One to three demands in a row, sorted, as keys."""


class Forecast(EvictionPolicy):
    """Evicts the expert that its past and the running demand make the least likely to be next."""

    name: ClassVar[str] = "forecast"
    units_per_step: ClassVar[int] = UNITS_PER_STEP

    def reset(self, num_experts: int) -> None:
        self._remembered = np.full(num_experts, LOWEST_SCORE, dtype=np.int64)
        self._followed = np.zeros((num_experts, num_experts), dtype=np.float32)  # [e, next f]
        self._pairs = self._followed.reshape(-1)  # the same memory
        self._steps = np.zeros(num_experts, dtype=np.float32)  # steps that demanded e
        self._all_steps = 0.0
        self._now = 0
        self._demand: list[IdArray] = []  # of the running step, in parts
        self._previous = np.empty(0, dtype=np.intp)
        self._missed = np.zeros(num_experts, dtype=np.bool_)
        self._past: list[IdArray] = []  # demands of the layer's steps
        self._latest: Ending = ()  # of _past
        self._seen_at: dict[Ending, int] = {}  # latest place in _past, of 1 to 3 demands
        self._endings: list[Ending] | None = None  # of the present demand, once computed
        self._gain: npt.NDArray[np.float32] | None = None  # of the present demand, once computed

    def hit(self, scores: IntArray, expert_ids: IdArray, now: int) -> IntArray:  # noqa: ARG002
        self._hear(expert_ids, now)
        return self._used(expert_ids, now)

    def miss(self, expert_ids: IdArray, now: int) -> None:
        self._hear(expert_ids, now)
        self._missed[expert_ids] = True

    def insert(self, expert_ids: IdArray, now: int) -> IntArray:
        demanded = self._missed[expert_ids]
        num_demanded = np.count_nonzero(demanded)
        if num_demanded == expert_ids.size:
            return self._used(expert_ids, now)
        # A prefetch is as new as a use, but is none.
        recent = np.maximum(self._remembered[expert_ids], now * UNITS_PER_STEP)
        if num_demanded:
            recent[demanded] = self._used(expert_ids[demanded], now)
        scores: IntArray = recent.astype(np.int32)
        return scores

    def order(self, scores: IntArray, owner: IdArray, now: int) -> IntArray:
        ages = (scores - np.float64(now * UNITS_PER_STEP)) * (1 / _OCTAVE)
        worth = np.exp2(ages) + self._foretold()[owner]
        order: IntArray = (worth * _ORDER_SCALE).astype(np.int32)
        order[scores == EMPTY_SCORE] = EMPTY_SCORE
        return order

    def rebase(self, units: int) -> None:
        self._remembered = np.maximum(self._remembered - units, LOWEST_SCORE)

    def _used(self, expert_ids: IdArray, now: int) -> IntArray:
        """Count a use and remember the score."""
        base = now * UNITS_PER_STEP
        ahead = self._remembered[expert_ids] - (base - _FARTHEST)
        scores = _ONE_MORE[np.maximum(ahead, 0)] + base
        self._remembered[expert_ids] = scores
        self._missed[expert_ids] = False
        used: IntArray = scores.astype(np.int32)
        return used

    def _hear(self, expert_ids: IdArray, now: int) -> None:
        """Note a part of a step's demand; learn from the step before when a new one begins."""
        if now != self._now:
            self._now = now
            demand = np.concatenate(self._demand) if self._demand else self._previous
            if self._previous.size and demand.size:
                pairs = self._previous[:, None] * self._steps.size + demand
                self._pairs[pairs.ravel()] += 1
            if demand.size:
                self._remember(demand)
            self._steps[demand] += 1
            self._all_steps += 1
            if self._all_steps >= _FULL:
                self._followed /= 2
                self._steps /= 2
                self._all_steps /= 2
            self._previous = demand
            self._demand.clear()
        self._demand.append(expert_ids)
        self._gain = self._endings = None

    def _foretold(self) -> npt.NDArray[np.float32]:
        """[experts]: what the running demand says about the next ones, in uses."""
        if self._gain is None:
            ids = np.concatenate(self._demand) if self._demand else self._previous
            # Of each e: (followed[e] + prior * usual) / (steps[e] + prior) - usual.
            weight = _FORECAST_WEIGHT / (self._steps[ids] + np.float32(_PRIOR_STEPS))
            of_usual = _PRIOR_STEPS * np.add.reduce(weight) - _FORECAST_WEIGHT * ids.size
            usual = self._steps * np.float32(of_usual / max(self._all_steps, 1.0))
            self._gain = weight @ self._followed[ids] + usual
            self._endings = self._endings_of(ids)
            self._add_repeated(self._gain, self._endings)
        return self._gain

    def _remember(self, demand: IdArray) -> None:
        """The step has ended: note where the demands that it ends were seen last."""
        if len(self._past) >= _FULL:
            self._past.clear()
            self._seen_at.clear()
            self._latest, self._endings = (), None
        endings = self._endings or self._endings_of(demand)
        for ending in endings:
            self._seen_at[ending] = len(self._past)
        self._past.append(demand)
        self._latest = endings[0][1 - len(_REPEAT_WEIGHTS) :]

    def _add_repeated(self, gain: npt.NDArray[np.float32], endings: Sequence[Ending]) -> None:
        """Add, in uses, what followed the last time that the demands were the same."""
        for ending in endings:
            at = self._seen_at.get(ending)
            if at is None:
                continue
            following = self._past[at + 1 : at + 1 + _REPEAT_STEPS]
            worth = np.zeros_like(gain)
            for later in range(len(following) - 1, -1, -1):  # the soonest use stands
                worth[following[later]] = _REPEAT_WEIGHTS[len(ending) - 1] * _REPEAT_DECAY**later
            gain += worth
            return

    def _endings_of(self, demand: IdArray) -> list[Ending]:
        """The running step's demand with the two, the one and none before it."""
        longest = (*self._latest, np.sort(demand).tobytes())
        return [longest[-n:] for n in range(len(longest), 0, -1)]
