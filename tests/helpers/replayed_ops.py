"""A graph on the CPU: records the operations of torch, and replays them on the same tensors.

What a CUDA graph does, without its speed: a replay reads and writes the tensors that the capture
read and wrote, and Python that stood between the operations does not run again. Unlike a CUDA
graph it computes while it captures.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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

    capturing: ClassVar["ReplayedOps | None"] = None

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
        ReplayedOps.capturing = self

    def capture_end(self) -> None:
        assert self._mode is not None
        ReplayedOps.capturing = None
        self._mode.__exit__(None, None, None)
        self._mode = None

    def note(self, launch: Callable[[], None]) -> None:
        """Call a kernel that is not of torch's, now and at every replay."""
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            launch()
        self._calls.append((launch, (), {}, None))

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


class ReplayedKernel:
    """A Triton kernel whose launches `ReplayedOps` records, too."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            call = partial(self._kernel[grid], *args, **kwargs)
            if ReplayedOps.capturing is None:
                call()
            else:
                ReplayedOps.capturing.note(call)

        return launch
