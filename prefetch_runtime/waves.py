"""Splits a step that needs more experts than there are slots. Decides only; moves nothing."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.signedinteger]

RING_BYTES = 288 << 20
"""What a ring of 32 experts of 9 MiB weighs (Qwen3-30B-A3B, bf16): each half keeps a PCIe 5 link
busy for 3 ms, longer than a slow host takes to issue a wave."""

LEAST_RING_ROWS = 4
"""Two in each half: where one expert weighs more than a ring should, a wave is still of two."""
MOST_RING_ROWS = 1024

MOST_CAPTURED_WAVES = 9
"""Of one MoE layer in a captured step, that of the slots included. A graph has all that the worst
routing needs, and one without experts still costs the device its kernels."""

MOST_TOKENS_IN_WAVES = 64
"""Of a captured step that runs in waves. Beyond, nearly all experts stream in every layer, and the
host issues a wave faster than the link brings it."""


def cut_by_token(topk_ids: npt.NDArray[np.integer], num_slots: int) -> Iterator[slice]:
    """Runs of consecutive tokens, each of which needs at most `num_slots` distinct experts.

    Args:
        topk_ids: [tokens, top_k], -1 means no expert.
        num_slots: at least the number of distinct experts of any one token.

    Raises:
        ValueError: one token alone needs more than `num_slots`.
    """
    start, held = 0, set[int]()
    for token, row in enumerate(topk_ids.tolist()):
        needed = {expert for expert in row if expert >= 0}
        if len(needed) > num_slots:
            raise ValueError(
                f"token {token} alone needs {len(needed)} experts of {num_slots} slots"
            )
        grown = held | needed
        if len(grown) > num_slots:
            yield slice(start, token)
            start, held = token, needed
        else:
            held = grown
    if start < len(topk_ids):
        yield slice(start, len(topk_ids))


def cut_by_expert(absent: Sequence[int] | IntArray, wave_size: int) -> list[IntArray]:
    """Absent experts in waves of at most `wave_size`, in the given order."""
    if wave_size < 1:
        raise ValueError(f"wave_size must be at least 1, got {wave_size}")
    ids = np.asarray(absent, dtype=np.int32)
    return [ids[at : at + wave_size] for at in range(0, len(ids), wave_size)]


def worst_waves(num_assignments: int, *, num_experts: int, num_slots: int, rows: int) -> int:
    """Waves that a step of so many assignments (T * K) may need, that of the slots included.

    Args:
        rows: experts that half of the ring holds.
    """
    past = max(0, min(num_assignments, num_experts) - num_slots)
    return 1 + -(-past // rows)


def rows_of_half(
    staging_slots: int | Literal["auto"], *, expert_bytes: int, num_experts: int
) -> int:
    """Experts that each of the ring's two halves holds, at least 1 and at most all.

    Args:
        staging_slots: of both halves; "auto": as many as weigh `RING_BYTES`, at least 4, so that
            small experts stream in fewer waves and large ones take no GiB of it.
        expert_bytes: of one expert, all its tensors.
    """
    if staging_slots == "auto":
        of_weight = RING_BYTES // max(1, expert_bytes)
        both = min(max(of_weight, LEAST_RING_ROWS), MOST_RING_ROWS)
    else:
        both = staging_slots
    return min(max(1, both // 2), num_experts)


def ring_bytes(staging_slots: int | Literal["auto"], *, expert_bytes: int, num_experts: int) -> int:
    """What both halves of the ring weigh; see `rows_of_half`."""
    rows = rows_of_half(staging_slots, expert_bytes=expert_bytes, num_experts=num_experts)
    return 2 * rows * expert_bytes
