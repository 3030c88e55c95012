"""Configs of public models, cut down to what decides their sizes, and their parameter counts."""

from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """A model as its publishers describe it."""

    config: dict[str, Any]
    billions: float
    """Parameters of its checkpoint, in 1e9."""


QWEN3_30B = PublicModel(
    {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
    30.532,
)
QWEN2_MOE = PublicModel(
    {
        "model_type": "qwen2_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    14.316,
)
MIXTRAL = PublicModel(
    {
        "model_type": "mixtral",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    46.703,
)
OLMOE = PublicModel(
    {
        "model_type": "olmoe",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
    6.919,
)
DEEPSEEK_V2_LITE = PublicModel(
    {
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "tie_word_embeddings": False,
    },
    15.706,
)
DEEPSEEK_V3 = PublicModel(
    {
        **DEEPSEEK_V2_LITE.config,
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "vocab_size": 129280,
    },
    671.026,
)
GPT_OSS_20B = PublicModel(
    {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
    20.915,
)

# Of no family that `model_sizes` knows whole; of the multimodal ones the text models.
_LLAMA_4_TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "vocab_size": 202048,
    "tie_word_embeddings": False,
}
LLAMA_4_SCOUT: dict[str, Any] = {"model_type": "llama4", "text_config": _LLAMA_4_TEXT}
LLAMA_4_MAVERICK: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {**_LLAMA_4_TEXT, "num_local_experts": 128, "interleave_moe_layer_step": 2},
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
ERNIE_4_5: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "dtype": "bfloat16",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
    "tie_word_embeddings": True,
}
