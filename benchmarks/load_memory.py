"""The memory that a process takes while it loads, told from what the kernel says of it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

BAR = 1.15
GIB = 2**30
_STATUS = {
    "anon": "RssAnon",
    "shmem": "RssShmem",
    "file": "RssFile",
    "rss": "VmRSS",
    "hwm": "VmHWM",
    "locked": "VmLck",
    "pin": "VmPin",
}


def host_memory(proc: Path = Path("/proc")) -> dict[str, int | None]:
    """Bytes by the names of `load_checkpoint`'s docstring; None where this kernel does not tell."""
    status, machine = _fields(proc / "self" / "status"), _fields(proc / "meminfo")
    found = {name: status.get(field) for name, field in _STATUS.items()}
    return {**found, "available": machine.get("MemAvailable")}


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {
        parts[0].rstrip(":"): int(parts[1]) * 1024
        for parts in lines
        if len(parts) == 3 and parts[2] == "kB"
    }


class Watch:
    """Samples host memory in a thread from `start` to `stop`; keeps the first and the extremes."""

    def __init__(
        self,
        read: Callable[[], dict[str, int | None]] = host_memory,
        *,
        interval_s: float = 0.05,
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before: dict[str, int | None] = {}
        self.peak: dict[str, int] = {}
        """Most above `before`; `available` by how much it fell; `host` what is judged."""
        self.samples = 0

    def start(self) -> None:
        self.before = self._read()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        for name, value in risen(self.before, self._read()).items():
            self.peak[name] = max(self.peak.get(name, 0), value)
        self.samples += 1


class DevicePeak:
    """The most device memory that torch held, over resets of its own mark; vLLM resets it.

    Reads torch's mark in a thread, so what rises and is reset within `interval_s` is not seen.
    """

    def __init__(self, read: Callable[[], int], *, interval_s: float = 0.02) -> None:
        """`read`: `torch.cuda.max_memory_allocated`."""
        self._read = read
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._most = 0
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._most = max(self._most, self._read())

    def most(self) -> int:
        """Bytes, so far."""
        self._most = max(self._most, self._read())
        return self._most

    def stop(self) -> int:
        """Bytes, and no more are read."""
        self._stopped.set()
        self._thread.join()
        return self.most()


def risen(before: dict[str, int | None], now: dict[str, int | None]) -> dict[str, int]:
    """How much more is taken than before, field by field, and `host`, what is judged."""
    more = {
        name: then - value if name == "available" else value - then
        for name, value in now.items()
        if value is not None and (then := before[name]) is not None
    }
    if "anon" in more:
        more["host"] = more["anon"] + more.get("shmem", 0)
    elif "available" in more:
        more["host"] = more["available"]
    return more


def gib(value: int | None) -> float | None:
    """Bytes as GiB."""
    return None if value is None else value / GIB


def judged(row: dict[str, Any], layers: int) -> dict[str, Any]:
    """The peak of host memory over the experts' final bytes and one layer's."""
    peak = row["peak_gib"]["host"]
    if peak is None:
        return {"ratio": None, "ok": None}
    ratio = peak / (row["experts_gib"] * (1 + 1 / layers))
    return {"ratio": ratio, "ok": ratio <= BAR if "gpu_peak_gib" in row else None}
