"""What a model folder declares about its experts, and folders that are none."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prefetch_runtime import model_shape
from prefetch_runtime.model_shape import (
    MAX_CONFIG_BYTES,
    ExpertShape,
    ModelError,
    expert_shape,
    load_config,
    may_have_experts,
    most_positions,
    read_config,
)
from prefetch_runtime.shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent


def _folder(path: Path, config: str | bytes) -> str:
    text = config.encode() if isinstance(config, str) else config
    (path / "config.json").write_bytes(text)
    return str(path)


class TestLoadConfig:
    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("qwen3-30b", "qwen3-30b-a3b"),
            ("Mixtral-8x7B", "mixtral-8x7b"),
            ("tiny-moe", "models/tiny-moe"),
            ("foo", None),
        ],
    )
    def test_an_unknown_name_is_refused_with_all_shapes_and_the_nearest_at_once(
        self, name: str, nearest: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_shape, "_fetch", lambda _: pytest.fail("asked the hub"))
        monkeypatch.chdir(ROOT)
        with pytest.raises(ModelError, match=f"'{name}' is no named shape") as refused:
            load_config(name)
        assert all(shape in str(refused.value) for shape in SHAPES)
        ending = f"did you mean '{nearest}'?"
        assert str(refused.value).endswith(ending) == (nearest is not None)

    @pytest.mark.parametrize("name", SHAPES)
    def test_a_named_shape_is_known_as_long_as_it_is_published(self, name: str) -> None:
        config = load_config(name)
        config.pop("quantization_config", None)
        published = most_positions(config)
        assert published != 8192, "where the shapes that bench makes weights of end"
        assert config == {**SHAPES[name], "max_position_embeddings": published}

    def test_a_named_shape_has_the_format_that_it_is_published_in(self) -> None:
        config = load_config("gpt-oss-20b")
        assert config["quantization_config"]["quant_method"] == "mxfp4"
        assert config["max_position_embeddings"] == 131072
        assert "quantization_config" not in SHAPES["gpt-oss-20b"], "bench makes bf16 weights of it"


class TestReadConfig:
    def test_the_config_of_a_folder_is_read(self, tmp_path: Path) -> None:
        assert read_config(_folder(tmp_path, '{"num_experts": 8}')) == {"num_experts": 8}

    def test_a_relative_folder_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model").mkdir()
        _folder(tmp_path / "model", "{}")
        monkeypatch.chdir(tmp_path)
        assert read_config("model") == {}
        assert read_config("./model") == {}

    def test_a_home_folder_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _folder(tmp_path, "{}")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert read_config("~") == {}

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "gpt2"])
    def test_a_name_on_a_hub_is_left_to_vllm(self, name: str) -> None:
        assert read_config(name) is None

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "models/tiny/moe", "../x"])
    def test_a_folder_that_is_not_there_is_named(self, name: str) -> None:
        with pytest.raises(ModelError, match=f"there is no model folder '{name}'"):
            read_config(name)

    @pytest.mark.parametrize(("name", "folder"), [("model/config.json", "model"), ("x.json", ".")])
    def test_of_a_file_the_folder_is_asked_for(
        self, name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / name).write_text("{}")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            ModelError, match=f"'{name}': it is a file; give its folder, '{folder}'"
        ):
            read_config(name)

    @pytest.mark.parametrize("load", [read_config, load_config])
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            (
                "mine/tinymoe",
                "'mine/tinymoe' ('mine' is a folder here, so the hub is not asked); did you mean "
                "'mine/tiny-moe'?",
            ),
            ("models/tinymoe", "'models/tinymoe'; did you mean 'models/tiny-moe'?"),
            ("mine/zzz", "'mine/zzz' ('mine' is a folder here, so the hub is not asked)"),
            ("models/zzz", "'models/zzz'"),
            ("models/a b", "'models/a b'"),
            ("./models/tinymoe", "'./models/tinymoe'; did you mean 'models/tiny-moe'?"),
            ("./models/notes", "'./models/notes'"),
        ],
        ids=lambda value: value[:20],
    )
    def test_a_name_in_a_folder_that_is_here_is_not_asked_of_the_hub(
        self,
        load: Callable[[str], Any],
        name: str,
        said: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for owner in ("models", "mine"):
            (tmp_path / owner / "tiny-moe").mkdir(parents=True)
        (tmp_path / "models" / "notes.txt").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(model_shape, "_fetch", lambda _: pytest.fail("asked the hub"))
        with pytest.raises(ModelError) as refused:
            load(name)
        assert str(refused.value) == f"there is no model folder {said}"
        assert read_config("Qwen/tinymoe") is None

    @pytest.mark.parametrize("load", [read_config, load_config])
    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            (
                model_shape.TINY_MOE,
                "; it is in the project's own folder: go there, or give its whole path",
            ),
            ("models/other", ""),
        ],
    )
    def test_the_hub_has_no_owner_of_the_name_models(
        self,
        load: Callable[[str], Any],
        name: str,
        hint: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(model_shape, "_fetch", lambda _: pytest.fail("asked the hub"))
        with pytest.raises(ModelError) as refused:
            load(name)
        assert str(refused.value) == f"there is no model folder {name!r}{hint}"

    def test_what_the_hubs_cache_holds_is_a_model_beside_a_folder_of_its_owners_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = pytest.importorskip("huggingface_hub")
        (tmp_path / "Qwen").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
        assert read_config("Qwen/Qwen3-30B-A3B") is None

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.touch()
        with pytest.raises(ModelError, match="there is no model folder"):
            read_config(str(file))

    def test_a_folder_without_config_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"holds no config\.json, so it is no model folder$"):
            read_config(str(tmp_path))

    def test_what_the_hubs_client_keeps_a_model_in_has_a_name(self, tmp_path: Path) -> None:
        folder = tmp_path / "models--Qwen--Qwen3-30B-A3B"
        (folder / "snapshots").mkdir(parents=True)
        with pytest.raises(ModelError, match="give the model's name, 'Qwen/Qwen3-30B-A3B'"):
            read_config(str(folder))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            pytest.param("{", "is not valid JSON", id="cut off"),
            pytest.param("", "is not valid JSON", id="empty"),
            pytest.param(b"\xff\xfe\x00", "is not text", id="binary"),
            pytest.param("[" * 100_000, "is not valid JSON", id="too deep"),
            pytest.param('{"n": ' + "9" * 5000 + "}", "is not valid JSON", id="too long a number"),
            pytest.param("[1]", "must hold an object, it holds a list", id="a list"),
            pytest.param("null", "must hold an object, it holds a NoneType", id="null"),
        ],
    )
    def test_a_config_that_is_none_is_refused(
        self, config: str | bytes, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=message):
            read_config(_folder(tmp_path, config))

    def test_a_config_as_large_as_weights_is_not_read(self, tmp_path: Path) -> None:
        folder = _folder(tmp_path, "{}")
        os.truncate(tmp_path / "config.json", MAX_CONFIG_BYTES + 1)
        with pytest.raises(ModelError, match="larger than 4 MiB: not a model's config"):
            read_config(folder)

    MODELOPT: ClassVar[dict[str, Any]] = {"producer": {"name": "modelopt", "version": "0.29.0"}}

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            (
                {"quant_algo": "nvfp4", "group_size": 16, "exclude_modules": ["lm_head"]},
                {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                    "group_size": 16,
                    "exclude_modules": ["lm_head"],
                },
            ),
            ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
        ],
    )
    def test_the_format_may_be_in_modelopts_own_file(
        self, found: dict[str, Any], expected: Any, tmp_path: Path
    ) -> None:
        folder = _folder(tmp_path, '{"num_experts": 8}')
        file = tmp_path / "hf_quant_config.json"
        file.write_text(json.dumps({**self.MODELOPT, "quantization": found}))
        config = read_config(folder)
        assert config is not None
        assert config.get("quantization_config") == expected
        assert load_config(folder) == config
        file.write_text(json.dumps({"producer": {"name": "other"}, "quantization": found}))
        assert read_config(folder) == {"num_experts": 8}, "vLLM does not take it either"

    @pytest.mark.parametrize(
        "config",
        [
            {"quantization_config": {"quant_method": "fp8"}},
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        ],
        ids=str,
    )
    def test_what_config_json_says_comes_first(
        self, config: dict[str, Any], tmp_path: Path
    ) -> None:
        (tmp_path / "hf_quant_config.json").write_text("{")
        assert read_config(_folder(tmp_path, json.dumps(config))) == config

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "hf_quant_config.json is not valid JSON"),
            ("[]", "hf_quant_config.json must hold an object"),
            ("{}", "hf_quant_config.json has no object under quantization"),
            ('{"quantization": 3}', "hf_quant_config.json has no object under quantization"),
            ("\udcff", "the hf_quant_config.json of .* is not text"),
        ],
    )
    def test_a_file_of_modelopt_that_is_none_is_named(
        self, text: str, message: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "hf_quant_config.json"
        file.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ModelError, match=message):
            read_config(_folder(tmp_path, "{}"))

    @pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
    def test_a_name_that_the_system_refuses_is_an_error_of_ours(self, name: str) -> None:
        with pytest.raises(ModelError, match="cannot be read"):
            read_config(name)


class TestPositions:
    @pytest.mark.parametrize(
        ("rope", "most"),
        [
            ({}, 100),
            ({"rope_scaling": None}, 100),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 200),
            (
                {
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": 4,
                        "original_max_position_embeddings": 50,
                    }
                },
                200,
            ),
            ({"rope_parameters": {"rope_type": "default"}}, 100),
            ({"rope_parameters": {"a": {"rope_type": "dynamic", "factor": 3}}}, 300),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, 100),
            ({"rope_scaling": {"factor": "8"}}, 100),
            ({"rope_scaling": {"factor": float("nan")}}, 100),
            ({"rope_scaling": {"factor": float("inf")}}, 1 << 31),
            ({"model_max_length": 500}, 500),
        ],
        ids=str,
    )
    def test_what_a_sequence_may_have(self, rope: dict[str, Any], most: int) -> None:
        config = {"num_experts": 8, "max_position_embeddings": 100, **rope}
        assert most_positions(config) == most
        assert most_positions({"text_config": config}) == most

    @pytest.mark.parametrize(
        "config", [{}, {"num_experts": 8}, {"num_experts": 8, "max_position_embeddings": "x"}]
    )
    def test_what_is_not_said_is_not_known(self, config: dict[str, Any]) -> None:
        assert most_positions(config) is None


class TestExpertShape:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            pytest.param({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8), id="Qwen3"),
            pytest.param({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2), id="Mixtral"),
            pytest.param(
                {"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8), id="DeepSeek"
            ),
            pytest.param({"moe_num_experts": 64, "moe_k": 6}, (64, 6), id="Ernie"),
            pytest.param({"moe_num_experts": [64, 64], "moe_k": 6}, (64, 6), id="Ernie-VL"),
            pytest.param({"num_experts": 16, "moe_topk": [2, 1]}, (16, 2), id="Hunyuan"),
            pytest.param(
                {"text_config": {"num_local_experts": 16, "num_experts_per_tok": 1}},
                (16, 1),
                id="multimodal",
            ),
            pytest.param({"num_experts": 16, "fan_out": 4}, (16, None), id="unknown top_k"),
        ],
    )
    def test_experts_are_found_under_every_name(
        self, config: dict[str, Any], expected: tuple[int, int | None]
    ) -> None:
        assert expert_shape(config) == ExpertShape(num_experts=expected[0], top_k=expected[1])

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"hidden_size": 64},
            {"num_experts": None, "num_experts_per_tok": 2},
            {"num_experts": 0},
            {"num_experts": 1, "num_experts_per_tok": 1},
            {"num_experts": -4},
            {"num_experts": "8"},
            {"num_experts": True},
            {"num_experts": []},
            {"num_experts": 8.0},
            {"text_config": "none"},
        ],
        ids=json.dumps,
    )
    def test_a_dense_model_has_none(self, config: dict[str, Any]) -> None:
        assert expert_shape(config) is None

    def test_the_model_in_this_repository_has_32_experts(self) -> None:
        config = read_config(str(ROOT / "models" / "tiny-moe"))
        assert config is not None
        assert expert_shape(config) == ExpertShape(num_experts=32, top_k=4)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_experts_of_a_multimodal_model_are_found(name: str) -> None:
    text = {"num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 100}
    vision = {"vision_config": {"hidden_size": 64}}
    for config in ({name: text, **vision}, {"thinker_config": {name: text, **vision}}):
        assert expert_shape(config) == ExpertShape(num_experts=128, top_k=8)
        assert most_positions(config) == 100


@pytest.mark.parametrize(
    ("config", "may"),
    [
        ({"block_configs": [{"block_type": "moe", "n_routed_experts": 64}]}, True),
        ({"a": {"b": [[{"num_local_experts": [8, 8]}]]}}, True),
        ({"num_experts": 1, "a": [{"num_experts": 0}, {"moe_num_experts": "8"}, None]}, False),
        ({"num_experts_per_tok": 8}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_number_of_experts_is_found_however_deep(config: dict[str, Any], may: bool) -> None:
    assert may_have_experts(config) is may
    deep: Any = config
    for _ in range(10_000):
        deep = {"a": [deep]}
    assert may_have_experts(deep) is may
