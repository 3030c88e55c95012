"""Counters of the expert cache, read as a snapshot."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """What one MoE layer's cache has done since the last reset.

    Hits and misses count *distinct* experts per layer and step (per wave of tokens on a CPU
    device), not (token, k) assignments.
    """

    layer_idx: int
    layer_name: str
    num_experts: int
    num_slots: int
    steps: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    late: int = 0
    """Demanded while their prefetch was under way."""
    prefetched: int = 0
    """Brought in before any demand."""
    prefetch_used: int = 0
    """Prefetched, and whole at their first demand; counted once, and also one of `hits`."""
    prefetch_at_once: int = 0
    """Of these, demanded in the very step that they were predicted for."""
    prefetch_dropped: int = 0
    """Prefetched and given up, or evicted before any demand."""
    waves: int = 0
    bytes_copied: int = 0
    """Copied because they were demanded."""
    bytes_prefetched: int = 0
    """Copied because they were predicted; of these, so far:"""
    bytes_useful: int = 0
    """... there in time for their first demand."""
    bytes_late: int = 0
    """... demanded while they were under way."""
    bytes_wasted: int = 0
    """... given up, or evicted before any demand."""
    stall_seconds: float = 0.0
    """Compute waited so long for the copies of what it demanded. On a CPU the copies' own time;
    0 where kernels are interpreted, which have no clock."""
    link_free_seconds: float = 0.0
    """From the layer's predictions to its demands: what the link had for prefetches."""
    prefetch_budget_bytes: int = 0
    """What a step may prefetch for the layer now; 0 where speculation is off."""

    @property
    def hit_rate(self) -> float:
        """Share of demanded experts already resident, 0 to 1; 0.0 before any demand."""
        demanded = self.hits + self.late + self.misses
        return self.hits / demanded if demanded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStats:
    """Counters of all layers, and the memory that the cache holds."""

    mode: str
    mode_reason: str = ""
    """Why that mode and no other."""
    policy: str
    predictor: str = "none"
    slot_bytes: int
    staging_bytes: int
    host_bytes: int
    pinned_bytes: int
    steps_with_misses: int = 0
    """Steps in which a demanded expert of any layer was absent."""
    host_calls: int = 0
    """MoE layer calls that the host made, one per layer and forward. Replays of a captured graph
    make none, so that a decode step that ran as one graph does not show here."""
    layers: Sequence[LayerStats]

    def total(self, counter: str) -> int:
        """Sum of one integer counter over the layers."""
        return sum(int(getattr(layer, counter)) for layer in self.layers)

    @property
    def stall_seconds(self) -> float:
        """Waited for demanded experts, over all layers."""
        return math.fsum(layer.stall_seconds for layer in self.layers)

    @property
    def hit_rate(self) -> float:
        """Share of demanded experts already resident over all layers, 0 to 1."""
        demanded = self.total("hits") + self.total("late") + self.total("misses")
        return self.total("hits") / demanded if demanded else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as a worker returns them over RPC."""
        return {**asdict(self), "layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RuntimeStats":
        """The inverse of `as_dict`."""
        return cls(**{**values, "layers": [LayerStats(**layer) for layer in values["layers"]]})
