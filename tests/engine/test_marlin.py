"""Marlin on slots: the blocks are those of the resident launch, each told its expert's slot."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
from vllm.scalar_type import scalar_types

from prefetch_runtime.vllm.marlin import MarlinBlocks

pytestmark = pytest.mark.engine

E, S, K, H, N = 32, 8, 4, 64, 32
KERNEL = SimpleNamespace(quant_type_id=scalar_types.uint4b8.id, input_dtype=None)


def aligned(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_align_block_size` in plain torch: rows by expert, padded to whole blocks; beyond the
    last block there are 0 and -1."""
    flat = topk_ids.flatten()
    rows, experts = [], []
    for expert in range(num_experts):
        of_expert = (flat == expert).nonzero().flatten().tolist()
        while of_expert:
            block, of_expert = of_expert[:block_size], of_expert[block_size:]
            rows += block + [flat.numel()] * (block_size - len(block))
            experts.append(expert)
    padded = flat.numel() + num_experts * (block_size - 1)
    rest = -(-padded // block_size) - len(experts)
    return (
        torch.tensor(rows + [flat.numel()] * (padded - len(rows)), dtype=torch.int32),
        torch.tensor(experts + [-1, 0] * (rest // 2) + [-1] * (rest % 2), dtype=torch.int32),
        torch.tensor([len(rows)], dtype=torch.int32),
    )


class Launches:
    """Takes the place of the launch, and of the alignment."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> torch.Tensor:
        self.seen.append(arguments)
        rows = arguments["hidden_states"].shape[0] * arguments["num_topk"]
        return torch.zeros(rows, H)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    monkeypatch.setattr(marlin_moe, "_fused_marlin_moe", found)
    monkeypatch.setattr(marlin_moe, "moe_align_block_size", aligned)
    yield found
    assert marlin_moe._fused_marlin_moe is found, "what was replaced has been put back"
    assert marlin_moe.moe_align_block_size is aligned


def weights(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed w13 and w2 of so many experts."""
    return (
        torch.zeros(rows, H // 16, 2 * N * 2, dtype=torch.int32),
        torch.zeros(rows, N // 16, H * 2, dtype=torch.int32),
    )


def run(x: torch.Tensor, topk_ids: torch.Tensor, num_rows: int) -> None:
    """One call as vLLM's `MarlinExperts` makes it."""
    w13, w2 = weights(num_rows)
    marlin_moe.fused_marlin_moe(
        hidden_states=x, w1=w13, w2=w2, bias1=None, bias2=None,
        w1_scale=torch.zeros(0), w2_scale=torch.zeros(0),
        topk_weights=torch.ones(topk_ids.shape), topk_ids=topk_ids,
        quant_type_id=KERNEL.quant_type_id, global_num_experts=E,
        moe_sum=lambda *_: None, output=torch.empty_like(x),
    )  # fmt: skip


def routed(tokens: int, experts: int = E) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    return scores.topk(K).indices.to(torch.int32)


# With 57 tokens vLLM would take other blocks for 8 slots of 32 experts than for all of them.
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 57, 128, 300])
def test_blocks_are_those_of_the_resident_launch(tokens: int, launches: Launches) -> None:
    x, topk_ids = torch.zeros(tokens, H, dtype=torch.bfloat16), routed(tokens)
    run(x, topk_ids, E)
    # As in a wave: the experts outside of it read a row that it has.
    rows_of = torch.full((E,), S - 1, dtype=torch.int32)
    resident = torch.randperm(E, generator=torch.Generator().manual_seed(1))[:S]
    rows_of[resident] = torch.arange(S, dtype=torch.int32)
    with MarlinBlocks(KERNEL, E, K).on(rows_of, x, *weights(S)):
        run(x, topk_ids, S)
    alone, ours = launches.seen
    assert ours["block_size_m"] == alone["block_size_m"]
    for name in ("sorted_token_ids", "num_tokens_post_padded", "topk_ids"):
        assert torch.equal(ours[name], alone[name])
    blocks = int(alone["num_tokens_post_padded"]) // alone["block_size_m"]
    experts, slots = alone["expert_ids"][:blocks], ours["expert_ids"]
    assert slots.dtype == alone["expert_ids"].dtype
    assert slots.shape == alone["expert_ids"].shape
    assert torch.equal(slots[:blocks], rows_of[experts.long()])
    assert slots.min() >= 0, "an id of -1 would take a block out of the count"
    assert slots.max() < S


def test_slots_alone_would_have_had_blocks_of_another_size(launches: Launches) -> None:
    # The reason for asking: with the weights' own first dimension vLLM chooses differently.
    topk_ids = routed(33, S)
    run(torch.zeros(33, H, dtype=torch.bfloat16), topk_ids, E)
    w13, w2 = weights(S)
    marlin_moe.fused_marlin_moe(
        hidden_states=torch.zeros(33, H, dtype=torch.bfloat16), w1=w13, w2=w2,
        bias1=None, bias2=None, w1_scale=torch.zeros(0), w2_scale=torch.zeros(0),
        topk_weights=torch.ones(33, K), topk_ids=topk_ids,
        quant_type_id=KERNEL.quant_type_id, moe_sum=lambda *_: None, output=torch.empty(33, H),
    )  # fmt: skip
    alone, slots = launches.seen
    assert alone["block_size_m"] != slots["block_size_m"]


@pytest.mark.parametrize("experts", [8, 60, 128])
def test_the_block_size_is_vllms_for_all_experts(experts: int, launches: Launches) -> None:
    blocks = MarlinBlocks(KERNEL, experts, K)
    for tokens in (1, 3, 16, 17, 63, 64, 500, 2000):
        x = torch.zeros(tokens, H, dtype=torch.bfloat16)
        w13, w2 = weights(experts)
        marlin_moe.fused_marlin_moe(
            hidden_states=x, w1=w13, w2=w2, bias1=None, bias2=None,
            w1_scale=torch.zeros(0), w2_scale=torch.zeros(0),
            topk_weights=torch.ones(tokens, K),
            topk_ids=torch.zeros(tokens, K, dtype=torch.int32),
            quant_type_id=KERNEL.quant_type_id, global_num_experts=experts,
            moe_sum=lambda *_: None, output=torch.empty_like(x),
        )  # fmt: skip
        assert blocks.block_size(x, *weights(S)) == launches.seen[-1]["block_size_m"]


def test_it_is_asked_once_for_a_number_of_tokens(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = MarlinBlocks(KERNEL, E, K)
    x = torch.zeros(5, H, dtype=torch.bfloat16)
    size = blocks.block_size(x, *weights(S))
    monkeypatch.setattr(marlin_moe, "fused_marlin_moe", None)
    assert blocks.block_size(x, *weights(S)) == size
    assert not launches.seen, "asking launches nothing"


def test_a_launch_that_fails_leaves_vllms_functions(launches: Launches) -> None:
    slot_of = torch.zeros(E, dtype=torch.int32)
    x = torch.zeros(3, H, dtype=torch.bfloat16)

    def fail() -> None:
        with MarlinBlocks(KERNEL, E, K).on(slot_of, x, *weights(S)):
            raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        fail()
    run(x, routed(3), E)
    assert len(launches.seen) == 1


def test_a_version_that_does_not_launch_so_is_an_error(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marlin_moe, "fused_marlin_moe", lambda **_: launches.seen)
    with pytest.raises(RuntimeError, match="no longer ends in _fused_marlin_moe"):
        MarlinBlocks(KERNEL, E, K).block_size(torch.zeros(1, H), *weights(S))
