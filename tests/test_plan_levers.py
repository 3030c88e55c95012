"""What would make room on a GPU that holds too little."""

import re
from dataclasses import replace
from typing import Any

import pytest

from prefetch_runtime.hit_rates import UNIFORM, create_hit_rates
from prefetch_runtime.model_sizes import model_sizes
from prefetch_runtime.plan import Planner, Workload, typical_gpu
from prefetch_runtime.plan_levers import levers
from tests.helpers.model_configs import MIXTRAL, QWEN3_30B


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
