"""The routing that every engine of a measurement gets in place of its router's choice.

Shapes: N = steps, L = MoE layers, B = widest batch, K = top_k, G = guesses.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from predictors import PredictorShape, create_predictor
from prefetch_runtime.bench.config import ROUTINGS, BenchConfig, parse_engine
from prefetch_runtime.config import ConfigError
from prefetch_runtime.hit_rates import (
    UNIFORM,
    HitRates,
    TraceHitRates,
    create_hit_rates,
    matching_curve,
)
from prefetch_runtime.model_sizes import ModelSizes
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from prefetch_runtime.trace import Trace, TraceError, load_trace

_STEPS = 256  # of a generated trace; it starts again after that
CALIBRATED = "qwen3-30b-a3b"


def make_routing(config: BenchConfig, sizes: ModelSizes) -> Trace | None:
    """The trace of a measurement, with a step for the widest batch; None: the model routes.

    Raises:
        ConfigError: a trace that cannot be read, is of another model, has too few tokens, or lacks
            the guesses that an engine's predictor reads.
    """
    if config.routing == "model":
        return None
    widest = max(config.batches)
    if config.routing in ROUTINGS:
        name = CALIBRATED if config.routing == "calibrated" else UNIFORM
        model = create_routing_model(
            name,
            num_layers=sizes.num_moe_layers,
            num_experts=sizes.num_experts,
            top_k=sizes.top_k,
        )
        if model.accuracy is not None and model.accuracy <= sizes.top_k / sizes.num_experts:
            model = replace(model, accuracy=None)
        return generate_routing(model, _STEPS, batch_size=widest, seed=config.seed)
    try:
        trace = load_trace(Path(config.routing), num_experts=sizes.num_experts)
        trace.require_model(
            num_layers=sizes.num_moe_layers, num_experts=sizes.num_experts, top_k=sizes.top_k
        )
        trace = trace.batched(widest)
    except OSError as error:
        raise ConfigError(
            f"routing: cannot read {config.routing!r}: {error.strerror}; "
            f"give a trace, or one of {', '.join(ROUTINGS)}"
        ) from None
    except TraceError as error:
        raise ConfigError(f"routing: {error}") from None
    guessing = [name for name in config.engines if _needs_guesses(parse_engine(name).predictor)]
    if guessing and trace.next_gate is None:
        raise ConfigError(
            f"routing: {config.routing} has no next_gate, which {guessing[0]!r} predicts from; "
            "record it without --no-next-gate, or leave that engine out"
        )
    return trace


def _needs_guesses(predictor: str) -> bool:
    smallest = PredictorShape(num_layers=2, num_experts=1, top_k=1)
    return create_predictor(predictor, smallest).needs_guesses


def save_routing(trace: Trace, widest: int, path: Path) -> None:
    """Write what `injected_worker` and `bench_engine` read: [N, L, B, K] and [N, L-1, B, G]."""
    arrays: dict[str, Any] = {"routing": trace.topk}
    if trace.next_gate is not None:
        arrays["guesses"] = trace.next_gate
    shaped: dict[str, Any] = {
        name: np.ascontiguousarray(
            array.reshape(-1, widest, *array.shape[1:]).transpose(0, 2, 1, 3)
        )
        for name, array in arrays.items()
    }
    np.savez(path, **shaped)


def rates_for(
    trace: Trace | None, config: BenchConfig, sizes: ModelSizes, *, random_weights: bool
) -> Callable[[int], HitRates]:
    """By batch, the hit rates that `prefetch-runtime plan` would use for this measurement."""

    def of_batch(batch: int) -> HitRates:
        if trace is not None:
            widest = max(config.batches)
            rows = np.arange(trace.num_tokens).reshape(-1, widest)[:, :batch]
            # Stream by stream, as `TraceHitRates` takes a trace that was recorded alone.
            streams = rows.T.ravel()
            used = replace(
                trace,
                topk=trace.topk[streams],
                sequence=trace.sequence[streams],
                next_gate=None,
                step=None,
            )
            return TraceHitRates(used, batch=batch)
        name = (
            UNIFORM
            if random_weights
            else matching_curve(sizes.model_type, sizes.num_experts, sizes.top_k)
        )
        return create_hit_rates(name, num_experts=sizes.num_experts, top_k=sizes.top_k, batch=batch)

    return of_batch
