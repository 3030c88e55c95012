"""What would make room where a GPU holds too few slots for even one token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from prefetch_runtime.plan import ACTIVATIONS_SHARE, Planner
from prefetch_runtime.waves import rows_of_half

LEAST_CONTEXT = 512
CONTEXT_STEP = 256

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


def levers(planner: Planner) -> Levers:
    """What would help a plan with too little memory, each alone or else together.

    What would not help is left out. Other weights stay as they are in a quantised checkpoint.
    """
    least = _least_gib(planner)
    alone = [change for step in _STEPS if (change := step(planner)) and _fits(change[1])]
    if alone:
        words = tuple(word for word, _ in alone)
        return Levers(changes=words, is_each_enough=True, least_gib=least)
    taken: list[str] = []
    for step in _STEPS:
        change = step(planner)
        if change is not None:
            taken.append(change[0])
            planner = change[1]
        if _fits(planner):
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
    sizes = planner.sizes
    bits = _BITS.get(sizes.expert_format)
    if bits is None:
        return None
    name = "its MXFP4" if sizes.model_type == "gpt_oss" else "an int4 (GPTQ, AWQ)"
    smaller = replace(
        sizes, expert_bytes=int(sizes.expert_bytes * _INT4_BITS / bits), expert_format="int4"
    )
    return f"{name} checkpoint", Planner(smaller, planner.gpu, planner.workload, planner.rates)


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
