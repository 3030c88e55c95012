"""A worker whose attention takes long enough for every prefetch to land."""

from typing import Any

import torch

from prefetch_runtime.vllm.worker import PrefetchWorker

CYCLES = 400_000
"""About 0.2 ms of an H200, in which its link moves 10 MB."""


class SlowWorker(PrefetchWorker):
    """`PrefetchWorker`, on a GPU, with a kernel that waits before every layer's attention.

    tiny-moe's layers compute for a few microseconds, so which copies land in time is chance.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for layer in self.model_runner.get_model().model.layers:
            layer.self_attn.register_forward_pre_hook(_wait)


def _wait(*_: Any) -> None:
    torch.cuda._sleep(CYCLES)
