"""Tells the host what a layer demands by a kernel that writes to its memory, which it watches.

For a capture that the host interrupts, where all the device's work waits for the host: no copy, no
event, one kernel instead of five, and where every expert is resident the host knows from one word.
Imports triton. Shapes: T = tokens, K = top_k, G = guesses per token, E = expert ids.
"""

from os import sched_yield
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphs.demand_kernels import ALL_RESIDENT, rename_kernel, send_kernel
from graphs.slot_table import form_of
from prefetch_runtime.demand_reader import StreamEnd

IntArray = npt.NDArray[np.int32]

_SMALLEST = 8192  # ids; a decode step of 64 tokens with guesses for 64 of 128 experts fits
_BLOCK = 256  # ids at a time
_ROUNDS = 300  # about 0.3 ms: longer than a layer's compute without copies
_LOOKS = 10  # in a round, which ends with a chance for other threads
_NOT_WRITTEN = -2  # neither an id nor padding
_ALL_RESIDENT = int(ALL_RESIDENT.value)


class _Buffer:
    """[1 + ids] int32 of pinned memory: a word that is 0 until the ids behind it are there."""

    def __init__(self, num_ids: int, *, pinned: bool) -> None:
        with torch.inference_mode(False):  # so that it can be written outside of it, too
            self.tensor = torch.empty(1 + num_ids, dtype=torch.int32, pin_memory=pinned)
        self.array: IntArray = self.tensor.numpy()
        self.words = self.array.data  # a look takes a tenth of what it takes through numpy
        self.clear()

    def clear(self) -> None:
        self.array.fill(_NOT_WRITTEN)
        self.words[0] = 0


class Polled(NamedTuple):
    """A demand of which the host is told each time that the kernel runs."""

    buffer: _Buffer
    ids: IntArray
    """[T, K + G] view of `buffer`."""
    top_k: int


class PolledReader:
    """For one thread. Each time that a demand is sent, it is waited for and then taken, both before
    the kernel runs that sends the next but one: two buffers take turns."""

    most_ids = 4096
    """Demands of more ids arrive sooner by a copy: one program sends block after block."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._end = StreamEnd(device)
        # A captured graph holds the addresses that it was captured with: none is freed.
        self._buffers: list[tuple[_Buffer, _Buffer]] = []

    def warm_up(self, top_k: int, mapping: torch.Tensor) -> None:
        """Load the kernels for [T, K] ids as vLLM has them, before anything is captured."""
        ids = torch.full((1, top_k), -1, dtype=torch.int32, device=mapping.device)
        for padding in (None, torch.zeros(1, dtype=torch.int64, device=mapping.device)):
            sent = self.send(0, ids, None, padding=padding, mapping=mapping)
            self.wait(sent)
            self.take(sent)
            self.renamed(ids, padding=padding, mapping=mapping)

    def send(
        self,
        turn: int,
        topk_ids: torch.Tensor,
        guesses: torch.Tensor | None,
        *,
        padding: torch.Tensor | None,
        mapping: torch.Tensor,
    ) -> Polled:
        """Enqueue what tells the host of [T, K] ids and [T, G] guesses. May be captured.

        Args:
            turn: even or odd; the demand before and the one after have the other.
            padding: as `Scheduler.fetch` takes it; such rows arrive as -1.
            mapping: [E + 1] int32 on the device, negative for experts without a slot.
        """
        num_tokens, top_k = topk_ids.shape
        num_guesses = 0 if guesses is None else guesses.shape[1]
        width = top_k + num_guesses
        buffer = self._room(num_tokens * width)[turn % 2]
        send_kernel[(1,)](
            topk_ids.contiguous(),
            topk_ids if guesses is None else guesses.contiguous(),
            topk_ids if padding is None else padding.contiguous(),
            mapping,
            buffer.tensor,
            num_tokens,
            E=mapping.numel() - 1,
            K=top_k,
            G=num_guesses,
            PAD=int(form_of(padding)),
            BLOCK=_BLOCK,
        )
        ids = buffer.array[1 : 1 + num_tokens * width].reshape(num_tokens, width)
        return Polled(buffer, ids, top_k)

    def wait(self, polled: Polled) -> bool:
        """Wait until a demand has arrived; true if every expert in it has a slot, by the device's
        mapping. The one place of a layer where the host waits for the device.

        Raises:
            RuntimeError: the device has done all its work and the demand is not there.
        """
        words = polled.buffer.words
        if not _comes(words):
            self._end.wait()
            if not words[0]:
                raise RuntimeError("the device sent no demand; the kernel that sends it never ran")
        answer = words[0]
        words[0] = 0
        return answer == _ALL_RESIDENT

    def take(self, polled: Polled) -> tuple[IntArray, IntArray | None]:
        """([T, K] ids, [T, G] guesses) of a demand that was waited for, as new arrays."""
        both = polled.ids.copy()
        if _NOT_WRITTEN in both:  # the word came before the ids
            self._end.wait()
            both = polled.ids.copy()
        polled.ids.fill(_NOT_WRITTEN)
        if both.shape[1] == polled.top_k:
            return both, None
        return both[:, : polled.top_k], both[:, polled.top_k :]

    def renamed(
        self, topk_ids: torch.Tensor, *, padding: torch.Tensor | None, mapping: torch.Tensor
    ) -> torch.Tensor:
        """[T, K] of the ids' dtype: `mapping` [E + 1] of each id, its last entry for ids of -1 and
        rows of padding. May be captured."""
        topk_ids = topk_ids.contiguous()
        slot_ids = torch.empty_like(topk_ids)
        rename_kernel[(-(-topk_ids.numel() // _BLOCK),)](
            topk_ids,
            topk_ids if padding is None else padding.contiguous(),
            mapping,
            slot_ids,
            topk_ids.numel(),
            E=mapping.numel() - 1,
            K=topk_ids.shape[1],
            PAD=int(form_of(padding)),
            BLOCK=_BLOCK,
        )
        return slot_ids

    def clear(self) -> None:
        """Forget what has arrived or is on its way. Waits for the current stream."""
        self._end.wait()
        for pair in self._buffers:
            for buffer in pair:
                buffer.clear()

    def _room(self, num_ids: int) -> tuple[_Buffer, _Buffer]:
        if not self._buffers or self._buffers[-1][0].array.size <= num_ids:
            size = max(_SMALLEST, 1 << (num_ids - 1).bit_length())
            first, second = (_Buffer(size, pinned=self._is_cuda) for _ in range(2))
            self._buffers.append((first, second))
        return self._buffers[-1]


def _comes(words: memoryview) -> bool:
    """Watch for a word that is not 0."""
    for _ in range(_ROUNDS):
        for _ in range(_LOOKS):
            if words[0]:
                return True
        # Lets go of the interpreter's lock. Between short releases at launches alone, vLLM's other
        # threads waited for it for up to 0.1 s, with a switch interval of 5 ms.
        sched_yield()
    return False
