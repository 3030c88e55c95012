"""Creates experts on the host and turns them, slot-sized chunk by chunk, into kernel format.

vLLM's quantisation methods make every parameter on the device and post-process all experts of a
layer at once. Here the same methods run unchanged, but on the host for creation and on `num_slots`
experts at a time for post-processing, so that loading needs no more device memory than serving.
Shapes: E = experts of the layer, S = slots.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from prefetch_runtime.host_store import HostStore, LayerStore, RecordLayout
from prefetch_runtime.slot_buffers import SlotBuffers

SHARED = ("w13_input_scale", "w2_input_scale")
"""Parameters [E] of which vLLM keeps the maximum over all experts (static fp8 activations)."""


class _Uninitialised(TorchFunctionMode):
    """Notes the tensors that `torch.empty` made, whose contents nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self._tensors[made.data_ptr()] = made
        return made

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter's contents are still what `torch.empty` left there."""
        made = self._tensors.get(parameter.data_ptr())
        # An in-place write after creation raises the version that both share.
        return made is not None and made._version == 0 and parameter._version == 0


def create_on_host(
    create_weights: Callable[..., None],
    layer: torch.nn.Module,
    *,
    layer_idx: int,
    num_experts: int,
    host_store: HostStore,
    arguments: Mapping[str, Any],
) -> LayerStore:
    """Run a quantisation method's `create_weights` so that per-expert parameters live in the store.

    The parameters that it registers stay registered, under the same names and with their loaders,
    but their storage is a strided view [E, ...] of the layer's host records.
    """
    before = set(dict(layer.named_parameters(recurse=False)))
    uninitialised = _Uninitialised()
    with torch.device("cpu"), uninitialised:
        create_weights(layer=layer, **arguments)
    made = {
        name: parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if name not in before and parameter.ndim > 0 and parameter.shape[0] == num_experts
    }
    store = host_store.add_layer(
        layer_idx,
        num_experts,
        RecordLayout.from_tensors(
            {name: (tuple(p.shape[1:]), p.dtype) for name, p in made.items()}
        ),
    )
    for name, parameter in made.items():
        home = store.tensor(name)
        if not uninitialised.holds(parameter):
            home.copy_(parameter.data)
        parameter.data = home
    return store


def process_in_chunks(
    process: Callable[[torch.nn.Module], None],
    layer: Any,
    *,
    store: LayerStore,
    num_slots: int,
    device: torch.device,
    host_store: HostStore,
    in_use: Callable[[Any, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
) -> tuple[LayerStore, SlotBuffers]:
    """Run a quantisation method's post-processing on `num_slots` experts at a time.

    Every chunk starts from the method's and the layer's state before the first one. The last
    chunk's parameters stay on the layer: they are the slots, and the kernel that the method built
    on them has the right number of rows. The records end up in kernel format. What a method takes
    from all experts together (`SHARED`) it finds in every chunk.

    Args:
        in_use: given the layer and what a chunk left, the per-expert tensors that the kernel
            reads; the others lose their memory. None: all.

    Returns:
        The layer's store in its final layout, and its slots.
    """
    method, moe_config = layer.quant_method, layer.moe_config
    num_experts = store.num_experts
    raw = {name: layer._parameters[name] for name in (f.name for f in store.layout.fields)}
    _share(raw)
    before = _State(layer, method)
    # Pinned memory moves at the speed of the link, so it is pinned before the chunks travel.
    host_store.pin(store.layer_idx)
    final: LayerStore | None = None
    left: dict[str, torch.Tensor] = {}
    produced: dict[str, torch.Tensor] = {}
    for start in range(0, num_experts, num_slots):
        rows = min(num_slots, num_experts - start)
        before.restore()
        chunk = {
            name: _on_device(parameter, start, rows, num_slots, device)
            for name, parameter in raw.items()
        }
        unchanged = {name: parameter.data.clone() for name, parameter in chunk.items()}
        for name, parameter in chunk.items():
            layer._parameters[name] = parameter
        with _expert_count(layer, moe_config, num_slots):
            process(layer)
        left = _per_expert(layer, before.parameter_names - raw.keys(), num_slots)
        produced = left if in_use is None else in_use(layer, left)
        layout = RecordLayout.from_tensors(
            {name: (tuple(t.shape[1:]), t.dtype) for name, t in produced.items()}
        )
        if final is None:
            final = store
            if layout != store.layout:
                final = host_store.replace_layer(store.layer_idx, num_experts, layout)
        for name, tensor in produced.items():
            if final is store and torch.equal(_bytes(tensor), _bytes(unchanged[name])):
                continue
            _copy_rows(final.tensor(name)[start : start + rows], tensor)
        del unchanged
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the rows written back are read by nobody before this
    assert final is not None
    if final is not store:
        for name in raw:
            raw[name].data = torch.empty(0)
        host_store.pin(final.layer_idx)
    addresses = {tensor.data_ptr() for tensor in produced.values()}
    for name, tensor in left.items():
        if tensor.data_ptr() not in addresses:
            layer._parameters[name].data = tensor.new_empty((num_slots, 0))
    return final, SlotBuffers.from_tensors(produced)


def _share(raw: Mapping[str, torch.nn.Parameter]) -> None:
    """Give every expert what vLLM will take from all of them: the largest activation scale.

    vLLM reduces such a parameter [E] to one number for the layer, after loading. In a chunk it
    would see that chunk's experts only.
    """
    for name in SHARED:
        if name in raw and raw[name].dim() == 1:
            raw[name].data.fill_(raw[name].data.max())


class _State:
    """What a post-processing method may change on the layer and on itself."""

    def __init__(self, layer: Any, method: Any) -> None:
        self._objects = [
            (target, {k: (dict(v) if isinstance(v, dict) else v) for k, v in vars(target).items()})
            for target in (layer, method)
        ]
        self.parameter_names = set(layer._parameters)

    def restore(self) -> None:
        for target, attributes in self._objects:
            vars(target).clear()
            vars(target).update(
                {k: (dict(v) if isinstance(v, dict) else v) for k, v in attributes.items()}
            )


def _on_device(
    parameter: torch.nn.Parameter, start: int, rows: int, num_slots: int, device: torch.device
) -> torch.nn.Parameter:
    """`rows` experts from `start` on, padded with copies of the last one to `num_slots`."""
    home = parameter.data
    chunk = torch.empty((num_slots, *home.shape[1:]), dtype=home.dtype, device=device)
    _copy_rows(chunk[:rows], home[start : start + rows])
    for row in range(rows, num_slots):
        _copy_rows(chunk[row : row + 1], chunk[rows - 1 : rows])
    made = torch.nn.Parameter(chunk, requires_grad=False)
    made.__dict__.update(parameter.__dict__)
    return made


def _copy_rows(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy expert by expert, as bytes, which every dtype can be.

    A record's field is contiguous, a stack of them on the host is not, and torch would pack such a
    stack into pageable memory first.
    """
    for row, source in zip(to, of, strict=False):
        _bytes(row).copy_(_bytes(source), non_blocking=True)


@contextmanager
def _expert_count(layer: Any, moe_config: Any, num_experts: int) -> Iterator[None]:
    """Let the method see a layer of `num_experts` experts."""
    counts: list[tuple[Any, str, int]] = []
    for target, names in (
        (layer, ("global_num_experts", "local_num_experts", "num_experts")),
        (moe_config, ("num_experts", "num_local_experts", "num_logical_experts")),
        (layer.quant_method, ("num_experts",)),
    ):
        counts.extend(
            (target, name, getattr(target, name)) for name in names if hasattr(target, name)
        )
    for target, name, _ in counts:
        setattr(target, name, num_experts)
    try:
        yield
    finally:
        for target, name, count in counts:
            setattr(target, name, count)


def _per_expert(layer: Any, foreign: set[str], num_slots: int) -> dict[str, torch.Tensor]:
    """The tensors with a row per slot that post-processing left on the layer."""
    return {
        name: parameter.data
        for name, parameter in layer._parameters.items()
        if parameter is not None
        and name not in foreign
        and parameter.ndim > 0
        and parameter.shape[0] == num_slots
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes, so that NaN equals itself; a view if it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)
