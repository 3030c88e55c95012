"""The `prefetch-runtime` command."""

import errno
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from predictors import LEARNED
from prefetch_runtime import __version__, cli_bench, cli_plan, cli_trace
from prefetch_runtime.config import (
    ADDITIONAL_CONFIG_KEY,
    POLICIES,
    PREDICTORS,
    ConfigError,
    PrefetchConfig,
    spelled,
)
from prefetch_runtime.demo import run_demo
from prefetch_runtime.early_refusals import (
    refuse_misspelt,
    refuse_on_cpu,
    refuse_options,
    refuse_other_names,
    refuse_tables,
    refuse_taken_port,
)
from prefetch_runtime.model_check import check_model
from prefetch_runtime.model_shape import ModelError
from prefetch_runtime.offline import WORKER_CLS, GenerationError, empty_log, generate
from prefetch_runtime.passed_on import (
    CONTEXT,
    EPILOG,
    PassesOn,
    check_prompts,
    option_name,
    overrides_model,
    quantises,
)
from prefetch_runtime.passed_on import passed_on as passed_on_to_vllm
from prefetch_runtime.refusals import CPU_COMPILES
from prefetch_runtime.serve_file import ServeFile, read_serve_file
from prefetch_runtime.stats import RuntimeStats
from prefetch_runtime.trace import TraceError

app = typer.Typer(
    name="prefetch-runtime",
    help="Serve MoE models whose experts do not fit on the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class TakesOurs(TyperCommand):
    """A command that takes no options of vLLM's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_other_names(args, [name for param in self.params for name in param.opts])
        return super().parse_args(ctx, args)


def _with_default(meaning: str, key: str) -> str:
    """The help of an option that sets `key`; not given, the option leaves the setting alone."""
    return f"{meaning} Default: {PrefetchConfig.model_fields[key].default}."


Slots = Annotated[
    str | None,
    typer.Option(
        "--moe-expert-cache-size",
        metavar="N|auto",
        help=_with_default(
            "Experts of each MoE layer kept on the device; 0 switches the cache off.",
            "slots_per_layer",
        ),
    ),
]
CacheGib = Annotated[
    float | None,
    typer.Option("--moe-expert-cache-gib", help="The same as a total over all layers, in GiB."),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--prefetch-mode", help=_with_default("auto, full, segmented or eager.", "mode")),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--eviction-policy",
        help=_with_default(f"Which slot a newcomer takes: {', '.join(POLICIES)}.", "policy"),
    ),
]
PredictorOption = Annotated[
    str | None,
    typer.Option(
        "--predictor",
        help=_with_default(
            f"Guesses the next layer's experts: {', '.join(PREDICTORS)}.", "predictor"
        ),
    ),
]
WidenOption = Annotated[
    int | None,
    typer.Option(
        "--predictor-widen",
        help=_with_default(
            "Experts a prediction names, as a multiple of top_k.", "predictor_widen"
        ),
    ),
]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--predictor-table",
        metavar="FILE",
        help=f"What the predictor has learned before ({', '.join(LEARNED)}).",
    ),
]
SaveTableOption = Annotated[
    str | None,
    typer.Option(
        "--save-table",
        metavar="FILE",
        help="Where what it has learned is written, every 10 s and when the engine ends.",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--prefetch-budget-mib",
        help=_with_default(
            "MiB of speculation per layer and step, or auto.", "prefetch_budget_mib"
        ),
    ),
]
StagingOption = Annotated[
    str | None,
    typer.Option(
        "--staging-slots",
        help=_with_default(
            "Experts in the ring through which prompts stream, or auto.", "staging_slots"
        ),
    ),
]
MetricsOption = Annotated[
    bool | None,
    typer.Option(
        "--expert-cache-metrics", help="Publish the counters for Prometheus. Default: off."
    ),
]


def _settings(**given: Any) -> dict[str, Any]:
    """The options that were given, checked, under their names in `--additional-config`."""
    settings = {key: value for key, value in given.items() if value is not None}
    for key in ("slots_per_layer", "staging_slots"):
        # Left as text where it is no number: the message of the check names what was given.
        if key in settings:
            with suppress(ValueError):
                settings[key] = int(settings[key])
    if "prefetch_budget_mib" in settings:
        with suppress(ValueError):
            settings["prefetch_budget_mib"] = float(settings["prefetch_budget_mib"])
    PrefetchConfig.from_mapping(settings)
    return settings


@app.command(
    context_settings=CONTEXT,
    epilog="Every other option is passed on to `vllm serve`.",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder or a name on the hub.")],
    slots: Slots = None,
    cache_gib: CacheGib = None,
    mode: ModeOption = None,
    policy: PolicyOption = None,
    predictor: PredictorOption = None,
    predictor_widen: WidenOption = None,
    predictor_table: TableOption = None,
    save_table: SaveTableOption = None,
    prefetch_budget_mib: BudgetOption = None,
    staging_slots: StagingOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Start `vllm serve` with the expert cache."""
    passed_on = list(context.args)
    in_front = model.startswith("-")
    if in_front:  # an option: the model may be in vLLM's own file
        passed_on.insert(0, model)
    refuse_misspelt(passed_on)
    file = _read_config_file(passed_on)
    if in_front:
        if file is None or file.model is None:
            raise ConfigError(
                "give the model first: prefetch-runtime serve MODEL [options]; "
                f"{model!r} is no model"
            )
        model = file.model
    given = _settings(
        slots_per_layer=slots,
        expert_cache_gib=cache_gib,
        mode=mode,
        policy=policy,
        predictor=predictor,
        predictor_widen=predictor_widen,
        predictor_table=predictor_table,
        save_table=save_table,
        prefetch_budget_mib=prefetch_budget_mib,
        staging_slots=staging_slots,
        metrics=metrics,
    )
    additional = _take_additional_config(passed_on)
    PrefetchConfig.from_additional_config(additional)
    settings = {**(additional.get(ADDITIONAL_CONFIG_KEY) or {}), **given}
    if file is not None:
        PrefetchConfig.from_additional_config(file.additional_config)
        settings = {**(file.additional_config.get(ADDITIONAL_CONFIG_KEY) or {}), **settings}
        additional = {**file.additional_config, **additional}
    config = PrefetchConfig.from_mapping(settings)
    of_file = [] if file is None else [f"--{option}" for option in file.options]
    num_experts = _check_model(model, config, [*passed_on, *of_file])
    _refuse_idle(given, settings, config)
    refuse_tables(config, num_experts)
    _say_if_off(config, slots)
    # -P: what lies in the user's folder, such as a graphs.py, is not imported in our place.
    command = [sys.executable, "-P", "-m", "prefetch_runtime.vllm.serve"]
    if config.enabled and config.metrics:
        command.append("--metrics")
    command += ["serve", model]
    if config.enabled and config.save_table is not None and "--shutdown-timeout" not in of_file:
        # By itself vLLM kills its engine at once. What is passed on comes later, and wins.
        command += ["--shutdown-timeout", str(SAVE_S)]
    command += passed_on
    if config.enabled:
        if any(option_name(argument) == "--worker-cls" for argument in passed_on):
            raise ConfigError(
                "the expert cache sets --worker-cls itself; leave it out, or "
                f"{spelled('slots_per_layer')}"
            )
        if file is not None and file.worker_cls not in (None, WORKER_CLS):
            raise ConfigError(
                f"the expert cache sets --worker-cls itself, but {file.path} has another; leave it "
                f"out there, or {spelled('slots_per_layer')}"
            )
        refuse_options(passed_on)
        eager = any(a.replace("_", "-").startswith("--enforce-e") for a in passed_on)
        refuse_on_cpu(config, is_eager=eager or file is not None)  # the file may say it, too
        refuse_taken_port(passed_on)
        command += ["--worker-cls", WORKER_CLS]
    if config.enabled or ADDITIONAL_CONFIG_KEY in additional:
        additional[ADDITIONAL_CONFIG_KEY] = settings
    if additional:
        command += ["--additional-config", json.dumps(additional)]
    # vLLM takes this process over, so that signals and the exit status are its own.
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _check_model(model: str, config: PrefetchConfig, for_vllm: Sequence[str]) -> int | None:
    """`check_model`, as far as the options for vLLM leave the model what its folder says."""
    return check_model(
        model,
        config,
        as_declared=not overrides_model(for_vllm),
        as_stored=not quantises(for_vllm),
    )


SAVE_S = 5
"""Seconds that vLLM gives its engine to end by itself where what was learned is to be written."""
_OF_A_PREDICTOR = (
    "predictor_widen",
    "predictor_table",
    "save_table",
    "prefetch_budget_mib",
)


def _refuse_idle(
    given: Mapping[str, Any], settings: Mapping[str, Any], config: PrefetchConfig
) -> None:
    """Raise ConfigError for a given option that would do nothing, other settings being as they are.

    A size of 0 switches off what else is given, and so does `--predictor none`.
    """
    if given and not config.enabled and "slots_per_layer" not in given:
        raise ConfigError(
            f"the expert cache is off, so {spelled(next(iter(given)))} would do nothing; add "
            f"{spelled('slots_per_layer')}"
        )
    for key in _OF_A_PREDICTOR:
        if config.enabled and key in given and "predictor" not in settings:
            raise ConfigError(
                f"nothing is predicted, so {spelled(key)} would do nothing; add "
                f"{spelled('predictor')}"
            )


def _say_if_off(config: PrefetchConfig, slots: str | None) -> None:
    if not config.enabled and slots is None:
        err.print(f"expert cache off, vLLM alone; on with {spelled('slots_per_layer')}")


def _read_config_file(arguments: list[str]) -> ServeFile | None:
    """What vLLM's own `--config FILE` in the arguments says, if it is there.

    It is put as vLLM looks for it, which overlooks `--config=FILE`.
    """
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            arguments[index : index + 1] = ["--config", argument.partition("=")[2]]
            break
    if arguments.count("--config") + sum(a.startswith("--config=") for a in arguments) > 1:
        raise ConfigError("--config is given twice; vLLM reads one file")
    if "--config" not in arguments:
        return None
    index = arguments.index("--config") + 1
    if index == len(arguments):
        raise ConfigError("--config needs a file after it")
    return read_serve_file(arguments[index])


def _take_additional_config(arguments: list[str]) -> dict[str, Any]:
    """Remove the user's own `--additional-config` from the arguments and return it."""
    names = [option_name(argument) for argument in arguments]
    if any(name.startswith("--additional-config.") for name in names):
        raise ConfigError("give --additional-config as one JSON object, not key by key")
    if names.count("--additional-config") > 1:
        raise ConfigError("--additional-config is given twice; put all keys in one JSON object")
    if "--additional-config" not in names:
        return {}
    index = names.index("--additional-config")
    _, equals, value = arguments.pop(index).partition("=")
    if not equals:
        if index == len(arguments):
            raise ConfigError("--additional-config needs a JSON object after it")
        value = arguments.pop(index)
    try:
        additional = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--additional-config is not valid JSON: {error}") from None
    if not isinstance(additional, dict):
        raise ConfigError("--additional-config must be a JSON object")
    return additional


@app.command("generate", cls=PassesOn, context_settings=CONTEXT, epilog=EPILOG)
def generate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder or a name on the hub.")],
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue; may be repeated."),
    ],
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate per prompt.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token.")
    ] = 0.0,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest sequence.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile and capture CUDA graphs (not on CPU).")
    ] = False,
    log: Annotated[Path, typer.Option(help="Where the engine's output goes.")] = Path(
        "prefetch-runtime-generate.log"
    ),
    slots: Slots = None,
    cache_gib: CacheGib = None,
    mode: ModeOption = None,
    policy: PolicyOption = None,
    predictor: PredictorOption = None,
    predictor_widen: WidenOption = None,
    predictor_table: TableOption = None,
    save_table: SaveTableOption = None,
    prefetch_budget_mib: BudgetOption = None,
    staging_slots: StagingOption = None,
) -> None:
    """Generate from prompts, then print the cache's counters."""
    settings = _settings(
        slots_per_layer=slots,
        expert_cache_gib=cache_gib,
        mode=mode,
        policy=policy,
        predictor=predictor,
        predictor_widen=predictor_widen,
        predictor_table=predictor_table,
        save_table=save_table,
        prefetch_budget_mib=prefetch_budget_mib,
        staging_slots=staging_slots,
    )
    check_prompts(prompt)
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature must be 0 or more, got {temperature}")
    config = PrefetchConfig.from_mapping(settings)
    _refuse_idle(settings, settings, config)
    if config.enabled:
        refuse_on_cpu(
            config, is_eager=not compiled, compiled=f"{CPU_COMPILES}; leave out --compile"
        )
    more = passed_on_to_vllm(
        context,
        instead_of_eager="it is the default; --compile undoes it",
        is_cached=config.enabled,
    )
    refuse_tables(config, _check_model(model, config, more))
    options: dict[str, Any] = {"enforce_eager": not compiled}
    if max_model_len is not None:
        options["max_model_len"] = max_model_len
    _say_if_off(config, slots)
    empty_log(log)
    with err.status("starting vLLM"):
        result = generate(
            model,
            prompt,
            settings=settings if config.enabled else None,
            log=log,
            max_tokens=max_tokens,
            temperature=temperature,
            engine_options=options,
            passed_on=more,
            after=(
                [["prefetch_save_table", config.save_table]]
                if config.save_table is not None
                else []
            ),
        )
    _print_texts(prompt, result.texts)
    if result.stats is not None:
        _print_counters(result.stats, config.predictor)
    if config.save_table is not None:
        out.print(f"table: {config.save_table}", markup=False, soft_wrap=True)


@app.command(cls=TakesOurs)
def demo(
    model: Annotated[str, typer.Option(help="The model to run.")] = "models/tiny-moe",
    slots: Annotated[
        int, typer.Option(min=1, metavar="N", help="Slots per layer of the cached run.")
    ] = 8,
    predictor: Annotated[
        str, typer.Option("--predictor", help="Guesses the next layer's experts; none: nothing.")
    ] = "next_gate",
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per prompt.")] = 64,
    log: Annotated[Path, typer.Option(help="Where the engines' output goes.")] = Path(
        "prefetch-runtime-demo.log"
    ),
) -> None:
    """Generate from the cache, then with every expert resident, and compare the tokens."""
    check_model(
        model, PrefetchConfig.from_mapping({"slots_per_layer": slots, "predictor": predictor})
    )
    with err.status("starting vLLM") as status:
        err.print(f"engine log: {log}", markup=False, soft_wrap=True)

        def stage(what: str) -> None:
            status.update(f"generating {what}")
            err.print(f"generating {what}")

        result = run_demo(
            model,
            slots=slots,
            predictor=predictor,
            max_tokens=max_tokens,
            log=log,
            on_stage=stage,
        )
    _print_texts(result.prompts, result.cached.texts)
    if result.cached.stats is not None:
        _print_counters(result.cached.stats, predictor)
    out.print(result.verdict)
    if not result.identical:
        raise typer.Exit(1)


def _print_texts(prompts: Sequence[str], texts: Sequence[str]) -> None:
    for prompt, text in zip(prompts, texts, strict=True):
        # On a terminal the styles say where the prompt ends; a file gets the text alone.
        out.print(prompt, style="dim", markup=False, end="")
        out.print(text, style="bold", markup=False)
        out.print()


def _print_counters(stats: RuntimeStats, predictor: str) -> None:
    # As lines of their own: a table breaks its title and caption to its own width.
    out.print(
        f"expert cache: mode {stats.mode}, policy {stats.policy}, "
        f"slots {stats.slot_bytes / 2**20:.1f} MiB, host {stats.host_bytes / 2**20:.1f} MiB",
        style="italic",
    )
    out.print(stats_table(stats))
    if stats.mode_reason:
        out.print(f"mode {stats.mode}: {stats.mode_reason}", markup=False, style="dim italic")
    guesses = (
        f"late: demanded while their prefetch was under way; guess: prefetched by {predictor}; "
        "used: of the guesses, demanded in time; drop: of the guesses, given up unused; "
    )
    out.print(
        "hit %: demanded experts that were there; "
        + (guesses if stats.total("prefetched") else "")
        + "waves: parts in which steps were computed, more than one a step where its experts do "
        "not fit the slots; MiB: copied; stall: waited for experts"
    )
    if predictor != "none" and not stats.total("prefetched"):
        out.print(
            f"nothing was prefetched by {predictor}: steps whose experts might not fit the slots "
            "get no predictions, nor do layers where they do not pay"
        )


def stats_table(stats: RuntimeStats) -> Table:
    """The counters as a table, a row per MoE layer and one for all."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    counters = ["hits", "misses", "evictions", "waves"]
    if stats.total("prefetched"):
        counters[2:2] = ["late", "prefetched", "prefetch_used", "prefetch_dropped"]
    short = {
        "misses": "miss",
        "evictions": "evict",
        "prefetched": "guess",
        "prefetch_used": "used",
        "prefetch_dropped": "drop",
    }
    names = (short.get(counter, counter) for counter in counters)
    for column in ("layer", "slots", "hit %", *names, "MiB", "stall"):
        table.add_column(column, justify="right")

    def copied(nbytes: int) -> str:
        mebibytes = nbytes / 2**20
        return f"{mebibytes:.1f}" if mebibytes < 1000 else f"{mebibytes:.0f}"

    def waited(seconds: float) -> str:
        return f"{seconds * 1e3:.1f}ms" if seconds < 0.1 else f"{seconds:.2f}s"

    for layer in stats.layers:
        table.add_row(
            str(layer.layer_idx),
            f"{layer.num_slots}/{layer.num_experts}",
            f"{100 * layer.hit_rate:.1f}",
            *(str(getattr(layer, counter)) for counter in counters),
            copied(layer.bytes_copied + layer.bytes_prefetched),
            waited(layer.stall_seconds),
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{100 * stats.hit_rate:.1f}",
        *(str(stats.total(counter)) for counter in counters),
        copied(stats.total("bytes_copied") + stats.total("bytes_prefetched")),
        waited(stats.stall_seconds),
    )
    return table


def _version(show: bool) -> None:
    if show:
        out.print(f"prefetch-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve MoE models whose experts do not fit on the GPU."""


app.command(cls=PassesOn, context_settings=CONTEXT, epilog=EPILOG)(cli_trace.trace)
app.command(cls=TakesOurs)(cli_trace.simulate)
app.command(cls=TakesOurs)(cli_bench.bench)
app.command(cls=TakesOurs)(cli_plan.plan)
app.command(cls=TakesOurs)(cli_plan.doctor)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _terminated(number: int, frame: object) -> NoReturn:  # noqa: ARG001 (signal's arguments)
    sys.exit(128 + number)


def main() -> None:
    """Run the command; what the user can mend ends in one line and exit status 2 (1: engine, or an
    output that cannot be written)."""
    # An engine that a command has started must not outlive it, nor a closed terminal.
    for ends in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) is not signal.SIG_IGN:  # as under nohup
            signal.signal(ends, _terminated)
    try:
        try:
            app()
        finally:
            with suppress(AttributeError):  # None where it was closed
                sys.stdout.flush()
    except (ConfigError, ModelError, TraceError) as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except GenerationError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        where = f" {error.filename}" if error.filename else ""
        err.print(f"error: cannot write{where}: {error.strerror}", markup=False, soft_wrap=True)
        os._exit(1)  # what standard output still holds would fail again, in a traceback
