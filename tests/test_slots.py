"""The slot table: against a naive model, and each rule by itself."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefetch_runtime.policies import (
    EMPTY_SCORE,
    LRU,
    POLICY_NAMES,
    REBASE_SCORE,
    EvictionPolicy,
    IntArray,
    create_policy,
)
from prefetch_runtime.slots import NotEnoughSlots, SlotCounters, SlotTable


def _table(num_experts: int = 8, num_slots: int = 4, name: str = "lru") -> SlotTable:
    return SlotTable(num_experts, num_slots, create_policy(name), layer_idx=3)


def _state(table: SlotTable) -> list[object]:
    return [
        table.mapping.tolist(),
        table.owner.tolist(),
        table.score.tolist(),
        table.snapshot().in_flight.tolist(),
        table.snapshot().counters,
    ]


_COUNTERS = [field.name for field in fields(SlotCounters)]


class _NaiveTable:
    """The same rules by dictionaries and loops; scores by the policy, one expert at a time."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.slot_of: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.score: dict[int, int] = {}  # by expert
        self.demanded: dict[int, int] = {}  # step of the last demand, by expert
        self.unused: set[int] = set()
        self.counts = dict.fromkeys(_COUNTERS, 0)

    def _insert(self, expert: int, slot: int, now: int) -> None:
        self.slot_of[expert] = slot
        self.score[expert] = int(self.policy.insert(np.array([expert], np.int32), now)[0])

    def _hit(self, expert: int, now: int) -> None:
        old = np.array([self.score[expert]], np.int32)
        self.score[expert] = int(self.policy.hit(old, np.array([expert], np.int32), now)[0])
        self.demanded[expert] = now
        self.counts["hits"] += 1
        if expert in self.unused:
            self.unused.remove(expert)
            self.counts["prefetch_used"] += 1

    def _empty(self) -> list[int]:
        used = {*self.slot_of.values(), *self.reserved.values()}
        return [slot for slot in range(self.num_slots) if slot not in used]

    def _drop(self, expert: int) -> int:
        """Take a resident's slot away."""
        self.counts["evictions"] += 1
        if expert in self.unused:
            self.unused.remove(expert)
            self.counts["prefetch_dropped"] += 1
        self.demanded.pop(expert, None)
        del self.score[expert]
        return self.slot_of.pop(expert)

    def plan(self, ids: list[int], now: int):
        demanded = sorted({e for e in ids if e >= 0})
        hits = [e for e in demanded if e in self.slot_of]
        late = [e for e in demanded if e in self.reserved]
        loads = [e for e in demanded if e not in self.slot_of and e not in self.reserved]
        for expert in hits:
            self._hit(expert, now)
        late_slots = []
        for expert in late:
            late_slots.append(self.reserved.pop(expert))
            self._insert(expert, late_slots[-1], now)
            self.demanded[expert] = now
            self.counts["late"] += 1
        load_slots, evicted, dropped = [], [], []
        placed = []
        for expert in loads:
            self.counts["misses"] += 1
            taken = {slot for _, slot in placed}
            empty = [slot for slot in self._empty() if slot not in taken]
            victims = sorted(
                (self.score[e], slot, e) for e, slot in self.slot_of.items() if e not in demanded
            )
            if empty:
                slot, victim = empty[0], -1
            elif victims:
                _, slot, victim = victims[0]
                self._drop(victim)
            else:
                slot, victim = min((slot, e) for e, slot in self.reserved.items())
                del self.reserved[victim]
                dropped.append(victim)
                self.counts["prefetch_dropped"] += 1
            placed.append((expert, slot))
            load_slots.append(slot)
            evicted.append(victim)
        for expert, slot in placed:
            self._insert(expert, slot, now)
            self.demanded[expert] = now
        return [hits, loads, load_slots, evicted, late, late_slots, dropped]

    def touch(self, ids: list[int], now: int):
        demanded = sorted({e for e in ids if e >= 0})
        hits = [e for e in demanded if e in self.slot_of]
        for expert in hits:
            self._hit(expert, now)
        absent = [e for e in demanded if e not in self.slot_of]
        self.counts["misses"] += len(absent)
        return [hits, absent]

    def _wanted(self, ids: list[int]) -> list[int]:
        known = {-1, *self.slot_of, *self.reserved}
        return [e for e in dict.fromkeys(ids) if e not in known]

    def plan_wide(self, ids: list[int], now: int, evict: bool):
        demanded = sorted({e for e in ids if e >= 0})
        resident = [e for e in demanded if e in self.slot_of]
        absent = sorted((e for e in demanded if e not in resident), key=lambda e: -ids.count(e))
        room = self.num_slots - len(resident) if evict else len(self._empty())
        plan = self.plan(resident + absent[:room], now)
        self.touch(absent[room:], now)
        return [*plan, absent[room:]]

    def reserve(self, ids: list[int], now: int, limit: int):
        experts, slots = [], []
        for expert in self._wanted(ids)[:limit]:
            victims = sorted(
                (self.score[e], slot, e)
                for e, slot in self.slot_of.items()
                if self.demanded.get(e) != now and e not in ids
            )
            empty = self._empty()
            if not empty and not victims:
                break
            self.reserved[expert] = empty[0] if empty else self._drop(victims[0][2])
            experts.append(expert)
            slots.append(self.reserved[expert])
            self.counts["prefetched"] += 1
        return [experts, slots]

    def commit(self, ids: list[int], now: int) -> None:
        for expert in ids:
            self._insert(expert, self.reserved.pop(expert), now)
            self.unused.add(expert)

    def cancel(self, ids: list[int]) -> None:
        for expert in ids:
            del self.reserved[expert]
            self.counts["prefetch_dropped"] += 1


class SlotTableMachine(RuleBasedStateMachine):
    """Any order of operations gives what the naive table gives."""

    @initialize(
        num_experts=st.integers(1, 9), share=st.floats(0, 1), name=st.sampled_from(POLICY_NAMES)
    )
    def build(self, num_experts: int, share: float, name: str) -> None:
        self.num_experts = num_experts
        self.num_slots = 1 + round(share * (num_experts - 1))
        self.table = SlotTable(num_experts, self.num_slots, create_policy(name))
        self.naive = _NaiveTable(self.num_slots, create_policy(name))
        self.now = 1

    def _ids(self, data: st.DataObject, low: int = -1) -> list[int]:
        return data.draw(st.lists(st.integers(low, self.num_experts - 1), max_size=12), "ids")

    @rule(steps=st.integers(1, 20))
    def time_passes(self, steps: int) -> None:
        self.now += steps

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        ids = self._ids(data)
        if len(set(ids) - {-1}) > self.num_slots:
            before = _state(self.table)
            with pytest.raises(NotEnoughSlots):
                self.table.plan(ids, self.now)
            assert _state(self.table) == before
            return
        plan = self.table.plan(ids, self.now)
        assert [part.tolist() for part in plan] == self.naive.plan(ids, self.now)
        assert all(part.dtype == np.intp for part in plan)
        assert all(self.table.mapping[expert] >= 0 for expert in ids if expert >= 0)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        ids = self._ids(data)
        parts = self.table.touch(ids, self.now)
        assert [part.tolist() for part in parts] == self.naive.touch(ids, self.now)

    @rule(data=st.data(), evict=st.booleans())
    def plan_wide(self, data: st.DataObject, evict: bool) -> None:
        ids = self._ids(data)
        plan, streamed = self.table.plan_wide(ids, self.now, evict=evict)
        found = [part.tolist() for part in (*plan, streamed)]
        assert found == self.naive.plan_wide(ids, self.now, evict)

    @rule(data=st.data(), limit=st.integers(0, 5))
    def reserve(self, data: st.DataObject, limit: int) -> None:
        ids = self._ids(data)
        parts = self.table.reserve(ids, self.now, limit)
        assert [part.tolist() for part in parts] == self.naive.reserve(ids, self.now, limit)

    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        if self.naive.reserved:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.naive.reserved)), unique=True))
            if commit:
                self.table.commit(np.array(ids, dtype=np.int64), self.now)
                self.naive.commit(ids, self.now)
            else:
                self.table.cancel(np.array(ids, dtype=np.int64))
                self.naive.cancel(ids)

    @invariant()
    def agrees_with_the_naive_table(self) -> None:
        if not hasattr(self, "table"):
            return
        table, naive = self.table, self.naive
        table.check_integrity()
        assert {e: s for e, s in enumerate(table.mapping.tolist()) if s >= 0} == naive.slot_of
        owners = {s: e for s, e in enumerate(table.owner.tolist()) if e >= 0}
        assert owners == {s: e for e, s in {**naive.slot_of, **naive.reserved}.items()}
        assert {e: table.score[s] for e, s in naive.slot_of.items()} == naive.score
        assert {name: getattr(table.counters, name) for name in naive.counts} == naive.counts


TestSlotTableMachine = SlotTableMachine.TestCase
TestSlotTableMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("num_experts", "num_slots", "message"),
    [
        (8, 0, "num_slots must be between 1 and the layer's 8 experts, got 0"),
        (8, -1, "got -1"),
        (8, 9, "got 9"),
        (0, 1, "num_experts must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(num_experts: int, num_slots: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _table(num_experts, num_slots)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 8], "expert id 8 is out of range: layer 3 has experts 0 to 7"),
        ([-2, 1], "expert id -2 is out of range"),
        ([2**40], "out of range"),
        (np.array([2**64 - 1], dtype=np.uint64), "out of range"),
        ([0.5], "must be integers, got float64"),
        ([0, 1.0], "must be integers, got float64"),
        ([True], "must be integers, got bool"),
    ],
)
def test_bad_ids_are_refused_and_change_nothing(ids, message: str) -> None:
    table = _table()
    table.plan([1, 2, 3], 5)
    table.reserve([6], 6, 1)
    before = _state(table)
    for call in (
        lambda: table.plan(ids, 6),
        lambda: table.touch(ids, 6),
        lambda: table.plan_wide(ids, 6, evict=True),
        lambda: table.reserve(ids, 6, 2),
        lambda: table.commit(ids, 6),
        lambda: table.cancel(ids),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert _state(table) == before
        table.check_integrity()


def test_too_many_experts_name_the_option_and_change_nothing() -> None:
    table = _table()
    table.plan([0, 1], 1)
    before = _state(table)
    with pytest.raises(
        NotEnoughSlots, match=r"layer 3 needs 5 experts .* 4 slots; set slots_per_l"
    ) as e:
        table.plan([0, 1, 2, 3, 4], 2)
    assert (e.value.needed, e.value.num_slots, e.value.layer_idx) == (5, 4, 3)
    assert _state(table) == before
    table.check_integrity()


@pytest.mark.parametrize(
    ("ids", "is_held"),
    [([], True), ([[0, 2], [2, 0]], True), ([0, -1], True), ([-1], True), ([0, 1], False),
     ([1, -1], False), ([8], False), ([0, -2], False)],
)  # fmt: skip
def test_what_is_held_needs_no_move(ids: list[int], is_held: bool) -> None:
    table = _table()
    table.plan([0, 2], 1)
    before = _state(table)
    assert table.holds(np.array(ids, dtype=np.int32)) is is_held
    assert _state(table) == before


def test_what_is_in_flight_is_not_held() -> None:
    table = _table()
    table.plan([0, 2], 1)
    table.reserve([3], 1, 1)
    assert not table.holds(np.array([0, 3]))


def test_time_must_not_run_backwards() -> None:
    table = _table()
    table.plan([0], 5)
    for call in (
        lambda: table.plan([1], 4),
        lambda: table.touch([1], 4),
        lambda: table.plan_wide([1], 4, evict=True),
        lambda: table.reserve([1], 4, 1),
    ):
        with pytest.raises(ValueError, match="backwards: now=4 after 5"):
            call()
    with pytest.raises(ValueError, match="backwards: now=0 after 1"):
        _table().plan([1], 0)


def test_commit_and_cancel_refuse_what_is_not_in_flight() -> None:
    table = _table()
    table.plan([0], 1)
    table.reserve([5], 1, 1)
    before = _state(table)
    with pytest.raises(ValueError, match=r"layer 3: experts \[0, 2\] are not in flight"):
        table.commit([2, 0, 5], 1)
    with pytest.raises(ValueError, match=r"experts \[7\] are not in flight"):
        table.cancel([7, 5])
    assert _state(table) == before


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_admitted_expert_of_the_running_plan_is_never_evicted(name: str) -> None:
    """A fresh expert has the lowest score there is to a frequency policy; it must still stay."""
    table = _table(num_experts=16, num_slots=4, name=name)
    rng = np.random.default_rng(1)
    for now in range(1, 500):
        ids = rng.choice(16, size=4, replace=False)
        plan = table.plan(ids, now)
        table.check_integrity()
        assert set(table.owner.tolist()) == set(ids.tolist())
        assert len(set(plan.load_slots.tolist())) == plan.loads.size
        assert not set(plan.evicted.tolist()) & set(ids.tolist())


def test_victims_are_the_lowest_scores_then_the_lowest_slots() -> None:
    table = _table()
    table.plan([0, 1, 2, 3], 1)
    table.plan([2], 2)
    plan = table.plan([7, 5], 3)
    assert plan.loads.tolist() == [5, 7]
    assert plan.load_slots.tolist() == [0, 1]
    assert plan.evicted.tolist() == [0, 1]
    assert table.plan([4], 4).evicted.tolist() == [3]


def test_ids_of_any_shape_type_and_number_of_repeats_are_one_set() -> None:
    table = _table()
    plan = table.plan(np.array([[3, -1, 1], [1, 3, -1]], dtype=np.int16), 1)
    assert plan.loads.tolist() == [1, 3]
    assert table.plan(np.array([[3, 1]], dtype=np.uint8), 2).hits.tolist() == [1, 3]
    nothing = table.plan(np.empty((0, 2), dtype=np.int64), 3)
    assert [part.size for part in nothing] == [0] * 7
    assert table.plan([-1, -1], 4).loads.size == 0
    assert table.counters.demanded == 4


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 300])
def test_wide_demands_are_the_same_set_as_narrow_ones(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    ids = rng.integers(-1, 20, (num_tokens, 8)).astype(np.int16)
    table = _table(32, 24)
    plan = table.plan(ids, 1)
    table.check_integrity()
    assert plan.loads.tolist() == sorted(set(ids.ravel().tolist()) - {-1})
    assert plan.loads.dtype == np.intp
    for bad in (-2, 32):
        ids[num_tokens // 2, 3] = bad
        table = _table(32, 24)
        with pytest.raises(ValueError, match=f"expert id {bad} is out of range"):
            table.plan(ids, 1)
        table.check_integrity()


def test_late_expert_takes_the_slot_reserved_for_it() -> None:
    table = _table()
    taken, slots = table.reserve([6, 4], 1, 8)
    assert (taken.tolist(), slots.tolist()) == ([6, 4], [0, 1])
    assert table.mapping[6] == -1
    plan = table.plan([6, 2], 2)
    assert (plan.late.tolist(), plan.late_slots.tolist()) == ([6], [0])
    assert (plan.loads.tolist(), plan.load_slots.tolist()) == ([2], [2])
    assert table.mapping[6] == 0
    assert table.counters.late == 1
    table.check_integrity()


def test_demand_takes_an_in_flight_slot_only_when_no_other_is_left() -> None:
    table = _table()
    table.plan([0, 1], 1)
    table.reserve([6, 7], 2, 2)
    plan = table.plan([3, 4], 3)
    assert plan.evicted.tolist() == [0, 1]
    assert plan.dropped.size == 0
    plan = table.plan([0, 3, 4], 4)
    assert plan.dropped.tolist() == [6]
    assert (plan.load_slots.tolist(), plan.evicted.tolist()) == ([2], [6])
    assert table.counters.prefetch_dropped == 1
    table.check_integrity()
    with pytest.raises(ValueError, match="not in flight"):
        table.commit([6], 4)
    table.commit([7], 4)


class _OnlyUp(SlotCounters):
    """As another thread sees them, which may look between any two lines."""

    def __setattr__(self, name: str, value: int) -> None:
        assert value >= getattr(self, name, 0), f"{name} went down to {value}"
        super().__setattr__(name, value)


def test_no_counter_ever_goes_down_not_even_while_a_plan_is_made() -> None:
    table = _table()
    table.counters = _OnlyUp()
    table.plan([0, 1], 1)
    table.reserve([6, 7], 2, 2)
    table.plan([3, 4], 3)
    assert table.plan([0, 3, 4], 4).dropped.tolist() == [6]
    assert table.counters.evictions == 2  # what was in flight was never resident


def test_late_expert_keeps_its_slot_when_another_in_flight_must_give_way() -> None:
    table = _table(num_slots=2)
    table.reserve([6, 7], 1, 2)
    plan = table.plan([3, 6], 2)
    assert (plan.late.tolist(), plan.late_slots.tolist()) == ([6], [0])
    assert (plan.load_slots.tolist(), plan.dropped.tolist()) == ([1], [7])
    table.check_integrity()


def test_prefetch_spares_the_running_plan_what_is_in_flight_and_its_own_forecast() -> None:
    table = _table(num_experts=12)
    table.plan([0, 1, 2, 3], 1)
    table.plan([0], 2)
    taken, slots = table.reserve([1, 8, 9, 10], 2, 8)  # 0 is demanded now, 1 is forecast
    assert (taken.tolist(), slots.tolist()) == ([8, 9], [2, 3])
    assert table.mapping[[0, 1, 2, 3]].tolist() == [0, 1, -1, -1]
    assert table.reserve([10], 2, 8)[0].tolist() == [10]  # 1 is no longer forecast
    assert table.reserve([11], 2, 8)[0].size == 0
    table.check_integrity()


def test_a_used_prefetch_and_a_dropped_one_are_counted_apart() -> None:
    table = _table()
    table.reserve([0, 1, 2, 3], 1, 4)
    table.commit([0, 1, 2], 1)
    table.cancel([3])
    table.plan([0], 2)
    table.plan([0], 3)
    table.plan([4, 5, 6], 4)  # takes the empty slot and two unused prefetches
    counters = table.counters
    assert (counters.prefetched, counters.prefetch_used, counters.prefetch_dropped) == (4, 1, 3)
    assert (counters.hits, counters.misses, counters.evictions) == (2, 3, 2)
    table.check_integrity()


def test_limit_bounds_a_prefetch_and_must_not_be_negative() -> None:
    table = _table()
    assert table.reserve([1, 2, 3], 1, 0)[0].size == 0
    assert table.reserve([1, 1, 2, 3], 1, 2)[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        table.reserve([5], 1, -1)


def test_touch_takes_more_experts_than_slots_and_keeps_them_from_eviction() -> None:
    table = _table()
    table.plan([0, 1, 2, 3], 1)
    hits, absent = table.touch([7, 6, 5, 4, 3, 0], 2)
    assert (hits.tolist(), absent.tolist()) == ([0, 3], [4, 5, 6, 7])
    assert table.plan([4, 5], 3).evicted.tolist() == [1, 2]


def test_a_demand_wider_than_the_slots_evicts_only_what_it_does_not_name() -> None:
    table = _table()
    table.plan([0, 1, 2], 1)
    # 0 is resident and stays; 7 is named twice, the others once; 1 and 2 are not named.
    plan, streamed = table.plan_wide([[7, 0], [7, 5], [6, 4], [3, -1]], 2, evict=True)
    assert plan.hits.tolist() == [0]
    assert plan.loads.tolist() == [3, 4, 7]
    assert sorted(plan.evicted.tolist()) == [-1, 1, 2]
    assert streamed.tolist() == [5, 6]
    assert table.mapping[0] == 0
    assert (table.counters.hits, table.counters.misses) == (1, 3 + 5)


def test_a_prompt_takes_empty_slots_only_most_often_named_first() -> None:
    table = _table()
    table.plan([0, 1, 2], 1)
    plan, streamed = table.plan_wide([[7, 0], [7, 5], [6, 4], [3, -1]], 2, evict=False)
    assert (plan.hits.tolist(), plan.loads.tolist(), plan.evicted.tolist()) == ([0], [7], [-1])
    assert streamed.tolist() == [3, 4, 5, 6]
    assert (table.counters.hits, table.counters.misses) == (1, 3 + 5)


@pytest.mark.parametrize("evict", [False, True])
def test_a_demand_of_every_expert_evicts_nothing(evict: bool) -> None:
    table = _table()
    table.plan([4, 5, 6, 7], 1)
    plan, streamed = table.plan_wide(range(8), 2, evict=evict)
    assert plan.hits.tolist() == [4, 5, 6, 7]
    assert plan.loads.size == 0
    assert streamed.tolist() == [0, 1, 2, 3]
    assert table.counters.evictions == 0


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_table_that_ran_for_months_decides_like_a_young_one(name: str) -> None:
    rng = np.random.default_rng(7)
    young, old = _table(32, 8, name), _table(32, 8, name)
    start = 10**11  # 13 years at 250 steps a second
    old.plan([0, 1, 2, 3], start - 10**6)
    young.plan([0, 1, 2, 3], 1)
    near_the_edge = (REBASE_SCORE // old.policy.units_per_step) - 20
    for offset in [*range(1, 50), *range(near_the_edge, near_the_edge + 200)]:
        ids = rng.integers(0, 32, 4)
        ours, theirs = young.plan(ids, 10**6 + offset), old.plan(ids, start + offset)
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
        young.check_integrity()
        old.check_integrity()
        assert 0 <= int(old.score.max()) < 2**31 - 2


def test_rebase_moves_scores_and_clock_together() -> None:
    table, other = _table(), _table()
    for t in (table, other):
        t.plan([0, 1, 2, 3], 10)
        t.plan([1, 2], 11)
    table.rebase(9)
    assert table.score.tolist() == [1, 2, 2, 1]
    assert table.plan([5], 12).evicted.tolist() == other.plan([5], 12).evicted.tolist() == [0]
    assert table.score[0] == 3
    with pytest.raises(ValueError, match="steps must not be negative, got -1"):
        table.rebase(-1)


def test_policy_hears_hits_misses_and_inserts() -> None:
    class Listening(LRU):
        def __init__(self) -> None:
            self.heard: list[tuple[str, list[int], int]] = []

        def hit(self, scores: IntArray, expert_ids: IntArray, now: int) -> IntArray:
            self.heard.append(("hit", expert_ids.tolist(), now))
            return super().hit(scores, expert_ids, now)

        def insert(self, expert_ids: IntArray, now: int) -> IntArray:
            self.heard.append(("insert", expert_ids.tolist(), now))
            return super().insert(expert_ids, now)

        def miss(self, expert_ids: IntArray, now: int) -> None:
            self.heard.append(("miss", expert_ids.tolist(), now))

    policy = Listening()
    table = SlotTable(8, 4, policy)
    table.plan([2, 1], 1)
    table.plan([3, 1], 2)
    heard = [event for event in policy.heard if event[1]]
    assert heard == [
        ("miss", [1, 2], 1),
        ("insert", [1, 2], 1),
        ("miss", [3], 2),
        ("hit", [1], 2),
        ("insert", [3], 2),
    ]


def test_snapshot_does_not_follow_the_table_and_clear_forgets_everything() -> None:
    table = _table()
    table.plan([0, 1], 9)
    table.reserve([4], 9, 1)
    snapshot = table.snapshot()
    table.clear()
    table.check_integrity()
    assert snapshot.mapping[[0, 1]].tolist() == [0, 1]
    assert snapshot.in_flight.tolist() == [False, False, True, False]
    assert snapshot.counters.misses == 2
    assert table.counters.misses == 0
    assert (table.mapping == -1).all()
    assert (table.score == EMPTY_SCORE).all()
    assert table.plan([5], 1).load_slots.tolist() == [0]


@pytest.mark.parametrize("field", ["mapping", "owner", "score"])
def test_check_integrity_notices_a_broken_table(field: str) -> None:
    table = _table()
    table.plan([0, 1], 1)
    getattr(table, field)[1] = EMPTY_SCORE if field == "score" else 0
    with pytest.raises(RuntimeError, match="slot table of layer 3"):
        table.check_integrity()


def test_check_integrity_notices_lost_counts() -> None:
    table = _table()
    table.reserve([0], 1, 1)
    table.counters.prefetched += 1
    with pytest.raises(RuntimeError, match="counters do not add up"):
        table.check_integrity()


def test_hit_rate_of_an_unused_table_is_zero() -> None:
    assert _table().counters.hit_rate == 0.0
