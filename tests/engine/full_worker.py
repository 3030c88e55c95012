"""Workers that run mode `full` on a CPU device, and workers whose predictions are garbage."""

from typing import Any

import torch
from triton.runtime import interpreter

from prefetch_runtime.scheduler import Guesses
from prefetch_runtime.vllm.worker import PrefetchWorker
from tests.helpers.quick_interpreter import quicken

quicken(interpreter)


class FullWorker(PrefetchWorker):
    """`PrefetchWorker` whose kernels decide, interpreted, where the product would refuse the
    mode; nothing is captured."""

    def _choose_mode(self, vllm_config: Any) -> str:  # noqa: ARG002
        return "full"


class GarbageMixin:
    """Guesses anything: any expert, the same twice, none. Knows nothing of the hidden states."""

    prefetch_engine: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        engine = self.prefetch_engine
        num_experts = engine.host_store.layer(0).num_experts
        last = len(engine.host_store.layers) - 1
        chance = torch.Generator().manual_seed(5)

        def guesses(layer_idx: int, x: torch.Tensor) -> Guesses | None:
            shape = (x.shape[0], 8)
            if layer_idx == last:
                return None
            return lambda: torch.randint(-1, num_experts, shape, generator=chance)

        engine.guesses = guesses


class FullGarbageWorker(GarbageMixin, FullWorker):
    """Mode `full`, predicting garbage."""


class EagerGarbageWorker(GarbageMixin, PrefetchWorker):
    """Mode `eager`, predicting garbage."""
