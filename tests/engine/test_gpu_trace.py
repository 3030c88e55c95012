"""A run recorded on a GPU in mode `full`, replayed by the simulator: the same counters."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch_runtime.trace import load_trace
from tests.engine.gpu_runs import ENGINE, EXPERT_BYTES, ROOT, WORKER
from tests.engine.test_trace_and_prediction import check_counters, stats_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(300)]

SLOW = "tests.engine.slow_worker.SlowWorker"
SETTINGS: dict[str, dict[str, Any]] = {
    "lru-16": {"slots_per_layer": 16},
    # Three requests might ask for 12: waves inside the graph.
    "lfru-8": {"slots_per_layer": 8, "policy": "lfru"},
    # Each is there when the next layer asks: what came too late is time, and differs between runs.
    "predicted-16": {
        "slots_per_layer": 16,
        "predictor": "next_gate",
        "prefetch_budget_mib": 5 * EXPERT_BYTES / 2**20,
    },
}


def test_the_simulator_counts_what_a_gpu_counted(tmp_path: Path) -> None:
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    engines = [
        {
            "name": name,
            "llm": {
                **ENGINE,
                "compilation_config": graphs,
                "worker_cls": SLOW if "predictor" in settings else WORKER,
                "additional_config": {
                    "prefetch_runtime": {"mode": "full", "trace_tokens": 4096, **settings}
                },
            },
            "rpc": ["prefetch_audit", "prefetch_stats"],
            "traces": 4096,
        }
        for name, settings in SETTINGS.items()
    ]
    batches = [
        {"name": "one", "prompts": ["import torch\nimport"], "max_tokens": 256},
        {
            "name": "three",
            "prompts": ["import", "#include <linux/", "The novel"],
            "max_tokens": 128,
        },
    ]
    spec, out = tmp_path / "spec.json", tmp_path / "out.pt"
    spec.write_text(json.dumps({"engines": engines, "batches": batches, "layers": []}))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-m", "tests.engine.engines", str(spec), str(out)],
        env=environment | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT, check=True,
    )  # fmt: skip
    records = torch.load(out, weights_only=False)
    for name, settings in SETTINGS.items():
        stats = stats_of(records[name])
        assert all(
            batch["rpc"]["prefetch_audit"] == [] for batch in records[name]["batches"].values()
        )
        about: dict[str, Any] = {}
        if "predictor" in settings:
            about = {"predictor": "next_gate", "budget_bytes": 5 * EXPERT_BYTES}
            assert stats.total("prefetch_used") > 0
            assert stats.total("late") == 0
        check_counters(
            stats,
            load_trace(records[name]["trace"]),
            wide_if_it_might=True,
            wide_steps="expert",
            **about,
        )
