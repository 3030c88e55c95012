"""The staging ring: two halves of a few rows each, through which wide steps stream experts.

Decides only; the scheduler moves the bytes. One ring serves all layers whose records are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetch_runtime.copier import CopyTicket
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.waves import cut_by_expert

IntArray = npt.NDArray[np.signedinteger]


@dataclass(slots=True)
class StagedWave:
    """Experts that are computed together, and the rows of a half that hold them."""

    half: int
    experts: IntArray
    rows: IntArray
    copies: CopyTicket | None = None
    """None until the copies are under way."""


class StagingRing:
    """Two halves, and what was sent into them for the next layer before it asked."""

    def __init__(self, halves: Sequence[SlotBuffers]) -> None:
        self.halves = halves
        self._ahead: list[StagedWave] = []
        self._ahead_of = -1

    @property
    def rows(self) -> int:
        """Rows of a half."""
        return self.halves[0].num_slots

    def put_ahead(self, layer_idx: int, half: int, experts: IntArray, copies: CopyTicket) -> None:
        """Note that a half is being filled for a layer that has not asked yet."""
        if layer_idx != self._ahead_of:
            self._ahead, self._ahead_of = [], layer_idx
        rows = np.arange(experts.size, dtype=np.int32)
        self._ahead.append(StagedWave(half, experts, rows, copies))

    def ahead_of(self, layer_idx: int) -> IntArray:
        """The experts that were sent ahead for a layer."""
        waves = self._ahead if layer_idx == self._ahead_of else []
        return np.concatenate([np.empty(0, dtype=np.int32), *(wave.experts for wave in waves)])

    def forget(self) -> None:
        """Give up what was sent ahead."""
        self._ahead, self._ahead_of = [], -1

    def take(
        self, layer_idx: int, streamed: IntArray
    ) -> tuple[list[StagedWave], list[CopyTicket], int]:
        """The waves of a layer that streams these experts: first those that are on their way.

        Consecutive waves use different halves. Returns also the copies that were sent ahead in
        vain, to be waited for before their half is written again, and how many experts were.
        """
        ahead, of = self._ahead, self._ahead_of
        self._ahead, self._ahead_of = [], -1
        waves: list[StagedWave] = []
        in_vain: list[CopyTicket] = []
        wasted = 0
        for wave in ahead:
            is_wanted = np.isin(wave.experts, streamed) & (of == layer_idx)
            wasted += int(np.count_nonzero(~is_wanted))
            if is_wanted.any():
                wave.experts, wave.rows = wave.experts[is_wanted], wave.rows[is_wanted]
                waves.append(wave)
            elif wave.copies is not None:
                in_vain.append(wave.copies)
        known = [wave.experts for wave in waves]
        left = streamed[~np.isin(streamed, np.concatenate(known))] if known else streamed
        half = waves[-1].half if waves else 1
        for experts in cut_by_expert(left, self.rows):
            half = 1 - half
            waves.append(StagedWave(half, experts, np.arange(experts.size, dtype=np.int32)))
        return waves, in_vain, wasted
