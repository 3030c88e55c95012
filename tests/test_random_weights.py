"""Random weights are numbers of sensible size in every format, and the same for the same name."""

import math

import pytest
import torch

from benchmarks.shapes import _weights

CPU = torch.device("cpu")


def _filled(name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=dtype)
    _weights._fill(name, tensor, _weights._Scratch(CPU))
    return tensor


def test_memory_is_used_again() -> None:
    scratch = _weights._Scratch(CPU)
    first = scratch.of(torch.Size([4, 8]), torch.float32)
    assert scratch.of(torch.Size([3, 2]), torch.float32).data_ptr() == first.data_ptr()
    assert scratch.of(torch.Size([4, 8]), torch.bfloat16).data_ptr() != first.data_ptr()
    assert scratch.of(torch.Size([5, 8]), torch.float32).shape == (5, 8)


def test_what_is_put_has_the_values_of_what_was_made() -> None:
    generator = torch.Generator(CPU).manual_seed(_weights.zlib.crc32(b"w13_weight:1"))
    expected = (torch.randn(6, 16, generator=generator) * 16**-0.5).bfloat16()
    assert torch.equal(_filled("w13_weight", 2, 6, 16, dtype=torch.bfloat16)[1], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_keep_activations_near_one(dtype: torch.dtype) -> None:
    made = _filled("w13_weight", 3, 64, 256, dtype=dtype).float()
    assert float(made.std()) == pytest.approx(1 / math.sqrt(256), rel=0.1)
    assert not torch.equal(made[0], made[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_packed_weights_are_random_bits(dtype: torch.dtype) -> None:
    made = _filled("w13_weight_packed", 2, 64, 32, dtype=dtype)
    assert len(made.unique()) > 200
    assert torch.equal(made, _filled("w13_weight_packed", 2, 64, 32, dtype=dtype))
    assert not torch.equal(made[0], made[1])


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float32, 0.5, 1.5), (torch.bfloat16, 0.0024, 0.0076), (torch.uint8, 120, 120)],
)
def test_scales_are_positive(dtype: torch.dtype, low: float, high: float) -> None:
    made = _filled("experts.w2_weight_scale", 2, 16, 8, dtype=dtype).float()
    assert low <= float(made.min()) <= float(made.max()) <= high


def test_norms_are_one() -> None:
    assert _filled("norm.weight", 8, dtype=torch.bfloat16).tolist() == [1.0] * 8
