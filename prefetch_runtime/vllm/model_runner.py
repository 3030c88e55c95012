"""The model runner: vLLM's own, V1 or V2, with a scheduler that is told when a step begins."""

from functools import lru_cache
from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from prefetch_runtime.scheduler import Scheduler
from prefetch_runtime.vllm.checks import check_full_graphs_left, check_layers_are_ours
from prefetch_runtime.vllm.engine import PrefetchEngine
from prefetch_runtime.vllm.graph_sizes import (
    add_widest_batch,
    limit_v1_graphs,
    limit_v2_graphs,
)
from prefetch_runtime.vllm.routed_experts import PrefetchRoutedExperts


class PrefetchModelRunner:
    """Mixed into whichever runner class vLLM chose (see `adopt`)."""

    prefetch_engine: PrefetchEngine
    scheduler: Scheduler

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, with the experts on the host; then insist that every layer is ours."""
        with self.prefetch_engine.loading():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        check_layers_are_ours(
            self.get_model().named_modules(),  # type: ignore[attr-defined]
            RoutedExperts,
            lambda layer: isinstance(layer, PrefetchRoutedExperts),
        )
        self.prefetch_engine.seal(self.get_model())  # type: ignore[attr-defined]
        if self.prefetch_engine.mode == "full":
            compilation = self.compilation_config  # type: ignore[attr-defined]
            add_widest_batch(compilation, self.prefetch_engine)
        dispatcher = getattr(self, "cudagraph_dispatcher", None)
        if dispatcher is not None:
            limit_v1_graphs(dispatcher, self.prefetch_engine)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM decides here which batch sizes it captures; V2 keeps the list in its manager."""
        result = super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        engine = self.prefetch_engine
        if engine.mode != "eager" and engine.device.type == "cuda":
            compilation = self.compilation_config  # type: ignore[attr-defined]
            check_full_graphs_left(compilation.cudagraph_mode, engine.mode)
        manager = getattr(self, "cudagraph_manager", None)
        if manager is not None:
            limit_v2_graphs(manager, engine)
        return result

    def profile_cudagraph_memory(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM captures a few graphs to see what they weigh, before the worker warms anything up.

        CUDA refuses to load a kernel while a stream is captured, and the waves of a graph have
        kernels that no step outside of graphs runs.
        """
        self.prefetch_engine.warm_up()
        with self.prefetch_engine.capturing():
            return super().profile_cudagraph_memory(*args, **kwargs)  # type: ignore[misc]

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM captures its graphs."""
        with self.prefetch_engine.capturing():
            return super().capture_model(*args, **kwargs)  # type: ignore[misc]

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """One engine step: the clock moves before the first layer runs."""
        tokens = getattr(args[0] if args else None, "num_scheduled_tokens", None) or {}
        self.scheduler.begin_step(decodes=max(tokens.values(), default=0) == 1)
        result = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        if self.scheduler.recorder is not None:
            self.scheduler.recorder.end_step(self._requests(args[0] if args else None))
        return result

    def _requests(self, scheduler_output: Any) -> list[tuple[str, int]]:
        """(request, tokens) of the step's rows in order; empty where the runner does not say."""
        batch = getattr(self, "input_batch", None)
        scheduled = getattr(scheduler_output, "num_scheduled_tokens", None)
        if scheduled is None or batch is None or not hasattr(batch, "req_ids"):
            return []
        return [(request, scheduled.get(request, 0)) for request in batch.req_ids]


@lru_cache
def runner_class(base: Any) -> type:
    """`PrefetchModelRunner` on top of a runner class of vLLM's."""
    return type(f"Prefetch{base.__name__}", (PrefetchModelRunner, base), {})


def adopt(runner: Any, engine: PrefetchEngine) -> Any:
    """Turn the runner that vLLM built into ours. Its class changes, its state does not.

    vLLM before 0.33 builds its runner inside `Worker.init_device`, with no place to hand in a
    class; re-classing the instance works with every version and for both runners.
    """
    chosen: Any = type(runner)
    runner.__class__ = runner_class(chosen)
    runner.prefetch_engine = engine
    runner.scheduler = engine.scheduler
    return runner
