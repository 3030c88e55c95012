"""Where every expert's record lies in host memory, and where its fields go on the device.

Shapes: L = layers, E = experts of a layer, S = slots, U = units of the longest record.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphs.layout import NUM_HEADER, NUM_UNIT_COLUMNS

DEFAULT_UNIT_BYTES = 32 << 10
"""What one program has under way at a time; 8 programs keep 256 KiB in flight on the link."""


class RecordField(NamedTuple):
    """One tensor of an expert: a byte range of the record, and the tensor of slots it goes to."""

    offset: int
    """Bytes from the start of the record."""
    nbytes: int
    slot_base: int
    """Address of slot 0, as the kernels see it."""
    slot_stride: int
    """Bytes from a slot to the next."""


class LayerRecords(NamedTuple):
    """The records of one layer: expert `e` begins at `host_base + e * record_bytes`."""

    host_base: int
    """Address of expert 0 as the kernels see it: the device address of pinned, mapped memory."""
    record_bytes: int
    fields: tuple[RecordField, ...]


def field_of(slots: torch.Tensor, offset: int) -> RecordField:
    """The field that fills `slots` [S, ...] from byte `offset` of the record.

    Takes the address, and keeps no reference: `slots` must live, and stay where it is, for as long
    as the record table is used. Raises ValueError if a slot is not one contiguous range of bytes.
    """
    if slots.dim() < 1 or slots.shape[0] < 1 or not slots[0].is_contiguous():
        raise ValueError(
            f"every slot must be one contiguous range of bytes, got a tensor of shape "
            f"{tuple(slots.shape)} with strides {slots.stride()}; allocate it as [slots, ...]"
        )
    return RecordField(
        offset=offset,
        nbytes=slots[0].nbytes,
        slot_base=slots.data_ptr(),
        slot_stride=slots.stride(0) * slots.element_size(),
    )


class RecordTable:
    """The addresses of all layers as tensors that the kernels read. Fixed once built.

    A field is cut into units of at most `unit_bytes`. Fields whose address, offset and stride are
    multiples of 16 move 16 bytes at a time, with the last `nbytes % 16` one by one; a field that is
    not aligned so moves byte by byte: exact, but slow, and fit for small scales only.

    `header` [L, 4] int64: see `layout.Header`. `units` [L, U, 6] int64: see `layout.Unit`.
    `bytes_before` [L, U + 1] int64: bytes of the units before each.
    """

    def __init__(
        self,
        layers: Sequence[LayerRecords],
        *,
        device: torch.device,
        unit_bytes: int = DEFAULT_UNIT_BYTES,
    ) -> None:
        """Raises ValueError for memory that is not mapped and fields that do not fit the record."""
        if unit_bytes < 16 or unit_bytes & (unit_bytes - 1):
            raise ValueError(f"unit_bytes must be a power of two, at least 16, got {unit_bytes}")
        if not layers:
            raise ValueError("a record table needs at least one layer")
        self.unit_bytes = unit_bytes
        self.num_layers = len(layers)
        self.device = device
        rows = [_units(layer_idx, layer, unit_bytes) for layer_idx, layer in enumerate(layers)]
        self.max_units = max(len(units) for units in rows)
        self.payload_bytes = [sum(f.nbytes for f in layer.fields) for layer in layers]

        header = torch.zeros(len(layers), NUM_HEADER, dtype=torch.int64)
        units = torch.zeros(len(layers), self.max_units, NUM_UNIT_COLUMNS, dtype=torch.int64)
        for layer_idx, (layer, row) in enumerate(zip(layers, rows, strict=True)):
            header[layer_idx] = torch.tensor(
                [layer.host_base, layer.record_bytes, len(row), self.payload_bytes[layer_idx]]
            )
            units[layer_idx, : len(row), :5] = torch.tensor(row)
        bytes_before = torch.zeros(len(layers), self.max_units + 1, dtype=torch.int64)
        bytes_before[:, 1:] = units[:, :, 4].cumsum(1)
        self.header = header.to(device)
        self.units = units.to(device)
        self.bytes_before = bytes_before.to(device)


def _units(
    layer_idx: int, layer: LayerRecords, unit_bytes: int
) -> list[tuple[int, int, int, int, int]]:
    """The rows of `RecordTable.units`, in the order of the fields in the record."""
    if layer.host_base == 0:
        raise ValueError(
            f"layer {layer_idx}: the records have no device address; pin the host store with "
            f"device mapping before building a record table"
        )
    if not layer.fields:
        raise ValueError(f"layer {layer_idx}: a record needs at least one field")
    units = []
    end = 0
    for field in sorted(layer.fields):
        if field.nbytes < 1 or field.slot_base == 0 or field.slot_stride < field.nbytes:
            raise ValueError(f"layer {layer_idx}: {field} is empty, unallocated or overlaps itself")
        if field.offset < end or field.offset + field.nbytes > layer.record_bytes:
            raise ValueError(
                f"layer {layer_idx}: {field} overlaps another field or ends outside the record of "
                f"{layer.record_bytes} bytes"
            )
        end = field.offset + field.nbytes
        aligned = not any(
            x % 16
            for x in (
                layer.host_base,
                layer.record_bytes,
                field.offset,
                field.slot_base,
                field.slot_stride,
            )
        )
        for start in range(0, field.nbytes, unit_bytes):
            nbytes = min(unit_bytes, field.nbytes - start)
            units.append(
                (
                    field.offset + start,
                    field.slot_base + start,
                    field.slot_stride,
                    nbytes // 16 * 16 if aligned else 0,
                    nbytes,
                )
            )
    return units
