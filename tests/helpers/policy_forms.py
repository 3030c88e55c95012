"""Run as a program: exits with 1 if a policy's Triton form disagrees with its numpy form.

A process of its own, because TRITON_INTERPRET must be set before triton is imported.
Usage: python policy_forms.py cpu|cuda
"""

import sys

import numpy as np
import torch
import triton
import triton.language as tl

from prefetch_runtime.policies import (
    LOWEST_SCORE,
    POLICY_NAMES,
    REBASE_SCORE,
    create_device_form,
    create_policy,
)


@triton.jit
def _apply(
    old_ptr, new_ptr, placed_ptr, now, n, hit: tl.constexpr, insert: tl.constexpr, B: tl.constexpr
):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    mask = offsets < n
    tl.store(new_ptr + offsets, hit(tl.load(old_ptr + offsets, mask=mask), now), mask=mask)
    tl.store(placed_ptr + offsets, tl.zeros([B], tl.int32) + insert(now), mask=mask)


def main(device: str) -> None:
    rng = np.random.default_rng(0)
    for name in POLICY_NAMES:
        policy = create_policy(name)
        form = create_device_form(name)
        last = (REBASE_SCORE - 1) // policy.units_per_step
        for now in (1, 2, 3, 1000, 123_457, last // 2, last - 1, last):
            base = now * policy.units_per_step
            old = np.concatenate(
                [
                    rng.integers(LOWEST_SCORE, base + 1000, 512),
                    rng.integers(max(base - 4096, LOWEST_SCORE), base + 2048, 512),
                    [LOWEST_SCORE, base - 1, base, base + 1],
                ]
            ).astype(np.int32)
            ids = np.arange(old.size, dtype=np.int32)
            new = torch.zeros(old.size, dtype=torch.int32, device=device)
            placed = torch.zeros_like(new)
            _apply[(triton.cdiv(old.size, 256),)](
                torch.from_numpy(old).to(device), new, placed, now, old.size, *form, 256
            )
            np.testing.assert_array_equal(new.cpu().numpy(), policy.hit(old, ids, now), name)
            np.testing.assert_array_equal(placed.cpu().numpy(), policy.insert(ids, now), name)


if __name__ == "__main__":
    main(sys.argv[1])
