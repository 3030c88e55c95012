"""Every format and family against vLLM without the cache: layer outputs and tokens, bit for bit.

    python -m tests.engine.formats                        all that this machine can run
    python -m tests.engine.formats --cases 'qwen3-fp8*' --modes eager --budget 150 --out eager.json
    python -m tests.engine.formats --join eager.json full.json --markdown

A case is a small checkpoint of random weights (`tests/helpers/checkpoints.py`). A process takes
several cases: vLLM alone with all of them first, before any of our code is loaded, then the cache
in each mode with each number of slots. When the budget ends, what has run is reported, the rest is
`not run`. A cell is `equal`, `refused` with the reason, or says what differed.
"""

import argparse
import fnmatch
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.reference import differences
from prefetch_runtime.stats import RuntimeStats
from tests.engine.gpu_runs import Plan, batch, engine, run_plan
from tests.helpers import checkpoints as writing
from tests.helpers.checkpoints import FAMILIES, FORMATS, VOCAB, Family, cases, write

MODES = ("eager", "full", "segmented")
REFERENCE = {"eager": "eager", "full": "graphs", "segmented": "graphs"}
"""What vLLM alone runs with, for each mode."""

SLOTS = ("top_k", "half", "all")
SIZES = [1, 2, 4]
GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": SIZES,
    }
}
V2_FAMILIES = ("qwen2", "deepseek", "deepseek-v3")
"""Families that vLLM 0.26 runs with its V2 runner."""

TOKENS = 24 if torch.cuda.is_available() else 6
# Fewer than 1,024 assignments a step: vLLM sorts those in one order, larger steps in another each
# time, and Marlin's bits follow the order.
MOST_TOKENS = 240


def _run(name: str, lengths: Sequence[int], max_tokens: int, *, seed: int) -> dict[str, Any]:
    """A sampled run, since a model of random weights left to itself repeats a few tokens; greedy
    where vLLM has no generators with a seed."""
    temperature = 1.0 if torch.cuda.is_available() else 0.0
    run = batch(name, lengths, max_tokens, seed=seed, temperature=temperature)
    return {**run, "prompts": [[token % VOCAB for token in one] for one in run["prompts"]]}


RUNS = [
    _run("one", [5], TOKENS, seed=1),
    _run("long", [400], 4, seed=2),
    _run("four", [5, 37, 60, 100], TOKENS, seed=10),
    _run("three", [5, 37, 60], TOKENS, seed=31),  # a row of padding in a graph of 4
]
FOLDER_VARIABLE = "PREFETCH_RUNTIME_TEST_CHECKPOINTS"
"""Environment variable: where the checkpoints are kept; by default under the system's temporary
folder."""


class Case(NamedTuple):
    """A family in a format."""

    family: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.format}"

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]

    def slots(self, which: str) -> int:
        """Slots per layer: `top_k`, `half` of the experts, or `all`."""
        experts = self.of.num_experts
        return {"top_k": self.of.top_k, "half": experts // 2, "all": experts}[which]

    def widest(self, slots: int, mode: str) -> int:
        """Most tokens of a batch that the mode replays with so many slots."""
        if mode == "full":
            return SIZES[-1]  # what may not fit runs in waves inside the graph
        fitting = [size for size in SIZES if size * self.of.top_k <= slots]
        return SIZES[-1] if slots == self.of.num_experts else max(fitting)


class Cell(NamedTuple):
    """What one engine with the cache did."""

    case: str
    mode: str
    slots: str
    outcome: str
    """equal, refused, differs, unsteady (vLLM alone differs from itself), error or not run."""
    detail: str
    expert_bytes: int = 0


def checkpoints() -> Path:
    """The folder that checkpoints are kept in; another one when what writes them has changed."""
    default = Path(tempfile.gettempdir()) / "prefetch-runtime-checkpoints"
    writer = zlib.crc32(Path(writing.__file__).read_bytes())
    return Path(os.environ.get(FOLDER_VARIABLE, default)) / f"{writer:08x}"


def kinds_of(model: Path, backend: str | None) -> dict[str, dict[str, Any]]:
    """vLLM's arguments for a checkpoint, by the values of `REFERENCE`. `backend`: of the experts'
    kernel; None: what vLLM picks."""
    common: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": MOST_TOKENS,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
    }
    if backend is not None:
        common["moe_backend"] = backend
    return {"eager": {**common, "enforce_eager": True}, "graphs": {**common, **GRAPHS}}


def plan_of(case: Case, modes: Sequence[str], slots: Sequence[str], model: Path) -> Plan:
    """The engines of one case, vLLM alone first."""
    on_gpu = torch.cuda.is_available()
    kinds = kinds_of(model, FORMATS[case.format].backend if on_gpu else None)
    held = {"holds_graphs": True} if case.family in V2_FAMILIES else {}
    engines = []
    for kind in sorted({REFERENCE[mode] for mode in modes}):
        widest = sorted({case.widest(case.slots(which), mode) for which in slots for mode in modes})
        more = {"widest": widest, **held} if kind == "graphs" else {}
        engines.append(engine(f"{kind}/alone", RUNS, llm=kinds[kind], limit_s=240, **more))
        again = {"widest": widest[-1:], **held} if kind == "graphs" else {}
        if on_gpu:
            engines.append(engine(f"{kind}/again", RUNS, llm=kinds[kind], **again))
    for mode in modes:
        engines.extend(
            engine(
                f"{mode}/{which}",
                RUNS,
                {"slots_per_layer": case.slots(which), "mode": mode},
                llm=kinds[REFERENCE[mode]],
                **(held if REFERENCE[mode] == "graphs" else {}),
            )
            for which in slots
        )
    return Plan(case.name, engines, steps=max(run["max_tokens"] for run in RUNS) + 64)


def cells_of(
    case: Case, modes: Sequence[str], slots: Sequence[str], records: Mapping[str, Any]
) -> list[Cell]:
    """The cells of a case, from what its engines recorded."""
    return [
        Cell(case.name, mode, which, *_outcome(case, mode, which, records))
        for mode in modes
        for which in slots
    ]


def _outcome(case: Case, mode: str, which: str, records: Mapping[str, Any]) -> tuple[str, str, int]:
    kind = REFERENCE[mode]
    alone = records[f"{kind}/alone"]
    again = records.get(f"{kind}/again", alone)
    ours = records[f"{mode}/{which}"]
    if "error" in alone:
        return "not run", f"vLLM alone: {_last_line(alone['error'])}", 0
    if "error" in ours:
        message = _last_line(ours["error"])
        refusal = re.search(r"(?:UnsupportedError|ConfigError): (.*)", ours["error"])
        if refusal:
            return "refused", refusal[1], 0
        return ("not run" if "not run:" in message else "error"), message, 0
    if alone["loaded"]:
        return "error", f"the reference had loaded {alone['loaded']}", 0
    widest = case.widest(case.slots(which), mode) if kind == "graphs" else None
    expected = _runs(alone, widest)
    if "error" not in again:
        compared = _widest_of(again) if kind == "graphs" else None
        steady = differences(_runs(again, compared), _runs(alone, compared))
        if steady:
            return "unsteady", f"vLLM alone, twice: {steady[0]}", 0
    found = differences(ours["runs"], expected)
    wrong = [line for run in ours["runs"].values() for line in run["audit"]]
    stats = RuntimeStats.from_dict(ours["runs"]["four"]["stats"])
    layer = stats.layers[0]
    size = stats.slot_bytes // (len(stats.layers) * layer.num_slots)
    if found or wrong:
        return (
            "differs",
            f"{len(found)} differences, {len(wrong)} wrong slots: " + (found + wrong)[0],
            size,
        )
    if len(stats.layers) != case.of.moe_layers or layer.num_slots != case.slots(which):
        return "error", f"{len(stats.layers)} layers of {layer.num_slots} slots", size
    if which != "all" and not (stats.total("misses") and stats.total("waves")):
        return "error", "nothing was missed, so nothing was shown", size
    outputs = sum(len(o) for run in expected.values() for o in run["layers"].values())
    return "equal", f"{outputs} outputs", size


def _runs(record: Mapping[str, Any], widest: int | None) -> dict[str, Any]:
    if widest is None:
        return dict(record["runs"])
    start = f"{widest}/"
    return {k.removeprefix(start): r for k, r in record["runs"].items() if k.startswith(start)}


def _widest_of(record: Mapping[str, Any]) -> int:
    return int(next(iter(record["runs"])).partition("/")[0])


def _last_line(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


def joined(name: str, chosen: Sequence[Case], modes: Sequence[str], slots: Sequence[str]) -> Plan:
    """The engines of several cases as one process, named CASE/ENGINE; vLLM alone first."""
    alone: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    steps = 0
    for case in chosen:
        plan = plan_of(case, modes, slots, write(checkpoints(), case.family, case.format))
        steps = plan.steps
        for one in plan.engines:
            group = ours if "worker_cls" in one["llm"] else alone
            group.append({**one, "name": f"{case.name}/{one['name']}"})
    return Plan(name, [*alone, *ours], steps=steps)


def records_of(case: Case, records: Mapping[str, Any]) -> dict[str, Any]:
    """One case's engines out of those of a process."""
    start = f"{case.name}/"
    return {k.removeprefix(start): r for k, r in records.items() if k.startswith(start)}


def run_cases(
    chosen: Sequence[Case],
    modes: Sequence[str],
    slots: Sequence[str],
    *,
    jobs: int,
    budget_s: float,
    logs: Path,
) -> list[Cell]:
    """Run the cases in `jobs` processes; print the cells of each process as it ends.

    A process takes several cases, since what costs time is its start and vLLM's first engine.
    """
    deadline = time.monotonic() + budget_s
    groups = [group for group in (chosen[at::jobs] for at in range(jobs)) if group]

    def run(index: int) -> list[Cell]:
        group = groups[index]
        records = run_plan(joined(str(index), group, modes, slots), logs / str(index), deadline)
        cells = [
            cell
            for case in group
            for cell in cells_of(case, modes, slots, records_of(case, records))
        ]
        took = [f"{n} {r['total_s']:.0f}" for n, r in records.items() if "total_s" in r]
        # One write, so that processes do not mix their lines.
        lines = [" ".join(map(str, cell[:5])) for cell in cells]
        print("\n".join([*lines, f"seconds of process {index}: {', '.join(took)}"]), flush=True)
        return cells

    with ThreadPoolExecutor(len(groups)) as pool:
        found = [cell for cells in pool.map(run, range(len(groups))) for cell in cells]
    order = {case.name: index for index, case in enumerate(chosen)}
    return sorted(found, key=lambda cell: order[cell.case])


def markdown(cells: Iterable[Cell]) -> str:
    """A table of all cells, and what was refused or went wrong below it."""
    by_case: dict[str, dict[tuple[str, str], Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.case, {})[cell.mode, cell.slots] = cell
    columns = [(m, s) for m in MODES for s in SLOTS if any((m, s) in c for c in by_case.values())]
    lines = [
        "| family and format | " + " | ".join(f"{m}, {s}" for m, s in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    notes: list[str] = []
    for name, row in by_case.items():
        shown = []
        for column in columns:
            cell = row.get(column)
            if cell is not None and cell.outcome != "equal":
                note = f"{name}: {cell.detail}"
                if note not in notes:
                    notes.append(note)
                shown.append(f"{cell.outcome} ({notes.index(note) + 1})")
            else:
                shown.append("" if cell is None else cell.outcome)
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += [""] if notes else []
    lines += [f"{index + 1}. {note}" for index, note in enumerate(notes)]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=["*"], help="patterns of FAMILY-FORMAT")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--slots", default=",".join(SLOTS))
    parser.add_argument("--jobs", type=int, default=6, help="processes at once")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go")
    parser.add_argument("--out", type=Path, help="also write the cells as JSON")
    parser.add_argument("--join", type=Path, nargs="*", help="run nothing, read these instead")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    return parser.parse_args(arguments)


def select(patterns: Sequence[str]) -> list[Case]:
    """The cases that match any pattern, in their order.

    Raises:
        ValueError: a pattern matches none.
    """
    known = [Case(*pair) for pair in cases()]
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in known], pattern):
            raise ValueError(f"no case matches {pattern!r}: {', '.join(c.name for c in known)}")
    return [c for c in known if any(fnmatch.fnmatch(c.name, p) for p in patterns)]


def main() -> int:
    """Run and print; 1 if a cell is neither equal nor refused."""
    options = parse()
    if options.join is not None:
        cells = [Cell(*row) for path in options.join for row in json.loads(path.read_text())]
    else:
        modes, slots = options.modes.split(","), options.slots.split(",")
        if not torch.cuda.is_available():
            modes = ["eager"]  # the others are CUDA graphs
        logs = options.logs or Path(tempfile.mkdtemp(prefix="formats-"))
        print(f"logs in {logs}", flush=True)
        cells = run_cases(
            select(options.cases),
            modes,
            slots,
            jobs=options.jobs,
            budget_s=options.budget,
            logs=logs,
        )
    if options.out is not None:
        options.out.write_text(json.dumps(cells))
    if options.markdown:
        print(markdown(cells))
    return int(any(cell.outcome not in ("equal", "refused") for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
