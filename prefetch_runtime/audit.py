"""Compares every mapped slot with the host store, byte for byte. For tests and debugging."""

import numpy as np
import torch

from prefetch_runtime.scheduler import LayerCache, Scheduler

_PIECE_BYTES = 32 << 20  # device memory that comparing takes


def audit(scheduler: Scheduler) -> list[str]:
    """What is wrong, a line each; empty when all is well. Call it at a step boundary.

    Checks, per layer: the mapping on the device is the table's; no two experts share a slot; and
    each mapped slot holds the bytes of its expert, every tensor of it. Waits for the device.
    """
    problems: list[str] = []
    for layer in scheduler.layers:
        problems += _audit_layer(scheduler, layer)
    return problems


def _audit_layer(scheduler: Scheduler, layer: LayerCache) -> list[str]:
    where = f"layer {layer.layer_idx}"
    problems: list[str] = []
    mapping = scheduler.mapping(layer).cpu().numpy()
    slots = scheduler.planned_mapping(layer)
    for expert in np.flatnonzero(mapping != slots):
        problems.append(
            f"{where}: expert {expert} is in slot {mapping[expert]} on the device, "
            f"but in slot {slots[expert]} in the table"
        )
    mapped = mapping[mapping >= 0]
    if len(set(mapped.tolist())) != len(mapped):
        problems.append(f"{where}: two experts share a slot: {mapping.tolist()}")
    for expert in np.flatnonzero(mapping >= 0):
        slot = int(mapping[expert])
        if not 0 <= slot < layer.buffers.num_slots:
            problems.append(
                f"{where}: expert {expert} is mapped to slot {slot}, which does not exist"
            )
            continue
        local = int(expert) if layer.local_of is None else int(layer.local_of[expert])
        for name, tensor in layer.buffers.tensors.items():
            ours, theirs = _bytes_of(tensor[slot]), _bytes_of(layer.store.tensor(name)[local])
            wrong = _num_different(ours, theirs)
            if wrong:
                problems.append(
                    f"{where}: slot {slot} should hold expert {expert}, but {wrong} of "
                    f"{len(ours)} bytes of {name} differ"
                )
    return problems


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _num_different(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Bytes of `ours`, on the device, that are not those of `theirs`, on the host. Compared on the
    device: page-locked memory comes there at the speed of the link."""
    wrong = 0
    pieces = (torch.split(tensor, _PIECE_BYTES) for tensor in (ours, theirs))
    for our, their in zip(*pieces, strict=True):
        there = their.to(our.device)
        if not torch.equal(our, there):
            wrong += int((our != there).sum())
    return wrong
