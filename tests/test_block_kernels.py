"""Blocks of rows find their expert's slot."""

import pytest
import torch

from graphs.block_kernels import seat_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("num_blocks", [1, 255, 256, 700])
def test_every_block_gets_its_experts_slot(num_blocks: int) -> None:
    slot_of = ints([3, -1, 0, 7, 2])
    experts = [(3 * block) % 6 - 1 for block in range(num_blocks)]  # -1, 2 and nothing else
    experts[-1] = 4
    block_ids = ints(experts)
    beyond = torch.cat([block_ids, ints([2, 2, 2])])
    seat_blocks(beyond[:num_blocks], slot_of)
    expected = [0 if expert < 0 else slot_of.tolist()[expert] for expert in experts]
    assert beyond.tolist() == [*expected, 2, 2, 2]


def test_a_block_of_an_absent_expert_reads_slot_0() -> None:
    block_ids = ints([1, 0, -1])
    seat_blocks(block_ids, ints([5, -1]))
    assert block_ids.tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    ("expert_ids", "slot_of", "words"),
    [
        (ints([1]).long(), ints([0]), r"expert_ids must be contiguous int32.*int64 \(1,\)"),
        (ints([1]), ints([0]).float(), r"slot_of must be .*float32"),
        (ints([1, 2, 3, 4])[::2], ints([0]), "expert_ids must be contiguous"),
        (ints([1])[None], ints([0]), r"one dimension, got torch.int32 \(1, 1\)"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(
    expert_ids: torch.Tensor, slot_of: torch.Tensor, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        seat_blocks(expert_ids, slot_of)
