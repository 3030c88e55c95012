"""One step: read the demand, plan, copy, publish the mapping. Start reading here.

Shapes: E = experts of a layer (global ids), S = slots, T = tokens, K = top_k, L = MoE layers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from predictors import Predictor
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.copier import Copier, CopyJob, CopyTicket
from prefetch_runtime.demand_reader import DemandReader, Sent
from prefetch_runtime.host_prefetch import UNLIMITED_BYTES, HostPrefetcher, fits_predictor
from prefetch_runtime.host_store import HostStore, LayerStore
from prefetch_runtime.policies import create_policy
from prefetch_runtime.recorder import Recorder, TraceRecorder
from prefetch_runtime.row_sender import RowSender
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import NotEnoughSlots, SlotPlan, SlotTable, absent_when_full
from prefetch_runtime.staging import StagedWave, StagingRing
from prefetch_runtime.stall_clock import StallClock
from prefetch_runtime.stats import LayerStats, RuntimeStats
from prefetch_runtime.waves import cut_by_token, rows_of_half

if TYPE_CHECKING:
    from prefetch_runtime.polled_reader import Polled, PolledReader

IntArray = npt.NDArray[np.signedinteger]
Guesses = Callable[[], torch.Tensor]
Between = Callable[[Callable[[], None]], None]
"""Calls what it is given: at once, or between the segments of every replay of a capture."""

CONTROL_STEPS = 32
"""Steps between two looks at what speculation brings."""


@dataclass(slots=True)
class LayerCache:
    """Everything that belongs to one MoE layer's cache."""

    layer_idx: int
    layer_name: str
    table: SlotTable
    store: LayerStore
    buffers: SlotBuffers
    mapping: torch.Tensor
    """[E + 1] int32 on the device: slot of each expert, -1 when absent. The last entry is what an
    id of -1 becomes, since indexing with -1 reads it."""
    mapping_staged: torch.Tensor
    """[E + 1] int32 on the host, pinned on CUDA: the row as it is published next."""
    local_of: IntArray | None
    """[E] local id of each global id, -1 for experts of other ranks; None without expert map."""
    is_stale: bool = False
    """Whether the table has changed since the mapping was published."""
    experts_read: int = 0
    steps: int = 0
    waves: int = 0
    ahead_in_vain: int = 0
    """Experts that were sent into the staging ring for this layer, which did not ask for them."""
    last_step: int = field(default=-1)


class ExpertWave(NamedTuple):
    """Experts whose rows are computed together, and where they are."""

    buffers: SlotBuffers
    """The layer's slots, or half of the staging ring."""
    expert_map: torch.Tensor
    """[E] int32 on the device: row of `buffers` of each expert of this wave; for the others -1, or
    with `whole` (see `Scheduler.expert_waves`) some row of the wave."""
    in_wave: torch.Tensor
    """[T, K] bool on the device: which assignments are to experts of this wave."""
    is_last: bool


class WidePlan(NamedTuple):
    """What a wide step of one layer does. All integers on the host."""

    placed: IntArray
    """Demanded experts whose slots hold them, or will when `into_slots` is done."""
    placed_slots: IntArray
    into_slots: CopyTicket | None
    """Copies of newcomers, to be waited for and published; None if there are none."""
    streamed: IntArray
    """Experts that go through the staging ring, in order."""
    is_broad: bool
    """Whether nearly every expert is demanded, so that the next layer will demand nearly all."""


class Scheduler:
    """Owns the slots, the policies and the order of copies; one object per worker.

    The device is whatever the buffers live on. On CUDA the calling thread's current stream is the
    compute stream; nothing here waits for it except the read of the demanded ids, once a layer.
    """

    def __init__(
        self,
        *,
        copier: Copier,
        host_store: HostStore,
        device: torch.device,
        policy: str = "lru",
        staging_slots: int | Literal["auto"] = "auto",
        mode: str = "eager",
        id_for_padding: int = -1,
        between: Between | None = None,
    ) -> None:
        """
        Args:
            staging_slots: experts in the staging ring; see `waves.rows_of_half`.
            id_for_padding: the row that an id of -1 is renamed to (see `LayerCache.mapping`).
            between: what `fetch` hands its host's part to; None: it is done at once.
        """
        self._copier = copier
        self._between = _at_once if between is None else between
        self._reader = DemandReader(device)
        self._polled: PolledReader | None = None
        if between is not None and device.type == "cuda":
            from prefetch_runtime import polled_reader  # imports triton

            self._polled = polled_reader.PolledReader(device)
        self._sender = RowSender(device)
        self._peeked: tuple[int, torch.Tensor, IntArray] | None = None
        self._host_store = host_store
        self._device = device
        self._policy = policy
        self._staging_slots = staging_slots
        self._mode = mode
        self._id_for_padding = id_for_padding
        self._layers: dict[int, LayerCache] = {}
        self._owed: tuple[LayerCache, Callable[[], IntArray]] | None = None
        """A layer of this step and what gives its ids, all resident, whose hits are noted when the
        host next waits for the device."""
        self._staging: dict[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], StagingRing] = {}
        self._now = 1
        self._decodes = False
        self.padding_rows: torch.Tensor | None = None
        """As `padding` of `fetch`, of a call whose padding is planned like tokens: a trace that is
        recorded on the device leaves those rows out."""
        self._missed_in = 0
        self._is_torn = False
        """Whether a table may name experts that are not in their slots. So while they are brought
        in; between steps, if one was cut short there."""
        self._stalls = StallClock(device)
        self._steps_with_misses = 0
        self.host_calls = 0
        self.recorder: Recorder | None = None
        """Takes what the routers choose, while one is set."""
        self._prefetcher: HostPrefetcher | None = None
        self._controller: BudgetController | None = None
        self._closed = False

    # Set-up

    def add_layer(
        self,
        layer_idx: int,
        layer_name: str,
        store: LayerStore,
        buffers: SlotBuffers,
        *,
        expert_map: torch.Tensor | None = None,
    ) -> LayerCache:
        """Put a layer under the scheduler's care; its slots start empty.

        Args:
            store: the layer's experts on the host.
            buffers: its slots; the tensors keep their addresses for the scheduler's life.
            expert_map: [E] global id to local id (row of `store`), -1 for experts that another
                rank owns; composed with the slot mapping into one tensor. None: ids are local.

        Raises:
            ValueError: the layer is there already, or the expert map does not fit the store.
        """
        if layer_idx in self._layers:
            raise ValueError(f"layer {layer_idx} ({layer_name}) is already under the scheduler")
        local_of = None if expert_map is None else _checked_map(expert_map, store.num_experts)
        num_ids = store.num_experts if local_of is None else len(local_of)
        pinned = self._device.type == "cuda"
        row = torch.full((num_ids + 1,), -1, dtype=torch.int32)
        row[-1] = self._id_for_padding
        layer = LayerCache(
            layer_idx=layer_idx,
            layer_name=layer_name,
            table=SlotTable(
                store.num_experts, buffers.num_slots, create_policy(self._policy), layer_idx
            ),
            store=store,
            buffers=buffers,
            mapping=row.to(self._device, copy=True),
            mapping_staged=row.pin_memory() if pinned else row,
            local_of=local_of,
        )
        self._layers[layer_idx] = layer
        self._staging_of(layer)  # now, while vLLM's memory profiler counts what is allocated
        return layer

    def seal(self) -> None:
        """Called once, after the last `add_layer` and before the first step."""

    def warm_up(self, top_k: int, max_tokens: int) -> None:  # noqa: ARG002 - for other modes
        """Prepare what would otherwise be made during a step."""
        if self._polled is not None:
            self._polled.warm_up(top_k, self.layers[0].mapping)

    def attach_prefetcher(self, prefetcher: HostPrefetcher) -> None:
        """Predict from now on. Once, after `seal`; the scheduler closes it.

        Raises:
            ValueError: an expert map, or layers of different sizes, which predictors cannot take.
        """
        if any(layer.local_of is not None for layer in self.layers) or not fits_predictor(
            [layer.store.num_experts for layer in self.layers]
        ):
            raise ValueError("prediction needs layers of one size, and no expert map")
        self._prefetcher = prefetcher

    def control_budgets(self, controller: BudgetController) -> None:
        """Let a controller set every layer's budget from now on. Once, when prediction is set up.

        Raises:
            RuntimeError: nothing predicts.
        """
        if self._prefetcher is None:
            raise RuntimeError("attach a prefetcher before its budgets are controlled")
        self._controller = controller
        self._prefetcher.budgets[:] = controller.budgets

    def predict_on_device(
        self,
        predictor: Predictor,
        *,
        budget_bytes: int = UNLIMITED_BYTES,  # noqa: ARG002 - for schedulers that can
    ) -> None:
        """Predict by kernels from now on. Once, after `seal`, before anything is captured.

        Raises:
            ValueError: the mode or the predictor has no kernels.
        """
        raise ValueError(f"mode {self._mode!r} predicts on the host ({predictor.name})")

    @property
    def needs_guesses(self) -> bool:
        """Whether `fetch` wants the next router's guesses."""
        return self._prefetcher is not None and self._prefetcher.needs_guesses

    # One step

    def begin_step(self, *, decodes: bool = False) -> None:
        """Advance the clock: called once per engine step, before the first layer.

        `decodes`: no request of the step has more than one token, so that what it demands will
        probably be demanded again.

        Raises:
            RuntimeError: a step before was cut short while it brought experts in.
        """
        if self._is_torn:
            raise RuntimeError(TORN)
        self._settle()
        last = self._layers.get(len(self._layers) - 1)
        if self._polled is not None and last is not None and last.last_step != self._now:
            # The step before was cut short (or ran no layer): what the device has told since then,
            # or is about to tell, would be taken for the demand of a layer of this step.
            self._polled.clear()
        self._now += 1
        self._decodes = decodes
        self._peeked = None
        prefetcher, controller = self._prefetcher, self._controller
        if prefetcher is None or controller is None or self._now % CONTROL_STEPS:
            return
        if controller.observe([self._stats_of(layer) for layer in self.layers]):
            prefetcher.budgets[:] = controller.budgets

    def fetch(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        guesses: Guesses | None = None,
    ) -> torch.Tensor:
        """Make the demanded experts resident; return their slots, [T, K], dtype of `topk_ids`.

        `padding` says which rows belong to no token, as bool [T] (true = padding) or as an integer
        KV slot mapping [T] (negative = padding). They cost nothing, like ids of -1. `guesses`
        makes [T, G] ids, the next MoE layer's router on this layer's input, best first; given if
        the predictor needs them (`needs_guesses`), and called on the stream that shall do the work.

        What the device does here may be captured, if `between` of the constructor interrupts the
        capture for what the host does. A replay then reads the ids that it has just computed.

        Raises:
            NotEnoughSlots: more distinct experts than slots; nothing has changed.
            RuntimeError: the scheduler is closed.
        """
        layer = self._layer(layer_idx)
        polled = self._polled
        if polled is not None and self._peeked is None and topk_ids.numel() <= polled.most_ids:
            return self._fetch_polled(polled, layer, topk_ids, padding, guesses)
        # What `fits` reads is never captured: the calls of a graph fit whatever their routing is.
        known = self._take_peeked(layer, topk_ids)
        topk_ids = without_padding(topk_ids, padding)
        if known is not None and guesses is None:
            self._prepare(layer, *self._received(layer, known, None))
            return self._renamed(layer, topk_ids)
        made = None if guesses is None else without_padding(guesses(), padding)
        sent = self._reader.send(topk_ids, made)
        self._between(lambda: self._prepare_sent(layer, sent))
        return self._renamed(layer, topk_ids)

    def _prepare_sent(self, layer: LayerCache, sent: Sent) -> None:
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._settle()  # the device is still on its way to these ids
        host_ids, host_guesses = self._receive(layer, sent)
        if self._may_owe(layer) and layer.table.holds(host_ids):
            self._owed = layer, lambda: host_ids
            return
        self._prepare(layer, host_ids, host_guesses)

    def _fetch_polled(
        self,
        polled: "PolledReader",
        layer: LayerCache,
        topk_ids: torch.Tensor,
        padding: torch.Tensor | None,
        guesses: Guesses | None,
    ) -> torch.Tensor:
        """As `fetch`, where the device's part has kernels of its own."""
        made = None if guesses is None else guesses()
        sent = polled.send(layer.layer_idx, topk_ids, made, padding=padding, mapping=layer.mapping)
        self._between(lambda: self._prepare_polled(layer, polled, sent))
        return polled.renamed(topk_ids, padding=padding, mapping=layer.mapping)

    def _prepare_polled(self, layer: LayerCache, polled: "PolledReader", sent: "Polled") -> None:
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._settle()  # the device is still on its way to these ids
        all_resident = polled.wait(sent)

        def received() -> tuple[IntArray, IntArray | None]:
            return self._received(layer, *polled.take(sent))

        def hits() -> IntArray:
            host_ids, _ = received()
            if not layer.table.holds(host_ids):
                raise RuntimeError(
                    f"layer {layer.layer_idx} ({layer.layer_name}): the device's mapping has slots "
                    f"for experts that are not there; its outputs since then are wrong"
                )
            return host_ids

        if all_resident and self._may_owe(layer):
            self._owed = layer, hits
            return
        layer.is_stale |= not all_resident
        self._prepare(layer, *received())

    def _may_owe(self, layer: LayerCache) -> bool:
        """Whether the device need not wait while the hits of a layer are noted that has nothing to
        copy or publish."""
        return self._prefetcher is None and layer.layer_idx + 1 in self._layers

    def _settle(self) -> None:
        """Note the hits that are owed. Before anything else reads or changes a table.

        Raises:
            RuntimeError: they are no hits, though the device had slots for them.
        """
        if self._owed is None:
            return
        (layer, ids), self._owed = self._owed, None
        self._fetch(layer, ids().ravel())

    def _prepare(
        self, layer: LayerCache, host_ids: IntArray, host_guesses: IntArray | None
    ) -> None:
        """The host's part of `fetch`: when it returns, all that the layer's experts need is there
        or ordered before what the compute stream is given next."""
        self._fetch(layer, host_ids.ravel())
        self._predict(layer, host_ids, host_guesses)

    def _fetch(self, layer: LayerCache, demanded: IntArray) -> None:
        """Plan the demand, copy what is absent, publish the mapping once its bytes are there."""
        self._settle()
        self._is_torn = True
        if self._prefetcher is not None:
            layer.is_stale |= self._prefetcher.land(layer.layer_idx, layer.table, self._now)
        try:
            plan = layer.table.plan(demanded, self._now)
        except (NotEnoughSlots, ValueError):
            self._is_torn = False  # nothing has changed
            raise
        self._count_step(layer)
        layer.waves += 1
        if plan.loads.size + plan.late.size + plan.dropped.size:
            with self._stalls.waiting(layer.layer_idx):
                self._bring_in(layer, plan)
        elif self._prefetcher is not None:
            self._prefetcher.join(layer.layer_idx, plan)
        if plan.loads.size or plan.late.size or layer.is_stale:
            self._publish(layer)
        self._is_torn = False

    def _bring_in(self, layer: LayerCache, plan: SlotPlan) -> None:
        if self._prefetcher is not None:
            self._prefetcher.join(layer.layer_idx, plan)
        if plan.loads.size:
            self._count_miss()
            copies = self._copy(layer, plan.loads, layer.buffers, plan.load_slots)
            # RAW: what follows on the compute stream sees whole experts, the mapping included.
            self._copier.wait(copies)

    def _predict(self, layer: LayerCache, ids: IntArray, guesses: IntArray | None) -> None:
        """Bring in what a later layer will probably ask for, beside this layer's compute."""
        prefetcher = self._prefetcher
        if prefetcher is None:
            return
        prefetcher.observe(layer.layer_idx, ids)
        index = prefetcher.target_of(layer.layer_idx)
        if index is None:
            return
        target = self._layers[index]
        self._is_torn = True
        target.is_stale |= prefetcher.predict(
            layer.layer_idx,
            ids,
            guesses,
            store=target.store,
            buffers=target.buffers,
            table=target.table,
            now=self._now,
        )
        self._is_torn = False

    # Wide steps

    def most_tokens_at_once(self, top_k: int) -> int:
        """Tokens of a step whose experts fit the slots of every layer, whatever they are.

        A step of so many tokens may be captured in a graph that does not know its routing.
        """
        return min(
            _most_tokens(layer.store.num_experts, layer.buffers.num_slots, top_k)
            for layer in self.layers
        )

    def captures(self, num_tokens: int, top_k: int) -> bool:
        """Whether a decode step of so many tokens may be captured, whatever its routing is."""
        return num_tokens <= self.most_tokens_at_once(top_k)

    def fits(
        self, layer_idx: int, topk_ids: torch.Tensor, *, padding: torch.Tensor | None = None
    ) -> bool:
        """Whether the demanded experts fit the slots. Reads the ids only if they might not; the
        call that follows for the same ids, with the same `padding`, does not read them again."""
        layer = self._layers[layer_idx]
        num_slots = layer.buffers.num_slots
        if min(topk_ids.numel(), layer.store.num_experts) <= num_slots:
            return True
        demand = without_padding(topk_ids, padding)
        host_ids, _ = self._reader.receive(self._reader.send(demand, None))
        self._peeked = (layer_idx, topk_ids, host_ids)
        demanded = self._as_local(layer, host_ids).ravel()
        return np.unique(demanded[demanded >= 0]).size <= num_slots

    def token_waves(
        self, layer_idx: int, topk_ids: torch.Tensor, guesses: Guesses | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Split a wide step by token: yields a run of tokens and its slot ids, [run, K].

        Each run must be computed before the next one is asked for: it may evict the experts of
        the one before. An expert that two runs need may be copied twice.
        """
        layer = self._layers[layer_idx]
        host_ids = self._read(layer, topk_ids, guesses)
        if self._prefetcher is not None:
            self._prefetcher.observe(layer_idx, host_ids)
        for run in cut_by_token(host_ids, layer.buffers.num_slots):
            self._fetch(layer, host_ids[run].ravel())
            yield run, self._renamed(layer, topk_ids[run])

    def expert_waves(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: Guesses | None = None,
        *,
        whole: bool = False,
    ) -> Iterator[ExpertWave]:
        """Split a wide step by expert: what is in slots first, then the absent as they arrive.

        Every copy that has a place is issued before the first wave. Each absent expert is copied
        once. What is resident stays so: a prompt reads every expert once, like a scan, and must not
        push out what decoding uses. Only empty slots take newcomers, the most demanded first; in a
        step that decodes, so do the slots of experts that it does not demand. The others go through
        the staging ring, one half filling while the other is computed; behind the last come the
        first of the next layer's, if nearly all are demanded anyway.
        Each wave must be computed, on the compute stream, before the next one is asked for.

        Args:
            whole: the kernel computes blocks that are not the wave's as well, so the maps name a
                row for every expert.
        """
        layer = self._layers[layer_idx]
        plan = self._plan_wide(layer, topk_ids, guesses)
        ring = self._staging_of(layer)
        staged, in_vain, wasted = ring.take(layer_idx, plan.streamed)
        layer.ahead_in_vain += wasted
        for ticket in in_vain:
            self._copier.wait(ticket)  # WAW: before their half is written again

        def start(wave: StagedWave) -> None:
            # WAR: the copy waits for what the compute stream has been given so far, which includes
            # the last reader of this half of the ring (two waves ago).
            if wave.copies is None:
                half = ring.halves[wave.half]
                wave.copies = self._copy(layer, wave.experts, half, wave.rows)

        for wave in staged[:2]:
            start(wave)
        # Residents and newcomers are one wave: with one of their own for the residents, steps that
        # decode took as long or longer (benchmarks/README.md), though their copies waited less.
        in_slots = plan.placed.size > 0 or not staged
        num_waves = in_slots + len(staged)
        layer.waves += num_waves
        places = [(wave.experts, wave.rows) for wave in staged]
        if in_slots:
            places.insert(0, (plan.placed, plan.placed_slots))
        maps, wave_of = self._wave_maps(layer, places, topk_ids, whole=whole)

        if plan.into_slots is not None:
            with self._stalls.waiting(layer_idx):
                self._copier.wait(plan.into_slots)  # RAW: the wave reads these slots
        if plan.into_slots is not None or layer.is_stale:
            self._publish(layer)
        self._is_torn = False
        if in_slots:
            yield ExpertWave(layer.buffers, maps[0], wave_of == 0, is_last=not staged)
        for index, wave in enumerate(staged):
            assert wave.copies is not None
            with self._stalls.waiting(layer_idx):
                self._copier.wait(wave.copies)  # RAW: the wave reads this half of the ring
            number = in_slots + index
            half = ring.halves[wave.half]
            yield ExpertWave(half, maps[number], wave_of == number, number + 1 == num_waves)
            if index + 2 < len(staged):
                start(staged[index + 2])
            elif plan.is_broad:
                self._read_ahead(layer_idx + 1, ring, wave.half)

    def _wave_maps(
        self,
        layer: LayerCache,
        waves: Sequence[tuple[IntArray, IntArray]],
        topk_ids: torch.Tensor,
        *,
        whole: bool,
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The row of each expert in each wave, [E] int32, and the wave of each assignment, [T, K]
        int32, on the device: one transfer that nothing waits for."""
        # Every row starts on 16 bytes, and has a last entry of -1, which an id of -1 reads.
        rows = np.full((len(waves) + 1, layer.store.num_experts // 4 * 4 + 4), -1, dtype=np.int32)
        for number, (experts, places) in enumerate(waves):
            if whole:
                rows[number] = places[0] if places.size else 0
            rows[number, experts] = places
            rows[-1, experts] = number
        num_ids = layer.store.num_experts
        if layer.local_of is not None:
            num_ids = layer.local_of.size
            rows = rows[:, np.pad(layer.local_of, (0, 4 - num_ids % 4), constant_values=-1)]
        sent = self._sender.send(rows)
        return [row[:num_ids] for row in sent[:-1]], sent[-1][topk_ids.long()]

    def _read_ahead(self, layer_idx: int, ring: StagingRing, half: int) -> None:
        """Fill a half, which no wave of this layer uses any more, with absent experts of the next.

        Otherwise the link would idle from a layer's last copy until the next one's router is done.
        """
        layer = self._layers.get(layer_idx)
        if layer is None or self._staging_of(layer) is not ring:
            return
        experts = np.setdiff1d(self._absent_ahead(layer), ring.ahead_of(layer_idx))[: ring.rows]
        if experts.size:
            rows = np.arange(experts.size, dtype=np.int32)
            copies = self._copy(layer, experts, ring.halves[half], rows)
            ring.put_ahead(layer_idx, half, experts, copies)

    def _absent_ahead(self, layer: LayerCache) -> IntArray:
        """[n] experts that the layer will have to stream, as far as is known before its step;
        none while it has empty slots, for they may go there."""
        return absent_when_full(layer.table.mapping, layer.table.owner)

    def _plan_wide(
        self, layer: LayerCache, topk_ids: torch.Tensor, guesses: Guesses | None
    ) -> WidePlan:
        """Plan what has room among the slots (`SlotTable.plan_wide`), and start its copies."""
        self._settle()
        host_ids = self._read(layer, topk_ids, guesses)
        self._is_torn = True
        if self._prefetcher is not None:
            layer.is_stale |= self._prefetcher.land(layer.layer_idx, layer.table, self._now)
        try:
            plan, streamed = layer.table.plan_wide(host_ids, self._now, evict=self._decodes)
        except ValueError:
            self._is_torn = False  # nothing has changed
            raise
        # WAW: what the prefetcher still writes into slots of this plan comes before its copies.
        if self._prefetcher is not None:
            self._prefetcher.join(layer.layer_idx, plan)
        into_slots: CopyTicket | None = None
        if plan.loads.size:
            into_slots = self._copy(layer, plan.loads, layer.buffers, plan.load_slots)
        if self._prefetcher is not None:
            self._prefetcher.observe(layer.layer_idx, host_ids)
        self._count_step(layer)
        if plan.loads.size + streamed.size:
            self._count_miss()
        layer.is_stale |= bool(plan.late.size)
        # The late have been waited for.
        placed = np.concatenate([plan.hits, plan.late, plan.loads])
        return WidePlan(
            placed=placed,
            placed_slots=layer.table.mapping[placed],
            into_slots=into_slots,
            streamed=streamed,
            is_broad=is_broad(placed.size + streamed.size, layer.store.num_experts),
        )

    # Looking at it

    def mapping(self, layer: LayerCache) -> torch.Tensor:
        """[E] int32 on the device: the slot of each expert as kernels see it, -1 when absent."""
        return layer.mapping[:-1]

    def mapping_of(self, layer_idx: int) -> torch.Tensor:
        """`mapping` of a layer by its number; for kernels, so that what is owed may wait."""
        return self.mapping(self._layers[layer_idx])

    def planned_mapping(self, layer: LayerCache) -> IntArray:
        """[E] int32: the mapping as it should be, global ids; for audits."""
        slots = layer.table.mapping
        if layer.local_of is None:
            return slots
        return np.where(layer.local_of >= 0, slots[layer.local_of], -1).astype(np.int32)

    def layer(self, layer_idx: int) -> LayerCache:
        """One layer's cache; for tests and audits."""
        self._settle()
        return self._layers[layer_idx]

    def _layer(self, layer_idx: int) -> LayerCache:
        if self._closed:
            raise RuntimeError(_CLOSED)
        return self._layers[layer_idx]

    @property
    def layers(self) -> Sequence[LayerCache]:
        """All layers, in order of their index."""
        return [self._layers[index] for index in sorted(self._layers)]

    def slot_buffers(self, layer_idx: int) -> SlotBuffers:
        """The slots of a layer."""
        return self._layers[layer_idx].buffers

    def stats(self) -> RuntimeStats:
        """The counters as they are now. Waits for the device."""
        self._settle()
        self._stalls.settle()
        return self.stats_from([tensor.cpu() for tensor in self.counter_tensors()])

    def counter_tensors(self) -> Sequence[torch.Tensor]:
        """The counters that are on the device: none, the host counts."""
        return ()

    def stats_from(self, copies: Sequence[torch.Tensor]) -> RuntimeStats:  # noqa: ARG002
        """The counters, given copies on the host of `counter_tensors`. Waits for nothing, and may
        be called by another thread than the one that steps."""
        return self._stats_with([self._stats_of(layer) for layer in self.layers])

    @property
    def _predictor(self) -> str:
        return "none" if self._prefetcher is None else self._prefetcher.predictor.name

    def _stats_with(self, of_layers: Sequence[LayerStats]) -> RuntimeStats:
        layers = self.layers
        return RuntimeStats(
            mode=self._mode,
            policy=self._policy,
            predictor=self._predictor,
            slot_bytes=sum(layer.buffers.nbytes for layer in layers),
            staging_bytes=sum(h.nbytes for ring in self._staging.values() for h in ring.halves),
            host_bytes=self._host_store.total_bytes,
            pinned_bytes=self._host_store.pinned_bytes,
            steps_with_misses=self._steps_with_misses,
            host_calls=self.host_calls,
            layers=of_layers,
        )

    def reset(self) -> None:
        """Empty every slot and restart the counters; what the device still reads stays in place."""
        self._owed = None
        self._copier.synchronize()
        if self._prefetcher is not None:
            self._prefetcher.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the staged rows are written below
        if self._polled is not None:
            self._polled.clear()
        for layer in self._layers.values():
            layer.table.clear()
            self._publish(layer)
        self._is_torn = False
        self._now = 1
        self._restart_counters()

    def _restart_counters(self) -> None:
        for layer in self._layers.values():
            layer.table.restart_counters()
            layer.experts_read = layer.steps = layer.waves = layer.ahead_in_vain = 0
            layer.last_step = -1
        self._missed_in = self._steps_with_misses = 0
        self._stalls.clear()
        if self._controller is not None:
            self._controller.restarted()
        self.host_calls = 0

    def preload(self, top_k: int) -> int:
        """Bring in all experts of the layers that have a slot for each: no step of theirs misses.
        Counts nothing. After `reset`, before the first step. Returns how many layers those are."""
        whole = [
            layer for layer in self.layers if layer.buffers.num_slots == layer.store.num_experts
        ]
        for layer in whole:
            self._bring_all_in(layer, top_k)
        self._restart_counters()
        return len(whole)

    def _bring_all_in(self, layer: LayerCache, top_k: int) -> None:  # noqa: ARG002 - for `full`
        self._fetch(layer, np.arange(layer.store.num_experts))

    def close(self) -> None:
        """Drain the copies and free what the scheduler holds. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._owed = None
        # Copies read the host store and write the slots, so they end first.
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._copier.close()
        self._layers.clear()
        self._staging.clear()
        self._host_store.close()

    # Parts

    def _stats_of(self, layer: LayerCache) -> LayerStats:
        counters = layer.table.counters
        expert_bytes = layer.store.layout.payload_bytes
        prefetcher, index = self._prefetcher, layer.layer_idx
        return LayerStats(
            layer_idx=layer.layer_idx,
            layer_name=layer.layer_name,
            num_experts=layer.store.num_experts,
            num_slots=layer.buffers.num_slots,
            steps=layer.steps,
            hits=counters.hits,
            misses=counters.misses,
            evictions=counters.evictions,
            late=counters.late,
            prefetched=counters.prefetched,
            prefetch_used=counters.prefetch_used,
            prefetch_at_once=0 if prefetcher is None else prefetcher.at_once[index],
            prefetch_dropped=counters.prefetch_dropped,
            waves=layer.waves,
            bytes_copied=layer.experts_read * expert_bytes,
            bytes_prefetched=(
                0 if prefetcher is None else prefetcher.experts_read[index] * expert_bytes
            ),
            bytes_useful=counters.prefetch_used * expert_bytes,
            bytes_late=counters.late * expert_bytes,
            bytes_wasted=counters.prefetch_dropped * expert_bytes,
            stall_seconds=self._stalls.seconds.get(index, 0.0),
            link_free_seconds=0.0 if prefetcher is None else prefetcher.free_seconds[index],
            prefetch_budget_bytes=prefetcher.budgets[index] if prefetcher and index else 0,
        )

    def _read(self, layer: LayerCache, topk_ids: torch.Tensor, guesses: Guesses | None) -> IntArray:
        """[T, K] local ids on the host, and into the trace if one is recorded, with the guesses:
        nothing is predicted from a wide step."""
        wanted = guesses if isinstance(self.recorder, TraceRecorder) else None
        known = self._take_peeked(layer, topk_ids) if wanted is None else None
        if known is not None:
            return self._received(layer, known, None)[0]
        return self._receive(
            layer, self._reader.send(topk_ids, None if wanted is None else wanted())
        )[0]

    def _take_peeked(self, layer: LayerCache, topk_ids: torch.Tensor) -> IntArray | None:
        """[T, K] the ids as `fits` has just read them; None if it has not."""
        peeked, self._peeked = self._peeked, None
        if peeked is None or peeked[0] != layer.layer_idx or peeked[1] is not topk_ids:
            return None
        return peeked[2]

    def _receive(self, layer: LayerCache, sent: Sent) -> tuple[IntArray, IntArray | None]:
        return self._received(layer, *self._reader.receive(sent))

    def _received(
        self, layer: LayerCache, ids: IntArray, host_guesses: IntArray | None
    ) -> tuple[IntArray, IntArray | None]:
        if isinstance(self.recorder, TraceRecorder):
            self._settle()  # which records the layer before
            self.recorder.record(layer.layer_idx, ids, host_guesses)
        return self._as_local(layer, ids), host_guesses

    def _as_local(self, layer: LayerCache, ids: IntArray) -> IntArray:
        if layer.local_of is None:
            return ids
        return np.where(ids >= 0, layer.local_of[ids], -1).astype(np.int32, copy=False)

    def _renamed(self, layer: LayerCache, topk_ids: torch.Tensor) -> torch.Tensor:
        return layer.mapping[topk_ids.long()].to(topk_ids.dtype)

    def _copy(
        self, layer: LayerCache, experts: IntArray, buffers: SlotBuffers, rows: IntArray
    ) -> CopyTicket:
        layer.experts_read += experts.size
        return self._copier.submit(
            [
                CopyJob(layer.store, expert, buffers, row)
                for expert, row in zip(experts.tolist(), rows.tolist(), strict=True)
            ]
        )

    def _publish(self, layer: LayerCache) -> None:
        """Write the layer's mapping to the device, after the bytes on the compute stream.

        The staged row may still be read by an earlier publication of this layer, but only until
        the host has seen ids that were computed after it: `_read` waits for those first.
        """
        layer.is_stale = False
        layer.mapping_staged[:-1].numpy()[:] = self.planned_mapping(layer)
        layer.mapping.copy_(layer.mapping_staged, non_blocking=True)

    def _staging_of(self, layer: LayerCache) -> StagingRing:
        """The staging ring for this layer's kind of record."""
        key = tuple((f.name, f.shape, f.dtype) for f in layer.store.layout.fields)
        if key not in self._staging:
            half = rows_of_half(
                self._staging_slots,
                expert_bytes=layer.store.layout.payload_bytes,
                num_experts=layer.store.num_experts,
            )
            # The CPU device splits by token and never stages.
            rows = half if self._device.type == "cuda" else 1
            halves = [SlotBuffers(rows, layer.store.layout, self._device) for _ in range(2)]
            self._staging[key] = StagingRing(halves)
        return self._staging[key]

    def _count_step(self, layer: LayerCache) -> None:
        if layer.last_step != self._now:
            layer.last_step = self._now
            layer.steps += 1

    def _count_miss(self) -> None:
        if self._missed_in != self._now:
            self._missed_in = self._now
            self._steps_with_misses += 1


_CLOSED = "the expert cache is closed; graphs that were captured with it cannot be replayed"


TORN = (
    "an earlier step was cut short while it brought experts in, so slots may hold anything; empty "
    'the cache (collective_rpc("prefetch_reset")), or start again'
)


def _at_once(action: Callable[[], None]) -> None:
    action()


def _most_tokens(num_experts: int, num_slots: int, top_k: int) -> int:
    """Largest T with min(T * top_k, num_experts) <= num_slots."""
    return sys.maxsize if num_slots >= num_experts else num_slots // top_k


def is_broad(num_demanded: int, num_experts: int) -> bool:
    """Whether a step demands so many of a layer's experts that it will of the next layer's, too."""
    return num_demanded >= 0.9 * num_experts


def without_padding(topk_ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """[T, K] ids with -1 in the rows that `padding` (see `Scheduler.fetch`) marks."""
    if padding is None:
        return topk_ids
    is_padding = padding if padding.dtype == torch.bool else padding < 0
    return topk_ids.masked_fill(is_padding.unsqueeze(1), -1)


def _checked_map(expert_map: torch.Tensor, num_local: int) -> IntArray:
    local_of: IntArray = expert_map.cpu().numpy().astype(np.int32)
    owned = np.sort(local_of[local_of >= 0])
    if local_of.ndim != 1 or not np.array_equal(owned, np.arange(num_local)):
        raise ValueError(
            f"expert_map must be [global experts] and name each of the {num_local} local experts "
            f"once, -1 elsewhere; got shape {tuple(local_of.shape)} with local ids {owned.tolist()}"
        )
    return local_of
