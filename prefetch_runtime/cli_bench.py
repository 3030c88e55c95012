"""`prefetch-runtime bench`: its options, what it prints, its files and its exit status."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from prefetch_runtime.bench.config import QUICK, BenchConfig, Server, load_config_file
from prefetch_runtime.config import ConfigError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[Any]:
    """Numbers as such; what is none is left for the check, which words the error."""
    return [int(part) if part.isdecimal() and len(part) < 10 else part for part in _list(text)]


def bench(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="What to measure.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Does the harness run? tiny-moe, no real figures.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="A named shape, a folder, or a name on the hub.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Cut a named shape to so many layers.")
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="resident, uva, offloader, eager, full+next_gate..."),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N|%,...", help="Experts of each layer on the device.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,...", help="Sequences decoded together.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="model, calibrated, uniform, or a trace."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also measure the OpenAI-compatible server there."),
    ] = None,
    served: Annotated[
        str | None, typer.Option("--served-model", metavar="NAME", help="What it calls its model.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Rows, logs, JSON and plots go there.")
    ] = Path("prefetch-runtime-bench"),
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="End after so long; the same command goes on later."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure all anew, even what is in --out.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Try again what failed, keep what was measured.")
    ] = False,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="Keep rows that other code of ours measured, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time engines at equal expert memory: this cache, vLLM resident, its offloaders.

    Options take the place of the file's settings.
    Each case runs in a process of its own, with a time limit; what fails is a
    row that says why.
    Status 1: nothing was measured.
    """
    settings: dict[str, Any] = dict(QUICK) if quick else {}
    if config is not None:
        settings |= load_config_file(config)
    given = {
        "model": model,
        "layers": layers,
        "engines": None if engines is None else _list(engines),
        "slots": None if slots is None else _numbers(slots),
        "batches": None if batches is None else _numbers(batches),
        "routing": routing,
    }
    settings |= {name: value for name, value in given.items() if value is not None}
    if "model" not in settings and url is None and config is None:
        raise ConfigError(
            "say what to measure: a CONFIG.toml, --model NAME, or --quick to see that all works"
        )
    if url is not None:
        settings = _with_server(settings, url, served)
    if minutes is not None and not 0 < minutes < 1e5:
        raise ConfigError(f"--minutes must be positive, got {minutes:g}")
    checked = BenchConfig.from_mapping(settings)
    _run(
        checked,
        folder,
        as_json=as_json,
        minutes=minutes,
        fresh=fresh,
        retry=retry,
        any_code=any_code,
    )


def _with_server(settings: dict[str, Any], url: str, served: str | None) -> dict[str, Any]:
    """The settings with one more server; without an engine unless some are named."""
    model = served or settings.get("model")
    if model is None:
        raise ConfigError("--url needs --served-model, the name under which the server serves it")
    server = {"name": "server", "url": url, "model": model}
    try:
        Server.model_validate(server)
    except ValueError:
        raise ConfigError(f"--url must look like http://host:port, got {url[:200]!r}") from None
    engines = settings.get("engines", [])
    return {
        "model": model,
        **settings,
        "engines": engines,
        "servers": [*settings.get("servers", []), server],
    }


def _run(
    config: BenchConfig,
    folder: Path,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    # numpy and the report are not needed to say that an option is wrong.
    from prefetch_runtime.bench.child import end_all
    from prefetch_runtime.bench.interrupts import interrupts

    with interrupts.once(end_all):  # the report of an interrupted session is printed, too
        _measure(config, folder, as_json=as_json, **options)


def _measure(config: BenchConfig, folder: Path, *, as_json: bool, **options: Any) -> None:
    from prefetch_runtime.bench import environment, plots, report
    from prefetch_runtime.bench.session import Session

    with err.status("looking at this machine"):
        found = environment.look_around()

    def on_case(name: str) -> None:
        err.print(f"measuring {name}", markup=False)

    told: list[tuple[str, Any]] = []

    def on_row(row: dict[str, Any]) -> None:
        slots = "" if row["slots"] is None else f":{row['slots']}"
        name, batch = f"{row['engine']}{slots}", row["batch"]
        if row["status"] == "ok":
            err.print(f"  {name} batch {batch}: {row['step_ms']:.2f} ms a step", markup=False)
        elif (name, row["reason"]) not in told[-1:]:  # once, for all batches that follow
            err.print(f"  {name} from batch {batch}: {row['reason']}", markup=False)
        told.append((name, row.get("reason")))

    session = Session(
        config,
        found,
        folder,
        **options,
        on_case=on_case,
        on_row=on_row,
    )
    done = session.run()
    measured = any(row["status"] == "ok" for row in done.rows)
    try:
        drawn = plots.draw(report.as_json(done), folder) if measured else []
        done.files += [f"plot: {path}" for path in drawn]
    except ImportError:
        done.notes.append("no plots: matplotlib is not installed (pip install matplotlib)")
    except OSError as error:
        done.notes.append(f"no plots: {error}")
    failure = report.save_json(done, folder)
    if failure is None:
        done.files.append(f"all figures: {folder / report.RESULTS_FILE}")
    else:
        done.notes.append(failure)
    if as_json:
        typer.echo(json.dumps(report.as_json(done), indent=1))
    else:
        report.print_report(done, out)
    if done.interrupted:
        raise typer.Exit(130)
    if not measured or failure is not None or session.store.failure is not None:
        raise typer.Exit(1)
