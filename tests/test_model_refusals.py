"""What a config.json tells of a model that the cache refuses at start."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime.model_refusals import (
    MARLIN_GROUPS,
    NEAREST,
    moe_backend,
    refused_family,
    why_refused,
)
from prefetch_runtime.shapes import SHAPES
from tests.helpers.checkpoints import FORMATS
from tests.helpers.model_configs import GPT_OSS_20B, QWEN3_30B

ROOT = Path(__file__).resolve().parent.parent
ANOTHER = ("fp8-dynamic", "fp8-block-marlin")
"""Formats written for a kernel that is not the nearest: one is refused, one is served by both."""


def _with(quantization: Any, **changes: Any) -> dict[str, Any]:
    return {**QWEN3_30B.config, **changes, "quantization_config": quantization}


def _compressed(weights: dict[str, Any], activations: Any = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_named_shapes_are_served(shape: str) -> None:
    assert why_refused(SHAPES[shape]) is None


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_that_the_engine_tests_run_are_served(name: str) -> None:
    config = dict(GPT_OSS_20B.config if name == "mxfp4" else QWEN3_30B.config)
    if FORMATS[name].config is not None:
        config["quantization_config"] = dict(FORMATS[name].config or {})
    assert why_refused(config) is None
    if name not in ANOTHER:
        expected = None if name == "bf16" else FORMATS[name].backend
        assert moe_backend(config) == expected


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt's NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt's FP8"),
        ({"quant_method": "mxfp4"}, "MXFP4 experts are served for gpt-oss alone"),
        ({"quant_method": "gguf"}, "quant_method 'gguf'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq experts of 3 bits"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "awq experts of 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, "sym false"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "these gptq experts to Marlin"),
        (_compressed({"num_bits": 4, "type": "float", "group_size": 16}), "float 4 bits"),
        (
            _compressed({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
            "float 8 bits",
        ),
        (_compressed({"num_bits": 8, "type": "int"}, {"num_bits": 8}), "quantised activations"),
        (_compressed({"num_bits": 3, "type": "int"}), "int 3 bits experts are not served"),
    ],
    ids=json.dumps,
)
def test_a_format_without_a_kernel_is_refused_with_the_nearest(
    quantization: dict[str, Any], reason: str
) -> None:
    why = why_refused(_with(quantization))
    assert why is not None
    assert reason in why
    assert why.endswith(NEAREST)


NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq_marlin", "bits": 4, "group_size": 128},
        {"quant_method": "auto_awq", "bits": 4, "group_size": 128},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128},
        {"quant_method": "torchao"},
        {"quant_method": "modelopt", "quant_algo": "mixed_precision", "quantized_layers": {}},
        {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.*.mlp.experts*"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*mlp*"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude": ["*block_sparse_moe*"]},
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["re:.*(gate|up|down)_proj$"],
        },
        {"quant_method": "quark", "exclude": ["re:.*experts.*"]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": NVFP4},
                "group_1": {"targets": ["re:.*(gate|up|down)_proj$"], "weights": INT4},
            },
        },
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": NVFP4},
                "group_1": {"targets": ["re:.*experts.*"], "weights": INT4},
            },
        },
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["re:.*self_attn.*"], "weights": NVFP4}},
        },
    ],
    ids=json.dumps,
)
def test_what_may_be_served_is_left_to_the_worker(quantization: dict[str, Any]) -> None:
    assert why_refused(_with(quantization)) is None


@pytest.mark.parametrize("name", ["FP8", "compressed_tensors", "Compressed-Tensors", "AWQ", ""])
def test_a_method_may_be_spelled_as_vllm_takes_it(name: str) -> None:
    quantization = {**_compressed(INT4), "quant_method": name, "bits": 4, "group_size": 128}
    quantization["weight_block_size"] = [128, 128]
    assert why_refused(_with(quantization)) is None
    assert (moe_backend(_with(quantization)) == "triton") == (name == "FP8")
    other = {**GPT_OSS_20B.config, "quantization_config": {"quant_method": "gpt_oss_mxfp4"}}
    assert why_refused(other) is None


@pytest.mark.parametrize(
    "skipped",
    [
        ["lm_head"],
        ["re:.*mlp[.]gate$"],
        ["model.layers.0.mlp.shared_expert"],
        ["model.layers.0.mlp.gate_proj", "re:.*shared_experts[.](gate|up|down)_proj$"],
        ["re:.*self_attn.(q|k|v|o)_proj$", "re:.*attn.*down_proj"],
        "experts",
    ],
)
def test_what_else_is_not_quantised_does_not_matter(skipped: Any) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": skipped}
    assert "NVFP4" in str(why_refused(_with(quantization)))
    group = {"targets": ["Linear"], "weights": NVFP4}
    groups = {"group_0": group, "group_1": {"targets": ["re:.*attn.*"], "weights": INT4}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert "float 4 bits" in str(why_refused({**_with(quantization), "ignore": skipped}))


def test_a_hidden_size_that_marlin_does_not_take_is_refused() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert "multiple of 128" in str(why_refused(_with(gptq, hidden_size=2880)))
    assert why_refused(_with(gptq, hidden_size=2944)) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}},
        {**QWEN3_30B.config, "model_type": "minicpm"},
    ],
    ids=["dbrx", "minicpm"],
)
def test_a_family_that_goes_past_vllms_layer_is_refused(config: dict[str, Any]) -> None:
    assert "serve it with plain vllm serve" in str(why_refused(config))
    assert refused_family(config) == why_refused(config)
    quantised = {**QWEN3_30B.config, "quantization_config": {"quant_method": "gguf"}}
    assert refused_family(quantised) is None


@pytest.mark.parametrize("quantization", ["fp8", {}, {"quant_method": "gptq"}, None], ids=repr)
def test_a_config_that_cannot_be_read_is_left_to_the_sizes(quantization: Any) -> None:
    assert why_refused(_with(quantization)) is None


def test_the_nearest_formats_are_those_that_the_worker_names() -> None:
    # Read, not imported: it needs vLLM.
    source = (ROOT / "prefetch_runtime" / "vllm" / "kernels.py").read_text()
    constants = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert any(NEAREST in text for text in constants)
    assert any("group size 32, 64 or 128" in text for text in constants)
    assert MARLIN_GROUPS == (-1, 32, 64, 128)
