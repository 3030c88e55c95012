"""Brings the ids that a layer demands to the host: a pinned buffer, and an event to wait for.

Shapes: T = tokens, K = top_k, G = guesses per token.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]

_SMALLEST = 4096  # ids; a decode step of 64 tokens with guesses for 16 of 128 experts fits


class Sent(NamedTuple):
    """What is on its way; `DemandReader.receive` takes it, once for each time it was sent."""

    host: IntArray
    """[T, K + G] view of pinned memory, overwritten by the next demand that is sent."""
    top_k: int


class CurrentStream:
    """The calling thread's current stream, as `torch.cuda.current_stream` gives it at ten times the
    time: more than the event that is recorded on it, and the device idles meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: tuple[int, torch.cuda.Stream] | None = None
        self._address: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def __call__(self) -> torch.cuda.Stream:
        index = self._device.index
        if self._address is None or index is None:
            return torch.cuda.current_stream(self._device)
        address = self._address(index)
        if self._known is None or self._known[0] != address:
            self._known = address, torch.cuda.current_stream(self._device)
        return self._known[1]


class StreamEnd:
    """The end of what the calling thread's current stream has been given. On a CPU it is there."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._stream = CurrentStream(device)

    def wait(self) -> None:
        """Let the host wait until the device is there."""
        if self._event is not None:
            self._event.record(self._stream())
            self._event.synchronize()


class DemandReader:
    """For one thread, which receives each demand before it sends the next."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._end = StreamEnd(device)
        # A captured graph holds the address of the buffer that it was captured with: none is freed.
        self._buffers: list[torch.Tensor] = []

    def send(self, topk_ids: torch.Tensor, guesses: torch.Tensor | None) -> Sent:
        """Enqueue the copy of [T, K] ids and [T, G] guesses. May be captured: replays copy, too."""
        ids = topk_ids
        if guesses is not None:
            ids = torch.cat([topk_ids.int(), guesses.int()], dim=1)
        host = self._room(ids.numel()).view(ids.shape)
        host.copy_(ids, non_blocking=True)
        return Sent(host.numpy(), topk_ids.shape[1])

    def receive(self, sent: Sent) -> tuple[IntArray, IntArray | None]:
        """([T, K] ids, [T, G] guesses) as new arrays. Waits for the current stream up to here, the
        one place of a step where the host waits for the device."""
        self._end.wait()
        both = sent.host.copy()
        if both.shape[1] == sent.top_k:
            return both, None
        return both[:, : sent.top_k], both[:, sent.top_k :]

    def _room(self, num_ids: int) -> torch.Tensor:
        """[num_ids] int32 of pinned memory."""
        if not self._buffers or self._buffers[-1].numel() < num_ids:
            size = max(_SMALLEST, 1 << (num_ids - 1).bit_length())
            with torch.inference_mode(False):  # so that it can be written outside of it, too
                buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda)
            self._buffers.append(buffer)
        return self._buffers[-1][:num_ids]
