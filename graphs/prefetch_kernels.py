# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels around a prefetch: reserve slots for a forecast, and post what is really demanded."""

import triton
import triton.language as tl

from graphs.clock_kernels import await_last, nanoseconds
from graphs.resolve_kernels import (
    EMPTY,
    EVICTIONS,
    FIRST_PLAN,
    NEVER,
    NO_VICTIM,
    NUM_CONTROL,
    NUM_COUNTERS,
    NUM_HEADER,
    NUM_STAMPS,
    PAYLOAD_BYTES,
    POSTED,
    PREFETCH_DROPPED,
    PREFETCHED,
    RESERVED,
    STEP,
    WASTED_BYTES,
    count,
    load_ids,
    lowest_ranks,
)


@triton.jit(do_not_specialize=["layer_idx", "n"])
def reserve_kernel(
    forecast, mapping, owner, score, mark, control, clock, counters, stamps,
    entries, entry_count, progress, epoch, demand, budget, header,
    layer_idx, n,
    E: tl.constexpr, S: tl.constexpr, F: tl.constexpr, S_BLOCK: tl.constexpr, F_BLOCK: tl.constexpr,
):  # fmt: skip
    """Take slots for the absent experts of a forecast [n], best guess first, within the budget.

    Never a slot that is in flight, that this step's plans demanded, or that holds an expert of the
    forecast. If the demand has been posted already, only demanded experts are reserved, and the
    slots of demanded ones are left alone. The victim is unmapped, the newcomer not yet mapped.
    """
    mapping += layer_idx * E
    owner += layer_idx * S
    score += layer_idx * S
    mark += layer_idx * S
    control += layer_idx * NUM_CONTROL
    counters += layer_idx * NUM_COUNTERS
    entries += layer_idx * (2 * F)
    progress += layer_idx * F
    demand += layer_idx * E
    tl.store(stamps + layer_idx * NUM_STAMPS + RESERVED, nanoseconds())
    payload_bytes = tl.load(header + layer_idx * NUM_HEADER + PAYLOAD_BYTES)
    affordable = (tl.load(budget + layer_idx) + payload_bytes - 1) // payload_bytes
    have = tl.load(entry_count + layer_idx)
    room = tl.minimum(affordable, F).to(tl.int32) - have
    if room > 0:
        step = tl.load(clock + 1)
        is_posted = tl.atomic_add(epoch + layer_idx, 0, sem="acquire") == step
        s = tl.arange(0, S_BLOCK)
        f = tl.arange(0, F_BLOCK)
        resident = tl.load(owner + s, mask=s < S, other=-1)
        owned = resident >= 0
        in_flight = owned & (tl.load(mapping + resident, mask=owned, other=-1) != s)
        wanted_now = owned & (
            tl.load(demand + resident, mask=owned, other=0, volatile=True) == step
        )
        last_plan = tl.load(mark + s, mask=s < S, other=0)
        # Numbers of plans wrap; differences do not mind.
        of_this_step = (last_plan - tl.load(control + FIRST_PLAN)) >= 0
        of_this_step = of_this_step & (tl.load(control + STEP) == step) & (in_flight == 0)

        ids = tl.load(forecast + f, mask=f < n, other=-1)
        valid = (ids >= 0) & (ids < E)
        held_in = tl.load(mapping + ids, mask=valid, other=-1)
        holds_guess = tl.max((held_in[:, None] == s[None, :]).to(tl.int32), 0)
        arriving = tl.where(in_flight, resident, -2)
        is_arriving = tl.max((ids[:, None] == arriving[None, :]).to(tl.int32), 1)
        earlier = (ids[:, None] == ids[None, :]) & (f[None, :] < f[:, None])
        is_repeat = tl.max(earlier.to(tl.int32), 1)
        absent = valid & (held_in < 0) & (is_arriving == 0) & (is_repeat == 0)
        evictable = (s < S) & (in_flight == 0) & (of_this_step == 0) & (holds_guess == 0)
        if is_posted:
            demanded = tl.load(demand + ids, mask=valid, other=0, volatile=True) == step
            absent = absent & demanded
            evictable = evictable & (wanted_now == 0)

        free = tl.sum(evictable.to(tl.int32), 0)
        taken = tl.minimum(tl.minimum(tl.sum(absent.to(tl.int32), 0), room), free)
        key = tl.where(evictable, tl.load(score + s, mask=s < S, other=0), NO_VICTIM)
        rank = lowest_ranks(key, taken, S_BLOCK)
        chosen = rank >= 0
        evicted = chosen & owned
        tl.store(mapping + resident, -1, mask=evicted)
        tl.store(score + s, EMPTY, mask=chosen)
        tl.store(entries + 2 * (have + rank) + 1, s, mask=chosen)
        guess_rank = tl.cumsum(absent.to(tl.int32), 0) - 1
        listed = absent & (guess_rank < taken)
        tl.store(entries + 2 * (have + guess_rank), ids, mask=listed)
        tl.store(progress + have + guess_rank, 0, mask=listed)
        tl.debug_barrier()  # the two halves of the list meet
        newcomer = tl.load(entries + 2 * (have + f), mask=f < taken, other=0)
        slot = tl.load(entries + 2 * (have + f) + 1, mask=f < taken, other=0)
        tl.store(owner + slot, newcomer, mask=f < taken)
        tl.store(entry_count + layer_idx, have + taken)

        unused = tl.sum((evicted & (last_plan == NEVER)).to(tl.int32), 0)
        count(counters, EVICTIONS, tl.sum(evicted.to(tl.int32), 0))
        count(counters, PREFETCHED, taken)
        count(counters, PREFETCH_DROPPED, unused)
        count(counters, WASTED_BYTES, unused * payload_bytes)


@triton.jit(do_not_specialize=["layer_idx", "n", "row_stride"])
def post_kernel(
    topk_ids, padding, demand, epoch, clock, stamps, layer_idx, n, row_stride,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Tell the prefetch fill, which may be running, what the layer demands in this step. EARLY says
    that the kernel is launched before the last one has ended."""
    if EARLY:
        await_last()
    step = tl.load(clock + 1)
    tl.store(stamps + layer_idx * NUM_STAMPS + POSTED, nanoseconds())
    ids, asked = load_ids(topk_ids, padding, row_stride, n, TOP_K, BLOCK, PAD)
    tl.store(demand + layer_idx * E + ids, step, mask=asked & (ids < E))
    tl.debug_barrier()  # every thread's stores, then the release
    tl.atomic_xchg(epoch + layer_idx, step, sem="release")
