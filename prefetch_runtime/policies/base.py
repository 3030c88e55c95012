"""The contract of an eviction policy: one integer score per slot, the lowest is the next victim."""

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

IdArray = npt.NDArray[np.intp]
"""Experts or slots, in the type that numpy indexes with: others cost several times as much."""

EMPTY_SCORE = int(np.iinfo(np.int32).min)
"""Score of a slot that holds no readable expert: below every score that a policy gives."""

LOWEST_SCORE = -(1 << 30)
"""Lowest score of a resident expert; `rebase_scores` clamps older ones here."""

REBASE_SCORE = 1 << 30
"""The clock is moved back before `clock * units_per_step` reaches this."""


class DeviceForm(NamedTuple):
    """A policy as two `triton.jit` functions that a kernel inlines (int32 in, int32 out)."""

    hit: Any
    """`hit(old_score, now) -> new_score`, for a demanded expert that is resident."""
    insert: Any
    """`insert(now) -> score`, for a newly placed expert."""


class EvictionPolicy(Protocol):
    """Gives every slot a score; the victim is the evictable slot with the lowest (score, slot).

    One object serves one slot table, so a policy may keep state of its own. `now` is the step
    clock: at least 1, never decreasing, equal for all experts of one call, and small enough that
    `now * units_per_step < REBASE_SCORE`. Scores lie in `[LOWEST_SCORE, 2**31 - 3]`. Integer
    arithmetic only: a policy that also has a `device_form()` must agree with it bit for bit.
    No method may keep or change the arrays it is given.
    """

    name: ClassVar[str]
    units_per_step: ClassVar[int]
    """How much the score of a newly placed expert grows per step of the clock."""

    def hit(self, scores: IntArray, expert_ids: IdArray, now: int) -> IntArray:
        """New scores of demanded experts that are resident; `scores` are their present ones.

        `scores` [n] int32 and `expert_ids` [n] are in the same order, each expert once, n may be 0.
        """
        ...

    def insert(self, expert_ids: IdArray, now: int) -> IntArray:
        """Scores [n] int32 of experts that have just been given a slot, demanded or prefetched."""
        ...

    def miss(self, expert_ids: IdArray, now: int) -> None:  # noqa: ARG002
        """Hear the demanded experts [n] that are not resident, before any of them is inserted."""
        return None

    def order(self, scores: IntArray, owner: IdArray, now: int) -> IntArray:  # noqa: ARG002
        """A new array [S] int32: the slot with the lowest value is given up first.

        For policies whose choice depends on more than each slot's own past; it hears the running
        demand before it is asked. `owner` is the expert of each slot. Slots with EMPTY_SCORE keep
        it; other values as scores. A policy that overrides it cannot run on the device.
        """
        return scores.copy()

    def reset(self, num_experts: int) -> None:  # noqa: ARG002
        """The table starts, or starts over with the clock at 1: forget what was learned."""
        return None

    def rebase(self, units: int) -> None:  # noqa: ARG002
        """The clock has been moved back, by so many score units; the table moves its scores."""
        return None


def rebase_scores(scores: IntArray, units: int) -> IntArray:
    """Scores [S] after the clock has been moved back by `units` score units.

    Order is kept, except that experts unused for more than 2**30 units tie at LOWEST_SCORE.
    Slots that hold nothing keep EMPTY_SCORE.
    """
    moved = np.maximum(scores.astype(np.int64) - units, LOWEST_SCORE)
    return np.where(scores == EMPTY_SCORE, EMPTY_SCORE, moved).astype(np.int32)
