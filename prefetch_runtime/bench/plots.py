"""PNG plots: step time against slots with its limit, and what a step consists of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefetch_runtime.bench.results import Row

STEPS_FILE, PARTS_FILE = "steps.png", "parts.png"


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots that the rows allow; nothing measured: none. Those of earlier results that
    the rows do not allow are removed.

    Args:
        results: as `report.as_json` makes it.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    steps, parts = folder / STEPS_FILE, folder / PARTS_FILE
    paths = []
    if rows:
        paths.append(_draw_steps(rows, results, steps))
    if any("compute_ms" in row for row in rows):
        paths.append(_draw_parts(rows, results, parts))
    for path in {steps, parts}.difference(paths):
        path.unlink(missing_ok=True)
    return paths


def _figure(columns: int, title: str) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(4.6 * columns, 4.2), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=9)
    return figure, list(axes[0])


def _title(results: Mapping[str, Any]) -> str:
    model, machine = results["model"], results["environment"].get("machine") or {}
    gpu = (machine.get("gpu") or {}).get("name", "CPU")
    layers = f", {model['layers']} layers" if "layers" in model else ""
    return f"{model['name']}{layers}, {gpu}"


def _shown_batches(rows: Sequence[Row]) -> list[int]:
    """The smallest, a middle one and the largest."""
    batches = sorted({row["batch"] for row in rows})
    return sorted({batches[0], batches[len(batches) // 2], batches[-1]})


def _draw_steps(rows: Sequence[Row], results: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    experts = results["model"].get("num_experts")
    batches = _shown_batches(rows)
    figure, axes = _figure(len(batches), f"Decode step by slots. {_title(results)}")
    for axis, batch in zip(axes, batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        for engine in dict.fromkeys(row["engine"] for row in here):
            mine = [row for row in here if row["engine"] == engine]
            if mine[0]["slots"] is None:
                axis.axhline(mine[0]["step_ms"], linestyle="--", linewidth=1, color="0.4")
                axis.annotate(engine, (0.02, mine[0]["step_ms"]), fontsize=7)
                continue
            mine.sort(key=lambda row: row["slots"])
            xs = [row["slots"] / experts for row in mine]
            (line,) = axis.plot(xs, [row["step_ms"] for row in mine], marker="o", label=engine)
            limits = [
                (x, row["limit_ms"])
                for x, row in zip(xs, mine, strict=True)
                if (engine.startswith("full") and "limit_ms" in row)
            ]
            if limits:
                axis.plot(
                    *zip(*limits, strict=True),
                    linestyle=":",
                    color=line.get_color(),
                    label=f"limit of {engine}: max(resident step, missed bytes / link)",
                )
        axis.set(xlabel="slots / experts", title=f"batch {batch}", xlim=(0, 1.03), yscale="log")
        axis.grid(visible=True, which="both", alpha=0.2)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=6)
    axes[0].set_ylabel("ms per decode step (median)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _draw_parts(rows: Sequence[Row], results: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    batches = _shown_batches(rows)
    figure, axes = _figure(len(batches), f"What a decode step consists of. {_title(results)}")
    for axis, batch in zip(axes, batches, strict=True):
        here = [r for r in rows if r["batch"] == batch and "overhead_ms" in r]
        labels = [f"{row['engine']}\n{row['slots']}" for row in here]
        bottom = [0.0] * len(here)
        for part, name in (
            ("compute_ms", "compute (resident step)"),
            ("stall_ms", "stall (waiting for experts)"),
            ("overhead_ms", "overhead (the rest)"),
        ):
            heights = [row[part] for row in here]
            axis.bar(labels, heights, bottom=bottom, label=name)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.set(title=f"batch {batch}")
        axis.tick_params(axis="x", labelsize=7, rotation=60)
        if here:
            axis.legend(fontsize=6)
    axes[0].set_ylabel("ms per decode step")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
