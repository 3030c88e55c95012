"""Where a kernel holds its tensors: what it reads travels, what cannot be exchanged is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime.config import ConfigError
from prefetch_runtime.vllm.seats import Seats, fields_in_use, tensors_held

pytestmark = pytest.mark.engine

S = 4


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.rand(S, *shape), requires_grad=False)


def _layer(**more: Any) -> Any:
    """As after post-processing: a scale as it is, one as a view, two names of one weight."""
    layer: Any = torch.nn.Module()
    layer.layer_name = "l"
    layer.w13_qweight, layer.w2_weight = _parameter(3, 5), _parameter(5)
    layer.w13_weight = layer.w13_qweight
    layer.w13_scale, layer.w2_scale = _parameter(3, 1), _parameter()
    layer.weight_shape = _parameter(2)
    layer.g_idx = torch.nn.Parameter(torch.empty(S, 0), requires_grad=False)
    config = SimpleNamespace(
        _w1=SimpleNamespace(scale=layer.w13_scale, zp=None),
        _w2=SimpleNamespace(scale=layer.w2_scale.data.view(S, 1, 1), zp=layer.g_idx),
        **more,
    )
    experts = SimpleNamespace(quant_config=config, limit=torch.tensor(7.0))
    layer.quant_method = SimpleNamespace(
        moe_kernel=SimpleNamespace(impl=[experts], owner=layer), moe_quant_config=config
    )
    return layer


def _produced(layer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in layer._parameters.items()}


IN_USE = ["w2_weight", "w13_weight", "w13_scale", "w2_scale"]


def test_tensors_are_found_however_deep_and_modules_are_not_entered() -> None:
    layer = _layer()
    found = dict(tensors_held(layer.quant_method.moe_kernel))
    assert list(found) == [
        "SimpleNamespace.impl[0].quant_config._w1.scale",
        "SimpleNamespace.impl[0].quant_config._w2.scale",
        "SimpleNamespace.impl[0].quant_config._w2.zp",
        "SimpleNamespace.impl[0].limit",
    ]


def test_what_holds_itself_is_walked_once() -> None:
    ring = SimpleNamespace(scale=torch.ones(2))
    ring.itself = {"again": [ring]}
    assert len(list(tensors_held(ring))) == 1


def test_what_the_kernel_reads_travels_once_and_nothing_else() -> None:
    layer = _layer()
    assert list(fields_in_use(layer, _produced(layer))) == IN_USE


def test_the_kernel_reads_a_wave_and_then_the_slots_again() -> None:
    layer = _layer()
    slots = fields_in_use(layer, _produced(layer))
    before = {name: tensor.clone() for name, tensor in slots.items()}
    seats = Seats(layer, slots)
    wave = {name: torch.rand(2, *tensor.shape[1:]) for name, tensor in slots.items()}
    config = layer.quant_method.moe_quant_config

    def reads(rows: dict[str, torch.Tensor]) -> None:
        assert torch.equal(layer.w13_weight, rows["w13_weight"])
        assert torch.equal(layer.w13_qweight, rows["w13_weight"])
        assert torch.equal(layer.w2_weight, rows["w2_weight"])
        assert torch.equal(config._w1.scale, rows["w13_scale"])
        assert torch.equal(config._w2.scale, rows["w2_scale"].view(-1, 1, 1))

    seats.point(wave)
    reads(wave)
    seats.restore()
    reads(before)
    assert layer.w13_weight.data_ptr() == slots["w13_weight"].data_ptr()


def test_rows_of_experts_outside_of_the_slots_are_refused() -> None:
    layer = _layer(alphas=torch.rand(S))
    with pytest.raises(ConfigError, match=r"l: SimpleNamespace keeps .*quant_config.alphas \(4,\)"):
        Seats(layer, fields_in_use(layer, _produced(layer)))


def test_a_part_of_a_slot_is_refused() -> None:
    layer = _layer()
    layer.quant_method.moe_quant_config.half = layer.w13_scale.data[:, :2]
    with pytest.raises(ConfigError, match=r"half \(4, 2, 1\) torch.float32 is a part of w13_scale"):
        Seats(layer, fields_in_use(layer, _produced(layer)))
