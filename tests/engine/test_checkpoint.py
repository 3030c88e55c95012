"""What a checkpoint brought is counted; one that is not whole is refused by name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefetch_runtime.checkpoint_files import damaged_file
from prefetch_runtime.config import ConfigError
from prefetch_runtime.vllm.checkpoint import (
    ONE_EXPERTS,
    CheckpointError,
    LoadedExperts,
    check_sizes,
    explained,
    needed_of,
)

pytestmark = pytest.mark.engine

E = 3
FLOAT = torch.float32
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_g_idx")
PARTS = {"w13": ("w1", "w3"), "w2_": ("w2",)}


def _load(loaded: LoadedExperts, name: str, part: str | None, expert: int | None) -> None:
    loaded.load(name, lambda: None, torch.zeros(2, 2), into=FLOAT, part=part, expert_id=expert)


def _whole(*without: tuple[str, str, int]) -> LoadedExperts:
    loaded = LoadedExperts("layer 7", E)
    for name in NAMES[:4]:
        for part in PARTS[name[:3]]:
            for expert in range(E):
                if (name, part, expert) not in without:
                    _load(loaded, name, part, expert)
    return loaded


def test_a_whole_checkpoint_passes() -> None:
    _whole().check(NAMES, is_gated=True)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (
            [("w2_weight", "w2", 1)],
            "layer 7: the checkpoint has no w2_weight (down_proj, w2) of expert 1; it is",
        ),
        (
            [("w13_weight_scale", "w3", 2)],
            "layer 7: the checkpoint has no w13_weight_scale (up_proj, w3) of expert 2; it is",
        ),
        (
            [("w13_weight", "w1", e) for e in range(E)],
            "no w13_weight (gate_proj, w1) of expert 0 and 2 more tensors; it is",
        ),
        ([("w2_weight_scale", "w2", e) for e in range(E)], "no w2_weight_scale of any expert;"),
    ],
)
def test_what_is_missing_is_named(without: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        _whole(*without).check(NAMES, is_gated=True)


def test_an_optional_tensor_may_be_absent_for_all_but_not_for_some() -> None:
    loaded = _whole()
    for part in ("w1", "w3"):
        _load(loaded, "w13_g_idx", part, 0)
    with pytest.raises(CheckpointError, match=r"no w13_g_idx .* of expert 1 and 3 more"):
        loaded.check(NAMES, is_gated=True)


def test_an_optional_tensor_that_the_method_needs_is_missed() -> None:
    with pytest.raises(CheckpointError, match="no w13_g_idx of any expert"):
        _whole().check(NAMES, needed={"w13_g_idx"}, is_gated=True)


def test_experts_without_a_gate_have_one_part() -> None:
    loaded = LoadedExperts("l", 1)
    _load(loaded, "w13_weight", "w1", 0)
    loaded.check(["w13_weight"], is_gated=False)
    with pytest.raises(CheckpointError, match="w3"):
        loaded.check(["w13_weight"], is_gated=True)


@pytest.mark.parametrize(("part", "expert"), [(None, None), ("w1", 0)])
def test_all_experts_may_come_at_once(part: str | None, expert: int | None) -> None:
    loaded = LoadedExperts("l", E)
    for name in (part, "w3" if part else None):
        loaded.load(
            "w13_weight",
            lambda: True,
            torch.zeros(E, 2, 2),
            into=FLOAT,
            part=name,
            expert_id=expert,
        )
    loaded.check(["w13_weight"], is_gated=True)


@pytest.mark.parametrize("experts", [1, E - 1, E + 1])
def test_all_experts_at_once_must_be_as_many_as_the_model_has(experts: int) -> None:
    loaded = LoadedExperts("layer 7", E)
    message = rf"layer 7: w2_bias in .* \({experts}, 2\) .*, of {experts} experts, .* makes it {E} "
    with pytest.raises(CheckpointError, match=message):
        loaded.load(
            "w2_bias", lambda: None, torch.zeros(experts, 2),
            into=FLOAT, part=None, expert_id=None,
        )  # fmt: skip


def test_one_experts_tensor_of_three_dimensions_is_one_experts() -> None:
    loaded = LoadedExperts("l", E)
    blocks = torch.zeros(8, 4, 16, dtype=torch.uint8)
    loaded.load(
        "w2_weight", lambda: True, blocks, into=torch.uint8, part=ONE_EXPERTS[1], expert_id=0
    )
    with pytest.raises(CheckpointError, match="no w2_weight of expert 1 and 1 more tensors"):
        loaded.check(["w2_weight"], is_gated=True)


def load_weights(error: BaseException) -> None:
    """Named as vLLM's, for that is what is looked for."""
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("w13_weight_scale"), "(KeyError: 'w13_weight_scale')"),
        (RuntimeError("sizes\n differ"), "(RuntimeError: sizes differ)"),
        (FileNotFoundError("b.safetensors"), "(FileNotFoundError: b.safetensors)"),
        (AssertionError(), "(AssertionError: in `raise error`)"),
    ],
)
def test_what_fails_while_loading_says_that_the_checkpoint_is_wrong(
    error: Exception, said: str
) -> None:
    with pytest.raises(CheckpointError) as raised, explained("a/b"):
        load_weights(error)
    assert str(raised.value).startswith("the checkpoint of 'a/b' cannot be loaded: it is damaged,")
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("x"),
        ConfigError("x"),
        torch.OutOfMemoryError("x"),
        RuntimeError("CUDA error: x"),
        OSError("x"),
    ],
    ids=repr,
)
def test_what_is_not_of_the_checkpoint_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained("a/b"):
        load_weights(error)
    assert raised.value is error


def test_what_fails_after_loading_stays_what_it_is() -> None:
    with pytest.raises(KeyError), explained("a/b"):
        raise KeyError("x")


@pytest.mark.parametrize("end", [0, 1, 9, -2000, -1])
def test_the_file_that_is_cut_off_is_named(end: int, tmp_path: Path) -> None:
    for name in "ab":
        save_file({"t": torch.ones(1000)}, tmp_path / f"{name}.safetensors", {"format": "pt"})
    assert damaged_file(tmp_path) is None
    file = tmp_path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    assert damaged_file(tmp_path) == "b.safetensors"
    message = r"loaded: b.safetensors is cut off or damaged \(ValueError: x\)"
    with pytest.raises(CheckpointError, match=message), explained(str(tmp_path)):
        load_weights(ValueError("x"))


def test_a_file_of_anything_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    assert damaged_file(tmp_path) == "a.safetensors"
    (tmp_path / "a.safetensors").write_bytes((4).to_bytes(8, "little") + b"[{}]")
    assert damaged_file(tmp_path) == "a.safetensors"


def test_a_name_on_the_hub_has_no_files_here() -> None:
    assert damaged_file(Path("owner/model")) is None


def _asked(model: str, **load: Any) -> Any:
    """The parts of a VllmConfig that say what is loaded."""
    config = {
        "model_type": "mixtral",
        "num_local_experts": 1,
        "hidden_size": 2,
        "intermediate_size": 3,
        "num_hidden_layers": 1,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, hf_text_config=SimpleNamespace(to_dict=lambda: config)
        ),
        load_config=SimpleNamespace(**{"load_format": "auto", "download_dir": None, **load}),
    )


def _mixtral(folder: Path, *shape: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    save_file({name: torch.zeros(shape)}, folder / "model.safetensors")
    return folder


def test_experts_of_another_size_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    assert check_sizes(_asked(str(_mixtral(tmp_path / "good", 3, 2))))
    wide = str(_mixtral(tmp_path / "wide", 4, 2))
    message = re.escape(f"{wide!r}: 'model.layers.0.block_sparse_moe.experts.0.w1.weight' in ")
    with pytest.raises(CheckpointError, match=message):
        check_sizes(_asked(wide))
    assert not check_sizes(_asked(wide, load_format="dummy")), "no file is read"


def test_a_model_of_the_hub_is_looked_at_where_it_was_fetched_to(tmp_path: Path) -> None:
    cache = str(tmp_path)
    assert not check_sizes(_asked("a/b", download_dir=cache)), "not fetched yet"
    assert not check_sizes(_asked("s3://bucket/model", download_dir=cache)), "no name on the hub"
    model = tmp_path / "models--a--b"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("1" * 40)
    _mixtral(model / "snapshots" / ("1" * 40), 4, 2)
    with pytest.raises(CheckpointError, match=r"'a/b': .* in model.safetensors is "):
        check_sizes(_asked("a/b", download_dir=cache))
    snapshot = model / "snapshots" / ("1" * 40)
    _mixtral(snapshot, 3, 2)
    assert check_sizes(_asked("a/b", download_dir=cache))
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert not check_sizes(_asked("a/b", download_dir=cache)), "fetched in part"


def test_a_tensor_that_was_not_taken_is_not_counted() -> None:
    loaded = LoadedExperts("l", 1)
    assert not loaded.load(
        "w2_weight", lambda: False, torch.zeros(1), into=FLOAT, part="w2", expert_id=0
    )
    assert loaded.is_empty


def test_a_tensor_that_does_not_fit_says_which_and_why() -> None:
    loaded = LoadedExperts("layer 7", E)

    def fail() -> None:
        torch.zeros(2, 2).copy_(torch.zeros(3, 2))

    message = r"layer 7: w2_weight \(down_proj, w2\) of expert 1 in the checkpoint is \(3, 2\) "
    with pytest.raises(CheckpointError, match=message + ".* does not fit the model: The size"):
        loaded.load("w2_weight", fail, torch.zeros(3, 2), into=FLOAT, part="w2", expert_id=1)


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (SimpleNamespace(), set()),
        (SimpleNamespace(quant_config=SimpleNamespace(is_sym=True, desc_act=False)), set()),
        (SimpleNamespace(quant_config=SimpleNamespace(is_sym=False)), {"w13_qzeros", "w2_qzeros"}),
        (SimpleNamespace(quant_config=SimpleNamespace(desc_act=True)), {"w13_g_idx", "w2_g_idx"}),
        (SimpleNamespace(actorder="group"), {"w13_weight_g_idx", "w2_weight_g_idx"}),
        (SimpleNamespace(moe=SimpleNamespace(has_bias=True)), {"w13_bias", "w2_bias"}),
        (SimpleNamespace(moe=SimpleNamespace(has_bias=False)), set()),
    ],
)
def test_what_a_method_needs(method: Any, needed: set[str]) -> None:
    assert needed_of(method) == needed


@pytest.mark.parametrize(("numel", "fits"), [(4, True), (None, True), (8, False), (2, False)])
def test_a_tensor_of_another_size_is_refused_even_if_vllm_takes_it(
    numel: int | None, fits: bool
) -> None:
    loaded = LoadedExperts("l", E)

    def load() -> None:
        loaded.load(
            "w2_weight", lambda: None, torch.zeros(2, 2),
            into=FLOAT, part="w2", expert_id=0, numel=numel,
        )  # fmt: skip

    if fits:
        load()
    else:
        with pytest.raises(CheckpointError, match=rf"is \(2, 2\) .* makes it {numel} numbers"):
            load()


FP8, BF16, INT32, UINT8 = torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.uint8


@pytest.mark.parametrize(
    ("name", "of", "into", "fits"),
    [
        ("w13_weight", BF16, BF16, True),
        ("w13_weight", torch.float16, BF16, True),
        ("w2_weight", FLOAT, BF16, True),
        ("w2_weight", FP8, BF16, False),
        ("w2_weight", BF16, FP8, False),
        ("w13_qweight", INT32, INT32, True),
        ("w13_qweight", BF16, INT32, False),
        ("w2_weight_packed", torch.int64, INT32, False),
        ("w2_weight", UINT8, UINT8, True),
        ("w2_weight", UINT8, BF16, False),
        ("w13_qzeros", INT32, BF16, True),
        ("w2_weight_scale", BF16, FLOAT, True),
        ("w2_weight_scale", torch.float8_e8m0fnu, FLOAT, True),
        ("w2_weight_scale", UINT8, FLOAT, False),
        ("w13_weight_scale", BF16, UINT8, False),
        ("w13_bias", FLOAT, BF16, True),
        ("w13_bias", INT32, BF16, False),
        ("w2_bias", FP8, BF16, False),
    ],
)
def test_weights_of_another_precision_are_refused(
    name: str, of: torch.dtype, into: torch.dtype, fits: bool
) -> None:
    loaded = LoadedExperts("layer 7", E)

    def load() -> None:
        loaded.load(name, lambda: None, torch.zeros(2, 2).to(of), into=into, part="w1", expert_id=2)

    if fits:
        load()
    else:
        message = f"layer 7: {name} .* of expert 2 is {of} in the checkpoint, .* asks for {into};"
        with pytest.raises(CheckpointError, match=message):
            load()


def test_where_nothing_is_counted_a_weight_that_nobody_wrote_is_seen() -> None:
    from prefetch_runtime.vllm.checkpoint import CheckpointError, check_written

    weights = {
        "w13_weight": torch.ones(4, 8, 3000, dtype=torch.bfloat16),
        "w2_weight": torch.ones(4, 8, 3000, dtype=torch.bfloat16),
        "w13_bias": torch.zeros(4, 8, dtype=torch.bfloat16),
    }
    check_written("layer 1", weights)
    weights["w2_weight"][2] = 0
    weights["w2_weight"][2, -1, -1] = 1  # seen past the first few kilobytes
    check_written("layer 1", weights)
    weights["w2_weight"][2] = 0
    with pytest.raises(CheckpointError, match="layer 1: w2_weight of expert 2 was not loaded"):
        check_written("layer 1", weights)
