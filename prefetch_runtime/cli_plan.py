"""`prefetch-runtime plan` and `prefetch-runtime doctor`: their options, JSON and exit status."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from prefetch_runtime import plan_report
from prefetch_runtime.config import AUTO_MODE, ConfigError
from prefetch_runtime.hit_rates import (
    HitRates,
    TraceHitRates,
    create_hit_rates,
    matching_curve,
)
from prefetch_runtime.model_refusals import moe_backend, why_refused
from prefetch_runtime.model_shape import ModelError, load_config, most_positions
from prefetch_runtime.model_sizes import ModelSizes, model_sizes
from prefetch_runtime.plan import CARDS, UTILIZATION, Gpu, Planner, Workload, rounded, typical_gpu
from prefetch_runtime.plan_levers import better_batch
from prefetch_runtime.trace import TraceError, load_trace

err = Console(stderr=True, highlight=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def plan(
    model: Annotated[
        str, typer.Argument(help="A model folder, a name on the hub, or a named shape.")
    ],
    gpu_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Size of the GPU; else this machine's, else a table."),
    ] = None,
    link_gbs: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Host to GPU, as `prefetch-runtime doctor` measures."),
    ] = None,
    memory_gbs: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="The GPU's memory, as read by a decode step."),
    ] = None,
    resident_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="A measured decode step with every expert resident."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--max-model-len",
            metavar="N",
            help="Tokens of a sequence; else what the model takes, <= 8192.",
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option("--batch", "--max-num-seqs", metavar="N", help="Sequences decoded together."),
    ] = 1,
    curve: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hit rates: a published curve, or uniform."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hit rates: simulated with a recorded routing."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS/S", help="Find the fewest slots for this speed, of all sequences."
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option("--prefetch-mode", metavar="MODE", help="auto, full, segmented or eager.")
    ] = "auto",
    host_us: Annotated[
        float | None,
        typer.Option(
            metavar="US", help="Mode segmented: microseconds of the host at each MoE layer."
        ),
    ] = None,
    utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization", metavar="SHARE", help="Of the GPU, what vLLM may use."
        ),
    ] = UTILIZATION,
    staging_slots: Annotated[
        str, typer.Option(metavar="N", help="Experts in the ring for prompts, or auto.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say how many experts fit on a GPU, and about how fast that would be.

    Reads the model's config.json only.
    Status 1: nothing fits, or not the target, or the cache refuses the model.
    """
    config = load_config(model)
    refused = why_refused(config)
    sizes = _sizes(model, config, refused, as_json=as_json)
    _check_context(context, most_positions(config))
    planned = _mode(mode)
    if host_us is not None and planned != "segmented":
        raise ConfigError(
            f"--host-us is of mode segmented, and this plans for {planned}; add --prefetch-mode "
            "segmented, or leave it out"
        )
    backend = moe_backend(config)
    workload = Workload(
        context=context if context is not None else min(sizes.max_context or 8192, 8192),
        batch=batch,
        mode=planned,
        utilization=utilization,
        staging_slots=_staging_slots(staging_slots),
        resident_ms=resident_ms,
        host_us=host_us,
    )
    rates_of = partial(_hit_rates, sizes, curve=curve, trace=trace)
    rates = rates_of(batch)
    with err.status("planning"):
        gpus = _gpus(gpu_gib, memory_gbs=memory_gbs, link_gbs=link_gbs)
        planners = [Planner(sizes, gpu, workload, rates) for gpu in gpus]
        is_one = len(planners) == 1
        plans = [planner.plan(target=target, ladder=is_one or as_json) for planner in planners]
        better = [better_batch(planner, rates_of) for planner in planners]
    if as_json:
        _print_json(
            {
                "model": {"name": model, **asdict(sizes)},
                "refused": refused,
                "experts_bytes": sizes.experts_bytes,
                "pinned_bytes": sizes.pinned_bytes,
                "host_available_bytes": plan_report.tightest_host_limit().available_bytes,
                "workload": asdict(workload),
                "assumptions": plan_report.assumptions(planners, plans),
                "plans": [
                    {
                        **asdict(plan),
                        "target_fits": plan.target_fits,
                        "better_batch": None if batch is None else asdict(batch),
                        "command": plan_report.start_command(
                            model, planner, plan, backend=backend, refused=refused
                        ),
                    }
                    for planner, plan, batch in zip(planners, plans, better, strict=True)
                ],
            }
        )
    elif is_one:
        plan_report.print_plan(
            model,
            planners[0],
            plans[0],
            target,
            better=better[0],
            backend=backend,
            refused=refused,
        )
    else:
        plan_report.print_sizes(model, planners, plans, target, better=better, refused=refused)
    served = any(p.best for p in plans)
    reached = target is None or any(p.target_fits for p in plans)
    needs_cache = not (is_one and plans[0].all_fit)
    if not (served and reached) or (refused is not None and needs_cache):
        raise typer.Exit(1)


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine: versions, GPU, link, page-locking, modes.

    Status 1: something keeps the runtime from serving here.
    """
    from prefetch_runtime import doctor as machine_doctor  # imports torch

    with err.status("looking at this machine"):
        machine = machine_doctor.examine()
    report = machine_doctor.diagnose(machine)
    if as_json:
        _print_json({**asdict(machine), **asdict(report)})
    else:
        plan_report.print_machine(machine, report)
    if report.problems:
        raise typer.Exit(1)


def _sizes(model: str, config: dict[str, Any], refused: str | None, *, as_json: bool) -> ModelSizes:
    """The model's sizes; where they are unknown, a refused model ends with its refusal."""
    try:
        return model_sizes(config)
    except ModelError:
        if refused is None:
            raise
    if as_json:
        _print_json({"model": {"name": model}, "refused": refused})
    else:
        plan_report.print_refusal(refused)
    raise typer.Exit(1)


def _check_context(asked: int | None, most: int | None) -> None:
    if asked is not None and most is not None and asked > most:
        raise ConfigError(
            f"--context {asked}: the model takes sequences of {most} tokens "
            "(max_position_embeddings, rope scaling counted), and vLLM refuses a longer "
            f"--max-model-len; give at most {most}, or a config.json with the rope scaling that "
            "you will serve with"
        )


def _staging_slots(asked: str) -> int | Literal["auto"]:
    if asked == "auto":
        return "auto"
    try:
        return int(asked)
    except ValueError:
        raise ConfigError(
            f"--staging-slots must be 'auto' or a whole number of experts, got {asked!r}"
        ) from None


def _mode(asked: str) -> Literal["full", "segmented", "eager"]:
    mode = AUTO_MODE if asked == "auto" else asked
    if mode == "full":
        return "full"
    if mode == "segmented":
        return "segmented"
    if mode == "eager":
        return "eager"
    raise ConfigError(f"--prefetch-mode must be one of auto, full, segmented, eager, got {asked!r}")


def _hit_rates(sizes: ModelSizes, batch: int, *, curve: str | None, trace: Path | None) -> HitRates:
    if trace is None:
        name = curve or matching_curve(sizes.model_type, sizes.num_experts, sizes.top_k)
        return create_hit_rates(name, num_experts=sizes.num_experts, top_k=sizes.top_k, batch=batch)
    if curve is not None:
        raise ConfigError("--curve and --trace both give the hit rates; leave one out")
    try:
        recorded = load_trace(trace, num_experts=sizes.num_experts)
        recorded.require_model(
            num_layers=sizes.num_moe_layers, num_experts=sizes.num_experts, top_k=sizes.top_k
        )
        return TraceHitRates(recorded, batch=batch)
    except (TraceError, OSError) as error:
        raise ConfigError(f"--trace: {error}") from None


def _gpus(gib: float | None, *, memory_gbs: float | None, link_gbs: float | None) -> list[Gpu]:
    """The GPU of a given size, or this machine's, measured, or one of each common size."""
    if gib is not None:
        return [typical_gpu(gib, memory_gbs=memory_gbs, link_gbs=link_gbs)]
    import torch

    if not torch.cuda.is_available():
        return [typical_gpu(card.gib, memory_gbs=memory_gbs, link_gbs=link_gbs) for card in CARDS]
    from prefetch_runtime import doctor as machine_doctor

    facts = machine_doctor.gpu_facts()
    if facts.link_gbs is None or facts.memory_gbs is None:
        raise ConfigError(
            f"this machine's GPU cannot be measured: {facts.failure}; give --gpu-gib to plan "
            "without it"
        )
    return [
        Gpu(
            name=facts.name,
            gib=facts.total_bytes / 2**30,
            memory_gbs=facts.memory_gbs if memory_gbs is None else memory_gbs,
            link_gbs=facts.link_gbs if link_gbs is None else link_gbs,
            memory_origin="measured, a copy within it" if memory_gbs is None else "given",
            link_origin="measured, page-locked" if link_gbs is None else "given",
        )
    ]


def _print_json(data: Mapping[str, Any]) -> None:
    """Print JSON with no more digits than an estimate deserves."""
    typer.echo(json.dumps(_rounded(data), indent=2, allow_nan=False))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value, 3)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
