"""Weights of layers that keep a state of one size in place of a KV cache, from `config.json` alone.

Each kind is the projections that its layer is made of, as vLLM builds them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from prefetch_runtime.model_shape import optional


class StateLayer(NamedTuple):
    """One layer."""

    linear: Sequence[tuple[int, int]]
    """Rows and columns of what is stored as the model's other linear layers are."""
    plain: int
    """Numbers that are never quantised: convolutions, decays, biases."""


def state_layer(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """The layers of a model that do not attend; None where their kind is not known."""
    for kind in (_gated_delta, _mamba2, _mamba, _kimi_delta, _short_convolution):
        layer = kind(text, hidden)
        if layer is not None:
            return layer
    return None


def _all(text: dict[str, Any], *names: str) -> list[int] | None:
    """The positive numbers under all of the names; None where one is missing."""
    found = [optional(text, name) for name in names]
    return None if None in found else [number for number in found if number is not None]


def _gated_delta(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """Qwen3-Next, Qwen3.5 (arXiv 2412.06464)."""
    sizes = _all(
        text,
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
    )
    if sizes is None:
        return None
    key_heads, key, value_heads, value = sizes
    keys, values = key_heads * key, value_heads * value
    kernel = optional(text, "linear_conv_kernel_dim") or 4
    gates = 2 * value_heads * hidden
    return StateLayer(
        [(2 * keys + 2 * values, hidden), (hidden, values)], gates + (2 * keys + values) * kernel
    )


def _mamba2(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """Nemotron-H, Granite 4, Bamba (arXiv 2405.21060)."""
    heads = optional(text, "mamba_num_heads", "mamba_n_heads")
    state = optional(text, "ssm_state_size", "mamba_d_state")
    if heads is None or state is None:
        return None
    expanded = (optional(text, "mamba_expand", "expand") or 2) * hidden
    inner = heads * (optional(text, "mamba_head_dim", "mamba_d_head") or -(-expanded // heads))
    groups = optional(text, "n_groups", "mamba_n_groups") or 1
    mixed = inner + 2 * groups * state
    kernel = optional(text, "conv_kernel", "mamba_d_conv") or 4
    # A kernel and a bias for each channel; a decay, a skip and a bias for each head; the norm.
    plain = mixed * (kernel + 1) + 3 * heads + inner
    return StateLayer([(inner + mixed + heads, hidden), (hidden, inner)], plain)


def _mamba(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """Jamba (arXiv 2312.00752)."""
    state = optional(text, "mamba_d_state")
    if state is None:
        return None
    inner = (optional(text, "mamba_expand") or 2) * hidden
    rank = optional(text, "mamba_dt_rank") or math.ceil(hidden / 16)
    kernel = optional(text, "mamba_d_conv") or 4
    linear = [(2 * inner, hidden), (rank + 2 * state, inner), (inner, rank), (hidden, inner)]
    # As above for each channel, which has a decay for each number of its state.
    return StateLayer(linear, inner * (kernel + 1) + inner * (state + 2))


def _kimi_delta(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """Kimi Linear (arXiv 2510.26692)."""
    said = text.get("linear_attn_config")
    if not isinstance(said, dict):
        return None
    sizes = _all(said, "num_heads", "head_dim")
    if sizes is None:
        return None
    heads, size = sizes
    inner = heads * size
    kernel = optional(said, "short_conv_kernel_size") or 4
    linear = [(3 * inner, hidden), (hidden, inner), (heads, hidden)]
    linear += 2 * [(size, hidden), (inner, size)]  # the decay's and the gate's, of low rank
    return StateLayer(linear, 3 * inner * kernel + inner + heads)


def _short_convolution(text: dict[str, Any], hidden: int) -> StateLayer | None:
    """LFM2."""
    kernel = optional(text, "conv_L_cache")
    if kernel is None:
        return None
    return StateLayer([(3 * hidden, hidden), (hidden, hidden)], kernel * hidden)
