"""Run as a program: engines with the cache, one after another in this process, on one spec.

    python -m tests.engine.engines SPEC.json OUT.pt

The spec is the one of `benchmarks/reference.py`; each engine may name the batches it runs, what to
do to it before them ("inspect" or "trouble"), and "traces", the tokens of a trace to record. OUT
holds {engine: record of `run_engine` with "before": what that returned, "trace": the trace's file
beside OUT, or "error": a traceback; "registered": vLLM's replaced classes once it has shut down,
"left": what of ours is still alive then}}.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.reference import run_engine


def look_inside(llm: Any) -> dict[str, Any]:
    """What of ours is on the path of a running engine."""
    found: dict[str, Any] = {}

    def look(worker: Any) -> None:
        layers = [
            module
            for name, module in worker.get_model().named_modules()
            if name.endswith("routed_experts")
        ]
        found["experts"] = [f"{type(layer).__module__}.{type(layer).__name__}" for layer in layers]
        found["rows"] = [layer.w13_weight.shape[0] for layer in layers]
        found["attributes"] = sorted(
            name
            for owner in (*layers, worker.model_runner, worker)
            for name in vars(owner)
            if "prefetch" in name or "cache_engine" in name or name.startswith("_cache")
        )
        runner = type(worker.model_runner)
        found["runner"] = f"{runner.__module__}.{runner.__name__}"
        found["patched"] = sorted(
            name
            for layer in layers
            for name, value in vars(layer.quant_method).items()
            if getattr(value, "__module__", "").startswith("prefetch_runtime")
        )

    llm.collective_rpc(look)
    found["rpc"] = {
        name: llm.collective_rpc(name)[0] for name in ("prefetch_stats", "prefetch_audit")
    }
    return found


def trouble(llm: Any) -> dict[str, Any]:
    """Requests aborted in the middle, one refused, and calls that the cache refuses."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    long_prompt = {"prompt_token_ids": list(range(100, 500))}
    short_prompt = {"prompt_token_ids": list(range(200, 207))}
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)
    generated: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            generated[output.request_id] = len(output.outputs[0].token_ids)

    # One is aborted with its prompt half read, one while it generates; the third goes on.
    engine.add_request("reading", long_prompt, sampling)
    step()
    engine.abort_request(["reading"])
    engine.add_request("decoding", long_prompt, sampling)
    engine.add_request("other", short_prompt, sampling)
    while generated.get("decoding", 0) < 3:
        step()
    engine.abort_request(["decoding"])
    while engine.has_unfinished_requests():
        step()

    refused: dict[str, str] = {}

    def refuse(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"

    refuse(
        "too long",
        lambda: llm.generate({"prompt_token_ids": [5] * 600}, sampling, use_tqdm=False),
    )
    refuse("reload", lambda: llm.collective_rpc("reload_weights"))
    refuse("update", lambda: llm.collective_rpc("update_weights", args=({},)))
    refuse("sleep", llm.sleep)
    llm.wake_up()  # as the refusal says; without it no request would run
    refuse("reset", lambda: llm.collective_rpc("reset_weights"))
    refuse("checksums", lambda: llm.collective_rpc("compute_weight_checksums"))
    refuse("save", lambda: llm.collective_rpc("save_sharded_state", args=("/dev/null/no",)))
    refuse("tensorize", lambda: llm.collective_rpc("save_tensorized_model", args=(None,)))
    return {"generated": generated, "refused": refused}


BEFORE = {"inspect": look_inside, "trouble": trouble}


def run(engine: dict[str, Any], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One engine, from its start to its end, and what is left of it; a trace goes into `folder`."""
    from vllm.model_executor.custom_op import op_registry_oot

    found = _run(engine, spec, folder)
    gc.collect()
    return {**found, "registered": sorted(op_registry_oot), "left": _alive()}


def _alive() -> list[str]:
    """Objects that hold an engine's memory: its layers, slots and host records."""
    kinds = ("PrefetchRoutedExperts", "PrefetchEngine", "SlotBuffers", "LayerStore")
    return sorted(name for thing in gc.get_objects() if (name := type(thing).__name__) in kinds)


def _run(engine: dict[str, Any], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def before(llm: Any) -> None:
        if "before" in engine:
            found["before"] = BEFORE[engine["before"]](llm)
        if "traces" in engine:
            llm.collective_rpc("prefetch_trace_start", args=(engine["traces"], True))

    def after(llm: Any) -> None:
        if "traces" in engine:
            found["trace"] = str(folder / f"{engine['name']}.npz")
            llm.collective_rpc("prefetch_trace_save", args=(found["trace"],))

    batches = [
        batch
        for batch in spec["batches"]
        if batch["name"] in engine.get("batches", [batch["name"]])
    ]
    try:
        record = run_engine(engine, {**spec, "batches": batches}, before, after)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"batches": record, **found}


def main() -> int:
    """Run every engine of the spec; one that fails is recorded, and the next one runs."""
    spec_path, out = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    records: dict[str, Any] = {}
    for engine in spec["engines"]:
        records[engine["name"]] = run(engine, spec, out.resolve().parent)
        torch.save(records, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
