"""Fills slots of a layer beside the compute that leads up to it, and stops when it is not wanted.

One layer's prefetch inside a step, `branch` being the forked stream:

    with branch.fork():                       # after fill of layer L
        forecast = ...                        # [F] int32, best first
        hook.reserve(L + 1, forecast)
        hook.fill(L + 1)
    ...                                       # experts of L, attention and router of L + 1
    hook.post(L + 1, topk_ids)                # the fill now copies only what is demanded
    branch.join()
    slot_ids = table.resolve(L + 1, topk_ids) # commits first
    demand_fill.fill(L + 1)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton

from graphs.clock_kernels import launched
from graphs.fill import ExpertFill, tail_of
from graphs.fill_kernels import prefetch_fill_kernel
from graphs.prefetch_kernels import post_kernel, reserve_kernel
from graphs.slot_table import PrefetchState, block_for, warps_for

MAX_FORECAST = 64
UNLIMITED_BYTES = 1 << 60


class PrefetchHook:
    """Reserve, fill in units, post the demand. Attaches itself to the fill's slot table.

    Every step that reserves must resolve the same layer before the next replay: `resolve` maps what
    is whole, has the demand fill finish what is demanded and partial, and frees the rest.
    """

    def __init__(
        self,
        demand_fill: ExpertFill,
        *,
        max_forecast: int = 16,
        budget_bytes: int = UNLIMITED_BYTES,
        programs: int = 8,
        num_warps: int = 16,
    ) -> None:
        """
        Args:
            demand_fill: its slot table and record table are borrowed.
            max_forecast: most experts in flight per layer, at most 64.
            budget_bytes: of every layer and step; see `set_budget`.
            programs: thread blocks of the fill. Each has one unit under way, so a fill that is no
                longer wanted goes on for `programs` units at most.

        Raises:
            ValueError: a size out of range.
            RuntimeError: the table has a hook, or graphs, already.
        """
        if not 1 <= max_forecast <= MAX_FORECAST:
            raise ValueError(
                f"max_forecast must be between 1 and {MAX_FORECAST}, got {max_forecast}"
            )
        if not 1 <= programs <= 64:
            raise ValueError(f"programs must be between 1 and 64, got {programs}")
        table, records = demand_fill.table, demand_fill.records
        self.table = table
        self.records = records
        self.max_forecast = max_forecast
        self._programs = programs
        self._num_warps = num_warps
        shape = (table.num_layers, max_forecast)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=table.device)

        self.budget = torch.zeros(table.num_layers, dtype=torch.int64, device=table.device)
        """[L] int64: bytes that a step may copy for a layer before its demand is known."""
        self.state = PrefetchState(
            entries=integers(*shape, 2),
            entry_count=integers(table.num_layers),
            progress=integers(*shape),
            demand=integers(table.num_layers, table.num_experts),
            bytes_before=records.bytes_before,
            header=records.header,
            epoch=integers(table.num_layers),
        )
        self._staged_budget = torch.empty(
            table.num_layers, dtype=torch.int64, pin_memory=table.device.type == "cuda"
        )
        self.set_budget(budget_bytes)
        table.attach_prefetch(self.state)

    def set_budget(self, budget_bytes: int, layer_idx: int | None = None) -> None:
        """Bytes per step for one layer, or for all; 0 switches speculation off.

        Takes effect, in the order of the current stream, without a new capture.
        """
        if not 0 <= budget_bytes <= UNLIMITED_BYTES:
            raise ValueError(f"budget_bytes must be 0 to {UNLIMITED_BYTES}, got {budget_bytes}")
        if layer_idx is None:
            self.budget.fill_(budget_bytes)
        else:
            self.table.require_layer(layer_idx)
            self.budget[layer_idx].fill_(budget_bytes)

    def set_budgets(self, budgets: Sequence[int]) -> None:
        """Bytes per step, one for each layer. As `set_budget`, in one copy that nothing waits for:
        if the last call's is still to come, it brings these numbers too."""
        if len(budgets) != self.table.num_layers:
            raise ValueError(f"{len(budgets)} budgets for {self.table.num_layers} layers")
        for budget_bytes in budgets:
            if not 0 <= budget_bytes <= UNLIMITED_BYTES:
                raise ValueError(f"budget_bytes must be 0 to {UNLIMITED_BYTES}, got {budget_bytes}")
        self._staged_budget.copy_(torch.tensor(budgets, dtype=torch.int64))
        self.budget.copy_(self._staged_budget, non_blocking=True)

    def reserve(self, layer_idx: int, forecast: torch.Tensor) -> None:
        """Take slots for the absent experts of a forecast, best guess first, within the budget.

        Never a slot in flight, demanded in this step, or holding an expert of the forecast. The
        victim is unmapped at once; the newcomer is mapped by `resolve`, if whole or demanded.

        `forecast`: [n] int32, n <= max_forecast; -1, repeats and experts that are resident or in
        flight are skipped.
        """
        table, state = self.table, self.state
        table.require_layer(layer_idx)
        if (
            forecast.dim() != 1
            or forecast.dtype != torch.int32
            or not forecast.is_contiguous()
            or not 1 <= forecast.numel() <= self.max_forecast
            or forecast.device.type != table.device.type
        ):
            raise ValueError(
                f"forecast must be contiguous int32 [1 to {self.max_forecast}] on {table.device} "
                f"(max_forecast), got {forecast.dtype} {tuple(forecast.shape)} on {forecast.device}"
            )
        reserve_kernel[(1,)](
            forecast, *table.reservation_tensors(), state.entries, state.entry_count,
            state.progress, state.epoch, state.demand, self.budget, state.header,
            layer_idx, forecast.numel(),
            table.num_experts, table.num_slots, self.max_forecast,
            triton.next_power_of_2(table.num_slots), triton.next_power_of_2(self.max_forecast),
            num_warps=4,
        )  # fmt: skip

    def fill(self, layer_idx: int) -> None:
        """Copy the reserved experts until they are whole, the budget is spent, or the posted demand
        does not name them. On the stream of `reserve`, which may run beside the compute stream."""
        table, state, records = self.table, self.state, self.records
        table.require_layer(layer_idx)
        prefetch_fill_kernel[(self._programs,)](
            state.entries, state.entry_count, state.progress, state.epoch, state.demand,
            self.budget, table.clocks, table.stamps, records.header, records.units, layer_idx,
            table.num_experts, self.max_forecast, records.max_units,
            records.unit_bytes, tail_of(records), num_warps=self._num_warps,
        )  # fmt: skip

    def post(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        early: bool = False,
    ) -> None:
        """Tell the running fill what the layer demands in this step. Arguments as `resolve`."""
        table = self.table
        table.require_layer(layer_idx)
        n, top_k, row_stride, form = table.check_ids(topk_ids, padding)
        num_warps = warps_for(n)
        post_kernel[(1,)](
            topk_ids, topk_ids if padding is None else padding, self.state.demand, self.state.epoch,
            table.clocks, table.stamps, layer_idx, n, row_stride,
            table.num_experts, top_k, block_for(n, num_warps), int(form), num_warps=num_warps,
            **launched(table.device, early),
        )  # fmt: skip


class PrefetchBranch:
    """A stream that is forked off the compute stream and joined to it, in a capture or outside.

    Owns the stream. On a device without streams the forked work simply runs in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_forked = False

    @property
    def is_forked(self) -> bool:
        """Forked work has not been joined."""
        return self._is_forked

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Kernels inside run beside what the current stream does until `join`."""
        if self._is_forked:
            raise RuntimeError("the branch is forked already; join it first")
        self._is_forked = True
        if self._stream is None:
            yield
            return
        # WAR: the slots' last readers, and RAW: the state that the branch reads, are on the
        # current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for the forked work. Before `resolve`, and before a capture
        ends."""
        if not self._is_forked:
            raise RuntimeError("the branch is not forked; there is nothing to join")
        self._is_forked = False
        if self._stream is not None:
            # RAW: commit reads what the branch copied; WAW: the demand fill writes beside it.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
