"""The budgets' controller in a modelled engine: does it do as well as the better of on and off?

    python -m benchmarks.budget_model [--layers 10] [--steps 512] [--slowdown 0.03] [--saved 0.6]

Decode steps of generated routing, calibrated to Qwen3-30B-A3B and uniform, through the simulator's
slots, policy and link, with the guesses of the next gate. Beside what the simulator knows: compute
slows down by a share of the time of copies beside it; copies ahead of a demand save a share of
their own time only; and, as in mode `full`, a demanded expert is copied to its end by whoever began
it, and counts as one that was there. With the defaults the steps of the table in
`benchmarks/README.md` (Prediction) come out within 2 points. No device is involved.

Prints, for each setting, the second half's mean step without prediction, and that with the whole
budget and under the controller as multiples of it.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np

from predictors import Evidence, PredictorShape, create_predictor
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.policies import create_policy
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from prefetch_runtime.scheduler import CONTROL_STEPS
from prefetch_runtime.slots import SlotTable
from prefetch_runtime.stats import LayerStats
from prefetch_runtime.trace import Trace

Budget = Literal["none", "whole", "auto"]
PRESETS = ("qwen3-30b-a3b", "uniform")
EXPERT_BYTES = (9_437_184, 2_359_296)
SLOTS, BATCHES = (32, 64), (1, 4)


class Engine(NamedTuple):
    """What the model knows of an engine and its link."""

    num_slots: int
    expert_bytes: int
    slowdown: float = 0.03
    """Of compute, as a share of the time of copies beside it."""
    saved: float = 0.6
    """Of their own time on the link, by copies ahead of their demand."""
    compute_s: float = 85e-6
    """From a layer's demand to the next layer's, without stalls."""
    link_bytes_per_s: float = 50e9

    @property
    def window_bytes(self) -> float:
        """What the link carries while one layer computes."""
        return self.compute_s * self.link_bytes_per_s


@dataclass
class _Layer:
    """One layer: its slots, what is coming for the running step (bytes by expert), and counts."""

    table: SlotTable
    stats: LayerStats
    coming: dict[int, float] = field(default_factory=dict)

    def count(self, **grown: float) -> None:
        self.stats = replace(
            self.stats, **{name: getattr(self.stats, name) + n for name, n in grown.items()}
        )


class Outcome(NamedTuple):
    """What a replay gives."""

    step_s: float
    """Mean over the second half of the steps."""
    share_on: float
    """Of the predicted layers, in those steps."""


def replay(trace: Trace, engine: Engine, budget: Budget) -> Outcome:
    """A decode step after the other. `budget`: `whole` is what the link carries meanwhile."""
    layers = [
        _Layer(
            SlotTable(trace.num_experts, engine.num_slots, create_policy("lru"), layer_idx),
            LayerStats(
                layer_idx=layer_idx, layer_name="", num_experts=trace.num_experts,
                num_slots=engine.num_slots,
            ),
        )
        for layer_idx in range(trace.num_layers)
    ]  # fmt: skip
    shape = PredictorShape(
        num_layers=trace.num_layers, num_experts=trace.num_experts, top_k=trace.top_k
    )
    predictor = create_predictor("next_gate", shape)
    controller = BudgetController([engine.expert_bytes] * trace.num_layers)
    budgets = [0.0 if budget == "none" else engine.window_bytes] * trace.num_layers
    if budget == "auto":
        budgets = list(map(float, controller.budgets))
    bounds = trace.step_bounds().tolist()
    times, on = [], []
    for now, (start, stop) in enumerate(pairwise(bounds), start=1):
        demands = trace.topk[start:stop].swapaxes(0, 1).astype(np.intp)
        assert trace.next_gate is not None
        guesses = trace.next_gate[start:stop].swapaxes(0, 1)
        seconds = 0.0
        for layer_idx, layer in enumerate(layers):
            seconds += _demand(layer, demands[layer_idx], engine, now) + engine.compute_s
            if layer_idx + 1 < trace.num_layers:
                evidence = Evidence(demands[layer_idx], guesses[layer_idx], demands[layer_idx + 1])
                forecast = predictor.predict(layer_idx + 1, evidence, 2 * demands[0].size)
                seconds += _prefetch(
                    layers[layer_idx + 1], forecast, engine, budgets[layer_idx + 1], now
                )
        times.append(seconds)
        on.append(np.mean([allowed > 0 for allowed in budgets[1:]]))
        if budget == "auto" and now % CONTROL_STEPS == 0:
            controller.observe([layer.stats for layer in layers])
            budgets = list(map(float, controller.budgets))
    half = len(times) // 2
    return Outcome(float(np.mean(times[half:])), float(np.mean(on[half:])))


def _demand(layer: _Layer, topk_ids: np.ndarray, engine: Engine, now: int) -> float:
    """End the layer's prefetches and serve its demand. Returns the seconds of the stall."""
    wanted, coming, whole = set(topk_ids.ravel().tolist()), layer.coming, engine.expert_bytes
    kept = [e for e, nbytes in coming.items() if e in wanted or nbytes >= whole]
    there = [e for e in kept if e in wanted]
    ahead = sum(coming[e] for e in there)
    begun = len(there) * whole - ahead  # whose rest comes from the one who began it
    layer.table.commit(kept, now)
    layer.table.cancel([e for e in coming if e not in kept])
    plan = layer.table.plan(topk_ids, now)
    missed = plan.loads.size * whole
    stall_s = (missed + begun + (1 - engine.saved) * ahead) / engine.link_bytes_per_s
    layer.count(
        steps=1,
        misses=plan.loads.size,
        prefetch_at_once=len(there),
        bytes_copied=missed,
        bytes_prefetched=sum(coming.values()) + begun,
        stall_seconds=stall_s,
    )
    coming.clear()
    return stall_s


def _prefetch(
    layer: _Layer, forecast: list[int], engine: Engine, allowed: float, now: int
) -> float:
    """Copy what is forecast while the layer before computes. Returns by how much that takes
    longer."""
    left = min(allowed, engine.window_bytes)
    taken, _ = layer.table.reserve(forecast, now, math.ceil(allowed / engine.expert_bytes))
    for expert in taken.tolist():
        layer.coming[expert] = min(left, engine.expert_bytes)
        left -= layer.coming[expert]
    slower_s = engine.slowdown * sum(layer.coming.values()) / engine.link_bytes_per_s
    layer.count(link_free_seconds=engine.compute_s + slower_s)
    return slower_s


def routing(preset: str, *, layers: int, steps: int, batch: int) -> Trace:
    """So many steps of that preset, with guesses as good as those published of the next gate."""
    model = create_routing_model(preset, num_layers=layers)
    return generate_routing(model, steps, batch_size=batch, seed=1)


def lines(options: argparse.Namespace) -> Iterator[str]:
    """A Markdown table, a line as it is known."""
    yield "| expert | slots | batch | routing | none, ms | whole | auto | layers on |"
    yield "|" + " --- |" * 8
    for expert_bytes, slots, batch, preset in product(EXPERT_BYTES, SLOTS, BATCHES, PRESETS):
        trace = routing(preset, layers=options.layers, steps=options.steps, batch=batch)
        engine = Engine(slots, expert_bytes, options.slowdown, options.saved)
        none, whole, auto = (replay(trace, engine, name) for name in ("none", "whole", "auto"))
        yield (
            f"| {expert_bytes / 1e6:.1f} MB | {slots} | {batch} | {preset} "
            f"| {none.step_s * 1e3:.2f} | {whole.step_s / none.step_s:.3f} "
            f"| {auto.step_s / none.step_s:.3f} | {auto.share_on:.0%} |"
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--saved", type=float, default=0.6)
    for line in lines(parser.parse_args()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
