"""Compares vLLM engines in one process: the expert cache, vLLM resident, vLLM's own offloader.

    python benchmarks/engines.py --shape qwen3-30b-a3b --layers 48 --engines cache:32,resident,uva

Measures, per engine: load time; peak device memory while loading and running; bytes of slots and of
pinned memory; seconds for one prompt of --prompt tokens; milliseconds per decode step at each batch
size (the time of N+1 tokens less that of 1, over N; median of --repeats). Records the outputs of
--record layers and compares them, bit for bit, with the first `resident` engine's. Weights are
random, so routing has no locality: hit rates are those of the worst case. Every engine gets the
same weights from benchmarks/shapes.py. An engine that fails is a row that says why.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from reference import LayerRecorder, differences
from shapes import LOAD_FORMAT, register_loader, write_shape

WORKER_CLS = "prefetch_runtime.vllm.PrefetchWorker"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; else --shape with random weights")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=None, help="cut the shape to so many layers")
    parser.add_argument(
        "--engines",
        default="resident,cache:32",
        help="comma separated: resident, uva[:GiB], cache:SLOTS[:MODE]",
    )
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the timed prompt")
    parser.add_argument("--repeats", type=int, default=3, help="the median is shown")
    parser.add_argument("--new", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--record", default="0", help="MoE layers whose outputs are compared")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="for cache engines")
    parser.add_argument("--graphs", action="store_true", help="compile and capture CUDA graphs")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--settings", default="{}", help="more settings of the cache, JSON")
    parser.add_argument(
        "--routing",
        type=Path,
        default=None,
        help="cache engines route as this .npy says, [steps, layers, tokens, top_k]; no comparison",
    )
    parser.add_argument("--sizes", default="1,2,4,8", help="captured batch sizes, with --graphs")
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    return parser.parse_args(arguments)


def engine_arguments(kind: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine such as `cache:32:full`."""
    name, *details = kind.split(":")
    llm: dict[str, Any] = {
        "model": model,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": not options.graphs,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "kv_cache_memory_bytes": 2 << 30,
    }
    if options.graphs:
        sizes = [int(size) for size in options.sizes.split(",")]
        llm["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if not options.model:
        llm |= {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True}
    if name == "cache":
        settings = {"slots_per_layer": int(details[0]), **json.loads(options.settings)}
        if len(details) > 1:
            settings["mode"] = details[1]
        worker = "injected_worker.InjectedWorker" if options.routing else WORKER_CLS
        llm |= {"worker_cls": worker, "additional_config": {"prefetch_runtime": settings}}
    elif name == "uva":
        llm |= {
            "offload_backend": "uva",
            "cpu_offload_gb": float(details[0]) if details else 60.0,
            "cpu_offload_params": {"w13_weight", "w2_weight"},
        }
    elif name != "resident":
        raise ValueError(f"unknown engine {kind!r}")
    return llm


def prompts(count: int, length: int) -> list[dict[str, Any]]:
    """Prompts of token ids that differ from each other and from token to token."""
    return [
        {"prompt_token_ids": [(7919 * (i + 1) * (j + 3)) % 8000 + 10 for j in range(length)]}
        for i in range(count)
    ]


def measure(kind: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine's row."""
    import torch
    from vllm import LLM

    is_cache = kind.startswith("cache")
    torch.cuda.set_per_process_memory_fraction(options.memory_fraction if is_cache else 1.0)
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"engine": kind}
    started = time.perf_counter()
    llm = LLM(**engine_arguments(kind, model, options))
    try:
        return row | _measure(llm, kind, options, time.perf_counter() - started)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def _measure(llm: Any, kind: str, options: argparse.Namespace, load_s: float) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    is_cache = kind.startswith("cache")
    row: dict[str, Any] = {"load_s": load_s}
    row["peak_load_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if kind.startswith("uva"):
        row["offloaded_gib"] = llm.collective_rpc(_offloaded_bytes)[0] / 2**30

    def go(batch: list[dict[str, Any]], tokens: int) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]

    def counted(what: str) -> float:
        stats = llm.collective_rpc("prefetch_stats")[0]
        return float(sum(layer[what] for layer in stats["layers"]))

    long_prompt = prompts(1, options.prompt)
    go(long_prompt, 1)
    copied = counted("bytes_copied") if is_cache else 0.0
    row["prefill_s"] = min(go(long_prompt, 1)[0] for _ in range(2))
    if is_cache:
        row["prefill_gbps"] = (counted("bytes_copied") - copied) / 2 / row["prefill_s"] / 1e9
    sizes = [int(size) for size in options.batches.split(",")]
    if kind.startswith("uva"):
        sizes = sizes[:1]  # half a second a step and more for the others
    for size in sizes:
        batch = prompts(size, 64)
        go(batch, 4)
        before = (counted("hits"), counted("misses")) if is_cache else (0.0, 0.0)
        calls = llm.collective_rpc("prefetch_stats")[0]["host_calls"] if is_cache else 0
        times = []
        for _ in range(options.repeats):
            times.append((go(batch, options.new + 1)[0] - go(batch, 1)[0]) / options.new)
        row[f"ms_step_b{size}"] = statistics.median(times) * 1e3
        if is_cache:
            hits, misses = counted("hits") - before[0], counted("misses") - before[1]
            row[f"hit_b{size}"] = hits / max(1.0, hits + misses)
            # Six generations of this batch: their prompts are run by the host, decode steps that
            # are replays of one graph are not.
            calls = llm.collective_rpc("prefetch_stats")[0]["host_calls"] - calls
            row[f"host_calls_b{size}"] = calls
    row["peak_run_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if not kind.startswith("uva"):
        row["record"] = record(llm, go, options)
    if is_cache:
        row["stats"] = llm.collective_rpc("prefetch_stats")[0]
        row["mode"] = row["stats"]["mode"]
        for memory in ("slot", "staging", "host", "pinned"):
            row[f"{memory}_gib"] = row["stats"][f"{memory}_bytes"] / 2**30
        row["audit"] = llm.collective_rpc("prefetch_audit")[0][:5]
    return row


def record(llm: Any, go: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens and digests of the recorded layers, for the prompt and for decoding."""
    layers = [int(layer) for layer in options.record.split(",") if layer]
    recorder: list[LayerRecorder] = []
    llm.collective_rpc(
        lambda worker: recorder.append(LayerRecorder(worker.get_model(), layers, digest=True))
    )
    taken: dict[str, Any] = {}
    for name, batch, tokens in (
        ("prefill", prompts(1, options.prompt), 1),
        *((f"b{n}", prompts(int(n), 64), options.new) for n in options.batches.split(",")),
    ):
        _, ids = go(batch, tokens)
        taken[name] = {"tokens": ids, "layers": recorder[0].take()}
    recorder[0].close()
    return taken


def _offloaded_bytes(worker: Any) -> int:
    """Bytes of expert parameters that are views of host memory."""
    return sum(
        parameter.nbytes
        for _, parameter in worker.get_model().named_parameters()
        if getattr(parameter, "_vllm_is_uva_offloaded", False)
    )


def compare(row: dict[str, Any], reference: dict[str, Any]) -> None:
    """Print whether an engine's tokens and layer outputs are the reference's."""
    found = differences(row["record"], reference["record"])
    batches = reference["record"].values()
    forwards = sum(len(outputs) for b in batches for outputs in b["layers"].values())
    tokens = sum(len(ids) for b in batches for ids in b["tokens"])
    print(f"SAME {row['engine']}: {not found} ({tokens} tokens, {forwards} outputs)", *found[:5])


def main() -> int:
    """Measure every engine, print a table."""
    options = parse()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_PLUGINS"] = ""
    if options.routing:
        os.environ["PREFETCH_BENCH_ROUTING"] = str(options.routing.resolve())
    register_loader()
    model = options.model
    if model is None:
        changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
        model = str(write_shape(options.shape, Path("/tmp/prefetch-runtime-shape"), **changes))
    rows: list[dict[str, Any]] = []
    for kind in options.engines.split(","):
        try:
            rows.append(measure(kind, model, options))
        except Exception as error:
            traceback.print_exc()
            rows.append({"engine": kind, "failed": f"{type(error).__name__}: {error}"[:300]})
        row = rows[-1]
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print("ROW", json.dumps({k: v for k, v in shown.items() if k not in ("record", "stats")}))
        reference = next((r for r in rows if r["engine"] == "resident" and "record" in r), None)
        comparable = reference is not None and row is not reference and "record" in row
        if comparable and not options.routing:
            compare(row, reference)
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
