"""Which expert sits in which slot, decided on the device, so that a captured graph can do it.

Shapes: L = layers, E = experts of a layer, S = slots, T = tokens, K = top-k.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton

from graphs.clock_kernels import launched
from graphs.layout import (
    EMPTY_SCORE,
    NUM_CLOCKS,
    NUM_CONTROL,
    NUM_COUNTERS,
    NUM_STAMPS,
    NUM_WIDE_COUNTS,
    REBASE_SCORE,
    Clock,
    Counter,
    Padding,
)
from graphs.resolve_kernels import advance_kernel, resolve_kernel_of
from graphs.wide_kernels import choose_kernel, count_kernel

MAX_ASSIGNMENTS = 8192
"""Most assignments (tokens x top-k) of one plan."""

MAX_EXPERTS = 1024


class PolicyForm(Protocol):
    """An eviction policy as two `triton.jit` functions, int32 in and out."""

    @property
    def hit(self) -> Any:
        """`hit(old_score, now) -> new_score` of a demanded expert that is resident."""

    @property
    def insert(self) -> Any:
        """`insert(now) -> score` of an expert that has just been placed."""


class SlotTableError(RuntimeError):
    """A plan asked for what cannot be: the outputs of that step are not to be used."""


class TableShape(NamedTuple):
    """What a captured graph depends on, beside addresses."""

    num_layers: int
    num_experts: int
    num_slots: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Counts since construction or `clear()`. Experts are counted once per plan.

    prefetched = prefetch_used + late + prefetch_dropped + those in flight or resident and unused.
    """

    hits: int
    """Demanded while resident."""
    late: int
    """Demanded while the prefetch was incomplete; the demand fill copied the rest."""
    misses: int
    """Demanded while absent."""
    evictions: int
    """Resident experts that lost their slot."""
    prefetched: int
    """Reserved before any demand."""
    prefetch_used: int
    """Prefetched, complete at its first demand; also one of `hits`."""
    prefetch_dropped: int
    """Prefetched and given up incomplete, or evicted before any demand."""
    used_bytes: int
    """Bytes of `prefetch_used`."""
    late_bytes: int
    """Bytes of `late` that were there when they were demanded."""
    wasted_bytes: int
    """Bytes that were copied for `prefetch_dropped`."""
    stall_ns: int = 0
    """Nanoseconds in which the compute stream waited for demanded experts; 0 under Triton's
    interpreter, which has no clock."""
    free_ns: int = 0
    """Nanoseconds that the link had for prefetches, between reservation and demand."""
    at_once: int = 0
    """Of `prefetch_used`, those demanded in the very step that they were predicted for."""
    waves: int = 0
    """Waves of experts that wide steps ran in inside graphs."""

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "DeviceCounters":
        """The counts in one row of `DeviceSlotTable.counters`."""
        later = (Counter.STALL_NS, Counter.FREE_NS, Counter.AT_ONCE, Counter.WAVES)
        return cls(*row[: Counter.UNPLACED], *(row[counter] for counter in later))

    @property
    def hit_rate(self) -> float:
        """Share of demanded experts that were resident; 0.0 before any demand."""
        demanded = self.hits + self.late + self.misses
        return self.hits / demanded if demanded else 0.0


class WideReport(NamedTuple):
    """What `DeviceSlotTable.plan_wide` has decided: rows of one tensor, overwritten by the next."""

    rows: torch.Tensor
    """[4, W] int32, contiguous, W = max(E, 4): planned, streamed, slots, counts; for one read."""
    planned: torch.Tensor
    """[1, E] int32: the experts that have a slot now, those that had one first, then -1."""
    streamed: torch.Tensor
    """[1, E] int32: the other demanded experts, most often named first, then -1."""
    slots: torch.Tensor
    """[1, E] int32: the slot of each planned expert."""
    counts: torch.Tensor
    """[W] int32, see `layout.WideCount`."""


class PrefetchState(NamedTuple):
    """The tensors through which a prefetch hook and the plans of its table meet."""

    entries: torch.Tensor  # [L, F, 2] int32: (expert, slot) in flight
    entry_count: torch.Tensor  # [L] int32
    progress: torch.Tensor  # [L, F] int32: whole units from the front
    demand: torch.Tensor  # [L, E] int32: step in which the expert was last posted
    bytes_before: torch.Tensor  # [L, U + 1] int64
    header: torch.Tensor  # [L, 4] int64
    epoch: torch.Tensor  # [L] int32: step whose demand was posted last

    @property
    def read_by_plans(self) -> tuple[torch.Tensor, ...]:
        """In the order in which a kernel takes them."""
        return self[:-1]


class DeviceSlotTable:
    """The slots of all layers. Tensors at fixed addresses, written only by kernels on one stream.

    `mapping` [L, E] int32: slot of each resident expert, -1 for the others.
    `owner` [L, S] int32: expert resident or in flight in each slot, -1 when empty.
    `score` [L, S] int32: the policy's score, EMPTY_SCORE unless an expert is resident.
    `clock` [1] int32: the policy's clock, from 1. `step` [1] int32: steps, never moved back.
    `misses` [L, S, 3] int32: (expert, slot, first unit to copy) that the last plan wants copied,
    `miss_count` [L] int32 of them. `counters` [L, 16] int64: see `layout.Counter`. `stamps` [L, 4]
    int64: see `layout.Stamp`.

    Decides what `prefetch_runtime.slots.SlotTable` decides, after every step. No method waits for
    the device except `counters_of`, `check_errors`, `check_integrity` and `close`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        policy: PolicyForm,
        units_per_step: int,
        device: torch.device,
        max_assignments: int = 1024,
    ) -> None:
        """The table starts empty.

        Args:
            policy: the device form of an eviction policy.
            units_per_step: how much the score of a newly placed expert grows per step; the clock
                and the scores are moved back before they overflow.
            max_assignments: most assignments (T * K) of a plan, at most 8192; sizes the outputs.

        Raises:
            ValueError: a size that the kernels do not support.
        """
        for name, value, most in (
            ("num_layers", num_layers, 1 << 20),
            ("num_experts", num_experts, MAX_EXPERTS),
            ("num_slots", num_slots, num_experts),
            ("max_assignments", max_assignments, MAX_ASSIGNMENTS),
            ("units_per_step", units_per_step, 1 << 16),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be between 1 and {most}, got {value}")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.device = device
        self.units_per_step = units_per_step
        self.max_assignments = max_assignments
        self.policy = policy
        self._resolve_kernel = resolve_kernel_of(policy.hit, policy.insert)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.mapping = integers(num_layers, num_experts)
        self.owner = integers(num_layers, num_slots)
        self.score = integers(num_layers, num_slots)
        self.misses = integers(num_layers, num_slots, 3)
        self.miss_count = integers(num_layers)
        self.counters = integers(num_layers, NUM_COUNTERS, dtype=torch.int64)
        self.stamps = integers(num_layers, NUM_STAMPS, dtype=torch.int64)
        self.clocks = integers(NUM_CLOCKS)  # neighbours: one read
        self.clock, self.step = self.clocks[:1], self.clocks[Clock.STEP : Clock.STEP + 1]
        self._mark = integers(num_layers, num_slots)  # last plan that demanded the slot
        self._wanted = integers(num_layers, num_experts)  # last plan that missed the expert
        self._control = integers(num_layers, NUM_CONTROL)
        self._out = integers(num_layers, max_assignments, dtype=torch.int64)
        self._tokens_of = integers(num_experts + 1)  # zero between plans
        rows = integers(4, max(num_experts, NUM_WIDE_COUNTS))
        planned, streamed, slots = (rows[i : i + 1, :num_experts] for i in range(3))
        self._report: WideReport | None = WideReport(rows, planned, streamed, slots, rows[3])
        self._prefetch: PrefetchState | None = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False
        self.clear()

    @property
    def shape(self) -> TableShape:
        return TableShape(self.num_layers, self.num_experts, self.num_slots, self.device)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def clear(self) -> None:
        """Empty every slot, forget what is in flight, restart the clock and the counters."""
        self.require_open()
        self.mapping.fill_(-1)
        self.owner.fill_(-1)
        self.score.fill_(EMPTY_SCORE)
        self.clocks.fill_(1)
        self.restart_counters()
        for tensor in (
            self.miss_count,
            self._mark,
            self._wanted,
            self._control,
            self._tokens_of,
        ):
            tensor.zero_()
        if self._prefetch is not None:
            self._prefetch.entry_count.zero_()
            self._prefetch.demand.zero_()
            self._prefetch.epoch.zero_()

    def restart_counters(self) -> None:
        """Count from zero; nothing else changes. Between steps only."""
        self.require_open()
        self.counters.zero_()
        self.stamps.zero_()
        self.clocks[Clock.MISSED_IN :].zero_()

    def advance(self) -> None:
        """Begin the next step: once per replay, before the first layer."""
        self.require_open()
        advance_kernel[(1,)](
            self.clocks, self.score, self._mark, self._wanted, self._control,
            self.score.numel(), self._wanted.numel(), self.num_layers,
            self.units_per_step, 1024, num_warps=4,
        )  # fmt: skip

    def resolve(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        early: bool = False,
    ) -> torch.Tensor:
        """Give every demanded expert a slot; rename experts to slots.

        Absent experts, in ascending order, take the slots with the lowest (score, slot), empty ones
        first; a slot of this plan is never a victim. What must be copied is left in `misses`.
        An id of -1 and the ids of a padding row cost nothing and come out as slot 0. More unique
        experts than slots, and ids of experts that do not exist, come out as slot 0 too and are
        counted: `check_errors` reports them.

        Args:
            topk_ids: [T, K] int32 or int64, rows contiguous, T * K <= max_assignments.
            padding: None, or bool [T], true for padding, or int32 or int64 [T], negative for
                padding (a KV slot mapping).
            out: [T, K] int32 or int64, contiguous. Default: the table's own buffer of this layer,
                in the type of `topk_ids`, at a fixed address; this layer's next plan overwrites it.
            early: the stream's last operation is a kernel, and its end is not waited for before the
                launch, only before anything is read (no difference where the device cannot do
                that). The stream waits for no event in between.

        Returns:
            `out`: slot ids [T, K].
        """
        return self._plan(layer_idx, topk_ids, padding, out, touch=False, early=early)

    def touch(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mark the residents among the demanded experts as used, and bring nothing in.

        As `resolve`, but for any number of experts: the absent count as missed and come out as -1,
        like ids of -1 and padding. For wide steps that are computed in waves.
        """
        return self._plan(layer_idx, topk_ids, padding, out, touch=True)

    def plan_wide(self, layer_idx: int, topk_ids: torch.Tensor, *, evict: bool) -> WideReport:
        """As `prefetch_runtime.slots.SlotTable.plan_wide`, without the touch of those that stream.

        The demanded residents keep their slots; of the absent, most often named first, as many are
        given a slot as are empty, or with `evict` as no demanded expert is in. Nothing is copied:
        the caller does that for the planned ones that are not hits, `touch`es the streamed ones,
        and lets nothing read the new slots before. `topk_ids` is as in `resolve`, of any size.
        """
        self.require_layer(layer_idx)
        ids = topk_ids.reshape(-1).contiguous()
        if ids.dtype not in (torch.int32, torch.int64) or ids.device.type != self.device.type:
            raise ValueError(
                f"topk_ids must be int32 or int64 on {self.device}, got {ids.dtype} on {ids.device}"
            )
        report = self._report
        assert report is not None
        if ids.numel():
            count_kernel[(triton.cdiv(ids.numel(), 1024),)](
                ids, self._tokens_of, ids.numel(), self.num_experts, 1024, num_warps=4
            )
        choose_kernel[(1,)](
            self._tokens_of, self.mapping, self.owner, self.counters,
            report.planned, report.streamed, report.counts, layer_idx, int(evict),
            self.num_experts, self.num_slots, triton.next_power_of_2(self.num_experts),
            triton.next_power_of_2(self.num_slots), CHUNK=16, num_warps=4,
        )  # fmt: skip
        self.resolve(layer_idx, report.planned, out=report.slots)
        return report

    def counters_of(self, layer_idx: int) -> DeviceCounters:
        """A snapshot. Waits for the device."""
        self.require_layer(layer_idx)
        return DeviceCounters.of_row(self.counters[layer_idx].tolist())

    def check_errors(self) -> None:
        """Raise SlotTableError if a plan could not be carried out. Waits for the device."""
        errors = self.counters[:, [Counter.UNPLACED, Counter.BAD_IDS]].tolist()
        for layer_idx, (unplaced, bad_ids) in enumerate(errors):
            if bad_ids:
                raise SlotTableError(
                    f"layer {layer_idx}: {bad_ids} assignments to experts outside 0 to "
                    f"{self.num_experts - 1}; the router and the table disagree about the model"
                )
            if unplaced:
                raise SlotTableError(
                    f"layer {layer_idx}: {unplaced} demanded experts found no slot among "
                    f"{self.num_slots}; capture only batch sizes with "
                    f"min(tokens * top_k, num_experts) <= num_slots, or raise slots_per_layer"
                )

    def check_integrity(self) -> None:
        """Raise RuntimeError if the table disagrees with itself. Waits for the device."""
        mapping, owner, score = self.mapping.tolist(), self.owner.tolist(), self.score.tolist()
        flying: Sequence[dict[int, int]] = [{} for _ in mapping]
        if self._prefetch is not None:
            counts = self._prefetch.entry_count.tolist()
            entries = self._prefetch.entries.tolist()
            flying = [
                {slot: expert for expert, slot in row[:n]}
                for row, n in zip(entries, counts, strict=True)
            ]
        for layer_idx in range(self.num_layers):
            slots = [slot for slot in mapping[layer_idx] if slot >= 0]
            resident = {s: e for e, s in enumerate(mapping[layer_idx]) if s >= 0}
            owners = {s: e for s, e in enumerate(owner[layer_idx]) if e >= 0}
            scored = {s for s, x in enumerate(score[layer_idx]) if x != EMPTY_SCORE}
            broken = {
                "two experts are mapped to one slot": len(slots) != len(resident),
                "a slot is resident and in flight": bool(resident.keys() & flying[layer_idx]),
                "owner disagrees with mapping": owners != {**resident, **flying[layer_idx]},
                "scores disagree": scored != set(resident),
            }
            for what, is_broken in broken.items():
                if is_broken:
                    raise RuntimeError(
                        f"device slot table, layer {layer_idx}: {what} (mapping "
                        f"{mapping[layer_idx]}, owner {owner[layer_idx]}, score {score[layer_idx]},"
                        f" in flight {flying[layer_idx]})"
                    )

    def attach_prefetch(self, state: PrefetchState) -> None:
        """From now on every plan first commits the layer's prefetches. Once, before any capture."""
        self.require_open()
        if self._prefetch is not None:
            raise RuntimeError("the slot table has a prefetch hook already; use that one")
        if self._graphs:
            raise RuntimeError("attach the prefetch hook before capturing graphs of the table")
        self._prefetch = state

    def reservation_tensors(self) -> tuple[torch.Tensor, ...]:
        """What a kernel that reserves slots reads and writes, in the order it takes them."""
        self.require_open()
        return (
            self.mapping,
            self.owner,
            self.score,
            self._mark,
            self._control,
            self.clocks,
            self.counters,
            self.stamps,
        )

    def close(self) -> None:
        """Release the tensors. Safe to call twice. Raises RuntimeError while graphs are open."""
        if self._closed:
            return
        # Captured kernels hold these addresses, so the graphs go first.
        if any(not graph.is_closed for graph in self._graphs):
            raise RuntimeError("close the captured graphs of this slot table before the table")
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                delattr(self, name)
        self._prefetch = self._report = None

    def hold_open_for(self, graph: Any) -> None:
        """Refuse `close()` until this captured graph is closed."""
        self._graphs.add(graph)

    def check_ids(
        self, topk_ids: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[int, int, int, Padding]:
        """(assignments, top_k, row stride, form of padding), or ValueError saying what is wrong."""
        self.require_open()
        if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"topk_ids must be [tokens, top_k] int32 or int64, "
                f"got {topk_ids.dtype} {tuple(topk_ids.shape)}"
            )
        if topk_ids.device.type != self.device.type:
            raise ValueError(f"topk_ids is on {topk_ids.device}, the slot table on {self.device}")
        num_tokens, top_k = topk_ids.shape
        if not 1 <= topk_ids.numel() <= self.max_assignments:
            raise ValueError(
                f"{num_tokens} tokens x top-{top_k} is {topk_ids.numel()} assignments; the slot "
                f"table was built for 1 to {self.max_assignments} (max_assignments)"
            )
        if top_k > 1 and topk_ids.stride(1) != 1:
            raise ValueError(
                f"the rows of topk_ids must be contiguous, strides {topk_ids.stride()}"
            )
        if padding is not None:
            if padding.shape != (num_tokens,) or not padding.is_contiguous():
                raise ValueError(
                    f"padding must be contiguous [{num_tokens}], got {tuple(padding.shape)}"
                )
            if padding.device != topk_ids.device:
                raise ValueError(f"padding is on {padding.device}, topk_ids on {topk_ids.device}")
        return topk_ids.numel(), top_k, topk_ids.stride(0), form_of(padding)

    def _plan(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        touch: bool,
        early: bool = False,
    ) -> torch.Tensor:
        self.require_layer(layer_idx)
        n, top_k, row_stride, form = self.check_ids(topk_ids, padding)
        if out is None:
            buffer = self._out[layer_idx].view(topk_ids.dtype)
            out = buffer[:n].view(topk_ids.shape)
        elif (
            out.shape != topk_ids.shape
            or out.dtype not in (torch.int32, torch.int64)
            or not out.is_contiguous()
            or out.device != topk_ids.device
        ):
            raise ValueError(
                f"out must be contiguous int32 or int64 {tuple(topk_ids.shape)} on "
                f"{topk_ids.device}, got {out.dtype} {tuple(out.shape)} on {out.device}"
            )
        prefetch = self._prefetch
        nothing = (self.mapping,) * 5 + (self.counters,)
        forecast = 1 if prefetch is None else prefetch.progress.shape[1]
        num_warps = warps_for(n)
        self._resolve_kernel[(1,)](
            topk_ids, topk_ids if padding is None else padding, out,
            self.mapping, self.owner, self.score, self._mark, self._wanted,
            self.misses, self.miss_count, self._control, self.clocks, self.counters, self.stamps,
            *(nothing if prefetch is None else prefetch.read_by_plans),
            layer_idx, n, row_stride,
            E=self.num_experts, S=self.num_slots,
            U=1 if prefetch is None else prefetch.bytes_before.shape[1] - 1,
            F=forecast, TOP_K=top_k, BLOCK=block_for(n, num_warps),
            E_BLOCK=triton.next_power_of_2(self.num_experts),
            S_BLOCK=triton.next_power_of_2(self.num_slots),
            F_BLOCK=triton.next_power_of_2(forecast),
            PAD=int(form), HOOK=prefetch is not None, TOUCH=touch, num_warps=num_warps,
            **launched(self.device, early),
        )  # fmt: skip
        return out

    def require_layer(self, layer_idx: int) -> None:
        self.require_open()
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx must be 0 to {self.num_layers - 1}, got {layer_idx}")

    def require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the device slot table is closed")


def form_of(padding: torch.Tensor | None) -> Padding:
    """How a kernel is to read `padding`; ValueError for a type that says nothing of padding."""
    if padding is None:
        return Padding.NONE
    if padding.dtype == torch.bool:
        return Padding.MASK
    if padding.dtype in (torch.int32, torch.int64):
        return Padding.SLOT_MAPPING
    raise ValueError(
        f"padding must be bool (true = padding) or int32 or int64 "
        f"(negative = padding), got {padding.dtype}"
    )


def warps_for(n: int) -> int:
    """Few warps: a plan is latency, not work."""
    return 1 if n <= 64 else 4 if n <= 1024 else 8


def block_for(n: int, num_warps: int) -> int:
    """At least one assignment per thread, so that no two threads stand for the same one."""
    return int(max(triton.next_power_of_2(n), 32 * num_warps))


assert REBASE_SCORE < 1 << 31
