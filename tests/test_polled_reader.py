"""A demand that the host watches for: what arrives, what the one word says, what is renamed."""

import sys
import threading
import time
from typing import Any

import pytest
import torch

from prefetch_runtime import polled_reader
from prefetch_runtime.polled_reader import PolledReader

EXPERTS = 6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def mapping_of(slots: dict[int, int], device: torch.device, *, nobody: int = 0) -> torch.Tensor:
    row = torch.full((EXPERTS + 1,), -1, dtype=torch.int32)
    for expert, slot in slots.items():
        row[expert] = slot
    row[-1] = nobody
    return row.to(device)


def told(
    reader: PolledReader, ids: torch.Tensor, guesses: torch.Tensor | None = None, **given: Any
) -> tuple[bool, list[list[int]], list[list[int]] | None]:
    sent = reader.send(0, ids, guesses, **{"padding": None, **given})
    if ids.is_cuda:
        torch.cuda.synchronize()
    all_resident = reader.wait(sent)
    found, guessed = reader.take(sent)
    assert found.dtype == "int32"
    return all_resident, found.tolist(), None if guessed is None else guessed.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_guesses_arrive_and_one_word_says_whether_all_are_there(
    dtype: torch.dtype, device: torch.device
) -> None:
    reader = PolledReader(device)
    ids = torch.tensor([[3, -1], [5, 0]], dtype=dtype, device=device)
    guesses = torch.tensor([[1, 2, 3], [4, 5, 1]], device=device)
    mapping = mapping_of({3: 1, 5: 0, 0: 2}, device)
    assert told(reader, ids, mapping=mapping) == (True, [[3, -1], [5, 0]], None)
    expected = (True, [[3, -1], [5, 0]], [[1, 2, 3], [4, 5, 1]])
    assert told(reader, ids, guesses, mapping=mapping) == expected, "guesses need no slots"
    mapping[5] = -1
    assert told(reader, ids, mapping=mapping) == (False, [[3, -1], [5, 0]], None)


@pytest.mark.parametrize("bad", [EXPERTS, EXPERTS + 9, -2])
def test_an_id_that_is_no_expert_is_not_resident(bad: int, device: torch.device) -> None:
    ids = torch.tensor([[0, bad]], dtype=torch.int32, device=device)
    mapping = mapping_of(dict(zip(range(EXPERTS), range(EXPERTS), strict=True)), device)
    assert told(PolledReader(device), ids, mapping=mapping) == (False, [[0, bad]], None)


@pytest.mark.parametrize(
    "padding",
    [torch.tensor([False, True, False]), torch.tensor([7, -1, 0]), torch.tensor([-1] * 3)],
)
@pytest.mark.parametrize("columns", [1, 2])
def test_rows_of_padding_demand_nothing_and_get_the_place_for_nobody(
    padding: torch.Tensor, columns: int, device: torch.device
) -> None:
    reader = PolledReader(device)
    is_padding = padding if padding.dtype == torch.bool else padding < 0
    ids = torch.tensor([[1, 2], [3, 4], [2, -1]], dtype=torch.int32, device=device)
    guesses = torch.tensor([[5], [4], [3]], dtype=torch.int32, device=device)
    mapping = mapping_of({1: 4, 2: 3}, device, nobody=9)
    other = torch.zeros_like(padding)
    strided = torch.stack([padding, other][:columns], dim=1).to(device)[:, 0]
    assert strided.stride() == (columns,)
    given = {"padding": strided, "mapping": mapping}
    hidden = [[-1, -1] if row else ids[at].tolist() for at, row in enumerate(is_padding.tolist())]
    guessed = [[-1] if row else guesses[at].tolist() for at, row in enumerate(is_padding.tolist())]
    assert told(reader, ids, guesses, **given) == (True, hidden, guessed)
    slot_of = {1: 4, 2: 3, -1: 9}
    expected = [[slot_of[expert] for expert in row] for row in hidden]
    slot_ids = reader.renamed(ids, **given)
    assert slot_ids.dtype == torch.int32
    assert slot_ids.tolist() == expected


def test_wide_demands_arrive_whole_and_leave_the_buffers_of_captured_graphs_alone(
    device: torch.device,
) -> None:
    reader = PolledReader(device)
    mapping = torch.arange(60_001, dtype=torch.int32, device=device)
    narrow = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    sent = reader.send(0, narrow, None, padding=None, mapping=mapping)
    wide = torch.arange(60_000, dtype=torch.int64, device=device).view(-1, 8)
    assert told(reader, wide, mapping=mapping) == (True, wide.tolist(), None)
    assert torch.equal(reader.renamed(wide, padding=None, mapping=mapping), wide)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert reader.wait(sent)
    assert reader.take(sent)[0].tolist() == [[1, 2]]


def test_a_step_without_tokens_is_nothing(device: torch.device) -> None:
    empty = torch.empty((0, 4), dtype=torch.int32, device=device)
    mapping = mapping_of({}, device)
    assert told(PolledReader(device), empty, mapping=mapping) == (True, [], None)


def test_two_demands_in_turn_do_not_disturb_each_other(device: torch.device) -> None:
    reader = PolledReader(device)
    mapping = mapping_of({1: 0}, device)
    ids = [torch.tensor([[at]], dtype=torch.int32, device=device) for at in (1, 2)]
    sent = [reader.send(at, ids[at], None, padding=None, mapping=mapping) for at in (0, 1)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert [reader.wait(one) for one in sent] == [True, False]
    assert [reader.take(one)[0].tolist() for one in sent] == [[[1]], [[2]]]


def test_a_demand_that_never_comes_is_an_error(device: torch.device) -> None:
    reader = PolledReader(device)
    ids = torch.tensor([[1]], dtype=torch.int32, device=device)
    sent = reader.send(0, ids, None, padding=None, mapping=mapping_of({}, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert not reader.wait(sent)
    with pytest.raises(RuntimeError, match="the kernel that sends it never ran"):
        reader.wait(sent)


def test_other_threads_run_while_a_demand_is_watched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    reader = PolledReader(cpu)
    ids = torch.tensor([[1]], dtype=torch.int32)
    sent = reader.send(0, ids, None, padding=None, mapping=mapping_of({1: 0}, cpu))
    assert reader.wait(sent)
    monkeypatch.setattr(polled_reader, "_ROUNDS", 2_000_000)

    def arrives() -> None:
        time.sleep(0.01)
        sent.buffer.words[0] = 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is made to let go of the interpreter's lock
    thread = threading.Thread(target=arrives)
    try:
        thread.start()
        assert reader.wait(sent)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_what_had_arrived_is_forgotten_when_cleared(device: torch.device) -> None:
    reader = PolledReader(device)
    ids = torch.tensor([[1]], dtype=torch.int32, device=device)
    sent = reader.send(0, ids, None, padding=None, mapping=mapping_of({}, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    reader.clear()
    with pytest.raises(RuntimeError, match="never ran"):
        reader.wait(sent)


def test_ids_later_than_their_word_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    reader = PolledReader(cpu)
    ids = torch.tensor([[1, 2]], dtype=torch.int32)
    sent = reader.send(0, ids, None, padding=None, mapping=mapping_of({}, cpu))
    assert not reader.wait(sent)
    sent.ids[0, 1] = -2  # on its way

    def arrives() -> None:
        sent.ids[0, 1] = 2

    monkeypatch.setattr(reader._end, "wait", arrives)
    assert reader.take(sent)[0].tolist() == [[1, 2]]
    assert sent.ids.tolist() == [[-2, -2]], "taken once"
