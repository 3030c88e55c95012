import time

import pytest
import torch

from prefetch_runtime.stall_clock import StallClock

CPU = torch.device("cpu")


class Stream:
    """A stream whose device has come to `reached` of the events that were recorded."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0
        self.made = 0

    def event(self) -> "Event":
        self.made += 1
        return Event(self)


class Event:
    """Passed 5 ms after the one before."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at = 0

    def record(self) -> None:
        self._stream.recorded += 1
        self.at = self._stream.recorded

    def query(self) -> bool:
        return self._stream.reached >= self.at

    def synchronize(self) -> None:
        self._stream.reached = max(self._stream.reached, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query()
        return 5.0 * (end.at - self.at)


def test_on_a_cpu_a_wait_is_the_time_of_the_copies() -> None:
    clock = StallClock(CPU)
    with clock.waiting(3):
        time.sleep(0.02)
    with clock.waiting(1):
        pass
    assert 0.02 <= clock.seconds[3] < 0.5
    assert clock.seconds[1] < 0.01
    clock.clear()
    assert clock.seconds[3] == 0


def test_a_wait_counts_once_its_events_have_passed_and_nothing_waits_for_that() -> None:
    stream = Stream()
    clock = StallClock(CPU, stream.event)
    for _ in range(2):
        with clock.waiting(0):
            pass
    assert stream.reached == 0
    assert clock.seconds[0] == 0
    stream.reached = 2
    with clock.waiting(0):
        pass
    assert clock.seconds[0] == pytest.approx(0.005)
    clock.settle()
    assert clock.seconds[0] == pytest.approx(0.015)


def test_events_are_used_again() -> None:
    stream = Stream()
    clock = StallClock(CPU, stream.event)
    for _ in range(10):
        with clock.waiting(0):
            pass
        stream.reached = stream.recorded
    assert stream.made == 2
    assert clock.seconds[0] == pytest.approx(0.045)


def test_a_wait_that_failed_is_not_counted() -> None:
    clock = StallClock(CPU)
    with pytest.raises(RuntimeError, match="refused"), clock.waiting(0):
        raise RuntimeError("refused")
    assert clock.seconds[0] == 0


@pytest.mark.gpu
def test_on_a_gpu_a_wait_is_what_the_stream_did_meanwhile() -> None:
    clock = StallClock(torch.device("cuda"))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1)
    begin.record()
    with clock.waiting(2):
        torch.cuda._sleep(5_000_000)
    end.record()
    assert clock.seconds[2] == 0  # nothing waited for it
    clock.settle()
    torch.cuda.synchronize()
    assert 0.001 < clock.seconds[2] <= begin.elapsed_time(end) * 1e-3 + 1e-5
