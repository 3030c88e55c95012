"""How much each layer may prefetch in a step, from what speculation has brought so far.

Two questions, answered per layer from the counters:

- How much fits? The link is free for a layer's prefetches from its prediction until its demand.
  That time, times the speed at which demanded experts come to the first layer, which nothing
  predicts, is the budget.
- Does it pay? Bytes that were there when the demand that they were predicted for came saved at most
  their own time on the link; what they really saved is the stall that the layer would have had
  without them, at the first layer's speed, less the stall that it had. All other bytes were for
  nothing, or for later, when what they displaced would have served as well. What is copied ahead
  of the demand slows the compute beside it; the rest of a demanded expert is waited for either way.
  And what made room may be demanded in the same step: as likely as any absent expert, at least.

A layer whose balance is negative is switched off, and tried again after a while that doubles with
every failure; it stays on only while what it saves is clearly more than what it costs. No device,
no clock of its own: numbers in, budgets out.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from prefetch_runtime.stats import LayerStats

logger = logging.getLogger(__name__)

COMPUTE_SLOWDOWN = 0.05
"""Share by which compute slows down while the link is busy beside it: 0.01 to 0.05 in decode steps
on one H200 (`benchmarks/README.md`, Prediction)."""
ON_ABOVE = 0.10
"""A trial succeeds above this balance: net time saved, as a share of the time of copies ahead of
their demand."""
OFF_BELOW = 0.0
"""Speculation ends below this balance."""
FIRST_RETRY_STEPS = 1024
LAST_RETRY_STEPS = 1 << 20
SMALLEST_SHARE = 0.1
"""Of an expert: a budget below it is none, for a whole slot would be given for so little."""
TRIALS = 3
"""Failed by every layer: then it is said that prediction does not pay."""
_EVIDENCE_EXPERTS = 16
"""Experts that must have been prefetched before they are judged."""
_SMOOTHING = 0.3
_DEAD_BAND = 0.1
_LINK_EVIDENCE_EXPERTS = 32
"""Experts that must have come to the first layer before their speed is believed."""
_SLOWEST, _FASTEST = 1e8, 1e12


@dataclass(frozen=True, slots=True)
class _Totals:
    """What is used of one layer's counters."""

    steps: int = 0
    free_s: float = 0.0
    at_once: int = 0
    late_bytes: int = 0
    prefetched_bytes: int = 0
    absent: int = 0
    """Demanded experts that were absent, or would have been without prediction."""
    stall_s: float = 0.0
    num_outside: int = 0
    """Experts that have no slot, at least."""

    @classmethod
    def of(cls, stats: LayerStats) -> "_Totals":
        return cls(
            stats.steps,
            stats.link_free_seconds,
            stats.prefetch_at_once,
            stats.bytes_late,
            stats.bytes_prefetched,
            stats.misses + stats.late + stats.prefetch_at_once,
            stats.stall_seconds,
            stats.num_experts - stats.num_slots,
        )


@dataclass(frozen=True, slots=True)
class _Copied:
    """What the first layer copied for its demands, and waited for it."""

    nbytes: int = 0
    stall_s: float = 0.0
    waves: int = 0
    steps: int = 0

    @classmethod
    def of(cls, first: LayerStats) -> "_Copied":
        return cls(first.bytes_copied, first.stall_seconds, first.waves, first.steps)


class BudgetController:
    """Sets every layer's budget. One object for a run; `observe` as often as one likes."""

    def __init__(
        self,
        expert_bytes: Sequence[int],
        *,
        link_bytes_per_s: float = 50e9,
        min_steps: int = 64,
    ) -> None:
        """
        Args:
            expert_bytes: of an expert of each layer.
            link_bytes_per_s: what is believed of the link until it has been measured.
            min_steps: steps between two looks at a layer.

        Raises:
            ValueError: a number that is not positive.
        """
        if not expert_bytes or min(expert_bytes) < 1:
            raise ValueError(f"expert_bytes must be positive, got {list(expert_bytes)}")
        for name, value in (("link_bytes_per_s", link_bytes_per_s), ("min_steps", min_steps)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self._layers = [_Layer(nbytes, min_steps) for nbytes in expert_bytes]
        self._link_bytes_per_s = link_bytes_per_s
        self._link_is_measured = False
        self._link_evidence = _LINK_EVIDENCE_EXPERTS * expert_bytes[0]
        self._copied = _Copied()
        self._has_said_so = False

    @property
    def budgets(self) -> list[int]:
        """Bytes per step, by layer; 0 where speculation is off."""
        return [layer.budget for layer in self._layers]

    @property
    def is_on(self) -> list[bool]:
        """By layer: whether it pays, or is on trial."""
        return [layer.is_on for layer in self._layers]

    @property
    def link_bytes_per_s(self) -> float:
        """Speed of demanded copies, as it is believed to be."""
        return self._link_bytes_per_s

    def observe(self, layers: Sequence[LayerStats]) -> bool:
        """Take note of the counters as they are now. Returns whether a budget has changed.

        Raises ValueError for another number of layers.
        """
        if len(layers) != len(self._layers):
            raise ValueError(f"counters of {len(layers)} layers, expected {len(self._layers)}")
        self._measure_link(layers[0])
        changed = False
        for layer, stats in zip(self._layers, layers, strict=True):
            changed |= layer.observe(
                _Totals.of(stats), self._link_bytes_per_s, is_measured=self._link_is_measured
            )
        self._say_what_does_not_pay()
        return changed

    def _say_what_does_not_pay(self) -> None:
        predicted = self._layers[1:]  # nothing predicts the first
        if self._has_said_so or not predicted:
            return
        if all(not layer.is_on and layer.num_failed >= TRIALS for layer in predicted):
            self._has_said_so = True
            logger.warning(
                "Expert cache: prediction has been tried %d times in every layer and did not pay; "
                "it is off, but for a short trial from time to time. Without a predictor a step "
                "has fewer kernels, or less to do on the host.",
                min(layer.num_failed for layer in predicted),
            )

    def restarted(self) -> None:
        """The counters start from zero again; what was learned stays."""
        self._copied = _Copied()
        for layer in self._layers:
            layer.seen = _Totals()

    def _measure_link(self, first: LayerStats) -> None:
        before, now = self._copied, _Copied.of(first)
        nbytes, seconds = now.nbytes - before.nbytes, now.stall_s - before.stall_s
        waves, steps = now.waves - before.waves, now.steps - before.steps
        is_decode = waves in (0, steps)  # copies of wide steps are hidden behind their computing
        if is_decode and nbytes < self._link_evidence:
            return
        self._copied = now
        if is_decode and seconds > 0:
            measured = min(max(nbytes / seconds, _SLOWEST), _FASTEST)
            weight = _SMOOTHING if self._link_is_measured else 1.0
            self._link_bytes_per_s += weight * (measured - self._link_bytes_per_s)
            self._link_is_measured = True


class _Layer:
    """One layer's budget and balance."""

    def __init__(self, expert_bytes: int, min_steps: int) -> None:
        self.budget = expert_bytes  # until it is known what fits
        self.is_on = True
        self._on_trial = True
        self._expert_bytes = expert_bytes
        self._min_steps = min_steps
        self.seen = _Totals()
        self._window_s: float | None = None
        self._balance = 0.0
        # Since the last judgement, as bytes on the link: what was saved, what was moved, how much
        # of that ahead of the demand, and what the experts that made room cost.
        self._saved = self._moved = self._ahead = self._displaced = 0.0
        self._steps_so = 0  # steps in the present state
        self.num_failed = 0
        """Trials, and times on, that did not pay, since it last paid for long."""

    def observe(self, totals: _Totals, link_bytes_per_s: float, *, is_measured: bool) -> bool:
        steps = totals.steps - self.seen.steps
        if steps < self._min_steps:
            return False
        seen, self.seen = self.seen, totals
        free_s = (totals.free_s - seen.free_s) / steps
        if free_s > 0:
            before = free_s if self._window_s is None else self._window_s
            self._window_s = before + _SMOOTHING * (free_s - before)
        self._steps_so += steps
        if self.is_on:
            there = (totals.at_once - seen.at_once) * self._expert_bytes
            there += totals.late_bytes - seen.late_bytes
            self._saved += there
            if is_measured:
                would_wait = (totals.absent - seen.absent) * self._expert_bytes
                waited = (totals.stall_s - seen.stall_s) * link_bytes_per_s
                self._saved += min(0.0, would_wait - waited - there)
            moved = totals.prefetched_bytes - seen.prefetched_bytes
            self._moved += moved
            self._ahead += min(moved, free_s * steps * link_bytes_per_s) if free_s > 0 else moved
            absent = (totals.absent - seen.absent) / steps
            self._displaced += moved * min(1.0, absent / max(1, totals.num_outside))
            if self._moved >= _EVIDENCE_EXPERTS * self._expert_bytes:
                self._judge()
        elif self._steps_so >= self._retry_steps:
            self._switch(on=True)
        return self._set_budget(link_bytes_per_s)

    def _judge(self) -> None:
        saved = min(self._saved, self._moved)
        net = saved - COMPUTE_SLOWDOWN * self._ahead - self._displaced
        balance = net / self._ahead
        self._forget()
        if self._on_trial:
            self._on_trial, self._balance = False, balance
            if balance <= ON_ABOVE:
                self._fail()
            return
        self._balance += 0.5 * (balance - self._balance)
        if self._balance < OFF_BELOW:
            if self._steps_so > 8 * self._retry_steps:
                self.num_failed = 0  # it has paid for long: the load has changed
                self._switch(on=False)
            else:
                self._fail()
        elif self._steps_so > 8 * self._retry_steps:
            self.num_failed = 0

    @property
    def _retry_steps(self) -> int:
        return min(FIRST_RETRY_STEPS << self.num_failed, LAST_RETRY_STEPS)

    def _fail(self) -> None:
        self.num_failed += 1
        self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        self.is_on = self._on_trial = on
        self._steps_so = 0
        self._forget()

    def _forget(self) -> None:
        self._saved = self._moved = self._ahead = self._displaced = 0.0

    def _set_budget(self, link_bytes_per_s: float) -> bool:
        """Returns whether the budget has changed. Small changes are not worth one."""
        fits = float(self._expert_bytes)
        if self._window_s is not None:
            fits = self._window_s * link_bytes_per_s
        if not self.is_on or fits < SMALLEST_SHARE * self._expert_bytes:
            fits = 0.0
        budget = round(fits)
        if (budget > 0) == (self.budget > 0) and abs(budget - self.budget) <= (
            _DEAD_BAND * self.budget
        ):
            return False
        self.budget = budget
        return True
