"""What every benchmark shares: the recorded demand, and the machine in each result."""

import platform
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

TRACE = Path(__file__).resolve().parent.parent / "models" / "tiny-moe-trace.npz"


@pytest.fixture(autouse=True)
def _machine_in_extra_info(request: pytest.FixtureRequest) -> None:
    """A number without its machine is worth nothing: record both together."""
    if "benchmark" not in request.fixturenames:
        return
    cuda = torch.cuda.is_available() and request.node.get_closest_marker("gpu") is not None
    request.getfixturevalue("benchmark").extra_info.update(
        device=torch.cuda.get_device_name() if cuda else platform.machine(),
        torch=torch.__version__,
    )


@pytest.fixture(scope="session")
def trace_topk() -> npt.NDArray[np.int32]:
    """[T, L, K] int32: the experts that tiny-moe's routers chose for 4,096 tokens."""
    with np.load(TRACE) as trace:
        topk: npt.NDArray[np.int32] = trace["topk"].astype(np.int32)
    return topk
