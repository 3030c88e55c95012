"""Replays a recorded routing through the runtime's own slots, policies and predictors.

The link and the compute are a model, so that a setting can be judged without a GPU. A step goes
through the layers in order. In layer l:

1. prefetches for l end: whole ones are mapped, partial ones are kept if demanded, else dropped;
2. the demand is planned; the copies of absent experts and the rest of late ones are the stall;
3. experts of l + lookahead are predicted, and slots reserved for the absent ones in the budget;
4. for `compute_us`, until the next layer's demand, the link carries prefetches, those of the
   nearest layer first.

So speculation never delays a demand, as in the runtime. Not modelled: the slowdown of compute
while the link is busy, launch costs, and copies too small to fill the link.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from predictors import (
    LEARNED,
    MAX_FORECAST,
    Evidence,
    IdArray,
    LearnedPredictor,
    Predictor,
    PredictorShape,
    create_predictor,
    learned_class,
)

from .policies import EvictionPolicy, IntArray, create_policy
from .slots import SlotTable
from .trace import Trace
from .waves import cut_by_token

_NEVER_AGAIN = 1 << 29

BELADY = "belady"
"""Policy name of the bound: evicts what is needed again last. Only a trace can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """One setting to replay a trace with. Raises ValueError for values that cannot be."""

    num_slots: int
    policy: str = "lru"
    predictor: str = "none"
    predictor_table: Path | None = None
    """A file of what the predictor has learned before."""
    link_gbs: float = 50.0
    """Bandwidth of the link in 1e9 bytes/s; infinity makes every prefetch whole in time."""
    expert_bytes: int = 9 << 20
    compute_us: float = 85.0
    """From one layer's demand to the next layer's, without stalls."""
    widen: int = 2
    """Experts that a prediction names, as a multiple of top_k, per token of the step."""
    max_forecast: int = MAX_FORECAST
    """Most experts that a prediction names in all."""
    lookahead: int = 1
    budget_bytes: int | None = None
    """Bytes of speculation per layer and step; None: what the link carries in `compute_us`."""
    wide_steps: Literal["expert", "token"] = "expert"
    """How a step that needs more experts than slots is split: as on a GPU, or as on a CPU."""
    wide_if_it_might: bool = False
    """Whether a step is split as soon as its experts might not fit, as in mode `full`, which does
    not look at them first."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "expert_bytes", "widen", "max_forecast", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("link_gbs", "compute_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not math.isfinite(self.compute_us):
            raise ValueError(f"compute_us must be finite, got {self.compute_us}")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {self.budget_bytes}")
        if self.wide_steps not in ("expert", "token"):
            raise ValueError(f"wide_steps must be 'expert' or 'token', got {self.wide_steps!r}")

    @property
    def window_bytes(self) -> float:
        """What the link carries while one layer computes."""
        return self.compute_us * self.link_gbs * 1e3

    @property
    def layer_budget(self) -> float:
        """Bytes of speculation per layer and step."""
        return self.window_bytes if self.budget_bytes is None else self.budget_bytes

    @property
    def reserve_limit(self) -> int:
        """Prefetches of one layer and step that the budget starts; the last may stay partial."""
        affordable = min(self.layer_budget / self.expert_bytes, self.max_forecast)
        return math.ceil(affordable)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Counters of one layer over the trace; see `SlotCounters`."""

    hits: int
    late: int
    misses: int
    evictions: int
    prefetched: int
    prefetch_used: int
    prefetch_dropped: int
    stall_us: float

    @property
    def hit_rate(self) -> float:
        demanded = self.hits + self.late + self.misses
        return self.hits / demanded if demanded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What one setting gives. Rates from 0 to 1; bytes and counts over the whole trace."""

    settings: SimulationSettings
    num_tokens: int
    num_steps: int
    layers: Sequence[LayerResult]
    useful_bytes: int
    """Prefetches that were whole at their first demand."""
    late_bytes: int
    """What had been copied, at their demand, of prefetches that were not whole."""
    wasted_bytes: int
    """Copied for prefetches that were dropped, or evicted before any demand."""
    demand_bytes: int
    """Copied while a layer waited: absent experts, and the rest of late ones."""
    absent_when_predicted: int
    """Demanded experts of predicted layers that were absent when the prediction was made."""
    absent_and_predicted: int
    """Those of them that the prediction named."""
    belady_hit_rate: float | None = None
    """Bound for eviction without prediction, same slots; None until `simulate_grid` fills it."""

    @property
    def hit_rate(self) -> float:
        """Mean over layers of the share of demanded experts that were resident."""
        return float(np.mean([layer.hit_rate for layer in self.layers]))

    @property
    def recall_among_misses(self) -> float | None:
        """Share of the experts that had to come that the prediction named; None if none had to, or
        nothing was predicted."""
        if not self.absent_when_predicted:
            return None
        return self.absent_and_predicted / self.absent_when_predicted

    @property
    def stall_us_per_step(self) -> float:
        return math.fsum(layer.stall_us for layer in self.layers) / self.num_steps

    @property
    def step_us(self) -> float:
        """Mean time of a step: compute and stall of all layers."""
        return len(self.layers) * self.settings.compute_us + self.stall_us_per_step

    def total(self, counter: str) -> int:
        """Sum of one counter over the layers."""
        return sum(int(getattr(layer, counter)) for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Numbers and text only, for JSON; None: infinite bandwidth, a rate of nothing."""
        settings = asdict(self.settings)
        if math.isinf(self.settings.link_gbs):
            settings["link_gbs"] = None
        if self.settings.predictor_table is not None:
            settings["predictor_table"] = str(self.settings.predictor_table)
        counters = [field for field in LayerResult.__slots__ if field != "stall_us"]
        return {
            **settings,
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "hit_rate": self.hit_rate,
            "belady_hit_rate": self.belady_hit_rate,
            "recall_among_misses": self.recall_among_misses,
            "stall_us_per_step": self.stall_us_per_step,
            "step_us": self.step_us,
            "useful_bytes": self.useful_bytes,
            "late_bytes": self.late_bytes,
            "wasted_bytes": self.wasted_bytes,
            "demand_bytes": self.demand_bytes,
            **{name: self.total(name) for name in counters},
            "layers": [{**asdict(layer), "hit_rate": layer.hit_rate} for layer in self.layers],
        }


class BeladyPolicy(EvictionPolicy):
    """Evicts the expert whose next demand is farthest away (Belady, IBM Systems Journal 1966)."""

    name: ClassVar[str] = BELADY
    units_per_step: ClassVar[int] = 1

    def __init__(self, uses: Sequence[Sequence[int]], *, by_run: bool = False) -> None:
        """
        Args:
            uses: for each expert, the steps that demand it, ascending, the first step being 1. A
                step may stand there more than once.
            by_run: `uses` are runs of tokens that are planned together, in place of steps; see
                `begin_run`.
        """
        self._uses = uses
        self._run = 0 if by_run else None

    def begin_run(self) -> None:
        """The next run is planned: a wide step that is split by token has several."""
        if self._run is not None:
            self._run += 1

    def hit(self, scores: IntArray, expert_ids: npt.NDArray[np.intp], now: int) -> IntArray:  # noqa: ARG002
        return self.insert(expert_ids, now)

    def insert(self, expert_ids: npt.NDArray[np.intp], now: int) -> IntArray:
        at = now if self._run is None else self._run
        return np.array([-self._next_use(e, at) for e in expert_ids.tolist()], dtype=np.int32)

    def _next_use(self, expert_id: int, at: int) -> int:
        uses = self._uses[expert_id]
        index = bisect_right(uses, at)
        return uses[index] if index < len(uses) else _NEVER_AGAIN


@dataclass(slots=True)
class _Layer:
    """One layer while it is simulated."""

    table: SlotTable
    incoming: dict[int, float] = field(default_factory=dict)
    """Prefetches for the running step in the order of copying: bytes copied, by expert."""
    budget_left: float = 0.0
    stall_bytes: float = 0.0


@dataclass(slots=True)
class _Totals:
    late_bytes: float = 0.0
    lost: int = 0
    """Prefetches that were neither whole nor demanded when their layer came."""
    lost_bytes: float = 0.0
    demand_bytes: float = 0.0
    absent: int = 0
    named: int = 0


def simulate(trace: Trace, settings: SimulationSettings) -> SimulationResult:
    """Replay a trace with one setting.

    Raises ValueError: more slots than experts, fewer than one token needs, an unknown policy or
    predictor, a lookahead past the last layer, a predictor without the guesses that it needs, a
    table that is not the predictor's or of another model. OSError: a table that cannot be read.
    """
    _check_cache(trace, settings)
    return _replay(trace, settings)


def _replay(trace: Trace, settings: SimulationSettings) -> SimulationResult:
    """`simulate`, with slots and policy that have been checked."""
    predictor = _create_predictor(trace, settings)
    bounds = trace.step_bounds().tolist()
    layers = [
        _Layer(SlotTable(trace.num_experts, settings.num_slots, policy, layer_idx))
        for layer_idx, policy in enumerate(_policies(trace, settings, bounds))
    ]
    limits = settings.reserve_limit, settings.layer_budget
    totals = _Totals()
    lookahead = settings.lookahead
    for now, (start, stop) in enumerate(pairwise(bounds), start=1):
        rows = slice(start, stop)
        in_step = trace.sequence[rows].tolist()
        decodes = len(set(in_step)) == len(in_step)
        count = min(settings.max_forecast, settings.widen * trace.top_k * (stop - start))
        # [layers, tokens, top_k], in the type that slots and predictors index with.
        demands = list(trace.topk[rows].swapaxes(0, 1).astype(np.intp))
        guesses = None if trace.next_gate is None else trace.next_gate[rows].swapaxes(0, 1)
        for layer_idx, layer in enumerate(layers):
            topk_ids = demands[layer_idx]
            is_wide = _demand(layer, topk_ids, now, settings, totals, decodes=decodes)
            if predictor is None:
                continue
            predictor.observe(layer_idx, topk_ids)
            target = layer_idx + lookahead
            if target < trace.num_layers and not is_wide:
                truth = demands[target]
                next_gate = guesses[target - 1] if guesses is not None and lookahead == 1 else None
                forecast = predictor.predict(target, Evidence(topk_ids, next_gate, truth), count)
                _prefetch(layers[target], forecast, truth, now, totals, *limits)
            _carry(layers[layer_idx + 1 : target + 1], settings)
    return _result(trace, settings, layers, totals, num_steps=len(bounds) - 1)


def learn(trace: Trace, settings: SimulationSettings) -> LearnedPredictor:
    """What `settings.predictor` has learned when it has seen the whole trace, as in `simulate`.

    Raises as `simulate`, and ValueError for a predictor that keeps no table.
    """
    learned_class(settings.predictor)
    predictor = _create_predictor(trace, settings)
    assert isinstance(predictor, LearnedPredictor)
    for start, stop in pairwise(trace.step_bounds().tolist()):
        for layer_idx in range(trace.num_layers):
            predictor.observe(layer_idx, trace.topk[start:stop, layer_idx].astype(np.intp))
    return predictor


def simulate_grid(
    trace: Trace, settings: SimulationSettings, *,
    num_slots: Iterable[int], policies: Iterable[str], predictors: Iterable[str],
) -> list[SimulationResult]:  # fmt: skip
    """Every combination, everything else as in `settings`, with Belady's bound beside each.

    `predictor_table` goes to those that learn. Raises as `simulate` does, before anything is
    replayed, and ValueError for a table where nothing learns.
    """
    policies, predictors = list(policies), list(predictors)
    table = settings.predictor_table
    if table is not None and not LEARNED.keys() & set(predictors):
        learned_class(predictors[0])  # says which do

    def guessing(cache: SimulationSettings, name: str) -> SimulationSettings:
        of_it = table if name in LEARNED else None
        return replace(cache, predictor=name, predictor_table=of_it)

    caches = [
        replace(settings, num_slots=slots, policy=policy)
        for slots in num_slots
        for policy in policies
    ]
    for cache in caches:
        _check_cache(trace, cache)
    for name in predictors:
        _create_predictor(trace, guessing(settings, name))  # whether it can be
    combinations = [guessing(cache, name) for cache in caches for name in predictors]
    bounds: dict[int, float] = {}
    results = []
    for combination in combinations:
        slots = combination.num_slots
        result = _replay(trace, combination)
        if slots not in bounds:
            bounds[slots] = belady_hit_rate(trace, slots, wide_steps=settings.wide_steps)
        results.append(replace(result, belady_hit_rate=bounds[slots]))
    return results


def belady_hit_rate(
    trace: Trace, num_slots: int, *, wide_steps: Literal["expert", "token"] = "expert"
) -> float:
    """The best that eviction alone can do with so many slots per layer, 0 to 1."""
    settings = SimulationSettings(num_slots=num_slots, policy=BELADY, wide_steps=wide_steps)
    return simulate(trace, settings).hit_rate


def to_json(results: Iterable[SimulationResult]) -> str:
    """A JSON array, one object per setting."""
    return json.dumps([result.as_dict() for result in results], indent=2, allow_nan=False)


def check_plot(path: Path | str) -> None:
    """Whether `plot` can draw into a file of this name, before anything is replayed for it.

    Raises:
        ImportError: there is no matplotlib (the extra `plot`).
        ValueError: a name that tells no format, or no folder to put it into.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower()[1:] not in formats:
        raise ValueError(f"its name must end in .png or another of {', '.join(formats)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError("it is a folder" if path.is_dir() else f"there is no folder {path.parent}")


def plot(results: Sequence[SimulationResult], path: Path | str) -> None:
    """Draw hit rate and stall against slots, a line per policy and predictor, into an image file.

    Raises what `check_plot` does, and OSError if the file cannot be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    hit_axis, stall_axis = figure.subplots(1, 2)
    lines: dict[str, list[SimulationResult]] = {}
    for result in sorted(results, key=lambda r: r.settings.num_slots):
        name = f"{result.settings.policy}, {result.settings.predictor}"
        lines.setdefault(name, []).append(result)
    bound = {
        r.settings.num_slots: r.belady_hit_rate for r in results if r.belady_hit_rate is not None
    }
    for name, points in lines.items():
        slots = [point.settings.num_slots for point in points]
        hit_axis.plot(slots, [100 * p.hit_rate for p in points], marker="o", label=name)
        stall_axis.plot(slots, [p.stall_us_per_step / 1e3 for p in points], marker="o", label=name)
    if bound:
        slots = sorted(bound)
        hit_axis.plot(
            slots, [100 * bound[n] for n in slots], "k--", marker="_", label="belady, none"
        )
    hit_axis.set(xlabel="slots per layer", ylabel="demanded experts resident (%)")
    stall_axis.set(xlabel="slots per layer", ylabel="stall per step (ms)", ylim=(0, None))
    hit_axis.legend()
    for axis in (hit_axis, stall_axis):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _check_cache(trace: Trace, settings: SimulationSettings) -> None:
    """Raise ValueError for slots or a policy that do not fit the trace, as `simulate` says."""
    if settings.num_slots < trace.top_k:
        raise ValueError(
            f"num_slots={settings.num_slots} cannot hold one token's {trace.top_k} experts; use "
            f"at least {trace.top_k}"
        )
    name = "lru" if settings.policy == BELADY else settings.policy  # Belady's would be read now
    SlotTable(trace.num_experts, settings.num_slots, _create_policy(name))


def _create_policy(name: str) -> EvictionPolicy:
    try:
        return create_policy(name)
    except ValueError as e:
        raise ValueError(f"{e} (or {BELADY!r}, the bound)") from None


def _create_predictor(trace: Trace, settings: SimulationSettings) -> Predictor | None:
    """None stands for no prediction, so that a replay without it does no needless work."""
    if trace.num_layers == 1 and settings.predictor == "none":
        return None  # no layer to look ahead to, and no need
    shape = PredictorShape(
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        lookahead=settings.lookahead,
    )
    predictor = create_predictor(settings.predictor, shape, table=settings.predictor_table)
    if predictor.needs_guesses and trace.next_gate is None:
        raise ValueError(
            f"predictor {predictor.name!r} needs the array next_gate, which this trace does not "
            "have; record it with the guesses or choose another predictor"
        )
    return None if predictor.name == "none" else predictor


def _policies(
    trace: Trace, settings: SimulationSettings, bounds: Sequence[int]
) -> Iterable[EvictionPolicy]:
    if settings.policy != BELADY:
        return [_create_policy(settings.policy) for _ in range(trace.num_layers)]
    by_run = settings.wide_steps == "token"
    step_of = np.repeat(np.arange(1, len(bounds)), np.diff(bounds))
    policies = []
    for layer_idx in range(trace.num_layers):
        topk_ids = trace.topk[:, layer_idx]
        at = _run_of(topk_ids, bounds, settings.num_slots) if by_run else step_of
        policies.append(BeladyPolicy(_uses(topk_ids, at, trace.num_experts), by_run=by_run))
    return policies


def _run_of(
    topk_ids: npt.NDArray[np.int16], bounds: Sequence[int], num_slots: int
) -> npt.NDArray[np.intp]:
    """[T] the number, from 1, of the run that each token is planned in; most steps are one."""
    run_of = np.zeros(len(topk_ids), dtype=np.intp)
    count = 0
    for start, stop in pairwise(bounds):
        for run in cut_by_token(topk_ids[start:stop], num_slots):
            count += 1
            run_of[start:stop][run] = count
    return run_of


def _uses(
    topk_ids: npt.NDArray[np.int16], at: npt.NDArray[np.intp], num_experts: int
) -> list[list[int]]:
    """For every expert, the steps or runs `at` which it is demanded, ascending, once per token."""
    uses: list[list[int]] = [[] for _ in range(num_experts)]
    for number, experts in zip(at.tolist(), topk_ids.tolist(), strict=True):
        for expert in experts:
            uses[expert].append(number)
    return uses


def _demand(
    layer: _Layer,
    topk_ids: IdArray,
    now: int,
    settings: SimulationSettings,
    totals: _Totals,
    *,
    decodes: bool,
) -> bool:
    """End the layer's prefetches and serve its demand. Returns whether the step is wide."""
    table, expert_bytes = layer.table, settings.expert_bytes
    # Few ids cannot need more experts than there are slots.
    is_wide = min(topk_ids.size, table.num_experts) > table.num_slots and (
        settings.wide_if_it_might or len(np.unique(topk_ids)) > table.num_slots
    )
    copied = layer.incoming
    if copied:
        # What a wide step needs comes with its waves; it does not wait for single experts.
        wanted = set[int]() if is_wide else set(topk_ids.ravel().tolist())
        lost = [e for e, nbytes in copied.items() if nbytes < expert_bytes and e not in wanted]
        whole = [e for e, nbytes in copied.items() if nbytes >= expert_bytes]
        if whole:
            table.commit(whole, now)
        if lost:
            table.cancel(lost)
            totals.lost += len(lost)
            totals.lost_bytes += sum(copied[e] for e in lost)
    if is_wide and settings.wide_steps == "expert":
        wide, streamed = table.plan_wide(topk_ids, now, evict=decodes)
        needed = float((wide.loads.size + wide.late.size + streamed.size) * expert_bytes)
    else:
        runs = cut_by_token(topk_ids, table.num_slots) if is_wide else [slice(None)]
        needed = 0.0
        for run in runs:
            if isinstance(table.policy, BeladyPolicy):
                table.policy.begin_run()
            plan = table.plan(topk_ids[run], now)
            needed += plan.loads.size * expert_bytes
            for expert in plan.late.tolist():
                totals.late_bytes += copied[expert]
                needed += expert_bytes - copied[expert]
    if copied:
        copied.clear()
    totals.demand_bytes += needed
    layer.stall_bytes += needed
    return is_wide


def _prefetch(
    layer: _Layer, forecast: list[int], truth: IdArray, now: int, totals: _Totals,
    limit: int, budget: float,
) -> None:  # fmt: skip
    """Reserve slots for a forecast of the layer, and note how good it is."""
    table = layer.table
    chosen = truth.ravel()
    slots = table.mapping[chosen].tolist()
    coming = {e for e, slot in zip(chosen.tolist(), slots, strict=True) if slot < 0}
    totals.absent += len(coming)
    totals.named += len(coming.intersection(forecast))
    if forecast and limit:
        taken, _ = table.reserve(forecast, now, limit)
        layer.incoming = dict.fromkeys(taken.tolist(), 0.0)
        layer.budget_left = budget


def _carry(layers: Iterable[_Layer], settings: SimulationSettings) -> None:
    """Copy prefetches for as long as one layer computes, nearest layer first."""
    link_left = settings.window_bytes
    for layer in layers:
        for expert, nbytes in layer.incoming.items():
            moved = min(settings.expert_bytes - nbytes, link_left, layer.budget_left)
            layer.incoming[expert] = nbytes + moved
            layer.budget_left -= moved
            link_left -= moved


def _result(
    trace: Trace, settings: SimulationSettings, layers: Sequence[_Layer], totals: _Totals,
    num_steps: int,
) -> SimulationResult:  # fmt: skip
    results = [
        LayerResult(
            **asdict(layer.table.counters),
            stall_us=layer.stall_bytes / (settings.link_gbs * 1e3),
        )
        for layer in layers
    ]
    evicted_unused = sum(layer.prefetch_dropped for layer in results) - totals.lost
    return SimulationResult(
        settings=settings,
        num_tokens=trace.num_tokens,
        num_steps=num_steps,
        layers=results,
        useful_bytes=sum(layer.prefetch_used for layer in results) * settings.expert_bytes,
        late_bytes=round(totals.late_bytes),
        wasted_bytes=round(totals.lost_bytes) + evicted_unused * settings.expert_bytes,
        demand_bytes=round(totals.demand_bytes),
        absent_when_predicted=totals.absent,
        absent_and_predicted=totals.named,
    )
