"""Ctrl-C and SIGTERM while engines run: the first ends the session, later ones only hurry it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 10.0
"""An end takes no longer; a signal that comes even later is raised again."""


class Interrupts:
    """Lets one signal through.

    Python raises a signal wherever the main thread is, also where it is ending what the signal
    before it interrupted. What runs in processes of their own would then be left behind.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._end: Callable[[], object] = lambda: None
        self._raised_at: float | None = None
        self._is_held = False
        self._waiting: tuple[int, FrameType | None] | None = None

    @contextmanager
    def once(self, end: Callable[[], object]) -> Iterator[None]:
        """In here the first signal does what it did before; every later one calls `end`, at once.

        `end` is called when all is over, too. Nothing changes in another thread than the main one,
        inside another `once`, and for signals that are ignored or end the process.
        """
        if threading.current_thread() is not threading.main_thread() or self._before:
            yield
            return
        self._end, self._raised_at, self._waiting = end, None, None
        try:
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._came)
            yield
        finally:
            end()
            while self._before:
                signal.signal(*self._before.popitem())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps a signal back until the end of this block. Short, and only inside `once`."""
        if threading.current_thread() is not threading.main_thread() or not self._before:
            yield
            return
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._waiting is not None:
                waiting, self._waiting = self._waiting, None
                self._came(*waiting)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._waiting = (number, frame)
            return
        now = time.monotonic()
        if self._raised_at is not None and now - self._raised_at < _PATIENCE_S:
            self._end()
            return
        self._raised_at = now
        self._before[number](number, frame)


interrupts = Interrupts()
"""Signals belong to the process, so there is one."""
