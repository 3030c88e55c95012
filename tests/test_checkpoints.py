"""The checkpoints that tests write hold the weights that they were made of."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import checkpoints as made

WEIGHT = made.Maker("test").normal("w", 128, 256)


def unpacked(packed: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """The values that `pack` packed, [..., values, ...]."""
    bits = 32 // len(order)
    moved = packed.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    values = torch.stack([(moved >> (bits * order.index(i))) for i in range(len(order))], -1)
    return (values & (2**bits - 1)).flatten(-2).movedim(-1, dim)


@pytest.mark.parametrize("order", [tuple(range(8)), made.AWQ_ORDER, tuple(range(4))])
@pytest.mark.parametrize("dim", [0, 1])
def test_values_are_packed_in_order(dim: int, order: tuple[int, ...]) -> None:
    values = torch.randint(0, 2 ** (32 // len(order)), (16, 24), dtype=torch.int32)
    packed = made.pack(values, dim, order)
    assert packed.dtype == torch.int32
    assert torch.equal(unpacked(packed, dim, order).int(), values)


def test_the_first_value_is_in_the_lowest_bits() -> None:
    values = torch.arange(8, dtype=torch.int32).unsqueeze(0)
    assert int(made.pack(values, 1)[0, 0]) & 0xFFFFFFFF == 0x76543210
    assert int(made.pack(values, 1, made.AWQ_ORDER)[0, 0]) & 0xFFFFFFFF == 0x75316420


def close(restored: torch.Tensor, limit: float) -> None:
    error = (restored.float() - WEIGHT.float()).abs().max() / WEIGHT.float().abs().max()
    assert float(error) < limit


def test_fp8_times_its_scale_is_the_weight() -> None:
    for one in (made.fp8_tensor(WEIGHT), made.fp8_channel(WEIGHT)):
        close(one["weight"].float() * one["weight_scale"], 0.05)
    block = made.fp8_block(WEIGHT)
    scale = block["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    close(block["weight"].float() * scale, 0.05)


def test_int4_restores_the_weight() -> None:
    order = tuple(range(8))
    one = made.gptq(WEIGHT)
    scale = one["scales"].float().repeat_interleave(made.GROUP, 0)
    values = unpacked(one["qweight"], 0, order)
    zeros = (unpacked(one["qzeros"], 1, order) + 1).repeat_interleave(made.GROUP, 0)
    close(((values - zeros) * scale).t(), 0.12)
    one = made.awq(WEIGHT)
    scale = one["scales"].float().repeat_interleave(made.GROUP, 0)
    values = unpacked(one["qweight"], 1, made.AWQ_ORDER)
    zeros = unpacked(one["qzeros"], 1, made.AWQ_ORDER).repeat_interleave(made.GROUP, 0)
    close(((values - zeros) * scale).t(), 0.12)
    one = made.wna16_zeros(WEIGHT)
    scale = one["weight_scale"].float().repeat_interleave(made.GROUP, 1)
    zeros = unpacked(one["weight_zero_point"], 0, order).repeat_interleave(made.GROUP, 1)
    close((unpacked(one["weight_packed"], 1, order) - zeros) * scale, 0.12)


def test_mxfp4_restores_the_weight() -> None:
    blocks, scales = made.mxfp4(WEIGHT)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).to(torch.int64)
    numbers = torch.tensor([*made.E2M1, *(-x for x in made.E2M1)])[codes]
    exponent = torch.exp2(scales.float() - 127).unsqueeze(-1)
    close(
        (numbers * exponent).view(WEIGHT.shape), 0.26
    )  # a block's largest may be cut by a quarter


def test_a_checkpoint_is_written_once_and_can_be_spoilt(tmp_path: Path) -> None:
    whole = made.write(tmp_path, "mixtral")
    config = json.loads((whole / "config.json").read_text())
    assert config["num_local_experts"] == 8
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    tensors = load_file(whole / index[name])
    assert tensors[name].shape == (made.HIDDEN, made.INTERMEDIATE)
    assert made.write(tmp_path, "mixtral") == whole
    spoilt = made.write(
        tmp_path / "other", "mixtral",
        change=lambda given: {key: t for key, t in given.items() if key != name},
        config={"num_local_experts": 9},
    )  # fmt: skip
    assert (
        name not in json.loads((spoilt / "model.safetensors.index.json").read_text())["weight_map"]
    )
    assert json.loads((spoilt / "config.json").read_text())["num_local_experts"] == 9
    again = load_file(made.write(tmp_path / "again", "mixtral") / index[name])
    assert torch.equal(again[name], tensors[name]), "seeds are names"
