"""Rows on their way to the device: new tensors, and buffers that are not written too early."""

import numpy as np
import pytest
import torch

from prefetch_runtime.row_sender import RowSender

CPU = torch.device("cpu")


class Event:
    """Notes when it is waited for."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("with_events", [True, False])
@pytest.mark.parametrize("shape", [(1, 4), (3, 132), (70, 132)])
def test_what_arrives_is_what_was_sent_and_belongs_to_the_caller(
    with_events: bool, shape: tuple[int, int]
) -> None:
    sender = _sender([]) if with_events else RowSender(CPU)
    rows = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
    sent = [sender.send(rows + number) for number in range(6)]
    rows[:] = -1
    for number, tensor in enumerate(sent):
        assert tensor.dtype == torch.int32
        assert tensor.shape == shape
        assert int(tensor.ravel()[0]) == number
        assert int(tensor.ravel()[-1]) == shape[0] * shape[1] - 1 + number


def test_a_buffer_is_written_again_only_after_its_last_copy() -> None:
    log: list[str] = []
    sender = _sender(log, turns=2)
    rows = np.zeros((1, 4), dtype=np.int32)
    for _ in range(4):
        sender.send(rows)
    assert log == ["record", "record", "wait", "record", "wait", "record"]


def _sender(log: list[str], turns: int = 4) -> RowSender:
    event = type("Logged", (Event,), {"log": log})
    return RowSender(CPU, turns=turns, new_event=event)
