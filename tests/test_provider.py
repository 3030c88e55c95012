"""The weight-provider contract: what `prepare` returns, and what it leaves alone."""

import re

import pytest
import torch

from prefetch_runtime.copier import HostCopier
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.provider import (
    CachedWeightProvider,
    ExpertWeightProvider,
    ExpertWeightResult,
    FullGPUProvider,
)
from prefetch_runtime.scheduler import Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import NotEnoughSlots
from tests.helpers.small_cache import CPU, SmallCache, holds, small_cache


def _cached(cache: SmallCache) -> CachedWeightProvider:
    return CachedWeightProvider(cache.scheduler, 0)


def _check_rows(cache: SmallCache, result: ExpertWeightResult, ids: torch.Tensor) -> None:
    """Every returned row holds the expert that was asked for."""
    layer = cache.layer()
    for expert, row in zip(ids.ravel().tolist(), result.topk_ids.ravel().tolist(), strict=True):
        local = expert if layer.local_of is None else int(layer.local_of[expert])
        if expert >= 0 and local >= 0:
            assert holds(layer.buffers, row, layer.store, local)


class TestFullGPUProvider:
    def test_returns_what_exists_and_allocates_nothing(self) -> None:
        w1, w2, scale = torch.zeros(4, 2, 2), torch.zeros(4, 2, 1), torch.ones(4, 2)
        provider: ExpertWeightProvider = FullGPUProvider(w1, w2, w1_scale=scale)
        ids = torch.tensor([[3, 0]])
        with torch.profiler.profile(profile_memory=True) as profile:
            result = provider.prepare(ids)
        assert result.w1 is w1
        assert result.w2 is w2
        assert result.topk_ids is ids
        assert result.w1_scale is scale
        assert result.w2_scale is None
        assert [event.name for event in profile.events() if event.cpu_memory_usage] == []

    def test_the_profiler_of_that_test_sees_an_allocation(self) -> None:
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.empty(1024)
        assert [event.name for event in profile.events() if event.cpu_memory_usage]


class TestCachedWeightProvider:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_ids_are_always_remapped_and_keep_their_dtype(self, dtype: torch.dtype) -> None:
        cache = small_cache(num_experts=8, num_slots=4)
        ids = torch.tensor([[7, 5], [5, 6]], dtype=dtype)
        result = _cached(cache).prepare(ids)
        assert result.topk_ids.dtype == dtype
        assert result.topk_ids.tolist() == [[2, 0], [0, 1]]
        assert ids.tolist() == [[7, 5], [5, 6]]
        _check_rows(cache, result, ids)

    def test_ids_are_remapped_with_a_slot_for_every_expert(self) -> None:
        cache = small_cache(num_experts=8, num_slots=8)
        ids = torch.tensor([[7, 5]])
        result = _cached(cache).prepare(ids)
        assert result.topk_ids.tolist() == [[1, 0]]
        _check_rows(cache, result, ids)

    def test_the_weights_are_the_slots_at_fixed_addresses(self) -> None:
        cache = small_cache(num_experts=8, num_slots=2)
        provider = _cached(cache)
        results = [provider.prepare(torch.tensor([[i, i + 1]])) for i in range(6)]
        slots = cache.layer().buffers.tensors
        for result in results:
            assert result.w1.data_ptr() == slots["w13_weight"].data_ptr()
            assert result.w2.data_ptr() == slots["w2_weight"].data_ptr()
            assert result.w1_scale is not None
            assert result.w1_scale.data_ptr() == slots["w13_weight_scale"].data_ptr()
            assert result.w2_scale is None
            assert result.w1.shape == (2, 4, 3)

    def test_bytes_follow_the_ids_over_many_steps(self) -> None:
        cache = small_cache(num_experts=16, num_slots=4)
        provider = _cached(cache)
        generator = torch.Generator().manual_seed(3)
        for _ in range(50):
            cache.scheduler.begin_step()
            ids = torch.randperm(16, generator=generator)[:4].reshape(2, 2)
            _check_rows(cache, provider.prepare(ids), ids)

    def test_more_experts_than_slots_names_option_and_value_and_changes_nothing(self) -> None:
        cache = small_cache(num_experts=8, num_slots=4)
        provider = _cached(cache)
        provider.prepare(torch.tensor([[0, 1], [2, 3]]))
        mapping, stats = cache.mapping(), cache.scheduler.stats()
        slots = {name: tensor.clone() for name, tensor in cache.layer().buffers.tensors.items()}
        with pytest.raises(
            NotEnoughSlots,
            match=re.escape(
                "layer 0 needs 6 experts at once but has 4 slots; "
                "set slots_per_layer (--moe-expert-cache-size) to at least 6"
            ),
        ):
            provider.prepare(torch.tensor([[0, 1], [2, 4], [5, 6]]))
        assert cache.mapping() == mapping
        assert cache.scheduler.stats() == stats
        cache.layer().table.check_integrity()
        for name, tensor in cache.layer().buffers.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), slots[name].view(torch.uint8))
        assert provider.prepare(torch.tensor([[3, 0]])).topk_ids.tolist() == [[3, 0]]

    @pytest.mark.parametrize("bad", [8, -2])
    def test_an_id_that_is_no_expert_is_refused(self, bad: int) -> None:
        cache = small_cache(num_experts=8, num_slots=4)
        with pytest.raises(ValueError, match=f"expert id {bad} is out of range"):
            _cached(cache).prepare(torch.tensor([[0, bad]]))
        assert cache.mapping() == [-1] * 8

    @pytest.mark.parametrize("row", [-1, 0])
    def test_an_id_of_minus_one_costs_no_load_and_becomes_the_row_asked_for(self, row: int) -> None:
        cache = small_cache(num_experts=8, num_slots=2, id_for_padding=row)
        result = _cached(cache).prepare(torch.tensor([[6, 7], [-1, -1]]))
        assert result.topk_ids.tolist() == [[0, 1], [row, row]]
        assert cache.scheduler.stats().layers[0].misses == 2
        assert cache.copier.bytes_copied == 2 * cache.layer().store.layout.payload_bytes

    def test_ids_of_minus_one_alone_change_nothing(self) -> None:
        cache = small_cache()
        assert _cached(cache).prepare(torch.tensor([[-1, -1]])).topk_ids.tolist() == [[-1, -1]]
        assert cache.copier.bytes_copied == 0

    def test_no_token_at_all_is_an_empty_result(self) -> None:
        ids = torch.empty((0, 2), dtype=torch.int32)
        result = _cached(small_cache()).prepare(ids)
        assert result.topk_ids.shape == (0, 2)
        assert result.topk_ids.dtype == torch.int32

    def test_a_layer_without_both_projections_is_refused(self) -> None:
        host_store = HostStore()
        layout = RecordLayout.from_tensors({"w13_weight": ((2, 2), torch.float32)})
        scheduler = Scheduler(copier=HostCopier(), host_store=host_store, device=CPU)
        scheduler.add_layer(0, "a", host_store.add_layer(0, 4, layout), SlotBuffers(2, layout, CPU))
        with pytest.raises(ValueError, match="layer 0 has no tensor 'w2_weight'"):
            CachedWeightProvider(scheduler, 0)


class TestExpertMap:
    """Rank 1 of 2: global experts 1, 4, 6 and 7 are here, as local 2, 0, 3 and 1."""

    MAP = torch.tensor([-1, 2, -1, -1, 0, -1, 3, 1], dtype=torch.int32)

    def _cache(self, num_slots: int = 3) -> SmallCache:
        return small_cache(num_experts=4, num_slots=num_slots, expert_map=self.MAP)

    def test_map_and_mapping_are_one_tensor_over_global_ids(self) -> None:
        cache = self._cache()
        address = cache.layer().mapping.data_ptr()
        _cached(cache).prepare(torch.tensor([[7, 4]]))
        assert cache.layer().mapping.data_ptr() == address
        assert cache.mapping() == [-1, -1, -1, -1, 0, -1, -1, 1]

    def test_experts_of_other_ranks_become_minus_one_and_cost_no_load(self) -> None:
        cache = self._cache()
        ids = torch.tensor([[1, 0], [6, 3], [-1, -1]])
        result = _cached(cache).prepare(ids)
        assert result.topk_ids.tolist() == [[0, -1], [1, -1], [-1, -1]]
        assert cache.scheduler.stats().layers[0].misses == 2
        _check_rows(cache, result, ids)

    def test_an_evicted_expert_leaves_the_composed_mapping(self) -> None:
        cache = self._cache(num_slots=2)
        provider = _cached(cache)
        for ids in ([[4, 7]], [[1, 6]]):
            cache.scheduler.begin_step()
            result = provider.prepare(torch.tensor(ids))
            _check_rows(cache, result, torch.tensor(ids))
        assert cache.mapping() == [-1, 0, -1, -1, -1, -1, 1, -1]

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param([0, 1, 2], id="an expert is missing"),
            pytest.param([0, 1, 2, 2], id="an expert twice"),
            pytest.param([0, 1, 2, 3, 4], id="an expert too many"),
            pytest.param([[0, 1], [2, 3]], id="two dimensions"),
        ],
    )
    def test_a_map_that_does_not_name_each_local_expert_once_is_refused(
        self, bad: list[object]
    ) -> None:
        with pytest.raises(ValueError, match="name each of the 4 local experts once, -1 elsewhere"):
            small_cache(num_experts=4, num_slots=2, expert_map=torch.tensor(bad))
