# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Tells blocks of rows, sorted by expert, in which slot their expert is.

Shapes: B = blocks, E = experts.
"""

import torch
import triton
import triton.language as tl

from graphs.clock_kernels import await_last, launched

_BLOCK = 256


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def seat_kernel(
    expert_ids, slot_of, num_blocks, num_experts, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """`expert_ids` [B] becomes what `slot_of` [E] says of each; 0 for ids and slots below 0. EARLY
    says that the kernel is launched before the last one has ended: the slots are fetched before."""
    if EARLY:
        e = tl.arange(0, BLOCK)
        tl.load(slot_of + e, mask=e < num_experts, other=0, volatile=True)
        await_last()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < num_blocks
    expert = tl.load(expert_ids + at, mask=there, other=-1)
    slot = tl.load(slot_of + expert, mask=expert >= 0, other=0)
    tl.store(expert_ids + at, tl.maximum(slot, 0), mask=there)


def seat_blocks(expert_ids: torch.Tensor, slot_of: torch.Tensor) -> None:
    """Put each block's slot in its expert's place, in one launch. May be captured.

    Where the device can do that, the launch does not wait for the stream's last operation to end,
    which must be a kernel: the one that made `expert_ids`.

    Args:
        expert_ids: [B] int32, contiguous: the expert of each block, or below 0 for none. Changed.
        slot_of: [E] int32, contiguous, on the same device. Where it is below 0 a block gets slot 0:
            only blocks of nobody's rows may be of such an expert.
    """
    for name, tensor in (("expert_ids", expert_ids), ("slot_of", slot_of)):
        if tensor.dim() != 1 or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 of one dimension, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    num_blocks = expert_ids.numel()
    seat_kernel[(triton.cdiv(num_blocks, _BLOCK),)](
        expert_ids, slot_of, num_blocks, slot_of.numel(), BLOCK=_BLOCK, num_warps=2,
        **launched(expert_ids.device, early=True),
    )  # fmt: skip
