"""Experts created on the host and post-processed a slot-sized chunk at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime.host_store import HostStore, LayerStore
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.vllm.loading import create_on_host, process_in_chunks

CPU = torch.device("cpu")
NUM_EXPERTS = 10


class Method:
    """Stands in for a quantisation method of vLLM's."""

    def __init__(self) -> None:
        self.kernel: Any = None
        self.chunks: list[int] = []

    def create_weights(self, layer: torch.nn.Module, num_experts: int) -> None:
        made = {
            "w13_weight": torch.empty(num_experts, 4, 6, dtype=torch.bfloat16),
            "w2_weight": torch.empty(num_experts, 6, 2, dtype=torch.bfloat16),
            "w13_weight_scale": torch.full((num_experts,), 0.5),
            "input_scale": torch.ones(1),  # one for the layer
        }
        for name, tensor in made.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.weight_loader = f"loads {name}"  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def process(self, layer: Any) -> None:
        """What every method does: looks at the counts, builds a kernel, may run only once."""
        assert self.kernel is None, "the method has been run before"
        assert not hasattr(layer, "processed"), "the layer has been processed before"
        layer.processed = True
        assert layer.local_num_experts == layer.moe_config.num_experts == len(layer.w13_weight)
        self.kernel = SimpleNamespace(num_experts=layer.local_num_experts)
        self.chunks.append(layer.local_num_experts)


class Transposing(Method):
    """Leaves one tensor in another layout and adds one of its own."""

    def process(self, layer: Any) -> None:
        super().process(layer)
        w13 = layer.w13_weight.data
        layer.w13_weight = torch.nn.Parameter(w13.transpose(1, 2).contiguous(), requires_grad=False)
        layer.register_parameter(
            "w13_sum", torch.nn.Parameter(w13.float().sum((1, 2)), requires_grad=False)
        )


class InPlace(Method):
    """Changes values, not the layout."""

    def process(self, layer: Any) -> None:
        super().process(layer)
        layer.w2_weight.data.neg_()


def _created(method: Method) -> tuple[Any, LayerStore, HostStore]:
    layer: Any = torch.nn.Module()
    layer.register_parameter("of_before", torch.nn.Parameter(torch.zeros(NUM_EXPERTS)))
    layer.quant_method = method
    layer.global_num_experts = layer.local_num_experts = NUM_EXPERTS
    layer.moe_config = SimpleNamespace(num_experts=NUM_EXPERTS)
    host_store = HostStore()
    store = create_on_host(
        method.create_weights,
        layer,
        layer_idx=3,
        num_experts=NUM_EXPERTS,
        host_store=host_store,
        arguments={"num_experts": NUM_EXPERTS},
    )
    return layer, store, host_store


def _filled(method: Method) -> tuple[Any, LayerStore, HostStore, dict[str, torch.Tensor]]:
    """As after the checkpoint was loaded; with a copy of what was loaded."""
    layer, store, host_store = _created(method)
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data.normal_(generator=torch.Generator().manual_seed(len(name)))
    loaded = {name: store.tensor(name).clone() for name in (f.name for f in store.layout.fields)}
    return layer, store, host_store, loaded


def _process(
    layer: Any, store: LayerStore, host_store: HostStore, num_slots: int
) -> tuple[LayerStore, SlotBuffers]:
    method = layer.quant_method
    return process_in_chunks(
        lambda target: method.process(target),
        layer,
        store=store,
        num_slots=num_slots,
        device=CPU,
        host_store=host_store,
    )


class TestCreateOnHost:
    def test_per_expert_parameters_live_in_the_records(self) -> None:
        layer, store, host_store = _created(Method())
        assert [field.name for field in store.layout.fields] == [
            "w13_weight",
            "w2_weight",
            "w13_weight_scale",
        ]
        assert host_store.layer(3) is store
        for field in store.layout.fields:
            parameter = getattr(layer, field.name)
            assert parameter.data_ptr() == store.address + field.offset
            assert parameter.shape == (NUM_EXPERTS, *field.shape)
            assert parameter.weight_loader == f"loads {field.name}"
        layer.w2_weight.data[7].fill_(1.5)
        assert (store.tensor("w2_weight")[7] == 1.5).all()

    def test_what_a_method_initialises_is_kept(self) -> None:
        _, store, _ = _created(Method())
        assert store.tensor("w13_weight_scale").tolist() == [0.5] * NUM_EXPERTS

    def test_parameters_of_the_layer_and_of_others_stay_where_they_are(self) -> None:
        layer, store, _ = _created(Method())
        end = store.address + store.nbytes
        for name in ("input_scale", "of_before"):
            assert not store.address <= getattr(layer, name).data_ptr() < end

    def test_they_are_created_on_the_host_whatever_vllm_loads_to(self) -> None:
        with torch.device("meta"):
            layer, _, _ = _created(Method())
        assert layer.w13_weight.device == CPU


@pytest.mark.parametrize("num_slots", [4, 5, 10])  # 4 leaves a last chunk of 2
class TestProcessInChunks:
    def test_a_method_that_changes_nothing_leaves_the_records(self, num_slots: int) -> None:
        layer, store, host_store, loaded = _filled(Method())
        final, _ = _process(layer, store, host_store, num_slots)
        assert final is store
        for name, tensor in loaded.items():
            assert torch.equal(final.tensor(name), tensor)

    def test_the_slots_are_the_layers_own_parameters(self, num_slots: int) -> None:
        layer, store, host_store, _ = _filled(Method())
        _, buffers = _process(layer, store, host_store, num_slots)
        assert buffers.num_slots == num_slots
        for name, tensor in buffers.tensors.items():
            assert getattr(layer, name).data_ptr() == tensor.data_ptr()
            assert tensor.shape[0] == num_slots
            assert tensor.data_ptr() != store.tensor(name).data_ptr()

    def test_records_take_the_layout_that_the_method_left(self, num_slots: int) -> None:
        layer, store, host_store, loaded = _filled(Transposing())
        final, buffers = _process(layer, store, host_store, num_slots)
        assert host_store.layer(3) is final
        assert final is not store
        assert torch.equal(final.tensor("w13_weight"), loaded["w13_weight"].transpose(1, 2))
        assert torch.equal(final.tensor("w2_weight"), loaded["w2_weight"])
        assert torch.equal(final.tensor("w13_sum"), loaded["w13_weight"].float().sum((1, 2)))
        assert set(buffers.tensors) == {field.name for field in final.layout.fields}
        assert "input_scale" not in buffers.tensors

    def test_values_changed_in_place_are_written_back(self, num_slots: int) -> None:
        layer, store, host_store, loaded = _filled(InPlace())
        final, _ = _process(layer, store, host_store, num_slots)
        assert final is store
        assert torch.equal(final.tensor("w2_weight"), -loaded["w2_weight"])
        assert torch.equal(final.tensor("w13_weight"), loaded["w13_weight"])

    def test_every_chunk_starts_afresh_and_sees_a_layer_of_slots(self, num_slots: int) -> None:
        method = Method()  # asserts so itself
        layer, store, host_store, _ = _filled(method)
        _process(layer, store, host_store, num_slots)
        assert method.chunks == [num_slots] * -(-NUM_EXPERTS // num_slots)
        assert method.kernel.num_experts == num_slots
        assert layer.local_num_experts == layer.global_num_experts == NUM_EXPERTS
        assert layer.moe_config.num_experts == NUM_EXPERTS

    def test_a_method_that_fails_leaves_the_counts(self, num_slots: int) -> None:
        layer, store, host_store, _ = _filled(Method())
        layer.processed = True
        with pytest.raises(AssertionError, match="has been processed before"):
            _process(layer, store, host_store, num_slots)
        assert layer.local_num_experts == NUM_EXPERTS
