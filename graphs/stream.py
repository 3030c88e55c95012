"""Wide steps inside a graph: what has no slot streams through a ring, one half after the other.

Shapes: E = experts of a layer, R = rows of half of the ring, T = tokens, K = top_k.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton

from graphs.fill import ExpertFill, tail_of
from graphs.records import RecordTable
from graphs.slot_table import WideReport
from graphs.wide_kernels import (
    begin_wait_kernel,
    end_wait_kernel,
    stream_kernel,
    wave_maps_kernel,
)


class StreamedWave(NamedTuple):
    """Experts whose rows are computed together."""

    half: int | None
    """Of the ring; None: the layer's slots."""
    expert_map: torch.Tensor
    """[E] int32: row of each expert of the wave; the others -1, or with `whole` some row of it."""
    number: int
    """What `wave_of` says of them."""
    is_last: bool


class ExpertStream:
    """The waves of all layers' wide steps. Borrows the fill, its slot table and the ring.

    Nothing waits for the device, the number of waves is that of the worst routing, and everything
    may be captured. What a step does not need are waves without experts: a few empty kernels.
    """

    def __init__(
        self,
        fill: ExpertFill,
        halves: Sequence[RecordTable],
        *,
        rows: int,
        num_waves: Callable[[int], int],
        most_waves: int,
    ) -> None:
        """
        Args:
            fill: copies the newcomers of the slots.
            halves: the same records as the fill's, with the two halves of the ring as their slots.
            rows: experts that a half holds (R).
            num_waves: of a step of so many assignments (T * K), whatever its routing is, that of
                the slots included.
            most_waves: of one step.
        """
        table = fill.table
        self._fill = fill
        self._table = table
        self._halves = halves
        self._rows = rows
        self.num_waves = num_waves
        self.most_waves = most_waves
        device, num_experts = table.device, table.num_experts
        # Every row starts on 16 bytes and ends with -1, which an id of -1 reads in the row before.
        self._stride = num_experts // 4 * 4 + 4
        self._held = torch.full(
            (4 + most_waves * self._stride,), -1, dtype=torch.int32, device=device
        )
        self._maps = self._held[4:]
        self._wave_of = torch.full((num_experts + 1,), -1, dtype=torch.int32, device=device)
        self._listed = torch.zeros(num_experts, 3, dtype=torch.int32, device=device)
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wave_of(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """[T, K] int32: the wave of each assignment of the layer under way; -1 for ids of -1, and
        for experts that the plan has not seen."""
        return self._wave_of[topk_ids.long()]

    def waves(
        self,
        layer_idx: int,
        report: WideReport,
        num_assignments: int,
        *,
        whole: bool,
        then: Callable[[], object],
    ) -> Iterator[StreamedWave]:
        """The waves of a layer that `plan_wide` has just planned, with `evict`.

        Each must be computed, on the current stream, before the next one is asked for. Copies run
        on a stream of their own: the newcomers', then `then`, then two halves ahead of compute.
        """
        count = self.num_waves(num_assignments)
        if count > self.most_waves:
            raise ValueError(
                f"{num_assignments} assignments may take {count} waves, room is for "
                f"{self.most_waves}"
            )
        table, num_experts, stride = self._table, self._table.num_experts, self._stride
        wave_maps_kernel[(1,)](
            report.planned, report.streamed, report.slots, report.counts, table.counters,
            self._maps, self._wave_of, self._listed, layer_idx, count,
            num_experts, stride, triton.next_power_of_2(stride), self._rows, whole, num_warps=4,
        )  # fmt: skip
        copies = [partial(self._stream, layer_idx, report, index) for index in range(count - 1)]
        # WAR: whatever reads the slots and the ring so far is on the current stream.
        self._fork()
        copied = [self._beside(partial(self._fill.fill, layer_idx))]
        self._beside(then)
        copied += [self._beside(copy) for copy in copies[:2]]
        for number in range(count):
            # RAW: the wave reads what was copied. The fill counts its own time as stall.
            if number and self._side is not None:
                begin_wait_kernel[(1,)](self._begun, num_warps=1)
            event = copied[number]
            if event is not None:
                event.wait()
            if number and self._side is not None:
                end_wait_kernel[(1,)](self._begun, table.counters, layer_idx, num_warps=1)
            expert_map = self._maps[number * stride :][:num_experts]
            half_of = None if number == 0 else (number - 1) % 2
            yield StreamedWave(half_of, expert_map, number, number + 1 == count)
            if number and number + 2 < count:
                # WAR: the wave that has just been computed read this half.
                self._fork()
                copied.append(self._beside(copies[number + 1]))
        if self._side is not None:  # a capture may not end before
            torch.cuda.current_stream(table.device).wait_stream(self._side)

    def _stream(self, layer_idx: int, report: WideReport, index: int) -> None:
        """Copy what the ring's wave number `index` needs, on the current stream."""
        records = self._halves[index % 2]
        stream_kernel[(self._fill.programs,)](
            self._listed, report.counts, records.header, records.units, layer_idx,
            index * self._rows, self._rows, records.max_units, records.unit_bytes,
            tail_of(records), num_warps=self._fill.num_warps,
        )  # fmt: skip

    def _fork(self) -> None:
        """The side stream waits for what the current stream has been given."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._table.device))

    def _beside(self, work: Callable[[], object]) -> torch.cuda.Event | None:
        """Run `work` on the side stream; an event of its end. Without streams: in its place."""
        if self._side is None:
            work()
            return None
        with torch.cuda.stream(self._side):
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return event
