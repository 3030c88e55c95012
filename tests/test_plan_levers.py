"""What would make room on a GPU that holds too little, and when fewer sequences are faster."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from prefetch_runtime.hit_rates import UNIFORM, HitRates, create_hit_rates
from prefetch_runtime.model_sizes import model_sizes
from prefetch_runtime.plan import Planner, Workload, typical_gpu
from prefetch_runtime.plan_levers import BetterBatch, better_batch, levers
from tests.helpers.model_configs import GLM_4_5_AIR, MIXTRAL, QWEN3_30B


def planner(config: dict[str, Any], gib: float, **work: Any) -> Planner:
    sizes = model_sizes(config)
    workload = Workload(**{"context": 8192, **work})
    rates = create_hit_rates(
        UNIFORM, num_experts=sizes.num_experts, top_k=sizes.top_k, batch=workload.batch
    )
    return Planner(sizes, typical_gpu(gib), workload, rates)


def _fits(some: Planner) -> bool:
    return some.memory().slots_per_layer > 0


def test_only_what_is_enough_alone_is_named() -> None:
    found = levers(planner(QWEN3_30B.config, 8.1))
    assert found.is_each_enough
    assert found.changes[0] == "an int4 (GPTQ, AWQ) checkpoint"
    for words in found.changes[1:]:
        name, value = re.findall(r"--(\S+) (\d+)", words)[0]
        change = {name.replace("-", "_"): int(value)}
        assert _fits(planner(QWEN3_30B.config, 8.1, **change))


def test_the_longest_context_that_leaves_room_is_named() -> None:
    some = planner(QWEN3_30B.config, 12, context=1 << 16)
    assert not _fits(some)
    (words,) = [words for words in levers(some).changes if "--context" in words]
    longest = int(words.split()[1])
    assert words == f"--context {longest} (--max-model-len {longest})"
    assert _fits(planner(QWEN3_30B.config, 12, context=longest))
    assert not _fits(planner(QWEN3_30B.config, 12, context=longest + 256))


def test_one_sequence_is_named_where_several_take_the_room() -> None:
    found = levers(planner(QWEN3_30B.config, 12, batch=16))
    assert "--batch 1 (--max-num-seqs 1)" in found.changes
    assert not any("--staging-slots" in words for words in found.changes), "not enough alone"


def test_what_is_enough_only_together_is_said_to_be() -> None:
    some = planner(QWEN3_30B.config, 5.2, context=1 << 17)
    found = levers(some)
    assert not found.is_each_enough
    assert len(found.changes) > 1
    assert "--context" in found.changes[-1]


def test_attention_in_int4_is_named_only_where_experts_in_int4_are_not_enough() -> None:
    found = levers(planner(GLM_4_5_AIR, 16))  # the other weights alone take 13 GiB
    assert found.changes == ("an int4 (GPTQ, AWQ) checkpoint whose attention is in int4, too",)
    assert found.is_each_enough
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}
    assert _fits(planner({**GLM_4_5_AIR, "quantization_config": awq}, 16))
    assert levers(planner(GLM_4_5_AIR, 27)).changes[0] == "an int4 (GPTQ, AWQ) checkpoint"


def test_attention_in_int4_is_taken_together_with_the_rest_where_that_is_needed() -> None:
    found = levers(planner(GLM_4_5_AIR, 11))
    assert found.changes[0] == "an int4 (GPTQ, AWQ) checkpoint whose attention is in int4, too"
    assert not found.is_each_enough
    assert len(found.changes) > 1


def test_a_gpu_that_nothing_helps_has_no_levers() -> None:
    assert levers(planner(QWEN3_30B.config, 1)).changes == ()


def test_a_quantised_checkpoint_is_not_told_to_be_quantised() -> None:
    config = {
        **QWEN3_30B.config,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    }
    some = planner(config, 3.2)
    assert not _fits(some)
    assert not any("checkpoint" in words for words in levers(some).changes)


@pytest.mark.parametrize("config", [QWEN3_30B.config, MIXTRAL.config], ids=["qwen", "mixtral"])
def test_the_least_gpu_is_the_least(config: dict[str, Any]) -> None:
    some = planner(config, 4)
    least = levers(some).least_gib
    assert _fits(replace_gpu(some, least + 0.01))
    assert not _fits(replace_gpu(some, least - 0.01))


def replace_gpu(some: Planner, gib: float) -> Planner:
    return Planner(some.sizes, replace(some.gpu, gib=gib), some.workload, some.rates)


class TestFewerSequences:
    SIZES = model_sizes(QWEN3_30B.config)

    def _rates(self, batch: int) -> HitRates:
        of_model = partial(create_hit_rates, "qwen3-30b-a3b")
        return of_model(num_experts=self.SIZES.num_experts, top_k=self.SIZES.top_k, batch=batch)

    def _planner(self, gib: float, batch: int, context: int, **gpu: float) -> Planner:
        workload = Workload(context=context, batch=batch)
        return Planner(self.SIZES, typical_gpu(gib, **gpu), workload, self._rates(batch))

    def _found(self, some: Planner) -> BetterBatch | None:
        return better_batch(some, self._rates)

    def test_one_sequence_has_the_slots_that_the_kv_cache_of_many_takes(self) -> None:
        found = self._found(self._planner(24, 16, 8192))
        alone = self._planner(24, 1, 8192).plan().best
        assert found is not None
        assert alone is not None
        assert (found.batch, found.slots_per_layer) == (1, 37)
        assert found.tokens_per_s == alone.tokens_per_s
        assert found.why == "the KV cache of 16 x 8192 tokens takes the slots' memory"

    @pytest.mark.parametrize("batch", [8, 12])
    def test_the_best_of_the_powers_of_two_below_is_found(self, batch: int) -> None:
        def speed(number: int) -> float:
            best = self._planner(80, number, 8192).plan().best
            return best.tokens_per_s if best is not None else 0

        found = self._found(self._planner(80, 16, 8192))
        assert found is not None
        assert found.batch == max((1, 2, 4, 8), key=speed) == 8
        assert self._found(self._planner(80, batch, 8192)) is None, "all experts fit"

    def test_sequences_that_share_the_slots_are_the_reason_where_the_cache_is_small(self) -> None:
        found = self._found(self._planner(24, 16, 512))
        assert found is not None
        assert found.why == "16 sequences share the slots and miss more"

    def test_both_reasons_are_named_where_both_count(self) -> None:
        found = self._found(self._planner(32, 8, 8192))
        assert found is not None
        assert found.why == (
            "8 sequences share the slots and miss more, and the KV cache of 8 x 8192 tokens takes "
            "the slots' memory"
        )

    def test_waves_outside_of_graphs_are_the_reason_where_copies_cost_little(self) -> None:
        some = self._planner(24, 5, 512, link_gbs=2000)
        segmented = replace(some.workload, mode="segmented")
        found = self._found(Planner(some.sizes, some.gpu, segmented, some.rates))
        assert found is not None
        assert (found.batch, found.why) == (4, "5 sequences run in waves")

    def test_a_batch_that_does_not_fit_at_all_has_a_smaller_one(self) -> None:
        some = self._planner(12, 32, 8192)
        assert not _fits(some)
        found = self._found(some)
        assert found is not None
        assert found.batch == 1
        assert found.why.startswith("the KV cache of 32 x 8192")

    @pytest.mark.parametrize(("gib", "batch"), [(24, 1), (141, 16), (4, 16)])
    def test_nothing_is_said_where_fewer_are_not_clearly_faster(
        self, gib: float, batch: int
    ) -> None:
        assert self._found(self._planner(gib, batch, 8192)) is None
