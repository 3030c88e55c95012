"""Measures what a segmented decode step costs beside its kernels, when every expert is resident.

48 layers, 128 experts and slots, top 8, 1 token; divide by 48 for one layer. Not measured: copies,
anything of vLLM. The replay needs a GPU; the host's part alone runs anywhere.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from graphs import SegmentedCaptures, between_segments
from predictors import PredictorShape, create_predictor
from prefetch_runtime.copier import create_copier
from prefetch_runtime.host_prefetch import HostPrefetcher
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from prefetch_runtime.scheduler import Between, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers

LAYERS, EXPERTS, TOP_K, STEPS = 48, 128, 8, 64
LAYOUT = RecordLayout.from_tensors(
    {"w13_weight": ((64,), torch.float32), "w2_weight": ((64,), torch.float32)}
)


def build(device: torch.device, between: Between, predictor: str) -> Scheduler:
    store = HostStore()
    scheduler = Scheduler(
        copier=create_copier(device), host_store=store, device=device, between=between
    )
    for layer_idx in range(LAYERS):
        layer = store.add_layer(layer_idx, EXPERTS, LAYOUT)
        store.pin(layer_idx)
        scheduler.add_layer(layer_idx, str(layer_idx), layer, SlotBuffers(EXPERTS, LAYOUT, device))
    scheduler.seal()
    if predictor != "none":
        shape = PredictorShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
        scheduler.attach_prefetcher(
            HostPrefetcher(
                create_predictor(predictor, shape),
                create_copier(device),
                num_layers=LAYERS,
                top_k=TOP_K,
            )
        )
    return scheduler


def routing() -> Any:
    """[STEPS, LAYERS, TOP_K] int32."""
    model = create_routing_model("qwen3-30b-a3b", num_layers=LAYERS)
    return generate_routing(model, STEPS).topk.astype(np.int32)


def all_resident(scheduler: Scheduler, ids: torch.Tensor) -> None:
    """Bring in every expert of every layer, at once."""
    everything = torch.arange(EXPERTS, dtype=torch.int32, device=ids.device).view(1, EXPERTS)
    scheduler.begin_step()
    for layer_idx in range(LAYERS):
        scheduler.fetch(layer_idx, everything)


@pytest.mark.benchmark(group=f"host's part of {LAYERS} layers, all hit")
@pytest.mark.parametrize("predictor", ["none", "previous_token", "frequency", "transition"])
def bench_host(benchmark: BenchmarkFixture, predictor: str) -> None:
    actions: list[Callable[[], None]] = []
    is_noting = False

    def between(action: Callable[[], None]) -> None:
        if is_noting:
            actions.append(action)
        else:
            action()

    scheduler = build(torch.device("cpu"), between, predictor)
    ids = torch.zeros((1, TOP_K), dtype=torch.int32)
    all_resident(scheduler, ids)
    is_noting = True
    for layer_idx in range(LAYERS):
        scheduler.fetch(layer_idx, ids)
    host_ids = scheduler._reader.send(ids, None).host  # the buffer that all demands go through
    steps = cycle(routing())

    def step() -> None:
        scheduler.begin_step()
        for action, row in zip(actions, next(steps), strict=True):
            host_ids[0] = row
            action()

    before = scheduler.stats()
    benchmark(step)
    after = scheduler.stats()
    assert after.total("misses") == before.total("misses")
    assert after.total("hits") - before.total("hits") >= LAYERS * TOP_K


@pytest.mark.gpu
@pytest.mark.benchmark(group=f"replay of {LAYERS} layers without kernels, all hit")
def bench_replay(benchmark: BenchmarkFixture) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    scheduler = build(device, between_segments, "none")
    ids = torch.zeros((LAYERS, 1, TOP_K), dtype=torch.int32, device=device)
    all_resident(scheduler, ids)
    captures = SegmentedCaptures()

    def step() -> torch.Tensor:
        return torch.cat([scheduler.fetch(index, ids[index]) for index in range(LAYERS)])

    step()
    with captures.here():
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            slot_ids = step()
    steps = cycle(torch.from_numpy(routing()).to(device).unsqueeze(2))

    def replay() -> None:
        ids.copy_(next(steps))
        scheduler.begin_step()
        graph.replay()
        torch.cuda.synchronize()

    replay()
    mapping = torch.stack([scheduler.mapping(layer) for layer in scheduler.layers])
    expected = mapping.gather(1, ids.view(LAYERS, TOP_K).long())
    assert torch.equal(slot_ids.view(LAYERS, TOP_K), expected)
    benchmark(replay)
    assert scheduler.stats().total("misses") == LAYERS * EXPERTS
    captures.close()
    scheduler.close()
