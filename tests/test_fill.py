"""Without a GPU these run under Triton's interpreter; with one, the same tests run on it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from graphs import (
    DeviceSlotTable,
    ExpertFill,
    GraphCapture,
    LayerRecords,
    RecordField,
    RecordTable,
    field_of,
)
from prefetch_runtime.policies import create_device_form

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
GUARD = 0x5A
UNIT_BYTES = 256


@dataclass
class Layer:
    """Random records on the host, and slot tensors with guard bytes around each slot's field."""

    host: torch.Tensor  # [E, record_bytes] uint8
    offsets: list[int]
    sizes: list[int]
    slots: list[torch.Tensor]  # [S, nbytes] uint8 views, one per field
    guards: list[torch.Tensor]  # the memory that the views lie in

    @classmethod
    def make(
        cls, num_experts: int, num_slots: int, sizes: list[int], *, gap: int = 0, seed: int = 0
    ) -> "Layer":
        """`gap` bytes lie between the slots of a field; 0: contiguous tensors."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // 256) * 256
        generator = torch.Generator().manual_seed(seed)
        host = torch.randint(0, 256, (num_experts, end), dtype=torch.uint8, generator=generator)
        if ON_GPU:
            host = host.pin_memory()
        guards, slots = [], []
        for size in sizes:
            guard = torch.full((64 + num_slots * (size + gap),), GUARD, dtype=torch.uint8)
            guard = guard.to(DEVICE)
            guards.append(guard)
            rows = guard[32 : 32 + num_slots * (size + gap)].view(num_slots, size + gap)
            slots.append(rows[:, :size])
        return cls(host, offsets, sizes, slots, guards)

    @property
    def records(self) -> LayerRecords:
        fields = tuple(field_of(s, o) for s, o in zip(self.slots, self.offsets, strict=True))
        return LayerRecords(self.host.data_ptr(), self.host.shape[1], fields)

    def holds(self, slot_id: int, expert_id: int) -> bool:
        return all(
            torch.equal(slots[slot_id].cpu(), self.host[expert_id, offset : offset + size])
            for slots, offset, size in zip(self.slots, self.offsets, self.sizes, strict=True)
        )

    def is_untouched(self, slot_id: int) -> bool:
        return all(bool((slots[slot_id] == GUARD).all()) for slots in self.slots)

    def guards_hold(self) -> bool:
        for guard, slots in zip(self.guards, self.slots, strict=True):
            inside = guard.clone()
            torch.as_strided(inside, slots.shape, slots.stride(), slots.storage_offset()).fill_(
                GUARD
            )
            if not bool((inside == GUARD).all()):
                return False
        return True


def make_table(num_layers: int = 1, num_experts: int = 12, num_slots: int = 5) -> DeviceSlotTable:
    return DeviceSlotTable(
        num_layers=num_layers,
        num_experts=num_experts,
        num_slots=num_slots,
        policy=create_device_form("lru"),
        units_per_step=1,
        device=DEVICE,
    )


def make_fill(
    layers: list[Layer], table: DeviceSlotTable, *, programs: int = 4, unit_bytes: int = UNIT_BYTES
) -> ExpertFill:
    records = RecordTable([layer.records for layer in layers], device=DEVICE, unit_bytes=unit_bytes)
    return ExpertFill(table, records, programs=programs, num_warps=4)


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int32, device=DEVICE)


def audit(table: DeviceSlotTable, layers: list[Layer]) -> int:
    """Every mapped expert's bytes are in its slot; returns how many there are."""
    count = 0
    for mapping, layer in zip(table.mapping.tolist(), layers, strict=True):
        for expert_id, slot_id in enumerate(mapping):
            if slot_id >= 0:
                assert layer.holds(slot_id, expert_id), (expert_id, slot_id)
                count += 1
        assert layer.guards_hold()
    return count


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(
    "sizes",
    [[16], [1], [15, 17], [4096], [3000, 20, 512, 8, 1536], [256] * 7],
    ids=lambda sizes: "+".join(map(str, sizes)),
)
def test_every_byte_of_every_field_arrives_and_no_other_is_written(
    sizes: list[int], programs: int
) -> None:
    table = make_table()
    layer = Layer.make(12, 5, sizes)
    fill = make_fill([layer], table, programs=programs)
    table.resolve(0, ids_of(7, 2, 11))
    fill.fill(0)
    assert audit(table, [layer]) == 3
    assert layer.is_untouched(3)
    assert layer.is_untouched(4)


@pytest.mark.parametrize("gap", [1, 16, 48])
def test_slots_may_lie_apart(gap: int) -> None:
    table = make_table()
    layer = Layer.make(12, 5, [528, 40], gap=gap)
    fill = make_fill([layer], table)
    table.resolve(0, ids_of(1, 2, 3, 4, 0))
    fill.fill(0)
    assert audit(table, [layer]) == 5


def test_every_mapping_entry_has_its_bytes_after_every_step() -> None:
    rng = np.random.default_rng(1)
    table = make_table(num_layers=2)
    # Layers may have records of different layouts.
    layers = [Layer.make(12, 5, [800, 36]), Layer.make(12, 5, [64, 48, 1300], seed=1)]
    fill = make_fill(layers, table, programs=3)
    for _ in range(200 if ON_GPU else 8):
        table.advance()
        for layer_idx in range(2):
            ids = ids_of(*rng.permutation(12)[: rng.integers(1, 6)].tolist())
            slots = table.resolve(layer_idx, ids)
            fill.fill(layer_idx)
            for expert_id, slot_id in zip(ids[0].tolist(), slots[0].tolist(), strict=True):
                assert layers[layer_idx].holds(slot_id, expert_id)
        audit(table, layers)
    table.check_integrity()
    table.check_errors()


def test_nothing_is_copied_when_all_hit() -> None:
    table = make_table()
    layer = Layer.make(12, 5, [300, 20])
    fill = make_fill([layer], table)
    for _ in range(2):
        table.resolve(0, ids_of(1, 2))
    for slots in layer.slots:
        slots.fill_(GUARD)
    fill.fill(0)
    assert layer.is_untouched(0)
    assert layer.is_untouched(1)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_a_listed_expert_is_copied_from_the_given_unit_on(programs: int) -> None:
    table = make_table()
    layer = Layer.make(12, 5, [256 * 4, 100])
    fill = make_fill([layer], table, programs=programs)
    table.resolve(0, ids_of(3, 4, 5))
    table.misses[0, :3, 2] = torch.tensor([2, 5, 4], device=DEVICE)
    fill.fill(0)
    wide, narrow = layer.slots
    assert bool((wide[0, :512] == GUARD).all())
    assert torch.equal(wide[0, 512:].cpu(), layer.host[3, 512:1024])
    assert torch.equal(narrow[0].cpu(), layer.host[3, 1024:1124])
    assert layer.is_untouched(1)
    assert bool((wide[2] == GUARD).all())
    assert torch.equal(narrow[2].cpu(), layer.host[5, 1024:1124])


def test_units_cover_each_field_once_in_order() -> None:
    layer = Layer.make(4, 2, [600, 40])
    records = RecordTable([layer.records], device=DEVICE, unit_bytes=256)
    assert records.max_units == 4
    assert records.units[0, :, 0].tolist() == [0, 256, 512, 768]
    assert records.units[0, :, 4].tolist() == [256, 256, 88, 40]
    assert records.bytes_before[0].tolist() == [0, 256, 512, 600, 640]
    # 600 bytes from slot to slot are no multiple of 16.
    assert records.units[0, :, 3].tolist() == [0, 0, 0, 0]


def test_aligned_fields_move_16_bytes_at_a_time() -> None:
    slots = torch.zeros(3, 528, dtype=torch.uint8)
    short = torch.zeros(3, 64, dtype=torch.uint8)[:, :37]
    layer = LayerRecords(4096, 1024, (field_of(slots, 0), field_of(short, 768)))
    records = RecordTable([layer], device=torch.device("cpu"), unit_bytes=512)
    assert records.units[0, :, 3].tolist() == [512, 16, 32]
    assert records.units[0, :, 4].tolist() == [512, 16, 37]


GOOD = RecordField(offset=0, nbytes=64, slot_base=4096, slot_stride=64)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerRecords(0, 256, (GOOD,)), "layer 0: the records have no device address; pin"),
        (LayerRecords(4096, 256, ()), "needs at least one field"),
        (LayerRecords(4096, 256, (GOOD._replace(nbytes=0),)), "is empty"),
        (LayerRecords(4096, 256, (GOOD._replace(slot_base=0),)), "unallocated"),
        (LayerRecords(4096, 256, (GOOD._replace(slot_stride=63),)), "overlaps itself"),
        (LayerRecords(4096, 256, (GOOD, GOOD._replace(offset=63))), "overlaps another field"),
        (LayerRecords(4096, 256, (GOOD._replace(offset=200),)), "outside the record of 256"),
        (LayerRecords(4096, 256, (GOOD._replace(offset=-1),)), "outside the record"),
    ],
)
def test_records_that_make_no_sense_are_refused(layer: LayerRecords, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordTable([layer], device=torch.device("cpu"))


def test_a_slot_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="one contiguous range of bytes"):
        field_of(torch.zeros(4, 6, 8)[:, :, :3], 0)
    with pytest.raises(ValueError, match="one contiguous range of bytes"):
        field_of(torch.tensor(1.0), 0)


def test_arguments_that_do_not_fit_are_refused() -> None:
    layer = Layer.make(4, 2, [64])
    with pytest.raises(ValueError, match="unit_bytes must be a power of two, at least 16, got 48"):
        RecordTable([layer.records], device=DEVICE, unit_bytes=48)
    with pytest.raises(ValueError, match="at least one layer"):
        RecordTable([], device=DEVICE)
    records = RecordTable([layer.records], device=DEVICE)
    with pytest.raises(ValueError, match=r"records are of 1 layers.*table of 2"):
        ExpertFill(make_table(num_layers=2), records)
    with pytest.raises(ValueError, match="programs must be between 1 and 64, got 0"):
        ExpertFill(make_table(), records, programs=0)
    fill = ExpertFill(make_table(), records)
    with pytest.raises(ValueError, match="layer_idx must be 0 to 0, got -1"):
        fill.fill(-1)
    fill.table.close()
    with pytest.raises(RuntimeError, match="slot table is closed"):
        fill.fill(0)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_captured_fill_follows_routing_that_changes_between_replays(early: bool) -> None:
    rng = np.random.default_rng(4)
    num_experts, num_slots = 64, 20
    layers = [
        Layer.make(num_experts, num_slots, [196608, 98304, 20, 4096 + 8], seed=seed)
        for seed in range(3)
    ]
    table = make_table(len(layers), num_experts, num_slots)
    fill = make_fill(layers, table, programs=8, unit_bytes=32768)

    def step(topk_ids: torch.Tensor) -> torch.Tensor:
        table.advance()
        slots = []
        for layer_idx in range(len(layers)):
            ids = topk_ids[layer_idx] + 0  # written by the kernel before, as by a router
            slots.append(table.resolve(layer_idx, ids, early=early))
            fill.fill(layer_idx, early=early)
        return torch.stack(slots)

    def routing() -> torch.Tensor:
        rows = [rng.permutation(num_experts)[:16].reshape(2, 8) for _ in layers]
        return torch.tensor(np.stack(rows), device=DEVICE)

    graph = GraphCapture(table).run(step, {"topk_ids": routing()})
    for _ in range(100):
        ids = routing()
        slots = graph.replay({"topk_ids": ids})
        assert slots is not None
        for layer_idx, layer in enumerate(layers):
            for expert_id, slot_id in zip(
                ids[layer_idx].flatten().tolist(), slots[layer_idx].flatten().tolist(), strict=True
            ):
                assert layer.holds(slot_id, expert_id)
    audit(table, layers)
    table.check_integrity()
    table.check_errors()
    graph.close()
