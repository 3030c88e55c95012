"""A small expert cache on the CPU: real store, real slots, any copier."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefetch_runtime.copier import Copier, CopyJob, CopyTicket, HostCopier
from prefetch_runtime.host_store import HostStore, LayerStore, RecordLayout
from prefetch_runtime.scheduler import LayerCache, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers

CPU = torch.device("cpu")
LAYOUT = RecordLayout.from_tensors(
    {
        "w13_weight": ((4, 3), torch.bfloat16),
        "w2_weight": ((3, 2), torch.bfloat16),
        "w13_weight_scale": ((4,), torch.float32),
    }
)


class RecordingCopier:
    """Moves the bytes when the compute stream waits for them, the latest that a copier may.

    `log` holds what happened, in order; tests add their own entries to it.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.jobs: list[list[CopyJob]] = []
        self.bytes_copied = 0
        self._pending: dict[int, Sequence[CopyJob]] = {}
        self._real = HostCopier()

    def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
        serial = len(self.jobs)
        self.jobs.append(list(jobs))
        self._pending[serial] = jobs
        self.log.append(("submit", serial))
        assert after_compute, "slots and staging are read by the compute stream"
        return CopyTicket(serial, None, 0)

    def wait(self, ticket: CopyTicket) -> None:
        self.log.append(("wait", ticket.serial))
        jobs = self._pending.pop(ticket.serial, None)
        if jobs is not None:
            self._real.submit(jobs)
            self.bytes_copied = self._real.bytes_copied

    def synchronize(self) -> None:
        self.log.append(("synchronize", None))

    def close(self) -> None:
        self.log.append(("close", None))

    @property
    def experts(self) -> list[list[int]]:
        """The experts of each submit."""
        return [[job.expert_id for job in jobs] for jobs in self.jobs]


@dataclass
class SmallCache:
    """One scheduler and what it was built of."""

    scheduler: Scheduler
    host_store: HostStore
    copier: Copier

    def layer(self, layer_idx: int = 0) -> LayerCache:
        return self.scheduler.layer(layer_idx)

    def mapping(self, layer_idx: int = 0) -> list[int]:
        """Slot of each expert as the device sees it."""
        mapping: list[int] = self.layer(layer_idx).mapping[:-1].tolist()
        return mapping


def filled_layer(host_store: HostStore, layer_idx: int, num_experts: int) -> LayerStore:
    """A layer whose every byte is random, so that no two experts are alike."""
    store = host_store.add_layer(layer_idx, num_experts, LAYOUT)
    generator = torch.Generator().manual_seed(100 + layer_idx)
    store.slab.copy_(torch.randint(0, 256, store.slab.shape, generator=generator).to(torch.uint8))
    return store


def small_cache(
    num_experts: int = 8,
    num_slots: int = 4,
    *,
    num_layers: int = 1,
    copier: Copier | None = None,
    expert_map: torch.Tensor | None = None,
    scheduler_class: type[Scheduler] = Scheduler,
    policy: str = "lru",
    staging_slots: int = 4,
    id_for_padding: int = -1,
) -> SmallCache:
    """A cache of `num_layers` layers, all slots empty. `num_experts` are the local ones."""
    host_store = HostStore()
    copier = copier or HostCopier()
    scheduler = scheduler_class(
        copier=copier,
        host_store=host_store,
        device=CPU,
        policy=policy,
        staging_slots=staging_slots,
        id_for_padding=id_for_padding,
    )
    for layer_idx in range(num_layers):
        store = filled_layer(host_store, layer_idx, num_experts)
        buffers = SlotBuffers(num_slots, LAYOUT, CPU)
        for tensor in buffers.tensors.values():
            tensor.view(torch.uint8).fill_(0xA5)  # what no expert holds
        scheduler.add_layer(
            layer_idx,
            f"model.layers.{layer_idx}.mlp.experts",
            store,
            buffers,
            expert_map=expert_map,
        )
    return SmallCache(scheduler, host_store, copier)


def holds(buffers: SlotBuffers, row: int, store: LayerStore, expert: int) -> bool:
    """Whether a row holds an expert's bytes, every tensor of it."""
    return all(
        torch.equal(tensor[row].view(torch.uint8), store.tensor(name)[expert].view(torch.uint8))
        for name, tensor in buffers.tensors.items()
    )
