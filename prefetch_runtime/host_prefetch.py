"""Prefetch by the host: while a layer computes, the next layer's predicted experts are copied.

Only complete copies are published. A slot that is being filled stays reserved (the table's lease)
until its copy is seen done, whatever the demand turns out to be: nothing reuses it too early.
Shapes: T = tokens, K = top_k, G = guesses per token.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictors import MAX_FORECAST, Evidence, Predictor
from prefetch_runtime.copier import Copier, CopyJob, CopyTicket
from prefetch_runtime.host_store import LayerStore
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import SlotPlan, SlotTable

IntArray = npt.NDArray[np.signedinteger]

UNLIMITED_BYTES = 1 << 60
"""A budget for whatever the prediction names."""


class _Flight(NamedTuple):
    expert_id: int
    ticket: CopyTicket


class HostPrefetcher:
    """Owns the predictor and what is in flight; borrows a copier of its own lane.

    The lane is not the demand's, so that a demanded copy never waits behind a speculative one.
    """

    def __init__(
        self,
        predictor: Predictor,
        copier: Copier,
        *,
        num_layers: int,
        top_k: int,
        widen: int = 2,
        budget_bytes: int = UNLIMITED_BYTES,
    ) -> None:
        """
        Args:
            widen: experts that a prediction names, as a multiple of top_k, per token of the step.
            budget_bytes: of every layer and step, see `budgets`.
        """
        self.predictor = predictor
        """Asked and taught at every layer; may be replaced between steps."""
        self._copier = copier
        self._num_layers = num_layers
        self._top_k = top_k
        self._widen = widen
        self.budgets = [budget_bytes] * num_layers
        """Bytes of speculation per step, by layer; the last expert that they start is copied
        whole. 0 switches a layer's speculation off."""
        self._flights: dict[int, deque[_Flight]] = {}
        self._landed: dict[int, list[int]] = {}
        self._predicted_at: dict[int, float] = {}
        self.experts_read = [0] * num_layers
        self.at_once = [0] * num_layers
        """Prefetches that were there, and demanded, when the demand after them came."""
        self.free_seconds = [0.0] * num_layers
        """From the end of a prediction to the demand, on the host's clock."""

    @property
    def needs_guesses(self) -> bool:
        """Whether predictions need the next router's guesses (see `predictors.Evidence`)."""
        return self.predictor.needs_guesses

    def target_of(self, layer_idx: int) -> int | None:
        """The layer that is predicted once this one has chosen; None past the last."""
        return layer_idx + 1 if layer_idx + 1 < self._num_layers else None

    def land(self, layer_idx: int, table: SlotTable, now: int) -> bool:
        """Map the layer's prefetches whose copies are done. Returns whether the mapping changed."""
        predicted_at = self._predicted_at.pop(layer_idx, None)
        if predicted_at is not None:
            self.free_seconds[layer_idx] += time.perf_counter() - predicted_at
        flights = self._flights.get(layer_idx)
        arrived: list[int] = []
        while flights and self._copier.is_done(flights[0].ticket):
            arrived.append(flights.popleft().expert_id)
        if arrived:
            table.commit(arrived, now)
        self._landed[layer_idx] = arrived
        return bool(arrived)

    def join(self, layer_idx: int, plan: SlotPlan) -> None:
        """Make the compute stream wait for the copies of demanded experts that are under way, and
        for those whose slots the plan has taken for others."""
        landed = self._landed.pop(layer_idx, None)
        if landed:
            self.at_once[layer_idx] += int(np.isin(landed, plan.hits).sum())
        if plan.late.size + plan.dropped.size == 0:
            return
        ended = {*plan.late.tolist(), *plan.dropped.tolist()}
        flights = self._flights[layer_idx]
        for flight in flights:
            if flight.expert_id in ended:
                # RAW for the late; WAW for the dropped: the demand copy into the slot follows what
                # the compute stream has been given, and so this copy too.
                self._copier.wait(flight.ticket)
        self._flights[layer_idx] = deque(f for f in flights if f.expert_id not in ended)

    def predict(
        self,
        layer_idx: int,
        topk_ids: IntArray,
        guesses: IntArray | None,
        *,
        store: LayerStore,
        buffers: SlotBuffers,
        table: SlotTable,
        now: int,
    ) -> bool:
        """Predict layer `target_of(layer_idx)`, whose store, slots and table are given, and start
        its copies. Returns whether the table has changed.

        `topk_ids` [T, K]: what layer `layer_idx` chose, -1 in padding rows. `guesses` [T, G].
        """
        target = self.target_of(layer_idx)
        assert target is not None
        limit = self._limit(target, store.layout.payload_bytes)
        num_tokens = int((topk_ids >= 0).any(axis=1).sum())
        count = min(MAX_FORECAST, self._widen * self._top_k * num_tokens)
        if limit == 0 or count == 0:
            self._predicted_at[target] = time.perf_counter()
            return False
        forecast = self.predictor.predict(target, Evidence(topk_ids, guesses), count)
        experts, slots = table.reserve(forecast, now, limit)
        flights = self._flights.setdefault(target, deque())
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            # One submit each, so that each is seen to be done by itself. WAR: after the compute
            # stream's last reader of the slot.
            ticket = self._copier.submit([CopyJob(store, expert, buffers, slot)])
            flights.append(_Flight(expert, ticket))
        self.experts_read[target] += experts.size
        self._predicted_at[target] = time.perf_counter()
        return bool(experts.size)

    def observe(self, layer_idx: int, topk_ids: IntArray) -> None:
        """Let the predictor learn what a layer chose, [T, K]."""
        self.predictor.observe(layer_idx, topk_ids)

    def clear(self) -> None:
        """Wait for the copies and forget them; the caller clears the tables."""
        self._copier.synchronize()
        self._flights.clear()
        self._landed.clear()
        self._predicted_at.clear()
        self.experts_read = [0] * self._num_layers
        self.at_once = [0] * self._num_layers
        self.free_seconds = [0.0] * self._num_layers

    def close(self) -> None:
        """Drain the lane. Safe to call twice."""
        self._flights.clear()
        self._copier.close()

    def _limit(self, layer_idx: int, expert_bytes: int) -> int:
        return math.ceil(min(self.budgets[layer_idx] / expert_bytes, MAX_FORECAST))


def fits_predictor(num_experts: Sequence[int]) -> bool:
    """Whether all layers have the same number of experts, which predictors assume."""
    return len(set(num_experts)) <= 1
