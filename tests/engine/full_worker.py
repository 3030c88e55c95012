"""A worker that runs mode `full` on a CPU device: kernels are interpreted, nothing is captured."""

from typing import Any

from prefetch_runtime.vllm.worker import PrefetchWorker


class FullWorker(PrefetchWorker):
    """`PrefetchWorker` whose kernels decide, where the product would refuse the mode."""

    def _choose_mode(self, vllm_config: Any) -> str:  # noqa: ARG002
        return "full"
