"""A graph on the CPU: records the operations of torch, and replays them on the same tensors.

What a CUDA graph does, without its speed: a replay reads and writes the tensors that the capture
read and wrote, and Python that stood between the operations does not run again. Unlike a CUDA
graph it computes while it captures.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, output))
        return output


class ReplayedOps:
    """Has what `graphs.segments.Graph` asks for."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._mode: _Recorder | None = None
        self.options: dict[str, Any] = {}
        self.num_replays = 0
        self.is_reset = False

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.options = {"pool": pool, **options}
        self._mode = _Recorder(self._calls)
        self._mode.__enter__()

    def capture_end(self) -> None:
        assert self._mode is not None
        self._mode.__exit__(None, None, None)
        self._mode = None

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, output in self._calls:
            inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(output), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in inputs:  # neither view nor in place
                    old.copy_(new)

    def reset(self) -> None:
        self.is_reset = True

    def pool(self) -> Any:
        return ("pool", id(self))
