"""Records routing where it is computed, so that a captured graph records at every replay.

Shapes: N = most tokens, L = MoE layers, K = top_k, G = guesses, T = tokens of a call.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from prefetch_runtime.recorder import check_recorded, has_room
from prefetch_runtime.scheduler import without_padding
from prefetch_runtime.trace import Trace

IntArray = npt.NDArray[np.int32]


class DeviceRecorder:
    """Buffers for a trace on the device, filled layer by layer, read once at the end.

    Every operation is enqueued on the current stream and may be captured. What is not recorded -
    padding, everything while recording is off, steps without room (see `has_room`) - goes to a row
    of its own that nobody reads, so that a graph does the same work in any case.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_guesses: int,
        max_tokens: int,
        step: torch.Tensor,
    ) -> None:
        """
        Args:
            num_guesses: of each token for the next layer; 0 records none.
            step: [1] int32, the device's clock, whose value a step's tokens have in common.

        Raises:
            ValueError: a size below 1.
        """
        for name, value in (
            ("num_layers", num_layers),
            ("top_k", top_k),
            ("max_tokens", max_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._clock = step
        self.num_guesses = num_guesses if num_layers > 1 else 0
        self.max_tokens = max_tokens
        rows, device = max_tokens + 1, step.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._topk = zeros(num_layers, rows, top_k)
        self._guesses = zeros(num_layers - 1, rows, self.num_guesses)
        self._steps = zeros(rows, dtype=torch.int32)
        self._used = zeros(1, dtype=torch.int64)
        self._dropped = zeros(1, dtype=torch.int64)
        self._dropped_steps = zeros(1, dtype=torch.int64)
        self._limit = zeros(1, dtype=torch.int64)
        self._row_of: torch.Tensor | None = None
        self._requests: list[Sequence[tuple[str, int]]] = []

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers."""
        return self._topk.nbytes + self._guesses.nbytes + self._steps.nbytes

    def start(self, max_tokens: int) -> None:
        """Forget what was recorded, and record up to `max_tokens` from the next step on.

        Raises:
            ValueError: more than there is room for.
        """
        if not 1 <= max_tokens <= self.max_tokens:
            raise ValueError(
                f"there is room for a trace of 1 to {self.max_tokens} tokens, not {max_tokens}"
            )
        self._used.zero_()
        self._dropped.zero_()
        self._dropped_steps.zero_()
        self._limit.fill_(max_tokens)
        self._requests.clear()

    def stop(self) -> None:
        """Record nothing from the next step on."""
        self._limit.zero_()

    def record(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: torch.Tensor | None,
        padding: torch.Tensor | None = None,
    ) -> None:
        """One layer's choice [T, K] and its guesses [T, G] for the next; layers in order.

        `padding` as in `Scheduler.fetch`.
        """
        if layer_idx == 0:
            self._row_of = self._rows_for(without_padding(topk_ids, padding))
            self._steps.index_copy_(0, self._row_of, self._clock.expand(topk_ids.shape[0]))
        assert self._row_of is not None, "recording begins with layer 0"
        self._topk[layer_idx].index_copy_(0, self._row_of, topk_ids.to(torch.int16))
        if guesses is not None and self.num_guesses:
            kept = guesses[:, : self.num_guesses].to(torch.int16)
            self._guesses[layer_idx].index_copy_(0, self._row_of, kept)

    def _rows_for(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64: the row of each token; the last row for those that are not kept."""
        is_token = (topk_ids >= 0).all(dim=1).to(torch.int64)
        count = is_token.sum()
        fits = has_room(self._used, count, self._limit, self._dropped)
        row_of = torch.where(
            (is_token > 0) & fits, self._used + is_token.cumsum(0) - 1, self.max_tokens
        )
        self._used.add_(count * fits)
        is_lost = (self._limit > 0) & ~fits & (count > 0)
        self._dropped.add_(count * is_lost)
        self._dropped_steps.add_(is_lost)
        return row_of

    # After the run, or beside it: these wait for the device.

    @property
    def num_dropped(self) -> int:
        """As in `Recorder`."""
        return int(self._dropped.item())

    @property
    def num_dropped_steps(self) -> int:
        """As in `Recorder`."""
        return int(self._dropped_steps.item())

    def end_step(self, requests: Sequence[tuple[str, int]]) -> None:
        """Which request each row of a step belongs to: (id, number of rows), in order."""
        if sum(count for _, count in requests):
            self._requests.append(list(requests))

    def trace(self) -> Trace:
        """What has been recorded.

        Raises:
            TraceError: nothing has.
        """
        used = int(self._used.item())
        check_recorded(used, self.num_dropped)
        steps = self._steps[:used].cpu().numpy()
        topk = self._topk[:, :used].transpose(0, 1).contiguous().cpu().numpy()
        guesses = self._guesses[:, :used].transpose(0, 1).contiguous().cpu().numpy()
        return Trace(
            topk=topk,
            sequence=self._sequence(steps),
            num_experts=self._num_experts,
            next_gate=guesses if self.num_guesses else None,
            step=steps,
        )

    def _sequence(self, steps: IntArray) -> IntArray:
        """[tokens]: the number of each token's request; 0 for all where that is not known."""
        _, tokens = np.unique(steps, return_counts=True)
        given = self._requests[: len(tokens)]
        if [sum(count for _, count in rows) for rows in given] != tokens.tolist():
            return np.zeros(len(steps), dtype=np.int32)  # rows of another order, or padding
        number: dict[str, int] = {}
        of_rows = [
            (number.setdefault(name, len(number)), count) for rows in given for name, count in rows
        ]
        return np.repeat(
            np.array([index for index, _ in of_rows], dtype=np.int32),
            [count for _, count in of_rows],
        )
