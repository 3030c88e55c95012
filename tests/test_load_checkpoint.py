"""Random checkpoints are whole and sensible; memory is told from what the kernel says."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.load_memory import BAR, DevicePeak, Watch, host_memory, judged, risen
from benchmarks.random_checkpoint import FORMATS, INDEX, write_checkpoint
from tests.helpers.checkpoints import pack

GIB = 2**30
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the index names, from the file that it names."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(index.values())}
    assert sum(len(tensors) for tensors in files.values()) == len(index)
    return {name: files[file][name] for name, file in index.items()}


def matrix(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A matrix as numbers, whatever it is stored in."""
    scale = tensors.get(f"{name}.weight_scale")
    if f"{name}.weight_packed" in tensors:
        packed, shape = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_shape"]
        bits = packed.to(torch.int64) & 0xFFFFFFFF
        values = torch.stack([bits >> 4 * place & 15 for place in range(8)], -1).flatten(1)
        assert torch.equal(pack(values, 1), packed)
        assert tuple(values.shape) == tuple(shape.tolist())
        assert scale is not None
        return (values - 8).float() * scale.float().repeat_interleave(128, 1)
    made = tensors[f"{name}.weight"].float()
    if scale is None:
        return made
    return made * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("experts", FORMATS)
def test_every_matrix_keeps_activations_near_one_and_differs(experts: str, tmp_path: Path) -> None:
    total = write_checkpoint(tmp_path / "c", CONFIG, experts)
    tensors = read(tmp_path / "c")
    assert total == sum(tensor.nbytes for tensor in tensors.values())
    seen = set()
    for layer in range(2):
        for expert in range(4):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            for part, shape in (
                ("gate_proj", (128, 256)),
                ("up_proj", (128, 256)),
                ("down_proj", (256, 128)),
            ):
                made = matrix(tensors, f"{at}.{part}")
                assert tuple(made.shape) == shape
                assert bool(made.isfinite().all())
                assert float(made.std()) * math.sqrt(shape[1]) == pytest.approx(1, rel=0.5)
                assert abs(float(made.mean())) < 0.2 * float(made.std())
                seen.add(made.numpy().tobytes())
    assert len(seen) == 2 * 4 * 3


def test_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    target = tmp_path / "c"
    total = write_checkpoint(target, CONFIG, "int4")
    file = next(target.glob("*.safetensors"))
    file.write_bytes(b"kept")
    assert write_checkpoint(target, CONFIG, "int4") == total
    assert file.read_bytes() == b"kept"
    write_checkpoint(target, {**CONFIG, "vocab_size": 256}, "int4")
    assert file.read_bytes() != b"kept"


@pytest.mark.parametrize(
    ("change", "experts", "message"),
    [
        ({}, "int3", "unknown format 'int3'; choose one of bf16, fp8, int4"),
        ({"model_type": "mixtral"}, "int4", "only qwen3_moe can be written, not 'mixtral'"),
        ({"moe_intermediate_size": 192}, "fp8", "192 is no multiple of 128"),
    ],
)
def test_what_cannot_be_written_is_refused(
    change: dict[str, Any], experts: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "c", {**CONFIG, **change}, experts)
    assert not (tmp_path / "c").exists()


def test_touched_memory_is_anonymous_memory() -> None:
    # A process of its own: this one frees what earlier tests have left whenever it likes.
    script = (
        "from load_memory import Watch\nwatch = Watch()\nwatch.start()\n"
        "held = b'1' * (64 << 20)\nwatch.stop()\nprint(watch.peak['host'] / len(held))"
    )
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    assert 0.9 < float(ran.stdout) < 2


def test_the_peak_is_kept_after_memory_was_freed() -> None:
    values = iter([1, 3, 9, 2])
    watch = Watch(lambda: {"anon": next(values) * GIB, "shmem": GIB, "available": None})
    watch.before = watch._read()
    for _ in range(3):
        watch._take()
    assert watch.peak == {"anon": 8 * GIB, "shmem": 0, "host": 8 * GIB}


def test_where_the_kernel_tells_no_parts_the_machines_memory_is_judged() -> None:
    before = {"anon": None, "rss": 5, "available": 100}
    assert risen(before, {"anon": None, "rss": 9, "available": 70}) == {
        "rss": 4,
        "available": 30,
        "host": 30,
    }


def test_fields_come_from_the_kernels_files(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tpython\nRssAnon:\t     12 kB\nThreads:\t3\n")
    (tmp_path / "meminfo").write_text("MemAvailable:    7 kB\nHugePages_Total:       0\n")
    found = host_memory(tmp_path)
    assert (found["anon"], found["available"], found["file"]) == (12 * 1024, 7 * 1024, None)


@pytest.mark.parametrize(
    ("peak", "ok"), [(10.0 * 1.25 * BAR * 0.99, True), (10.0 * 1.25 * BAR * 1.01, False)]
)
def test_the_bar_is_over_the_experts_and_one_layer(peak: float, ok: bool) -> None:
    row = {"peak_gib": {"host": peak}, "experts_gib": 10.0, "gpu_peak_gib": 1.0}
    assert judged(row, 4)["ok"] is ok
    del row["gpu_peak_gib"]
    assert judged(row, 4)["ok"] is None


def test_the_device_peak_outlives_a_reset_of_torchs_own_mark() -> None:
    marks = iter([5, 60, 3])
    peak = DevicePeak(lambda: next(marks, 4), interval_s=0.001)
    time.sleep(0.1)
    assert peak.stop() == 60
    assert next(marks, None) is None
