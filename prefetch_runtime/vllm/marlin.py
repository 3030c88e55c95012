"""Marlin's fused MoE on slots, with the blocks of the resident launch.

Marlin sorts (token, k) rows by expert, cuts them into blocks of equal size, and divides the
additions along the inner dimension among its thread blocks by each block's place in that order. So
a row's bits depend on the order and the number of all blocks, and the size of a block on how many
experts the weights have. Here rows are sorted by expert id, as without a cache; only then is each
block told the slot of its expert.
Shapes: E = experts of the layer, S = slots, T = tokens, K = top_k, B = blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts import marlin_moe

_ALIGN, _LAUNCH, _FUSED = "moe_align_block_size", "_fused_marlin_moe", "fused_marlin_moe"


class _BlockSize(Exception):
    """Carries the block size that vLLM chose out of its own function."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class MarlinBlocks:
    """One layer's launches of vLLM's Marlin kernel: blocks by expert id, weights by slot."""

    def __init__(self, experts: Any, num_experts: int, top_k: int) -> None:
        """`experts`: vLLM's `MarlinExperts` of the layer, built on S slots."""
        from graphs.block_kernels import seat_blocks  # imports triton

        self._seat = seat_blocks
        self._experts = experts
        self._num_experts = num_experts
        self._top_k = top_k
        self._sizes: dict[int, int] = {}

    def block_size(self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> int:
        """Rows of a block as vLLM chooses them for [T, H] `x` and all E experts.

        vLLM is asked, with tensors that have a shape and nothing else; `w13` and `w2` are slots.
        """
        num_tokens = x.shape[0]
        if num_tokens not in self._sizes:
            self._sizes[num_tokens] = self._ask(x, w13, w2)
        return self._sizes[num_tokens]

    def _ask(self, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> int:
        def no_blocks(*_: Any, **__: Any) -> tuple[None, None, None]:
            return None, None, None

        def chosen(**arguments: Any) -> None:
            raise _BlockSize(arguments["block_size_m"])

        def shape_of(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        rows = (x.shape[0], self._top_k)
        with _replaced(_ALIGN, no_blocks), _replaced(_LAUNCH, chosen):
            try:
                getattr(marlin_moe, _FUSED)(
                    hidden_states=shape_of(*x.shape, dtype=x.dtype),
                    w1=shape_of(self._num_experts, *w13.shape[1:], dtype=w13.dtype),
                    w2=shape_of(self._num_experts, *w2.shape[1:], dtype=w2.dtype),
                    bias1=None,
                    bias2=None,
                    w1_scale=shape_of(0, dtype=x.dtype),
                    w2_scale=shape_of(0, dtype=x.dtype),
                    topk_weights=shape_of(*rows, dtype=torch.float32),
                    topk_ids=shape_of(*rows, dtype=torch.int32),
                    quant_type_id=self._experts.quant_type_id,
                    global_num_experts=self._num_experts,
                    input_dtype=self._experts.input_dtype,
                )
            except _BlockSize as found:
                return found.rows
        raise RuntimeError(f"vLLM's {_FUSED} no longer ends in {_LAUNCH}; this version is unknown")

    @contextmanager
    def on(
        self, slot_of: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
    ) -> Iterator[None]:
        """Within this context vLLM's Marlin takes expert ids, and reads the weights at their slots.

        `slot_of` [E] int32 on the device: row of each expert that a token was routed to. In a wave
        the blocks of experts outside of it are computed all the same, on another expert's weights:
        without them the other rows' bits would change. Their own rows are not kept.
        """
        size = self.block_size(x, w13, w2)
        align, launch = getattr(marlin_moe, _ALIGN), getattr(marlin_moe, _LAUNCH)

        def by_expert(topk_ids: torch.Tensor, *_: Any, **more: Any) -> Any:
            sorted_ids, expert_ids, num_rows = align(topk_ids, size, self._num_experts, **more)
            # The list is this call's own. Beyond the blocks that are there it holds 0 or -1.
            self._seat(expert_ids, slot_of)
            return sorted_ids, expert_ids, num_rows

        def launched(**arguments: Any) -> Any:
            return launch(**{**arguments, "block_size_m": size})

        with _replaced(_ALIGN, by_expert), _replaced(_LAUNCH, launched):
            yield


@contextmanager
def _replaced(name: str, function: Any) -> Iterator[None]:
    """Let vLLM's module call `function` by that name; put the old one back whatever happens."""
    before = getattr(marlin_moe, name)
    setattr(marlin_moe, name, function)
    try:
        yield
    finally:
        setattr(marlin_moe, name, before)
