"""Refuses, before anything is loaded, what the cache cannot serve exactly."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from prefetch_runtime.config import ConfigError, PrefetchConfig, spelled
from prefetch_runtime.model_refusals import refused_family, refused_line
from prefetch_runtime.policies import POLICY_NAMES
from prefetch_runtime.refusals import (
    CPU_NEEDS_EAGER,
    NO_OFFLOADERS,
    ONE_GPU,
    mode_refused,
    needs_cuda,
    unsupported,
)

logger = init_logger(__name__)

GRAPHS_OF = {
    "full": "one CUDA graph",
    "segmented": "CUDA graphs that break where the host decides",
}
"""What a decode step is, in the modes that capture it."""


class UnsupportedError(ConfigError):
    """A vLLM option or model that the expert cache cannot serve exactly."""


def check_vllm_config(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError for the first option that rules the cache out.

    Raises:
        UnsupportedError: names the vLLM option and what to do.
    """
    for option, is_set, remedy in _refusals(vllm_config):
        if is_set:
            raise UnsupportedError(unsupported(option, remedy))
    if current_platform.is_cpu() and (
        vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)
    ):
        raise UnsupportedError(CPU_NEEDS_EAGER)
    # DBRX's experts are declared where vLLM does not look for them.
    refused = refused_family(vllm_config.model_config.hf_config.to_dict())
    if refused is not None:
        raise UnsupportedError(refused_line(refused))
    if not vllm_config.model_config.is_moe:
        raise UnsupportedError(
            f"{vllm_config.model_config.model} has no experts (a dense model), so there is nothing "
            f"to cache; leave {spelled('slots_per_layer')} out"
        )


def check_declared_slots(vllm_config: VllmConfig, config: PrefetchConfig) -> None:
    """`check_slots` before anything is loaded, as far as the model's config tells its sizes."""
    model = vllm_config.model_config
    num_experts = model.get_num_experts()
    top_k = getattr(model.hf_text_config, "num_experts_per_tok", None)
    if isinstance(config.slots_per_layer, int) and config.slots_per_layer and num_experts:
        check_slots(
            config.slots_per_layer,
            top_k=top_k if isinstance(top_k, int) else 1,
            num_experts=num_experts,
            layer_name=f"each MoE layer of {model.model}",
            asked=f"{spelled('slots_per_layer')} {config.slots_per_layer}",
        )


def choose_mode(
    vllm_config: VllmConfig, config: PrefetchConfig
) -> Literal["full", "segmented", "eager"]:
    """The mode that runs: what was asked for; "auto" is the first of `full`, `segmented` and
    `eager` that can.

    Raises:
        UnsupportedError: the mode that was asked for cannot run; says why.
    """
    asked = config.mode
    if asked == "eager":
        return "eager"
    if asked == "auto":
        graphs: tuple[Literal["full", "segmented"], ...] = ("full", "segmented")
        able = [mode for mode in graphs if why_not_mode(mode, vllm_config, config) is None]
        chosen = able[0] if able else "eager"
        if chosen != "full":
            reason = explain_mode(chosen, vllm_config, config)
            logger.info("Expert cache: mode %r, for %s", chosen, reason)
        return chosen
    why_not = why_not_mode(asked, vllm_config, config)
    if why_not is None:
        return asked
    if asked == "full" and _why_no_graphs(vllm_config, GRAPHS_OF[asked]) is None:
        remedy = "use 'segmented', which takes every policy and predictor, 'auto' or 'eager'"
        raise UnsupportedError(mode_refused(asked, why_not, remedy))
    raise UnsupportedError(mode_refused(asked, why_not))


def why_not_mode(
    mode: Literal["full", "segmented"], vllm_config: VllmConfig, config: PrefetchConfig
) -> str | None:
    """Why a mode cannot run here, to be read after its name; None if it can."""
    why_not = _why_no_kernels(config) if mode == "full" else None
    return why_not or _why_no_graphs(vllm_config, GRAPHS_OF[mode])


def explain_mode(mode: str, vllm_config: VllmConfig, config: PrefetchConfig) -> str:
    """Why `choose_mode` has chosen it, in a few words."""
    if config.mode != "auto":
        return "asked for"
    if mode == "full":
        return "what auto takes where it can run"
    no_graphs = _why_no_graphs(vllm_config, GRAPHS_OF["full"])
    return f"mode 'full' {no_graphs or _why_no_kernels(config)}"


def _why_no_kernels(config: PrefetchConfig) -> str | None:
    if config.policy not in POLICY_NAMES:
        return (
            f"takes {' or '.join(POLICY_NAMES)}; {spelled('policy')} {config.policy!r} works on "
            "the host"
        )
    if config.predictor not in ("none", "next_gate"):
        return (
            f"takes 'next_gate' or 'none'; {spelled('predictor')} {config.predictor!r} works on "
            "the host"
        )
    return None


def _why_no_graphs(vllm_config: VllmConfig, what: str) -> str | None:
    if not current_platform.is_cuda():
        return needs_cuda(current_platform.device_type)
    graphs = vllm_config.compilation_config.cudagraph_mode
    if graphs is None or not graphs.has_full_cudagraphs():
        shown = None if graphs is None else graphs.name
        return (
            f"decodes as {what}, but vLLM runs with cudagraph_mode {shown} "
            "(--enforce-eager, or an option that rules FULL graphs out)"
        )
    return None


def check_full_graphs_left(cudagraph_mode: CUDAGraphMode | None, mode: str) -> None:
    """Called once vLLM has asked its attention backends what they can capture.

    Raises:
        UnsupportedError: no FULL graphs are left, which a mode with graphs would not be told.
    """
    if cudagraph_mode is None or not cudagraph_mode.has_full_cudagraphs():
        left = None if cudagraph_mode is None else cudagraph_mode.name
        raise UnsupportedError(
            f"{spelled('mode')} {mode!r} decodes as {GRAPHS_OF[mode]}, but the attention backend "
            f"that vLLM chose cannot be captured so (cudagraph_mode is {left} now); choose another "
            "--attention-backend, or use 'eager'"
        )


def check_slots(
    num_slots: int,
    *,
    top_k: int,
    num_experts: int,
    layer_name: str,
    asked: str,
    at_most: bool = False,
) -> None:
    """Raise ConfigError unless top_k <= num_slots <= num_experts.

    `at_most`: the number is not known yet, but will be no larger.
    """
    if num_slots < top_k:
        raise ConfigError(
            f"{asked} gives {'at most ' if at_most else ''}{num_slots} slots to {layer_name}, but "
            f"one token needs {top_k} experts at once; set {spelled('slots_per_layer')} between "
            f"{top_k} and {num_experts}"
        )
    if num_slots > num_experts:
        raise ConfigError(
            f"{asked} asks for {num_slots} slots, but {layer_name} has only {num_experts} experts; "
            f"set {spelled('slots_per_layer')} between {top_k} and {num_experts}"
        )


def prepare_compilation(vllm_config: VllmConfig, *, mode: str, version: str) -> None:
    """Leave only the CUDA graphs that the mode can serve, and keep the compile cache apart.

    In `full` and `segmented` mode decode batches are captured whole, attention included, and
    nothing else is: a PIECEWISE graph would hold the MoE op with this capture's decisions or, if it
    were split there, read the op's output from the address that it had at capture. So prompts and
    mixed batches run compiled, without graphs. In `eager` mode the host decides at every MoE layer,
    so there are no graphs at all. What vLLM compiles is the same as without the cache, to the bit.
    """
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode is not None:
        compilation.cudagraph_mode = (
            CUDAGraphMode.FULL_DECODE_ONLY if mode in GRAPHS_OF else CUDAGraphMode.NONE
        )
    # vLLM hashes additional_config into the key of its compile cache, but not the worker class.
    additional = dict(vllm_config.additional_config or {})
    additional["prefetch_runtime_version"] = version
    vllm_config.additional_config = additional


def check_layers_are_ours(
    modules: Iterable[tuple[str, torch.nn.Module]],
    routed_experts: type[torch.nn.Module],
    is_ours: Callable[[torch.nn.Module], bool],
) -> None:
    """Raise UnsupportedError if a layer with experts is not served from the cache."""
    found = False
    for name, module in modules:
        if not isinstance(module, routed_experts):
            continue
        found = True
        if not is_ours(module):
            raise UnsupportedError(
                f"{name} brings its own experts class {type(module).__name__}, which the expert "
                f"cache cannot replace; leave {spelled('slots_per_layer')} out for this model"
            )
    if not found:
        raise UnsupportedError(
            "the model has no MoE layer that vLLM's RoutedExperts runs, so there is nothing to "
            f"cache; leave {spelled('slots_per_layer')} out"
        )


def _refusals(vllm_config: VllmConfig) -> Iterable[tuple[str, bool, str]]:
    parallel = vllm_config.parallel_config
    for option, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
    ):
        yield f"{option} {size}", size > 1, ONE_GPU
    yield "--enable-expert-parallel", parallel.enable_expert_parallel, "leave it out"
    yield (
        "--enable-dbo",
        parallel.enable_dbo,
        "two micro-batches would share the slots; leave it out",
    )
    yield "--enable-eplb", parallel.enable_eplb, "EPLB moves experts by itself; leave it out"
    yield "LoRA (--enable-lora)", vllm_config.lora_config is not None, "serve without adapters"
    yield (
        "sleep mode (--enable-sleep-mode)",
        bool(vllm_config.model_config.enable_sleep_mode),
        "the slots cannot be discarded yet; leave it out",
    )
    yield (
        "speculative decoding (--speculative-config)",
        vllm_config.speculative_config is not None,
        "leave it out",
    )
    yield (
        "weight transfer (--weight-transfer-config)",
        vllm_config.weight_transfer_config is not None,
        "experts are loaded once, at start; leave it out",
    )
    yield from _offload_refusals(vllm_config.offload_config)


def _offload_refusals(offload: Any) -> Iterable[tuple[str, bool, str]]:
    remedy = NO_OFFLOADERS
    yield f"--cpu-offload-gb {offload.uva.cpu_offload_gb:g}", offload.uva.cpu_offload_gb > 0, remedy
    yield (
        f"--offload-group-size {offload.prefetch.offload_group_size}",
        offload.prefetch.offload_group_size > 0,
        remedy,
    )
    yield f"--offload-backend {offload.offload_backend}", offload.offload_backend != "auto", remedy
