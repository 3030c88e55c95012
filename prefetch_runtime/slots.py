"""Which expert of one layer sits in which slot. Decides; moves no byte and knows no device.

Shapes: E = experts of the layer, S = slots. An expert is resident (mapped, readable), in flight
(a slot is reserved and being filled) or absent. The kernels in `graphs` make the same decisions on
the device; this table is their reference.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .policies import (
    EMPTY_SCORE,
    REBASE_SCORE,
    EvictionPolicy,
    IdArray,
    IntArray,
    rebase_scores,
)

_PROTECTED = int(np.iinfo(np.int32).max)  # above every score: never chosen
_LAST_RESORT = _PROTECTED - 1  # chosen after every resident expert

_FEW = 64  # up to here, a Python set is faster than marking an array
_NONE = np.empty(0, dtype=np.intp)
_NONE.flags.writeable = False


class NotEnoughSlots(RuntimeError):
    """One step needs more experts of a layer at once than the layer has slots."""

    def __init__(self, needed: int, num_slots: int, layer_idx: int) -> None:
        super().__init__(
            f"layer {layer_idx} needs {needed} experts at once but has {num_slots} slots; "
            f"set slots_per_layer (--moe-expert-cache-size) to at least {needed}, "
            f"or give it fewer tokens at once"
        )
        self.needed = needed
        self.num_slots = num_slots
        self.layer_idx = layer_idx


class SlotPlan(NamedTuple):
    """What one demand needs, all intp. `hits`, `loads` and `late` are disjoint and ascending."""

    hits: IdArray
    """Demanded experts that are resident."""
    loads: IdArray
    """Demanded experts to bring in; mapped already, so their bytes must come before any reader."""
    load_slots: IdArray
    """The slot of each load."""
    evicted: IdArray
    """The expert that each load displaces, -1 where the slot was empty."""
    late: IdArray
    """Demanded experts in flight: mapped now, the caller waits for the copy that is under way."""
    late_slots: IdArray
    """The slot of each late expert."""
    dropped: IdArray
    """Undemanded experts in flight that lost their slot to a load, because no other was left.

    They are part of `evicted`. The load's copy must be ordered after the one under way.
    """


class WideSlotPlan(NamedTuple):
    """What a demand does that may be wider than the slots."""

    plan: SlotPlan
    """Of those that have a slot."""
    streamed: IdArray
    """The others, most often named first."""


@dataclass(slots=True)
class SlotCounters:
    """Unique experts per demand, not assignments. hits + late + misses = demanded experts.

    prefetched = prefetch_used + late + prefetch_dropped + those still in flight or still unused.
    """

    hits: int = 0
    """Demanded while resident."""
    late: int = 0
    """Demanded while in flight."""
    misses: int = 0
    """Demanded while absent."""
    evictions: int = 0
    """Resident experts that lost their slot."""
    prefetched: int = 0
    """Reserved before any demand."""
    prefetch_used: int = 0
    """Prefetched, complete at its first demand (each counted once; also one of `hits`)."""
    prefetch_dropped: int = 0
    """Prefetched and cancelled, or evicted before any demand."""

    @property
    def demanded(self) -> int:
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        """Share of demanded experts that were resident; 0.0 before any demand."""
        return self.hits / self.demanded if self.demanded else 0.0


class SlotSnapshot(NamedTuple):
    """Copies of a table's state; later operations do not change them."""

    mapping: IdArray
    owner: IdArray
    score: IntArray
    in_flight: npt.NDArray[np.bool_]
    counters: SlotCounters


class SlotTable:
    """The slots of one layer.

    `mapping` [E] intp: slot of each resident expert, -1 for the others.
    `owner` [S] intp: expert resident or in flight in each slot, -1 when empty.
    `score` [S] int32: the policy's score, EMPTY_SCORE unless an expert is resident.
    `counters`: what happened since construction, `clear()` or `restart_counters()`.
    Read them freely; only the methods change them. `now` is the step clock of the whole model: at
    least 1, never decreasing. Every method checks its arguments before it changes anything.
    """

    def __init__(
        self, num_experts: int, num_slots: int, policy: EvictionPolicy, layer_idx: int = 0
    ) -> None:
        """Raises ValueError unless 1 <= num_slots <= num_experts."""
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        if not 1 <= num_slots <= num_experts:
            raise ValueError(
                f"num_slots must be between 1 and the layer's {num_experts} experts, "
                f"got {num_slots}"
            )
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.policy = policy
        self.layer_idx = layer_idx
        self._row: IdArray = np.empty(num_experts + 1, dtype=np.intp)  # the last one takes -1
        self.mapping: IdArray = self._row[:-1]
        self.owner: IdArray = np.empty(num_slots, dtype=np.intp)
        self.score: IntArray = np.empty(num_slots, dtype=np.int32)
        self._reserved: IdArray = np.empty(num_experts, dtype=np.intp)  # slot while in flight
        self._in_flight = np.empty(num_slots, dtype=np.bool_)
        self._unused = np.empty(num_slots, dtype=np.bool_)  # prefetched, not demanded yet
        self._demanded_at = np.empty(num_slots, dtype=np.int64)
        self._marks = np.zeros(num_experts + 1, dtype=np.bool_)  # scratch; the last one takes -1
        self.clear()

    def clear(self) -> None:
        """Empty every slot, forget what is in flight, restart the clock and the counters."""
        self._row.fill(-1)
        self.owner.fill(-1)
        self.score.fill(EMPTY_SCORE)
        self._reserved.fill(-1)
        self._in_flight.fill(False)
        self._unused.fill(False)
        self._demanded_at.fill(0)
        self._num_in_flight = 0
        self._num_unused = 0
        self._last_demand = 0  # latest entry of _demanded_at
        self._now = 1
        self._clock_origin = 0
        self.policy.reset(self.num_experts)
        self.restart_counters()

    def restart_counters(self) -> None:
        """Count from zero; nothing else changes."""
        self.counters = SlotCounters()

    def plan(self, expert_ids: npt.ArrayLike, now: int) -> SlotPlan:
        """Give every demanded expert a slot, whole set at once.

        `expert_ids`: integers of any shape, duplicates allowed, -1 ignored. Absent experts, in
        ascending order, take the slots with the lowest (score, slot), empty ones first; a slot of
        this plan is never a victim. The plan's arrays stay valid. Raises ValueError for ids out of
        range and NotEnoughSlots for more unique experts than slots, the table unchanged.
        """
        demanded = self._unique(expert_ids)
        if demanded.size > self.num_slots:
            raise NotEnoughSlots(demanded.size, self.num_slots, self.layer_idx)
        clock = self._advance(now)
        slots = self.mapping[demanded]
        resident = slots >= 0
        hit_slots = slots[resident]
        hits = demanded[resident]
        if hits.size == demanded.size:
            self._use(hits, hit_slots, clock, now)
            return SlotPlan(hits, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)

        loads = demanded[~resident]
        self.policy.miss(loads, clock)
        late = late_slots = _NONE
        if self._num_in_flight:
            reserved = self._reserved[loads]
            arriving = reserved >= 0
            if True in arriving.tolist():
                late, late_slots = loads[arriving], reserved[arriving]
                loads = loads[~arriving]
        self._use(hits, hit_slots, clock, now)
        if not loads.size:  # all that was absent is in flight
            self._land(late, late_slots, clock, now)
            return SlotPlan(hits, _NONE, _NONE, _NONE, late, late_slots, _NONE)

        # Victims are chosen before anything of this plan is placed, with its own slots protected.
        key = self.policy.order(self.score, self.owner, clock)
        if self._num_in_flight:
            key[self._in_flight] = _LAST_RESORT
            if late.size:
                key[late_slots] = _PROTECTED
        key[hit_slots] = _PROTECTED
        load_slots = key.argsort(kind="stable")[: loads.size]

        if late.size:
            self._land(late, late_slots, clock, now)
        evicted = self.owner[load_slots]
        dropped = _NONE
        if self._num_in_flight:
            stolen = self._in_flight[load_slots]
            if True in stolen.tolist():
                dropped = evicted[stolen]
                self._end_flight(dropped, load_slots[stolen])
                self.counters.prefetch_dropped += dropped.size
        self._evict(load_slots, evicted, num_in_flight=dropped.size)
        self._place(loads, load_slots, clock)
        self._mark_demanded(load_slots, now)
        self.counters.misses += loads.size
        return SlotPlan(hits, loads, load_slots, evicted, late, late_slots, dropped)

    def holds(self, expert_ids: IntArray) -> bool:
        """Whether every demanded expert is resident, so that `plan` would move nothing. Changes
        nothing. `expert_ids`: as `plan` takes them, in an array; what is out of range is not held.
        """
        ids = expert_ids.ravel()
        if not ids.size:
            return True
        if np.maximum.reduce(ids) >= self.num_experts or np.minimum.reduce(ids) < -1:
            return False
        is_absent = self._row[ids] < 0
        return not is_absent.any() or not (is_absent & (ids >= 0)).any()

    def touch(self, expert_ids: npt.ArrayLike, now: int) -> tuple[IdArray, IdArray]:
        """Mark the residents among the demanded experts as used, and bring nothing in.

        Returns (hits, absent), both ascending and unique; `absent` counts as missed and includes
        what is in flight, which stays so. Any number of experts. For wide steps that are split.
        """
        demanded = self._unique(expert_ids)
        clock = self._advance(now)
        slots = self.mapping[demanded]
        resident = slots >= 0
        hits = demanded[resident]
        absent = demanded[~resident]
        self.policy.miss(absent, clock)
        self._use(hits, slots[resident], clock, now)
        self.counters.misses += absent.size
        return hits, absent

    def plan_wide(self, expert_ids: npt.ArrayLike, now: int, *, evict: bool) -> WideSlotPlan:
        """Plan what has room of a demand that may be wider than the slots; the rest streams past.

        The demanded residents stay. The absent, most often named first, take the empty slots and,
        with `evict`, those of experts that this demand does not name. A prompt reads its experts
        once, like a scan, and shall evict nothing; a wide decode batch will ask for most of its
        experts again. Otherwise as `plan`, but for any number of experts.
        """
        ids = _integers(expert_ids).ravel()
        if ids.size:
            self._check_range(ids.min(), ids.max())
        tokens_of = np.bincount(ids[ids >= 0], minlength=self.num_experts)
        planned, streamed = split_wide(tokens_of, self.mapping, self.owner, evict=evict)
        plan = self.plan(planned, now)
        if streamed.size:
            self.touch(streamed, now)  # heard by the policy, counted as missed
        return WideSlotPlan(plan, streamed)

    def reserve(self, forecast: npt.ArrayLike, now: int, limit: int) -> tuple[IdArray, IdArray]:
        """Reserve slots for at most `limit` absent experts, in forecast order (best first).

        Returns (experts, their slots). Victims come by lowest (score, slot); slots in flight,
        demanded at `now`, or holding an expert of the forecast itself are never taken. A victim is
        unmapped at once; the newcomer is mapped by `commit()`. Duplicates, -1, residents and what
        is in flight already are skipped; so is the rest when no slot can be taken.
        """
        if limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        named = self._in_order(forecast)
        clock = self._advance(now)
        held = self.mapping[named]
        absent = held < 0
        if self._num_in_flight:
            absent &= self._reserved[named] < 0
        wanted = named[absent][:limit]
        if wanted.size == 0:
            return wanted, _NONE
        key = self.policy.order(self.score, self.owner, clock)
        key[held[held >= 0]] = _PROTECTED
        if self._num_in_flight:
            key[self._in_flight] = _PROTECTED
        if self._last_demand == now:
            key[self._demanded_at == now] = _PROTECTED
        slots = key.argsort(kind="stable")[: wanted.size]
        if _PROTECTED in key[slots].tolist():
            slots = slots[key[slots] != _PROTECTED]
        taken = wanted[: slots.size]
        self._evict(slots, self.owner[slots])
        self.score[slots] = EMPTY_SCORE
        self.owner[slots] = taken
        self._reserved[taken] = slots
        self._in_flight[slots] = True
        self._num_in_flight += taken.size
        self.counters.prefetched += taken.size
        return taken, slots

    def commit(self, expert_ids: npt.ArrayLike, now: int) -> None:
        """Map experts whose prefetch is complete. Raises ValueError if one is not in flight."""
        arrived, slots = self._arriving(expert_ids)
        clock = self._advance(now)
        self._end_flight(arrived, slots)
        self._place(arrived, slots, clock)
        self._unused[slots] = True
        self._num_unused += arrived.size

    def cancel(self, expert_ids: npt.ArrayLike) -> None:
        """Give up prefetches; their slots become empty. ValueError if one is not in flight."""
        cancelled, slots = self._arriving(expert_ids)
        self._end_flight(cancelled, slots)
        self.owner[slots] = -1
        self.counters.prefetch_dropped += cancelled.size

    def rebase(self, steps: int) -> None:
        """Move the policy's clock back by `steps`, and every score with it; the order stays.

        The table does it by itself before scores could overflow, so it runs for ever. It is public
        for tests that compare it with a device table, whose clock the host moves back.
        """
        if steps < 0:
            raise ValueError(f"steps must not be negative, got {steps}")
        units = steps * self.policy.units_per_step
        self.score[:] = rebase_scores(self.score, units)
        self.policy.rebase(units)
        self._clock_origin += steps

    def snapshot(self) -> SlotSnapshot:
        """Copies of the state as it is now."""
        return SlotSnapshot(
            self.mapping.copy(),
            self.owner.copy(),
            self.score.copy(),
            self._in_flight.copy(),
            replace(self.counters),
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if the table disagrees with itself. For tests and idle time."""
        resident = {int(s): e for e, s in enumerate(self.mapping) if s >= 0}
        arriving = {int(s): e for e, s in enumerate(self._reserved) if s >= 0}
        owners = {s: int(e) for s, e in enumerate(self.owner) if e >= 0}
        counters = self.counters
        prefetched = counters.prefetch_used + counters.late + counters.prefetch_dropped
        broken = {
            "two experts are mapped to one slot": len(resident) != (self.mapping >= 0).sum(),
            "two experts are in flight to one slot": len(arriving) != (self._reserved >= 0).sum(),
            "a slot is resident and in flight": bool(resident.keys() & arriving.keys()),
            "owner disagrees with mapping": owners != {**resident, **arriving},
            "in_flight disagrees": set(np.flatnonzero(self._in_flight)) != set(arriving),
            "in-flight count is off": self._num_in_flight != len(arriving),
            "an unused prefetch is not resident": not set(np.flatnonzero(self._unused))
            <= set(resident),
            "unused count is off": self._num_unused != self._unused.sum(),
            "scores disagree": set(np.flatnonzero(self.score != EMPTY_SCORE)) != set(resident),
            "prefetch counters do not add up": counters.prefetched
            != prefetched + self._num_in_flight + self._num_unused,
            "scratch is dirty": bool(self._marks.any()),
        }
        for what, is_broken in broken.items():
            if is_broken:
                raise RuntimeError(
                    f"slot table of layer {self.layer_idx}: {what} (mapping {self.mapping}, "
                    f"owner {self.owner}, score {self.score}, counters {counters})"
                )

    def _unique(self, expert_ids: npt.ArrayLike) -> IdArray:
        """Ascending ids without duplicates and -1."""
        few = _as_list(expert_ids)
        if few is not None:
            return self._sorted(few)
        ids = _integers(expert_ids)
        if ids.size > _FEW:
            self._check_range(np.minimum.reduce(ids), np.maximum.reduce(ids))
            marks = self._marks
            marks[ids] = True
            unique: IdArray = marks[:-1].nonzero()[0]
            marks[ids] = False
            return unique
        return self._sorted(ids.tolist())

    def _sorted(self, expert_ids: list[int]) -> IdArray:
        values = sorted(set(expert_ids))
        if not values:
            return _NONE
        self._check_range(values[0], values[-1])
        return np.array(values[1:] if values[0] < 0 else values, dtype=np.intp)

    def _in_order(self, expert_ids: npt.ArrayLike) -> IdArray:
        """Ids without duplicates and -1, in the order of their first mention."""
        few = _as_list(expert_ids)
        values = dict.fromkeys(_integers(expert_ids).tolist() if few is None else few)
        if values:
            self._check_range(min(values), max(values))
        values.pop(-1, None)
        return np.array(list(values), dtype=np.intp)

    def _check_range(self, low: int, high: int) -> None:
        if low < -1 or high >= self.num_experts:
            raise ValueError(
                f"expert id {low if low < -1 else high} is out of range: layer {self.layer_idx} "
                f"has experts 0 to {self.num_experts - 1} (-1 marks padding)"
            )

    def _arriving(self, expert_ids: npt.ArrayLike) -> tuple[IdArray, IdArray]:
        """Ascending experts, all in flight, and their slots."""
        ids = self._unique(expert_ids)
        slots = self._reserved[ids]
        if np.minimum.reduce(slots, initial=0) < 0:
            strangers = ids[slots < 0].tolist()
            raise ValueError(f"layer {self.layer_idx}: experts {strangers} are not in flight")
        return ids, slots

    def _advance(self, now: int) -> int:
        """The policy's clock at step `now`."""
        if now < self._now:
            raise ValueError(f"the clock must not run backwards: now={now} after {self._now}")
        self._now = now
        clock = now - self._clock_origin
        if clock * self.policy.units_per_step >= REBASE_SCORE:
            self.rebase(clock - 1)
            clock = 1
        return clock

    def _use(self, hits: IdArray, slots: IdArray, clock: int, now: int) -> None:
        self.score[slots] = self.policy.hit(self.score[slots], hits, clock)
        self._mark_demanded(slots, now)
        self.counters.hits += hits.size
        self.counters.prefetch_used += self._clear_unused(slots)

    def _clear_unused(self, slots: IdArray) -> int:
        """How many of the slots held a prefetch that nothing had demanded; none does now."""
        if not self._num_unused:
            return 0
        count = int(np.count_nonzero(self._unused[slots]))
        if count:
            self._unused[slots] = False
            self._num_unused -= count
        return count

    def _mark_demanded(self, slots: IdArray, now: int) -> None:
        self._demanded_at[slots] = now
        self._last_demand = now

    def _land(self, late: IdArray, slots: IdArray, clock: int, now: int) -> None:
        """Map experts that are demanded while in flight."""
        self._end_flight(late, slots)
        self._place(late, slots, clock)
        self._mark_demanded(slots, now)
        self.counters.late += late.size

    def _end_flight(self, expert_ids: IdArray, slots: IdArray) -> None:
        """Experts and slots are no longer in flight; who owns the slots is the caller's to set."""
        self._in_flight[slots] = False
        self._reserved[expert_ids] = -1
        self._num_in_flight -= expert_ids.size

    def _evict(self, slots: IdArray, owners: IdArray, *, num_in_flight: int = 0) -> None:
        """Unmap the owners of the slots, -1 for an empty one; the rest is the caller's to set.
        Those that were in flight were never resident. Metrics read the counters meanwhile, and take
        one that has gone down for one that started again."""
        self._row[owners] = -1
        self.counters.evictions += owners.size - owners.tolist().count(-1) - num_in_flight
        self.counters.prefetch_dropped += self._clear_unused(slots)

    def _place(self, expert_ids: IdArray, slots: IdArray, clock: int) -> None:
        """Map experts to slots that hold nothing resident."""
        self.mapping[expert_ids] = slots
        self.owner[slots] = expert_ids
        self.score[slots] = self.policy.insert(expert_ids, clock)


def split_wide(
    tokens_of: npt.NDArray[np.integer],
    mapping: npt.NDArray[np.integer],
    owner: npt.NDArray[np.integer],
    *,
    evict: bool,
) -> tuple[IdArray, IdArray]:
    """Which experts of a demand are planned and which stream past, as `plan_wide` says.

    Args:
        tokens_of: [E] how often each expert is named.
        mapping, owner: of the layer's table, before the demand.
    """
    demanded = np.flatnonzero(tokens_of)
    is_resident = mapping[demanded] >= 0
    resident, absent = demanded[is_resident], demanded[~is_resident]
    absent = absent[np.argsort(-tokens_of[absent], kind="stable")]
    taken = resident.size if evict else np.count_nonzero(owner >= 0)
    room = owner.size - int(taken)
    return np.concatenate([resident, absent[:room]]), absent[room:]


def absent_when_full(mapping: npt.NDArray[np.integer], owner: npt.NDArray[np.integer]) -> IdArray:
    """Experts without a slot, or none while a slot is empty, for they may go there."""
    if np.any(owner < 0):
        return _NONE
    return np.flatnonzero(mapping < 0)


def _as_list(expert_ids: npt.ArrayLike) -> list[int] | None:
    """A list of few Python integers as it is: it needs no array to be read. None for all else."""
    if isinstance(expert_ids, list) and len(expert_ids) <= _FEW:
        return expert_ids if {*map(type, expert_ids)} == {int} else None
    return None


def _integers(expert_ids: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """Ids in one row; ValueError for what is not integers."""
    ids = np.asarray(expert_ids)
    if ids.dtype.kind not in "iu":
        if ids.size:
            raise ValueError(f"expert ids must be integers, got {ids.dtype}")
        return _NONE
    return ids.ravel()
