"""Which experts of a layer follow which experts of an earlier layer, learned while it runs.

Expert-to-expert counts between layers, as in MoE-Infinity (arXiv 2401.14361) and others.
"""

import math
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from .base import Evidence, IdArray, PredictorShape, RunsOn, highest
from .learned import LearnedPredictor
from .npz import DEFAULT_MAX_BYTES

_ROW_LIMIT = 1 << 20
_ONE = np.int32(1)  # in the counts' type: np.add.at takes 5 to 30 times as long to cast a Python 1
_MAX_BYTES = DEFAULT_MAX_BYTES  # so that what is saved can be loaded


class _Chosen(NamedTuple):
    """What a layer chose in the running step."""

    ids: npt.NDArray[np.intp]
    has_padding: bool

    @classmethod
    def of(cls, topk_ids: IdArray) -> Self:
        ids = np.array(topk_ids, dtype=np.intp)
        return cls(ids, bool(np.minimum.reduce(ids, axis=None, initial=0) < 0))


class TransitionPredictor(LearnedPredictor):
    """Ranks by the sum, over the chosen experts e, of the share of f among what followed e.

    Rows of counts that have reached 2**20 are halved, so that they follow slow changes.
    """

    name: ClassVar[str] = "transition"
    runs_on: ClassVar[RunsOn] = RunsOn.HOST
    needs_guesses: ClassVar[bool] = False
    # A row is looked at when that many pairs have come, of all rows, and then halved once. So with
    # T tokens in a step a count is below 2 * (_ROW_LIMIT + T).
    highest: ClassVar[int] = 4 * _ROW_LIMIT

    def __init__(self, shape: PredictorShape) -> None:
        """Raises ValueError for so many experts that the counts would take more than a GiB."""
        self._shape = shape
        pairs = self.table_shape(shape)
        nbytes = 4 * math.prod(pairs)
        if nbytes > _MAX_BYTES:
            raise ValueError(
                f"predictor 'transition' counts pairs of experts, which would take "
                f"{nbytes / 2**30:.1f} GiB for {shape.num_experts} experts in {shape.num_layers} "
                f"layers, more than {_MAX_BYTES / 2**30:g}; choose another predictor"
            )
        self.counts = np.zeros(pairs, dtype=np.int32)
        """[layers - lookahead, experts of layer l, experts of layer l + lookahead] int32."""
        self._chosen: dict[int, _Chosen] = {}  # by layer, of the running step
        self._counted = 0  # since the last halving

    @classmethod
    def table_shape(cls, shape: PredictorShape) -> tuple[int, ...]:
        return shape.num_layers - shape.lookahead, shape.num_experts, shape.num_experts

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
        self._shape.check_target(layer_idx)
        ids = evidence.topk_ids.ravel().astype(np.intp)
        if ids.min(initial=0) < 0:
            ids = ids[ids >= 0]
        followers = self.counts[layer_idx - self._shape.lookahead].take(ids, axis=0)
        totals = np.add.reduce(followers, axis=1)
        return highest((1 / np.maximum(totals, 1)) @ followers, count)

    def observe(self, layer_idx: int, topk_ids: IdArray) -> None:
        """Raises ValueError if the tokens are not those of the earlier layer in this step."""
        self._shape.check_layer(layer_idx)
        if layer_idx == 0:
            self._chosen.clear()
        chosen = self._chosen[layer_idx] = _Chosen.of(topk_ids)
        source = layer_idx - self._shape.lookahead
        before = self._chosen.get(source)
        if before is None:
            return
        if len(before.ids) != len(chosen.ids):
            raise ValueError(
                f"layer {layer_idx} has {len(chosen.ids)} tokens where layer {source} had "
                f"{len(before.ids)}; show every layer of a step the same tokens"
            )
        left, right = before.ids[:, :, None], chosen.ids[:, None, :]
        pairs = left * self._shape.num_experts + right
        if before.has_padding or chosen.has_padding:
            pairs = pairs[(left >= 0) & (right >= 0)]
        np.add.at(self.counts[source].reshape(-1), pairs.ravel(), _ONE)
        self._counted += pairs.size
        if self._counted >= _ROW_LIMIT:
            self._counted = 0
            self.counts[self.counts.sum(axis=2) >= _ROW_LIMIT] >>= 1
