"""Ids on the host: what is sent is received, as arrays of their own, replay after replay."""

import pytest
import torch

from prefetch_runtime.demand_reader import DemandReader


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_guesses_arrive(dtype: torch.dtype, device: torch.device) -> None:
    reader = DemandReader(device)
    ids = torch.tensor([[3, -1], [5, 7]], dtype=dtype, device=device)
    guesses = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device)
    found, none = reader.receive(reader.send(ids, None))
    assert found.dtype == "int32"
    assert found.tolist() == [[3, -1], [5, 7]]
    assert none is None
    found, guessed = reader.receive(reader.send(ids, guesses))
    assert found.tolist() == [[3, -1], [5, 7]]
    assert guessed is not None
    assert guessed.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_what_was_received_stays_and_what_is_sent_again_is_received_again(
    device: torch.device,
) -> None:
    reader = DemandReader(device)
    first = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    sent = reader.send(first, None)
    received, _ = reader.receive(sent)
    reader.send(first + 4, None)  # what a replay does
    assert reader.receive(sent)[0].tolist() == [[5, 6]]
    assert received.tolist() == [[1, 2]]


def test_a_wide_demand_leaves_the_buffer_of_captured_graphs_alone(device: torch.device) -> None:
    reader = DemandReader(device)
    narrow = reader.send(torch.tensor([[1, 2]], dtype=torch.int32, device=device), None)
    wide = torch.arange(40_000, dtype=torch.int32, device=device).view(-1, 8)
    assert reader.receive(reader.send(wide, None))[0].ravel().tolist() == list(range(40_000))
    assert reader.receive(narrow)[0].tolist() == [[1, 2]]


def test_a_step_without_tokens_is_nothing(device: torch.device) -> None:
    reader = DemandReader(device)
    empty = torch.empty((0, 4), dtype=torch.int32, device=device)
    assert reader.receive(reader.send(empty, None))[0].shape == (0, 4)


def test_a_buffer_made_in_inference_mode_is_used_outside_of_it(device: torch.device) -> None:
    reader = DemandReader(device)
    ids = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    with torch.inference_mode():
        reader.receive(reader.send(ids, None))
    assert reader.receive(reader.send(ids + 1, None))[0].tolist() == [[2, 3]]
