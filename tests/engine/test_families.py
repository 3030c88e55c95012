"""Families on the CPU against vLLM alone, and checkpoints that are not whole, in one process."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch_runtime.stats import RuntimeStats
from tests.engine.formats import Case, cells_of, joined, records_of
from tests.engine.gpu_runs import engine, run_plan
from tests.helpers.checkpoints import LAYERS, Tensors, mxfp4, write

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FAMILIES = ("qwen2", "deepseek", "deepseek-v3", "mixtral", "olmoe", "gpt-oss")
CASES = {name: Case(name, "bf16") for name in FAMILIES}
MOE = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
GPT_OSS = "model.layers.{}.mlp.experts.{}"


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def with_one(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors: {n: change(t) if n == name else t for n, t in tensors.items()}


def one_layer_in_mxfp4(tensors: Tensors) -> Tensors:
    name = GPT_OSS.format(1, "gate_up_proj")
    if name not in tensors:
        return tensors
    blocks, scales = mxfp4(tensors[name].transpose(1, 2).contiguous())
    kept = {n: t for n, t in tensors.items() if n != name}
    return {**kept, f"{name}_blocks": blocks, f"{name}_scales": scales}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor is missing": (
        {"change": without(MOE.format(2, 5, "w3"))},
        "layers.2.block_sparse_moe.experts: the checkpoint has no w13_weight (up_proj, w3) of "
        "expert 5; it is incomplete",
    ),
    "an expert is missing": (
        {"change": without(*(MOE.format(1, 7, part) for part in ("w1", "w2", "w3")))},
        "(gate_proj, w1) of expert 7 and 2 more tensors",
    ),
    "another precision": (
        {"change": with_one(MOE.format(0, 3, "w2"), lambda t: t.to(torch.float8_e4m3fn))},
        "w2_weight (down_proj, w2) of expert 3 is torch.float8_e4m3fn in the checkpoint, but the "
        "model's config.json asks for torch.bfloat16",
    ),
    "another shape": (
        {"change": with_one(MOE.format(0, 3, "w2"), lambda t: t[:, :100])},
        "0.block_sparse_moe.experts.3.w2.weight' in model-00002-of-00005.safetensors is "
        "[256, 100], but config.json (8 experts, hidden size 256, intermediate_size 128) makes it "
        "[256, 128]; they are of two models",
    ),
    "another number of experts": (
        {"config": {"num_local_experts": 16}},
        "layer 0 has 8 experts in the checkpoint, but config.json declares 16; they are of two ",
    ),
    "a truncated file": (
        {},
        f"cannot be loaded: model-{LAYERS:05}-of-{LAYERS + 1:05}.safetensors is cut off or damaged "
        "(SafetensorError: ",
    ),
}
# Loaded by code of its own, which copies each tensor over all experts.
BROKEN_GPT_OSS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt-oss without a bias": (
        {"change": without(GPT_OSS.format(1, "down_proj_bias"))},
        "layers.1.mlp.experts: the checkpoint has no w2_bias of any expert; it is incomplete",
    ),
    "gpt-oss with a bias of another precision": (
        {"change": with_one(GPT_OSS.format(2, "gate_up_proj_bias"), lambda t: t.char())},
        "layers.2.mlp.experts: w13_bias of all experts is torch.int8 in the checkpoint, but the "
        "model's config.json asks for torch.bfloat16",
    ),
    "gpt-oss with one expert": (
        {"change": with_one(GPT_OSS.format(1, "down_proj"), lambda t: t[:1])},
        "layers.1.mlp.experts.down_proj' in model-00003-of-00005.safetensors is [1, 128, 256], but "
        "config.json (16 experts, hidden size 256, intermediate_size 128) makes it [16, 128, 256]",
    ),
    # Whose loader would take the part that fits, and serve it.
    "gpt-oss with wider experts": (
        {"change": with_one(GPT_OSS.format(2, "gate_up_proj"), lambda t: t.repeat(1, 1, 2))},
        "layers.2.mlp.experts.gate_up_proj' in model-00004-of-00005.safetensors is [16, 256, 512], "
        "but config.json (16 experts, hidden size 256, intermediate_size 128) makes it ",
    ),
    "gpt-oss with a layer of another format": (
        {"change": one_layer_in_mxfp4},
        "or not of the model and the quantisation that its config.json names (RuntimeError: ",
    ),
}
SETTINGS = {"slots_per_layer": 4, "mode": "eager"}


def broken(folder: Path, name: str) -> dict[str, Any]:
    """An engine on a spoilt Mixtral or gpt-oss."""
    family, how = ("mixtral", BROKEN) if name in BROKEN else ("gpt-oss", BROKEN_GPT_OSS)
    model = write(folder / name, family, **how[name][0])
    if name == "a truncated file":
        file = model / f"model-{LAYERS:05}-of-{LAYERS + 1:05}.safetensors"
        file.write_bytes(file.read_bytes()[:-4096])
    llm = {
        "model": str(model),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return engine(name, [], SETTINGS, llm=llm)


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every engine's record; vLLM alone first, before any of our code is loaded."""
    folder = tmp_path_factory.mktemp("families")
    plan = joined("families", list(CASES.values()), ["eager"], ["half"])
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    engines = [*plan.engines, *(broken(folder, name) for name in (*BROKEN, *BROKEN_GPT_OSS))]
    plan = dataclasses.replace(plan, engines=engines, environment=environment)
    return run_plan(plan, folder / "run", time.monotonic() + 600)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    family: str, records: dict[str, Any]
) -> None:
    case = CASES[family]
    (cell,) = cells_of(case, ["eager"], ["half"], records_of(case, records))
    assert (cell.outcome, cell.detail.split()[1]) == ("equal", "outputs"), cell.detail


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_experts_have_no_slots(family: str, records: dict[str, Any]) -> None:
    case = CASES[family]
    ours = records_of(case, records)["eager/half"]
    stats = RuntimeStats.from_dict(ours["runs"]["four"]["stats"])
    assert len(stats.layers) == case.of.moe_layers == LAYERS - family.startswith("deepseek")
    assert {layer.num_slots for layer in stats.layers} == {case.of.num_experts // 2}


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_GPT_OSS])
def test_a_checkpoint_that_is_not_whole_is_an_error_at_load(
    name: str, records: dict[str, Any]
) -> None:
    message = {**BROKEN, **BROKEN_GPT_OSS}[name][1]
    assert message in records[name].get("error", "it was served")


def test_cells_say_what_differs(records: dict[str, Any]) -> None:
    case = CASES["mixtral"]
    found = records_of(case, records)
    ours = found["eager/half"]
    runs = {
        name: {**run, "tokens": [[0]] * len(run["tokens"])} for name, run in ours["runs"].items()
    }
    (cell,) = cells_of(case, ["eager"], ["half"], {**found, "eager/half": {**ours, "runs": runs}})
    assert cell.outcome == "differs"
    assert "tokens differ from 0 on" in cell.detail
