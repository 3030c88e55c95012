"""Mode `full` through the real engine with interpreted kernels: same bits, sound slots.

Nothing is captured on a CPU device; what is shown is that the kernels' decisions, fills and
prefetches serve vLLM exactly, wide steps between them included.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reference import differences
from prefetch_runtime.stats import RuntimeStats
from prefetch_runtime.trace import load_trace
from tests.engine.conftest import ENGINE, PREDICTED, ROOT
from tests.engine.test_trace_and_prediction import PREDICTION, check_counters, stats_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are compiled"),
]

# Short: an interpreted step takes a second, and 8 slots make waves of more than two tokens.
TEXTS = ["import torch\nimport", "#include <linux/", "The novel opens"]
SETTINGS: dict[str, dict[str, Any]] = {
    "lru-16": {"slots_per_layer": 16},
    "lfru-8-predicted": {**PREDICTED, "trace_tokens": 512},
}
GARBAGE = {
    "full-8-garbage": "tests.engine.full_worker.FullGarbageWorker",
    "eager-8-garbage": "tests.engine.full_worker.EagerGarbageWorker",
}
SETTINGS |= {
    name: {"slots_per_layer": 8, "predictor": "next_gate", "prefetch_budget_mib": 1.0}
    for name in GARBAGE
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("full")
    engines: list[dict[str, Any]] = [{"name": "resident", "llm": dict(ENGINE)}]
    for name, settings in SETTINGS.items():
        llm = {
            **ENGINE,
            "worker_cls": GARBAGE.get(name, "tests.engine.full_worker.FullWorker"),
            "additional_config": {"prefetch_runtime": settings},
        }
        rpc = ["prefetch_audit", "prefetch_stats"]
        made = {"name": name, "llm": llm, "rpc": rpc}
        engines.append({**made, "traces": 512} if "trace_tokens" in settings else made)
    batches = [
        {"name": "one", "prompts": TEXTS[:1], "max_tokens": 6},
        {"name": "three", "prompts": TEXTS, "max_tokens": 3},
    ]
    spec, out, log = folder / "spec.json", folder / "out.pt", folder / "log"
    spec.write_text(json.dumps({"engines": engines, "batches": batches, "layers": list(range(8))}))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "VLLM_PLUGINS": "",  # the resident engine is vLLM alone
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads that wait for each other crawl on a busy machine.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log.open("wb") as output:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.engine.engines", str(spec), str(out)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            check=False,
        )
    assert finished.returncode == 0, Path(log).read_text(errors="replace")[-2000:]
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    assert not [record["error"] for record in loaded.values() if "error" in record]
    return loaded


@pytest.mark.parametrize("name", SETTINGS)
def test_every_layer_output_is_the_residents(records: dict[str, Any], name: str) -> None:
    assert differences(records[name]["batches"], records["resident"]["batches"]) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_the_slots_are_sound_and_were_used(records: dict[str, Any], name: str) -> None:
    for batch in records[name]["batches"].values():
        assert batch["rpc"]["prefetch_audit"] == []
    stats = RuntimeStats.from_dict(records[name]["batches"]["three"]["rpc"]["prefetch_stats"])
    assert stats.mode == ("eager" if name.startswith("eager") else "full")
    assert stats.total("hits") > 0
    assert stats.total("misses") > 0
    assert bool(stats.total("prefetch_used")) == (name != "lru-16")
    assert (stats.total("prefetch_dropped") > stats.total("prefetch_used")) == (name in GARBAGE)


def test_the_simulator_counts_what_the_kernels_counted(records: dict[str, Any]) -> None:
    """From a trace that was recorded on the device."""
    record = records["lfru-8-predicted"]
    stats = stats_of(record)
    check_counters(stats, load_trace(record["trace"]), wide_if_it_might=True, **PREDICTION)
    assert stats.total("prefetch_used") > 0


def test_the_trace_holds_every_token_and_who_asked_for_it(records: dict[str, Any]) -> None:
    trace = load_trace(records["lfru-8-predicted"]["trace"])
    assert trace.next_gate is not None
    assert trace.next_gate.shape[1:] == (7, 8)
    assert set(trace.sequence.tolist()) == {0, 1, 2, 3}
    # The last token of each request is never fed back.
    assert trace.num_tokens > 6 + 3 * 3 - 4
