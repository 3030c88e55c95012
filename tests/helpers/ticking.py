"""A clock for interpreted kernels, which have none."""

import pytest
import triton.language as tl

from graphs import fill_kernels, prefetch_kernels, resolve_kernels

TICK_NS = 10


class TickingClock:
    """Each reading is 10 ns after the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readings = 0
        for module in (resolve_kernels, fill_kernels, prefetch_kernels):
            monkeypatch.setattr(module, "nanoseconds", self._read)

    def _read(self) -> tl.tensor:
        self.readings += 1
        return tl.full([], TICK_NS * self.readings, tl.int64)
