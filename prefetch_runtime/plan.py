"""What a GPU can hold of a model's experts, and how fast it would then decode: arithmetic only.

A decode step costs what it costs with every expert resident, plus the missed bytes over the link;
with perfect prefetching it would cost the larger of the two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefetch_runtime.config import ConfigError
from prefetch_runtime.hit_rates import UNIFORM, HitRates, create_hit_rates
from prefetch_runtime.model_sizes import ModelSizes
from prefetch_runtime.waves import (
    MOST_CAPTURED_WAVES,
    MOST_RING_ROWS,
    MOST_TOKENS_IN_WAVES,
    ring_bytes,
    rows_of_half,
    worst_waves,
)

Mode = Literal["full", "segmented", "eager", "resident"]
"""How a step runs; "resident": vLLM alone, without the cache. "eager" also where a mode with graphs
has none for the batch."""

# Of a step with every expert resident, what is not reading memory. Fitted to Qwen3-30B-A3B's shape
# in vLLM on one H200: 4.08 ms for 48 layers, 3.10 ms for 16 at batch 8 as one graph; without
# graphs, where the host is what the GPU waits for, 50 to 125 ms for 48 layers and 27 for 16.
GRAPH_STEP_US = 350.0
GRAPH_LAYER_US = 45.0
EAGER_LAYER_US = 1400.0
# What the host takes for a step however little the GPU has to do: 16 layers in one graph took 1.4
# to 2.7 ms at batch 1 in eight starts, with the cache and without.
HOST_STEP_US = 1900.0
# A layer that runs in waves, outside of any graph, on top of its copies, which hide the rest of the
# host's time: 13 to 19 ms for 16 layers.
WAVE_LAYER_US = 1000.0
# Each wave but the first of an MoE layer inside a graph: some ten small kernels, with experts or
# without; the experts themselves are in the resident step. 7.12 ms beside 4.27 in 48 layers of int4
# experts that all hit, two waves, on one H200; with misses, two to nine waves of 16 layers of bf16
# experts, steps of 50 to 142 ms, it is 3 % off.
GRAPH_WAVE_US = 59.0
# Mode segmented: what each MoE layer takes on top of one graph, all hit, without prediction. 48
# layers beside one H200's host: 52 us at batch 1, 69 at batch 8; 16 layers beside another: 76.
SEGMENT_HOST_US = 65.0
MEMORY_REACHED = 0.84
"""Share of a data sheet's memory bandwidth that a step reaches; from the same fit."""

UTILIZATION = 0.92
"""vLLM's own default of `--gpu-memory-utilization`."""
ACTIVATIONS_SHARE = 0.1
"""Of the memory that vLLM may use, for activations, graphs and wave rows; as size `auto` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and its link to host memory. Raises ConfigError for numbers that cannot be."""

    name: str
    gib: float
    memory_gbs: float
    """Bytes per second that a step reads weights at, in 1e9."""
    link_gbs: float
    memory_origin: str
    link_origin: str

    def __post_init__(self) -> None:
        for name, value in (
            ("a GPU's size", self.gib),
            ("a memory bandwidth", self.memory_gbs),
            ("a link bandwidth", self.link_gbs),
        ):
            if not 0 < value < 1e9:
                raise ConfigError(f"{name} must be positive and finite, got {value:g}")


@dataclass(frozen=True, slots=True)
class Card:
    """A common GPU of a size; bandwidths in 1e9 bytes/s: memory by its data sheet, link usable."""

    gib: int
    name: str
    memory_gbs: float
    link_gbs: float


# The link: 50 measured on PCIe 5.0 x16, half of it for PCIe 4.0, a quarter for its eight lanes.
CARDS = (
    Card(8, "RTX 4060", 272, 12.5),
    Card(12, "RTX 4070", 504, 25),
    Card(16, "RTX 4080", 717, 25),
    Card(24, "RTX 4090", 1008, 25),
    Card(32, "RTX 5090", 1792, 50),
    Card(48, "L40S", 864, 25),
    Card(80, "H100 SXM", 3350, 50),
    Card(141, "H200", 4800, 50),
)


def typical_gpu(
    gib: float, *, memory_gbs: float | None = None, link_gbs: float | None = None
) -> Gpu:
    """A GPU of a size, with the bandwidths, unless given, of the next smaller common one, or of the
    smallest."""
    card = max((c for c in CARDS if c.gib <= gib), key=lambda c: c.gib, default=CARDS[0])
    speed = "" if memory_gbs is not None and link_gbs is not None else f"; as fast as {card.name}"
    return Gpu(
        name=card.name if card.gib == gib else f"no common size{speed}",
        gib=gib,
        memory_gbs=card.memory_gbs * MEMORY_REACHED if memory_gbs is None else memory_gbs,
        link_gbs=card.link_gbs if link_gbs is None else link_gbs,
        memory_origin=(
            f"assumed: {MEMORY_REACHED:.0%} of the data sheet ({card.name})"
            if memory_gbs is None
            else "given"
        ),
        link_origin=f"assumed: usual ({card.name})" if link_gbs is None else "given",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is served, and how. Raises ConfigError for numbers that cannot be."""

    context: int
    """Tokens of each sequence that the KV cache must hold."""
    batch: int = 1
    mode: Literal["full", "segmented", "eager"] = "full"
    utilization: float = UTILIZATION
    """Share of the GPU that vLLM may use (`--gpu-memory-utilization`)."""
    staging_slots: int | Literal["auto"] = "auto"
    resident_ms: float | None = None
    """A measured step with every expert resident, instead of the model's."""
    host_us: float | None = None
    """Mode segmented: the host's time at each MoE layer; None: `SEGMENT_HOST_US`."""

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("batch", self.batch)):
            if not 1 <= value <= 1 << 31:
                raise ConfigError(f"{name} must be at least 1 (and at most 2**31), got {value}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(
                f"the share of GPU memory must be above 0 and at most 1, got {self.utilization:g}"
            )
        rows = self.staging_slots
        if rows != "auto" and not 2 <= rows <= MOST_RING_ROWS:
            raise ConfigError(f"staging slots must be 'auto' or 2 to {MOST_RING_ROWS}, got {rows}")
        if self.resident_ms is not None and not 0 < self.resident_ms < math.inf:
            raise ConfigError(f"a step's time must be positive, got {self.resident_ms:g} ms")
        if self.host_us is not None and not 0 <= self.host_us < 1e6:
            raise ConfigError(
                f"the host's time at a layer must be 0 to 1e6 us, got {self.host_us:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How a GPU's memory is divided. Bytes."""

    usable: int
    dense: int
    kv_cache: int
    staging: int
    activations: int
    left_for_slots: int
    """Negative when the rest does not fit either."""
    slots_per_layer: int
    """Most experts of each layer that fit, at most all; 0 when a token's do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A decode step with so many slots."""

    slots_per_layer: int
    slot_bytes: int
    mode: Mode
    waves: int
    """Most that an MoE layer may need, the slots' included; 1: the batch always fits."""
    hit_rate: float
    resident_ms: float
    copy_ms: float
    """The missed bytes over the link."""
    tokens_per_s: float
    """Of all sequences together, every miss waited for."""
    tokens_per_s_at_best: float
    """If every copy ran beside compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one GPU is good for."""

    gpu: Gpu
    memory: Memory
    estimates: Sequence[Estimate]
    """By slots, ascending, the last with the most that fit; empty when nothing fits."""
    uniform: Estimate | None
    """The last with uniform routing, which no eviction can help; None when nothing fits."""
    all_resident: Estimate
    """With every expert resident, whether they fit or not."""
    target: Estimate | None
    """The fewest slots that reach the target, whether they fit or not; None: nothing does, or
    no target was given."""

    @property
    def best(self) -> Estimate | None:
        """With the most slots that fit."""
        return self.estimates[-1] if self.estimates else None

    @property
    def all_fit(self) -> bool:
        """Whether every expert fits, so that no cache is needed."""
        return self.best is not None and self.best.mode == "resident"

    @property
    def target_fits(self) -> bool:
        return self.target is not None and (
            self.target.slots_per_layer <= self.memory.slots_per_layer
        )


class Planner:
    """Estimates for one model, GPU and workload."""

    def __init__(self, sizes: ModelSizes, gpu: Gpu, workload: Workload, rates: HitRates) -> None:
        self.sizes = sizes
        self.gpu = gpu
        self.workload = workload
        self.rates = rates

    def memory(self) -> Memory:
        """What is left for slots once everything else has its place."""
        sizes, workload = self.sizes, self.workload
        usable = int(self.gpu.gib * 2**30 * workload.utilization)
        # Two halves, as the runtime allocates them, for all layers together.
        staging = ring_bytes(
            workload.staging_slots, expert_bytes=sizes.expert_bytes, num_experts=sizes.num_experts
        )
        kv_cache = workload.batch * sizes.kv_bytes(workload.context)
        activations = int(ACTIVATIONS_SHARE * usable)
        left = usable - sizes.dense_bytes - kv_cache - activations
        if left >= sizes.experts_bytes:
            staging = 0  # vLLM alone needs none
        left -= staging
        slots = min(max(0, left) // sizes.slot_bytes(1), sizes.num_experts)
        return Memory(
            usable=usable,
            dense=sizes.dense_bytes,
            kv_cache=kv_cache,
            staging=staging,
            activations=activations,
            left_for_slots=left,
            slots_per_layer=slots if slots >= sizes.top_k else 0,
        )

    def estimate(self, slots: int, rates: HitRates | None = None) -> Estimate:
        """A decode step with `slots` per layer, whether they fit or not."""
        sizes, batch = self.sizes, self.workload.batch
        demand = (rates or self.rates).demand(slots)
        waves = self._waves(slots)
        mode = self._mode(slots, waves)
        absent = demand.absent if mode != "resident" else 0.0
        missed = sizes.num_moe_layers * absent * sizes.expert_bytes
        copy = missed / (self.gpu.link_gbs * 1e3)
        # The host prepares the next step meanwhile, and is no faster for a smaller model.
        host = self._host_us(mode)
        computed = self._resident_us(mode, demand.demanded, waves)
        resident = max(computed, host - copy)
        return Estimate(
            slots_per_layer=slots,
            slot_bytes=sizes.slot_bytes(slots),
            mode=mode,
            waves=waves,
            hit_rate=1 - absent / demand.demanded,
            resident_ms=resident / 1e3,
            copy_ms=copy / 1e3,
            tokens_per_s=batch * 1e6 / (resident + copy),
            tokens_per_s_at_best=batch * 1e6 / max(computed, copy, host),
        )

    def plan(self, *, target: float | None = None, ladder: bool = False) -> Plan:
        """What the GPU is good for.

        Args:
            target: tokens/s to find the fewest slots for.
            ladder: estimate fewer slots too, not just the most that fit.

        Raises:
            ConfigError: a target that is no positive number.
        """
        memory, sizes = self.memory(), self.sizes
        most = memory.slots_per_layer
        uniform = create_hit_rates(
            UNIFORM,
            num_experts=sizes.num_experts,
            top_k=sizes.top_k,
            batch=self.workload.batch,
        )
        return Plan(
            gpu=self.gpu,
            memory=memory,
            estimates=[self.estimate(slots) for slots in self._steps(most, ladder)],
            uniform=self.estimate(most, uniform) if most else None,
            all_resident=self.estimate(sizes.num_experts),
            target=None if target is None else self.smallest_for(target),
        )

    def _steps(self, most: int, ladder: bool) -> list[int]:
        if not most or not ladder:
            return [most] if most else []
        experts, top_k = self.sizes.num_experts, self.sizes.top_k
        steps = {top_k, *(experts * n // 8 for n in (1, 2, 3, 4, 6, 8)), self.widest(), most}
        return [slots for slots in sorted(steps) if top_k <= slots <= most]

    def smallest_for(self, tokens_per_s: float) -> Estimate | None:
        """The fewest slots that reach a speed, whether they fit or not; None: not even all do.

        Raises ConfigError for a speed that is no positive number.
        """
        if not 0 < tokens_per_s < math.inf:
            raise ConfigError(
                f"a target must be positive and finite, got {tokens_per_s:g} tokens/s"
            )
        low, high = self.sizes.top_k, self.sizes.num_experts
        if self.estimate(high).tokens_per_s < tokens_per_s:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.estimate(middle).tokens_per_s >= tokens_per_s:
                high = middle
            else:
                low = middle + 1
        return self.estimate(low)

    def _mode(self, slots: int, waves: int) -> Mode:
        workload = self.workload
        if slots >= self.sizes.num_experts:
            return "resident"
        if waves == 1:
            return workload.mode
        # Of what may not fit the slots, that is captured which `DeviceScheduler.captures` allows.
        is_captured = (
            workload.mode == "full"
            and workload.batch <= MOST_TOKENS_IN_WAVES
            and waves <= MOST_CAPTURED_WAVES
        )
        return "full" if is_captured else "eager"

    def _waves(self, slots: int) -> int:
        sizes = self.sizes
        return worst_waves(
            self.workload.batch * sizes.top_k,
            num_experts=sizes.num_experts,
            num_slots=slots,
            rows=self._rows_of_half(),
        )

    def _rows_of_half(self) -> int:
        sizes = self.sizes
        return rows_of_half(
            self.workload.staging_slots,
            expert_bytes=sizes.expert_bytes,
            num_experts=sizes.num_experts,
        )

    def widest(self) -> int:
        """Most experts that a step can demand of a layer; with as many slots it has no waves."""
        return min(self.workload.batch * self.sizes.top_k, self.sizes.num_experts)

    def _host_us(self, mode: Mode) -> float:
        """The least that a step takes, whatever the GPU does; 0 for a step that was given."""
        if self.workload.resident_ms is not None:
            return 0.0
        if mode == "eager":
            return EAGER_LAYER_US * self.sizes.num_layers
        return HOST_STEP_US + self._beside_us(mode)

    def _beside_us(self, mode: Mode) -> float:
        """What the host adds between segments."""
        if mode != "segmented":
            return 0.0
        host = SEGMENT_HOST_US if self.workload.host_us is None else self.workload.host_us
        return self.sizes.num_moe_layers * host

    def _resident_us(self, mode: Mode, demanded: float, waves: int) -> float:
        sizes, workload = self.sizes, self.workload
        beside = self._beside_us(mode)
        if mode == "full":
            beside += sizes.num_moe_layers * (waves - 1) * GRAPH_WAVE_US
        if workload.resident_ms is not None:
            return workload.resident_ms * 1e3 + beside
        read = (
            sizes.dense_read_bytes
            + sizes.num_moe_layers * demanded * sizes.expert_bytes
            + workload.batch * sizes.kv_bytes(workload.context)
        )
        reading = read / (self.gpu.memory_gbs * 1e3)
        if mode == "eager":
            layer_us = WAVE_LAYER_US if waves > 1 else EAGER_LAYER_US
            return max(reading, layer_us * sizes.num_layers)
        return reading + GRAPH_STEP_US + GRAPH_LAYER_US * sizes.num_layers + beside


def rounded(value: float, digits: int = 2) -> float:
    """A number with only as many digits as an estimate deserves."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
