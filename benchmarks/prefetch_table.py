"""What prediction saves inside one captured graph: none, next gate, oracle, on one routing.

    python benchmarks/prefetch_table.py --expert-intermediate 768,192 --slots 32,64 --out rows.json
    python benchmarks/prefetch_table.py --table rows.json more-rows.json      # no GPU needed
    python benchmarks/prefetch_table.py --simulate                # nor here: what a model says

One vLLM engine per size of an expert and number of slots, each in a process of its own; they load
side by side and are measured one at a time: Qwen3-30B-A3B's shape cut to --layers MoE layers,
random weights, mode `full`. Routing is that of `routing_generator` (calibrated to Qwen3-30B-A3B, or
uniform: nothing to predict), and so are the guesses: `next_gate` names the chosen experts as well
as the published next gate does, at random for uniform routing; `oracle` names them exactly.

vLLM's own graph of a decode step is taken at its last replay, and replayed: every arm starts with
empty slots and the same routing, warms up, and is timed between two CUDA events. Between arms only
device memory changes: routing, guesses, budgets. Arms:

- none: budget 0. The hook's kernels are there and find nothing to do; --plain adds an engine
  without them.
- next_gate, oracle: the same guesses per token and the same budget, which is the time that the link
  was free in `none` times the speed of its demanded copies.
- auto: next_gate under the runtime's own controller.

Measures, per step: the device's time, the stall (waiting for demanded experts, on the GPU's timer),
bytes by what became of them. Not measured: sampling, vLLM's host work between replays, prompts.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefetch_runtime.audit import audit
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.device_scheduler import DeviceScheduler
from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.stats import RuntimeStats
from prefetch_runtime.trace import Trace

WORKER_CLS = "forecast_worker.ForecastWorker"
NO_PREDICTION_RATIO = 1.02
STALL_RATIO = 0.6
COUNTED = (
    "hits", "late", "misses", "prefetched", "prefetch_at_once",
    "bytes_copied", "bytes_useful", "bytes_late", "bytes_wasted",
    "stall_seconds", "link_free_seconds",
)  # fmt: skip


class Arms:
    """Measures one setting after another on one engine. `step` runs a decode step of one batch."""

    def __init__(
        self, scheduler: DeviceScheduler, injection: RoutingInjection, step: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._injection = injection
        self._step = step

    def measure(
        self,
        routing: torch.Tensor,
        guesses: torch.Tensor,
        *,
        warm: int,
        steps: int,
        budgets: Sequence[int] | None,
    ) -> dict[str, Any]:
        """One arm, from empty slots. `budgets` None: a controller sets them."""
        scheduler = self._scheduler
        scheduler.reset()
        self._injection.load(routing, guesses)
        expert_bytes = [layer.store.layout.payload_bytes for layer in scheduler.layers]
        if budgets is None:
            scheduler.control_budgets(BudgetController(expert_bytes))
        elif scheduler.needs_guesses:
            scheduler.set_budgets(budgets)
        for _ in range(warm):
            scheduler.begin_step()
            self._step()
            if budgets is None:  # or the host would be far ahead of what it looks at
                _synchronize()
        before = scheduler.stats()
        seconds = _timed(lambda: (scheduler.begin_step(), self._step()), steps)
        after = scheduler.stats()
        return {
            "ms_step": seconds * 1e3 / steps,
            "steps": steps,
            **_per_step(before, after, steps),
            "budgets": [layer.prefetch_budget_bytes for layer in after.layers],
            "expert_bytes": expert_bytes[0],
        }


def _timed(step: Callable[[], Any], steps: int) -> float:
    """Seconds that the device takes for so many steps."""
    if not torch.cuda.is_available():
        begun_at = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begun_at
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    _synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _per_step(before: RuntimeStats, after: RuntimeStats, steps: int) -> dict[str, Any]:
    """Every counter's growth per step, over all layers; the window by layer, in seconds."""
    if any(layer.steps - old.steps != steps for layer, old in _pairs(before, after)):
        raise RuntimeError(f"the layers did not run {steps} steps; was another graph replayed?")
    grown = {
        name: sum(getattr(layer, name) - getattr(old, name) for layer, old in _pairs(before, after))
        / steps
        for name in COUNTED
    }
    windows = [
        (layer.link_free_seconds - old.link_free_seconds) / steps
        for layer, old in _pairs(before, after)
    ]
    return {**grown, "windows_s": windows}


def _pairs(before: RuntimeStats, after: RuntimeStats) -> Iterable[tuple[Any, Any]]:
    return zip(after.layers, before.layers, strict=True)


def budgets_of(row: dict[str, Any]) -> list[int]:
    """What the link had time for in a measured arm, by layer."""
    speed = row["bytes_copied"] / row["stall_seconds"] if row["stall_seconds"] else 50e9
    return [round(window * speed) for window in row["windows_s"]]


def tensors_of(trace: Trace, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([N, L, B, K] routing, [N, L-1, B, 2K] guesses, the oracle's guesses, -1 after the K)."""
    assert trace.next_gate is not None

    def by_step(rows: Any) -> torch.Tensor:
        steps = rows.reshape(-1, tokens, *rows.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(steps.transpose(0, 2, 1, 3)).astype(np.int32))

    routing, guesses = by_step(trace.topk), by_step(trace.next_gate)
    oracle = torch.full_like(guesses, -1)
    oracle[..., : trace.top_k] = routing[:, 1:]
    return routing, guesses, oracle


def measure_batch(
    arms: Arms,
    batch: int,
    traces: Mapping[str, Trace],
    options: argparse.Namespace,
    predicts: bool,
) -> Iterable[dict[str, Any]]:
    """The arms of one batch size."""
    for kind, trace in traces.items():
        steps = options.steps if kind == "calibrated" else options.steps // 2
        warm = options.warm if kind == "calibrated" else options.warm // 2
        routing, guesses, oracle = tensors_of(trace, max(options.batches))
        nothing = [0] * options.layers
        kept = {"batch": batch, "routing": kind}
        none = arms.measure(routing, guesses, warm=warm, steps=steps, budgets=nothing)
        if not predicts:
            yield {**kept, "predictor": "without the hook", **none}
            continue
        yield {**kept, "predictor": "none", **none}
        budgets = budgets_of(none)
        for name, named in (("next_gate", guesses), ("oracle", oracle)):
            if kind == "uniform" and name == "oracle":
                continue
            row = arms.measure(routing, named, warm=warm, steps=steps, budgets=budgets)
            yield {**kept, "predictor": name, **row}
        row = arms.measure(routing, guesses, warm=max(256, warm), steps=steps, budgets=None)
        yield {**kept, "predictor": "auto", **row}


def generated(options: argparse.Namespace) -> dict[str, Trace]:
    """The routing of every arm, by its kind."""
    return {
        kind: generate_routing(
            create_routing_model(preset, num_layers=options.layers),
            options.steps + options.warm,
            batch_size=max(options.batches),
            seed=1,
        )
        for kind, preset in (("calibrated", "qwen3-30b-a3b"), ("uniform", "uniform"))
    }


def measure_engine(kind: str, model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """First how long the engine of `kind` took to load; then, row by row, what was measured."""
    from shapes import LOAD_FORMAT
    from vllm import LLM, SamplingParams

    _, count, hook = kind.split(":")
    slots, predicts = int(count), hook == "hook"
    traces = generated(options)
    sizes = (options.steps + options.warm, options.layers, max(options.batches), 8, 16)
    os.environ["PREFETCH_BENCH_SIZES"] = ",".join(map(str, sizes))
    settings = {"slots_per_layer": slots, "mode": "full", "prefetch_budget_mib": 0.0}
    if predicts:
        settings["predictor"] = "next_gate"
    replayed = ReplayedGraph()
    begun_at = time.perf_counter()
    llm = LLM(
        model=str(model), load_format=LOAD_FORMAT, skip_tokenizer_init=True, seed=0,
        max_model_len=1024, max_num_seqs=max(options.batches), max_num_batched_tokens=1024,
        enable_prefix_caching=False, disable_log_stats=True, kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,  # of which so much must be free at the start
        compilation_config={"cudagraph_capture_sizes": sorted(options.batches)},
        worker_cls=WORKER_CLS, additional_config={"prefetch_runtime": settings},
    )  # fmt: skip
    started_s = time.perf_counter() - begun_at
    try:
        yield {"started_s": started_s}
        held: list[Any] = []
        llm.collective_rpc(lambda worker: held.append(worker.prefetch_engine))
        engine = held[0]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8, detokenize=False)
        for batch in options.batches:
            prompts = [
                {"prompt_token_ids": [(997 * (i + 1) * (j + 3)) % 8000 + 10 for j in range(64)]}
                for i in range(batch)
            ]
            llm.generate(prompts, sampling, use_tqdm=False)
            arms = Arms(engine.scheduler, engine.injection, replayed.take())
            for row in measure_batch(arms, batch, traces, options, predicts):
                yield {"slots": slots, **row}
        problems = audit(engine.scheduler)
        if problems:
            raise RuntimeError(f"the audit of the slots found {problems[:3]}")
        yield {"finished": True}
    finally:
        replayed.close()
        llm.llm_engine.engine_core.shutdown()


class ReplayedGraph:
    """Notes which CUDA graph vLLM replays, whatever its version keeps it in."""

    def __init__(self) -> None:
        self._original = torch.cuda.CUDAGraph.replay
        self._last: Any = None
        original = self._original

        def replay(graph: Any) -> None:
            self._last = graph
            original(graph)

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]

    def take(self) -> Callable[[], None]:
        """Replays the graph that was replayed last."""
        if self._last is None:
            raise RuntimeError(
                "vLLM has replayed no graph; is it the batch size that was captured?"
            )
        graph, original = self._last, self._original
        self._last = None
        return lambda: original(graph)

    def close(self) -> None:
        """Leave torch as it was."""
        torch.cuda.CUDAGraph.replay = self._original  # type: ignore[method-assign]


def stall_ratio(rows: Sequence[dict[str, Any]]) -> float | None:
    """(stall without - stall with next_gate) / (stall without - stall with the oracle)."""
    stall = {row["predictor"]: row["stall_seconds"] for row in rows}
    if not {"none", "next_gate", "oracle"} <= stall.keys():
        return None
    bound = stall["none"] - stall["oracle"]
    return (stall["none"] - stall["next_gate"]) / bound if bound > 0 else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, and the two bars: stall ratio, and the cost where nothing is gained."""
    lines = [
        "| expert | slots | batch | routing | predictor | ms a step | stall ms | hits % "
        "| budget MB | useful, late, wasted MB a step | window us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["expert_bytes"], row["slots"], row["batch"], row["routing"])
        groups.setdefault(key, []).append(row)
        demanded = row["hits"] + row["late"] + row["misses"]
        moved = ", ".join(f"{row[f'bytes_{k}'] / 1e6:.1f}" for k in ("useful", "late", "wasted"))
        later = row["budgets"][1:]
        windows = row["windows_s"][1:]
        lines.append(
            f"| {row['expert_bytes'] / 1e6:.1f} MB | {row['slots']} | {row['batch']} "
            f"| {row['routing']} | {row['predictor']} | {row['ms_step']:.3f} "
            f"| {row['stall_seconds'] * 1e3:.3f} | {100 * row['hits'] / max(demanded, 1e-9):.1f} "
            f"| {np.mean(later) / 1e6:.2f} | {moved} | {np.mean(windows) * 1e6:.0f} |"
        )
    lines += ["", "| expert | slots | batch | routing | bar | value | wanted |", "|" + " --- |" * 7]
    for (nbytes, slots, batch, routing), group in sorted(groups.items()):
        where = f"| {nbytes / 1e6:.1f} MB | {slots} | {batch} | {routing} "
        ratio = stall_ratio(group)
        if ratio is not None:
            lines.append(f"{where}| stall removed, of the oracle's | {ratio:.2f} | {STALL_RATIO} |")
        times = {row["predictor"]: row["ms_step"] for row in group}
        bases = [name for name in ("without the hook", "none") if name in times]
        for name in ("next_gate", "auto"):
            for base in bases if name in times else ():
                value = f"{times[name] / times[base]:.3f}"
                wanted = NO_PREDICTION_RATIO if routing == "uniform" else ""
                lines.append(f"{where}| step, {name} / {base} | {value} | {wanted} |")
    return "\n".join(lines)


def simulated(
    *, layers: int, slots: Sequence[int], batches: Sequence[int], steps: int
) -> Iterable[str]:
    """The same arms on a modelled link, as lines of a Markdown table."""
    yield (
        "| expert | slots | batch | stall a step: none, next gate, oracle (ms) "
        "| stall removed, of the oracle's | uniform routing: step, next gate / none |"
    )
    yield "|" + " --- |" * 6
    for expert_bytes, num_slots, batch in product((9_437_184, 2_359_296), slots, batches):
        results = {}
        for preset, name in product(("qwen3-30b-a3b", "uniform"), ("none", "next_gate", "oracle")):
            model = create_routing_model(preset, num_layers=layers)
            trace = generate_routing(model, steps, batch_size=batch, seed=1)
            settings = SimulationSettings(
                num_slots=num_slots, predictor=name, expert_bytes=expert_bytes
            )
            results[preset, name] = simulate(trace, settings)
        rows = [
            {"predictor": name, "stall_seconds": result.stall_us_per_step * 1e-6}
            for (preset, name), result in results.items()
            if preset != "uniform"
        ]
        stalls = ", ".join(f"{row['stall_seconds'] * 1e3:.2f}" for row in rows)
        ratio = stall_ratio(rows)
        uniform = [results["uniform", name].step_us for name in ("next_gate", "none")]
        yield (
            f"| {expert_bytes / 1e6:.1f} MB | {num_slots} | {batch} | {stalls} "
            f"| {'' if ratio is None else f'{ratio:.2f}'} | {uniform[0] / uniform[1]:.3f} |"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expert-intermediate", type=_integers, default=[768, 192])
    parser.add_argument("--layers", type=int, default=16, help="MoE layers of the shape")
    parser.add_argument("--slots", type=_integers, default=[32, 64])
    parser.add_argument("--batches", type=_integers, default=[1, 4])
    parser.add_argument("--steps", type=int, default=128, help="timed; half of it if uniform")
    parser.add_argument("--warm", type=int, default=64, help="before them")
    parser.add_argument("--plain", action="store_true", help="engines without the hook, too")
    parser.add_argument("--limit-s", type=float, default=225, help="no new row after so long")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="write the rows as JSON")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files")
    parser.add_argument("--simulate", action="store_true", help="simulate both expert sizes")
    return parser.parse_args(arguments)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure every engine, print a table."""
    options = parse()
    if options.table:
        print(table([row for path in options.table for row in json.loads(path.read_text())]))
        return 0
    if options.simulate:
        for line in simulated(
            layers=options.layers,
            slots=options.slots,
            batches=options.batches,
            steps=options.steps + options.warm,
        ):
            print(line, flush=True)
        return 0
    import engines
    from shapes import write_shape

    if options.child is not None:
        return engines.serve_child(options.child, options, measure_engine)
    begun_at = time.perf_counter()
    children = []
    for width, hook in product(options.expert_intermediate, ["hook", "plain"]):
        if hook == "plain" and not options.plain:
            continue
        model = write_shape(
            "qwen3-30b-a3b", Path(f"/tmp/prefetch-table-{width}"), vocab_size=8192,
            num_hidden_layers=options.layers, moe_intermediate_size=width,
        )  # fmt: skip
        for slots in options.slots:
            kind = f"cache-{width}:{slots}:{hook}"
            # Far above the limit for rows: what hangs is ended.
            children.append(engines.Child(kind, str(model), options.limit_s + 60, __file__))
    rows: list[dict[str, Any]] = []
    failed = 0
    for child in children:
        child.listen()
    for child in children:
        for row in rows_of(child, begun_at + options.limit_s):
            rows.append(row)
            at = time.perf_counter() - begun_at
            shown = {k: v for k, v in row.items() if k not in ("budgets", "windows_s")}
            print(f"ROW {at:.0f} s", json.dumps(shown), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(rows))
        child.close()
        why = child.row.get("failed")
        print(child.row["engine"], "failed: " + why if why else "audited", flush=True)
        failed |= why is not None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}, {options.layers} of 48 layers")
    print(table(rows))
    return failed


def rows_of(child: Any, until: float) -> Iterator[dict[str, Any]]:
    """What an engine measures, row by row; one that has no time left fails for that."""
    while "failed" not in child.row:
        if time.perf_counter() > until:
            child.row["failed"] = "no time left for all its rows"
            return
        child.go_on()
        if "failed" in child.row or "finished" in child.row:
            return
        yield {k: v for k, v in child.row.items() if k != "engine"}


if __name__ == "__main__":
    sys.exit(main())
