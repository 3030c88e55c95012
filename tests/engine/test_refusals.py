"""What the cache refuses before anything is loaded, asked with vLLM's own configuration."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime.config import ConfigError, PrefetchConfig
from tests.engine.conftest import MODEL, WORKER

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ON = {"slots_per_layer": 8}
CACHE = "the expert cache ('slots_per_layer' (--moe-expert-cache-size)) does not support "


class Reached(Exception):
    """vLLM's own constructor was reached."""


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefetch_runtime.vllm import PrefetchWorker

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(PrefetchWorker.__bases__[0], "__init__", reached)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def _vllm_config(model: str = MODEL, settings: Any = ON, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        **{
            "model": model,
            "worker_cls": WORKER,
            "max_model_len": 128,
            "enforce_eager": True,
            "additional_config": {} if settings is None else {"prefetch_runtime": settings},
            **options,
        }
    ).create_engine_config()


def _start(vllm_config: Any) -> None:
    """Build the worker as vLLM does."""
    from prefetch_runtime.vllm import PrefetchWorker

    PrefetchWorker(vllm_config, 0, 0, "no address: never connected")


def _refused(vllm_config: Any, message: str) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    with pytest.raises(ConfigError, match=re.escape(message)):
        _start(vllm_config)
    assert "RoutedExperts" not in op_registry_oot


@pytest.mark.parametrize("settings", [None, {"predictor": "next_gate"}, {"slots_per_layer": 0}, ON])
def test_a_worker_without_a_size_says_that_the_cache_is_off(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefetch_runtime.vllm import worker

    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(worker, "logger", logger)
    with pytest.raises(Reached):
        _start(_vllm_config(settings=settings))
    forgotten = settings is None or "slots_per_layer" not in settings
    off = "Expert cache: off, vLLM alone; on with 'slots_per_layer' (--moe-expert-cache-size)"
    assert said == [off] * forgotten


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"slots_per_layer": 8, "expert_cache_gib": 1.0},
                "both size the cache; give one of them",
            ),
            (
                {"slots_per_layers": 8},
                "unknown setting 'slots_per_layers' in 'prefetch_runtime'; did you mean "
                "'slots_per_layer' (--moe-expert-cache-size)?",
            ),
            ({"slots": 8}, "unknown setting 'slots'"),
            ({"slots_per_layer": -8}, "or 'auto', got -8"),
            ({"slots_per_layer": "eight"}, "or 'auto', got 'eight'"),
            ({"slots_per_layer": "8"}, "or 'auto', got '8'"),
            ({"slots_per_layer": 8, "policy": "lur"}, "did you mean 'lru'?"),
            (
                {"slots_per_layer": 8, "metrics": True},
                "variable PROMETHEUS_MULTIPROC_DIR: the worker",
            ),
            (8, "must be an object such as"),
        ],
        ids=str,
    )
    def test_settings_that_cannot_be_used(self, settings: Any, message: str) -> None:
        _refused(_vllm_config(settings=settings), message)

    def test_our_key_misspelt(self) -> None:
        config = _vllm_config(additional_config={"prefetch-runtime": {"slots_per_layer": 8}})
        _refused(config, "unknown key 'prefetch-runtime' in --additional-config; did you mean")

    @pytest.mark.parametrize(
        ("mode", "message"),
        [("full", "needs a CUDA device, this is 'cpu'"), ("segmented", "needs a CUDA device")],
    )
    def test_a_mode_that_is_not_there(self, mode: str, message: str) -> None:
        if torch.cuda.is_available():
            pytest.skip("only on CPU")
        _refused(
            _vllm_config(settings={**ON, "mode": mode}),
            f"'mode' (--prefetch-mode) '{mode}' {message}",
        )


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2; it runs on one GPU: use 1"),
            ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2; it runs on one GPU"),
            ({"data_parallel_size": 2}, "--data-parallel-size 2; it runs on one GPU"),
            ({"enable_expert_parallel": True}, "--enable-expert-parallel; leave it out"),
            ({"enable_lora": True}, "LoRA (--enable-lora); serve without adapters"),
            (
                {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
                "speculative decoding (--speculative-config); leave it out",
            ),
            ({"cpu_offload_gb": 1}, "--cpu-offload-gb 1; vLLM's offloaders would move the same"),
            ({"offload_group_size": 2}, "--offload-group-size 2; vLLM's offloaders"),
            ({"offload_backend": "uva"}, "--offload-backend uva; vLLM's offloaders"),
            (
                {"weight_transfer_config": {"backend": "nccl"}},
                "weight transfer (--weight-transfer-config); experts are loaded once",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_options_that_the_cache_does_not_serve(
        self, options: dict[str, Any], message: str
    ) -> None:
        _refused(_vllm_config(**options), CACHE + message)

    @pytest.mark.parametrize(
        ("part", "option", "message"),
        [
            ("parallel_config", "enable_dbo", "--enable-dbo; two micro-batches would share"),
            ("parallel_config", "enable_eplb", "--enable-eplb; EPLB moves experts by itself"),
            ("model_config", "enable_sleep_mode", "sleep mode (--enable-sleep-mode); the slots"),
        ],
    )
    def test_options_that_vllm_refuses_on_this_platform_first(
        self, part: str, option: str, message: str
    ) -> None:
        config = _vllm_config()
        setattr(getattr(config, part), option, True)
        _refused(config, CACHE + message)

    def test_compilation_on_a_cpu(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("only on CPU")
        _refused(_vllm_config(enforce_eager=False), "anything; add --enforce-eager")

    def test_without_settings_no_option_is_refused(self) -> None:
        with pytest.raises(Reached):
            _start(_vllm_config(settings=None, enable_lora=True))

    def test_what_is_supported_reaches_vllms_constructor(self) -> None:
        with pytest.raises(Reached):
            _start(_vllm_config())


class TestModels:
    def _folder(self, path: Path, **config: Any) -> str:
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    def test_a_dense_model(self, tmp_path: Path) -> None:
        model = self._folder(
            tmp_path,
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=256,
            max_position_embeddings=256,
            torch_dtype="bfloat16",
        )
        _refused(
            _vllm_config(model, skip_tokenizer_init=True),
            f"{model} has no experts (a dense model), so there is nothing to cache; "
            "leave 'slots_per_layer' (--moe-expert-cache-size) out",
        )

    def test_a_family_with_experts_of_its_own_is_not_called_dense(self, tmp_path: Path) -> None:
        model = self._folder(
            tmp_path,
            architectures=["DbrxForCausalLM"],
            model_type="dbrx",
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=256,
            vocab_size=256,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            torch_dtype="bfloat16",
        )
        _refused(
            _vllm_config(model, skip_tokenizer_init=True),
            "the cache refuses this: models of type dbrx bring an experts class of their own "
            "(DbrxExperts), which it cannot replace; serve it with plain vllm serve",
        )

    def test_a_folder_that_is_not_there_is_vllms_own_error(self) -> None:
        with pytest.raises(Exception, match="no-such-model"):
            _vllm_config("/no-such-model")

    def test_a_model_class_with_experts_of_its_own(self) -> None:
        from prefetch_runtime.vllm.checks import check_layers_are_ours

        class Experts(torch.nn.Module):
            """Stands in for vLLM's class."""

        class Ours(Experts):
            """Stands in for our replacement."""

        class DbrxExperts(Experts):
            """A model's own."""

        def check(*layers: torch.nn.Module) -> None:
            model = torch.nn.ModuleDict({f"l{i}": layer for i, layer in enumerate(layers)})
            check_layers_are_ours(
                model.named_modules(), Experts, lambda layer: isinstance(layer, Ours)
            )

        check(Ours(), torch.nn.ReLU(), Ours())
        with pytest.raises(ConfigError, match="l1 brings its own experts class DbrxExperts, which"):
            check(Ours(), DbrxExperts())
        with pytest.raises(ConfigError, match="the model has no MoE layer that vLLM's RoutedExp"):
            check(torch.nn.ReLU())


class UnquantizedFusedMoEMethod(SimpleNamespace):
    """Stands in for vLLM's method of this name."""


class TritonExperts:
    """Stands in for vLLM's kernel of this name."""


class DeepGemmExperts:
    """A kernel whose exactness nobody has proved."""


class TestKernels:
    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._on(monkeypatch, cpu=False)

    def _on(self, monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> None:
        from prefetch_runtime.vllm import kernels

        platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setattr(kernels, "current_platform", platform)

    def _method(self, experts: Any, *, monolithic: bool = False) -> Any:
        return UnquantizedFusedMoEMethod(
            moe_kernel=SimpleNamespace(fused_experts=experts), is_monolithic=monolithic
        )

    def test_a_kernel_that_was_proved_is_returned(self) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        experts = TritonExperts()
        assert check_kernel("l", self._method(experts)) is experts

    def test_a_monolithic_kernel(self) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        for method in (
            self._method(TritonExperts(), monolithic=True),
            UnquantizedFusedMoEMethod(moe_kernel=None, is_monolithic=False),
        ):
            with pytest.raises(
                ConfigError,
                match=r"l: vLLM chose .* inside itself \(monolithic\).* add --moe-backend triton",
            ):
                check_kernel("l", method)

    def test_on_a_cpu_no_backend_is_named_that_it_does_not_have(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        self._on(monkeypatch, cpu=True)
        for method in (self._method(TritonExperts(), monolithic=True), self._method(object())):
            with pytest.raises(
                ConfigError, match=r"; on a CPU take unquantised experts, and vLLM 0\.30 or later$"
            ):
                check_kernel("l", method)

    def test_a_kernel_that_was_not_proved(self) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        with pytest.raises(ConfigError, match="l: vLLM chose the expert kernel DeepGemmExperts"):
            check_kernel("l", self._method(DeepGemmExperts()))

    def test_a_format_that_was_not_proved(self) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        with pytest.raises(ConfigError, match="cannot serve the format of SimpleNamespace; use an"):
            check_kernel("l", SimpleNamespace(moe_kernel=None, is_monolithic=False))

    @pytest.mark.parametrize(
        ("method", "remedy"),
        [
            ("Fp8MoEMethod", "add --moe-backend triton or --moe-backend marlin"),
            ("AutoGPTQMoEMethod", "add --moe-backend marlin"),
            ("GptOssMxfp4MoEMethod", "add --moe-backend marlin"),
        ],
    )
    def test_before_anything_is_loaded_and_with_what_would_work(
        self, method: str, remedy: str
    ) -> None:
        from prefetch_runtime.vllm.kernels import check_method

        def chosen(experts: type) -> Any:
            return type(method, (), {"experts_cls": experts})()

        check_method("l", chosen(TritonExperts))
        with pytest.raises(ConfigError, match=f"l: .* kernel DeepGemmExperts, .*{remedy}$"):
            check_method("l", chosen(DeepGemmExperts))
        monolithic = type("TritonExperts", (), {"is_monolithic": staticmethod(lambda: True)})
        with pytest.raises(ConfigError, match=f"routes inside itself .*{remedy}$"):
            check_method("l", chosen(monolithic))

    def test_int4_that_vllm_did_not_give_to_marlin(self) -> None:
        from prefetch_runtime.vllm.kernels import check_method

        with pytest.raises(ConfigError, match="MoeWNA16Method: int4 that vLLM did not give to M"):
            check_method("l", type("MoeWNA16Method", (), {})())

    @pytest.mark.parametrize(("scale", "is_refused"), [(None, True), (torch.ones(()), False)])
    def test_activations_scaled_by_the_whole_batch(self, scale: Any, is_refused: bool) -> None:
        from prefetch_runtime.vllm.kernels import check_kernel

        experts: Any = TritonExperts()
        experts.quant_config = SimpleNamespace(
            use_fp8_w8a8=True, is_per_tensor=True, a2_scale=scale
        )
        method: Any = type("Fp8MoEMethod", (), {})()
        method.moe_kernel, method.is_monolithic = SimpleNamespace(fused_experts=experts), False
        if is_refused:
            with pytest.raises(ConfigError, match=r"l: .* of the whole batch .* marlin, or"):
                check_kernel("l", method)
        else:
            assert check_kernel("l", method) is experts


@pytest.mark.parametrize("slots", [4, 32])
def test_slots_from_top_k_to_all_experts_are_accepted(slots: int) -> None:
    from prefetch_runtime.vllm.checks import check_slots

    check_slots(slots, top_k=4, num_experts=32, layer_name="l", asked="asked")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (3, "asked gives 3 slots to l, but one token needs 4 experts at once; set "),
        (0, "asked gives 0 slots to l"),
        (33, "asked asks for 33 slots, but l has only 32 experts; set "),
    ],
)
def test_slots_outside_are_refused(slots: int, message: str) -> None:
    from prefetch_runtime.vllm.checks import check_slots

    with pytest.raises(ConfigError, match=message):
        check_slots(slots, top_k=4, num_experts=32, layer_name="l", asked="asked")


def test_the_compile_cache_is_keyed_by_our_version_and_settings() -> None:
    from prefetch_runtime.vllm.checks import prepare_compilation

    def key(settings: Any, version: str) -> str:
        config = _vllm_config(settings=settings)
        prepare_compilation(config, mode="eager", version=version)
        made: str = config.compute_hash()
        return made

    keys = [
        _vllm_config(settings=None).compute_hash(),
        key({"slots_per_layer": 8}, "1"),
        key({"slots_per_layer": 9}, "1"),
        key({"slots_per_layer": 8}, "2"),
    ]
    assert len(set(keys)) == 4
    assert key({"slots_per_layer": 8}, "1") == keys[1]


@pytest.mark.parametrize(("mode", "graphs"), [("eager", "NONE"), ("full", "FULL_DECODE_ONLY")])
def test_only_the_graphs_that_the_mode_can_serve_are_captured(mode: str, graphs: str) -> None:
    from vllm.config import CUDAGraphMode

    from prefetch_runtime.vllm.checks import prepare_compilation

    for asked in CUDAGraphMode:
        config = _vllm_config()
        config.compilation_config.cudagraph_mode = asked
        prepare_compilation(config, mode=mode, version="1")
        assert config.compilation_config.cudagraph_mode == CUDAGraphMode[graphs]


def test_layers_of_two_sizes_are_refused_in_mode_full_with_the_modes_that_take_them() -> None:
    from prefetch_runtime.copier import HostCopier
    from prefetch_runtime.device_scheduler import DeviceScheduler
    from prefetch_runtime.host_store import HostStore, RecordLayout
    from prefetch_runtime.slot_buffers import SlotBuffers
    from prefetch_runtime.vllm.engine import PrefetchEngine

    engine: Any = PrefetchEngine.__new__(PrefetchEngine)
    cpu, store = torch.device("cpu"), HostStore(pinning=False)
    layout = RecordLayout.from_tensors({"w13_weight": ((4,), torch.float32)})
    engine.mode = "full"
    engine.scheduler = DeviceScheduler(copier=HostCopier(), host_store=store, device=cpu)
    for layer_idx, experts in enumerate((8, 12)):
        layer = store.add_layer(layer_idx, experts, layout)
        engine.scheduler.add_layer(layer_idx, "", layer, SlotBuffers(4, layout, cpu))
    message = (
        "'mode' (--prefetch-mode) 'full' cannot serve this model: it needs the same number of "
        "experts and slots in every MoE layer, got [(8, 4), (12, 4)] (experts, slots); use "
        "'segmented' or 'eager'"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.seal(torch.nn.Module())


def test_a_layer_built_outside_our_worker_says_so() -> None:
    from prefetch_runtime.vllm.engine import current_engine

    with pytest.raises(RuntimeError, match=r"built outside PrefetchWorker\.load_model"):
        current_engine()


class TestRegistration:
    def test_models_are_built_with_our_experts_within_the_context_alone(self) -> None:
        from vllm.model_executor.custom_op import op_registry_oot

        from prefetch_runtime.vllm import routed_experts

        with routed_experts.registered():
            assert op_registry_oot["RoutedExperts"] is routed_experts.PrefetchRoutedExperts
        assert not op_registry_oot
        with pytest.raises(Reached), routed_experts.registered():
            raise Reached
        assert not op_registry_oot

    def test_a_worker_that_has_not_loaded_anything_has_registered_nothing(self) -> None:
        from vllm.model_executor.custom_op import op_registry_oot

        with pytest.raises(Reached):
            _start(_vllm_config())
        assert not op_registry_oot

    def test_anothers_replacement_is_not_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.custom_op import op_registry_oot

        from prefetch_runtime.vllm import routed_experts

        class Theirs:
            """Another plugin's."""

        monkeypatch.setitem(op_registry_oot, "RoutedExperts", Theirs)
        with (
            pytest.raises(RuntimeError, match=r"another plugin has replaced .* with Theirs"),
            routed_experts.registered(),
        ):
            pass
        assert op_registry_oot == {"RoutedExperts": Theirs}

    def test_the_plugin_registers_nothing(self) -> None:
        from vllm.model_executor.custom_op import op_registry_oot

        from prefetch_runtime.vllm.plugin import register

        register()
        assert "RoutedExperts" not in op_registry_oot


def test_the_settings_of_the_worker_are_those_of_the_configuration() -> None:
    config = _vllm_config(settings={"slots_per_layer": 8, "policy": "lfru"})
    parsed = PrefetchConfig.from_additional_config(config.additional_config)
    assert (parsed.slots_per_layer, parsed.policy) == (8, "lfru")
