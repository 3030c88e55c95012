"""Configs of public MoE models, for plans and measurements without their weights.

Only what vLLM needs to build the layers: sizes, counts and names. Positions end at 8192, without
the models' rope scaling, and weights are bf16, as random ones are made. Imports nothing, so that a
run without this package may read it as well.
"""

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "olmoe-1b-7b": {
        **_COMMON,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "deepseek-v2-lite": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "gpt-oss-20b": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
    "qwen3-235b-a22b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
    },
    "deepseek-v3": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
SHAPES["gpt-oss-120b"] = {
    **SHAPES["gpt-oss-20b"],
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
"""By name, as `config.json` holds them, in bf16."""

_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "gpt-oss-20b": _MXFP4,
    "gpt-oss-120b": _MXFP4,
}
"""The `quantization_config` of those that are published quantised."""
_POSITIONS = {
    "qwen3-30b-a3b": 40960,
    "mixtral-8x7b": 32768,
    "olmoe-1b-7b": 4096,
    "deepseek-v2-lite": 163840,
    "gpt-oss-20b": 131072,
    "gpt-oss-120b": 131072,
    "qwen3-235b-a22b": 40960,
    "deepseek-v3": 163840,
}
"""Tokens that a sequence may have, with the rope scaling that the model is published with."""


def shape_config(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """The config of a named shape, cut to `layers` layers.

    Raises:
        ValueError: an unknown name, or more layers than the model has.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if layers is None:
        return config
    most = config["num_hidden_layers"]
    if not 1 <= layers <= most:
        raise ValueError(f"{name} has {most} layers, so it cannot be cut to {layers}")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return config


def published_config(name: str) -> dict[str, Any]:
    """The config of a named shape in the format that the model is published in, and as long.

    Raises:
        ValueError: an unknown name.
    """
    config = shape_config(name)
    config["max_position_embeddings"] = _POSITIONS[name]
    if name in _PUBLISHED:
        config["quantization_config"] = dict(_PUBLISHED[name])
    return config


def write_shape(name: str, folder: Path, **changes: Any) -> Path:
    """Write the shape's `config.json` into `folder`; `changes` replace entries of it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape_config(name, layers=changes.pop("num_hidden_layers", None))
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
