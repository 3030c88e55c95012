"""Marks are asked of the device once, here, for tests and benchmarks alike."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device; under REQUIRE_GPU=1 its absence is an error."""
    if torch.cuda.is_available():
        return
    if os.environ.get("REQUIRE_GPU") == "1":
        raise pytest.UsageError("REQUIRE_GPU=1, but there is no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
