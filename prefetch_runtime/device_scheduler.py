"""The scheduler of `full` mode: plans and fills are kernels, so that a captured graph decides.

The device's slot table is the only truth, written by kernels on the compute stream alone. The host
keeps no copy of it and never picks a victim: vLLM schedules a step while the GPU runs the last one.
Shapes: L = layers, E = experts of a layer, S = slots, T = tokens, K = top_k.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from graphs import (
    DeviceCounters,
    DeviceSlotTable,
    ExpertFill,
    ExpertStream,
    LayerRecords,
    PrefetchBranch,
    PrefetchHook,
    RecordTable,
    field_of,
)
from graphs.layout import Clock, WideCount
from graphs.prefetch import MAX_FORECAST, UNLIMITED_BYTES
from graphs.slot_table import MAX_ASSIGNMENTS
from predictors import Predictor, RunsOn
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.copier import CopyTicket
from prefetch_runtime.device_recorder import DeviceRecorder
from prefetch_runtime.policies import create_device_form, create_policy
from prefetch_runtime.scheduler import (
    CONTROL_STEPS,
    TORN,
    ExpertWave,
    Guesses,
    IntArray,
    LayerCache,
    Scheduler,
    WidePlan,
    is_broad,
    without_padding,
)
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import absent_when_full
from prefetch_runtime.stats import LayerStats, RuntimeStats
from prefetch_runtime.waves import (
    MOST_CAPTURED_WAVES,
    MOST_TOKENS_IN_WAVES,
    cut_by_token,
    worst_waves,
)


class DeviceScheduler(Scheduler):
    """`Scheduler` with its decisions on the device. Call `seal` after the last `add_layer`."""

    _table: DeviceSlotTable | None = None
    _demand_fill: ExpertFill | None = None
    _stream: ExpertStream | None = None
    """Wide steps inside graphs; None where the layers' records differ."""
    _hook: PrefetchHook | None = None
    _branch: PrefetchBranch | None = None
    _seen_mapping: IntArray | None = None
    """[L, E] of the first layer of the wide step under way."""
    _seen_owner: IntArray | None = None
    _last_copy: CopyTicket | None = None
    """The last that the host has issued; None if a step has begun since."""
    _budgets: Sequence[int] = ()
    _control: "BudgetLoop | None" = None
    device_recorder: DeviceRecorder | None = None
    """Shown every choice, whether it records or not; None: there is no room for a trace."""

    def seal(self) -> None:
        """Build the device's tables over all layers; their addresses are fixed from here on.

        Raises:
            ValueError: no layers, layers of different sizes, or a host store that is not mapped
                for the device.
        """
        layers = self.layers
        if not layers:
            raise ValueError("add the layers before sealing the scheduler")
        sizes = {(layer.store.num_experts, layer.buffers.num_slots) for layer in layers}
        if len(sizes) > 1 or [layer.layer_idx for layer in layers] != list(range(len(layers))):
            raise ValueError(
                f"it needs the same number of experts and slots in every MoE layer, got "
                f"{sorted(sizes)} (experts, slots)"
            )
        ((num_experts, num_slots),) = sizes
        self._table = DeviceSlotTable(
            num_layers=len(layers),
            num_experts=num_experts,
            num_slots=num_slots,
            policy=create_device_form(self._policy),
            units_per_step=create_policy(self._policy).units_per_step,
            device=self._device,
            max_assignments=MAX_ASSIGNMENTS,
        )
        records = RecordTable([self._records_of(layer) for layer in layers], device=self._device)
        self._demand_fill = ExpertFill(self._table, records)
        if len(self._staging) == 1:
            (ring,) = self._staging.values()
            halves = [
                RecordTable(
                    [self._records_of(layer, half) for layer in layers], device=self._device
                )
                for half in ring.halves
            ]
            self._stream = ExpertStream(
                self._demand_fill,
                halves,
                rows=ring.rows,
                num_waves=partial(
                    worst_waves, num_experts=num_experts, num_slots=num_slots, rows=ring.rows
                ),
                most_waves=MOST_CAPTURED_WAVES,
            )

    def warm_up(self, top_k: int, max_tokens: int) -> None:
        """Compile the kernels for every size that a step of up to `max_tokens` may have, so that no
        request waits for it. Empties the cache. Before the first real step, and before anything is
        captured."""
        most = min(self.most_tokens_at_once(top_k), max_tokens)
        recorder = self.device_recorder
        num_guesses = 1 if recorder is None else max(1, recorder.num_guesses)
        # Kernels differ by powers of two. That of the most is perhaps beyond the last one below.
        for num_tokens in (*(1 << bit for bit in range(most.bit_length())), most):
            ids = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=self._device)
            # With vLLM's mark of padding, and without, as while it profiles.
            kv_slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device)
            for padding in (None, kv_slots):
                if self._hook is None:
                    self.fetch(0, ids, padding=padding)
                    continue
                guesses = partial(ids.new_full, (num_tokens, num_guesses), -1)
                self.fetch(0, ids, padding=padding, guesses=guesses)
                self.fetch(1, ids, padding=padding)
        # Kernels differ by the type of the ids and the alignment of their address.
        for dtype in (torch.int32, torch.int64):
            nothing = torch.full((1, top_k), -1, dtype=dtype, device=self._device)
            report = self.table.plan_wide(0, nothing, evict=True)
        self.table.touch(0, report.streamed)
        if self._stream is not None:
            widest = max(n for n in range(1, MOST_TOKENS_IN_WAVES + 1) if self.captures(n, top_k))
            for whole in (False, True):
                ids = nothing.new_full((widest, top_k), -1)
                for _ in self.captured_waves(0, ids, whole=whole):
                    pass
        self.reset()

    def predict_on_device(
        self, predictor: Predictor, *, budget_bytes: int = UNLIMITED_BYTES
    ) -> None:
        """As in `Scheduler`; only a predictor that ranks by the next router runs in a graph."""
        if predictor.runs_on is not RunsOn.BOTH or predictor.name != "next_gate":
            raise ValueError(
                f"predictor {predictor.name!r} has no kernels; mode 'full' takes 'next_gate'"
            )
        if self._demand_fill is None:
            raise RuntimeError("seal the scheduler before it predicts")
        self._hook = PrefetchHook(
            self._demand_fill,
            max_forecast=MAX_FORECAST,
            budget_bytes=budget_bytes,
        )
        self._budgets = [budget_bytes] * len(self.layers)
        self._branch = PrefetchBranch(self._device)

    def set_budgets(self, budgets: Sequence[int]) -> None:
        """Bytes of speculation per layer and step, from the next replay on; captured graphs too.
        Waits for nothing. Ends what a controller does."""
        self._control = None
        self._put_budgets(budgets)

    def _put_budgets(self, budgets: Sequence[int]) -> None:
        if self._hook is None:
            raise RuntimeError("let the scheduler predict before its budgets are set")
        self._budgets = list(budgets)
        self._hook.set_budgets(self._budgets)

    def control_budgets(self, controller: BudgetController) -> None:
        """As in `Scheduler`: the counters are read beside the steps, never in their way."""
        self._put_budgets(controller.budgets)
        self._control = BudgetLoop(self, controller, self._put_budgets, self._device)

    @property
    def needs_guesses(self) -> bool:
        """Whether `fetch` wants the next router's guesses."""
        recorder = self.device_recorder
        return self._hook is not None or (recorder is not None and recorder.num_guesses > 0)

    def make_room_for_a_trace(self, *, top_k: int, num_guesses: int, max_tokens: int) -> None:
        """Once, after `seal`, before anything is captured; see `DeviceRecorder`."""
        self.device_recorder = DeviceRecorder(
            num_layers=len(self.layers),
            num_experts=self.table.num_experts,
            top_k=top_k,
            num_guesses=num_guesses,
            max_tokens=max_tokens,
            step=self.table.step,
        )

    def _records_of(self, layer: LayerCache, rows: SlotBuffers | None = None) -> LayerRecords:
        """Where a layer's records are, and their places in `rows`; None: in its slots."""
        store, rows = layer.store, rows or layer.buffers
        # On a CPU device kernels run interpreted and read host memory where it is.
        base = store.device_address if self._device.type == "cuda" else store.address
        return LayerRecords(
            host_base=base,
            record_bytes=store.layout.record_bytes,
            fields=tuple(
                field_of(rows.tensors[field.name], field.offset)
                for field in store.layout.fields
                if field.nbytes
            ),
        )

    @property
    def table(self) -> DeviceSlotTable:
        """The slots of all layers. Raises RuntimeError before `seal`."""
        if self._table is None:
            raise RuntimeError("the scheduler is not sealed yet; call seal() after the last layer")
        return self._table

    # One step

    def begin_step(self, *, decodes: bool = False) -> None:
        """As in `Scheduler`, but the clock moves with the first layer, inside the graph, once per
        replay; between replays the budgets may.

        Raises:
            RuntimeError: a step before was cut short while it brought experts in.
        """
        if self._is_torn:
            raise RuntimeError(TORN)
        self._decodes = decodes
        self._join()  # of a step that failed; a replay joins nothing but its own branch
        # A replay may stream through the ring, on a stream of its own: what a step that failed has
        # left there is forgotten, and what still fills it ends first.
        for ring in self._staging.values():
            ring.forget()
        if self._last_copy is not None:
            self._copier.wait(self._last_copy)  # WAW; copies end in their order
            self._last_copy = None
        if self._control is not None:
            self._control.step()

    def _begin_layer(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: Guesses | None,
        padding: torch.Tensor | None = None,
    ) -> Guesses | None:
        """Advance the clock, record the choice. Returns the guesses, made once if recorded."""
        if layer_idx == 0:
            self.table.advance()
        recorder = self.device_recorder
        if recorder is None:
            return guesses
        made: torch.Tensor | None = None
        if guesses is not None and recorder.num_guesses:
            made = guesses()
            guesses = partial(_on_this_stream, made)
        recorder.record(
            layer_idx, topk_ids, made, self.padding_rows if padding is None else padding
        )
        return guesses

    def fetch(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        guesses: Guesses | None = None,
    ) -> torch.Tensor:
        """As `Scheduler.fetch`, by kernels on the current stream; the host waits for nothing.

        May be captured. The ids that it returns are the layer's own buffer: its next plan
        overwrites them. More experts than slots cannot be told here: `fits` answers first.
        """
        guesses = self._begin_layer(layer_idx, topk_ids, guesses, padding)
        hook, branch = self._hook, self._branch
        # After a record what comes last may be a copy, not a kernel.
        early = self.device_recorder is None
        if hook is not None and branch is not None and branch.is_forked:
            # The fill that runs on the branch now copies only what is demanded, and ends.
            hook.post(layer_idx, topk_ids, padding=padding, early=early)
            branch.join()
            early = False  # an event comes last
        slot_ids = self._resolve(layer_idx, topk_ids, padding, early=early)
        if hook is not None and branch is not None and guesses is not None:
            # After this layer's demand, beside its experts and the attention that follows.
            with branch.fork():
                forecast = _forecast(guesses(), padding, hook.max_forecast, self.table.num_experts)
                hook.reserve(layer_idx + 1, forecast)
                hook.fill(layer_idx + 1)
        return slot_ids

    def _join(self) -> None:
        """Let compute wait for what is being prefetched. `fetch` does it by itself; not so a wide
        step behind a narrow layer (where layers differ in top_k), nor one that failed."""
        if self._branch is not None and self._branch.is_forked:
            self._branch.join()

    def _resolve(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None = None,
        *,
        early: bool = False,
    ) -> torch.Tensor:
        assert self._demand_fill is not None
        # Demand entries are in the mapping before their bytes: fill and experts follow in order.
        self._is_torn = True
        slot_ids = self.table.resolve(layer_idx, topk_ids, padding=padding, early=early)
        self._demand_fill.fill(layer_idx, early=True)
        self._is_torn = False
        return slot_ids

    def token_waves(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: Guesses | None = None,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As in `Scheduler`; the host reads the ids to find the runs, the device plans each."""
        self._begin_layer(layer_idx, topk_ids, guesses)
        self._join()
        for run in cut_by_token(topk_ids.cpu().numpy(), self.table.num_slots):
            self._layers[layer_idx].waves += 1
            yield run, self._resolve(layer_idx, topk_ids[run])

    def most_tokens_at_once(self, top_k: int) -> int:
        """As in `Scheduler`, within what one plan takes; larger steps run as waves."""
        return min(super().most_tokens_at_once(top_k), MAX_ASSIGNMENTS // top_k)

    def fits(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,  # noqa: ARG002 - it asks no device
    ) -> bool:
        """Whether the demand fits the slots whatever it is. Reads nothing from the device."""
        layer = self._layers[layer_idx]
        worst = min(topk_ids.numel(), layer.store.num_experts)
        return worst <= layer.buffers.num_slots and topk_ids.numel() <= MAX_ASSIGNMENTS

    def captures(self, num_tokens: int, top_k: int) -> bool:
        """As in `Scheduler`; also where the step may need more experts than slots, in waves."""
        if num_tokens <= self.most_tokens_at_once(top_k):
            return True
        stream, assignments = self._stream, num_tokens * top_k
        return (
            stream is not None
            and num_tokens <= MOST_TOKENS_IN_WAVES
            and assignments <= MAX_ASSIGNMENTS
            and stream.num_waves(assignments) <= stream.most_waves
        )

    def captured_waves(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: Guesses | None = None,
        *,
        padding: torch.Tensor | None = None,
        whole: bool = False,
    ) -> Iterator[ExpertWave]:
        """`expert_waves` of a step that decodes, by kernels alone: for captures of steps that
        `captures` allows. `padding` as in `fetch`: its rows demand nothing and are in no wave."""
        layer, stream = self._layer(layer_idx), self._stream
        assert stream is not None
        self._begin_layer(layer_idx, topk_ids, guesses, padding)
        self._join()
        table, ring = self.table, self._staging_of(layer)
        # Whatever a router makes of rows of padding: their ids are in no wave, and index nothing.
        topk_ids = without_padding(topk_ids, padding)
        report = table.plan_wide(layer_idx, topk_ids, evict=True)
        wave_of: torch.Tensor | None = None
        for wave in stream.waves(
            layer_idx,
            report,
            topk_ids.numel(),
            whole=whole,
            then=lambda: table.touch(layer_idx, report.streamed),
        ):
            if wave_of is None:
                wave_of = stream.wave_of(topk_ids)
            buffers = layer.buffers if wave.half is None else ring.halves[wave.half]
            yield ExpertWave(buffers, wave.expert_map, wave_of == wave.number, wave.is_last)

    def _plan_wide(
        self,
        layer: LayerCache,
        topk_ids: torch.Tensor,
        guesses: Guesses | None,
    ) -> WidePlan:
        """As in `Scheduler`, but the device plans, and the host reads what it has decided: the one
        time that it waits. Of what it reads it changes nothing; it issues the copies."""
        table, index = self.table, layer.layer_idx
        self._begin_layer(index, topk_ids, guesses)
        self._join()
        self._is_torn = True  # until `expert_waves` has let compute wait for the copies
        report = table.plan_wide(index, topk_ids, evict=self._decodes)
        # The first layer reads the slots of all, for what is sent ahead; they change only in their
        # own layer's turn.
        wanted = [report.rows]
        if index == 0:
            wanted += [table.mapping, table.owner]
        seen = self._to_host(wanted)
        if index == 0:
            self._seen_mapping, self._seen_owner = seen[1:]
        planned, streamed, slots, counts = seen[0]
        num_hits, num_planned = counts[WideCount.HITS], counts[WideCount.PLANNED]
        streamed = streamed[: counts[WideCount.STREAMED]]
        planned, slots = planned[:num_planned], slots[:num_planned]
        newcomers = planned[num_hits:]
        # WAR: the slots' last readers have passed, since the host has waited for this layer's ids.
        into_slots: CopyTicket | None = None
        if newcomers.size:
            into_slots = self._copy(layer, newcomers, layer.buffers, slots[num_hits:])
        if streamed.size:
            table.touch(index, report.streamed)
        return WidePlan(
            placed=planned,
            placed_slots=slots,
            into_slots=into_slots,
            streamed=streamed,
            is_broad=is_broad(planned.size + streamed.size, table.num_experts),
        )

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> list[IntArray]:
        """The values of int32 tensors, by one copy that the host waits for."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        row = flat[0] if len(flat) == 1 else torch.cat(flat)
        read, _ = self._reader.receive(self._reader.send(row.unsqueeze(0), None))
        ends = np.cumsum([tensor.numel() for tensor in flat])[:-1]
        parts = np.split(read[0], ends)
        return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def _copy(
        self, layer: LayerCache, experts: IntArray, buffers: SlotBuffers, rows: IntArray
    ) -> CopyTicket:
        self._last_copy = super()._copy(layer, experts, buffers, rows)
        return self._last_copy

    def _publish(self, layer: LayerCache) -> None:
        """Nothing: the plan has written the mapping, on the device."""

    def _absent_ahead(self, layer: LayerCache) -> IntArray:
        """As in `Scheduler`, from what the first layer of the step has read."""
        if self._seen_mapping is None or self._seen_owner is None:
            return np.empty(0, dtype=np.intp)
        index = layer.layer_idx
        return absent_when_full(self._seen_mapping[index], self._seen_owner[index])

    # Looking at it

    def mapping(self, layer: LayerCache) -> torch.Tensor:
        """[E] int32: the row itself, which later plans change in the order of the stream."""
        return self.table.mapping[layer.layer_idx]

    def planned_mapping(self, layer: LayerCache) -> IntArray:
        """[E] int32: what the owners say. The host knows nothing else to compare with."""
        planned = np.full(self.table.num_experts, -1, dtype=np.int32)
        owner = self.table.owner[layer.layer_idx].cpu().numpy()
        slots = np.flatnonzero(owner >= 0)
        planned[owner[slots]] = slots
        return planned

    def stats(self) -> RuntimeStats:
        """The counters as they are now. Waits for the device.

        Raises:
            SlotTableError: a plan could not be carried out, so outputs since then are wrong.
        """
        self.table.check_errors()
        return super().stats()

    def counter_tensors(self) -> Sequence[torch.Tensor]:
        """What the kernels count, at fixed addresses."""
        return (self.table.counters, self.table.clocks)

    def stats_from(self, copies: Sequence[torch.Tensor]) -> RuntimeStats:
        """As in `Scheduler`."""
        rows, clocks = (copy.tolist() for copy in copies)
        steps = (clocks[Clock.STEP] - 1) % (1 << 32)
        counted = [DeviceCounters.of_row(row) for row in rows]
        stats = self._stats_with(
            [self._counted(layer, counted[layer.layer_idx], steps) for layer in self.layers]
        )
        return replace(stats, steps_with_misses=clocks[Clock.MISSED_STEPS] % (1 << 32))

    def _counted(self, layer: LayerCache, counters: DeviceCounters, steps: int) -> LayerStats:
        return LayerStats(
            layer_idx=layer.layer_idx,
            layer_name=layer.layer_name,
            num_experts=layer.store.num_experts,
            num_slots=layer.buffers.num_slots,
            steps=steps,
            hits=counters.hits,
            misses=counters.misses,
            evictions=counters.evictions,
            late=counters.late,
            prefetched=counters.prefetched,
            prefetch_used=counters.prefetch_used,
            prefetch_at_once=counters.at_once,
            prefetch_dropped=counters.prefetch_dropped,
            waves=layer.waves + counters.waves,
            # Every miss is one expert read, into a slot or through the staging ring; of a late
            # one the rest is.
            bytes_copied=(counters.misses + counters.late + layer.ahead_in_vain)
            * layer.store.layout.payload_bytes
            - counters.late_bytes,
            # Without those that are there and have been neither demanded nor evicted yet.
            bytes_prefetched=counters.used_bytes + counters.late_bytes + counters.wasted_bytes,
            bytes_useful=counters.used_bytes,
            bytes_late=counters.late_bytes,
            bytes_wasted=counters.wasted_bytes,
            # The copies of wide steps are timed by events.
            stall_seconds=counters.stall_ns * 1e-9 + self._stalls.seconds.get(layer.layer_idx, 0.0),
            link_free_seconds=counters.free_ns * 1e-9,
            prefetch_budget_bytes=self._budgets[layer.layer_idx]
            if self._hook and layer.layer_idx
            else 0,
        )

    @property
    def _predictor(self) -> str:
        return "none" if self._hook is None else "next_gate"

    def reset(self) -> None:
        """Empty every slot and restart the counters. Between steps only."""
        self._copier.synchronize()
        self._join()
        self.table.clear()
        self._is_torn = False
        self._restart_counters()

    def _restart_counters(self) -> None:
        self._stalls.clear()
        self.table.restart_counters()
        if self._control is not None:
            self._control.restart()
        self.host_calls = 0
        for layer in self.layers:
            layer.waves = layer.ahead_in_vain = 0

    def _bring_all_in(self, layer: LayerCache, top_k: int) -> None:
        """By plans of the shape that steps have, whose kernels `warm_up` has loaded."""
        num_experts = self.table.num_experts
        rows = -(-num_experts // top_k)
        ids = torch.full((rows * top_k,), -1, dtype=torch.int32, device=self._device)
        ids[:num_experts] = torch.arange(num_experts, dtype=torch.int32, device=self._device)
        self._resolve(layer.layer_idx, ids.view(rows, top_k))

    def close(self) -> None:
        """Drain the copies and free the tables. Captured graphs go first. Safe to call twice."""
        self._stream = None
        if self._table is not None:
            self._table.close()
        super().close()


def _on_this_stream(made: torch.Tensor) -> torch.Tensor:
    """Guesses of the compute stream, to be read on a forked one: until then the compute stream's
    next tensor must not get their memory."""
    if made.is_cuda:
        made.record_stream(torch.cuda.current_stream(made.device))
    return made


class BudgetLoop:
    """Shows a controller what the device has counted, and gives the device what it answers.

    A snapshot is copied into pinned memory in the order of the compute stream; it is looked at when
    its event has passed, some steps later.
    """

    def __init__(
        self,
        scheduler: DeviceScheduler,
        controller: BudgetController,
        put_budgets: Callable[[Sequence[int]], None],
        device: torch.device,
    ) -> None:
        self._scheduler = scheduler
        self._controller = controller
        self._put_budgets = put_budgets
        on_cuda = device.type == "cuda"
        self._tensors = tuple(scheduler.counter_tensors())
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
            for tensor in self._tensors
        ]
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._is_under_way = False
        self._steps = 0

    def step(self) -> None:
        """Called before each step, by the thread that launches it. Waits for nothing."""
        self._steps += 1
        if self._is_under_way:
            if self._copied is None or self._copied.query():  # type: ignore[no-untyped-call]
                self._is_under_way = False
                stats = self._scheduler.stats_from(self._copies)
                if self._controller.observe(stats.layers):
                    self._put_budgets(self._controller.budgets)
        elif self._steps % CONTROL_STEPS == 0:
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._is_under_way = True

    def restart(self) -> None:
        """The counters start from zero again."""
        self._is_under_way = False
        self._controller.restarted()


def _forecast(
    guesses: torch.Tensor, padding: torch.Tensor | None, max_forecast: int, num_experts: int
) -> torch.Tensor:
    """[F] int32: every token's best guess, then every second one, as `predictors.by_rank` orders
    them. Rows of padding guess nothing, so -1 may stand anywhere.

    What is more than `max_forecast` is cut off after repeats have been left out, as on the host.
    Fewer may hold repeats, which the kernel skips.
    """
    if padding is not None:
        guesses = without_padding(guesses, padding)
    ranked = guesses.t().reshape(-1)
    if ranked.numel() > max_forecast:
        ranked = _first_different(ranked, max_forecast, num_experts)
    return ranked.to(torch.int32).contiguous()


def _first_different(ids: torch.Tensor, most: int, num_experts: int) -> torch.Tensor:
    """[min(most, num_experts)]: the first different ids, in order; -1 where there are no more.

    By operations that a graph can hold: each expert's first place, then the lowest places.
    """
    places = torch.arange(ids.numel(), device=ids.device)
    first = torch.full((num_experts + 1,), ids.numel(), device=ids.device)
    first.scatter_reduce_(0, ids.long() % (num_experts + 1), places, "amin")  # -1 is the last
    lowest, experts = first[:num_experts].topk(min(most, num_experts), largest=False)
    return experts.masked_fill(lowest == ids.numel(), -1)
