"""The places of vLLM that the adapter stands on, read from its source; nothing is imported.

The installed vLLM is read, and those in the folders that PREFETCH_RUNTIME_VLLM_SOURCES names
(separated like PATH; each the `vllm` package itself), so that one machine can check the oldest and
the newest supported version.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import pytest

from prefetch_runtime.early_refusals import OTHER_NAMES, refuse_misspelt

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "PREFETCH_RUNTIME_VLLM_SOURCES"
MOE = "model_executor/layers/fused_moe"


class Source:
    """One vLLM, as syntax trees."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def version(self) -> str:
        found = names_assigned(self.tree("_version.py"))
        value = found.get("version", found.get("__version__"))
        return ast.literal_eval(value) if value is not None else str(self.root)

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            file = self.root / path
            assert file.is_file(), f"vLLM {self.root}: there is no {path}"
            self._trees[path] = ast.parse(file.read_text())
        return self._trees[path]

    def cls(self, path: str, name: str) -> ast.ClassDef:
        for node in self.tree(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise AssertionError(f"vLLM {self.version}: {path} has no class {name}")

    def function(self, path: str, name: str, cls: str | None = None) -> ast.FunctionDef:
        body = self.tree(path).body if cls is None else self.cls(path, cls).body
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        owner = path if cls is None else f"{cls} in {path}"
        raise AssertionError(f"vLLM {self.version}: {owner} has no function {name}")

    def decorators(self, path: str, name: str, cls: str | None = None) -> list[str]:
        return [ast.unparse(node) for node in self.function(path, name, cls).decorator_list]


def names_assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Names that module-level assignments bind, `a = b = value` included."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


def text_of(node: ast.AST) -> str:
    """A node's source, without line breaks and repeated spaces."""
    return " ".join(ast.unparse(node).split())


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters that can be given by position."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)]


def takes(function: ast.FunctionDef, name: str) -> bool:
    """Whether a keyword argument of that name is taken."""
    named = {*parameters(function), *(a.arg for a in function.args.kwonlyargs)}
    return name in named or function.args.kwarg is not None


def fields(cls: ast.ClassDef) -> set[str]:
    """Annotated names of a class: the fields of a dataclass or a pydantic model."""
    return {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def members(cls: ast.ClassDef) -> set[str]:
    """Fields, methods, properties, enum members and what methods assign on `self`."""
    found = fields(cls) | set(names_assigned(ast.Module(body=cls.body, type_ignores=[])))
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer":
            found.add(str(ast.literal_eval(node.args[0])))
    return found


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    """Calls of a dotted name, as it is written."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def keywords(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def _roots() -> Iterator[Path]:
    installed = importlib.util.find_spec("vllm")
    if installed is not None and installed.origin is not None:
        yield Path(installed.origin).parent
    for folder in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if not (Path(folder) / "_version.py").is_file():
            raise pytest.UsageError(f"{VARIABLE}: {folder} is not a vllm package folder")
        yield Path(folder)


SOURCES = [Source(root) for root in _roots()]


@pytest.fixture(params=SOURCES, ids=lambda source: source.version)
def vllm(request: pytest.FixtureRequest) -> Source:
    source: Source = request.param
    return source


def require(vllm: Source, path: str, cls: str, *wanted: str) -> None:
    """That a class has these members."""
    missing = sorted(set(wanted) - members(vllm.cls(path, cls)))
    assert not missing, f"vLLM {vllm.version}: {cls} in {path} has no {', '.join(missing)}"


def test_there_is_a_vllm_to_read() -> None:
    assert SOURCES


def imports_of_the_adapter() -> Iterator[tuple[str, str]]:
    """(module, name) of every `from vllm... import ...` in the adapter."""
    for file in sorted((ROOT / "prefetch_runtime" / "vllm").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), sorted(set(imports_of_the_adapter())))
def test_what_the_adapter_imports_is_there(module: str, name: str, vllm: Source) -> None:
    folder = Path(*module.split(".")[1:])
    file = folder / "__init__.py" if (vllm.root / folder).is_dir() else folder.with_suffix(".py")
    if (vllm.root / folder / name).is_dir() or (vllm.root / folder / f"{name}.py").is_file():
        return
    body = vllm.tree(str(file))
    defined = set(names_assigned(body))
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    if "__getattr__" in defined:  # names that are made when they are first asked for
        defined |= {
            node.value
            for node in ast.walk(body)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    assert name in defined, f"vLLM {vllm.version}: {module} has no {name}"


class TestReplacingTheExperts:
    """`routed_experts.registered` and `PrefetchRoutedExperts`."""

    PATH = f"{MOE}/routed_experts.py"

    def test_a_registered_class_takes_the_place_of_the_one_of_that_name(self, vllm: Source) -> None:
        path = "model_executor/custom_op.py"
        assert "op_registry_oot" in names_assigned(vllm.tree(path))
        assert takes(vllm.function(path, "register_oot", "PluggableLayer"), "name")
        new = text_of(vllm.function(path, "__new__", "PluggableLayer"))
        assert "layer_class_name = cls.__name__" in new
        assert "op_registry_oot[layer_class_name]" in new

    def test_the_experts_are_such_a_layer(self, vllm: Source) -> None:
        bases = [ast.unparse(base) for base in vllm.cls(self.PATH, "RoutedExperts").bases]
        assert bases == ["PluggableLayer"]

    def test_what_the_layer_knows_of_itself(self, vllm: Source) -> None:
        require(
            vllm, self.PATH, "RoutedExperts",
            "layer_name", "moe_config", "quant_method", "top_k", "hidden_size", "params_dtype",
            "global_num_experts", "local_num_experts", "expert_map",
        )  # fmt: skip

    def test_the_expert_map_can_be_overridden(self, vllm: Source) -> None:
        assert vllm.decorators(self.PATH, "expert_map", "RoutedExperts") == ["property"]

    def test_the_method_is_chosen_by_one_call_before_the_weights_are_made(
        self, vllm: Source
    ) -> None:
        init = vllm.function(self.PATH, "__init__", "RoutedExperts")
        (chosen,) = calls(init, "self._get_quant_method")
        (made,) = calls(init, "self.quant_method.create_weights")
        assert chosen.lineno < made.lineno
        assert "layer" in keywords(made)
        assert made.args == [], "create_weights is called by keyword"

    def test_forward_modular_is_the_one_funnel_and_called_by_keyword(self, vllm: Source) -> None:
        forward = vllm.function(self.PATH, "forward_modular", "RoutedExperts")
        assert parameters(forward)[:4] == ["self", "x", "topk_weights", "topk_ids"]
        runner = vllm.tree(f"{MOE}/runner/moe_runner.py")
        (call,) = calls(runner, "self.routed_experts.forward_modular")
        assert call.args == []
        assert {"x", "topk_weights", "topk_ids"} <= keywords(call)
        assert all(takes(forward, name) for name in keywords(call))

    def test_the_weights_are_read_off_the_layer_at_every_call(self, vllm: Source) -> None:
        path = f"{MOE}/unquantized_fused_moe_method.py"
        (call,) = calls(vllm.cls(path, "UnquantizedFusedMoEMethod"), "self.moe_kernel.apply")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given["w1"] == "layer.w13_weight"
        assert given["w2"] == "layer.w2_weight"
        assert given["expert_map"] == "layer.expert_map"
        assert given["global_num_experts"] == "layer.global_num_experts"

    def test_what_the_cache_asks_of_the_quantisation_method(self, vllm: Source) -> None:
        require(vllm, f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase",
                "moe_kernel", "is_monolithic", "create_weights")  # fmt: skip
        path = f"{MOE}/unquantized_fused_moe_method.py"
        process = vllm.function(path, "process_weights_after_loading", "UnquantizedFusedMoEMethod")
        assert parameters(process) == ["self", "layer"]

    def test_the_loader_asks_a_layer_for_its_parameters_to_move_them(self, vllm: Source) -> None:
        context = vllm.function("model_executor/model_loader/utils.py", "device_loading_context")
        assert all(not call.args for call in calls(context, "module.named_parameters"))
        assert calls(context, "module.named_parameters")

    def test_the_modules_that_are_recorded(self, vllm: Source) -> None:
        path = f"{MOE}/runner/moe_runner.py"
        require(vllm, path, "MoERunner", "_forward_impl", "routed_experts", "gate")
        for op in ("_moe_forward", "_moe_forward_shared"):
            (call,) = calls(vllm.function(path, op), "layer._forward_impl")
            assert call.args, "the op looks the runner's _forward_impl up at every call"


class TestExpertKernels:
    """`kernels.py`."""

    TRITON = f"{MOE}/experts/triton_moe.py"

    def test_the_kernel_is_reached_from_the_method(self, vllm: Source) -> None:
        path = f"{MOE}/modular_kernel.py"
        assert vllm.decorators(path, "fused_experts", "FusedMoEKernel") == ["property"]
        require(vllm, path, "FusedMoEKernel", "is_monolithic")

    def test_the_sum_over_top_k_is_a_method_called_once_with_rows_and_output(
        self, vllm: Source
    ) -> None:
        moe_sum = vllm.function(self.TRITON, "moe_sum", "TritonExperts")
        assert parameters(moe_sum)[:3] == ["self", "input", "output"]
        found = calls(vllm.cls(self.TRITON, "TritonExperts"), "self.moe_sum")
        assert len(found) == 1, "a wave's rows are kept where the kernel sums them, in one place"
        assert len(found[0].args) >= 2
        assert keywords(found[0]) <= {"topk_ids", "expert_map"}
        # What RowKeeper calls once all waves have run.
        required = len(moe_sum.args.args) - len(moe_sum.args.defaults)
        assert required == 3

    def test_the_launch_configuration_is_looked_up_as_we_look_it_up(self, vllm: Source) -> None:
        found = calls(
            vllm.function(self.TRITON, "apply", "TritonExperts"), "try_get_optimal_moe_config"
        )
        assert [[ast.unparse(arg) for arg in call.args] for call in found] == [
            ["w1.size()", "w2.size()", "top_k_num",
             "self.quant_config.config_name(hidden_states.dtype)", "num_tokens"]
        ]  # fmt: skip
        assert keywords(found[0]) == {"block_shape"}
        lookup = vllm.function(f"{MOE}/fused_moe.py", "try_get_optimal_moe_config")
        assert parameters(lookup) == [
            "w1_shape", "w2_shape", "top_k", "dtype", "M", "block_shape"
        ]  # fmt: skip
        assert calls(lookup, "get_config"), "an override has the last word"

    def test_a_configuration_can_be_put_in_force(self, vllm: Source) -> None:
        path = f"{MOE}/__init__.py"
        assert vllm.decorators(path, "override_config") == ["contextmanager"]
        assert parameters(vllm.function(path, "override_config")) == ["config"]
        assert parameters(vllm.function(path, "get_config")) == []

    def test_what_the_lookup_asks_of_the_kernel(self, vllm: Source) -> None:
        require(vllm, f"{MOE}/config.py", "FusedMoEQuantConfig", "config_name", "block_shape")
        require(vllm, f"{MOE}/modular_kernel.py", "FusedMoEExperts", "block_shape", "quant_config")

    def test_a_wave_is_told_by_expert_map_and_every_expert_stays_countable(
        self, vllm: Source
    ) -> None:
        apply = vllm.function(self.TRITON, "apply", "TritonExperts")
        assert {"expert_map", "global_num_experts", "topk_ids"} <= set(parameters(apply))
        (call,) = calls(apply, "_prepare_expert_assignment")
        assert "expert_map" in [ast.unparse(arg) for arg in call.args]


class TestMarlin:
    """`marlin.py`."""

    MARLIN = f"{MOE}/experts/marlin_moe.py"

    def test_one_function_chooses_the_blocks_sorts_and_launches(self, vllm: Source) -> None:
        fused = vllm.function(self.MARLIN, "fused_marlin_moe")
        (align,) = calls(fused, "moe_align_block_size")
        (launch,) = calls(fused, "_fused_marlin_moe")
        assert ast.unparse(align.args[0]) == "topk_ids"
        assert keywords(align) <= {"ignore_invalid_experts"}
        assert launch.args == [], "the launch takes keywords, which are passed on"
        assert {
            "hidden_states", "block_size_m", "sorted_token_ids", "expert_ids",
            "num_tokens_post_padded", "topk_ids", "num_topk",
        } <= keywords(launch)  # fmt: skip

    def test_it_takes_what_it_is_asked_with(self, vllm: Source) -> None:
        fused = vllm.function(self.MARLIN, "fused_marlin_moe")
        for name in (
            "hidden_states", "w1", "w2", "bias1", "bias2", "w1_scale", "w2_scale", "topk_weights",
            "topk_ids", "quant_type_id", "global_num_experts", "input_dtype",
        ):  # fmt: skip
            assert takes(fused, name)
        require(vllm, self.MARLIN, "MarlinExpertsBase", "quant_type_id", "input_dtype")

    def test_the_sum_over_top_k_is_the_kernels_method(self, vllm: Source) -> None:
        moe_sum = vllm.function(self.MARLIN, "moe_sum", "MarlinExperts")
        assert parameters(moe_sum) == ["self", "input", "output", "topk_ids", "expert_map"]
        assert "self.moe_sum" in text_of(vllm.function(self.MARLIN, "apply", "MarlinExperts"))

    def test_ids_beyond_the_last_block_may_be_looked_up(self, vllm: Source) -> None:
        # vLLM does so itself, with a map that is as long as there are experts.
        align = vllm.tree(f"{MOE}/moe_align_block_size.py")
        assert "expert_map[expert_ids]" in text_of(align)


class TestFormats:
    """`kernels.py`, `checkpoint.py` and `loading.py`."""

    QUANTISATION = "model_executor/layers/quantization"

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("fp8.py", "Fp8MoEMethod"),
            ("auto_gptq.py", "AutoGPTQMoEMethod"),
            ("auto_awq.py", "AutoAWQMoEMethod"),
            ("mxfp4.py", "GptOssMxfp4MoEMethod"),
            (
                "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py",
                "CompressedTensorsW8A8Fp8MoEMethod",
            ),
        ],
    )
    def test_methods_read_two_weights_off_the_layer_and_the_rest_off_the_kernel(
        self, path: str, name: str, vllm: Source
    ) -> None:
        apply = vllm.function(f"{self.QUANTISATION}/{path}", "apply", name)
        (call,) = calls(apply, "self.moe_kernel.apply")
        read = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        assert {"w13_weight", "w2_weight"} <= read
        assert not any("scale" in attr or "zero" in attr or "bias" in attr for attr in read)

    def test_experts_are_loaded_by_one_method(self, vllm: Source) -> None:
        path = f"{MOE}/routed_experts.py"
        loaders = [
            node
            for node in vllm.cls(path, "RoutedExperts").body
            if isinstance(node, ast.FunctionDef) and node.name == "weight_loader"
        ]
        assert parameters(loaders[-1]) == [
            "self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id",
            "return_success",
        ]  # fmt: skip
        init = text_of(vllm.function(path, "__init__", "RoutedExperts"))
        assert "self.weight_loader" in init
        assert init.index("self._get_quant_method(") < init.index("self.weight_loader")

    def test_gpt_oss_copies_over_all_experts_by_itself(self, vllm: Source) -> None:
        path = "model_executor/models/gpt_oss.py"
        load = vllm.function(path, "_load_weights_other", "GptOssModel")
        assert len(calls(load, "param.copy_")) == 4, "two weights and two biases"
        streamed = names_assigned(vllm.tree(path)).get("_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD")
        if streamed is not None:
            assert set(ast.literal_eval(streamed).values()) == {"gpt_oss_w13", "gpt_oss_w2"}

    def test_a_checkpoint_is_read_in_functions_of_one_name(self, vllm: Source) -> None:
        for path, cls in (
            ("model_executor/model_loader/default_loader.py", "DefaultModelLoader"),
            ("model_executor/models/gpt_oss.py", "GptOssModel"),
        ):
            assert "load_weights" in members(vllm.cls(path, cls))

    def test_static_activation_scales_become_one_number(self, vllm: Source) -> None:
        path = f"{self.QUANTISATION}/utils/fp8_utils.py"
        reduce = text_of(vllm.function(path, "process_fp8_input_tensor_strategy_moe"))
        for name in ("w13_input_scale", "w2_input_scale"):
            assert f"{name}.max()" in reduce or f"amax_for_moe_activation_quant({name}" in reduce


class TestWorkerAndRunner:
    """`worker.py` and `model_runner.py`."""

    RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")

    @pytest.mark.parametrize(
        ("path", "name"),
        [("v1/worker/gpu_worker.py", "Worker"), ("v1/worker/cpu_worker.py", "CPUWorker")],
    )
    def test_the_worker_is_built_and_used_as_ours_is(
        self, path: str, name: str, vllm: Source
    ) -> None:
        cls = vllm.cls(path, name)
        for method in ("init_device", "compile_or_warm_up_model"):
            assert method in members(cls), f"{name} has no {method}"
        assert parameters(vllm.function(path, "__init__", name))[:2] == ["self", "vllm_config"]
        assert "model_runner" in members(cls)

    def test_the_gpu_worker_has_what_is_refused_or_extended(self, vllm: Source) -> None:
        require(
            vllm, "v1/worker/gpu_worker.py", "Worker",
            "load_model", "execute_model", "shutdown", "get_model",
            "reload_weights", "update_weights", "sleep",
            "save_sharded_state", "save_tensorized_model",
        )  # fmt: skip

    @pytest.mark.parametrize("path", RUNNERS)
    def test_a_runner_has_the_methods_that_are_extended(self, path: str, vllm: Source) -> None:
        require(
            vllm, path, "GPUModelRunner",
            "load_model", "initialize_kv_cache", "execute_model", "get_model",
            "compilation_config",
        )  # fmt: skip

    @pytest.mark.parametrize("path", RUNNERS)
    def test_a_runner_has_nothing_by_the_names_that_are_put_on_it(
        self, path: str, vllm: Source
    ) -> None:
        taken = members(vllm.cls(path, "GPUModelRunner")) & {"prefetch_engine", "scheduler"}
        assert taken == set()

    @pytest.mark.parametrize("path", RUNNERS)
    def test_a_runners_class_can_be_exchanged(self, path: str, vllm: Source) -> None:
        names = names_assigned(ast.Module(vllm.cls(path, "GPUModelRunner").body, []))
        assert "__slots__" not in names

    def test_the_first_runner_releases_its_model_when_it_is_shut_down(self, vllm: Source) -> None:
        for path in self.RUNNERS:
            assert "shutdown" in members(vllm.cls(path, "GPUModelRunner"))


class TestGraphs:
    """`graph_sizes.py` and `engine.padding`."""

    V2 = "v1/worker/gpu/cudagraph_utils.py"

    def test_the_first_runners_dispatcher_lists_its_graphs_by_mode(self, vllm: Source) -> None:
        path = "v1/cudagraph_dispatcher.py"
        require(vllm, path, "CudagraphDispatcher", "cudagraph_keys", "initialize_cudagraph_keys")
        (keys,) = [
            node.value
            for node in ast.walk(vllm.cls(path, "CudagraphDispatcher"))
            if isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "self.cudagraph_keys"
            and isinstance(node.value, ast.Dict)
        ]
        assert "CUDAGraphMode.FULL" in [ast.unparse(key) for key in keys.keys if key is not None]
        assert {"num_tokens"} <= fields(vllm.cls("forward_context.py", "BatchDescriptor"))
        runner = vllm.tree("v1/worker/gpu_model_runner.py")
        assert calls(runner, "self.cudagraph_dispatcher.initialize_cudagraph_keys")

    def test_a_batch_without_a_graph_of_its_size_runs_without_one(self, vllm: Source) -> None:
        path = "v1/cudagraph_dispatcher.py"
        dispatch = vllm.function(path, "dispatch", "CudagraphDispatcher")
        text = text_of(dispatch)
        assert "in self.cudagraph_keys[CUDAGraphMode.FULL]" in text
        last = dispatch.body[-1]
        assert isinstance(last, ast.Return)
        assert ast.unparse(last) == "return (CUDAGraphMode.NONE, BatchDescriptor(num_tokens))"

    def test_the_second_runners_manager_lists_its_graphs_when_it_is_built(
        self, vllm: Source
    ) -> None:
        require(vllm, self.V2, "CudaGraphManager", "_capture_descs", "_candidates")
        assert {"cg_mode", "num_tokens"} <= fields(vllm.cls(self.V2, "BatchExecutionDescriptor"))
        build = vllm.function(
            "v1/worker/gpu/model_runner.py", "initialize_kv_cache", "GPUModelRunner"
        )
        assert "cudagraph_manager" in members(ast.ClassDef("", [], [], [build], []))
        dispatch = text_of(vllm.function(self.V2, "dispatch", "CudaGraphManager"))
        assert "self._candidates[key]" in dispatch
        assert "cg_mode=CUDAGraphMode.NONE" in dispatch

    @pytest.mark.parametrize(
        "path", ["compilation/cuda_graph.py", "v1/worker/gpu/cudagraph_utils.py"]
    )
    def test_full_graphs_are_made_by_a_name_that_can_be_replaced(
        self, path: str, vllm: Source
    ) -> None:
        # Segmented graphs stand in their place: made, captured by torch's context, replayed.
        tree = vllm.tree(path)
        assert len(calls(tree, "torch.cuda.CUDAGraph")) == 1
        (capture,) = calls(tree, "torch.cuda.graph")
        assert ast.unparse(capture.args[0]) in ("cudagraph", "graph")
        text = text_of(tree)
        assert ("entry.cudagraph.replay()" in text) != ("self.graphs[desc].replay()" in text)
        assert "isinstance(graph" not in text

    @pytest.mark.parametrize("path", TestWorkerAndRunner.RUNNERS)
    def test_everything_is_captured_within_two_methods_of_the_runner(
        self, path: str, vllm: Source
    ) -> None:
        require(vllm, path, "GPUModelRunner", "capture_model", "profile_cudagraph_memory")
        worker = text_of(vllm.tree("v1/worker/gpu_worker.py"))
        assert "self.model_runner.capture_model()" in worker
        assert "self.model_runner.profile_cudagraph_memory()" in worker

    def test_shared_experts_stay_on_one_stream_without_another(self, vllm: Source) -> None:
        path = f"{MOE}/runner/shared_experts.py"
        cls = vllm.cls(path, "SharedExperts")
        assert [ast.unparse(base) for base in cls.bases] == ["torch.nn.Module"]
        require(vllm, path, "SharedExperts", "_stream")
        order = text_of(vllm.function(path, "_determine_shared_experts_order", "SharedExperts"))
        assert "self._stream is not None and" in order

    def test_the_forward_context_holds_the_places_of_the_tokens_in_the_kv_cache(
        self, vllm: Source
    ) -> None:
        path = "forward_context.py"
        assert {"slot_mapping", "no_compile_layers"} <= set(
            fields(vllm.cls(path, "ForwardContext"))
        )
        assert parameters(vllm.function(path, "get_forward_context")) == []
        assert parameters(vllm.function(path, "is_forward_context_available")) == []

    def test_only_layers_without_a_state_have_such_places(self, vllm: Source) -> None:
        package = "model_executor/layers/attention"
        names = text_of(vllm.tree(f"{package}/__init__.py"))
        for path, name in (("attention", "Attention"), ("mla_attention", "MLAAttention")):
            assert f"from vllm.model_executor.layers.attention.{path} import {name}" in names
            bases = [ast.unparse(base) for base in vllm.cls(f"{package}/{path}.py", name).bases]
            assert bases == ["nn.Module", "AttentionLayerBase"]
        bases = [
            ast.unparse(base)
            for base in vllm.cls("model_executor/layers/mamba/abstract.py", "MambaBase").bases
        ]
        assert bases == ["AttentionLayerBase"]

    def test_the_first_runner_marks_padding_by_minus_one_in_a_buffer_that_stays(
        self, vllm: Source
    ) -> None:
        path = "v1/worker/gpu_model_runner.py"
        function = vllm.function(path, "_get_slot_mappings", "GPUModelRunner")
        text = text_of(function)
        assert "blk_table.slot_mapping.gpu[:num_tokens_padded]" in text
        assert "slot_mapping[num_tokens_unpadded:num_tokens_padded].fill_(-1)" in text
        for user in ("execute_model", "_dummy_run"):  # replay and capture
            body = vllm.function(path, user, "GPUModelRunner")
            assert calls(body, "self._get_slot_mappings"), user
            (context,) = calls(body, "set_forward_context")
            assert "slot_mapping" in keywords(context), user

    def test_the_second_runner_does_so_too(self, vllm: Source) -> None:
        path = "v1/worker/gpu/block_table.py"
        text = text_of(vllm.function(path, "_compute_slot_mappings_kernel"))
        assert "tl.store(slot_mapping_ptr + offset, PAD_ID, mask=offset < max_num_tokens)" in text
        compute = vllm.function(path, "compute_slot_mappings", "BlockTables")
        given = {
            keyword.arg: ast.unparse(keyword.value)
            for call in ast.walk(compute)
            if isinstance(call, ast.Call)
            for keyword in call.keywords
        }
        assert given["PAD_ID"] == "PAD_SLOT_ID"
        dummy = vllm.function(path, "get_dummy_slot_mappings", "BlockTables")
        assert "return self.slot_mappings[:, :num_tokens]" in text_of(dummy)
        contexts = calls(vllm.tree(self.V2), "set_forward_context")
        assert contexts
        assert all("slot_mapping" in keywords(context) for context in contexts)

    def test_modes_and_their_questions(self, vllm: Source) -> None:
        path = "config/compilation.py"
        require(vllm, path, "CUDAGraphMode",
                "NONE", "FULL", "FULL_DECODE_ONLY", "has_full_cudagraphs")  # fmt: skip
        require(vllm, path, "CompilationMode", "NONE", "VLLM_COMPILE")
        require(vllm, path, "CompilationConfig", "cudagraph_mode", "mode")

    def test_decode_only_compiles_the_same_pieces_as_the_default(self, vllm: Source) -> None:
        # The worker sets FULL_DECODE_ONLY when the pieces have been chosen already.
        path = "config/compilation.py"
        chosen = vllm.function(path, "set_splitting_ops_for_v1", "CompilationConfig")
        unset = [
            ast.unparse(ast.Module(node.body, []))
            for node in ast.walk(chosen)
            if isinstance(node, ast.If) and "splitting_ops is None" in ast.unparse(node.test)
        ]
        assert any("list(self._attention_ops)" in body for body in unset)
        assert not any("cudagraph_mode" in body for body in unset)


class TestOptions:
    """What `early_refusals.py` takes for a misspelt option must be none of vLLM's."""

    FOLDERS = ("config", "engine", "entrypoints")

    def test_no_option_of_vllm_or_abbreviation_of_one_is_like_one_of_ours(
        self, vllm: Source
    ) -> None:
        names: set[str] = set()
        for path in (p for folder in self.FOLDERS for p in (vllm.root / folder).rglob("*.py")):
            text = path.read_text()
            names |= set(re.findall(r"\"--([a-z][a-z0-9-]+)\"", text))
            fields = re.findall(r"^    ([a-z]\w+) *:", text, re.MULTILINE)
            names |= {field.replace("_", "-") for field in fields}
        assert {"enforce-eager", "tensor-parallel-size", "port", "kv-cache-metrics"} <= names
        names |= {f"no-{name}" for name in names}
        spelt = {f"--{name[:end]}" for name in names for end in range(1, len(name) + 1)}
        refuse_misspelt(sorted(spelt - OTHER_NAMES.keys()))

    def test_another_name_of_one_of_ours_is_none_of_vllms(self, vllm: Source) -> None:
        names: set[str] = set()
        for folder in ("engine", "entrypoints"):
            for path in (vllm.root / folder).rglob("*.py"):
                text = path.read_text()
                names |= set(re.findall(r"\"(--[a-z][a-z0-9-]+)\"", text))
                front = re.search(
                    r"^class BaseFrontendArgs.*?^def ", text, re.MULTILINE | re.DOTALL
                )
                fields = re.findall(r"^    ([a-z]\w+): ", front[0], re.MULTILINE) if front else []
                names |= {f"--{field.replace('_', '-')}" for field in fields}
        assert {"--scheduling-policy", "--model", "--ssl-keyfile", "--chat-template"} <= names
        for name in OTHER_NAMES:
            longer = [option for option in names if option.startswith(name)]
            assert name not in names
            assert len(longer) != 1, f"vLLM takes {name} for {longer[0]}"

    def test_offline_runs_find_the_parser_of_vllms_options(self, vllm: Source) -> None:
        parser = vllm.function("utils/argparse_utils.py", "parse_args", "FlexibleArgumentParser")
        assert takes(parser, "namespace")
        options = vllm.function("engine/arg_utils.py", "add_cli_args", "EngineArgs")
        assert "staticmethod" in vllm.decorators(
            "engine/arg_utils.py", "add_cli_args", "EngineArgs"
        )
        assert parameters(options) == ["parser"]
        llm = vllm.function("entrypoints/llm.py", "__init__", "LLM")
        assert takes(llm, "gpu_memory_utilization"), "by the names that the parser gives them"

    def test_the_offloaders_options_are_called_so(self, vllm: Source) -> None:
        text = (vllm.root / "engine" / "arg_utils.py").read_text()
        for option in ("--cpu-offload-gb", "--offload-group-size", "--offload-backend"):
            assert f'"{option}"' in text
        backends = names_assigned(vllm.tree("config/offload.py"))["OffloadBackend"]
        assert text_of(backends) == "Literal['auto', 'uva', 'prefetch']"


class TestConfiguration:
    """`checks.py` and what `engine.py` reads of vLLM's configuration."""

    def test_what_is_read_of_the_whole(self, vllm: Source) -> None:
        require(
            vllm, "config/vllm.py", "VllmConfig",
            "additional_config", "cache_config", "compilation_config", "lora_config",
            "load_config", "model_config", "offload_config", "parallel_config", "scheduler_config",
            "speculative_config", "weight_transfer_config",
        )  # fmt: skip

    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "ParallelConfig": (
            "config/parallel.py",
            "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_dbo "
            "prefill_context_parallel_size decode_context_parallel_size enable_eplb "
            "enable_expert_parallel worker_cls",
        ),
        "OffloadConfig": ("config/offload.py", "uva prefetch offload_backend"),
        "UVAOffloadConfig": ("config/offload.py", "cpu_offload_gb"),
        "PrefetchOffloadConfig": ("config/offload.py", "offload_group_size"),
        "ModelConfig": (
            "config/model.py",
            "model is_moe enable_sleep_mode dtype max_model_len get_num_kv_heads get_head_size "
            "get_num_layers hf_config hf_text_config revision",
        ),
        "LoadConfig": ("config/load.py", "load_format download_dir"),
        "CacheConfig": ("config/cache.py", "gpu_memory_utilization kv_cache_memory_bytes"),
        "SchedulerConfig": ("config/scheduler.py", "max_num_batched_tokens max_num_seqs"),
    }

    @pytest.mark.parametrize("name", PARTS)
    def test_what_is_read_of_its_parts(self, name: str, vllm: Source) -> None:
        path, wanted = self.PARTS[name]
        require(vllm, path, name, *wanted.split())

    def test_where_modelopts_format_is_read(self, vllm: Source) -> None:
        # `model_shape.py` does the same.
        path = "transformers_utils/config.py"
        assert "'hf_quant_config.json', revision" in text_of(vllm.function(path, "get_config"))
        path = "transformers_utils/model_arch_config_convertor.py"
        name = "_normalize_quantization_config"
        text = text_of(vllm.function(path, name, "ModelArchConfigConvertorBase"))
        assert "if producer_name == 'modelopt'" in text
        assert "modelopt_quant_cfg = quant_cfg.get('quantization', {})" in text

    def test_which_files_of_a_folder_are_read(self, vllm: Source) -> None:
        # `checkpoint_files.py` and `check_sizes` know this much.
        prepare = text_of(
            vllm.function("model_executor/model_loader/default_loader.py", "_prepare_weights",
                          "DefaultModelLoader")
        )  # fmt: skip
        assert "allow_patterns=['consolidated*.safetensors']" in prepare
        assert "allow_patterns = ['*.safetensors', '*.bin']" in prepare
        for load_format in ("safetensors", "fastsafetensors", "instanttensor"):
            assert f"load_format == '{load_format}'" in prepare
        utils = "model_executor/model_loader/weight_utils.py"
        chosen = text_of(vllm.function(utils, "filter_duplicate_safetensors_files"))
        assert "if f in weight_files_in_index" in chosen

    def test_the_compile_cache_knows_our_settings_and_not_the_worker(self, vllm: Source) -> None:
        path = "config/vllm.py"
        text = text_of(vllm.function(path, "compute_hash", "VllmConfig"))
        assert "json.dumps(additional_config, sort_keys=True)" in text

    def test_the_names_are_exported(self, vllm: Source) -> None:
        exported = {
            alias.asname or alias.name
            for node in vllm.tree("config/__init__.py").body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert {"CompilationMode", "CUDAGraphMode", "VllmConfig"} <= exported

    def test_a_line_can_be_logged_once(self, vllm: Source) -> None:
        assert "info_once" in (vllm.root / "logger.py").read_text()


class TestTheBench:
    """`bench_engine.py`, the baselines in `bench/cases.py`, the command in `bench/servers.py`."""

    def test_the_baselines_are_arguments_of_an_engine(self, vllm: Source) -> None:
        require(
            vllm,
            "engine/arg_utils.py",
            "EngineArgs",
            "offload_backend",
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
            "moe_backend",
        )
        assert takes(vllm.function("entrypoints/llm.py", "__init__", "LLM"), "attention_config")

    def test_what_an_offloader_moved_can_be_counted(self, vllm: Source) -> None:
        uva = text_of(vllm.tree("model_executor/offloader/uva.py"))
        assert "p._vllm_is_uva_offloaded = True" in uva
        assert "if self.cpu_offload_bytes >= self.cpu_offload_max_bytes" in uva
        path = "model_executor/offloader/prefetch.py"
        require(vllm, path, "PrefetchOffloader", "total_offloaded_bytes")
        wrap = text_of(vllm.function(path, "wrap_modules", "PrefetchOffloader"))
        assert "module_index % self.group_size >= self.group_size - self.num_in_group" in wrap

    def test_an_engine_is_stepped_by_hand(self, vllm: Source) -> None:
        path = "v1/engine/llm_engine.py"
        assert parameters(vllm.function(path, "add_request", "LLMEngine"))[:4] == [
            "self",
            "request_id",
            "prompt",
            "params",
        ]
        for name in ("step", "abort_request", "has_unfinished_requests"):
            vllm.function(path, name, "LLMEngine")
        require(vllm, "sampling_params.py", "RequestOutputKind", "DELTA")
        require(vllm, "sampling_params.py", "SamplingParams", "output_kind", "detokenize")

    def test_a_server_is_measured_by_vllms_own_command(self, vllm: Source) -> None:
        from prefetch_runtime.bench.config import BenchConfig, Server
        from prefetch_runtime.bench.servers import command_of

        server = Server(name="s", url="http://h:1", model="m")
        command = command_of(server, BenchConfig(model="m"), 1, Path("f"))
        known = "".join(
            path.read_text()
            for folder in ("benchmarks", "entrypoints/cli")
            for path in sorted((vllm.root / folder).rglob("*.py"))
        )
        for option in (word for word in command if word.startswith("--")):
            assert f'"{option}"' in known, f"vLLM {vllm.version}: bench serve has no {option}"
        for name in ("output_throughput", "completed", "median_itl_ms"):
            stem = name.replace("median_itl_ms", "median_{metric_attribute_name}_ms")
            assert stem in known, f"vLLM {vllm.version}: {name}"


class TestTheseChecks:
    """They must be able to fail."""

    SOURCE = """
class A(Base):
    field: int = 0
    def method(self, x, *, flag=False):
        self.kept = x
        self.register_buffer("buffer", x)
        return call(x, name=1)
"""

    @pytest.fixture
    def other(self, tmp_path: Path) -> Source:
        (tmp_path / "_version.py").write_text("__version__ = version = '1.2.3'\n")
        (tmp_path / "a.py").write_text(self.SOURCE)
        return Source(tmp_path)

    def test_a_version_is_read(self, other: Source) -> None:
        assert other.version == "1.2.3"

    def test_members_are_found_and_missed(self, other: Source) -> None:
        require(other, "a.py", "A", "field", "method", "kept", "buffer")
        with pytest.raises(AssertionError, match=r"vLLM 1.2.3: A in a.py has no gone"):
            require(other, "a.py", "A", "field", "gone")

    def test_what_is_not_there_is_named(self, other: Source) -> None:
        with pytest.raises(AssertionError, match=r"there is no b.py"):
            other.tree("b.py")
        with pytest.raises(AssertionError, match=r"a.py has no class B"):
            other.cls("a.py", "B")
        with pytest.raises(AssertionError, match=r"A in a.py has no function gone"):
            other.function("a.py", "gone", "A")

    def test_calls_and_parameters_are_read(self, other: Source) -> None:
        method = other.function("a.py", "method", "A")
        assert parameters(method) == ["self", "x"]
        assert takes(method, "flag")
        assert not takes(method, "other")
        (call,) = calls(method, "call")
        assert keywords(call) == {"name"}
        assert calls(method, "other") == []
