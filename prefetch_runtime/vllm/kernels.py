"""What the cache knows of vLLM's expert kernels: which it can serve, and how to keep them exact."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

from prefetch_runtime.vllm.checks import UnsupportedError

WAVES_BY_EXPERT = ("TritonExperts",)
"""CUDA kernels whose (token, k) rows can be kept apart until all waves have run."""

WAVES_BY_TOKEN = (
    "CPUUnquantizedExperts",
    "X86CPUUnquantizedExperts",
    "ArmCPUUnquantizedExperts",
)
"""CPU kernels: they return summed rows, and a token's row does not depend on the others."""

FORMATS = ("UnquantizedFusedMoEMethod",)
"""Quantisation methods whose results were proved bit-equal to the resident layer's."""


def check_kernel(layer_name: str, quant_method: Any) -> Any:
    """The expert kernel that vLLM built for a layer.

    Raises:
        UnsupportedError: a kernel without expert ids (monolithic), or one not proved exact.
    """
    method = type(quant_method).__name__
    if method not in FORMATS:
        raise UnsupportedError(
            f"{layer_name}: the expert cache cannot serve the format of {method} yet; "
            "use an unquantised (bf16 or fp16) checkpoint"
        )
    if quant_method.moe_kernel is None or quant_method.is_monolithic:
        raise UnsupportedError(
            f"{layer_name}: vLLM chose an expert kernel that routes inside itself (monolithic), so "
            "the cache never sees the expert ids; add --moe-backend triton"
        )
    experts = quant_method.moe_kernel.fused_experts
    if type(experts).__name__ not in WAVES_BY_EXPERT + WAVES_BY_TOKEN:
        raise UnsupportedError(
            f"{layer_name}: vLLM chose the expert kernel {type(experts).__name__}, which the cache "
            "cannot serve exactly; add --moe-backend triton"
        )
    return experts


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
            self._sum(kept, output)
