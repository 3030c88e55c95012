"""Copies the experts that a plan listed from pinned host memory into their slots."""

import torch

from graphs.clock_kernels import launched
from graphs.fill_kernels import fill_kernel
from graphs.records import RecordTable
from graphs.slot_table import DeviceSlotTable


class ExpertFill:
    """The demand fill of all layers. Borrows the slot table and the record table.

    Everything runs on the current stream, and everything can be captured.
    """

    def __init__(
        self,
        table: DeviceSlotTable,
        records: RecordTable,
        *,
        programs: int = 8,
        num_warps: int = 16,
    ) -> None:
        """`programs` thread blocks share a fill; 4 to 16 saturate a PCIe 5 x16 link. They have
        `num_warps` warps each.

        Raises ValueError if the two tables are of different models.
        """
        if not 1 <= programs <= 64:
            raise ValueError(f"programs must be between 1 and 64, got {programs}")
        if records.num_layers != table.num_layers or records.device.type != table.device.type:
            raise ValueError(
                f"the records are of {records.num_layers} layers on {records.device}, the slot "
                f"table of {table.num_layers} on {table.device}"
            )
        self.table = table
        self.records = records
        self.programs = programs
        self.num_warps = num_warps
        # The programs of a launch that have ended; zero between launches.
        self._finished = torch.zeros(table.num_layers, dtype=torch.int32, device=table.device)

    def fill(self, layer_idx: int, *, early: bool = False) -> None:
        """Copy what the layer's last plan listed; returns at once when that is nothing.

        `early`: the plan is the stream's last kernel, and its end is not waited for before the
        launch (no difference where the device cannot do that).
        """
        self.table.require_layer(layer_idx)
        records = self.records
        fill_kernel[(self.programs,)](
            self.table.misses, self.table.miss_count, self.table.counters, self.table.stamps,
            self._finished, records.header, records.units, layer_idx,
            self.table.num_slots, records.max_units, records.unit_bytes, tail_of(records),
            num_warps=self.num_warps, **launched(self.table.device, early),
        )  # fmt: skip


def tail_of(records: RecordTable) -> int:
    """Bytes that are moved one by one at a time, where 16 at a time is not possible."""
    return min(records.unit_bytes, 4096)
