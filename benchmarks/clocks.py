"""Clocks for pytest-benchmark, which by itself reads the host's and does not know the device."""

import time

import torch


def synced_clock() -> float:
    """Host seconds, read once the device has drained; for `benchmark(timer=synced_clock)`."""
    torch.cuda.synchronize()
    return time.perf_counter()
