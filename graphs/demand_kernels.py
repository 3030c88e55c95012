# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The two kernels beside the host's decision: one tells it what a layer demands, one applies it.

Shapes: T = tokens, K = top_k, G = guesses per token, E = expert ids.
"""

import triton
import triton.language as tl

from graphs.resolve_kernels import BY_MASK, BY_SLOT_MAPPING

ALL_RESIDENT = tl.constexpr(1)
SOME_ABSENT = tl.constexpr(2)


@triton.jit
def _is_padding(padding, row, mask, PAD: tl.constexpr):
    """Whether rows belong to no token: marked in a bool [T], or negative in a KV slot mapping."""
    if PAD == BY_SLOT_MAPPING:
        return tl.load(padding + row, mask=mask, other=0) < 0
    if PAD == BY_MASK:
        return tl.load(padding + row, mask=mask, other=0) != 0
    return row < 0


@triton.jit(do_not_specialize=["num_tokens"])
def send_kernel(
    topk_ids, guesses, padding, mapping, out, num_tokens,
    E: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to `out`, memory of the host: first what is demanded, [T, K + G] int32 from entry 1 on,
    -1 in rows of padding; then, to entry 0, whether `mapping` [E + 1] has a slot for every id that
    is not -1. One program."""
    width: tl.constexpr = K + G
    num_absent = 0
    for start in range(0, num_tokens * width, BLOCK):
        r = start + tl.arange(0, BLOCK)
        there = r < num_tokens * width
        row, column = r // width, r % width
        is_id = there & (column < K)
        value = tl.load(topk_ids + row * K + column, mask=is_id, other=-1).to(tl.int32)
        if G > 0:
            is_guess = there & (column >= K)
            guess = tl.load(guesses + row * G + column - K, mask=is_guess, other=-1)
            value = tl.where(is_guess, guess.to(tl.int32), value)
        value = tl.where(_is_padding(padding, row, there, PAD), -1, value)
        known = (value >= 0) & (value < E)
        slot = tl.load(mapping + value, mask=is_id & known, other=-1)
        num_absent += tl.sum((is_id & (value != -1) & (slot < 0)).to(tl.int32), 0)
        tl.store(out + 1 + r, value, mask=there)
    tl.debug_barrier()
    tl.store(out, tl.where(num_absent > 0, SOME_ABSENT, ALL_RESIDENT))


@triton.jit(do_not_specialize=["num_ids"])
def rename_kernel(
    topk_ids, padding, mapping, slot_ids, num_ids,
    E: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`slot_ids` [T, K]: what `mapping` [E + 1] says of each id; its last entry for ids of -1 and
    rows of padding."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = r < num_ids
    expert = tl.load(topk_ids + r, mask=there, other=-1).to(tl.int32)
    nobody = _is_padding(padding, r // K, there, PAD) | (expert < 0)
    slot = tl.load(mapping + tl.where(nobody, E, expert), mask=there, other=0)
    tl.store(slot_ids + r, slot.to(slot_ids.dtype.element_ty), mask=there)
