"""Without a GPU, kernels run under Triton's interpreter, which must be chosen before it loads."""

import os
import signal
import sys

import pytest
import torch

from tests.helpers.quick_interpreter import quicken

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup it is ignored, also by what the tests start and hang up on.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before fixtures, which may run kernels."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        quicken(interpreter)


@pytest.fixture(autouse=True)
def _port_8000_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `serve`, whatever else runs on this machine."""
    if "prefetch_runtime.cli" in sys.modules:
        monkeypatch.setattr("prefetch_runtime.cli.refuse_taken_port", lambda _: None)
