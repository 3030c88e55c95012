"""Wide steps with real copies beside kernels: the right bytes in every wave, and no waiting."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from predictors import MAX_FORECAST
from predictors.base import by_rank
from prefetch_runtime.audit import audit
from prefetch_runtime.copier import create_copier
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.scheduler import ExpertWave, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K = 3, 48, 16, 4
# Two fields whose rows are large enough that a copy is still under way when its wave is issued.
LAYOUT = RecordLayout.from_tensors(
    {"w13_weight": ((3 << 19,), torch.int32), "w2_weight": ((3 << 18,), torch.int32)}
)


def _kind(mode: str) -> type[Scheduler]:
    if mode == "eager":
        return Scheduler
    from prefetch_runtime.device_scheduler import DeviceScheduler

    return DeviceScheduler


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within this context torch refuses what makes the host wait for a stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_what_waits_is_refused_here() -> None:
    rows = torch.zeros(4, dtype=torch.int32)
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        rows.to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "full"])
def test_wide_steps_wait_once_a_layer_and_compute_every_row(mode: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rng = np.random.default_rng(5)
    with HostStore() as store:
        scheduler = _scheduler(store, mode, device)
        shape = (24, TOP_K)
        seen = {
            name: torch.empty(NUM_LAYERS, *shape, tensor.shape[1] // 4096, dtype=torch.int32).cuda()
            for name, tensor in scheduler.slot_buffers(0).tensors.items()
        }
        for step in range(12):
            width = NUM_EXPERTS if step % 4 == 3 else int(rng.integers(NUM_SLOTS + 1, NUM_EXPERTS))
            ids = np.stack(
                [
                    np.resize(rng.choice(NUM_EXPERTS, width, replace=False), shape)
                    for _ in range(NUM_LAYERS)
                ]
            ).astype(np.int32)
            on_device = torch.from_numpy(ids).cuda()
            computed = torch.zeros(NUM_LAYERS, *shape, dtype=torch.int32, device=device)
            scheduler.begin_step(decodes=step % 4 < 2)
            with no_waiting():
                for layer_idx in range(NUM_LAYERS):
                    _compute(scheduler, layer_idx, on_device[layer_idx], computed, seen)
            assert torch.equal(computed, torch.ones_like(computed)), "each (token, k) once"
            for name, values in seen.items():
                for layer_idx in range(NUM_LAYERS):
                    held = store.layer(layer_idx).tensor(name)[:, ::4096]
                    assert torch.equal(values[layer_idx].cpu(), held[ids[layer_idx]]), name
            assert audit(scheduler) == []
        assert scheduler.stats().total("evictions") > 0
        scheduler.close()


def _scheduler(store: HostStore, mode: str, device: torch.device) -> Scheduler:
    """Layers of random bytes, pinned, with empty slots."""
    scheduler = _kind(mode)(
        copier=create_copier(device), host_store=store, device=device, mode=mode,
        staging_slots=8, id_for_padding=0,
    )  # fmt: skip
    for layer_idx in range(NUM_LAYERS):
        layer = store.add_layer(layer_idx, NUM_EXPERTS, LAYOUT)
        layer.slab.random_(0, 256)
        store.pin(layer_idx)
        slots = SlotBuffers(NUM_SLOTS, LAYOUT, device)
        scheduler.add_layer(layer_idx, f"layer {layer_idx}", layer, slots)
    scheduler.seal()
    scheduler.warm_up(TOP_K, 64)
    return scheduler


def _compute(
    scheduler: Scheduler,
    layer_idx: int,
    ids: torch.Tensor,
    computed: torch.Tensor,
    seen: dict[str, torch.Tensor],
) -> None:
    """Every 4096th number of each assignment's expert, as its wave finds it."""
    assert not (type(scheduler) is Scheduler and scheduler.fits(layer_idx, ids))
    _see(scheduler.expert_waves(layer_idx, ids), layer_idx, ids, computed, seen)


def _see(
    waves: Iterable[ExpertWave],
    layer_idx: int,
    ids: torch.Tensor,
    computed: torch.Tensor,
    seen: dict[str, torch.Tensor],
) -> None:
    for wave in waves:
        computed[layer_idx] += wave.in_wave
        rows = wave.expert_map[ids.long()].clamp(min=0).long()
        for name, tensor in wave.buffers.tensors.items():
            found = tensor[:, ::4096][rows]
            kept = seen[name][layer_idx]
            torch.where(wave.in_wave.unsqueeze(-1), found, kept, out=kept)


@pytest.mark.gpu
def test_captured_waves_follow_the_routing_of_every_replay() -> None:
    """Between replays come prompts, whose waves the host issues through the same ring."""
    from prefetch_runtime.device_scheduler import DeviceScheduler

    device = torch.device("cuda", torch.cuda.current_device())
    rng = np.random.default_rng(6)
    shape = (24, TOP_K)
    with HostStore() as store:
        scheduler = _scheduler(store, "full", device)
        assert isinstance(scheduler, DeviceScheduler)
        assert scheduler.captures(shape[0], TOP_K)
        assert not scheduler.fits(0, torch.zeros(shape, dtype=torch.int32, device=device))
        ids = torch.zeros(NUM_LAYERS, *shape, dtype=torch.int32, device=device)
        kv_slots = torch.zeros(shape[0], dtype=torch.int64, device=device)
        computed = torch.zeros(NUM_LAYERS, *shape, dtype=torch.int32, device=device)
        seen = {
            name: torch.empty(NUM_LAYERS, *shape, tensor.shape[1] // 4096, dtype=torch.int32).cuda()
            for name, tensor in scheduler.slot_buffers(0).tensors.items()
        }

        def step() -> None:
            for layer_idx in range(NUM_LAYERS):
                waves = scheduler.captured_waves(layer_idx, ids[layer_idx], padding=kv_slots)
                _see(waves, layer_idx, ids[layer_idx], computed, seen)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        scheduler.reset()
        for at in range(16):
            width = int(rng.integers(2, NUM_EXPERTS + 1)) if at % 3 else NUM_EXPERTS
            padded = int(rng.integers(0, shape[0])) if at % 2 else 0
            chosen = [rng.choice(NUM_EXPERTS, width, replace=False) for _ in range(NUM_LAYERS)]
            on_host = np.stack([np.resize(one, shape) for one in chosen]).astype(np.int32)
            ids.copy_(torch.from_numpy(on_host))
            kv_slots.copy_(torch.arange(shape[0]))
            kv_slots[shape[0] - padded :] = -1
            computed.zero_()
            by_host = at % 4 == 3
            scheduler.begin_step(decodes=not by_host)
            with no_waiting():
                if by_host:
                    for layer_idx in range(NUM_LAYERS):
                        _compute(scheduler, layer_idx, ids[layer_idx], computed, seen)
                else:
                    graph.replay()
            real = shape[0] if by_host else shape[0] - padded
            found = computed[:, :real]
            assert torch.equal(found, torch.ones_like(found)), "each (token, k) once"
            for name, values in seen.items():
                for layer_idx in range(NUM_LAYERS):
                    held = store.layer(layer_idx).tensor(name)[:, ::4096]
                    expected = held[on_host[layer_idx, :real]]
                    assert torch.equal(values[layer_idx, :real].cpu(), expected), (at, name)
            assert audit(scheduler) == []
        stats = scheduler.stats()
        assert stats.total("evictions") > 0
        assert stats.stall_seconds > 0
        scheduler.close()


@pytest.mark.gpu
def test_a_captured_forecast_follows_the_guesses_of_each_replay() -> None:
    from prefetch_runtime.device_scheduler import _forecast

    num_experts, random = 128, np.random.default_rng(0)
    made = [random.integers(0, num_experts, (16, 16)) for _ in range(3)]
    guesses = torch.from_numpy(made[0]).cuda()
    _forecast(guesses, None, MAX_FORECAST, num_experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forecast = _forecast(guesses, None, MAX_FORECAST, num_experts)
    for ids in made:
        guesses.copy_(torch.from_numpy(ids))
        graph.replay()
        assert forecast.tolist() == by_rank(ids, MAX_FORECAST)
