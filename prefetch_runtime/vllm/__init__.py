"""The adapter to vLLM 0.26 to 0.33: the only folder that imports vllm."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefetch_runtime.vllm.worker import PrefetchWorker

__all__ = ["PrefetchWorker"]


def __getattr__(name: str) -> Any:
    # Lazy: the worker picks its base class by platform, which imports most of vLLM.
    if name == "PrefetchWorker":
        from prefetch_runtime.vllm.worker import PrefetchWorker

        return PrefetchWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
