"""A checkpoint whose experts are not as declared is seen in the headers; a good one never is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime.checkpoint_files import absent_files
from prefetch_runtime.expert_tensors import misfit
from tests.helpers.checkpoints import BASE, FAMILIES, FORMATS, Tensors, cases, tensors_of

Header = dict[str, tuple[str, list[int]]]
DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.uint8": "U8",
}
_WRITTEN: dict[tuple[str, str], list[Header]] = {}


def headers(family: str, how: str) -> list[Header]:
    """dtype and shape of every tensor, a dict per file; made once."""

    def of(tensors: Tensors) -> Header:
        return {name: (DTYPES[str(t.dtype)], list(t.shape)) for name, t in tensors.items()}

    if (family, how) not in _WRITTEN:
        _WRITTEN[family, how] = [of(file) for file in tensors_of(FAMILIES[family], FORMATS[how])]
    return _WRITTEN[family, how]


def config_of(family: str, how: str = "bf16", **changes: Any) -> dict[str, Any]:
    config = {**BASE, **FAMILIES[family].config, **changes}
    if FORMATS[how].config is not None:
        config["quantization_config"] = FORMATS[how].config
    return config


def write_headers(folder: Path, files: list[Header], *, index: bool = True) -> Path:
    """Files without weights: a header, and a hole of the size that it says."""
    folder.mkdir(exist_ok=True)
    names = {}
    for number, tensors in enumerate(files):
        file = folder / f"model-{number:05}.safetensors"
        text = json.dumps(
            {"__metadata__": {"format": "pt"}}
            | {
                name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}
                for name, (dtype, shape) in tensors.items()
            }
        ).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        names |= dict.fromkeys(tensors, file.name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def changed(files: list[Header], change: Callable[[str, list[int]], list[int] | None]) -> Any:
    """The headers with other shapes; None leaves a tensor out."""
    made = []
    for tensors in files:
        shapes = {name: (dtype, change(name, shape)) for name, (dtype, shape) in tensors.items()}
        made.append({name: of for name, of in shapes.items() if of[1] is not None})
    return made


@pytest.mark.parametrize(("family", "how"), list(cases()), ids="-".join)
def test_a_good_checkpoint_is_never_refused(family: str, how: str, tmp_path: Path) -> None:
    folder = write_headers(tmp_path, headers(family, how))
    assert misfit(folder, config_of(family, how)) is None


@pytest.mark.parametrize(("family", "how"), list(cases()), ids="-".join)
@pytest.mark.parametrize("declared", [64, 256])
def test_experts_of_another_intermediate_size_are_seen(
    family: str, how: str, declared: int, tmp_path: Path
) -> None:
    names = ("moe_intermediate_size", "intermediate_size")
    key = next(name for name in names if name in FAMILIES[family].config)
    folder = write_headers(tmp_path, headers(family, how))
    wrong = misfit(folder, config_of(family, how, **{key: declared}))
    assert wrong is not None
    assert f"{key} {declared}) makes it" in wrong
    assert "in model-0000" in wrong
    assert wrong.endswith("; they are of two models; get both from one place")


@pytest.mark.parametrize(("family", "how"), list(cases()), ids="-".join)
@pytest.mark.parametrize("hidden", [128, 512])
def test_experts_of_another_hidden_size_are_seen(
    family: str, how: str, hidden: int, tmp_path: Path
) -> None:
    folder = write_headers(tmp_path, headers(family, how))
    wrong = misfit(folder, config_of(family, how, hidden_size=hidden))
    assert wrong is not None
    assert f"hidden size {hidden}" in wrong


@pytest.mark.parametrize(("family", "how"), list(cases()), ids="-".join)
@pytest.mark.parametrize("by", [-1, 1])
def test_another_number_of_experts_is_seen(family: str, how: str, by: int, tmp_path: Path) -> None:
    folder = write_headers(tmp_path, headers(family, how))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    (key,) = (name for name in names if name in FAMILIES[family].config)
    number = FAMILIES[family].num_experts
    wrong = misfit(folder, config_of(family, how, **{key: number + by}))
    assert wrong is not None
    if family == "gpt-oss":
        assert f"is [{number}, " in wrong
        assert f"makes it [{number + by}, " in wrong
    else:
        said = f"has {number} experts in the checkpoint, but config.json declares {number + by};"
        assert said in wrong


@pytest.mark.parametrize("how", ["bf16", "mxfp4"])
@pytest.mark.parametrize(
    "ending", ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
)
def test_one_wider_tensor_of_gpt_oss_is_named(how: str, ending: str, tmp_path: Path) -> None:
    suffixes = ("_blocks", "_scales") if how == "mxfp4" and "bias" not in ending else ("",)
    for suffix in suffixes:
        name = f"model.layers.2.mlp.experts.{ending}{suffix}"

        def widen(of: str, shape: list[int], name: str = name) -> list[int]:
            return [shape[0], shape[1] + 32, *shape[2:]] if of == name else shape

        folder = write_headers(tmp_path / suffix, changed(headers("gpt-oss", how), widen))
        wrong = misfit(folder, config_of("gpt-oss", how))
        assert wrong is not None
        assert wrong.startswith(f"{name!r} in model-00003.safetensors is [16, ")


def test_blocks_of_mxfp4_may_be_one_row(tmp_path: Path) -> None:
    def flat(name: str, shape: list[int]) -> list[int]:
        return [*shape[:2], shape[2] * 16] if name.endswith("_blocks") else shape

    folder = write_headers(tmp_path, changed(headers("gpt-oss", "mxfp4"), flat))
    assert misfit(folder, config_of("gpt-oss", "mxfp4")) is None


@pytest.mark.parametrize("shape", [[8, 256, 256], [8, 128, 256]])
def test_fused_experts_may_be_in_either_order(shape: list[int], tmp_path: Path) -> None:
    at = "model.layers.0.block_sparse_moe.experts"
    down = [8, 256, 128] if shape[1] == 256 else [8, 128, 256]
    fused = {f"{at}.gate_up_proj": ("BF16", [8, 256, 256]), f"{at}.down_proj": ("BF16", down)}
    folder = write_headers(tmp_path, [fused])
    assert misfit(folder, config_of("mixtral")) is None
    wrong = misfit(folder, config_of("mixtral", num_local_experts=4))
    assert wrong is not None
    assert "makes it [4, 256, 256]" in wrong


def without_expert(number: int, layer: str = "") -> Callable[[str, list[int]], list[int] | None]:
    return lambda name, shape: (
        None if f"{layer}.block_sparse_moe.experts.{number}." in name else shape
    )


def test_layers_that_lack_an_expert_are_left_to_the_loader(tmp_path: Path) -> None:
    config, whole = config_of("mixtral"), headers("mixtral", "bf16")
    for number, layer in ((7, "layers.1"), (3, "layers.1"), (3, "")):
        folder = write_headers(tmp_path, changed(whole, without_expert(number, layer)))
        assert misfit(folder, config) is None


def test_fewer_experts_say_nothing_while_files_are_missing(tmp_path: Path) -> None:
    fewer = changed(headers("mixtral", "bf16"), without_expert(7))
    folder = write_headers(tmp_path, fewer)
    assert misfit(folder, config_of("mixtral")) is not None
    (folder / "model-00002.safetensors").unlink()
    assert misfit(folder, config_of("mixtral")) is None
    (folder / "model.safetensors.index.json").unlink()
    assert misfit(folder, config_of("mixtral")) is None, "what else there was, nobody says"


def test_files_that_vllm_does_not_read_are_not_looked_at(tmp_path: Path) -> None:
    good = headers("mixtral", "bf16")
    folder = write_headers(tmp_path, good)
    other = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": ("BF16", [1, 1])}
    write_headers(tmp_path / "other", [other])
    (tmp_path / "other" / "model-00000.safetensors").rename(folder / "old.safetensors")
    assert misfit(folder, config_of("mixtral")) is None, "the index does not name it"
    (folder / "model.safetensors.index.json").unlink()
    assert "in old.safetensors" in str(misfit(folder, config_of("mixtral")))
    (folder / "old.safetensors").rename(folder / "consolidated.safetensors")
    assert misfit(folder, config_of("mixtral")) is None, "vLLM prefers Mistral's own layout"


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": []}}',
        '{"weight_map": {"a": 3, "b": "b.safetensors"}}',
        '{"weight_map": {"a": null}}',
    ],
)
def test_an_index_of_anything_says_nothing(index: str, tmp_path: Path) -> None:
    folder = write_headers(tmp_path, headers("mixtral", "bf16"))
    (folder / "model.safetensors.index.json").write_text(index)
    assert misfit(folder, config_of("mixtral", hidden_size=128)) is None
    assert absent_files(folder) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen9_moe"}, "a family that is not known"),
        ({"model_type": None}, "none is named"),
        ({"num_experts": 16}, "two numbers of experts"),
        ({"num_local_experts": [8, 8, 8, 8]}, "a number per layer"),
        ({"intermediate_size": None}, "a size that is not said"),
        ({"intermediate_size": True}, "a size that is no number"),
        ({"hidden_size": -1}, "a size that cannot be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_does_not_say_all_is_left_alone(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = write_headers(tmp_path, headers("mixtral", "bf16"))
    assert misfit(folder, config_of("mixtral", **{"hidden_size": 128, **config})) is None, why


@pytest.mark.parametrize(
    ("quantization", "how"),
    [
        ({"dynamic": {"a": {"bits": 8}}}, "gptq"),
        ({"checkpoint_format": "marlin"}, "gptq"),
        ({"bits": 3}, "gptq"),
        ({"quant_method": "auto-round"}, "gptq"),
        ({"version": "gemv"}, "awq"),
        ({"config_groups": {"a": {}, "b": {}}}, "ct-int4"),
        ({"config_groups": {"a": 3}}, "ct-int4"),
        ({"format": "marlin-24"}, "ct-int4"),
    ],
    ids=str,
)
def test_packed_weights_are_judged_only_where_one_packing_is_declared(
    quantization: dict[str, Any], how: str, tmp_path: Path
) -> None:
    folder = write_headers(tmp_path, headers("qwen3", how))
    config = config_of("qwen3", how, hidden_size=128)
    assert misfit(folder, config) is not None
    config["quantization_config"] = {**config["quantization_config"], **quantization}
    assert misfit(folder, config) is None


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("model.layers.4.block_sparse_moe.experts.9.w1.weight", ("BF16", [1])),  # drafts
        ("mtp.layers.0.block_sparse_moe.experts.0.w1.weight", ("BF16", [1])),
        ("model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight", ("BF16", [1])),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", ("U8", [1])),  # two to a byte
        ("model.layers.0.block_sparse_moe.experts.0.gate_up_proj.weight", ("BF16", [1])),
        ("model.layers.0.block_sparse_moe.experts.gate_proj", ("BF16", [1])),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", ("BF16", [1])),
    ],
)
def test_tensors_of_no_known_layout_are_left_alone(
    name: str, of: tuple[str, list[int]], tmp_path: Path
) -> None:
    folder = write_headers(tmp_path, [*headers("mixtral", "bf16")[2:], {name: of}])
    assert misfit(folder, config_of("mixtral")) is None


@pytest.mark.parametrize("shape", [None, "x", [1, None], [[]], [10**400]], ids=str)
def test_a_header_of_anything_is_no_traceback(shape: Any, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    folder = write_headers(tmp_path, [{name: ("BF16", shape)}, {f"{name}x": (3, [])}])  # type: ignore[dict-item]
    wrong = misfit(folder, config_of("mixtral"))
    assert wrong is None or len(wrong) < 400
