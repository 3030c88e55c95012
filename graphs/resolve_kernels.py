# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels that decide: which slot each demanded expert is in, and who leaves for the absent.

Shapes: E = experts of a layer, S = slots, N = T * K assignments (tokens x top-k), F = forecast.
One program per launch. Every plan has a number, `seq`; `mark[slot]` holds the number of the last
plan that demanded the slot, so that one exchange tells each assignment whether it is the first of
its plan to meet the slot: such a slot's score is updated once and counted once, however many rows
share the expert, and no row waits for another.
"""

from functools import lru_cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from graphs import layout
from graphs.clock_kernels import await_last, let_next_begin, nanoseconds

EMPTY = tl.constexpr(layout.EMPTY_SCORE)
LOWEST = tl.constexpr(layout.LOWEST_SCORE)
REBASE = tl.constexpr(layout.REBASE_SCORE)
NEVER = tl.constexpr(layout.NEVER)
NO_VICTIM = tl.constexpr((1 << 31) - 1)  # above every score

HITS = tl.constexpr(int(layout.Counter.HITS))
LATE = tl.constexpr(int(layout.Counter.LATE))
MISSES = tl.constexpr(int(layout.Counter.MISSES))
EVICTIONS = tl.constexpr(int(layout.Counter.EVICTIONS))
PREFETCHED = tl.constexpr(int(layout.Counter.PREFETCHED))
PREFETCH_USED = tl.constexpr(int(layout.Counter.PREFETCH_USED))
PREFETCH_DROPPED = tl.constexpr(int(layout.Counter.PREFETCH_DROPPED))
USED_BYTES = tl.constexpr(int(layout.Counter.USED_BYTES))
LATE_BYTES = tl.constexpr(int(layout.Counter.LATE_BYTES))
WASTED_BYTES = tl.constexpr(int(layout.Counter.WASTED_BYTES))
UNPLACED = tl.constexpr(int(layout.Counter.UNPLACED))
BAD_IDS = tl.constexpr(int(layout.Counter.BAD_IDS))
STALL_NS = tl.constexpr(int(layout.Counter.STALL_NS))
FREE_NS = tl.constexpr(int(layout.Counter.FREE_NS))
AT_ONCE = tl.constexpr(int(layout.Counter.AT_ONCE))
NUM_COUNTERS = tl.constexpr(layout.NUM_COUNTERS)

RESERVED = tl.constexpr(int(layout.Stamp.RESERVED))
POSTED = tl.constexpr(int(layout.Stamp.POSTED))
FILLED = tl.constexpr(int(layout.Stamp.FILLED))
PLANNED = tl.constexpr(int(layout.Stamp.PLANNED))
NUM_STAMPS = tl.constexpr(layout.NUM_STAMPS)

MISSED_IN = tl.constexpr(int(layout.Clock.MISSED_IN))
MISSED_STEPS = tl.constexpr(int(layout.Clock.MISSED_STEPS))

PLAN = tl.constexpr(int(layout.Control.PLAN))
FIRST_PLAN = tl.constexpr(int(layout.Control.FIRST_PLAN))
STEP = tl.constexpr(int(layout.Control.STEP))
NUM_CONTROL = tl.constexpr(layout.NUM_CONTROL)

NUM_UNITS = tl.constexpr(int(layout.Header.NUM_UNITS))
PAYLOAD_BYTES = tl.constexpr(int(layout.Header.PAYLOAD_BYTES))
NUM_HEADER = tl.constexpr(layout.NUM_HEADER)

BY_MASK = tl.constexpr(int(layout.Padding.MASK))
BY_SLOT_MAPPING = tl.constexpr(int(layout.Padding.SLOT_MAPPING))


@triton.jit
def advance_kernel(
    clock, score, mark, wanted, control, num_scores, num_wanted, num_layers,
    UNITS_PER_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Next step. The clock that scores are made of moves back, and they with it, in good time. The
    numbers of plans start again with it, for they must not come around to one that a slot or an
    expert still has: of one layer there are fewer than 2**32 from one such step to the next."""
    now = tl.load(clock) + 1
    step = tl.load(clock + 1) + 1
    if now * UNITS_PER_STEP >= REBASE:
        moved = (now - 1) * UNITS_PER_STEP
        for start in range(0, num_scores, BLOCK):
            at = start + tl.arange(0, BLOCK)
            old = tl.load(score + at, mask=at < num_scores, other=0)
            new = tl.maximum(old.to(tl.int64) - moved, LOWEST).to(tl.int32)
            tl.store(score + at, tl.where(old == EMPTY, EMPTY, new), mask=at < num_scores)
            last_plan = tl.load(mark + at, mask=at < num_scores, other=NEVER)
            tl.store(mark + at, tl.where(last_plan == NEVER, NEVER, 1), mask=at < num_scores)
        for start in range(0, num_wanted, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(wanted + at, 0, mask=at < num_wanted)
        for start in range(0, num_layers, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(control + at * NUM_CONTROL + PLAN, 1, mask=at < num_layers)
        now = tl.full([], 1, tl.int32)
    tl.debug_barrier()  # every warp has read the clock that is now overwritten
    tl.store(clock, now)
    tl.store(clock + 1, step)


@triton.jit
def count(counters, COLUMN: tl.constexpr, amount):
    """Add to one counter. One program writes a layer's counters at a time."""
    tl.store(counters + COLUMN, tl.load(counters + COLUMN) + amount)


@triton.jit
def load_ids(
    topk_ids, padding, row_stride, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr
):
    """(ids, asked): expert ids [BLOCK] int32, and which of them are assignments of real rows."""
    r = tl.arange(0, BLOCK)
    row = r // TOP_K
    asked = r < n
    at = row.to(tl.int64) * row_stride + (r - row * TOP_K)
    ids = tl.load(topk_ids + at, mask=asked, other=-1).to(tl.int32)
    if PAD == BY_MASK:
        asked = asked & (tl.load(padding + row, mask=asked, other=1) == 0)
    if PAD == BY_SLOT_MAPPING:
        asked = asked & (tl.load(padding + row, mask=asked, other=-1) >= 0)
    return ids, asked & (ids >= 0)


@triton.jit
def lowest_ranks(key, how_many, S_BLOCK: tl.constexpr):
    """rank [S_BLOCK]: 0, 1, ... for the `how_many` lowest (key, slot), -1 for the others."""
    s = tl.arange(0, S_BLOCK)
    rank = tl.full([S_BLOCK], -1, tl.int32)
    for i in range(how_many):
        victim = tl.argmin(key, 0, tie_break_left=True)
        rank = tl.where(s == victim, i, rank)
        key = tl.where(s == victim, NO_VICTIM, key)
    return rank


@triton.jit
def commit(
    ids, known, seq, now, step, posted, stamps,
    mapping, owner, score, mark, misses, counters,
    entries, entry_count, progress, demand, bytes_before, num_units,
    INSERT: tl.constexpr, F_BLOCK: tl.constexpr,
):  # fmt: skip
    """End every prefetch of the layer: map the whole ones, list the demanded partial ones first
    among the misses (to be copied from where they stand), free the others. Returns the number
    listed. Only after the fill of the prefetches has been joined."""
    num_late = tl.zeros([], tl.int32)
    num_entries = tl.load(entry_count)
    if num_entries > 0:
        tl.store(demand + ids, step, mask=known)
        tl.debug_barrier()  # the demand is read below by other threads
        f = tl.arange(0, F_BLOCK)
        there = f < num_entries
        expert = tl.load(entries + 2 * f, mask=there, other=0)
        slot = tl.load(entries + 2 * f + 1, mask=there, other=0)
        done = tl.load(progress + f, mask=there, other=0)
        moved = tl.load(bytes_before + done, mask=there, other=0)
        demanded = there & (tl.load(demand + expert, mask=there, other=0) == step)
        whole = there & (done >= num_units)
        late = demanded & (done < num_units)
        lost = there & (done < num_units) & (late == 0)
        kept = whole | late
        tl.store(mapping + expert, slot, mask=kept)
        tl.store(score + slot, INSERT(now), mask=kept)
        # A late one is demanded already: neither a hit below nor a victim.
        tl.store(mark + slot, tl.where(late, seq, NEVER), mask=kept)
        tl.store(owner + slot, -1, mask=lost)
        rank = tl.cumsum(late.to(tl.int32), 0) - 1
        tl.store(misses + 3 * rank, expert, mask=late)
        tl.store(misses + 3 * rank + 1, slot, mask=late)
        tl.store(misses + 3 * rank + 2, done, mask=late)
        num_late = tl.sum(late.to(tl.int32), 0)
        count(counters, AT_ONCE, tl.sum((whole & demanded).to(tl.int32), 0))
        count(counters, LATE, num_late)
        count(counters, LATE_BYTES, tl.sum(tl.where(late, moved, 0), 0))
        count(counters, PREFETCH_DROPPED, tl.sum(lost.to(tl.int32), 0))
        count(counters, WASTED_BYTES, tl.sum(tl.where(lost, moved, 0), 0))
        tail_ns = tl.where(posted > 0, tl.load(stamps + FILLED) - posted, 0)
        count(counters, STALL_NS, tl.maximum(tail_ns, 0))
        tl.store(entry_count, 0)
        tl.debug_barrier()  # mapping and marks are read next by other threads
    return num_late


@triton.jit
def place(
    ids, absent, known, seq, now, num_late, payload_bytes,
    mapping, owner, score, mark, wanted, misses, counters,
    E: tl.constexpr, S: tl.constexpr, E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
    INSERT: tl.constexpr, HOOK: tl.constexpr, TOUCH: tl.constexpr,
):  # fmt: skip
    """Give every absent expert the slot of the same rank among the evictable ones, by (score,
    slot); list them after the late ones. Returns how many were placed."""
    tl.store(wanted + ids, seq, mask=absent & known)
    tl.debug_barrier()  # marks of the hits and `wanted` are read below by other threads
    e = tl.arange(0, E_BLOCK)
    missing = (tl.load(wanted + e, mask=e < E, other=0) == seq) & (e < E)
    need = tl.sum(missing.to(tl.int32), 0)

    s = tl.arange(0, S_BLOCK)
    resident = tl.load(owner + s, mask=s < S, other=-1)
    last_plan = tl.load(mark + s, mask=s < S, other=0)
    evictable = (s < S) & (last_plan != seq)
    key = tl.where(evictable, tl.load(score + s, mask=s < S, other=0), NO_VICTIM)
    placed = tl.minimum(need, tl.sum(evictable.to(tl.int32), 0))
    if TOUCH:
        placed = tl.zeros([], tl.int32)
    rank = lowest_ranks(key, placed, S_BLOCK)

    taken = rank >= 0
    evicted = taken & (resident >= 0)
    tl.store(mapping + resident, -1, mask=evicted)
    listed = misses + 3 * num_late
    tl.store(listed + 3 * rank + 1, s, mask=taken)
    expert_rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    listable = missing & (expert_rank < placed)
    tl.store(listed + 3 * expert_rank, e, mask=listable)
    tl.store(listed + 3 * expert_rank + 2, 0, mask=listable)
    tl.debug_barrier()  # the two halves of the list meet

    m = tl.arange(0, S_BLOCK)
    newcomer = tl.load(listed + 3 * m, mask=m < placed, other=0)
    slot = tl.load(listed + 3 * m + 1, mask=m < placed, other=0)
    tl.store(mapping + newcomer, slot, mask=m < placed)
    tl.store(owner + slot, newcomer, mask=m < placed)
    tl.store(score + slot, INSERT(now), mask=m < placed)
    tl.store(mark + slot, seq, mask=m < placed)

    count(counters, MISSES, need)
    count(counters, EVICTIONS, tl.sum(evicted.to(tl.int32), 0))
    if not TOUCH:
        count(counters, UNPLACED, need - placed)
    count(counters, BAD_IDS, tl.sum((absent & (known == 0)).to(tl.int32), 0))
    if HOOK:
        unused = tl.sum((evicted & (last_plan == NEVER)).to(tl.int32), 0)
        count(counters, PREFETCH_DROPPED, unused)
        count(counters, WASTED_BYTES, unused * payload_bytes)
    tl.debug_barrier()  # the mapping is read next by other threads
    return placed


@triton.jit
def begin_early(
    mapping, score, mark, control, counters, layer_idx,
    E: tl.constexpr, S: tl.constexpr, E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
):  # fmt: skip
    """Before a plan in a kernel that is launched early: fetch the layer's rows, last used a step
    ago, together and while the kernel before ends; then wait for that. The plan reads them."""
    let_next_begin()
    e, s = tl.arange(0, E_BLOCK), tl.arange(0, S_BLOCK)
    tl.load(control + layer_idx * NUM_CONTROL, volatile=True)
    tl.load(counters + layer_idx * NUM_COUNTERS, volatile=True)
    tl.load(mapping + layer_idx * E + e, mask=e < E, other=0, volatile=True)
    tl.load(mark + layer_idx * S + s, mask=s < S, other=0, volatile=True)
    tl.load(score + layer_idx * S + s, mask=s < S, other=0, volatile=True)
    await_last()


@triton.jit
def plan(
    topk_ids, padding, out,
    mapping, owner, score, mark, wanted, misses, miss_count, control, clock, counters, stamps,
    entries, entry_count, progress, demand, bytes_before, header,
    layer_idx, n, row_stride,
    E: tl.constexpr, S: tl.constexpr, U: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr, F_BLOCK: tl.constexpr,
    PAD: tl.constexpr, HIT: tl.constexpr, INSERT: tl.constexpr,
    HOOK: tl.constexpr, TOUCH: tl.constexpr,
):  # fmt: skip
    """One plan of one layer. Four dependent reads when everything is resident; the rest only if
    something is absent. With HOOK, prefetches of the layer are committed first. With TOUCH, nothing
    is brought in: the absent come out as slot -1."""
    mapping += layer_idx * E
    owner += layer_idx * S
    score += layer_idx * S
    mark += layer_idx * S
    wanted += layer_idx * E
    misses += layer_idx * (3 * S)
    control += layer_idx * NUM_CONTROL
    counters += layer_idx * NUM_COUNTERS
    stamps += layer_idx * NUM_STAMPS

    now = tl.load(clock)
    step = tl.load(clock + 1)
    seq = tl.load(control + PLAN) + 1
    first_seq = tl.where(tl.load(control + STEP) == step, tl.load(control + FIRST_PLAN), seq)
    hits_before = tl.load(counters + HITS)
    ids, asked = load_ids(topk_ids, padding, row_stride, n, TOP_K, BLOCK, PAD)
    known = asked & (ids < E)

    num_listed = tl.zeros([], tl.int32)
    payload_bytes = tl.zeros([], tl.int64)
    if HOOK:
        payload_bytes = tl.load(header + layer_idx * NUM_HEADER + PAYLOAD_BYTES)
        posted = tl.load(stamps + POSTED)
        free_ns = posted - tl.load(stamps + RESERVED)
        count(counters, FREE_NS, tl.maximum(free_ns, 0))
        tl.store(stamps + POSTED, 0)
        num_listed = commit(
            ids, known, seq, now, step, posted, stamps,
            mapping, owner, score, mark, misses, counters,
            entries + layer_idx * (2 * F), entry_count + layer_idx, progress + layer_idx * F,
            demand + layer_idx * E, bytes_before + layer_idx * (U + 1),
            tl.load(header + layer_idx * NUM_HEADER + NUM_UNITS), INSERT, F_BLOCK,
        )  # fmt: skip

    slot = tl.load(mapping + ids, mask=known, other=-1)
    hit = slot >= 0
    before = tl.atomic_xchg(mark + slot, seq, mask=hit, sem="relaxed")
    old_score = tl.load(score + slot, mask=hit, other=0)
    first = hit & (before != seq)
    tl.store(score + slot, HIT(old_score, now), mask=first)
    absent = asked & (slot < 0)
    r = tl.arange(0, BLOCK)
    nowhere: tl.constexpr = -1 if TOUCH else 0
    tl.store(out + r, tl.where(hit, slot, nowhere).to(out.dtype.element_ty), mask=r < n)

    # Both counts in one reduction: BLOCK is at most 2**13.
    both = tl.sum(first.to(tl.int32) + (absent.to(tl.int32) << 16), 0)
    tl.store(counters + HITS, hits_before + (both & 0xFFFF))
    if HOOK:
        used = tl.sum((first & (before == NEVER)).to(tl.int32), 0)
        if used > 0:
            count(counters, PREFETCH_USED, used)
            count(counters, USED_BYTES, used * payload_bytes)
    if (both >> 16) > 0:
        first_miss = tl.load(clock + MISSED_IN) != step  # of any layer in this step
        tl.store(clock + MISSED_STEPS, tl.load(clock + MISSED_STEPS) + first_miss.to(tl.int32))
        tl.store(clock + MISSED_IN, step)
        num_listed += place(
            ids, absent, known, seq, now, num_listed, payload_bytes,
            mapping, owner, score, mark, wanted, misses, counters,
            E, S, E_BLOCK, S_BLOCK, INSERT, HOOK, TOUCH,
        )  # fmt: skip
        slot = tl.load(mapping + ids, mask=known, other=nowhere)
        tl.store(out + r, tl.maximum(slot, nowhere).to(out.dtype.element_ty), mask=r < n)
    tl.store(miss_count + layer_idx, num_listed)
    if num_listed > 0:
        tl.store(stamps + PLANNED, nanoseconds())
    tl.store(control + PLAN, seq)
    tl.store(control + FIRST_PLAN, first_seq)
    tl.store(control + STEP, step)


HIT: Any = None
INSERT: Any = None
"""The policy's functions, as `of_policy` puts them before a kernel."""


def resolve_kernel(
    topk_ids, padding, out,
    mapping, owner, score, mark, wanted, misses, miss_count, control, clock, counters, stamps,
    entries, entry_count, progress, demand, bytes_before, header,
    layer_idx, n, row_stride,
    E: tl.constexpr, S: tl.constexpr, U: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr, F_BLOCK: tl.constexpr,
    PAD: tl.constexpr, HOOK: tl.constexpr, TOUCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        begin_early(mapping, score, mark, control, counters, layer_idx, E, S, E_BLOCK, S_BLOCK)
    plan(
        topk_ids, padding, out,
        mapping, owner, score, mark, wanted, misses, miss_count, control, clock, counters, stamps,
        entries, entry_count, progress, demand, bytes_before, header,
        layer_idx, n, row_stride, E, S, U, F, TOP_K,
        BLOCK, E_BLOCK, S_BLOCK, F_BLOCK, PAD, HIT, INSERT, HOOK, TOUCH,
    )  # fmt: skip


def of_policy(kernel: Any, hit: Any, insert: Any) -> Any:
    """A kernel that knows its eviction policy, given as its two `triton.jit` functions, by the
    global names HIT and INSERT.

    They are not passed as arguments: Triton up to 3.6 cannot describe a function among a kernel's
    arguments to whoever listens for compilations, and vLLM listens. Nor are they captured in a
    closure, which Triton's interpreter would lose.
    """
    scope = {**kernel.__globals__, "HIT": hit, "INSERT": insert}
    made = FunctionType(kernel.__code__, scope, kernel.__name__, kernel.__defaults__)
    made.__annotations__ = kernel.__annotations__
    made.__module__, made.__qualname__ = kernel.__module__, kernel.__qualname__
    return triton.jit(do_not_specialize=["layer_idx", "n", "row_stride"])(made)


@lru_cache
def resolve_kernel_of(hit: Any, insert: Any) -> Any:
    """The resolve kernel of one eviction policy."""
    return of_policy(resolve_kernel, hit, insert)
