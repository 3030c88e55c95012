"""vLLM's own quantisation methods, post-processed in slot-sized chunks: the bytes of a whole layer.

What needs a GPU is repacking an expert's bits; it is replaced by another shuffle of each expert's
own bytes. All else is vLLM's code: what it takes from where, what it leaves behind, and what its
kernel objects hold.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import marlin_moe
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, mxfp4
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.v1.worker import workspace

from prefetch_runtime.audit import audit
from prefetch_runtime.copier import create_copier
from prefetch_runtime.host_store import HostStore, LayerStore
from prefetch_runtime.provider import CachedWeightProvider
from prefetch_runtime.scheduler import Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.vllm.engine import PrefetchEngine
from prefetch_runtime.vllm.kernels import FORMATS, RowKeeper, check_kernel
from prefetch_runtime.vllm.loading import create_on_host, process_in_chunks
from prefetch_runtime.vllm.marlin import MarlinBlocks
from prefetch_runtime.vllm.routed_experts import PrefetchRoutedExperts
from prefetch_runtime.vllm.seats import Seats, fields_in_use
from tests.engine.test_marlin import aligned
from tests.helpers.checkpoints import FORMATS as CHECKPOINTS
from tests.helpers.checkpoints import GPTQ, GROUP

pytestmark = pytest.mark.engine

E, HIDDEN, INTERMEDIATE = 10, 256, 128
QUANTISATION = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANTISATION}.compressed_tensors.compressed_tensors_moe"


def shuffled(weight: torch.Tensor, size_k: int, size_n: int, bits: int) -> torch.Tensor:
    """One expert's packed weights in Marlin's shape, every bit of them kept."""
    packed = weight.t().contiguous().view(torch.int32)
    return packed.reshape(size_k // 16, size_n * bits // 2)


def repack(b_q_weight: torch.Tensor, *given: Any, **named: Any) -> Any:
    """One expert: vLLM's arguments are [perm], size_k, size_n, num_bits in every version."""
    sizes = [value for value in (*given, *named.values()) if type(value) is int]
    return shuffled(b_q_weight, *sizes)


def repack_all(b_q_weight: torch.Tensor, *given: Any, **named: Any) -> Any:
    """All experts of a tensor [E, ...]."""
    return torch.stack([repack(one, *given, **named) for one in b_q_weight])


def quantise(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.fixture(autouse=True)
def on_a_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as it is set up when a model is built, without what only a GPU has."""
    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(ops, "gptq_marlin_moe_repack", repack_all)
    monkeypatch.setattr(ops, "awq_marlin_moe_repack", repack_all)
    monkeypatch.setattr(ops, "scaled_fp8_quant", quantise)
    monkeypatch.setattr(marlin_utils, "num_compute_units", lambda *_: 4)
    monkeypatch.setattr(MarlinExperts, "_supports_current_device", staticmethod(lambda: True))
    one_rank = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "_TP", one_rank)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        yield


def moe_config(**more: Any) -> moe.FusedMoEConfig:
    """What a layer of vLLM's knows of itself."""
    return moe.FusedMoEConfig(
        num_experts=E, experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=INTERMEDIATE,
        num_local_experts=E, num_logical_experts=E, device="cpu", in_dtype=torch.bfloat16,
        routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        **{"activation": MoEActivation.SILU, **more},
    )  # fmt: skip


Make = Callable[[Any, pytest.MonkeyPatch], Any]


def _choose(monkeypatch: pytest.MonkeyPatch, module: Any, backend: Any, experts: type) -> None:
    """Let every choice of a backend that a module makes be this one."""
    for name in vars(module):
        if name.startswith("select_") and name.endswith("_moe_backend"):
            monkeypatch.setattr(module, name, lambda *_, **__: (backend, experts))


def make_fp8(scheme: str, block: list[int] | None, backend: str) -> Make:
    def make(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = importlib.import_module(f"{QUANTISATION}.fp8")
        experts = {"TRITON": TritonExperts, "MARLIN": MarlinExperts}[backend]
        _choose(monkeypatch, module, fp8.Fp8MoeBackend[backend], experts)
        config = module.Fp8Config(
            is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=block
        )
        return module.Fp8MoEMethod(config, layer)

    return make


def _compressed_arguments(name: str) -> tuple[Any, Any]:
    from compressed_tensors.quantization import QuantizationArgs

    config: Any = CHECKPOINTS[name].config
    group = config["config_groups"]["group_0"]
    given = group["input_activations"]
    return (
        QuantizationArgs(**group["weights"]),
        None if given is None else QuantizationArgs(**given),
    )


def make_compressed_fp8(name: str) -> Make:
    def make(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = importlib.import_module(f"{COMPRESSED}.compressed_tensors_moe_w8a8_fp8")
        _choose(monkeypatch, module, fp8.Fp8MoeBackend.TRITON, TritonExperts)
        weights, activations = _compressed_arguments(name)
        return module.CompressedTensorsW8A8Fp8MoEMethod(weights, activations, layer.moe_config)

    return make


def make_compressed_int4(name: str) -> Make:
    def make(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        try:  # up to 0.27 or so
            module = importlib.import_module(f"{COMPRESSED}.compressed_tensors_moe_wna16_marlin")
            method = module.CompressedTensorsWNA16MarlinMoEMethod
        except ModuleNotFoundError:
            module = importlib.import_module(f"{COMPRESSED}.compressed_tensors_moe_wna16")
            method = module.CompressedTensorsWNA16MoEMethod
        _choose(monkeypatch, module, int_wna16.WNA16MoEBackend.MARLIN, MarlinExperts)
        weights, activations = _compressed_arguments(name)
        return method(weights, activations, layer.moe_config)

    return make


def make_packed(name: str, module_name: str, config_name: str, method_name: str) -> Make:
    def make(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = importlib.import_module(f"{QUANTISATION}.{module_name}")
        _choose(monkeypatch, module, int_wna16.WNA16MoEBackend.MARLIN, MarlinExperts)
        config = getattr(module, config_name).from_config(dict(CHECKPOINTS[name].config or {}))
        return getattr(module, method_name)(config, layer.moe_config)

    return make


def make_mxfp4(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(f"{QUANTISATION}.mxfp4")
    _choose(monkeypatch, module, mxfp4.Mxfp4MoeBackend.MARLIN, MarlinExperts)
    return module.GptOssMxfp4MoEMethod(layer.moe_config)


def make_act_order(layer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(f"{QUANTISATION}.auto_gptq")
    _choose(monkeypatch, module, int_wna16.WNA16MoEBackend.MARLIN, MarlinExperts)
    try:
        config = module.AutoGPTQConfig.from_config({**GPTQ, "desc_act": True})
    except ValueError as error:
        pytest.skip(f"this vLLM: {error}")
    return module.AutoGPTQMoEMethod(config, layer.moe_config)


ACT_ORDER = "gptq-act-order"
METHODS: Mapping[str, Make] = {
    ACT_ORDER: make_act_order,
    "fp8-static": make_fp8("static", None, "TRITON"),
    "fp8-dynamic-marlin": make_fp8("dynamic", None, "MARLIN"),
    "fp8-block": make_fp8("dynamic", [128, 128], "TRITON"),
    "fp8-block-marlin": make_fp8("dynamic", [128, 128], "MARLIN"),
    "ct-fp8-tensor": make_compressed_fp8("ct-fp8-tensor"),
    "ct-fp8-channel": make_compressed_fp8("ct-fp8-channel"),
    "ct-fp8-block": make_compressed_fp8("ct-fp8-block"),
    "ct-int4": make_compressed_int4("ct-int4"),
    "ct-int4-zeros": make_compressed_int4("ct-int4-zeros"),
    "gptq": make_packed("gptq", "auto_gptq", "AutoGPTQConfig", "AutoGPTQMoEMethod"),
    "gptq-8": make_packed("gptq-8", "auto_gptq", "AutoGPTQConfig", "AutoGPTQMoEMethod"),
    "awq": make_packed("awq", "auto_awq", "AutoAWQConfig", "AutoAWQMoEMethod"),
    "mxfp4": make_mxfp4,
}


def layer_of(
    name: str, monkeypatch: pytest.MonkeyPatch, *, ours: bool = False
) -> tuple[Any, dict[str, Any]]:
    """A layer of E experts before its weights are made, and what they are made with."""
    layer: Any = object.__new__(PrefetchRoutedExperts) if ours else torch.nn.Module()
    torch.nn.Module.__init__(layer)
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.moe_config = moe_config(
        **({"has_bias": True, "activation": MoEActivation.SWIGLUOAI} if name == "mxfp4" else {})
    )
    layer.global_num_experts = layer.local_num_experts = E
    layer.hidden_size, layer.params_dtype = HIDDEN, torch.bfloat16
    layer.intermediate_size_per_partition = INTERMEDIATE
    layer.apply_router_weight_on_input = False
    layer.activation = layer.moe_config.activation
    layer._expert_routing_tables = lambda: None
    layer.rocm_aiter_fmoe_enabled, layer._expert_map = False, None
    layer._loaded_expert_biases = set()
    layer.quant_method = METHODS[name](layer, monkeypatch)
    arguments = {
        "num_experts": E, "hidden_size": HIDDEN, "params_dtype": torch.bfloat16,
        "intermediate_size_per_partition": INTERMEDIATE, "global_num_experts": E,
        "weight_loader": lambda *_: None, "unpadded_hidden_size": HIDDEN,
        "intermediate_size_full": INTERMEDIATE,
    }  # fmt: skip
    return layer, arguments


def fill(layer: Any) -> None:
    """Random bytes that are numbers in every dtype; the same for the same layer."""
    for name, parameter in sorted(layer._parameters.items()):
        if parameter is None or parameter.dim() == 0 or parameter.shape[0] != E:
            continue
        torch.manual_seed(len(name) + parameter.numel())
        generator = torch.Generator().manual_seed(len(name) + parameter.numel())
        values = torch.rand(parameter.shape, generator=generator)
        if parameter.dtype.is_floating_point:
            parameter.data.copy_((values + 0.25).to(parameter.dtype))
        elif parameter.dtype == torch.uint8:
            parameter.data.copy_((values * 100 + 80).to(torch.uint8))
        else:
            parameter.data.copy_((values * 2**31).to(parameter.dtype))
        if "g_idx" in name:  # another order of the groups in every expert
            orders = torch.stack([torch.randperm(parameter.shape[1]) for _ in range(E)])
            parameter.data.copy_(orders // GROUP)


def whole(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer post-processed as vLLM does it, all experts at once."""
    layer, arguments = layer_of(name, monkeypatch)
    layer.quant_method.create_weights(layer=layer, **arguments)
    fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def chunked(
    name: str, num_slots: int, monkeypatch: pytest.MonkeyPatch, *, ours: bool = False
) -> tuple[Any, LayerStore, SlotBuffers, HostStore]:
    """The same in chunks, its records and slots, and what owns them."""
    layer, arguments = layer_of(name, monkeypatch, ours=ours)
    host_store = HostStore()
    store = create_on_host(
        layer.quant_method.create_weights, layer, layer_idx=0, num_experts=E,
        host_store=host_store, arguments=arguments,
    )  # fmt: skip
    fill(layer)
    final, buffers = process_in_chunks(
        layer.quant_method.process_weights_after_loading, layer, store=store,
        num_slots=num_slots, device=torch.device("cpu"), host_store=host_store,
        in_use=fields_in_use,
    )  # fmt: skip
    return layer, final, buffers, host_store


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("num_slots", [3, 10])
@pytest.mark.parametrize("name", METHODS)
def test_records_are_the_rows_of_a_whole_layer(
    name: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(name, monkeypatch)
    layer, store, buffers, _ = chunked(name, num_slots, monkeypatch)
    fields = {field.name for field in store.layout.fields}
    per_expert = {
        key: parameter.data
        for key, parameter in expected._parameters.items()
        if parameter is not None and parameter.dim() and parameter.shape[0] == E
    }
    assert fields == set(fields_in_use(expected, per_expert))
    assert fields == set(buffers.tensors)
    for field in fields:
        rows = expected._parameters[field].data
        assert torch.equal(as_bytes(store.tensor(field)), as_bytes(rows)), field
    # What a method keeps once for the layer.
    for key, parameter in expected._parameters.items():
        if parameter is not None and parameter.dim() == 0:
            assert torch.equal(layer._parameters[key], parameter), key


@pytest.mark.parametrize("name", METHODS)
def test_the_kernel_is_served_and_holds_slots_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, store, buffers, _ = chunked(name, 3, monkeypatch)
    assert type(layer.quant_method).__name__ in FORMATS
    check_kernel("l", layer.quant_method)
    seats = Seats(layer, buffers.tensors)
    experts = layer.quant_method.moe_kernel.fused_experts
    wave = {field.name: store.tensor(field.name)[4:6].clone() for field in store.layout.fields}
    seats.point(wave)
    assert layer.w13_weight.shape[0] == layer.w2_weight.shape[0] == 2
    for held in (experts.w1_scale, experts.w2_scale):
        assert held.shape[0] == 2
        assert any(torch.equal(as_bytes(held), as_bytes(rows)) for rows in wave.values())
    seats.restore()
    assert layer.w13_weight.shape[0] == experts.w1_scale.shape[0] == 3
    assert (layer.local_num_experts, layer.moe_config.num_experts) == (E, E)


@pytest.mark.parametrize("name", [name for name in METHODS if name != ACT_ORDER])
def test_an_experts_record_is_as_large_as_its_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, _, _ = chunked(name, 3, monkeypatch)
    weights = 3 * HIDDEN * INTERMEDIATE * CHECKPOINTS[name].bits / 8
    biases = (2 * INTERMEDIATE + HIDDEN) * 2 if name == "mxfp4" else 0
    assert weights < store.layout.payload_bytes <= 1.2 * weights + biases


def test_static_activation_scales_are_the_largest_of_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, _, buffers, _ = chunked("fp8-static", 3, monkeypatch)
    raw, arguments = layer_of("fp8-static", monkeypatch)
    raw.quant_method.create_weights(layer=raw, **arguments)
    fill(raw)
    scales = raw.w13_input_scale
    assert scales[:3].max() < scales.max(), "the first chunk alone would have found another"
    assert layer.w13_input_scale == scales.max()
    assert "w13_input_scale" not in buffers.tensors


# Marlin, from the router's ids to the sum, with an emulated launch


MARLIN = [name for name in METHODS if name == ACT_ORDER or CHECKPOINTS[name].backend == "marlin"]
TOP_K = 2


def digest(*tensors: torch.Tensor) -> float:
    """A number of at most one that every byte of an expert's tensors weighs on."""
    total = 0
    for index, tensor in enumerate(tensors):
        raw = as_bytes(tensor).to(torch.int64)
        total += int((raw * (torch.arange(raw.numel()) % 1021 + index + 1)).sum())
    return total % 9973 / 9973


def launch(**given: Any) -> torch.Tensor:
    """In place of Marlin: rows that depend on the expert's bytes, the block's place, and on how
    many blocks there are."""
    hidden, size, top_k = given["hidden_states"], given["block_size_m"], given["num_topk"]
    out = torch.full((hidden.shape[0] * top_k, hidden.shape[1]), torch.nan)
    of_expert = ("w1", "w2", "w1_scale", "w2_scale", "w1_zeros", "w2_zeros", "bias1", "bias2",
                 "g_idx1", "g_idx2", "sort_indices1", "sort_indices2")  # fmt: skip
    blocks = int(given["num_tokens_post_padded"]) // size
    for block in range(blocks):
        row = int(given["expert_ids"][block])
        assert row >= 0
        tensors = [given.get(name) for name in of_expert]
        held = [t[row] for t in tensors if t is not None and t.numel()]
        factor = digest(*held) + block / 64 + blocks / 512
        for at in given["sorted_token_ids"][block * size : (block + 1) * size].tolist():
            if at < out.shape[0]:
                weight = float(given["topk_weights"].flatten()[at])
                out[at] = hidden[at // top_k].float() * factor * weight
    return out.to(hidden.dtype)


def moe_sum(rows: torch.Tensor, output: torch.Tensor, *_: Any) -> None:
    assert not rows.isnan().any(), "every row has been computed"
    output.copy_(rows.float().sum(1))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marlin_moe, "_fused_marlin_moe", launch)
    monkeypatch.setattr(marlin_moe, "moe_align_block_size", aligned)
    monkeypatch.setattr(ops, "moe_sum", moe_sum)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)
    workspace.init_workspace_manager(torch.device("cpu"))


def served(name: str, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer of ours on its slots, set up as on a GPU."""
    layer, store, buffers, host_store = chunked(name, num_slots, monkeypatch, ours=True)
    scheduler = Scheduler(
        copier=create_copier(torch.device("cpu")), host_store=host_store,
        device=torch.device("cpu"), id_for_padding=0,
    )  # fmt: skip
    scheduler.add_layer(0, "l", store, buffers)
    layer.top_k = TOP_K
    layer._cache_layer_idx = 0
    layer._sizes_asked = layer._sizes
    layer._cache_engine = SimpleNamespace(
        scheduler=scheduler, routed=lambda _, ids: ids, padding=lambda _: None,
        guesses=lambda *_: None,
        waves=lambda at, ids, guesses, *, whole, **_: scheduler.expert_waves(
            at, ids, guesses, whole=whole
        ),
    )  # fmt: skip
    layer._experts = check_kernel("l", layer.quant_method)
    layer._seats = Seats(layer, buffers.tensors)
    layer._tuned = None
    layer._blocks = MarlinBlocks(layer._experts, E, TOP_K)
    layer._rows = RowKeeper(layer._experts, torch.empty(64, TOP_K, HIDDEN, dtype=torch.bfloat16))
    layer._cache_provider = CachedWeightProvider(scheduler, 0)
    return layer


def steps() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(x, weights, ids) of steps of 1 to 60 tokens."""
    generator = torch.Generator().manual_seed(5)
    for tokens in (1, 1, 60, 2, 1, 17, 1):
        scores = torch.rand(tokens, E, generator=generator)
        weights, ids = scores.topk(TOP_K)
        x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
        yield x, weights, ids.to(torch.int32)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("num_slots", [TOP_K, 5, E])
@pytest.mark.parametrize("name", MARLIN)
def test_marlin_on_slots_gives_the_rows_of_the_resident_layer(
    name: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = whole(name, monkeypatch)
    resident.expert_map = None
    layer = served(name, num_slots, monkeypatch)
    scheduler = layer._cache_engine.scheduler
    seen = 0
    with torch.inference_mode():
        for x, weights, ids in steps():
            expected = resident.quant_method.apply(
                layer=resident, x=x, topk_weights=weights, topk_ids=ids,
                shared_experts=None, shared_experts_input=None,
            )  # fmt: skip
            ours = layer.forward_modular(
                x=x, topk_weights=weights, topk_ids=ids,
                shared_experts=None, shared_experts_input=None,
            )  # fmt: skip
            assert torch.equal(as_bytes(ours), as_bytes(expected))
            assert expected.abs().sum() > 0
            assert audit(scheduler) == []
            seen += 1
    assert seen == 7
    if num_slots < E:
        assert scheduler.stats().layers[0].misses > num_slots
        assert scheduler.stats().layers[0].waves > seen, "wide steps ran in waves"


@pytest.mark.usefixtures("emulated")
def test_the_next_router_is_shown_no_padding_of_the_hidden_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gpt-oss-20b has 2880 columns, which vLLM pads to 3072 for MXFP4 in Marlin.
    layer = served("mxfp4", 5, monkeypatch)
    layer._sizes_asked = (HIDDEN - 56, INTERMEDIATE)
    engine: Any = PrefetchEngine.__new__(PrefetchEngine)
    engine._gates = [torch.nn.Linear(HIDDEN - 56, E, dtype=torch.bfloat16)] * 2
    engine._num_layers, engine._top_k, engine.injection = 2, TOP_K, None
    engine.config = SimpleNamespace(predictor_widen=2)
    engine.scheduler = SimpleNamespace(needs_guesses=True, recorder=None)
    made: list[torch.Tensor] = []

    def guesses(layer_idx: int, x: torch.Tensor) -> None:
        guess = engine.guesses(layer_idx, x)
        made.append(guess())

    layer._cache_engine.guesses = guesses
    x = torch.nn.functional.pad(torch.ones(3, HIDDEN - 56, dtype=torch.bfloat16), (0, 56))
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    with torch.inference_mode():
        layer.forward_modular(
            x=x, topk_weights=torch.ones(3, TOP_K), topk_ids=ids,
            shared_experts=None, shared_experts_input=None,
        )  # fmt: skip
        expected = engine._gates[1](x[:, :-56]).topk(2 * TOP_K).indices
    assert torch.equal(made[0], expected)


@pytest.mark.usefixtures("emulated")
def test_the_emulated_launch_notices_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks in the order of slots are what a renaming of ids alone would give.
    resident = whole("gptq", monkeypatch)
    resident.expert_map = None
    layer = served("gptq", 5, monkeypatch)
    monkeypatch.setattr(layer, "_blocks", None)
    x = torch.randn(2, HIDDEN).to(torch.bfloat16)
    more = {
        "x": x, "topk_weights": torch.ones(2, TOP_K),
        "shared_experts": None, "shared_experts_input": None,
    }  # fmt: skip
    first = torch.tensor([[9, 4], [9, 4]], dtype=torch.int32)
    ids = torch.tensor([[7, 2], [9, 4]], dtype=torch.int32)
    with torch.inference_mode():
        layer.forward_modular(topk_ids=first, **more)
        ours = layer.forward_modular(topk_ids=ids, **more)
        expected = resident.quant_method.apply(layer=resident, topk_ids=ids, **more)
    assert not torch.equal(ours, expected)
