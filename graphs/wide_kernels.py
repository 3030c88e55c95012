# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels that divide a demand which may be wider than the slots: who gets one, who does not.

They decide what `prefetch_runtime.slots.split_wide` decides on the host. E = experts of a layer.
"""

import triton
import triton.language as tl

from graphs import layout

BAD_IDS = tl.constexpr(int(layout.Counter.BAD_IDS))
NUM_COUNTERS = tl.constexpr(layout.NUM_COUNTERS)

NUM_HITS = tl.constexpr(int(layout.WideCount.HITS))
NUM_PLANNED = tl.constexpr(int(layout.WideCount.PLANNED))
NUM_STREAMED = tl.constexpr(int(layout.WideCount.STREAMED))


@triton.jit(do_not_specialize=["n"])
def count_kernel(topk_ids, tokens_of, n, E: tl.constexpr, BLOCK: tl.constexpr):
    """Add the assignments of each expert to `tokens_of` [E + 1]; its last entry takes the ids of
    experts that do not exist. Ids of -1 are no assignments."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(topk_ids + r, mask=r < n, other=-1).to(tl.int32)
    tl.atomic_add(tokens_of + tl.minimum(ids, E), 1, mask=ids >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["layer_idx", "evict"])
def choose_kernel(
    tokens_of, mapping, owner, counters, planned_out, streamed_out, counts_out, layer_idx, evict,
    E: tl.constexpr, S: tl.constexpr, E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Leave `tokens_of` zero, and two rows of experts [E], -1 behind the last: those that a plan
    takes, residents first, and those that stream past, most often named first. One program."""
    mapping += layer_idx * E
    owner += layer_idx * S
    counters += layer_idx * NUM_COUNTERS
    e = tl.arange(0, E_BLOCK)
    there = e < E
    tokens = tl.load(tokens_of + e, mask=there, other=0)
    slot = tl.load(mapping + e, mask=there, other=-1)
    resident = (tokens > 0) & (slot >= 0)
    absent = (tokens > 0) & (slot < 0)
    num_hits = tl.sum(resident.to(tl.int32), 0)
    s = tl.arange(0, S_BLOCK)
    occupied = tl.load(owner + s, mask=s < S, other=-1) >= 0
    taken = tl.where(evict != 0, num_hits, tl.sum(occupied.to(tl.int32), 0))
    room = tl.maximum(S - taken, 0)

    # How many of the absent come before each: more tokens first, then the lower id.
    rank = tl.zeros([E_BLOCK], tl.int32)
    for start in range(0, E, CHUNK):
        j = start + tl.arange(0, CHUNK)
        others = tl.load(tokens_of + j, mask=j < E, other=0)
        others = tl.where(tl.load(mapping + j, mask=j < E, other=0) < 0, others, 0)
        more = others[None, :] > tokens[:, None]
        tie = (others[None, :] == tokens[:, None]) & (j[None, :] < e[:, None])
        before = (others[None, :] > 0) & (more | tie)
        rank += tl.sum(before.to(tl.int32), 1)

    bad_ids = tl.load(tokens_of + E)
    tl.store(counters + BAD_IDS, tl.load(counters + BAD_IDS) + bad_ids)
    tl.store(planned_out + e, -1, mask=there)
    tl.store(streamed_out + e, -1, mask=there)
    tl.debug_barrier()  # counts have been read, and the rows are -1, before other threads write
    tl.store(tokens_of + e, 0, mask=there)
    tl.store(tokens_of + E, 0)
    tl.store(planned_out + tl.cumsum(resident.to(tl.int32), 0) - 1, e, mask=resident)
    placed = absent & (rank < room)
    past = absent & (rank >= room)
    tl.store(planned_out + num_hits + rank, e, mask=placed)
    tl.store(streamed_out + rank - room, e, mask=past)
    tl.store(counts_out + NUM_HITS, num_hits)
    tl.store(counts_out + NUM_PLANNED, num_hits + tl.sum(placed.to(tl.int32), 0))
    tl.store(counts_out + NUM_STREAMED, tl.sum(past.to(tl.int32), 0))
