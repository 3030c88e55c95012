"""How far eviction can get on a recorded trace, and what knowing the next steps would be worth.

    .venv/bin/python -m benchmarks.eviction_bounds [TRACE] [--slots 8,16]

Share of demanded experts that were resident, one token a step: over the whole trace, and over its
first and second half, as the constants of `forecast` were chosen on the first half of
`models/tiny-moe-trace.npz`. `next n known`: `forecast`, with the exact experts of the layer's next
n steps besides; what it names is kept, soonest first. Not measured: time, prediction, bytes.
"""

import argparse
from pathlib import Path

import numpy as np

from prefetch_runtime.policies import (
    EMPTY_SCORE,
    EvictionPolicy,
    Forecast,
    IdArray,
    IntArray,
    create_policy,
)
from prefetch_runtime.simulate import BeladyPolicy
from prefetch_runtime.slots import SlotTable
from prefetch_runtime.trace import load_trace

TRACE = Path(__file__).resolve().parent.parent / "models" / "tiny-moe-trace.npz"
HORIZONS = (1, 2, 4, 8)
_KEPT = 1 << 30  # above every worth of Forecast


class NextKnown(Forecast):
    """Forecast that also knows the layer's next `horizon` steps."""

    def __init__(self, demands: IdArray, horizon: int) -> None:
        """`demands` [steps, top_k]: of the layer, step 1 first."""
        self._demands = demands
        self._horizon = horizon

    def order(self, scores: IntArray, owner: IdArray, now: int) -> IntArray:
        order = super().order(scores, owner, now)
        ahead = self._demands[now : now + self._horizon]
        for distance in range(len(ahead), 0, -1):
            order[np.isin(owner, ahead[distance - 1])] = _KEPT - distance
        order[scores == EMPTY_SCORE] = EMPTY_SCORE
        return order


def policy_of(name: str, demands: IdArray, num_experts: int) -> EvictionPolicy:
    """`name`: a policy, `belady`, or `next n known`."""
    if name == "belady":
        uses = [(np.nonzero(demands == e)[0] + 1).tolist() for e in range(num_experts)]
        return BeladyPolicy(uses)
    if name.startswith("next "):
        return NextKnown(demands, int(name.split()[1]))
    return create_policy(name)


def hit_rates(name: str, topk: IdArray, num_experts: int, num_slots: int) -> list[float]:
    """Of the whole of `topk` [steps, layers, top_k], its first and its second half."""
    half = len(topk) // 2
    found = np.zeros(2)
    for layer_idx in range(topk.shape[1]):
        demands = topk[:, layer_idx].astype(np.intp)
        table = SlotTable(num_experts, num_slots, policy_of(name, demands, num_experts))
        for now, ids in enumerate(demands, start=1):
            table.plan(ids, now)
            if now == half:
                found[0] += table.counters.hits
        found[1] += table.counters.hits
    demanded = topk[0].size * np.array([len(topk), half, len(topk) - half])
    return (np.array([found[1], found[0], found[1] - found[0]]) / demanded).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--slots", default="8,16")
    arguments = parser.parse_args()
    trace = load_trace(arguments.trace)
    known = [f"next {horizon} known" for horizon in HORIZONS]
    print("| slots | policy | all | first half | second half |\n| --- | --- | --- | --- | --- |")
    for num_slots in map(int, arguments.slots.split(",")):
        for name in ("lru", "lfru", "forecast", *known, "belady"):
            rates = hit_rates(name, trace.topk, trace.num_experts, num_slots)
            print(f"| {num_slots} | {name} | " + " | ".join(f"{100 * r:.1f} %" for r in rates), "|")


if __name__ == "__main__":
    main()
