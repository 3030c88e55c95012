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
from tests.engine.gpu_runs import ENGINE, ROOT, WORKER
from tests.engine.test_trace_and_prediction import check_counters, stats_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(300)]

SETTINGS = {
    "lru-16": {"slots_per_layer": 16},
    # Three requests might ask for 12: waves inside the graph.
    "lfru-8": {"slots_per_layer": 8, "policy": "lfru"},
    # 5 experts of 48 KiB: whole long before the next layer asks.
    "predicted-16": {"slots_per_layer": 16, "predictor": "next_gate", "prefetch_budget_mib": 0.25},
}


def test_the_simulator_counts_what_a_gpu_counted(tmp_path: Path) -> None:
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    engines = [
        {
            "name": name,
            "llm": {
                **ENGINE,
                "compilation_config": graphs,
                "worker_cls": WORKER,
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
            about = {"predictor": "next_gate", "budget_bytes": int(0.25 * 2**20)}
            assert stats.total("prefetch_used") > 0
        check_counters(
            stats,
            load_trace(records[name]["trace"]),
            wide_if_it_might=True,
            wide_steps="expert",
            **about,
        )
