"""What would make room where a GPU holds too few slots for even one token, and whether fewer
sequences would decode more tokens in all."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from prefetch_runtime.hit_rates import HitRates
from prefetch_runtime.model_sizes import ModelSizes
from prefetch_runtime.plan import ACTIVATIONS_SHARE, Estimate, Planner
from prefetch_runtime.waves import rows_of_half

LEAST_CONTEXT = 512
CONTEXT_STEP = 256
CLEARLY_MORE = 1.2
"""Times as many tokens/s, below which another batch is not worth a line."""

_INT4_BITS = 4.25  # with a scale of two bytes for each 64 weights
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "fp8": 8, "fp8 in blocks": 8}

_Change = tuple[str, Planner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """Changes that make room for the experts of one token."""

    changes: tuple[str, ...]
    """In words; empty when all of them are not enough."""
    is_each_enough: bool
    """Or only all of them together."""
    least_gib: float
    """The smallest GPU that is enough without a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterBatch:
    """A smaller batch that decodes clearly more tokens/s, of all sequences together."""

    batch: int
    slots_per_layer: int
    tokens_per_s: float
    why: str
    """What holds the planned batch back, in words."""


def better_batch(planner: Planner, rates_of: Callable[[int], HitRates]) -> BetterBatch | None:
    """The best of 1, 2, 4, ... sequences, fewer than planned, with the same context each.

    Args:
        rates_of: hit rates of a batch.

    Returns:
        None where none reaches `CLEARLY_MORE` of what the planned batch does.
    """
    mine = _with_most_slots(planner)
    best: tuple[Planner, Estimate] | None = None
    batch = 1
    while batch < planner.workload.batch:
        workload = replace(planner.workload, batch=batch)
        smaller = Planner(planner.sizes, planner.gpu, workload, rates_of(batch))
        found = _with_most_slots(smaller)
        if found is not None and (best is None or found.tokens_per_s > best[1].tokens_per_s):
            best = smaller, found
        batch *= 2
    if best is None or (mine is not None and not _clearly_more(best[1], mine)):
        return None
    return BetterBatch(
        batch=best[0].workload.batch,
        slots_per_layer=best[1].slots_per_layer,
        tokens_per_s=best[1].tokens_per_s,
        why=_why_fewer(planner, mine, *best),
    )


def _why_fewer(planner: Planner, mine: Estimate | None, other: Planner, best: Estimate) -> str:
    workload = planner.workload
    cache = f"the KV cache of {workload.batch} x {workload.context} tokens takes the slots' memory"
    if mine is None:
        return cache
    with_as_many = other.estimate(mine.slots_per_layer)
    if not _clearly_more(with_as_many, mine):
        return cache
    # Milliseconds of one token that are the batch's own doing.
    batches = workload.batch, other.workload.batch
    of_misses = mine.copy_ms / batches[0] - with_as_many.copy_ms / batches[1]
    of_compute = mine.resident_ms / batches[0] - with_as_many.resident_ms / batches[1]
    shared = (
        f"{workload.batch} sequences share the slots and miss more"
        if of_misses >= of_compute
        else f"{workload.batch} sequences run in waves"
    )
    has_room = _clearly_more(planner.estimate(best.slots_per_layer), mine)
    return f"{shared}, and {cache}" if has_room else shared


def _with_most_slots(planner: Planner) -> Estimate | None:
    slots = planner.memory().slots_per_layer
    return planner.estimate(slots) if slots else None


def _clearly_more(one: Estimate, other: Estimate) -> bool:
    return one.tokens_per_s >= CLEARLY_MORE * other.tokens_per_s


def levers(planner: Planner) -> Levers:
    """What would help a plan with too little memory, each alone or else together.

    What would not help is left out. That a checkpoint has more than its experts in int4 is named
    only where it takes that.
    """
    least = _least_gib(planner)
    alone = [change for step in _STEPS if (change := step(planner)) and _fits(change[1])]
    of_all = _all_in_int4(planner)
    if of_all and _fits(of_all[1]) and not any(_is_int4(change[1]) for change in alone):
        alone.insert(0, of_all)
    if alone:
        words = tuple(word for word, _ in alone)
        return Levers(changes=words, is_each_enough=True, least_gib=least)
    for first in (_STEPS[0], _all_in_int4):
        together, taken = planner, list[str]()
        for step in (first, *_STEPS[1:]):
            change = step(together)
            if change is not None:
                taken.append(change[0])
                together = change[1]
            if _fits(together):
                return Levers(changes=tuple(taken), is_each_enough=False, least_gib=least)
    return Levers(changes=(), is_each_enough=False, least_gib=least)


def _fits(planner: Planner) -> bool:
    return planner.memory().slots_per_layer > 0


def _least_gib(planner: Planner) -> float:
    """GiB of a GPU that has room for the experts of one token, and the ring."""
    memory, sizes = planner.memory(), planner.sizes
    needed = memory.dense + memory.kv_cache + memory.staging + sizes.slot_bytes(sizes.top_k)
    return needed / (1 - ACTIVATIONS_SHARE) / planner.workload.utilization / 2**30


def _quantised(planner: Planner) -> _Change | None:
    """Experts in int4; other weights stay as they are."""
    sizes = planner.sizes
    bits = _BITS.get(sizes.expert_format)
    if bits is None:
        return None
    name = "its MXFP4" if sizes.model_type == "gpt_oss" else "an int4 (GPTQ, AWQ)"
    smaller = replace(
        sizes, expert_bytes=int(sizes.expert_bytes * _INT4_BITS / bits), expert_format="int4"
    )
    return f"{name} checkpoint", _of_sizes(planner, smaller)


def _all_in_int4(planner: Planner) -> _Change | None:
    """Attention, shared experts and MLPs, too, as most checkpoints in int4 have them."""
    change = _quantised(planner)
    if change is None or planner.sizes.model_type == "gpt_oss":
        return None
    name, quantised = change
    smaller = replace(quantised.sizes, dense_bytes=quantised.sizes.dense_int4_bytes)
    return f"{name} whose attention is in int4, too", _of_sizes(planner, smaller)


def _is_int4(planner: Planner) -> bool:
    return planner.sizes.expert_format == "int4"


def _of_sizes(planner: Planner, sizes: ModelSizes) -> Planner:
    return Planner(sizes, planner.gpu, planner.workload, planner.rates)


def _staging(planner: Planner) -> _Change | None:
    sizes, workload = planner.sizes, planner.workload
    half = rows_of_half(
        workload.staging_slots, expert_bytes=sizes.expert_bytes, num_experts=sizes.num_experts
    )
    if half == 1:
        return None
    return "--staging-slots 2 (prompts and wide batches in more waves)", _working(
        planner, staging_slots=2
    )


def _batch(planner: Planner) -> _Change | None:
    if planner.workload.batch == 1:
        return None
    return "--batch 1 (--max-num-seqs 1)", _working(planner, batch=1)


def _context(planner: Planner) -> _Change | None:
    """The longest context that leaves room, or the shortest that is tried."""
    steps = range(LEAST_CONTEXT, planner.workload.context, CONTEXT_STEP)
    if not steps:
        return None
    low, high = 0, len(steps) - 1  # the longest that fits is at least the first
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(_working(planner, context=steps[middle])):
            low = middle
        else:
            high = middle - 1
    context = steps[low]
    return f"--context {context} (--max-model-len {context})", _working(planner, context=context)


def _working(planner: Planner, **changes: int) -> Planner:
    workload = replace(planner.workload, **changes)  # type: ignore[arg-type]
    return Planner(planner.sizes, planner.gpu, workload, planner.rates)


_STEPS: tuple[Callable[[Planner], _Change | None], ...] = (_quantised, _staging, _batch, _context)
