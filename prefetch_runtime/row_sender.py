"""Brings small rows of integers to the device without waiting for it: pinned buffers in turn."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.signedinteger]

_SMALLEST = 4096  # int32s; the rows of a layer of 128 experts in 30 waves fit


class PassingEvent(Protocol):
    """What is asked of a CUDA event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Turn:
    def __init__(self, event: PassingEvent) -> None:
        self.buffer = torch.empty(0, dtype=torch.int32)
        self.sent = event
        self.is_under_way = False


class RowSender:
    """For one thread. What `send` returns is the caller's; a buffer is written again only once its
    last copy has passed, which by then it has unless `turns` copies are still waiting."""

    def __init__(
        self, device: torch.device, *, turns: int = 4, new_event: Any = None, pinned: bool = True
    ) -> None:
        """`new_event` and `pinned`: for tests; None: CUDA events on CUDA, none elsewhere."""
        if new_event is None and device.type == "cuda":
            new_event = torch.cuda.Event
        self._device = device
        self._pinned = pinned and device.type == "cuda"
        self._turns = [_Turn(new_event()) for _ in range(turns)] if new_event is not None else []
        self._next = 0

    def send(self, rows: IntArray) -> torch.Tensor:
        """A new int32 tensor on the device with the shape and values of `rows`, filled in the order
        of the current stream."""
        if not self._turns:
            return torch.from_numpy(rows.astype(np.int32))
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.is_under_way:
            turn.sent.synchronize()
        if turn.buffer.numel() < rows.size:
            size = max(_SMALLEST, 1 << (rows.size - 1).bit_length())
            with torch.inference_mode(False):  # so that it can be written outside of it, too
                turn.buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        host = turn.buffer[: rows.size].view(rows.shape)
        host.numpy()[...] = rows
        # Not `to`: with memory that is not pinned that waits for the whole stream.
        sent = torch.empty(rows.shape, dtype=torch.int32, device=self._device)
        sent.copy_(host, non_blocking=True)
        turn.sent.record()
        turn.is_under_way = True
        return sent
