"""Every expert in host memory, as one record that holds all its tensors.

Shapes: E = experts in the layer.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from tqdm import tqdm

from prefetch_runtime.cudart import HostPages, load_host_pages
from prefetch_runtime.host_memory import MemoryLimit, check_room, lock_limit, memory_limits
from prefetch_runtime.pinned import Pages, Pinner

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of an expert's record."""

    name: str
    shape: tuple[int, ...]
    """Without the expert dimension; () for one number per expert."""
    dtype: torch.dtype
    offset: int
    """First byte in the record, a multiple of 256."""
    nbytes: int
    """0 for an empty tensor, which some formats keep as a placeholder."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where each tensor lies in an expert's record."""

    fields: tuple[TensorField, ...]
    record_bytes: int
    """Distance of one expert's record from the next, a multiple of 256."""

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> "RecordLayout":
        """Lay out the named tensors, given as (shape without the expert dimension, dtype).

        Raises:
            ValueError: nothing to hold, or a negative dimension.
        """
        fields: list[TensorField] = []
        end = 0
        for name, (shape, dtype) in tensors.items():
            if any(size < 0 for size in shape):
                raise ValueError(f"{name} has a negative dimension: {tuple(shape)}")
            nbytes = math.prod(shape) * dtype.itemsize
            fields.append(TensorField(name, tuple(shape), dtype, end, nbytes))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if end == 0:
            raise ValueError(f"a record needs a tensor that is not empty, got {dict(tensors)}")
        return cls(tuple(fields), end)

    @property
    def payload_bytes(self) -> int:
        """Bytes of an expert's tensors, without the gaps between them."""
        return sum(field.nbytes for field in self.fields)


class LayerStore:
    """The experts of one layer: a slab of E records. Made by `HostStore.add_layer`."""

    def __init__(self, layer_idx: int, num_experts: int, layout: RecordLayout) -> None:
        self.layer_idx = layer_idx
        self.num_experts = num_experts
        self.layout = layout
        self.pinned = False
        """Whether the slab is page-locked."""
        self.device_address = 0
        """Where a kernel on the device finds the slab; 0 unless pinned."""
        self._pages: Pages | None = Pages(num_experts * layout.record_bytes)
        self.nbytes = self._pages.nbytes
        """Bytes of the slab."""
        self.address = self._pages.address
        """Where the host finds the slab; 0 once closed."""
        self._views = {field.name: self._view(field) for field in layout.fields}

    @property
    def slab(self) -> torch.Tensor:
        """[E, record_bytes] uint8 on the host.

        It and every view of it stay readable while referenced, even past `HostStore.close`.
        """
        return self._open_pages().tensor.view(self.num_experts, self.layout.record_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """[E, *shape] view of one tensor of all experts; write it to fill the store.

        Different experts may be written by different threads at once.

        Raises:
            ValueError: the records hold no tensor of that name.
            RuntimeError: the store is closed.
        """
        self._open_pages()
        if name not in self._views:
            raise ValueError(
                f"layer {self.layer_idx} has no tensor {name!r}; it has {', '.join(self._views)}"
            )
        return self._views[name]

    def record(self, expert_id: int) -> torch.Tensor:
        """[record_bytes] uint8 view of one expert.

        Raises:
            ValueError: no such expert.
        """
        if not 0 <= expert_id < self.num_experts:
            raise ValueError(
                f"layer {self.layer_idx} has experts 0 to {self.num_experts - 1}, not {expert_id}"
            )
        return self.slab[expert_id]

    def _view(self, field: TensorField) -> torch.Tensor:
        column = self.slab[:, field.offset : field.offset + field.nbytes]
        return column.view(field.dtype).view(self.num_experts, *field.shape)

    def _open_pages(self) -> Pages:
        if self._pages is None:
            raise RuntimeError(f"the host store of layer {self.layer_idx} is closed")
        return self._pages

    # For the HostStore that owns this layer

    def _pin(self, pinner: Pinner, planned_bytes: int) -> None:
        what = f"the experts of layer {self.layer_idx}"
        self.device_address = pinner.pin(self._open_pages(), what, planned_bytes)
        self.pinned = True

    def _unpin(self, pinner: Pinner) -> None:
        self.pinned = False
        self.device_address = 0
        pinner.unpin(self._open_pages())

    def _close(self) -> None:
        self.pinned = False
        self.device_address = self.address = 0
        self._views.clear()
        self._pages = None


class HostStore:
    """Owns the host memory of all layers' experts, and its page-locking.

    Memory is taken as it is written, so loading peaks at what the experts weigh. Fill a layer,
    then pin it: registering touched pages takes a tenth of the time of torch's pinned allocator,
    which also rounds up to powers of two. A context manager; close it after the copier. One that is
    dropped without being closed unlocks its memory, too.
    """

    def __init__(
        self,
        *,
        pinning: bool | None = None,
        host_pages: HostPages | None = None,
        limits: Callable[[], list[MemoryLimit]] = memory_limits,
        memlock: Callable[[], int | None] = lock_limit,
    ) -> None:
        """
        Args:
            pinning: page-lock in `pin`; None: where CUDA is available.
            host_pages, limits, memlock: CUDA's page-locking and the system's limits; tests pass
                their own.

        Raises:
            RuntimeError: `pinning` is asked for without CUDA.
        """
        if pinning is None:
            pinning = host_pages is not None or torch.cuda.is_available()
        if pinning and host_pages is None:
            if not torch.cuda.is_available():
                raise RuntimeError("pinning=True needs a CUDA device; leave it out on a CPU")
            host_pages = load_host_pages()
        self._pinner = Pinner(host_pages) if pinning and host_pages is not None else None
        if self._pinner is not None:
            # For an engine whose start fails in vLLM's hands, which then just lets go of it.
            weakref.finalize(self, self._pinner.close).atexit = False
        self._limits = limits
        self._memlock = memlock
        self._layers: dict[int, LayerStore] = {}
        # Page-locked layers that have been replaced, until their successors are pinned.
        self._replaced: dict[int, LayerStore] = {}
        self._limits_at_start: list[MemoryLimit] | None = None
        self._closed = False

    def add_layer(self, layer_idx: int, num_experts: int, layout: RecordLayout) -> LayerStore:
        """Room for the experts of a layer, all zero until written.

        Raises:
            ValueError: the layer is there already, or `num_experts` is below 1.
            HostMemoryError: more than the machine, a cgroup or RLIMIT_MEMLOCK leaves.
        """
        self._check_open()
        if layer_idx in self._layers:
            raise ValueError(
                f"layer {layer_idx} is in the host store already; use replace_layer to change it"
            )
        layer = self._new_layer(layer_idx, num_experts, layout, self.total_bytes)
        self._layers[layer_idx] = layer
        return layer

    def replace_layer(self, layer_idx: int, num_experts: int, layout: RecordLayout) -> LayerStore:
        """New room for a layer whose records change form; the old layer leaves the store.

        The old `LayerStore` stays as it is, page-locked or not, so that its records can be
        converted into the new one. `pin` of the new layer, which says that this is over, unlocks
        the old one; its memory goes back with the last reference to it. Until then both are there.

        Raises:
            ValueError: no such layer, or `num_experts` is below 1.
            HostMemoryError: more than the machine or a cgroup leaves.
        """
        self._check_open()
        old = self.layer(layer_idx)
        new = self._new_layer(layer_idx, num_experts, layout, self.total_bytes - old.nbytes)
        self._let_go_of_replaced(layer_idx)
        if old.pinned:
            self._replaced[layer_idx] = old
        self._layers[layer_idx] = new
        return new

    def layer(self, layer_idx: int) -> LayerStore:
        """One layer's experts.

        Raises:
            ValueError: no such layer.
        """
        if layer_idx not in self._layers:
            raise ValueError(f"no layer {layer_idx} in the host store; it has {[*self._layers]}")
        return self._layers[layer_idx]

    @property
    def layers(self) -> list[LayerStore]:
        """All layers, in order of their index."""
        return [self._layers[index] for index in sorted(self._layers)]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs; what has not been written yet takes no memory."""
        return sum(layer.nbytes for layer in self._layers.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return self._pinner.pinned_bytes if self._pinner is not None else 0

    def pin(self, layer_idx: int) -> None:
        """Page-lock a filled layer and map it for the device. Nothing happens without CUDA.

        No copy may still read a layer that this one has replaced.

        Raises:
            ValueError: no such layer.
            HostMemoryError: CUDA refused; says how much was pinned, the limits and the remedy.
        """
        self._check_open()
        layer = self.layer(layer_idx)
        self._let_go_of_replaced(layer_idx)
        if self._pinner is not None and not layer.pinned:
            layer._pin(self._pinner, self.total_bytes)

    def pin_all(self, progress: bool = True) -> None:
        """`pin` every layer, with a progress bar on standard error if asked."""
        self._check_open()
        with tqdm(
            desc="page-locking experts",
            total=self.total_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress or self._pinner is None,
        ) as bar:
            for layer in self.layers:
                self.pin(layer.layer_idx)
                bar.update(layer.nbytes)

    def close(self) -> None:
        """Unlock and let go of all memory. No copy may be under way. Safe to call twice.

        Views that are still referenced stay readable; their memory goes back with the last one.
        """
        if self._closed:
            return
        self._closed = True
        try:
            # Unlock first: memory that goes back while registered would stay locked unseen.
            if self._pinner is not None:
                self._pinner.close()
        finally:
            for layer in (*self._layers.values(), *self._replaced.values()):
                layer._close()
            self._layers.clear()
            self._replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _new_layer(
        self, layer_idx: int, num_experts: int, layout: RecordLayout, other_bytes: int
    ) -> LayerStore:
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        nbytes = num_experts * layout.record_bytes
        # Layers that were added but not filled yet still look free, so the total counts as well.
        self._check_total(other_bytes + nbytes, f"the experts up to layer {layer_idx}")
        check_room(nbytes, self._limits(), f"the experts of layer {layer_idx}")
        return LayerStore(layer_idx, num_experts, layout)

    def _let_go_of_replaced(self, layer_idx: int) -> None:
        old = self._replaced.pop(layer_idx, None)
        if old is not None and self._pinner is not None:
            old._unpin(self._pinner)

    def _check_total(self, total_bytes: int, what: str) -> None:
        if self._limits_at_start is None:
            self._limits_at_start = self._limits()
        check_room(total_bytes, self._limits_at_start, what)
        if self._pinner is not None:
            self._pinner.check_lock_limit(total_bytes, self._memlock())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the host store is closed")
