"""Copies the experts that a plan listed from pinned host memory into their slots."""

import torch

from graphs.fill_kernels import fill_kernel, resolve_fill_kernel_of
from graphs.records import RecordTable
from graphs.slot_table import DeviceSlotTable, block_for


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
        fused_warps: int = 4,
    ) -> None:
        """`programs` thread blocks share a fill; 4 to 16 saturate a PCIe 5 x16 link. They have
        `num_warps` warps each; with a plan in the same launch `fused_warps`, as a plan is faster
        with few.

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
        self._resolve_fill_kernel = resolve_fill_kernel_of(table.policy.hit, table.policy.insert)
        self.programs = programs
        self.num_warps = num_warps
        self.fused_warps = fused_warps

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=table.device)

        # How the programs of one launch find each other, see `resolve_fill_kernel`.
        self._launches = integers(table.num_layers, programs)
        self._joined = integers(table.num_layers, 2)
        self._ready = integers(table.num_layers)
        self._finished = integers(table.num_layers)

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
            num_warps=self.num_warps, **self.table.launched(early),
        )  # fmt: skip

    def resolve_and_fill(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        early: bool = False,
    ) -> torch.Tensor:
        """`table.resolve` and `fill` in one launch, with the same result; `early` as there."""
        out, tensors, sizes = self.table.plan_arguments(layer_idx, topk_ids, padding, out)
        records = self.records
        # The header is the last of the tensors; without a prefetch hook it is a placeholder.
        tensors = (*tensors[:-1], records.header)
        self._resolve_fill_kernel[(self.programs,)](
            *tensors, records.units, self._launches, self._joined, self._ready, self._finished,
            **{**sizes, "U": records.max_units},
            BLOCK=block_for(sizes["n"], self.fused_warps), TOUCH=False, PROGRAMS=self.programs,
            UNIT_BYTES=records.unit_bytes, TAIL=tail_of(records), num_warps=self.fused_warps,
            **self.table.launched(early),
        )  # fmt: skip
        return out


def tail_of(records: RecordTable) -> int:
    """Bytes that are moved one by one at a time, where 16 at a time is not possible."""
    return min(records.unit_bytes, 4096)
