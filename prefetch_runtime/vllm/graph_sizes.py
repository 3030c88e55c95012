"""Keeps FULL graphs to batch sizes that the mode can capture; larger ones run outside of graphs."""

from bisect import insort
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from prefetch_runtime.vllm.checks import GRAPHS_OF
from prefetch_runtime.vllm.engine import PrefetchEngine

logger = init_logger(__name__)


def add_widest_batch(compilation: Any, engine: PrefetchEngine) -> None:
    """Have vLLM capture the widest batch that fits the slots, before it lists its graphs.

    vLLM pads a batch to the next captured size. Where that one is too wide for the slots, the batch
    would run in waves although it fits by itself.
    """
    sizes = compilation.cudagraph_capture_sizes
    widest = engine.most_tokens()
    if sizes and widest not in sizes and min(sizes) < widest < max(sizes):
        insort(sizes, widest)


def limit_v1_graphs(dispatcher: Any, engine: PrefetchEngine) -> None:
    """Have a V1 `CudagraphDispatcher` leave out, whenever it lists its graphs, those too wide.

    A batch that finds no graph of its size runs without one, its MoE layers as waves if need be.
    """
    initialize = dispatcher.initialize_cudagraph_keys

    def initialize_and_limit(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        keys = dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        kept = {key for key in keys if engine.captures_tokens(key.num_tokens)}
        report(engine, kept={k.num_tokens for k in kept}, of={k.num_tokens for k in keys})
        dispatcher.cudagraph_keys[CUDAGraphMode.FULL] = kept

    dispatcher.initialize_cudagraph_keys = initialize_and_limit


def limit_v2_graphs(manager: Any, engine: PrefetchEngine) -> None:
    """The same for a V2 `CudaGraphManager`, which lists its graphs when it is built."""
    descs = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    kept = [desc for desc in descs if engine.captures_tokens(desc.num_tokens)]
    report(engine, kept={d.num_tokens for d in kept}, of={d.num_tokens for d in descs})
    if len(kept) == len(descs):
        return
    manager._capture_descs[CUDAGraphMode.FULL] = kept
    manager._candidates = {
        size: [
            desc
            for desc in candidates
            if desc.cg_mode != CUDAGraphMode.FULL or engine.captures_tokens(desc.num_tokens)
        ]
        for size, candidates in manager._candidates.items()
    }


def report(engine: PrefetchEngine, *, kept: set[int], of: set[int]) -> None:
    """Say once which batch sizes decode as graphs."""
    if not of:
        return
    fit = {size for size in kept if size <= engine.most_tokens()}
    about = [f"batches of {_listed(fit)} tokens decode as {GRAPHS_OF.get(engine.mode)}"]
    if kept - fit:
        about.append(
            f"those of {_listed(kept - fit)}, which may need more experts than there are slots, "
            "too, their MoE layers in waves inside the graph"
        )
    about.append(
        f"those of {_listed(of - kept)} run outside of graphs, their MoE layers in waves"
        if of - kept
        else "none is too wide for that"
    )
    logger.info_once("Expert cache: %s", "; ".join(about))


def _listed(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "no"
