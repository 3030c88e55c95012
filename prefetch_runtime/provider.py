"""The weight-provider contract (vLLM RFC 38256): kernels get weights and ids, not where they are.

Shapes: T = tokens, K = top_k, C = capacity (rows of the weight tensors: experts or slots).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from prefetch_runtime.scheduler import Scheduler


@dataclass(slots=True)
class ExpertWeightResult:
    """What an expert kernel needs for one call. The tensors keep their addresses between calls."""

    w1: torch.Tensor
    """[C, ...] gate and up projection (vLLM's w13), on the device, fixed address."""
    w2: torch.Tensor
    """[C, ...] down projection, on the device, fixed address."""
    topk_ids: torch.Tensor
    """[T, K] rows of `w1` and `w2`, dtype as asked; always remapped. -1 where the id given was -1
    or, under an expert map, belongs to another rank."""
    w1_scale: torch.Tensor | None = None
    """[C, ...] scale of `w1`, indexed like it; None for unquantised weights."""
    w2_scale: torch.Tensor | None = None
    """[C, ...] scale of `w2`, indexed like it; None for unquantised weights."""


class ExpertWeightProvider(ABC):
    """Hands an expert kernel the weights of the experts that its tokens were routed to."""

    @abstractmethod
    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """Make the demanded experts resident and rename their ids to rows of the weights.

        Changes which experts are resident. The result is valid until the next `prepare` of the
        same layer. Must be called outside any compiled region; it may block the host until the ids
        are known, and it allocates nothing on the device but the ids it returns.

        Args:
            topk_ids: [T, K] int32 or int64 on the device, -1 for rows without a token.

        Raises:
            NotEnoughSlots: more distinct experts than slots; the message names the option and the
                value to set. Nothing has changed then.
        """


class FullGPUProvider(ExpertWeightProvider):
    """Every expert is on the device already: returns what exists, and allocates nothing."""

    def __init__(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
    ) -> None:
        self._tensors = (w1, w2, w1_scale, w2_scale)

    def prepare(self, topk_ids: torch.Tensor) -> ExpertWeightResult:
        """The weights as they are, and `topk_ids` itself: expert and row are the same number."""
        w1, w2, w1_scale, w2_scale = self._tensors
        return ExpertWeightResult(w1, w2, topk_ids, w1_scale, w2_scale)


class CachedWeightProvider(ExpertWeightProvider):
    """A slot cache over a host store: one layer's view of the scheduler that owns both."""

    def __init__(self, scheduler: "Scheduler", layer_idx: int) -> None:
        self._scheduler = scheduler
        self._layer_idx = layer_idx
        tensors = scheduler.slot_buffers(layer_idx).tensors
        missing = [name for name in ("w13_weight", "w2_weight") if name not in tensors]
        if missing:
            raise ValueError(
                f"layer {layer_idx} has no tensor {missing[0]!r} among {sorted(tensors)}; "
                "the contract needs both projections"
            )
        self._tensors = tensors

    def prepare(
        self,
        topk_ids: torch.Tensor,
        *,
        padding: torch.Tensor | None = None,
        guesses: Callable[[], torch.Tensor] | None = None,
    ) -> ExpertWeightResult:
        """Bring in what is absent, publish the mapping, and rename the ids to slots.

        `padding`: rows that belong to no token and cost nothing; `guesses`: makes what the next
        layer's router would choose. See `Scheduler.fetch`.
        """
        slot_ids = self._scheduler.fetch(
            self._layer_idx, topk_ids, padding=padding, guesses=guesses
        )
        tensors = self._tensors
        return ExpertWeightResult(
            tensors["w13_weight"],
            tensors["w2_weight"],
            slot_ids,
            _scale_of(tensors, "w13"),
            _scale_of(tensors, "w2"),
        )


def _scale_of(tensors: Mapping[str, torch.Tensor], projection: str) -> torch.Tensor | None:
    """What vLLM's methods call the scale of a projection; None for unquantised weights."""
    for ending in ("weight_scale", "weight_scale_inv", "scales"):
        if f"{projection}_{ending}" in tensors:
            return tensors[f"{projection}_{ending}"]
    return None
