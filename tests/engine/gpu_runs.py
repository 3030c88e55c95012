"""Plans of engines for the tests on a GPU: run in processes of their own, several at once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reference import differences
from prefetch_runtime.stats import RuntimeStats

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models" / "tiny-moe")
WORKER = "prefetch_runtime.vllm.PrefetchWorker"
KEEP = "PREFETCH_RUNTIME_TEST_LOGS"
"""Environment variable: a folder that logs and a summary are copied to, whatever happens."""

BUDGET = "PREFETCH_RUNTIME_TEST_BUDGET_S"
"""Environment variable: seconds that a test file's engines may take together, at most; what has not
run by then fails."""

INCLUDE = (4, 643, 438, 838, 16)
"""`#include <linux/`, after which tiny-moe does not fall into one phrase at once."""
NUM_LAYERS, NUM_EXPERTS, TOP_K = 8, 32, 4
LAYERS = list(range(NUM_LAYERS))
EXPERT_BYTES = 3 * 64 * 128 * 2
ENGINE: Mapping[str, Any] = {
    "model": MODEL,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,  # so that the longer prompts are cut into chunks
    "enable_prefix_caching": False,  # a prompt that comes again is read again
    "disable_log_stats": True,
    "seed": 0,
    # Small and fixed, for several processes share the GPU.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}


@dataclass(frozen=True)
class Plan:
    """Engines that one process runs, one after another; see `gpu_child.py`."""

    name: str
    engines: Sequence[Mapping[str, Any]]
    steps: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of tiny-moe's vocabulary."""
    chosen = random.Random(seed)
    return [chosen.randrange(2, 8192) for _ in range(length)]


def batch(
    name: str, lengths: Iterable[int], max_tokens: int, *, seed: int, temperature: float = 0.0
) -> dict[str, Any]:
    """A run of prompts that arrive together; the first is the beginning of a program."""
    prompts = [prompt(length, seed + index) for index, length in enumerate(lengths)]
    prompts[0] = [*INCLUDE, *prompts[0][len(INCLUDE) :]]
    return {
        "name": name,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }


def engine(
    name: str,
    runs: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    *,
    limit_s: int = 150,
    llm: Mapping[str, Any] = {},
    **more: Any,
) -> dict[str, Any]:
    """One engine: vLLM alone, or with the cache under `settings`."""
    arguments = {**ENGINE, **llm}
    if settings is not None:
        arguments |= {
            "worker_cls": WORKER,
            "additional_config": {"prefetch_runtime": dict(settings)},
        }
    return {"name": name, "llm": arguments, "runs": list(runs), "limit_s": limit_s, **more}


def run_plans(plans: Sequence[Plan], folder: Path, *, budget_s: float) -> dict[str, Any]:
    """Run all plans at once; the record, or the error, of every engine by name."""
    budget_s = min(budget_s, float(os.environ.get(BUDGET, budget_s)))
    deadline = time.monotonic() + budget_s
    with ThreadPoolExecutor(len(plans)) as pool:
        done = list(pool.map(lambda plan: run_plan(plan, folder / plan.name, deadline), plans))
    records = {name: record for of_plan in done for name, record in of_plan.items()}
    _keep(folder, records)
    return records


def run_plan(plan: Plan, folder: Path, deadline: float) -> dict[str, Any]:
    """A process for all engines; when one takes it down, another for those that are left."""
    folder.mkdir(parents=True)
    spec, out, log = folder / "spec.json", folder / "out.pt", folder / "log"
    records: dict[str, Any] = {}
    left = list(plan.engines)
    while left and time.monotonic() < deadline:
        spec.write_text(json.dumps({"engines": left, "steps": plan.steps}))
        status = _run_child([str(spec), str(out)], plan.environment, log, deadline)
        if out.exists():
            records |= torch.load(out)
            out.unlink()
        broken = status == 3 and any(e["name"] in records for e in left)
        left = [e for e in left if e["name"] not in records]
        if left and not broken:
            lost = left.pop(0)["name"]
            end = end_of(log.read_text(errors="replace"))
            records[lost] = {"error": f"the process ended ({status}) in engine {lost}:\n{end}"}
    for engine in left:
        records[engine["name"]] = {"error": f"not run: plan {plan.name} had no time left"}
    return records


def _run_child(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, deadline: float
) -> int | str:
    """The exit status, or that time was up. Leaves nothing running."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.gpu_child", *arguments],
            cwd=ROOT,
            env={
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                **inherited,
                "PYTHONPATH": path,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "the time of all plans was up"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own helpers, too
            process.wait()


def end_of(log: str) -> str:
    """How a log ends; if by a hang, what came before it and where the main thread was."""
    before, hang, stacks = log.rpartition("Timeout (")
    if not hang:
        return log[-6000:]
    # The threads' stacks, innermost call first; the main thread's is the last.
    main = stacks.rstrip().split("\n\n")[-1].splitlines()
    return "\n".join([before[-3000:], hang + stacks.splitlines()[0], *main[:30]])


def _keep(folder: Path, records: Mapping[str, Any]) -> None:
    """Leave logs and a summary where the environment says."""
    kept = os.environ.get(KEEP)
    if not kept:
        return
    target = Path(kept)
    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*/log"):
        (target / f"{folder.name}-{log.parent.name}.log").write_bytes(log.read_bytes())
    summary = {name: summary_of(record) for name, record in records.items()}
    (target / f"{folder.name}.json").write_text(json.dumps(summary, indent=1))


def summary_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What one wants to know of an engine when a test has failed, in a few lines."""
    if "error" in record:
        return {"error": record["error"][-2500:]}
    runs = {}
    for name, run in record["runs"].items():
        runs[name] = {"seconds": round(run["seconds"], 2), "host_calls": run.get("host_calls")}
        runs[name]["audit"] = run.get("audit", [])[:3]
        if "steps" in run:
            replayed = sum(calls == 0 for _, _, calls in run["steps"])
            runs[name]["steps"] = f"{len(run['steps'])}, {replayed} replayed"
    shown = ("start_s", "total_s", "peak_allocated", "peak_reserved", "allocated", "about")
    return {**{key: record[key] for key in shown if key in record}, "runs": runs}


# Looking at records


def record_of(records: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An engine's record; fails with its error and the end of its log."""
    record: dict[str, Any] = records[name]
    if "error" in record:
        pytest.fail(f"engine {name}: {record['error'][-6000:]}", pytrace=False)
    return record


def runs_of(records: Mapping[str, Any], name: str, widest: int | None = None) -> dict[str, Any]:
    """An engine's runs by name; those with batches of up to `widest` tokens replayed."""
    runs: dict[str, Any] = record_of(records, name)["runs"]
    if widest is None:
        return runs
    start = f"{widest}/"
    return {key.removeprefix(start): run for key, run in runs.items() if key.startswith(start)}


def assert_same(ours: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Every token and every layer output of `ours` is the reference's, bit for bit."""
    found = differences(dict(ours), {name: reference[name] for name in ours})
    assert not found, f"{len(found)} differences, the first:\n" + "\n".join(found[:10])


def stats_of(run: Mapping[str, Any]) -> RuntimeStats:
    """The counters as they were after a run."""
    return RuntimeStats.from_dict(run["stats"])
