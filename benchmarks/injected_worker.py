"""A worker whose routing comes from a file, to measure the cache at a known locality.

Set `PREFETCH_BENCH_ROUTING` to an .npy file of int16 [steps, layers, tokens, top_k]. Steps with
more tokens than that (prompts) keep the router's choice. What such a run generates means nothing.
"""

import os
from typing import Any

import numpy as np
import torch

from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.vllm.worker import PrefetchWorker


class InjectedWorker(PrefetchWorker):
    """`PrefetchWorker` with injected routing."""

    def init_device(self) -> None:
        """Load the routing before anything is captured."""
        super().init_device()
        assert self.prefetch_engine is not None
        routing: Any = np.load(os.environ["PREFETCH_BENCH_ROUTING"], allow_pickle=False)
        self.prefetch_engine.injection = RoutingInjection(
            torch.from_numpy(routing.astype(np.int32)), self.device
        )
