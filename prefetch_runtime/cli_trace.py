"""`prefetch-runtime trace` and `simulate`: record a model's routing, replay it without a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from predictors import LEARNED, PREDICTOR_NAMES
from prefetch_runtime.config import POLICIES, ConfigError, PrefetchConfig
from prefetch_runtime.early_refusals import check_output, refuse_on_cpu
from prefetch_runtime.model_check import check_model
from prefetch_runtime.offline import empty_log, generate
from prefetch_runtime.passed_on import check_prompts, overrides_model, passed_on
from prefetch_runtime.simulate import (
    SimulationResult,
    SimulationSettings,
    check_plot,
    learn,
    plot,
    simulate_grid,
    to_json,
)
from prefetch_runtime.trace import TraceError, load_trace

MAX_MIB = 1 << 20
MIN_GBS, MAX_GBS = 1e-3, 1e6
MAX_EXPERTS = 1 << 15  # ids of a trace are int16
SPELLED = {
    "num_slots": "--slots",
    "widen": "--widen",
    "compute_us": "--compute-us",
    "wide_steps": "--wide-steps",
}
"""Settings of the simulator by the options of `simulate`, for messages."""

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def trace(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder or a name on the hub.")],
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue; may be repeated."),
    ],
    output: Annotated[Path, typer.Option("--out", help="The .npz file to write.")],
    slots: Annotated[
        int,
        typer.Option(
            "--moe-expert-cache-size",
            min=1,
            metavar="N",
            help="Slots per layer while recording.",
        ),
    ],
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate per prompt.")
    ] = 128,
    max_trace_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Record at most so many; ends at the first step without room."
        ),
    ] = 65536,
    no_next_gate: Annotated[
        bool, typer.Option("--no-next-gate", help="Leave out the next routers' guesses.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest sequence.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--prefetch-mode", help="eager, or inside CUDA graphs: full, segmented.")
    ] = "eager",
    log: Annotated[Path, typer.Option(help="Where the engine's output goes.")] = Path(
        "prefetch-runtime-trace.log"
    ),
) -> None:
    """Record which experts a model routes to."""
    settings: dict[str, Any] = {"slots_per_layer": slots, "mode": mode}
    if mode in ("full", "segmented"):
        settings["trace_tokens"] = max_trace_tokens
    elif mode != "eager":
        raise ConfigError(
            f"--prefetch-mode must be eager, full or segmented to record a trace, got {mode!r}"
        )
    options: dict[str, Any] = {"enforce_eager": mode == "eager"}
    if max_model_len is not None:
        options["max_model_len"] = max_model_len
    check_prompts(prompt)
    check_output(output, "--out")
    config = PrefetchConfig.from_mapping(settings)
    refuse_on_cpu(config, is_eager=mode == "eager", modes="use 'eager'")
    more = passed_on(context, instead_of_eager="--prefetch-mode says it, eager is the default")
    check_model(model, config, as_declared=not overrides_model(more))
    empty_log(log)
    with err.status("generating"):
        result = generate(
            model,
            prompt,
            settings=settings,
            log=log,
            max_tokens=max_tokens,
            ignore_eos=True,
            engine_options=options,
            passed_on=more,
            before=[["prefetch_trace_start", max_trace_tokens, not no_next_gate]],
            after=[["prefetch_trace_save", str(output.absolute())]],
        )
    held = result.rpc["prefetch_trace_save"]
    out.print(
        f"{output}: {held['tokens']} tokens in {held['steps']} steps, {held['layers']} layers"
        + (
            f"; full (--max-trace-tokens): the {held['dropped']} tokens of the last "
            f"{held['dropped_steps']} steps are left out"
            if held["dropped"]
            else ""
        )
    )


def simulate(
    trace_file: Annotated[Path, typer.Option("--trace", help="A recorded trace (.npz).")],
    slots: Annotated[str, typer.Option(help="Slots per layer, comma separated.")] = "8,16",
    policy: Annotated[
        str, typer.Option(help=f"{', '.join(POLICIES)} or belady, comma separated.")
    ] = "lru",
    predictor: Annotated[
        str,
        typer.Option(help=f"{', '.join(PREDICTOR_NAMES)}; comma separated."),
    ] = "none",
    predictor_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"What a predictor has learned before ({', '.join(LEARNED)})."
        ),
    ] = None,
    save_table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what one has learned from the trace."),
    ] = None,
    link_gbs: Annotated[float, typer.Option(help="Link in 1e9 bytes/s.")] = 50.0,
    expert_mib: Annotated[float, typer.Option(help="MiB of one expert.")] = 9.0,
    compute_us: Annotated[float, typer.Option(help="Microseconds of a layer without stall.")] = 85,
    budget_mib: Annotated[
        float | None, typer.Option(help="MiB of speculation per layer and step.")
    ] = None,
    wide_steps: Annotated[
        str,
        typer.Option(help="Steps wider than the slots: by expert as GPUs, or by token as CPUs."),
    ] = "expert",
    widen: Annotated[int, typer.Option(help="Experts predicted, as a multiple of top_k.")] = 2,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Regroup the trace into steps of so many sequences.")
    ] = None,
    num_experts: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_EXPERTS, help="Experts per layer, if the trace does not say."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit rate and stall into an image.")
    ] = None,
) -> None:
    """Replay a trace through the cache's own slots, policies and predictors, on a modelled link."""
    if not MIN_GBS <= link_gbs <= MAX_GBS:
        raise ConfigError(f"--link-gbs must be between {MIN_GBS} and {MAX_GBS}, got {link_gbs}")
    try:
        recorded = load_trace(trace_file, num_experts=num_experts)
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {trace_file}: {error.strerror}") from None
    if plot_file is not None:
        _check_plot(plot_file)
    learning = [name for name in _names(predictor) if name in LEARNED]
    if save_table is not None:
        if len(learning) != 1:
            raise ConfigError(
                "--save-table writes what one predictor has learned; name one of "
                f"{', '.join(LEARNED)} in --predictor"
            )
        check_output(save_table, "--save-table")
    if batch is not None:
        recorded = recorded.batched(batch)
    try:
        settings = SimulationSettings(
            num_slots=recorded.top_k,
            link_gbs=link_gbs,
            expert_bytes=_bytes("--expert-mib", expert_mib, least=1),
            compute_us=compute_us,
            wide_steps=cast(Literal["expert", "token"], wide_steps),
            widen=widen,
            predictor_table=predictor_table,
            budget_bytes=None if budget_mib is None else _bytes("--budget-mib", budget_mib),
        )
        results = simulate_grid(
            recorded,
            settings,
            num_slots=_integers("--slots", slots),
            policies=_names(policy),
            predictors=_names(predictor),
        )
    except TraceError:
        raise
    except ValueError as error:
        raise ConfigError(_spelled(str(error))) from None
    except OSError as error:
        raise ConfigError(
            f"--predictor-table: cannot read {error.filename}: {error.strerror}"
        ) from None
    if save_table is not None:
        learn(recorded, replace(settings, predictor=learning[0])).save(save_table)
    if plot_file is not None:
        try:
            plot(results, plot_file)
        except OSError as error:
            raise ConfigError(f"--plot: cannot draw into {plot_file}: {error}") from None
    if as_json:
        typer.echo(json.dumps(json.loads(to_json(results))))
        return
    out.print(_table(results))
    out.print(
        "hits: demanded experts that were in slots; Belady: with the best eviction, without "
        "prediction; recall: of those that had to come, predicted; stall: us a step. useful, late, "
        "wasted: MiB of speculation a step; late ones were under way when they were demanded, "
        "which shortens the stall, too"
    )
    out.print(_assumptions(settings), markup=False)
    for name, file in (("table", save_table), ("plot", plot_file)):
        if file is not None:
            out.print(f"{name}: {file}", markup=False, soft_wrap=True)


def _check_plot(path: Path) -> None:
    """Before minutes of replaying: whether the plot can be drawn."""
    try:
        check_plot(path)
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install matplotlib") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--plot: cannot draw into {path}: {why}") from None


def _spelled(message: str) -> str:
    """A message about a setting that starts with its name, with the option's name instead."""
    name = re.match(r"\w*", message)
    return message if name is None else SPELLED.get(name[0], name[0]) + message[name.end() :]


def _bytes(option: str, mebibytes: float, *, least: int = 0) -> int:
    """Bytes of a size in MiB, up to a tebibyte."""
    if not 0 <= mebibytes <= MAX_MIB:
        raise ConfigError(f"{option} must be between 0 and {MAX_MIB} MiB, got {mebibytes}")
    nbytes = int(mebibytes * 2**20)
    if nbytes < least:
        raise ConfigError(f"{option} must be at least a byte, got {mebibytes} MiB")
    return nbytes


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers such as 8,16, got {text!r}") from None


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _assumptions(settings: SimulationSettings) -> str:
    """What the stall rests on, and the options that change it."""
    copy_us = settings.expert_bytes / (settings.link_gbs * 1e3)
    budget = settings.budget_bytes
    speculation = "what the link carries meanwhile" if budget is None else _mib(budget)
    return (
        f"assumed: experts of {_mib(settings.expert_bytes)} (--expert-mib), a link of "
        f"{settings.link_gbs:g} GB/s (--link-gbs), so {copy_us:.0f} us a copy; "
        f"{settings.compute_us:g} us of compute a layer (--compute-us); speculation per layer: "
        f"{speculation} (--budget-mib). No time of the host: modes segmented and eager wait for it "
        "at each layer, which comes on top"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"


def _table(results: list[SimulationResult]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0)
    for column in ("slots", "policy", "predictor"):
        table.add_column(column)
    for column in ("hits", "Belady", "recall", "stall", "useful", "late", "wasted"):
        table.add_column(column, justify="right")
    for result in results:
        bound, recall = result.belady_hit_rate, result.recall_among_misses
        table.add_row(
            str(result.settings.num_slots),
            result.settings.policy,
            result.settings.predictor,
            f"{result.hit_rate:.1%}",
            "" if bound is None else f"{bound:.1%}",
            "-" if recall is None else f"{recall:.0%}",
            f"{result.stall_us_per_step:.0f}",
            *(
                f"{nbytes / 2**20 / result.num_steps:.2f}"
                for nbytes in (result.useful_bytes, result.late_bytes, result.wasted_bytes)
            ),
        )
    return table
