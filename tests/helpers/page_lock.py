"""Whether CUDA knows host memory as page-locked; torch's `is_pinned` knows only its own."""

from typing import Any

import pytest
import torch


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Ask the driver about the tensor's first byte. Skips the test without cuda-python."""
    runtime: Any = pytest.importorskip("cuda.bindings.runtime")
    error, attributes = runtime.cudaPointerGetAttributes(tensor.data_ptr())
    assert error == runtime.cudaError_t.cudaSuccess, error
    return bool(attributes.type == runtime.cudaMemoryType.cudaMemoryTypeHost)
