"""Without a GPU these run under Triton's interpreter; with one, the same tests run on it."""

from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from graphs import (
    DeviceCounters,
    DeviceSlotTable,
    ExpertFill,
    GraphCapture,
    LayerRecords,
    PrefetchBranch,
    PrefetchHook,
    RecordTable,
    field_of,
)
from graphs.prefetch import UNLIMITED_BYTES
from prefetch_runtime.policies import create_device_form, create_policy
from prefetch_runtime.slots import SlotTable
from tests.helpers.ticking import TICK_NS, TickingClock

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
UNIT_BYTES = 64
RECORD_BYTES = 256
PAYLOAD_BYTES = 224  # 3 whole units and a half
NUM_UNITS = 4
MAX_FORECAST = 6


@dataclass
class Rig:
    """Slot table, records, demand fill and hook of a small model, and the reference of a layer."""

    num_layers: int = 1
    num_experts: int = 12
    num_slots: int = 5
    policy: str = "lru"
    payload_bytes: int = PAYLOAD_BYTES
    record_bytes: int = RECORD_BYTES
    unit_bytes: int = UNIT_BYTES
    programs: int = 3
    missing_rows: int = 0  # slots that the table has and the memory has not
    hosts: list[torch.Tensor] = field(init=False)
    slots: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hosts, self.slots, layers = [], [], []
        for _ in range(self.num_layers):
            shape = (self.num_experts, self.record_bytes)
            host = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            self.hosts.append(host.pin_memory() if ON_GPU else host)
            rows = self.num_slots - self.missing_rows
            self.slots.append(
                torch.zeros(rows, self.payload_bytes, dtype=torch.uint8, device=DEVICE)
            )
            layers.append(
                LayerRecords(
                    self.hosts[-1].data_ptr(), self.record_bytes, (field_of(self.slots[-1], 0),)
                )
            )
        self.table = DeviceSlotTable(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            num_slots=self.num_slots,
            policy=create_device_form(self.policy),
            units_per_step=create_policy(self.policy).units_per_step,
            device=DEVICE,
        )
        records = RecordTable(layers, device=DEVICE, unit_bytes=self.unit_bytes)
        self.demand_fill = ExpertFill(self.table, records, programs=self.programs)
        self.hook = PrefetchHook(
            self.demand_fill, max_forecast=MAX_FORECAST, programs=self.programs
        )
        self.reference = SlotTable(
            self.num_experts, self.num_slots, create_policy(self.policy), layer_idx=0
        )
        self.now = 1

    def advance(self) -> None:
        self.table.advance()
        self.now += 1

    def resolve(self, *ids: int) -> list[int]:
        slots = self.table.resolve(0, tensor([ids]))
        self.demand_fill.fill(0)
        return [int(slot) for slot in slots[0]]

    def in_flight(self, layer_idx: int = 0) -> list[tuple[int, int, int]]:
        """(expert, slot, whole units) of each prefetch."""
        count = int(self.hook.state.entry_count[layer_idx])
        entries = self.hook.state.entries[layer_idx, :count].tolist()
        progress = self.hook.state.progress[layer_idx, :count].tolist()
        return [(e, s, n) for (e, s), n in zip(entries, progress, strict=True)]

    def counters(self) -> DeviceCounters:
        return self.table.counters_of(0)

    def audit(self) -> None:
        """Every mapped expert's bytes are in its slot."""
        self.table.check_integrity()
        self.table.check_errors()
        for layer_idx, mapping in enumerate(self.table.mapping.tolist()):
            for expert_id, slot_id in enumerate(mapping):
                if slot_id >= 0:
                    held = self.slots[layer_idx][slot_id].cpu()
                    expected = self.hosts[layer_idx][expert_id, : self.payload_bytes]
                    assert torch.equal(held, expected), (layer_idx, expert_id, slot_id)

    def compare(self) -> None:
        for name in ("mapping", "owner", "score"):
            actual = getattr(self.table, name)[0].cpu().numpy()
            np.testing.assert_array_equal(actual, getattr(self.reference, name), name)
        counters = self.counters()
        for name in self.reference.counters.__dataclass_fields__:
            assert getattr(counters, name) == getattr(self.reference.counters, name), name
        self.reference.check_integrity()


def tensor(ids: object) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32, device=DEVICE)


def filled(**changes: int) -> Rig:
    """Experts 0 to 4 are resident in slots 0 to 4; 0 was used longest ago."""
    rig = Rig(**changes)  # type: ignore[arg-type]
    for expert_id in range(5):
        rig.advance()
        rig.resolve(expert_id)
    rig.advance()
    return rig


def test_a_right_forecast_is_resident_when_it_is_demanded() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7, 9]))
    rig.hook.fill(0)
    rig.hook.post(0, tensor([[7, 9]]))
    assert rig.resolve(7, 9) == [0, 1]
    rig.audit()
    counters = rig.counters()
    assert (counters.prefetched, counters.prefetch_used, counters.late) == (2, 2, 0)
    assert (counters.hits, counters.misses, counters.prefetch_dropped) == (2, 5, 0)
    assert (counters.used_bytes, counters.late_bytes) == (2 * PAYLOAD_BYTES, 0)
    assert int(rig.table.miss_count[0]) == 0


def test_the_victim_is_unmapped_at_once_and_the_newcomer_mapped_at_commit() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7]))
    assert rig.table.mapping[0, [0, 7]].tolist() == [-1, -1]
    assert rig.table.owner[0].tolist() == [7, 1, 2, 3, 4]
    rig.hook.fill(0)
    assert rig.table.mapping[0, [0, 7]].tolist() == [-1, -1]
    rig.table.check_integrity()
    rig.resolve(1)
    assert rig.table.mapping[0, [0, 7]].tolist() == [-1, 0]
    rig.audit()


def test_a_wrong_forecast_that_is_whole_stays_and_counts_as_used_when_it_is_used_later() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    rig.hook.post(0, tensor([[1]]))
    rig.resolve(1)
    assert rig.counters().prefetch_used == 0
    rig.advance()
    rig.resolve(7)
    assert (rig.counters().prefetch_used, rig.counters().misses) == (1, 5)
    rig.audit()


def test_a_whole_prefetch_that_is_evicted_unused_is_dropped_and_its_bytes_are_wasted() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    rig.resolve(1)
    for ids in ((8, 9, 10), (2, 3, 4, 5, 6)):
        rig.advance()
        rig.resolve(*ids)
    counters = rig.counters()
    assert (counters.prefetched, counters.prefetch_dropped) == (1, 1)
    assert counters.wasted_bytes == PAYLOAD_BYTES
    rig.audit()


def test_a_posted_demand_stops_what_it_does_not_name() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7, 8, 9]))
    rig.hook.post(0, tensor([[8, 1]]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, 0), (8, 1, NUM_UNITS), (9, 2, 0)]
    # Expert 1 lost its slot to 8, and takes the first of the two that are freed.
    assert rig.resolve(8, 1) == [1, 0]
    assert rig.table.owner[0].tolist() == [1, 8, -1, 3, 4]
    counters = rig.counters()
    assert (counters.prefetch_used, counters.late, counters.prefetch_dropped) == (1, 0, 2)
    assert counters.wasted_bytes == 0
    rig.audit()


def test_the_post_of_an_earlier_step_stops_nothing() -> None:
    rig = filled()
    rig.hook.post(0, tensor([[1]]))
    rig.advance()
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, NUM_UNITS)]


def test_what_the_budget_does_not_cover_is_left_out() -> None:
    rig = filled()
    rig.hook.set_budget(PAYLOAD_BYTES + UNIT_BYTES + 1)
    rig.hook.reserve(0, tensor([7, 8, 9]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, NUM_UNITS), (8, 1, 2)]
    slot = rig.slots[0][1].cpu()
    assert torch.equal(slot[: 2 * UNIT_BYTES], rig.hosts[0][8, : 2 * UNIT_BYTES])
    assert torch.equal(slot[2 * UNIT_BYTES :], rig.hosts[0][1, 2 * UNIT_BYTES : PAYLOAD_BYTES])


def test_the_demand_fill_finishes_a_demanded_partial_prefetch_and_copies_no_unit_twice() -> None:
    rig = filled()
    rig.hook.set_budget(UNIT_BYTES)
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, 1)]
    rig.slots[0][0, :UNIT_BYTES] = 0x5A
    assert rig.resolve(7, 11) == [0, 1]
    assert rig.table.misses[0, :2].tolist() == [[7, 0, 1], [11, 1, 0]]
    assert bool((rig.slots[0][0, :UNIT_BYTES] == 0x5A).all())
    rig.slots[0][0, :UNIT_BYTES] = rig.hosts[0][7, :UNIT_BYTES].to(DEVICE)
    rig.audit()
    counters = rig.counters()
    assert (counters.late, counters.late_bytes, counters.misses) == (1, UNIT_BYTES, 6)
    assert (counters.hits, counters.prefetch_used, counters.prefetch_dropped) == (0, 0, 0)


def test_a_partial_prefetch_that_is_not_demanded_is_freed() -> None:
    rig = filled()
    rig.hook.set_budget(UNIT_BYTES)
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    rig.resolve(4)
    assert rig.table.owner[0].tolist() == [-1, 1, 2, 3, 4]
    counters = rig.counters()
    assert (counters.prefetch_dropped, counters.wasted_bytes) == (1, UNIT_BYTES)
    rig.audit()
    rig.advance()
    assert rig.resolve(7) == [0]
    rig.audit()


def test_a_posted_demand_overrides_the_budget() -> None:
    rig = filled()
    rig.hook.set_budget(UNIT_BYTES)
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    rig.hook.post(0, tensor([[7]]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, NUM_UNITS)]
    assert rig.resolve(7) == [0]
    rig.audit()


def test_a_budget_of_0_switches_a_layer_off_and_other_layers_stay_on() -> None:
    rig = Rig(num_layers=2)
    rig.hook.set_budget(0, layer_idx=0)
    for layer_idx in range(2):
        rig.hook.reserve(layer_idx, tensor([7]))
        rig.hook.fill(layer_idx)
    assert rig.in_flight(0) == []
    assert rig.in_flight(1) == [(7, 0, NUM_UNITS)]


def test_a_forecast_with_repeats_padding_residents_and_strangers_reserves_the_rest_in_order() -> (
    None
):
    rig = filled()
    rig.hook.reserve(0, tensor([9, -1, 9, 3, 12, 7]))
    assert [(e, s) for e, s, _ in rig.in_flight()] == [(9, 0), (7, 1)]


def test_a_slot_that_holds_an_expert_of_the_forecast_is_not_taken() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([9, 0, 7, 2]))
    assert [(e, s) for e, s, _ in rig.in_flight()] == [(9, 1), (7, 3)]


def test_a_slot_that_this_step_demanded_is_not_taken() -> None:
    rig = filled()
    rig.resolve(0, 1, 2)
    rig.resolve(3)
    rig.hook.reserve(0, tensor([7, 8]))
    assert [(e, s) for e, s, _ in rig.in_flight()] == [(7, 4)]
    rig.hook.reserve(0, tensor([9]))
    assert len(rig.in_flight()) == 1


def test_a_second_reserve_adds_to_the_first_and_takes_no_slot_in_flight() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7, 8]))
    rig.hook.fill(0)
    rig.hook.reserve(0, tensor([8, 9, 10]))
    rig.hook.fill(0)
    assert rig.in_flight() == [
        (7, 0, NUM_UNITS),
        (8, 1, NUM_UNITS),
        (9, 2, NUM_UNITS),
        (10, 3, NUM_UNITS),
    ]
    rig.resolve(7, 8, 9, 10)
    assert rig.counters().prefetch_used == 4
    rig.audit()


def test_no_more_is_reserved_than_the_hook_has_room_for() -> None:
    rig = Rig(num_experts=20, num_slots=16)
    for first in (0, 4, 8):
        rig.hook.reserve(0, tensor(list(range(first, first + 4))))
    assert [e for e, _, _ in rig.in_flight()] == [0, 1, 2, 3, 4, 5]


def test_a_reserve_after_the_post_takes_only_what_is_demanded_and_no_demanded_slot() -> None:
    rig = filled()
    rig.hook.post(0, tensor([[0, 8, 1]]))
    rig.hook.reserve(0, tensor([7, 8, 9]))
    assert [(e, s) for e, s, _ in rig.in_flight()] == [(8, 2)]


def test_padding_rows_are_no_demand() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7, 8]))
    rig.hook.post(0, tensor([[7], [8]]), padding=tensor([-1, 5]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, 0), (8, 1, NUM_UNITS)]


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("num_slots", [4, 9])
def test_random_forecasts_give_the_state_of_the_slot_table_after_every_step(
    policy: str, num_slots: int
) -> None:
    rng = np.random.default_rng(num_slots)
    rig = Rig(num_experts=20, num_slots=num_slots, policy=policy)
    late_bytes = partial_bytes = num_cancelled = 0
    for step in range(400 if ON_GPU else 25):
        rig.advance()
        ids = rng.integers(-1, 20, size=int(rng.integers(1, num_slots + 1)))
        right = np.where(rng.random(4) < rng.random(), rng.choice(ids, 4), rng.integers(-1, 20, 4))
        forecast = rng.permutation(right)[: rng.integers(1, 5)].astype(np.int32)
        budget = int(rng.choice([0, UNIT_BYTES, PAYLOAD_BYTES, 500, UNLIMITED_BYTES]))
        is_posted_early = bool(rng.random() < 0.3)

        rig.hook.set_budget(budget)
        rig.hook.reserve(0, tensor(forecast))
        limit = min(-(-budget // PAYLOAD_BYTES), MAX_FORECAST)
        taken, slots = rig.reference.reserve(forecast, rig.now, limit)
        if is_posted_early:
            rig.hook.post(0, tensor(ids[None, :]))
        rig.hook.fill(0)
        rig.hook.post(0, tensor(ids[None, :]))

        progress = []
        for i, expert_id in enumerate(taken):
            affordable = min(-(-max(budget - i * PAYLOAD_BYTES, 0) // UNIT_BYTES), NUM_UNITS)
            if is_posted_early:
                affordable = NUM_UNITS if expert_id in ids else 0
            progress.append(affordable)
        assert rig.in_flight() == list(
            zip(taken.tolist(), slots.tolist(), progress, strict=True)
        ), step
        is_whole = np.array(progress, dtype=np.int32) == NUM_UNITS
        rig.reference.commit(taken[is_whole], rig.now)
        rig.reference.cancel([e for e in taken[~is_whole] if e not in ids])
        for expert_id, units in zip(taken, progress, strict=True):
            if units < NUM_UNITS and expert_id in ids:
                late_bytes += units * UNIT_BYTES
            elif units < NUM_UNITS:
                partial_bytes += units * UNIT_BYTES
                num_cancelled += 1

        slots_out = rig.table.resolve(0, tensor(ids[None, :])).cpu().numpy()[0]
        rig.demand_fill.fill(0)
        plan = rig.reference.plan(ids, rig.now)
        np.testing.assert_array_equal(slots_out, np.where(ids >= 0, rig.reference.mapping[ids], 0))
        count = int(rig.table.miss_count[0])
        listed = rig.table.misses[0, :count].cpu().numpy()
        np.testing.assert_array_equal(listed[len(plan.late) :, 0], plan.loads)
        np.testing.assert_array_equal(np.sort(listed[: len(plan.late), 0]), plan.late)
        rig.compare()
        rig.audit()
        counters = rig.counters()
        assert counters.used_bytes == counters.prefetch_used * PAYLOAD_BYTES
        assert counters.late_bytes == late_bytes
        evicted_unused = counters.prefetch_dropped - num_cancelled
        assert counters.wasted_bytes == partial_bytes + evicted_unused * PAYLOAD_BYTES
    assert evicted_unused > 0
    assert counters.late > 0
    assert counters.prefetch_used > 0
    assert counters.prefetch_dropped > 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=r"forecast must be contiguous int32 \[1 to 6\].*\(7,\)"):
        rig.hook.reserve(0, tensor([0] * 7))
    with pytest.raises(ValueError, match=r"got torch.int64 \(2,\)"):
        rig.hook.reserve(0, tensor([0, 1]).long())
    with pytest.raises(ValueError, match="forecast must be contiguous"):
        rig.hook.reserve(0, tensor([[1]]))
    with pytest.raises(ValueError, match="layer_idx must be 0 to 0, got 4"):
        rig.hook.fill(4)
    with pytest.raises(ValueError, match="layer_idx must be 0 to 0, got 4"):
        rig.hook.post(4, tensor([[1]]))
    with pytest.raises(ValueError, match="budget_bytes must be 0 to"):
        rig.hook.set_budget(-1)
    with pytest.raises(ValueError, match="max_forecast must be between 1 and 64, got 65"):
        PrefetchHook(rig.demand_fill, max_forecast=65)
    with pytest.raises(ValueError, match="programs must be between 1 and 64, got 0"):
        PrefetchHook(rig.demand_fill, programs=0)
    with pytest.raises(RuntimeError, match="has a prefetch hook already"):
        PrefetchHook(rig.demand_fill)


def test_clear_forgets_what_is_in_flight() -> None:
    rig = filled()
    rig.hook.reserve(0, tensor([7]))
    rig.table.clear()
    rig.table.check_integrity()
    assert rig.resolve(7) == [0]
    rig.audit()


def test_clear_forgets_what_was_posted() -> None:
    rig = Rig()
    rig.hook.post(0, tensor([[1]]))
    rig.table.clear()
    rig.hook.reserve(0, tensor([7]))
    rig.hook.fill(0)
    assert rig.in_flight() == [(7, 0, NUM_UNITS)]


def test_a_branch_is_joined_once_per_fork() -> None:
    branch = PrefetchBranch(DEVICE)
    with pytest.raises(RuntimeError, match="nothing to join"):
        branch.join()
    with branch.fork():
        assert branch.is_forked
    with pytest.raises(RuntimeError, match="join it first"), branch.fork():
        pass
    branch.join()
    assert not branch.is_forked


@pytest.mark.gpu
def test_forked_prefetches_in_a_captured_graph_are_exact_whatever_the_forecast() -> None:
    rng = np.random.default_rng(0)
    num_layers = 4
    rig = Rig(
        num_layers=num_layers,
        num_experts=64,
        num_slots=24,
        policy="lfru",
        payload_bytes=600_000,
        record_bytes=600_064,
        unit_bytes=32768,
        programs=4,
    )
    branch = PrefetchBranch(DEVICE)
    busy = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)

    def step(topk_ids: torch.Tensor, forecast: torch.Tensor) -> torch.Tensor:
        rig.table.advance()
        slots = []
        for layer_idx in range(num_layers):
            if layer_idx:
                rig.hook.post(layer_idx, topk_ids[layer_idx])
                branch.join()
            slots.append(rig.table.resolve(layer_idx, topk_ids[layer_idx]))
            rig.demand_fill.fill(layer_idx)
            if layer_idx + 1 < num_layers:
                with branch.fork():
                    rig.hook.reserve(layer_idx + 1, forecast[layer_idx + 1])
                    rig.hook.fill(layer_idx + 1)
                busy.add_(1)  # the experts and the attention
        return torch.stack(slots)

    def routing() -> dict[str, torch.Tensor]:
        ids = np.stack([rng.permutation(64)[:16].reshape(2, 8) for _ in range(num_layers)])
        guess = rng.integers(-1, 64, size=(num_layers, MAX_FORECAST))
        is_right = rng.random(guess.shape) < rng.random()
        guess = np.where(is_right, ids.reshape(num_layers, 16)[:, :MAX_FORECAST], guess)
        return {"topk_ids": tensor(ids), "forecast": tensor(guess)}

    graph = GraphCapture(rig.table, branch=branch).run(step, routing())
    for replay in range(200):
        rig.hook.set_budget(int(rng.choice([0, 100_000, 700_000, UNLIMITED_BYTES])))
        inputs = routing()
        slots = graph.replay(inputs)
        assert slots is not None
        mapping = rig.table.mapping.cpu()
        ids = inputs["topk_ids"].cpu().long()
        for layer_idx in range(num_layers):
            assert torch.equal(slots[layer_idx].cpu().int(), mapping[layer_idx][ids[layer_idx]])
        if replay % 10 == 0:
            rig.audit()
    rig.audit()
    counters = rig.table.counters_of(2)
    assert counters.prefetch_used > 0
    settled = counters.prefetch_used + counters.late + counters.prefetch_dropped
    assert settled <= counters.prefetched <= settled + rig.num_slots
    graph.close()


@pytest.mark.gpu
def test_a_fill_under_way_stops_soon_after_the_demand_is_posted() -> None:
    mebibyte = 1 << 20
    rig = Rig(
        num_experts=8,
        num_slots=8,
        payload_bytes=64 * mebibyte,
        record_bytes=64 * mebibyte,
        unit_bytes=32768,
        programs=8,
    )
    branch = PrefetchBranch(DEVICE)
    rig.hook.fill(0)  # compiles the kernels; nothing is reserved yet
    rig.hook.post(0, tensor([[1, 3]]))
    rig.advance()
    rig.hook.reserve(0, tensor([1, 2, 3]))
    demand = tensor([[5, 2]])
    torch.cuda.synchronize()
    # Both wait until the host has launched all of it: a launch may take it longer than a copy.
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with branch.fork():
        torch.cuda._sleep(40_000_000)
        rig.hook.fill(0)  # 192 MiB: 4 ms at 50 GB/s
    torch.cuda._sleep(40_300_000)  # 0.15 ms more, up to 0.9 where the clock is low
    rig.hook.post(0, demand)
    branch.join()
    torch.cuda.synchronize()
    num_units = 64 * mebibyte // 32768
    first, second, third = (units for _, _, units in rig.in_flight())
    assert 0 < first < num_units  # stopped under way: not demanded
    assert second == num_units
    assert third == 0
    slots = rig.resolve(5, 2)
    assert slots == [0, 1]
    rig.audit()


@pytest.mark.skipif(ON_GPU, reason="the GPU has a clock of its own")
class TestTimes:
    """Durations, told by a clock that moves 10 ns at each reading."""

    def test_a_demand_that_misses_waits_until_the_last_program_has_copied(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, clock = filled(), TickingClock(monkeypatch)
        before = rig.counters().stall_ns
        rig.resolve(7)
        assert clock.readings == 1 + rig.programs  # the plan, then each program of the fill
        assert rig.counters().stall_ns - before == rig.programs * TICK_NS
        rig.advance()
        rig.resolve(8)
        assert rig.counters().stall_ns - before == 2 * rig.programs * TICK_NS

    def test_a_demand_that_hits_reads_no_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig, clock = filled(), TickingClock(monkeypatch)
        before = rig.counters().stall_ns
        rig.resolve(3, 4)
        assert clock.readings == 0
        assert rig.counters().stall_ns == before

    def test_the_link_is_free_from_the_reservation_to_the_demand(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, _ = filled(), TickingClock(monkeypatch)
        for _ in range(2):
            rig.hook.reserve(0, tensor([7]))
            rig.hook.fill(0)  # three readings
            rig.hook.post(0, tensor([[7]]))
            rig.resolve(7)
            rig.advance()
        counters = rig.counters()
        assert counters.free_ns == (rig.programs + 1 + 1) * TICK_NS  # with nothing in flight, 1
        assert counters.stall_ns == 0
        rig.resolve(7)  # nothing was reserved or posted in this step
        assert rig.counters().free_ns == counters.free_ns

    def test_a_fill_that_ends_after_the_demand_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, _ = filled(), TickingClock(monkeypatch)
        rig.hook.reserve(0, tensor([7]))
        rig.hook.post(0, tensor([[7]]))
        rig.hook.fill(0)
        rig.resolve(7)
        counters = rig.counters()
        assert (counters.prefetch_used, counters.misses) == (1, 5)
        assert counters.free_ns == TICK_NS
        assert counters.stall_ns == rig.programs * TICK_NS

    def test_a_reservation_after_the_demand_leaves_no_free_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, _ = filled(), TickingClock(monkeypatch)
        rig.hook.post(0, tensor([[7]]))
        rig.hook.reserve(0, tensor([7]))
        rig.hook.fill(0)
        rig.resolve(7)
        assert rig.counters().free_ns == 0
        assert rig.counters().stall_ns == (1 + rig.programs) * TICK_NS


@pytest.mark.gpu
class TestTimesOnTheGpu:
    """The same durations, told by the GPU's own timer."""

    MEBIBYTE = 1 << 20

    def rig(self) -> Rig:
        rig = Rig(
            num_experts=8,
            num_slots=4,
            payload_bytes=16 * self.MEBIBYTE,
            record_bytes=16 * self.MEBIBYTE,
            unit_bytes=32768,
            programs=8,
        )
        rig.resolve(0)  # compiles the kernels, and brings in expert 0
        rig.hook.reserve(0, tensor([0]))
        rig.hook.fill(0)
        rig.hook.post(0, tensor([[0]]))
        rig.advance()
        rig.resolve(0)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        return rig

    def test_a_miss_stalls_for_as_long_as_its_copy_takes(self) -> None:
        rig = self.rig()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        shares = []
        for ids in ([1, 2], [3, 4], [5, 6], [1, 2], [3, 4]):
            before = rig.counters().stall_ns
            torch.cuda._sleep(2_000_000)  # the host launches all of it meanwhile
            rig.advance()
            begin.record()
            rig.resolve(*ids)
            end.record()
            torch.cuda.synchronize()
            stall_ns = rig.counters().stall_ns - before
            took_ns = begin.elapsed_time(end) * 1e6
            # 32 MiB: 0.3 ms at 100 GB/s. Globally timed, so close to what events around it say.
            assert 32 * self.MEBIBYTE / 100 < stall_ns <= took_ns + 5_000
            shares.append(stall_ns / took_ns)
        # Other processes on the GPU may come between the events, but not every time.
        assert max(shares) > 0.5

    def test_a_hit_does_not_stall(self) -> None:
        rig = self.rig()
        before = rig.counters()
        rig.advance()
        rig.resolve(0)
        assert rig.counters().stall_ns == before.stall_ns

    def test_the_link_is_free_between_reservation_and_demand(self) -> None:
        rig = self.rig()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = rig.counters()
        rig.hook.set_budget(0)
        torch.cuda._sleep(2_000_000)
        begin.record()
        rig.hook.reserve(0, tensor([5]))
        torch.cuda._sleep(1_000_000)
        rig.hook.post(0, tensor([[0]]))
        end.record()
        rig.resolve(0)
        torch.cuda.synchronize()
        free_ns = rig.counters().free_ns - before.free_ns
        took_ns = begin.elapsed_time(end) * 1e6
        assert 100_000 < free_ns <= took_ns + 5_000
        assert rig.counters().stall_ns == before.stall_ns

    def test_budgets_reach_a_captured_graph_between_replays(self) -> None:
        rig = self.rig()

        def step(forecast: torch.Tensor, ids: torch.Tensor) -> None:
            rig.table.advance()
            rig.hook.reserve(0, forecast)
            rig.hook.fill(0)
            rig.hook.post(0, ids)
            rig.table.resolve(0, ids)
            rig.demand_fill.fill(0)

        rig.hook.set_budgets([0])
        with closing(
            GraphCapture(rig.table).run(step, {"forecast": tensor([5]), "ids": tensor([[0]])})
        ) as graph:
            before = rig.counters().prefetched
            graph.replay()
            assert rig.counters().prefetched == before
            rig.hook.set_budgets([1])
            graph.replay({"forecast": tensor([6]), "ids": tensor([[0]])})
            assert rig.counters().prefetched == before + 1
            rig.hook.set_budgets([0])
            graph.replay({"forecast": tensor([7]), "ids": tensor([[0]])})
            assert rig.counters().prefetched == before + 1
