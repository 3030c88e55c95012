"""Slots as tensors of our own and as tensors that exist already."""

import pytest
import torch

from prefetch_runtime.host_store import RecordLayout
from prefetch_runtime.slot_buffers import CopyRange, SlotBuffers

CPU = torch.device("cpu")
LAYOUT = RecordLayout.from_tensors(
    {
        "w": ((4, 3), torch.bfloat16),
        "scale": ((), torch.float32),
        "empty": ((0,), torch.int32),
    }
)


def test_one_contiguous_tensor_per_field() -> None:
    buffers = SlotBuffers(5, LAYOUT, CPU)
    assert {name: (t.shape, t.dtype) for name, t in buffers.tensors.items()} == {
        "w": ((5, 4, 3), torch.bfloat16),
        "scale": ((5,), torch.float32),
        "empty": ((5, 0), torch.int32),
    }
    assert all(tensor.is_contiguous() for tensor in buffers.tensors.values())
    assert (buffers.num_slots, buffers.device) == (5, CPU)
    assert buffers.nbytes == 5 * (24 + 4)


def test_rows_are_views_of_their_slot() -> None:
    buffers = SlotBuffers(5, LAYOUT, CPU)
    buffers.tensors["w"].zero_()
    buffers.row("w", 2).fill_(1.5)
    assert buffers.tensors["w"].sum() == 12 * 1.5
    assert (buffers.tensors["w"][2] == 1.5).all()
    assert buffers.row_bytes("w", 2).tolist() == [0xC0, 0x3F] * 12
    assert buffers.row_bytes("scale", 4).shape == (4,)


def test_ranges_lead_from_the_record_to_the_slot() -> None:
    buffers = SlotBuffers(5, LAYOUT, CPU)
    assert buffers.ranges(LAYOUT) == (
        CopyRange("w", 0, 24, buffers.tensors["w"].data_ptr(), 24),
        CopyRange("scale", 256, 4, buffers.tensors["scale"].data_ptr(), 4),
    )
    assert buffers.ranges(LAYOUT) is buffers.ranges(LAYOUT)
    same = RecordLayout(LAYOUT.fields, LAYOUT.record_bytes)
    assert buffers.ranges(same) == buffers.ranges(LAYOUT)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"w": ((4, 3), torch.float16)}, "w"),
        ({"w": ((3, 4), torch.bfloat16)}, "w"),
        ({"other": ((4, 3), torch.bfloat16)}, "other, w"),
    ],
    ids=["dtype", "shape", "name"],
)
def test_records_that_do_not_fit_the_slots_are_refused(
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], named: str
) -> None:
    layout = RecordLayout.from_tensors({"w": ((4, 3), torch.bfloat16)})
    with pytest.raises(ValueError, match=f"slots and records differ in {named}: slots hold"):
        SlotBuffers(5, layout, CPU).ranges(RecordLayout.from_tensors(tensors))


def test_parameters_that_exist_can_be_the_slots() -> None:
    w = torch.nn.Parameter(torch.zeros(6, 4, 3))
    buffers = SlotBuffers.from_tensors({"w": w})
    buffers.row("w", 5).fill_(2)
    assert buffers.num_slots == 6
    assert (w[5] == 2).all()
    assert w[:5].sum() == 0
    buffers.check_integrity()
    w.data = torch.zeros(6, 4, 3)
    with pytest.raises(RuntimeError, match="w has moved since the slots were made"):
        buffers.check_integrity()


def test_rows_may_be_padded_apart() -> None:
    padded = torch.zeros(6, 20, dtype=torch.uint8)
    buffers = SlotBuffers.from_tensors({"w": padded[:, :12]})
    layout = RecordLayout.from_tensors({"w": ((12,), torch.uint8)})
    assert buffers.ranges(layout)[0][2:] == (12, padded.data_ptr(), 20)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "at least one tensor"),
        ({"w": torch.zeros(())}, r"w must be \[slots, ...\]"),
        ({"w": torch.zeros(0, 3)}, r"w must be \[slots, ...\]"),
        ({"w": torch.zeros(4, 3, 2).transpose(1, 2)}, "w with strides .* one run of bytes"),
        ({"w": torch.zeros(3).expand(4, 3)}, "w with strides .* one run of bytes"),
        ({"a": torch.zeros(4, 3), "b": torch.zeros(5, 3)}, "differ in num_slots.*'a': 4, 'b': 5"),
        ({"a": torch.zeros(4), "b": torch.zeros(4, device="meta")}, "differ in device"),
    ],
)
def test_tensors_that_cannot_be_slots_are_refused(
    tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SlotBuffers.from_tensors(tensors)


def test_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        SlotBuffers(0, LAYOUT, CPU)
