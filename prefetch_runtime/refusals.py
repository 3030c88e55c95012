"""How refusals are worded, in the command as in the worker; and how one is brought from a worker
to the command that started vLLM, past vLLM's own traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefetch_runtime.config import spelled

ONE_GPU = "it runs on one GPU: use 1"
OTHER_MODES = "use 'eager' or 'auto'"
NO_OFFLOADERS = "vLLM's offloaders would move the same weights; use one or the other"
CPU_COMPILES = (
    "on CPU vLLM compiles the MoE layer into the model, where the cache cannot decide anything"
)
CPU_NEEDS_EAGER = f"{CPU_COMPILES}; add --enforce-eager"

REFUSAL_VARIABLE = "PREFETCH_RUNTIME_REFUSAL"
"""Environment variable: a file that the first refusal is written to, in one line."""


def unsupported(option: str, remedy: str) -> str:
    """That an option of vLLM rules the cache out, and what to do."""
    return f"the expert cache ({spelled('slots_per_layer')}) does not support {option}; {remedy}"


def mode_refused(mode: str, why_not: str, remedy: str = OTHER_MODES) -> str:
    """That a mode that was asked for cannot run, and what to do."""
    return f"{spelled('mode')} {mode!r} {why_not}; {remedy}"


def needs_cuda(device: str) -> str:
    """Why a mode with graphs cannot run on a device of another type."""
    return f"needs a CUDA device, this is {device!r}"


@contextmanager
def told(*kinds: type[Exception]) -> Iterator[None]:
    """Within this context, or in the decorated function, errors of these kinds are refusals.

    They go on as they are; where nobody asked for them, nothing else happens.
    """
    try:
        yield
    except kinds as refusal:
        path = os.environ.get(REFUSAL_VARIABLE)
        if path:
            # The error itself must not be lost to a file that cannot be written.
            with suppress(OSError):
                Path(path).write_text(" ".join(str(refusal).split()))
        raise


@contextmanager
def collected() -> Iterator[Path]:
    """A file in memory that processes started from here write a refusal to; empty without one."""
    number = os.memfd_create("prefetch-runtime-refusal")
    path = Path(f"/proc/{os.getpid()}/fd/{number}")
    before = os.environ.get(REFUSAL_VARIABLE)
    os.environ[REFUSAL_VARIABLE] = str(path)
    try:
        yield path
    finally:
        if before is None:
            del os.environ[REFUSAL_VARIABLE]
        else:
            os.environ[REFUSAL_VARIABLE] = before
        os.close(number)
