"""A worker whose routing and guesses are put in from outside, and may be exchanged while it runs.

Set `PREFETCH_BENCH_SIZES` to the sizes "steps,layers,tokens,top_k,guesses". Steps with more tokens
than that (prompts) keep the router's choice. What such a run generates means nothing.
"""

import os

import torch

from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.vllm.worker import PrefetchWorker

SIZES_VARIABLE = "PREFETCH_BENCH_SIZES"


class ForecastWorker(PrefetchWorker):
    """`PrefetchWorker` with injected routing and guesses."""

    def init_device(self) -> None:
        """Make room for both before anything is captured."""
        super().init_device()
        assert self.prefetch_engine is not None
        steps, layers, tokens, top_k, guesses = map(int, os.environ[SIZES_VARIABLE].split(","))
        first = torch.arange(top_k).expand(steps, layers, tokens, top_k)
        self.prefetch_engine.injection = RoutingInjection(
            first, self.device, guesses=torch.full((steps, layers - 1, tokens, guesses), -1)
        )
