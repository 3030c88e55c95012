"""Without a GPU, kernels run under Triton's interpreter, which must be chosen before it loads."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _port_8000_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `serve`, whatever else runs on this machine."""
    if "prefetch_runtime.cli" in sys.modules:
        monkeypatch.setattr("prefetch_runtime.cli.refuse_taken_port", lambda _: None)
