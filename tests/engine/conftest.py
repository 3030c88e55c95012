"""Real vLLM engines on the CPU. A start costs seconds to a minute, so tests share two processes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "tiny-moe")
WORKER = "prefetch_runtime.vllm.PrefetchWorker"
CORRUPTING = "tests.engine.corrupting.CorruptingWorker"
ENGINE: Mapping[str, Any] = {
    "model": MODEL,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,  # so that the longer prompts are cut into chunks
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,  # of main memory on a CPU
    "disable_log_stats": True,
    "seed": 0,
}
# Experts of 3 x 64 x 128 bf16; 12 slots in each of 8 layers.
EXPERT_BYTES = 3 * 64 * 128 * 2
GIB_OF_12_SLOTS = 12 * 8 * EXPERT_BYTES / 2**30
GIB_OF_23_EXPERTS = 23 * EXPERT_BYTES / 2**30  # top_k is 4: enough for 5 layers, not for 6


def _prompt(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(2, 8192) for _ in range(length)]


PREDICTED: Mapping[str, Any] = {
    "slots_per_layer": 8,
    "policy": "lfru",
    "predictor": "next_gate",
    "prefetch_budget_mib": 2 * EXPERT_BYTES / 2**20,  # whole experts: the host copies no parts
}
BATCHES: list[dict[str, Any]] = [
    {
        "name": "one-short",
        "prompts": [[4, 643, 438, 838, 16]],
        "max_tokens": 24,
    },  # "#include <linux/"
    {"name": "one-chunked", "prompts": [_prompt(400, 2)], "max_tokens": 16},
    {
        "name": "four",
        "prompts": ["import torch\nimport", _prompt(37, 3), _prompt(129, 4), _prompt(250, 5)],
        "max_tokens": 20,
    },
    {
        "name": "sixteen",
        "prompts": [_prompt(5 + round(index * 195 / 15), 10 + index) for index in range(16)],
        "max_tokens": 16,
    },
]
LAYERS = list(range(8))


def _cached(name: str, worker: str = WORKER, **more: Any) -> dict[str, Any]:
    settings, llm = more.pop("settings"), more.pop("llm", {})
    return {
        "name": name,
        "llm": {
            **ENGINE,
            **llm,
            "worker_cls": worker,
            "additional_config": {} if settings is None else {"prefetch_runtime": settings},
        },
        "rpc": ["prefetch_stats", "prefetch_audit"],
        **more,
    }


CACHED = [
    _cached("lru-4", settings={"slots_per_layer": 4}),
    _cached("lru-8", settings={"slots_per_layer": 8}, before="inspect"),
    _cached("lru-16", settings={"slots_per_layer": 16, "mode": "eager"}, traces=4096),
    _cached("lru-32", settings={"slots_per_layer": 32}),
    _cached("lfru-4", settings={"slots_per_layer": 4, "policy": "lfru"}, batches=["four"]),
    _cached("lfru-8", settings={"slots_per_layer": 8, "policy": "lfru"}),
    _cached("predicted-8", settings=PREDICTED, traces=4096),
    _cached("gib", settings={"expert_cache_gib": GIB_OF_12_SLOTS}, batches=["four"]),
    _cached("auto", settings={"slots_per_layer": "auto"}, batches=["four"]),
    _cached("trouble", settings={"slots_per_layer": 8}, before="trouble"),
    _cached(
        "corrupt-8",
        CORRUPTING,
        settings={"slots_per_layer": 8},
        batches=["one-short", "four"],
    ),
    _cached(
        "corrupt-32",
        CORRUPTING,
        settings={"slots_per_layer": 32},
        batches=["one-short", "four"],
    ),
    _cached("too-little", settings={"expert_cache_gib": GIB_OF_23_EXPERTS}, batches=["four"]),
    _cached("no-room", settings={"slots_per_layer": 8}, llm={"num_gpu_blocks_override": 1}),
    _cached("too-few", settings={"slots_per_layer": 3}, batches=["four"]),
    _cached("too-many", settings={"slots_per_layer": 33}, batches=["four"]),
    _cached("off", settings=None, before="inspect"),
    _cached("zero", settings={"slots_per_layer": 0}, before="inspect", batches=["one-short"]),
]


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """What child processes with an engine run under; no network, little memory."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads that wait for each other crawl on a busy machine; the demo runs with all of them.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    environment.pop("TRITON_INTERPRET", None)  # of the kernels' tests, not vLLM's
    return environment


def _run(
    program: list[str],
    engines: list[dict[str, Any]],
    folder: Path,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    spec = {"engines": engines, "batches": BATCHES, "layers": LAYERS, "digest": True}
    spec_path, out, log = folder / "spec.json", folder / "out.pt", folder / "log"
    spec_path.write_text(json.dumps(spec))
    with log.open("wb") as output:
        status = subprocess.run(
            [sys.executable, *program, str(spec_path), str(out)],
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
    if status != 0:
        pytest.fail(f"{program} ended with {status}:\n{log.read_text(errors='replace')[-6000:]}")
    records: dict[str, Any] = torch.load(out)
    return records


@pytest.fixture(scope="session")
def reference(
    tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]
) -> dict[str, Any]:
    """vLLM alone, twice, in a process that fails if any of our code was loaded."""
    engines = [{"name": name, "llm": dict(ENGINE)} for name in ("resident", "repeat")]
    return _run(
        ["benchmarks/reference.py"],
        engines,
        tmp_path_factory.mktemp("reference"),
        engine_environment,
    )


@pytest.fixture(scope="session")
def resident(reference: dict[str, Any]) -> dict[str, Any]:
    """The reference's batches."""
    batches: dict[str, Any] = reference["resident"]
    return batches


@pytest.fixture(scope="session")
def cached(
    tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]
) -> dict[str, Any]:
    """Every engine of `CACHED`, in one process of their own."""
    return _run(
        ["-m", "tests.engine.engines"],
        CACHED,
        tmp_path_factory.mktemp("cached"),
        engine_environment,
    )
