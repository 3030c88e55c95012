# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels that divide a demand which may be wider than the slots: who gets one, who does not,
and in which wave the others come.

They decide what `prefetch_runtime.slots.split_wide` and `Scheduler.expert_waves` decide on the
host. E = experts of a layer, R = rows of half of the staging ring.
"""

import triton
import triton.language as tl

from graphs import layout
from graphs.clock_kernels import nanoseconds
from graphs.fill_kernels import NUM_HEADER, NUM_UNIT_COLUMNS, copy_listed
from graphs.resolve_kernels import STALL_NS, count

BAD_IDS = tl.constexpr(int(layout.Counter.BAD_IDS))
WAVES = tl.constexpr(int(layout.Counter.WAVES))
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


@triton.jit(do_not_specialize=["layer_idx", "num_waves"])
def wave_maps_kernel(
    planned, streamed, slots, counts, counters, maps, wave_of, listed, layer_idx, num_waves,
    E: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a plan that `choose_kernel` made: the row of each expert in each wave, `maps` [waves,
    STRIDE], -1 or, with WHOLE, some row of the wave for the experts of others; the wave of each
    expert, `wave_of` [E], -1 if nobody demands it; and what streams as `copy_listed` takes it,
    `listed` [E, 3]. Wave 0 is that of the slots. One program."""
    i = tl.arange(0, BLOCK)
    inside = i < E
    placed = tl.load(planned + i, mask=inside, other=-1)
    slot = tl.load(slots + i, mask=inside, other=0)
    passing = tl.load(streamed + i, mask=inside, other=-1)
    nowhere = tl.full([], -1, tl.int32)
    if WHOLE:
        nowhere = tl.where(tl.load(counts + NUM_PLANNED) > 0, tl.load(slots), 0)
    tl.store(wave_of + i, -1, mask=inside)
    for wave in range(num_waves):
        tl.store(maps + wave * STRIDE + i, tl.where(inside, nowhere, -1), mask=i < STRIDE)
        if WHOLE:
            nowhere = tl.zeros([], tl.int32)
    tl.debug_barrier()  # all is -1 before other threads write
    tl.store(maps + placed, slot, mask=placed >= 0)
    tl.store(wave_of + placed, 0, mask=placed >= 0)
    wave = 1 + i // R
    row = i - (wave - 1) * R
    there = (passing >= 0) & (wave < num_waves)
    tl.store(maps + wave * STRIDE + passing, row, mask=there)
    tl.store(wave_of + passing, wave, mask=there)
    tl.store(listed + 3 * i, passing, mask=there)
    tl.store(listed + 3 * i + 1, row, mask=there)
    tl.store(listed + 3 * i + 2, 0, mask=there)
    num_streamed = tl.load(counts + NUM_STREAMED)
    ran = (tl.load(counts + NUM_PLANNED) > 0).to(tl.int32) + (num_streamed + R - 1) // R
    count(counters + layer_idx * NUM_COUNTERS, WAVES, ran)


@triton.jit(do_not_specialize=["layer_idx", "first"])
def stream_kernel(
    listed, counts, header, units, layer_idx, first,
    R: tl.constexpr, U: tl.constexpr, UNIT_BYTES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Copy up to R of the experts that stream, from the one numbered `first`, into half a ring."""
    num_listed = tl.minimum(tl.load(counts + NUM_STREAMED) - first, R)
    if num_listed > 0:
        copy_listed(
            listed + 3 * first, num_listed, header + layer_idx * NUM_HEADER,
            units + layer_idx.to(tl.int64) * (U * NUM_UNIT_COLUMNS),
            tl.program_id(0), tl.num_programs(0), UNIT_BYTES, TAIL,
        )  # fmt: skip


@triton.jit
def begin_wait_kernel(begun):
    """Note the time before the stream waits."""
    tl.store(begun, nanoseconds())


@triton.jit(do_not_specialize=["layer_idx"])
def end_wait_kernel(begun, counters, layer_idx):
    """Count the time since as the layer's stall."""
    count(counters + layer_idx * NUM_COUNTERS, STALL_NS, nanoseconds() - tl.load(begun))
