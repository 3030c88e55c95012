"""Where a layer's expert kernel holds its tensors: those are the slots, and follow them.

vLLM's kernels keep scales, zeros and biases in objects of their own, some as the layer's
parameters, some as views. A tensor of one row per expert that is no part of a slot would keep the
rows of the last chunk for ever: such a kernel is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from prefetch_runtime.vllm.checks import UnsupportedError

_DEPTH = 8
READ_BY_THE_METHOD = ("w13_weight", "w2_weight")
"""What `apply` of vLLM's methods reads off the layer at every call."""


def tensors_held(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `root`, an object of vLLM's, holds in attributes, however deep.

    Modules are not entered, nor objects of other packages.
    """
    seen: set[int] = set()

    def walk(where: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield where, value
            return
        if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | type):
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            inside = [(f"{where}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            inside = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
        elif _is_vllms(value):
            inside = [(f"{where}.{name}", item) for name, item in vars(value).items()]
        else:
            return
        for name, item in inside:
            yield from walk(name, item, depth - 1)

    yield from walk(type(root).__name__, root, _DEPTH)


def _is_vllms(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package in ("vllm", "types") and hasattr(value, "__dict__")


def fields_in_use(layer: Any, produced: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the per-expert parameters that post-processing left, those that the kernel reads.

    Of two names of the same memory the one that the method reads is taken. Empty placeholders are
    left out, and so is what only the loader needed (shapes, unused zeros).
    """
    addresses = {
        tensor.data_ptr()
        for kernel in (layer.quant_method.moe_kernel, layer.quant_method.moe_quant_config)
        for _, tensor in tensors_held(kernel)
    }
    addresses |= {produced[name].data_ptr() for name in READ_BY_THE_METHOD if name in produced}
    in_use: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name in sorted(produced, key=lambda name: name not in READ_BY_THE_METHOD):
        tensor, address = produced[name], produced[name].data_ptr()
        if tensor.numel() and address in addresses and address not in taken:
            taken.add(address)
            in_use[name] = tensor
    return in_use


class Seats:
    """Every tensor object through which a layer's kernel reads its slots."""

    def __init__(self, layer: Any, slots: Mapping[str, torch.Tensor]) -> None:
        """`layer`: post-processed, its kernel built on `slots` [S, ...].

        Raises:
            UnsupportedError: the kernel holds rows of experts that no slot has.
        """
        name_at = {tensor.data_ptr(): name for name, tensor in slots.items()}
        self._slots = self._read = slots
        self._seats: dict[int, tuple[str, torch.Tensor]] = {}
        num_slots = next(iter(slots.values())).shape[0]
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.data_ptr() in name_at and parameter.numel():
                self._take(name_at[parameter.data_ptr()], name, parameter)
        for kernel in (layer.quant_method.moe_kernel, layer.quant_method.moe_quant_config):
            for where, tensor in tensors_held(kernel):
                if tensor.numel() == 0 or tensor.dim() == 0:
                    continue
                if tensor.data_ptr() in name_at:
                    self._take(name_at[tensor.data_ptr()], where, tensor)
                elif tensor.shape[0] == num_slots and num_slots > 1:
                    raise UnsupportedError(
                        f"{layer.layer_name}: {type(layer.quant_method).__name__} keeps "
                        f"{where} {tuple(tensor.shape)}, a row for each expert, outside of the "
                        "parameters that the cache knows; use another --moe-backend"
                    )

    def _take(self, name: str, where: str, tensor: torch.Tensor) -> None:
        slots = self._slots[name]
        if tensor.dtype != slots.dtype or tensor.numel() != slots.numel():
            raise UnsupportedError(
                f"{where} {tuple(tensor.shape)} {tensor.dtype} is a part of {name} "
                f"{tuple(slots.shape)} {slots.dtype}, which the cache cannot exchange"
            )
        self._seats[id(tensor)] = (name, tensor)

    def point(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Let the kernel read `rows` [R, ...], named like the slots, in their place."""
        if rows is self._read:
            return
        self._read = rows
        for name, tensor in self._seats.values():
            given = rows[name]
            tensor.data = given.view(given.shape[0], *tensor.shape[1:])

    def restore(self) -> None:
        """Let the kernel read the slots again."""
        self.point(self._slots)
