"""The kernels under NVIDIA's compute-sanitizer: no access outside an allocation, no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
FOUND = 9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer"),
]


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The kernels' program under one of the tools; status 9 when it finds something."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    finished = subprocess.run(
        [TOOL, *options, sys.executable, "-m", "tests.helpers.run_kernels", *arguments],
        cwd=ROOT,
        # Each tensor an allocation of its own, or what lies behind one is torch's, too.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if "Device not supported" in finished.stdout + finished.stderr:
        pytest.skip("compute-sanitizer does not know this machine's device")
    return finished


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_are_clean(tool: str) -> None:
    finished = sanitized(tool)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-2000:]
    assert "every mapped slot holds its expert" in finished.stdout


def test_a_write_behind_the_slots_is_found() -> None:
    finished = sanitized("memcheck", "--short")
    assert finished.returncode == FOUND, finished.stdout[-3000:] + finished.stderr[-2000:]
    assert "fill_kernel" in finished.stdout
