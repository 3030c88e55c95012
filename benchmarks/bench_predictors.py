"""Measures the host time of one layer's observe and predict, and how good the forecasts are.

128 experts, top 8, 1 token, 16 guesses. `recall` in the extra info is the share of the chosen
experts that the forecast names. Not measured: the router product of next_gate, and copies.
"""

from itertools import cycle

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from predictors import PREDICTOR_NAMES, Evidence, PredictorShape, create_predictor
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from prefetch_runtime.simulate import SimulationSettings, simulate

LAYERS, STEPS, COUNT = 6, 400, 16


@pytest.mark.benchmark(group="observe and predict, one layer")
@pytest.mark.parametrize("name", PREDICTOR_NAMES)
def bench_predictor(benchmark: BenchmarkFixture, name: str) -> None:
    trace = generate_routing(create_routing_model("qwen3-30b-a3b", num_layers=LAYERS), STEPS)
    assert trace.next_gate is not None
    shape = PredictorShape(num_layers=LAYERS, num_experts=trace.num_experts, top_k=trace.top_k)
    predictor = create_predictor(name, shape)
    found = []
    for row, guesses in zip(trace.topk, trace.next_gate, strict=True):
        for layer_idx in range(LAYERS):
            predictor.observe(layer_idx, row[None, layer_idx])
            if layer_idx + 1 < LAYERS:
                truth = row[None, layer_idx + 1]
                evidence = Evidence(row[None, layer_idx], guesses[None, layer_idx], truth)
                forecast = predictor.predict(layer_idx + 1, evidence, COUNT)
                found.append(np.isin(truth, forecast).mean())
    benchmark.extra_info["recall"] = round(float(np.mean(found)), 3)
    rows = cycle(zip(trace.topk, trace.next_gate, strict=True))

    def one_layer() -> None:
        row, guesses = next(rows)
        predictor.observe(0, row[None, 0])
        predictor.predict(1, Evidence(row[None, 0], guesses[None, 0], row[None, 1]), COUNT)

    benchmark(one_layer)
    assert np.mean(found) > 0.1 or name == "none"


@pytest.mark.benchmark(group=f"simulate {STEPS} steps x {LAYERS} layers")
@pytest.mark.parametrize("predictor", ["none", "next_gate", "transition"])
@pytest.mark.parametrize("policy", ["lru", "lfru", "forecast", "belady"])
def bench_simulate(benchmark: BenchmarkFixture, policy: str, predictor: str) -> None:
    trace = generate_routing(create_routing_model("qwen3-30b-a3b", num_layers=LAYERS), STEPS)
    settings = SimulationSettings(
        num_slots=32, policy=policy, predictor=predictor, expert_bytes=2 << 20
    )
    result = benchmark.pedantic(simulate, (trace, settings), rounds=3)
    benchmark.extra_info["hit_rate"] = round(result.hit_rate, 3)
    assert 0.5 < result.hit_rate < 1
