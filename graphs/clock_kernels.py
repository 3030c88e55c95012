# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""What a kernel asks of the device beside memory: the time, and to begin before another ends."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _nothing():
    pass


ON_DEVICE = tl.constexpr(isinstance(_nothing, triton.JITFunction))
"""False under Triton's interpreter: every duration is 0 there, and kernels run one by one."""


@triton.jit
def let_next_begin():
    """Let the stream's next kernel begin now, if it is launched `early`."""
    if ON_DEVICE:
        cuda.gdc_launch_dependents()


@triton.jit
def await_last():
    """Wait until the stream's last kernel has ended and what it wrote can be read. A kernel that is
    launched `early` calls this before it reads or writes anything that others use."""
    if ON_DEVICE:
        cuda.gdc_wait()


@triton.jit
def nanoseconds():
    """The GPU's global timer, int64. Put a barrier before it to time what the program has done."""
    if ON_DEVICE:
        return cuda.globaltimer()
    else:
        return tl.full([], 0, tl.int64)


@lru_cache
def begins_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the stream's last one has ended (programmatic
    dependent launch): CUDA, compute capability 9.0 or later."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def launched(device: torch.device, early: bool) -> dict[str, bool]:
    """Arguments of a kernel that shall begin before the stream's last one has ended, if `early` and
    where the device can do that."""
    early = early and begins_early(device)
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}
