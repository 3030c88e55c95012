"""How many experts a step finds absent, from a published curve, a trace, or uniform routing.

Shapes: E = experts of a layer, k = experts per token, B = tokens of a step, S = slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NamedTuple, Protocol

import numpy as np

from prefetch_runtime.config import ConfigError
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.trace import Trace

UNIFORM = "uniform"
_MOST_LAYER_STEPS = 8192  # of a trace: about a second per number of slots


class Demand(NamedTuple):
    """Means over layers and steps."""

    demanded: float
    """Unique experts that a layer's tokens were routed to."""
    absent: float
    """Those of them that were in no slot."""

    @property
    def hit_rate(self) -> float:
        return 1 - self.absent / self.demanded


class HitRates(Protocol):
    """Where a plan takes its hit rates from."""

    origin: str
    """For people: what it is and where it comes from."""

    def demand(self, num_slots: int) -> Demand:
        """What a step asks of a layer with so many slots, at least top_k of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hit rates of an LRU cache that one stream of tokens has to itself."""

    source: str
    num_experts: int
    top_k: int
    points: Mapping[int, float]
    """Share of demanded experts resident, by slots per layer; none and all are understood."""

    def hit_rate(self, share: float) -> float:
        """At slots for a share of the experts, 0 to 1; straight lines between the points."""
        shares = [0.0, *(slots / self.num_experts for slots in sorted(self.points)), 1.0]
        rates = [0.0, *(self.points[slots] for slots in sorted(self.points)), 1.0]
        return float(np.interp(share, shares, rates))


CURVES: Mapping[str, Curve] = {
    "qwen3-30b-a3b": Curve(
        source="github.com/kekzl/imp issue 1374, first 256 tokens from an empty cache",
        num_experts=128, top_k=8, points={8: 0.366, 24: 0.741, 49: 0.894, 81: 0.962},
    ),
    "olmoe-1b-7b": Curve(
        source="Hugging Face data set mkvn/quantization-cache-amplification, one point",
        num_experts=64, top_k=8, points={16: 0.514},
    ),
    "gpt-oss-20b": Curve(
        source="tinyserve's README, middle of 84 to 92 % at one point",
        num_experts=32, top_k=4, points={10: 0.88},
    ),
    "mixtral-8x7b": Curve(
        source="arXiv 2312.17238, read as its range of 40 to 60 % with 2 to 4 slots",
        num_experts=8, top_k=2, points={2: 0.40, 4: 0.60},
    ),
    "deepseek-v4-flash": Curve(
        source="hipfire issue 563",
        num_experts=256, top_k=6,
        points={14: 0.405, 28: 0.594, 56: 0.744, 112: 0.865, 224: 0.910},
    ),
    "qwen3.8-flash-next": Curve(
        source="github.com/kekzl/imp issue 2061, slots inferred",
        num_experts=512, top_k=10,
        points={31: 0.435, 62: 0.620, 93: 0.720, 124: 0.789, 171: 0.850},
    ),
}  # fmt: skip
"""Published measurements. None is ours."""


def matching_curve(model_type: str, num_experts: int, top_k: int) -> str:
    """The name of the published curve of a model of this family and shape, else "uniform"."""
    families = {
        "qwen3_moe": "qwen3-30b-a3b",
        "olmoe": "olmoe-1b-7b",
        "gpt_oss": "gpt-oss-20b",
        "mixtral": "mixtral-8x7b",
    }
    name = families.get(model_type, UNIFORM)
    if name != UNIFORM and (CURVES[name].num_experts, CURVES[name].top_k) == (num_experts, top_k):
        return name
    return UNIFORM


def create_hit_rates(name: str, *, num_experts: int, top_k: int, batch: int) -> HitRates:
    """Hit rates by the name of a curve. Raises ConfigError for an unknown one."""
    if name == UNIFORM:
        curve = None
        origin = "assumed: uniform routing, the share of experts that have a slot"
    elif name in CURVES:
        curve = CURVES[name]
        origin = f"published, {name}: {curve.source}"
        if (curve.num_experts, curve.top_k) != (num_experts, top_k):
            origin += (
                f"; of a model with {curve.num_experts} experts, {curve.top_k} per token, applied "
                "by the share of experts that have a slot"
            )
    else:
        close = get_close_matches(name, [*CURVES, UNIFORM], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"unknown hit-rate curve {name!r}; choose one of {', '.join([*CURVES, UNIFORM])}{hint}"
        )
    return CurveHitRates(curve, origin, num_experts=num_experts, top_k=top_k, batch=batch)


class CurveHitRates:
    """A curve for one stream, applied to a batch of independent streams."""

    def __init__(
        self, curve: Curve | None, origin: str, *, num_experts: int, top_k: int, batch: int
    ) -> None:
        """`curve` None: every set of experts equally likely, which no eviction can help."""
        self.origin = origin
        self._curve = curve
        self._num_experts = num_experts
        self._top_k = top_k
        self._batch = batch

    def demand(self, num_slots: int) -> Demand:
        experts, batch = self._num_experts, self._batch
        if num_slots >= experts:
            return Demand(self._demanded(), 0.0)
        demanded = self._demanded()
        # B streams touch S experts while one of them touches `own`, so that many recent experts of
        # each stream are resident; the rest of the slots hold what the others want. A step that
        # demands more than the slots hold keeps what it asks for most, to about the same effect.
        own = experts * (1 - (1 - num_slots / experts) ** (1 / batch))
        hit_rate = self._one_stream(own / experts)
        by_others = (num_slots - own) / (experts - own)
        return Demand(demanded, demanded * (1 - hit_rate) * (1 - by_others))

    def _demanded(self) -> float:
        untouched = (1 - self._top_k / self._num_experts) ** self._batch
        return self._num_experts * (1 - untouched)

    def _one_stream(self, share: float) -> float:
        return share if self._curve is None else self._curve.hit_rate(share)


class TraceHitRates:
    """The runtime's own slots and LRU, replaying a recorded routing."""

    def __init__(self, trace: Trace, *, batch: int) -> None:
        """Raises TraceError when the trace has fewer tokens than the batch."""
        most = max(1, _MOST_LAYER_STEPS // trace.num_layers) * batch
        used = trace if trace.num_tokens <= most else _first_tokens(trace, most)
        self._trace = used.batched(batch)
        tokens = f"{self._trace.num_tokens} of {trace.num_tokens} tokens"
        self.origin = f"simulated: LRU on the trace, {tokens}, from an empty cache"
        self._by_slots: dict[int, Demand] = {}

    def demand(self, num_slots: int) -> Demand:
        if num_slots not in self._by_slots:
            result = simulate(self._trace, SimulationSettings(num_slots=num_slots, expert_bytes=1))
            layer_steps = result.num_steps * len(result.layers)
            demanded = sum(result.total(name) for name in ("hits", "late", "misses"))
            self._by_slots[num_slots] = Demand(
                demanded / layer_steps, result.demand_bytes / layer_steps
            )
        return self._by_slots[num_slots]


def _first_tokens(trace: Trace, count: int) -> Trace:
    return replace(
        trace,
        topk=trace.topk[:count],
        sequence=trace.sequence[:count],
        next_gate=None,
        step=None,
    )
