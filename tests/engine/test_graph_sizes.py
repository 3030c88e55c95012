"""Which batches are captured, how padded rows are told, and what happens without FULL graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

pytestmark = [pytest.mark.engine]


class Desc(NamedTuple):
    """Stands in for both runners' descriptions of a graph."""

    cg_mode: Any
    num_tokens: int


def fake_engine(most_tokens: int) -> Any:
    return SimpleNamespace(
        mode="full",
        captures_tokens=lambda num_tokens: num_tokens <= most_tokens,
        most_tokens=lambda: most_tokens,
    )


class TestTheWidestBatch:
    """It is captured too, so that a batch that fits by itself is not padded past the slots."""

    def sizes(self, most_tokens: int, sizes: list[int]) -> list[int]:
        from prefetch_runtime.vllm.graph_sizes import add_widest_batch

        compilation = SimpleNamespace(cudagraph_capture_sizes=list(sizes))
        add_widest_batch(compilation, cast(Any, SimpleNamespace(most_tokens=lambda: most_tokens)))
        return compilation.cudagraph_capture_sizes

    def test_it_is_put_where_it_belongs(self) -> None:
        assert self.sizes(6, [1, 2, 4, 8, 16]) == [1, 2, 4, 6, 8, 16]

    @pytest.mark.parametrize("most_tokens", [4, 16, 2048, 1, 0])
    def test_it_is_not_put_twice_nor_beyond_what_vllm_would_capture(self, most_tokens: int) -> None:
        assert self.sizes(most_tokens, [1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]

    def test_without_graphs_there_is_nothing_to_add_to(self) -> None:
        assert self.sizes(6, []) == []


class TestV1:
    class Dispatcher:
        """Lists its graphs when it is told to, as vLLM's does."""

        def __init__(self) -> None:
            self.cudagraph_keys: dict[Any, set[Desc]] = {}

        def initialize_cudagraph_keys(self, sizes: list[int], *, piecewise: bool = False) -> None:
            from vllm.config import CUDAGraphMode

            full, pieces = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
            self.cudagraph_keys = {
                full: {Desc(full, size) for size in sizes},
                pieces: {Desc(pieces, size) for size in sizes if piecewise},
            }

    def sizes(self, dispatcher: Any) -> list[int]:
        from vllm.config import CUDAGraphMode

        return sorted(key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode.FULL])

    def test_graphs_that_are_too_wide_are_left_out_every_time_they_are_listed(self) -> None:
        from prefetch_runtime.vllm.graph_sizes import limit_v1_graphs

        dispatcher = self.Dispatcher()
        limit_v1_graphs(dispatcher, fake_engine(4))
        dispatcher.initialize_cudagraph_keys([1, 2, 4, 8, 16])
        assert self.sizes(dispatcher) == [1, 2, 4]
        dispatcher.initialize_cudagraph_keys([2, 3, 5])  # after profiling
        assert self.sizes(dispatcher) == [2, 3]

    def test_with_a_slot_for_every_expert_nothing_is_left_out(self) -> None:
        from prefetch_runtime.vllm.graph_sizes import limit_v1_graphs

        dispatcher = self.Dispatcher()
        limit_v1_graphs(dispatcher, fake_engine(2048))
        dispatcher.initialize_cudagraph_keys([1, 512])
        assert self.sizes(dispatcher) == [1, 512]


class TestReport:
    @pytest.mark.parametrize(
        ("fits", "captured", "told"),
        [
            (
                4,
                16,
                "batches of 1, 4 tokens decode as one CUDA graph; those of 8, 16, which may need "
                "more experts than there are slots, too, their MoE layers in waves inside the "
                "graph; those of 32 run outside of graphs, their MoE layers in waves",
            ),
            (
                4,
                4,
                "batches of 1, 4 tokens decode as one CUDA graph; those of 8, 16, 32 run outside "
                "of graphs, their MoE layers in waves",
            ),
            (
                99,
                99,
                "batches of 1, 4, 8, 16, 32 tokens decode as one CUDA graph; none is too wide "
                "for that",
            ),
        ],
    )
    def test_it_says_how_each_size_decodes(
        self, fits: int, captured: int, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from prefetch_runtime.vllm import graph_sizes

        said: list[str] = []
        logger = SimpleNamespace(info_once=lambda text, *values: said.append(text % values))
        monkeypatch.setattr(graph_sizes, "logger", logger)
        sizes = {1, 4, 8, 16, 32}
        engine: Any = SimpleNamespace(mode="full", most_tokens=lambda: fits)
        graph_sizes.report(engine, kept={n for n in sizes if n <= captured}, of=sizes)
        graph_sizes.report(engine, kept=set(), of=set())
        assert said == [f"Expert cache: {told}"]


class TestV2:
    def manager(self, sizes: list[int]) -> Any:
        from vllm.config import CUDAGraphMode

        descs = [Desc(CUDAGraphMode.FULL, size) for size in sizes]
        candidates = {
            (count, 0): [next(desc for desc in descs if desc.num_tokens >= count)]
            for count in range(1, sizes[-1] + 1)
        }
        return SimpleNamespace(
            _capture_descs={CUDAGraphMode.FULL: descs[::-1]}, _candidates=candidates
        )

    def test_graphs_that_are_too_wide_are_neither_captured_nor_chosen(self) -> None:
        from vllm.config import CUDAGraphMode

        from prefetch_runtime.vllm.graph_sizes import limit_v2_graphs

        manager = self.manager([1, 2, 4, 8])
        limit_v2_graphs(manager, fake_engine(2))
        captured = [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL]]
        assert captured == [2, 1]
        chosen = {
            count: [desc.num_tokens for desc in descs]
            for (count, _), descs in manager._candidates.items()
        }
        assert chosen == {1: [1], 2: [2], **{count: [] for count in range(3, 9)}}

    def test_graphs_of_other_modes_stay(self) -> None:
        from vllm.config import CUDAGraphMode

        from prefetch_runtime.vllm.graph_sizes import limit_v2_graphs

        manager = self.manager([1, 8])
        piecewise = Desc(CUDAGraphMode.PIECEWISE, 8)
        manager._candidates[8, 0].append(piecewise)
        manager._capture_descs[CUDAGraphMode.PIECEWISE] = [piecewise]
        limit_v2_graphs(manager, fake_engine(2))
        assert manager._candidates[8, 0] == [piecewise]
        assert manager._capture_descs[CUDAGraphMode.PIECEWISE] == [piecewise]


class TestPadding:
    """`PrefetchEngine.padding`, asked within a forward context of vLLM's."""

    KV_SLOTS = torch.tensor([17, 18, 40, -1, -1, 99])

    @contextmanager
    def forward(self, **fields: Any) -> Iterator[None]:
        from vllm.forward_context import ForwardContext, override_forward_context
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.mamba.abstract import MambaBase

        def one_of(kind: Any) -> Any:
            cls: Any = type("Layer", (kind,), {})
            cls.__abstractmethods__ = frozenset()
            return cls.__new__(cls)

        kinds = {"layer": Attention, "latent": MLAAttention, "state": MambaBase}
        layers = {name: one_of(kind) for name, kind in kinds.items()}
        fields = {"slot_mapping": {}, **fields}
        context = ForwardContext(no_compile_layers=layers, attn_metadata={}, **fields)
        with override_forward_context(context):
            yield

    def padding(self, num_tokens: int, *, pads: bool = True) -> torch.Tensor | None:
        from prefetch_runtime.vllm.engine import PrefetchEngine

        return PrefetchEngine.padding(cast(PrefetchEngine, SimpleNamespace(_pads=pads)), num_tokens)

    def test_rows_without_a_place_in_the_kv_cache_are_padding(self) -> None:
        with self.forward(slot_mapping={"layer": self.KV_SLOTS}):
            padding = self.padding(4)
        assert padding is not None
        assert padding.tolist() == [17, 18, 40, -1]
        assert padding.data_ptr() == self.KV_SLOTS.data_ptr(), "a graph must not hold a copy"

    def test_a_mark_that_vllm_may_not_keep_up_is_not_asked(self) -> None:
        stale = torch.ones(4, dtype=torch.bool)
        with self.forward(slot_mapping={"layer": self.KV_SLOTS}, is_padding=stale):
            padding = self.padding(4)
        assert padding is not None
        assert padding.dtype == torch.int64

    @pytest.mark.parametrize("attention", ["layer", "latent"])
    def test_layers_that_keep_a_state_are_not_asked(self, attention: str) -> None:
        nobody_writes_it = torch.full((6,), -1)
        with self.forward(slot_mapping={"state": nobody_writes_it, attention: self.KV_SLOTS}):
            padding = self.padding(4)
        assert padding is not None
        assert padding.tolist() == [17, 18, 40, -1]
        with self.forward(slot_mapping={"state": nobody_writes_it, "unknown": nobody_writes_it}):
            assert self.padding(4) is None, "then no row is padding"

    @pytest.mark.parametrize("slot_mapping", [{}, [{}], {"layer": torch.tensor([3])}])
    def test_without_a_place_for_each_row_none_is_padding(self, slot_mapping: Any) -> None:
        with self.forward(slot_mapping=slot_mapping):
            assert self.padding(4) is None

    def test_without_graphs_or_a_forward_pass_nothing_is_padded(self) -> None:
        assert self.padding(4) is None
        with self.forward(slot_mapping={"layer": self.KV_SLOTS}):
            assert self.padding(4, pads=False) is None


class TestNoFullGraphsLeft:
    @pytest.mark.parametrize("name", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
    def test_full_graphs_are_all_that_is_asked_for(self, name: str) -> None:
        from vllm.config import CUDAGraphMode

        from prefetch_runtime.vllm.checks import check_full_graphs_left

        check_full_graphs_left(CUDAGraphMode[name], "full")

    @pytest.mark.parametrize("name", ["NONE", "PIECEWISE", None])
    def test_without_them_the_start_ends_with_the_reason(self, name: str | None) -> None:
        from vllm.config import CUDAGraphMode

        from prefetch_runtime.vllm.checks import UnsupportedError, check_full_graphs_left

        left = None if name is None else CUDAGraphMode[name]
        message = rf"'full' decodes as one CUDA graph.*cudagraph_mode is {name} now"
        with pytest.raises(UnsupportedError, match=message):
            check_full_graphs_left(left, "full")
        message = rf"'segmented' decodes as CUDA graphs that break.*cudagraph_mode is {name} now"
        with pytest.raises(UnsupportedError, match=message):
            check_full_graphs_left(left, "segmented")
