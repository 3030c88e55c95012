"""What the cache knows of vLLM's expert kernels: which it can serve, and how to keep them exact."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.platforms import current_platform

from prefetch_runtime.vllm.checks import UnsupportedError

ROWS_BY_EXPERT = ("TritonExperts",)
"""CUDA kernels that compute a (token, k) row from its own expert and token alone: waves leave the
blocks of absent experts out."""

ROWS_BY_BLOCK = ("MarlinExperts",)
"""CUDA kernels that divide the additions of a row by the order of all blocks of the launch: every
launch has the blocks of the resident one, and waves keep the rows whose expert was there."""

WAVES_BY_TOKEN = (
    "CPUUnquantizedExperts",
    "X86CPUUnquantizedExperts",
    "ArmCPUUnquantizedExperts",
)
"""CPU kernels: they return summed rows, and a token's row does not depend on the others."""

FORMATS = {
    "UnquantizedFusedMoEMethod": ("triton",),
    "Fp8MoEMethod": ("triton", "marlin"),
    "CompressedTensorsW8A8Fp8MoEMethod": ("triton", "marlin"),
    "CompressedTensorsWNA16MarlinMoEMethod": ("marlin",),
    "CompressedTensorsWNA16MoEMethod": ("marlin",),
    "AutoGPTQMoEMethod": ("marlin",),
    "AutoAWQMoEMethod": ("marlin",),
    "GptOssMxfp4MoEMethod": ("marlin",),
}
"""vLLM's quantisation methods that are served, and the `--moe-backend`s that serve them, the
nearest first."""

OTHER_FORMATS = {
    "MoeWNA16Method": "int4 that vLLM did not give to Marlin, which needs a hidden size that is a "
    "multiple of 128 and group size 32, 64 or 128",
}
"""Why a method is refused that has a neighbour which is served."""


def check_method(layer_name: str, method: Any) -> None:
    """Refuse, before the weights are loaded, a format or kernel that cannot be served.

    Raises:
        UnsupportedError: names the nearest option that works.
    """
    name = type(method).__name__
    if name not in FORMATS:
        raise UnsupportedError(
            f"{layer_name}: the expert cache cannot serve the format of {name}"
            f"{': ' + OTHER_FORMATS[name] if name in OTHER_FORMATS else ''}; use an unquantised, "
            "fp8, GPTQ, AWQ, compressed-tensors fp8 or int4, or (gpt-oss) MXFP4 checkpoint"
        )
    experts = getattr(method, "experts_cls", None)
    if experts is None:
        return
    is_monolithic = getattr(experts, "is_monolithic", None)
    if is_monolithic is not None and is_monolithic():
        raise UnsupportedError(_routes_inside(layer_name, name))
    _check_name(layer_name, name, experts.__name__)


def check_kernel(layer_name: str, quant_method: Any) -> Any:
    """The expert kernel that vLLM built for a layer.

    Raises:
        UnsupportedError: a kernel without expert ids (monolithic), one not proved exact, or one
            that scales all tokens of a batch together.
    """
    method = type(quant_method).__name__
    check_method(layer_name, quant_method)
    if quant_method.moe_kernel is None or quant_method.is_monolithic:
        raise UnsupportedError(_routes_inside(layer_name, method))
    experts = quant_method.moe_kernel.fused_experts
    _check_name(layer_name, method, type(experts).__name__)
    if "Fp8" in method and scales_the_batch(experts):
        raise UnsupportedError(
            f"{layer_name}: this fp8 checkpoint scales activations by the largest of the whole "
            "batch (dynamic, per tensor), which waves of experts cannot know; add --moe-backend "
            "marlin, or use a checkpoint with static, per-token or block scales"
        )
    return experts


def _check_name(layer_name: str, method: str, kernel: str) -> None:
    if kernel not in ROWS_BY_EXPERT + ROWS_BY_BLOCK + WAVES_BY_TOKEN:
        raise UnsupportedError(
            f"{layer_name}: vLLM chose the expert kernel {kernel}, which the cache cannot serve "
            f"exactly; {_remedy(method)}"
        )


def _routes_inside(layer_name: str, method: str) -> str:
    return (
        f"{layer_name}: vLLM chose an expert kernel that routes inside itself (monolithic), so "
        f"the cache never sees the expert ids; {_remedy(method)}"
    )


def _remedy(method: str) -> str:
    if current_platform.is_cpu():  # one kernel for each format there, until vLLM 0.29 monolithic
        return "on a CPU take unquantised experts, and vLLM 0.30 or later"
    return "add " + " or ".join(f"--moe-backend {backend}" for backend in FORMATS[method])


def scales_the_batch(experts: Any) -> bool:
    """Whether a kernel quantises its intermediate rows with one scale, found at run time."""
    if type(experts).__name__ not in ROWS_BY_EXPERT:
        return False
    config = experts.quant_config
    return bool(config.use_fp8_w8a8 and config.is_per_tensor and config.a2_scale is None)


class TunedConfigs:
    """The launch configuration that vLLM would take if every expert were on the device.

    vLLM looks the Triton configuration up by the weights' first dimension. With slots in place of
    experts it would find another one: other speed, and another order of additions.
    """

    def __init__(self, experts: Any, num_experts: int, top_k: int) -> None:
        self._experts = experts
        self._num_experts = num_experts
        self._top_k = top_k
        self._by_tokens: dict[int, dict[str, int]] = {}

    def of(self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> dict[str, int]:
        """The configuration for [tokens, hidden] `x`, given the slots' shapes."""
        num_tokens = x.shape[0]
        config = self._by_tokens.get(num_tokens)
        if config is None:
            config = try_get_optimal_moe_config(
                torch.Size((self._num_experts, *w13.shape[1:])),
                torch.Size((self._num_experts, *w2.shape[1:])),
                self._top_k,
                self._experts.quant_config.config_name(x.dtype),
                num_tokens,
                block_shape=self._experts.block_shape,
            )
            self._by_tokens[num_tokens] = config
        return config


@contextmanager
def launched_as(config: dict[str, int]) -> Iterator[None]:
    """Run vLLM's Triton expert kernels with `config`; put the old one back whatever happens."""
    if fused_moe.get_config():  # vLLM's own override (its tuner) has the last word
        yield
        return
    failure: BaseException | None = None
    # vLLM's context manager has no `finally`: an exception that passed through it would leave the
    # configuration in force for every later layer, so none may.
    with fused_moe.override_config(config):
        try:
            yield
        except BaseException as error:
            failure = error
    if failure is not None:
        raise failure


class RowKeeper:
    """Keeps the (token, k) rows of several waves apart, and sums them once, with vLLM's own sum.

    Stands in for one kernel object's `moe_sum`. Shapes: T = tokens, K = top_k, H = hidden.
    """

    def __init__(self, experts: Any, rows: torch.Tensor) -> None:
        """`rows`: [max T, K, H] on the device, shared by all layers, overwritten by every step."""
        self._sum: Callable[..., None] = experts.moe_sum
        self._rows = rows
        self._wave: torch.Tensor | None = None
        self._is_last = True
        experts.moe_sum = self

    @contextmanager
    def wave(self, in_wave: torch.Tensor, *, is_last: bool) -> Iterator[None]:
        """Within this context the kernel's rows are kept where [T, K] bool `in_wave` is true."""
        self._wave, self._is_last = in_wave, is_last
        try:
            yield
        finally:
            self._wave, self._is_last = None, True

    def __call__(self, rows: torch.Tensor, output: torch.Tensor, *more: Any) -> None:
        """vLLM's `moe_sum(rows [T, K, H], output [T, H], ...)`, or our keeping of a wave's rows."""
        if self._wave is None:
            self._sum(rows, output, *more)
            return
        kept = self._rows[: rows.shape[0]]
        # Rows of experts outside the wave hold zeros or, in newer versions, whatever was there.
        torch.where(self._wave.unsqueeze(-1), rows, kept, out=kept)
        if self._is_last:
            # With an expert map vLLM would leave out what was in earlier waves.
            maps = more[1:] if more else ()
            self._sum(kept, output, *(more if more and maps == (None,) else ()))
