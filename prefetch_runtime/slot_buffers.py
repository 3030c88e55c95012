"""The fixed places on the device that experts are copied into.

Shapes: S = slots.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from prefetch_runtime.host_store import RecordLayout


class CopyRange(NamedTuple):
    """Where one field of a record goes: bytes `offset : offset + nbytes` of the record, to
    `address + slot_id * stride`."""

    name: str
    offset: int
    nbytes: int
    address: int
    stride: int


class SlotBuffers:
    """`num_slots` places for an expert: one tensor per field, [S, *shape], at a fixed address."""

    def __init__(self, num_slots: int, layout: RecordLayout, device: torch.device) -> None:
        """Allocate one contiguous, uninitialised tensor per field of `layout`.

        Raises:
            ValueError: `num_slots` is below 1.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self._adopt(
            {
                field.name: torch.empty((num_slots, *field.shape), dtype=field.dtype, device=device)
                for field in layout.fields
            }
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "SlotBuffers":
        """Use tensors that exist, [S, *shape] by name, such as a layer's own parameters.

        The memory is shared. The tensors must keep their storage: see `check_integrity`.

        Raises:
            ValueError: none given; no slot dimension; different numbers of slots or devices; the
                rows of one are not contiguous, or overlap.
        """
        buffers = cls.__new__(cls)
        buffers._adopt(tensors)
        return buffers

    def _adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not tensors:
            raise ValueError("slot buffers need at least one tensor")
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or tensor.shape[0] == 0:
                raise ValueError(f"{name} must be [slots, ...] with at least one slot")
            if not tensor[0].is_contiguous() or (
                tensor.shape[0] > 1 and tensor.stride(0) < tensor[0].numel()
            ):
                raise ValueError(
                    f"{name} with strides {tuple(tensor.stride())} does not hold each slot as one "
                    "run of bytes; pass a tensor whose rows are contiguous"
                )
        for trait in ("num_slots", "device"):
            found = {
                name: tensor.shape[0] if trait == "num_slots" else tensor.device
                for name, tensor in tensors.items()
            }
            if len(set(found.values())) > 1:
                raise ValueError(f"slot tensors differ in {trait}: {found}")
        self._sources = dict(tensors)
        self.tensors: dict[str, torch.Tensor] = {
            name: tensor.detach() for name, tensor in tensors.items()
        }
        first = next(iter(self.tensors.values()))
        self.num_slots: int = first.shape[0]
        self.device: torch.device = first.device
        self._ranges: dict[int, tuple[RecordLayout, tuple[CopyRange, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def row(self, name: str, slot_id: int) -> torch.Tensor:
        """[*shape] view of one field of one slot."""
        return self.tensors[name][slot_id]

    def row_bytes(self, name: str, slot_id: int) -> torch.Tensor:
        """[nbytes] uint8 view of one field of one slot."""
        return self.tensors[name][slot_id].reshape(-1).view(torch.uint8)

    def ranges(self, layout: RecordLayout) -> tuple[CopyRange, ...]:
        """The byte ranges that bring a record of `layout` into a slot; empty fields are left out.

        Raises:
            ValueError: names, shapes or dtypes of layout and slots differ.
        """
        known = self._ranges.get(id(layout))
        if known is None:
            # The layout is kept beside its ranges, so that its id stays its own.
            known = self._ranges[id(layout)] = (layout, self._ranges_of(layout))
        return known[1]

    def _ranges_of(self, layout: RecordLayout) -> tuple[CopyRange, ...]:
        record = {field.name: (field.shape, field.dtype) for field in layout.fields}
        slots = {name: (tuple(t.shape[1:]), t.dtype) for name, t in self.tensors.items()}
        if record != slots:
            differing = sorted(
                name for name in record.keys() | slots.keys() if record.get(name) != slots.get(name)
            )
            raise ValueError(
                f"slots and records differ in {', '.join(differing)}: slots hold "
                f"{ {name: slots.get(name) for name in differing} }, records "
                f"{ {name: record.get(name) for name in differing} }"
            )
        return tuple(
            CopyRange(
                field.name,
                field.offset,
                field.nbytes,
                self.tensors[field.name].data_ptr(),
                self.tensors[field.name].stride(0) * field.dtype.itemsize,
            )
            for field in layout.fields
            if field.nbytes
        )

    def check_integrity(self) -> None:
        """Raise if a tensor given to `from_tensors` has been moved to other memory since."""
        for name, source in self._sources.items():
            if source.data_ptr() != self.tensors[name].data_ptr():
                raise RuntimeError(
                    f"{name} has moved since the slots were made of it; copies go to the old "
                    "address, so make the slots after the last change of the parameters' storage"
                )
