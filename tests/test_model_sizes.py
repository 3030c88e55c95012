"""Sizes from a config alone: public models to the parameter, formats to the byte, bad configs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch_runtime.host_store import RecordLayout
from prefetch_runtime.model_shape import ModelError, load_config
from prefetch_runtime.model_sizes import KNOWN_FAMILIES, OTHER_FAMILIES, model_sizes
from prefetch_runtime.shapes import SHAPES
from prefetch_runtime.state_layers import state_layer
from tests.helpers.model_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DOTS_LLM1,
    ERNIE_4_5,
    GEMMA_4_26B,
    GLM_4_5_AIR,
    GLM_4_7_FLASH,
    GPT_OSS_20B,
    GRANITE_3_1_3B,
    GRANITE_4_SMALL,
    HUNYUAN_A13B,
    JAMBA,
    KIMI_K2,
    KIMI_LINEAR,
    LFM2_8B,
    LLAMA_4_MAVERICK,
    LLAMA_4_SCOUT,
    MINIMAX_M2,
    MIXTRAL,
    NEMOTRON_3_NANO,
    OLMOE,
    PHI_3_5_MOE,
    QWEN2_MOE,
    QWEN3_30B,
    QWEN3_NEXT,
    QWEN3_VL_30B,
    PublicModel,
)

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT_OSS_20B, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_30B)

SHAPE_BILLIONS = {
    "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70,
    "olmoe-1b-7b": 6.92,
    "deepseek-v2-lite": 15.71,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "qwen3-235b-a22b": 235.09,
    "deepseek-v3": 671.03,
}
"""Parameters as published, in 1e9."""


def _with(quantization: Any, **changes: Any) -> dict[str, Any]:
    return {**QWEN3_30B.config, "quantization_config": quantization, **changes}


class TestPublicModels:
    @pytest.mark.parametrize("model", PUBLIC, ids=lambda m: m.config["model_type"])
    def test_the_parameters_add_up_to_what_is_published(self, model: PublicModel) -> None:
        sizes = model_sizes(model.config)
        billions = (sizes.experts_bytes + sizes.dense_bytes) / 2 / 1e9
        assert billions == pytest.approx(model.billions, abs=0.0005)

    @pytest.mark.parametrize("name", SHAPES)
    def test_so_do_those_of_the_named_shapes(self, name: str) -> None:
        sizes = model_sizes(SHAPES[name])
        found = (sizes.experts_bytes + sizes.dense_bytes) / 2 / 1e9
        assert found == pytest.approx(SHAPE_BILLIONS[name], abs=0.006)

    @pytest.mark.parametrize(
        ("name", "gib", "expert_format"),
        [
            ("gpt-oss-20b", 12.8, "mxfp4"),
            ("gpt-oss-120b", 60.8, "mxfp4"),
            ("deepseek-v3", 627, "fp8 in blocks"),
        ],
    )
    def test_a_shape_is_planned_as_large_as_its_checkpoint(
        self, name: str, gib: float, expert_format: str
    ) -> None:
        sizes = model_sizes(load_config(name))
        assert sizes.expert_format == expert_format
        total = (sizes.experts_bytes + sizes.dense_bytes) / 2**30
        assert total == pytest.approx(gib, rel=0.01)

    def test_every_known_family_is_among_them(self) -> None:
        assert {model.config["model_type"] for model in PUBLIC} == set(KNOWN_FAMILIES)

    def test_qwen3_30b_has_54_gib_of_experts_of_9_mib(self) -> None:
        sizes = model_sizes(QWEN3_30B.config)
        assert (sizes.num_layers, sizes.num_moe_layers) == (48, 48)
        assert (sizes.num_experts, sizes.top_k) == (128, 8)
        assert sizes.expert_bytes == 9_437_184
        assert sizes.experts_bytes == sizes.pinned_bytes == 54 * 2**30
        assert sizes.slot_bytes(32) == 13.5 * 2**30  # as measured
        assert sizes.kv_bytes(1) == 48 * 2 * 4 * 128 * 2
        assert sizes.notes == ()

    def test_the_input_embedding_is_not_read_unless_it_is_the_output_too(self) -> None:
        embedding = 151936 * 2048 * 2
        untied = model_sizes(QWEN3_30B.config)
        assert untied.dense_bytes - untied.dense_read_bytes == embedding
        tied = model_sizes({**QWEN3_30B.config, "tie_word_embeddings": True})
        assert tied.dense_bytes == tied.dense_read_bytes == untied.dense_read_bytes

    def test_dense_first_layers_have_no_experts(self) -> None:
        assert model_sizes(DEEPSEEK_V3.config).num_moe_layers == 61 - 3

    def test_latent_attention_caches_the_latent(self) -> None:
        assert model_sizes(DEEPSEEK_V2_LITE.config).kv_bytes(1) == 27 * (512 + 64) * 2

    def test_a_sliding_window_bounds_the_cache(self) -> None:
        sizes = model_sizes(GPT_OSS_20B.config)
        layer = 2 * 8 * 64 * 2
        assert sizes.kv_bytes(100) == 24 * 100 * layer
        assert sizes.kv_bytes(1000) == 12 * (1000 + 128) * layer

    def test_the_model_in_this_repository(self) -> None:
        sizes = model_sizes(load_config(str(ROOT / "models" / "tiny-moe")))
        assert sizes.expert_bytes == 3 * 64 * 128 * 2
        assert sizes.experts_bytes == 8 * 32 * sizes.expert_bytes
        files = (ROOT / "models" / "tiny-moe").glob("*.safetensors")
        weights = sum(file.stat().st_size for file in files)
        assert sizes.experts_bytes + sizes.dense_bytes == pytest.approx(weights, rel=0.01)


class TestOtherFamilies:
    """Parameters of their text models, in 1e9: as published, or (the last nine) as transformers
    builds them from the config."""

    @pytest.mark.parametrize(
        ("config", "moe_layers", "billions"),
        [
            (LLAMA_4_SCOUT, 48, 107.77),
            (LLAMA_4_MAVERICK, 24, 400.71),
            (QWEN3_NEXT, 48, 79.67),
            (ERNIE_4_5, 27, 21.83),
            (GRANITE_4_SMALL, 40, 32.21),
            (JAMBA, 16, 51.57),
            (NEMOTRON_3_NANO, 23, 31.58),
            (GEMMA_4_26B, 30, 25.25),  # 25.23 in the checkpoint: vLLM keeps keys as values, too
            (KIMI_LINEAR, 26, 49.12),
            (LFM2_8B, 22, 8.34),
            (QWEN3_VL_30B, 48, 30.53),
            (KIMI_K2, 60, 1026.41),
            (GLM_4_5_AIR, 45, 106.85),
            (GLM_4_7_FLASH, 46, 29.94),
            (GRANITE_3_1_3B, 32, 3.30),
            (PHI_3_5_MOE, 32, 41.87),
            (MINIMAX_M2, 62, 228.69),
            (HUNYUAN_A13B, 32, 80.39),
            (DOTS_LLM1, 61, 142.77),
        ],
        ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
    )
    def test_the_parameters_add_up_to_what_is_published(
        self, config: dict[str, Any], moe_layers: int, billions: float
    ) -> None:
        sizes = model_sizes(config)
        assert sizes.num_moe_layers == moe_layers
        found = (sizes.experts_bytes + sizes.dense_bytes) / 2 / 1e9
        assert found == pytest.approx(billions, abs=0.01)

    @pytest.mark.parametrize(
        ("config", "attention"),
        [(GLM_4_7_FLASH, "kv_lora_rank"), (GLM_4_5_AIR, "num_attention_heads")],
    )
    def test_what_is_taken_for_a_plain_decoder_names_how_its_attention_is_counted(
        self, config: dict[str, Any], attention: str
    ) -> None:
        (note,) = model_sizes({**config, "model_type": "newer"}).notes
        assert note.startswith("the layers of model type newer are taken to be those of a plain")
        assert f"attention by {attention}, " in note

    def test_other_weights_in_int4_are_those_of_such_a_checkpoint(self) -> None:
        awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}
        for config in (GLM_4_5_AIR, QWEN3_30B.config, GRANITE_3_1_3B):
            quantised = model_sizes({**config, "quantization_config": awq})
            assert quantised.dense_bytes < model_sizes(config).dense_bytes
            assert model_sizes(config).dense_int4_bytes == quantised.dense_bytes
            assert quantised.dense_int4_bytes == quantised.dense_bytes

    def test_weights_of_linear_attention_are_counted_or_said_not_to_be(self) -> None:
        assert model_sizes(QWEN3_NEXT).notes[-1].endswith("it is not counted")
        unknown = {k: v for k, v in QWEN3_NEXT.items() if k != "linear_value_head_dim"}
        assert "their weights are taken to be" in model_sizes(unknown).notes[-1]

    def test_all_of_them_are_counted_as_their_own(self) -> None:
        others = (
            *(LLAMA_4_SCOUT, QWEN3_NEXT, ERNIE_4_5, GRANITE_4_SMALL, JAMBA, NEMOTRON_3_NANO),
            *(GEMMA_4_26B, KIMI_LINEAR, LFM2_8B, QWEN3_VL_30B, KIMI_K2, GLM_4_5_AIR),
            *(GLM_4_7_FLASH, GRANITE_3_1_3B, PHI_3_5_MOE, MINIMAX_M2, HUNYUAN_A13B, DOTS_LLM1),
        )
        sizes = [model_sizes(config) for config in others]
        assert {model.model_type for model in sizes} == set(OTHER_FAMILIES)
        for model in sizes:
            assert not [note for note in model.notes if "taken to be" in note]

    def test_nemotron_3_nano_by_hand(self) -> None:
        """Every layer is one thing: 23 Mamba2, 23 of experts, 6 of attention."""
        sizes = model_sizes(NEMOTRON_3_NANO)
        assert sizes.expert_bytes == 2 * (2 * 1856 * 2688)  # up and down, no gate
        assert sizes.kv_bytes(1) == 2 * (6 * 2 * 2 * 128)
        channels = 4096 + 2 * 8 * 128  # 64 heads of 64, and 8 groups of 128 twice
        mamba = (4096 + channels + 64) * 2688 + 4096 * 2688
        mamba += channels * (4 + 1) + 3 * 64 + 4096
        attention = (32 + 2 * 2) * 128 * 2688 + 32 * 128 * 2688
        of_experts = 128 * 2688 + 2 * 3712 * 2688
        norms, embeddings = 53 * 2688, 2 * 131072 * 2688
        total = 23 * mamba + 6 * attention + 23 * of_experts + norms + embeddings
        assert sizes.dense_bytes == 2 * total

    def test_gemma_4_by_hand(self) -> None:
        """An MLP beside the experts of every layer; every sixth layer attends to everything, with
        heads of 512 in place of 256."""
        sizes = model_sizes(GEMMA_4_26B)
        assert sizes.expert_bytes == 2 * (3 * 704 * 2816)
        assert sizes.kv_bytes(5000) == 2 * (5 * 2 * 2 * 512 * 5000 + 25 * 2 * 8 * 256 * 1024)
        mlp, router = 3 * 2112 * 2816, 128 * 2816
        sliding = (16 + 2 * 8) * 256 * 2816 + 16 * 256 * 2816
        full = (16 + 2 * 2) * 512 * 2816 + 16 * 512 * 2816
        norms, embedding = 61 * 2816, 262144 * 2816
        total = 30 * (mlp + router) + 25 * sliding + 5 * full + norms + embedding
        assert sizes.dense_bytes == 2 * total

    def test_one_layer_of_each_kind_that_keeps_a_state(self) -> None:
        """By the sizes of its projections; what is beside them is less than a thousandth."""
        for config, projections in (
            (GRANITE_4_SMALL, 4096 * (2 * 8192 + 2 * 128 + 128) + 8192 * 4096),
            (JAMBA, 4096 * 16384 + 8192 * (256 + 2 * 16) + 256 * 8192 + 8192 * 4096),
            (KIMI_LINEAR, 4 * 2304 * 4096 + 2304 * 32 + 2 * (2304 * 128 + 128 * 4096)),
            (LFM2_8B, 4 * 2048 * 2048),
            (QWEN3_NEXT, 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048),
        ):
            layer = state_layer(config, config["hidden_size"])
            assert layer is not None
            found = sum(rows * columns for rows, columns in layer.linear) + layer.plain
            assert projections <= found < 1.003 * projections, config["model_type"]

    def test_the_newer_names_of_nemotrons_layers_say_the_same(self) -> None:
        pattern = NEMOTRON_3_NANO["hybrid_override_pattern"]
        names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
        named = {**NEMOTRON_3_NANO, "layers_block_type": [names[letter] for letter in pattern]}
        del named["hybrid_override_pattern"], named["num_hidden_layers"]
        assert model_sizes(named) == model_sizes(NEMOTRON_3_NANO)

    def test_a_pattern_that_is_not_known_is_named(self) -> None:
        for changes, message in (
            ({"hybrid_override_pattern": "ME?"}, r"hybrid_override_pattern with '\?', which is no"),
            ({"hybrid_override_pattern": "M*"}, "no layer has them"),
            ({"hybrid_override_pattern": "E" * 10_001}, "more than 10000 layers"),
        ):
            with pytest.raises(ModelError, match=message):
                model_sizes({**NEMOTRON_3_NANO, **changes})

    def test_experts_behind_a_narrower_projection_are_narrower(self) -> None:
        sizes = model_sizes({**NEMOTRON_3_NANO, "moe_latent_size": 1024})
        assert sizes.expert_bytes == 2 * (2 * 1856 * 1024)
        added = sizes.dense_bytes - model_sizes(NEMOTRON_3_NANO).dense_bytes
        assert added == 2 * 23 * 2 * 1024 * 2688

    @pytest.mark.parametrize(
        ("changes", "inner"),
        [
            ({"shared_intermediate_size": 1536}, 1536),  # Granite
            ({"num_shared_expert": [2] * 48}, 2 * 768),  # HunYuan
            ({"moe_num_shared_experts": 2}, 2 * 768),
            ({"n_shared_experts": 1}, 768),
            ({"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 512}, 2 * 512),
        ],
        ids=str,
    )
    def test_experts_that_every_token_takes_are_counted(
        self, changes: dict[str, Any], inner: int
    ) -> None:
        added = model_sizes({**QWEN3_30B.config, **changes}).dense_bytes
        added -= model_sizes(QWEN3_30B.config).dense_bytes
        assert added == 48 * 3 * inner * 2048 * 2


class TestLayers:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"decoder_sparse_step": 2}, 24),
            ({"mlp_only_layers": [0, 1, 47, 99]}, 45),
            ({"first_k_dense_replace": 3, "moe_layer_freq": 2}, 22),
            ({"moe_layer_freq": [0] + [1] * 47}, 47),
            ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, 47),
            ({"moe_layer_start_index": 1, "moe_layer_end_index": 10, "moe_layer_interval": 2}, 5),
        ],
        ids=str,
    )
    def test_layers_without_experts_are_told_apart(
        self, changes: dict[str, Any], expected: int
    ) -> None:
        sizes = model_sizes({**QWEN3_30B.config, **changes})
        assert sizes.num_moe_layers == expected
        # Each of the others has an MLP of 3 x 6144 x 2048 instead of the router.
        dense, every = 48 - expected, model_sizes(QWEN3_30B.config)
        added = dense * (3 * 6144 - 128) * 2048 * 2
        assert sizes.dense_bytes - every.dense_bytes == added

    def test_the_first_of_every_two_layers_is_the_dense_one(self) -> None:
        config = {**QWEN3_30B.config, "decoder_sparse_step": 2, "num_hidden_layers": 47}
        assert model_sizes(config).num_moe_layers == 23

    def test_no_layer_with_experts_is_an_error(self) -> None:
        with pytest.raises(ModelError, match="no layer has them"):
            model_sizes({**QWEN3_30B.config, "first_k_dense_replace": 48})

    def test_an_unknown_family_is_said_to_be_a_guess(self) -> None:
        sizes = model_sizes({**QWEN3_30B.config, "model_type": "newest_moe"})
        assert "newest_moe" in sizes.notes[0]

    def test_a_text_model_inside_another_is_found(self) -> None:
        config = {"model_type": "qwen_vl", "text_config": QWEN3_30B.config}
        sizes = model_sizes(config)
        assert sizes.experts_bytes == 54 * 2**30
        assert "only the text model" in sizes.notes[0]


class TestFormats:
    # w13 is [1536, 2048], w2 [2048, 768].
    @pytest.mark.parametrize(
        ("quantization", "name", "tensors"),
        [
            pytest.param(
                {"quant_method": "fp8", "weight_block_size": [128, 128]},
                "fp8 in blocks",
                [1536 * 2048, 12 * 16 * 4, 2048 * 768, 16 * 6 * 4],
                id="fp8 blocks",
            ),
            pytest.param(
                {"quant_method": "fp8"}, "fp8", [1536 * 2048, 4, 2048 * 768, 4], id="fp8 tensor"
            ),
            pytest.param(
                {"quant_method": "mxfp4"},
                "mxfp4",
                [1536 * 1024, 1536 * 64, 2048 * 384, 2048 * 24],
                id="mxfp4",
            ),
            pytest.param(
                {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
                "gptq 4 bits",
                [1536 * 1024, 1536 * 16 * 2, 2048 * 384, 2048 * 6 * 2],
                id="gptq",
            ),
            pytest.param(
                {"quant_method": "gptq", "bits": 8, "group_size": -1},
                "gptq 8 bits",
                [1536 * 2048, 1536 * 2, 2048 * 768, 2048 * 2],
                id="gptq per row",
            ),
            pytest.param(
                {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
                "awq 4 bits",
                [1536 * 1024, 1536 * 16 * 2, 1536 * 8, 2048 * 384, 2048 * 6 * 2, 2048 * 3],
                id="awq",
            ),
            pytest.param(
                {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                "modelopt nvfp4",
                [1536 * 1024, 1536 * 128, 2048 * 384, 2048 * 48],
                id="nvfp4",
            ),
            pytest.param(
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "group_0": {
                            "weights": {
                                "num_bits": 4,
                                "type": "int",
                                "strategy": "group",
                                "group_size": 128,
                                "symmetric": True,
                            }
                        }
                    },
                },
                "compressed-tensors int 4 bits",
                [1536 * 1024, 1536 * 16 * 2, 2048 * 384, 2048 * 6 * 2],
                id="w4a16",
            ),
            pytest.param(
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "group_0": {
                            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}
                        }
                    },
                },
                "compressed-tensors float 8 bits",
                [1536 * 2048, 1536 * 4, 2048 * 768, 2048 * 4],
                id="fp8 channel",
            ),
        ],
    )
    def test_an_expert_weighs_what_its_tensors_do(
        self, quantization: dict[str, Any], name: str, tensors: list[int]
    ) -> None:
        sizes = model_sizes(_with(quantization))
        assert sizes.expert_format == name
        assert sizes.expert_bytes == sum(tensors)
        layout = RecordLayout.from_tensors(
            {str(index): ((nbytes,), torch.uint8) for index, nbytes in enumerate(tensors)}
        )
        assert sizes.record_bytes == layout.record_bytes

    def test_gpt_oss_experts_have_biases_beside_four_bit_weights(self) -> None:
        sizes = model_sizes(
            {**GPT_OSS_20B.config, "quantization_config": {"quant_method": "mxfp4"}}
        )
        weights = 3 * 2880 * 2880
        assert sizes.expert_bytes == weights // 2 + weights // 32 + 3 * 2880 * 2
        assert sizes.dense_bytes == model_sizes(GPT_OSS_20B.config).dense_bytes

    def test_attention_that_is_left_out_stays_as_it_was(self) -> None:
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        plain = model_sizes(QWEN3_30B.config).dense_bytes
        assert model_sizes(_with(gptq)).dense_bytes < plain
        left_out = {**gptq, "modules_to_not_convert": ["model.layers.0.self_attn"]}
        assert model_sizes(_with(left_out)).dense_bytes == plain

    @pytest.mark.parametrize(
        ("quantization", "message"),
        [
            ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', whose size"),
            ({}, "quant_method 'None'"),
            ("fp8", "quantization_config that is no object"),
            ({"quant_method": ["fp8"]}, "quant_method"),
            ({"quant_method": "gptq"}, "no positive whole number bits"),
            ({"quant_method": "gptq", "bits": 10**9}, "absurd bits"),
            ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
            ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
            ({"quant_method": "fp8", "weight_block_size": [128, "x"]}, "weight_block_size"),
            ({"quant_method": "compressed-tensors"}, r"without config_groups"),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "without config_"),
        ],
        ids=json.dumps,
    )
    def test_a_format_that_cannot_be_sized_is_refused(
        self, quantization: Any, message: str
    ) -> None:
        with pytest.raises(ModelError, match=message):
            model_sizes(_with(quantization))


class TestBadConfigs:
    @pytest.mark.parametrize(
        "name",
        ["shared_expert_intermediate_size", "num_experts", "max_position_embeddings", "head_dim"],
    )
    def test_an_absurd_number_is_named(self, name: str) -> None:
        with pytest.raises(ModelError, match=f"absurd {name}"):
            model_sizes({**QWEN3_30B.config, name: 10**400})

    @pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
    @pytest.mark.parametrize("value", [None, 0, -1, "8", True, 1.5, 10**30], ids=str)
    def test_a_number_that_is_missing_or_absurd_is_named(self, name: str, value: Any) -> None:
        with pytest.raises(ModelError, match=name):
            model_sizes({**QWEN3_30B.config, name: value})

    def test_a_million_layers_are_not_counted_one_by_one(self) -> None:
        with pytest.raises(ModelError, match="absurd num_hidden_layers, more than 10000"):
            model_sizes({**QWEN3_30B.config, "num_hidden_layers": 1_000_000})

    @pytest.mark.parametrize("value", ["128", 128.0, float("inf"), {"a": 1}], ids=str)
    @pytest.mark.parametrize("name", ["num_experts", "moe_intermediate_size"])
    def test_what_is_no_whole_number_is_not_passed_over(self, name: str, value: object) -> None:
        with pytest.raises(ModelError, match=f"has {name} .* no whole number; take the file"):
            model_sizes({**QWEN3_30B.config, name: value})

    def test_a_dense_model_has_nothing_to_plan(self) -> None:
        with pytest.raises(
            ModelError,
            match=r"a dense model\), so there is nothing to plan; serve it with plain vllm serve",
        ):
            model_sizes({"model_type": "llama", "hidden_size": 4096})

    def test_more_experts_per_token_than_there_are(self) -> None:
        with pytest.raises(ModelError, match="routes to 129 of 128 experts"):
            model_sizes({**QWEN3_30B.config, "num_experts_per_tok": 129})

    @pytest.mark.parametrize("value", ["\x1b[31mred", ["qwen3_moe"], {"a": 1}, None], ids=repr)
    def test_a_model_type_that_is_no_name_is_not_repeated(self, value: Any) -> None:
        sizes = model_sizes({**QWEN3_30B.config, "model_type": value})
        assert sizes.model_type == "unnamed"
        assert "\x1b" not in "".join(sizes.notes)

    def test_an_unknown_dtype_is_said_to_be_taken_as_bfloat16(self) -> None:
        sizes = model_sizes({**QWEN3_30B.config, "dtype": "float13"})
        assert (sizes.expert_format, sizes.expert_bytes) == ("bfloat16", 9_437_184)
        assert "bfloat16 is taken" in sizes.notes[0]


class TestLayersThatDiffer:
    """Qwen3-30B-A3B's 48 layers with what other families say of theirs."""

    @pytest.mark.parametrize(
        ("said", "attending"),
        [
            ({"full_attention_interval": 4}, 12),
            ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}, 12),
            ({"layer_types": ["mamba", "attention"] * 24}, 24),
            ({"attn_layer_period": 8, "attn_layer_offset": 4}, 6),
            ({"linear_attn_config": {"kda_layers": list(range(1, 37))}}, 12),
            ({"linear_attn_config": {"kda_layers": None}}, 48),
            ({"layer_types": ["full_attention"]}, 48),
            ({}, 48),
        ],
        ids=str,
    )
    def test_only_layers_that_attend_have_a_kv_cache(
        self, said: dict[str, Any], attending: int
    ) -> None:
        plain = model_sizes(QWEN3_30B.config)
        sizes = model_sizes({**QWEN3_30B.config, **said})
        assert sizes.kv_token_bytes * 48 == plain.kv_token_bytes * attending
        is_noted = any(f"{48 - attending} of the 48 layers" in note for note in sizes.notes)
        assert is_noted == (attending < 48)

    @pytest.mark.parametrize(
        ("said", "layers"),
        [
            ({"expert_layer_period": 2, "expert_layer_offset": 1}, 24),
            ({"expert_layer_period": 3}, 16),
            ({"interleave_moe_layer_step": 2, "intermediate_size_mlp": 6144}, 24),
            ({"interleave_moe_layer_step": 1}, 48),
        ],
        ids=str,
    )
    def test_not_every_layer_has_experts(self, said: dict[str, Any], layers: int) -> None:
        sizes = model_sizes({**QWEN3_30B.config, **said})
        assert sizes.num_moe_layers == layers
        assert sizes.experts_bytes == layers * 128 * 9_437_184
