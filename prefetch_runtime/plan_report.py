"""Prints plans and the state of a machine, for people, on 80 columns."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefetch_runtime.host_memory import MemoryLimit, gib, memory_limits
from prefetch_runtime.model_refusals import refused_line
from prefetch_runtime.model_sizes import ModelSizes
from prefetch_runtime.plan import (
    GRAPH_WAVE_US,
    SEGMENT_HOST_US,
    UTILIZATION,
    Estimate,
    Plan,
    Planner,
    rounded,
)
from prefetch_runtime.plan_levers import BetterBatch, levers
from prefetch_runtime.shapes import SHAPES
from prefetch_runtime.waves import MOST_CAPTURED_WAVES, MOST_TOKENS_IN_WAVES

if TYPE_CHECKING:
    from prefetch_runtime.doctor import Machine, Report  # imports torch

CAVEAT = (
    "Estimates: compared only with Qwen3-30B-A3B's shape on one H200: within 13 % where the GPU "
    "bounds the step (48 layers resident, bf16, fp8 and int4) and where experts miss in one graph, "
    "in waves or not; within 20 % where its host does (few layers at batch 1 or 2, mode eager), "
    "but hosts differ by up to a factor of 2; misses in mode segmented have not been compared."
)

# How a step that may not fit is called in the column of modes.
_CAPTURED_WAVES = "full+waves"
_WAVES = "waves"

out = Console(highlight=False)


def tightest_host_limit() -> MemoryLimit:
    """What bounds this machine's free memory."""
    return min(memory_limits(), key=lambda limit: limit.available_bytes)


def assumptions(planners: Sequence[Planner], plans: Sequence[Plan]) -> dict[str, str]:
    """What the numbers rest on, and whether it was measured, given, published or assumed."""
    planner = planners[0]
    sizes, workload, gpu = planner.sizes, planner.workload, planner.gpu
    found = {"hit rates": planner.rates.origin}
    if workload.batch > 1:
        found["batch"] = "assumed: independent sequences that share the slots"
    if len(planners) == 1:
        found["link"] = f"{rounded(gpu.link_gbs, 3):g} GB/s, {gpu.link_origin}"
        found["GPU memory"] = f"{rounded(gpu.memory_gbs):g} GB/s, {gpu.memory_origin}"
    else:
        found["link"] = gpu.link_origin.replace(gpu.name, "as named")
        found["GPU memory"] = gpu.memory_origin.replace(gpu.name, "as named")
    if workload.resident_ms is None:
        found["step"] = (
            "assumed: weights and KV cache are read once; a time per layer, fitted on one H200, "
            "comes on top"
        )
    else:
        found["step"] = f"{workload.resident_ms:g} ms without misses, given"
        del found["GPU memory"]
    if workload.mode == "segmented":
        found["host"] = (
            f"assumed: {SEGMENT_HOST_US:g} us at each MoE layer, as beside one H200 without "
            "prediction"
            if workload.host_us is None
            else f"{workload.host_us:g} us at each MoE layer, given"
        )
    shown = [estimate for plan in plans for estimate in (*plan.estimates, plan.target)]
    if any(estimate is not None and _has_captured_waves(estimate) for estimate in shown):
        found["waves"] = (
            f"assumed: {GRAPH_WAVE_US:g} us for each wave but the first of an MoE layer inside the "
            "graph, as many as the worst routing needs"
        )
    found["activations"] = "assumed: a tenth of what vLLM may use, graphs included"
    if sizes.notes:
        found["config.json"] = "; ".join(sizes.notes)
    if sizes.expert_bytes < 1 << 20:
        found["copies"] = "experts below 1 MiB do not fill the link: copies take longer than shown"
    return found


def print_refusal(why: str) -> None:
    """That the runtime would not start with a model."""
    out.print(refused_line(why), markup=False, style="bold")


def print_plan(
    model: str,
    planner: Planner,
    plan: Plan,
    target: float | None,
    *,
    better: BetterBatch | None = None,
    backend: str | None = None,
    refused: str | None = None,
) -> None:
    """One GPU in full.

    Args:
        better: a smaller batch that decodes more in all.
        backend: the `--moe-backend` that the cache needs for the model, if it needs one.
        refused: why the cache does not serve it at all. Nothing is estimated then, unless vLLM
            alone serves it on this GPU.
    """
    sizes, gpu = planner.sizes, plan.gpu
    _print_model(model, sizes)
    out.print(f"\n{gpu.gib:.4g} GiB of GPU memory ({gpu.name})", markup=False, style="bold")
    _print_pairs(_memory_lines(planner, plan))
    if refused is not None and not plan.all_fit:
        out.print()
        print_refusal(refused)
        return
    if plan.estimates:
        _print_estimates(planner, plan)
    if plan.uniform is not None and plan.uniform != plan.best and not plan.all_fit:
        out.print(
            f"With {plan.uniform.slots_per_layer} slots and uniform routing, which no eviction "
            f"can help: {_speed(plan.uniform.tokens_per_s)} tokens/s."
        )
    if plan.best is None:
        _print_levers(planner)
    if better is not None:
        speed = _speed(better.tokens_per_s)
        out.print(f"Batch {better.batch} reaches {speed} tokens/s in all: {better.why}.")
    _print_other_mode(planner, plan)
    if target is not None:
        out.print(_target_line(plan, target))
    _print_assumptions([planner], [plan])
    if refused is not None:
        out.print()
        print_refusal(refused)
    command = start_command(model, planner, plan, backend=backend, refused=refused)
    if plan.best is not None and command is not None:
        out.print(f"\n{_heading(plan, plan.best, target)}", style="bold")
        out.print(f"  {command}", markup=False, soft_wrap=True)
        if not plan.all_fit:
            _print_host_warning(sizes)
        if model in SHAPES:
            out.print(f"MODEL: a checkpoint of {model}'s shape, a folder or a name on the hub")


def print_sizes(
    model: str,
    planners: Sequence[Planner],
    plans: Sequence[Plan],
    target: float | None,
    *,
    better: Sequence[BetterBatch | None] = (),
    refused: str | None = None,
) -> None:
    """A row for each size of GPU; `refused`, and `better` of each size, as in `print_plan`."""
    served = [refused is None or plan.all_fit for plan in plans]
    sizes, workload = planners[0].sizes, planners[0].workload
    _print_model(model, sizes)
    out.print(f"\n{workload.batch} x {workload.context} tokens, by size of GPU", style="bold")
    names = ["GiB", "such as", "GB/s", "slots", "hit rate", "tokens/s", "at best"]
    table = _columns(*names, *([f"for {target:g}/s"] if target is not None else []))
    for plan, is_served in zip(plans, served, strict=True):
        gpu, best = plan.gpu, plan.best
        row = [f"{gpu.gib:g}", gpu.name, f"{rounded(gpu.link_gbs, 3):g}"]
        if best is None or not is_served:
            row += ["too small" if best is None else "refused", "", "", ""]
        else:
            row += [
                "all" if plan.all_fit else f"{best.slots_per_layer}/{sizes.num_experts}",
                f"{best.hit_rate:.0%}",
                _speed(best.tokens_per_s),
                _speed(best.tokens_per_s_at_best),
            ]
        if target is not None and plan.target is None:
            row.append("never")
        elif plan.target is not None:
            row.append(str(plan.target.slots_per_layer) if refused is None else "all")
        table.add_row(*row)
    out.print(table)
    out.print(
        "GB/s: of the link. tokens/s: of all sequences, every miss waited for; at best: every copy "
        "beside compute. all: vLLM alone serves them. --gpu-gib shows one size in full."
    )
    for name, where in ((_CAPTURED_WAVES, "inside the graph"), (_WAVES, "outside of any graph")):
        gibs = [
            f"{plan.gpu.gib:g}"
            for plan, is_served in zip(plans, served, strict=True)
            if is_served and plan.best is not None and _mode_of(plan.best) == name
        ]
        if gibs:
            out.print(
                f"In waves, {where}, on {', '.join(gibs)} GiB: the batch may need "
                f"{planners[0].widest()} slots."
            )
    fewer = [
        f"batch {found.batch} on {plan.gpu.gib:g} GiB ({_speed(found.tokens_per_s)})"
        for plan, found, is_served in zip(plans, better, served, strict=False)
        if found is not None and is_served
    ]
    if fewer:
        out.print(f"Fewer sequences reach more tokens/s in all: {', '.join(fewer)}.")
    if workload.mode == "eager":
        out.print("This is mode eager, bound by the host; mode full is one CUDA graph per step.")
    if workload.mode == "segmented":
        out.print(
            "This is mode segmented, which waits for the host at each MoE layer; mode full does "
            "not."
        )
    _print_assumptions(planners, plans)
    if refused is not None:
        out.print()
        print_refusal(refused)


def print_machine(machine: "Machine", report: "Report") -> None:
    """What was found, what would run, what is wrong."""
    _print_pairs(_facts(machine))
    out.print("modes", style="bold")
    _print_pairs((f"  {name}", what) for name, what in report.modes.items())
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    for problem in report.problems:
        out.print(f"problem: {problem}", markup=False, style="bold")
    if not report.problems:
        out.print("no problems found")


def _print_host_warning(sizes: ModelSizes) -> None:
    """Whether this machine could not run the command that has just been shown."""
    limit = tightest_host_limit()
    if limit.available_bytes < sizes.pinned_bytes:
        out.print(
            f"on a machine with more host memory: this one has {gib(limit.available_bytes)} free, "
            f"and the experts need {gib(sizes.pinned_bytes)}",
            markup=False,
            style="bold",
        )


def _print_model(model: str, sizes: ModelSizes) -> None:
    limit = tightest_host_limit()
    enough = "" if limit.available_bytes >= sizes.pinned_bytes else ", which is too little"
    out.print(model, style="bold", markup=False, soft_wrap=True)
    _print_pairs(
        [
            (
                "  experts",
                f"{sizes.num_moe_layers} of {sizes.num_layers} layers x {sizes.num_experts}, "
                f"{sizes.top_k} per token; each {sizes.expert_bytes / 2**20:.2f} MiB "
                f"({sizes.expert_format}), all {gib(sizes.experts_bytes)}",
            ),
            ("  other weights", gib(sizes.dense_bytes)),
            (
                "  host memory",
                f"{gib(sizes.pinned_bytes)}, page-locked; this machine has "
                f"{gib(limit.available_bytes)} free ({limit.name}){enough}",
            ),
        ]
    )


def _memory_lines(planner: Planner, plan: Plan) -> Iterator[tuple[str, str]]:
    memory, workload, sizes = plan.memory, planner.workload, planner.sizes
    unit, scale = ("GiB", 2**30) if memory.usable >= 2**30 else ("MiB", 2**20)

    def size(num_bytes: float) -> str:
        return f"{num_bytes / scale:>8.2f}"

    tokens = f"{workload.batch} x {workload.context} tokens"
    yield f"  vLLM may use {workload.utilization:.0%}", f"{size(memory.usable)} {unit}"
    yield "  weights beside the experts", size(memory.dense)
    yield f"  KV cache, {tokens}", size(memory.kv_cache)
    yield "  activations and graphs", size(memory.activations)
    yield "  staging ring for prompts", size(memory.staging)
    if plan.all_fit:
        meaning = "all experts fit: no cache needed"
    elif plan.best is not None:
        meaning = f"{memory.slots_per_layer} of {sizes.num_experts} experts per layer"
    elif memory.left_for_slots < 0:
        meaning = "too little for the rest of the model"
    else:
        meaning = f"too little: {sizes.top_k} slots take {gib(sizes.slot_bytes(sizes.top_k))}"
    yield "  left for experts", f"{size(memory.left_for_slots)} = {meaning}"


def _print_estimates(planner: Planner, plan: Plan) -> None:
    sizes = planner.sizes
    names = ("slots", "GiB", "hits", "mode", "base ms", "copy ms", "step ms", "tokens/s", "at best")
    table = _columns(*names, gap=0)
    for estimate in plan.estimates:
        table.add_row(
            f"{estimate.slots_per_layer}/{sizes.num_experts}",
            _gib(estimate.slot_bytes),
            f"{estimate.hit_rate:.0%}",
            _mode_of(estimate),
            f"{rounded(estimate.resident_ms):g}",
            f"{rounded(estimate.copy_ms):g}",
            f"{rounded(estimate.resident_ms + estimate.copy_ms):g}",
            _speed(estimate.tokens_per_s),
            _speed(estimate.tokens_per_s_at_best),
        )
    out.print(table)
    out.print(
        "base: a step without misses; copy: the misses over the link; step: both, every miss "
        "waited for. tokens/s: of all sequences, by that step; at best: every copy beside compute."
    )
    named = {_mode_of(estimate) for estimate in plan.estimates}
    fewer = "fewer slots than the batch may need"
    if _CAPTURED_WAVES in named:
        out.print(f"{_CAPTURED_WAVES}: {fewer}; in waves inside the graph.")
    if _WAVES in named:
        out.print(f"{_WAVES}: {fewer}; outside of any graph{_why_outside(planner)}.")
    _print_wave_hint(planner, plan)


def _why_outside(planner: Planner) -> str:
    workload = planner.workload
    if workload.mode != "full":
        return ""
    return f", which takes {MOST_TOKENS_IN_WAVES} sequences and {MOST_CAPTURED_WAVES} waves at most"


def _has_captured_waves(estimate: Estimate) -> bool:
    return estimate.mode == "full" and estimate.waves > 1


def _mode_of(estimate: Estimate) -> str:
    if estimate.waves == 1:
        return estimate.mode
    return _CAPTURED_WAVES if _has_captured_waves(estimate) else _WAVES


def _print_wave_hint(planner: Planner, plan: Plan) -> None:
    """How many slots, or how small a batch, would not run in waves."""
    widest, sizes = planner.widest(), planner.sizes
    most = plan.memory.slots_per_layer
    if widest <= most:
        return
    fewer = most // sizes.top_k
    smaller = f"{fewer} sequence" if fewer == 1 else f"{fewer} sequences"
    if widest < sizes.num_experts:
        out.print(
            f"{widest} slots would decode this batch without waves; {most} do so for {smaller}."
        )
    else:
        out.print(f"{most} slots decode {smaller} without waves; this batch may need every expert.")


def _print_levers(planner: Planner) -> None:
    """What would make room for one token's experts."""
    found = levers(planner)
    if not found.changes:
        out.print("No shorter context, smaller ring or 4-bit checkpoint makes room on this GPU.")
    else:
        words = " or " if found.is_each_enough else ", and with it "
        out.print(f"What makes room: {words.join(found.changes)}.", markup=False)
    out.print(f"As it is, it takes a GPU of {math.ceil(found.least_gib)} GiB.")


def _print_other_mode(planner: Planner, plan: Plan) -> None:
    """What one graph per step would give where it is not what was planned."""
    if plan.best is None or plan.all_fit or planner.workload.mode == "full":
        return
    workload = replace(planner.workload, mode="full")
    slots = plan.best.slots_per_layer
    other = Planner(planner.sizes, planner.gpu, workload, planner.rates).estimate(slots)
    if other.mode == "full":
        what = ", waves inside" if other.waves > 1 else ""
        out.print(
            f"As one CUDA graph per step{what} (--prefetch-mode full): "
            f"{_speed(other.tokens_per_s)} tokens/s with {slots} slots."
        )


def _target_line(plan: Plan, target: float) -> str:
    if plan.target is None:
        most = _speed(plan.all_resident.tokens_per_s)
        return f"{target:g} tokens/s is out of reach: {most} with every expert resident."
    verdict = "they fit" if plan.target_fits else f"{plan.memory.slots_per_layer} fit"
    return (
        f"{target:g} tokens/s take {plan.target.slots_per_layer} slots per layer "
        f"({_gib(plan.target.slot_bytes)} GiB): {verdict}."
    )


def _heading(plan: Plan, best: Estimate, target: float | None) -> str:
    """Of the command, which takes the most slots that fit, whatever the target."""
    if target is not None and not plan.target_fits:
        most = "every expert resident" if plan.all_fit else f"the {best.slots_per_layer} that fit"
        return f"short of the target: {_speed(best.tokens_per_s)} tokens/s with {most}"
    enough = plan.target
    if plan.all_fit or enough is None or enough.slots_per_layer == best.slots_per_layer:
        return "start it with"
    return f"start it with all that fit (the target takes {enough.slots_per_layer})"


def _print_assumptions(planners: Sequence[Planner], plans: Sequence[Plan]) -> None:
    out.print("\nassumptions", style="bold")
    _print_pairs((f"  {name}", what) for name, what in assumptions(planners, plans).items())
    out.print(CAVEAT)


def start_command(
    model: str, planner: Planner, plan: Plan, *, backend: str | None, refused: str | None
) -> str | None:
    """What starts a server with the most slots that fit; arguments as of `print_plan`.

    Returns:
        None where nothing fits, or the cache is needed and refuses the model.
    """
    if plan.best is None or (refused is not None and not plan.all_fit):
        return None
    workload = planner.workload
    rest = f"--max-model-len {workload.context} --max-num-seqs {workload.batch}"
    if workload.utilization != UTILIZATION:
        rest += f" --gpu-memory-utilization {workload.utilization:g}"
    model = "MODEL" if model in SHAPES else shlex.quote(model)  # a shape has no weights to serve
    if plan.all_fit:
        return f"vllm serve {model} {rest}"
    mode = "" if workload.mode == "full" else f" --prefetch-mode {workload.mode}"
    size = f"--moe-expert-cache-size {plan.memory.slots_per_layer}"
    ring = "" if workload.staging_slots == "auto" else f" --staging-slots {workload.staging_slots}"
    kernel = "" if backend is None else f" --moe-backend {backend}"
    return f"prefetch-runtime serve {model} {size}{mode}{ring}{kernel} {rest}"


def _facts(machine: "Machine") -> Iterator[tuple[str, str]]:
    yield "Python", machine.python
    for name, found in machine.versions.items():
        yield name, found or "not installed"
    yield "CUDA of torch", machine.torch_cuda or "none, a CPU build"
    yield "NVIDIA driver", machine.driver or "none found by nvidia-smi"
    gpu = machine.gpu
    if gpu is None:
        yield "GPU", "none that torch can use"
    else:
        yield (
            "GPU",
            f"{gpu.name}, compute capability {gpu.compute_capability}, "
            f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free",
        )
        if gpu.link_gbs is not None:
            yield "link, host to GPU", f"{gpu.link_gbs:.1f} GB/s, measured, page-locked"
        if gpu.memory_gbs is not None:
            yield "GPU memory", f"{gpu.memory_gbs:.0f} GB/s, measured, a copy within it"
    for limit in machine.limits:
        yield "host memory", f"{gib(limit.available_bytes)} left by {limit.name}"
    yield (
        "page-locking",
        "no limit for this process"
        if machine.lock_limit is None
        else f"RLIMIT_MEMLOCK {gib(machine.lock_limit)}",
    )


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names beside what is said of them, wrapped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, what in pairs:
        table.add_row(Text(name), Text(what))
    out.print(table)


def _columns(*names: str, gap: int = 1) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, gap), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _speed(tokens_per_s: float) -> str:
    return f"{rounded(tokens_per_s):,.{0 if tokens_per_s >= 10 else 1}f}"
