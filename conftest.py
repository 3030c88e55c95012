"""Marks are asked of the device once, here, for tests and benchmarks alike."""

import os
import signal

import pytest
import torch


def pytest_configure() -> None:
    """A run in the background of a script ignores Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device; under REQUIRE_GPU=1 its absence is an error."""
    if torch.cuda.is_available():
        return
    if os.environ.get("REQUIRE_GPU") == "1":
        raise pytest.UsageError("REQUIRE_GPU=1, but there is no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
