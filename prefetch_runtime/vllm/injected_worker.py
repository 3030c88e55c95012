"""A worker whose routing comes from a file, to measure the cache at a known locality.

The environment variable names an .npz with `routing` [steps, layers, tokens, top_k] and, for the
predictor `next_gate`, `guesses` [steps, layers - 1, tokens, guesses]. Steps with more tokens than
that (prompts) keep the router's choice. What such a run generates means nothing.
"""

import os

import numpy as np
import torch

from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.vllm.worker import PrefetchWorker

ROUTING_VARIABLE = "PREFETCH_RUNTIME_ROUTING"


class InjectedWorker(PrefetchWorker):
    """`PrefetchWorker` with injected routing."""

    def init_device(self) -> None:
        """Load the routing before anything is captured."""
        super().init_device()
        assert self.prefetch_engine is not None
        with np.load(os.environ[ROUTING_VARIABLE], allow_pickle=False) as arrays:
            routing, guesses = (
                torch.from_numpy(arrays[name].astype(np.int32)) if name in arrays else None
                for name in ("routing", "guesses")
            )
        assert routing is not None
        self.prefetch_engine.injection = RoutingInjection(routing, self.device, guesses=guesses)
