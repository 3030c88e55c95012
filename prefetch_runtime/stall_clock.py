"""How long each layer's compute waited for the copies of what it demanded."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch


class TimingEvent(Protocol):
    """What is asked of a CUDA event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds."""


class _Wait(NamedTuple):
    layer_idx: int
    begun: TimingEvent
    ended: TimingEvent


class StallClock:
    """Adds up waits by layer. For the thread that steps; `seconds` may be read by any.

    On CUDA a wait is the time between two events on the compute stream; their times are taken when
    they have passed, and nothing waits for them. On a CPU the copies are done inside the context.
    """

    def __init__(
        self, device: torch.device, new_event: Callable[[], TimingEvent] | None = None
    ) -> None:
        """`new_event`: for tests; None: CUDA events on CUDA, the host's clock elsewhere."""
        if new_event is None and device.type == "cuda":
            new_event = _cuda_event
        self._new_event = new_event
        self._waits: deque[_Wait] = deque()
        self._free: list[TimingEvent] = []
        self.seconds: defaultdict[int, float] = defaultdict(float)
        """Waited so far, by layer index; short of the waits that are not over yet."""

    @contextmanager
    def waiting(self, layer_idx: int) -> Iterator[None]:
        """Around what makes compute wait: the issue of a demand's copies, and the wait for them."""
        if self._new_event is None:
            begun_at = time.perf_counter()
            yield
            self.seconds[layer_idx] += time.perf_counter() - begun_at
            return
        self._take(settle=False)
        wait = _Wait(layer_idx, self._event(), self._event())
        wait.begun.record()
        yield
        wait.ended.record()
        self._waits.append(wait)

    def settle(self) -> None:
        """Bring `seconds` up to date. Waits for the compute stream."""
        self._take(settle=True)

    def clear(self) -> None:
        """Start again from zero."""
        self._take(settle=True)
        self.seconds.clear()

    def _event(self) -> TimingEvent:
        assert self._new_event is not None
        return self._free.pop() if self._free else self._new_event()

    def _take(self, *, settle: bool) -> None:
        while self._waits:
            layer_idx, begun, ended = self._waits[0]
            if settle:
                ended.synchronize()
            elif not ended.query():
                return
            self.seconds[layer_idx] += begun.elapsed_time(ended) * 1e-3
            self._waits.popleft()
            self._free += (begun, ended)


def _cuda_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
