"""Compares vLLM engines: the expert cache, vLLM resident, vLLM's own offloader.

    python benchmarks/engines.py --shape qwen3-30b-a3b --layers 48 --engines cache:32,resident,uva

Each engine has a process of its own. Those separated by commas load side by side and are measured
one at a time, while the others wait; a semicolon ends the first group's processes before the next
group loads. `resident` and `uva` processes load none of this project.

Measures, per engine: load time; peak device memory while loading and running; bytes of slots and of
pinned memory; seconds for one prompt of --prompt tokens; milliseconds per decode step at each batch
size (--repeats stretches of --new steps after --warm steps; the median stretch), and in the same
steps hits, bytes over the link, and calls of the host. Records the outputs of --record layers and
compares them, bit for bit, with the first `resident` engine's. Weights are random, so routing has
no locality unless --routing brings some. Every engine gets the same weights from
benchmarks/shapes.py. With --graphs, also what a small kernel takes in a graph of that process.
An engine that fails, or that takes more than --limit seconds to load or to measure, is a row that
says why, with what had been measured by then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load_memory import DevicePeak
from reference import OURS, LayerRecorder, differences
from shapes import LOAD_FORMAT, register_loader, splitting_ops, write_shape

WORKER_CLS = "prefetch_runtime.vllm.PrefetchWorker"


# The quantization_config of a shape's experts, and the kernels that run them. Other weights stay
# bf16, so that steps differ by the experts alone.
_OTHERS = ["re:.*self_attn.*", "re:.*mlp[.]gate$", "lm_head"]


def _compressed(layout: str, weights: dict[str, Any], activations: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": activations,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": _OTHERS,
        "config_groups": {"group_0": group},
    }


_FP8 = {"num_bits": 8, "type": "float"}
EXPERTS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "bf16": (None, "triton"),
    "fp8": (
        _compressed(
            "float-quantized",
            {**_FP8, "strategy": "block", "block_structure": [128, 128]},
            {**_FP8, "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True},
        ),
        "triton",
    ),
    "int4": (
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            None,
        ),
        "marlin",
    ),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; else --shape with random weights")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--experts", default="bf16", help=f"of --shape: {', '.join(EXPERTS)}")
    parser.add_argument("--layers", type=int, default=None, help="cut the shape to so many layers")
    parser.add_argument(
        "--engines",
        default="resident,cache:32",
        help="resident, pieces, uva[:GiB], cache:SLOTS[:MODE[:PREDICTOR]]; commas, semicolons",
    )
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the timed prompt")
    parser.add_argument("--context", type=int, default=64, help="tokens before the decode steps")
    parser.add_argument("--repeats", type=int, default=3, help="the median is shown")
    parser.add_argument("--new", type=int, default=32, help="decode steps of a timed stretch")
    parser.add_argument("--warm", type=int, default=8, help="decode steps before those")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that loading or measuring may take"
    )
    parser.add_argument(
        "--record",
        default="0",
        help="MoE layers whose outputs are compared; none with --graphs: ''",
    )
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
    parser.add_argument(
        "--more-graphs",
        type=int,
        default=0,
        help="with --graphs: capture so many graphs of small kernels and measure again; from the "
        "third to fifth on a process has the longer gaps, if it had not",
    )
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    parser.add_argument("--after", type=Path, help="load, but measure only once this file exists")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.record and options.graphs:
        parser.error("layer outputs are not recorded in compiled graphs: add --record ''")
    return options


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
        # vLLM insists that so much is free when it starts; others may be loaded beside it.
        "gpu_memory_utilization": 0.05,
    }
    if options.graphs:
        sizes = [int(size) for size in options.sizes.split(",")]
        llm["compilation_config"] = {
            "cudagraph_capture_sizes": sizes,
            "cudagraph_mode": "FULL_DECODE_ONLY",
        }
    if not options.model:
        llm["moe_backend"] = EXPERTS[options.experts][1]
        llm |= {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True}
    if name == "cache":
        settings = {"slots_per_layer": int(details[0]), **json.loads(options.settings)}
        settings |= dict(zip(("mode", "predictor"), details[1:], strict=False))
        worker = "injected_worker.InjectedWorker" if options.routing else WORKER_CLS
        llm |= {"worker_cls": worker, "additional_config": {"prefetch_runtime": settings}}
    elif name == "uva":
        llm |= {
            "offload_backend": "uva",
            "cpu_offload_gb": float(details[0]) if details else 60.0,
            "cpu_offload_params": {"w13_weight", "w2_weight"},
            # Kernels read a host weight once for every block of rows: a wide step, such as the one
            # that vLLM measures memory with, takes minutes.
            "max_num_batched_tokens": 128,
            "max_model_len": 1024,
        }
    elif name == "pieces":  # as a MoE layer that decides on the host would run: graphs between them
        if not options.graphs:
            raise ValueError("engine 'pieces' is made of graphs; add --graphs")
        llm["compilation_config"] |= {
            "cudagraph_mode": "PIECEWISE",
            "splitting_ops": splitting_ops(),
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


def child(kind: str, model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In an engine's own process: what loading took, then, when told to go on, its row."""
    import torch
    from vllm import LLM

    is_cache = kind.startswith("cache")
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(options.memory_fraction if is_cache else 1.0)
    row: dict[str, Any] = {"engine": kind}
    peak = DevicePeak(torch.cuda.max_memory_allocated)
    started = time.perf_counter()
    llm = LLM(**engine_arguments(kind, model, options))
    try:
        row["load_s"] = time.perf_counter() - started
        row["peak_load_gib"] = peak.stop() / 2**30
        yield row
        yield row | _measure(llm, kind, options)
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, batch: list[dict[str, Any]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and so many tokens for each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]


def _measure(llm: Any, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    is_cache, is_uva = kind.startswith("cache"), kind.startswith("uva")
    row: dict[str, Any] = {}

    def so_far() -> None:
        print("SO FAR", json.dumps(row), flush=True)

    if is_uva:
        row["offloaded_gib"] = llm.collective_rpc(_offloaded_bytes)[0] / 2**30

    def counted() -> dict[str, float]:
        if not is_cache:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return {}
        stats = llm.collective_rpc("prefetch_stats")[0]
        kinds = ("hits", "misses", "bytes_copied", "bytes_useful", "bytes_late", "bytes_wasted")
        sums = {kind: sum(layer[kind] for layer in stats["layers"]) for kind in kinds}
        return {"host_calls": stats["host_calls"], **sums}

    if not is_uva:
        long_prompt = prompts(1, options.prompt)
        generate(llm, long_prompt, 1)
        before = counted()
        row["prefill_s"] = min(generate(llm, long_prompt, 1)[0] for _ in range(2))
        if is_cache:
            copied = (counted()["bytes_copied"] - before["bytes_copied"]) / 2
            row["prefill_gbps"] = copied / row["prefill_s"] / 1e9
    for size in map(int, options.batches.split(",")):
        steps = decode_steps(llm, prompts(size, options.context), options, counted)
        row |= {f"{name}_b{size}": value for name, value in steps.items()}
        so_far()
    row["peak_run_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if options.graphs and torch.cuda.is_available():
        row["us_small_kernel"] = small_kernel_us()
        if options.more_graphs:
            row |= _after_more_graphs(llm, options, counted)
            so_far()
    if options.record and not is_uva:
        row["record"] = record(llm, options)
    if is_cache:
        row["stats"] = llm.collective_rpc("prefetch_stats")[0]
        row["mode"] = row["stats"]["mode"]
        slots = sum(layer["num_slots"] for layer in row["stats"]["layers"])
        row["expert_mb"] = row["stats"]["slot_bytes"] / slots / 1e6
        for memory in ("slot", "staging", "host", "pinned"):
            row[f"{memory}_gib"] = row["stats"][f"{memory}_bytes"] / 2**30
        so_far()
        row["audit"] = llm.collective_rpc("prefetch_audit")[0][:5]
    return row


def decode_steps(
    llm: Any, batch: list[dict[str, Any]], options: argparse.Namespace, counted: Any
) -> dict[str, float]:
    """Milliseconds per decode step of a batch, and what was counted in those steps."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    last = options.warm + options.repeats * options.new
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=last + 2, detokenize=False
    )
    for index, prompt in enumerate(batch):
        engine.add_request(f"{time.monotonic_ns()}-{index}", prompt, sampling)
    done: dict[str, int] = {}

    def decode(tokens: int) -> None:
        while len(done) < len(batch) or min(done.values()) < tokens:
            for output in engine.step():
                done[output.request_id] = len(output.outputs[0].token_ids)

    decode(options.warm)
    before, times = counted(), []
    for index in range(options.repeats):
        started = time.perf_counter()
        decode(options.warm + (index + 1) * options.new)
        times.append((time.perf_counter() - started) / options.new * 1e3)
    after = counted()
    while engine.has_unfinished_requests():
        engine.step()
    found = {"ms_step": statistics.median(times), "ms_most": max(times)}
    steps = options.repeats * options.new
    more = {name: after[name] - before[name] for name in after}
    if more:
        found["hit"] = more["hits"] / max(1, more["hits"] + more["misses"])
        found["mb_step"] = more["bytes_copied"] / steps / 1e6
        for name in ("useful", "late", "wasted"):
            found[f"{name}_mb"] = more[f"bytes_{name}"] / steps / 1e6
        found["host_calls"] = more["host_calls"]
    return found


def _after_more_graphs(llm: Any, options: argparse.Namespace, counted: Any) -> dict[str, Any]:
    """The small kernel in each of `--more-graphs` graphs, then every batch once more."""
    row: dict[str, Any] = {}
    row["us_in_more_graphs"] = [round(small_kernel_us(), 3) for _ in range(options.more_graphs)]
    for size in map(int, options.batches.split(",")):
        steps = decode_steps(llm, prompts(size, options.context), options, counted)
        row[f"ms_step_more_graphs_b{size}"] = steps["ms_step"]
        if "hit" in steps:
            row[f"hit_more_graphs_b{size}"] = steps["hit"]
    return row


_SMALL_GRAPHS: list[Any] = []
"""Kept, as an engine keeps its graphs."""


def small_kernel_us(kernels: int = 400) -> float:
    """Microseconds of a kernel that does next to nothing, in a graph of such kernels. Gaps between
    the kernels of all graphs are longer in some processes than in others, with the cache and
    without: what a step takes compares between processes in which this is the same."""
    import torch

    numbers = torch.zeros(256, device="cuda")
    numbers.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            numbers.add_(1)
    _SMALL_GRAPHS.append((graph, numbers))
    times = []
    for _ in range(23):
        made: Any = torch.cuda.Event  # untyped in some versions of torch
        start, end = made(enable_timing=True), made(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / kernels)
    return statistics.median(times[3:])


def record(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
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
        _, ids = generate(llm, batch, tokens)
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


class Child:
    """An engine in a process of its own; what it says comes line by line as JSON."""

    def __init__(self, kind: str, model: str, limit_s: float, script: str = __file__) -> None:
        """`script`: what is run, with this process's arguments and `--child KIND@MODEL`."""
        self.row: dict[str, Any] = {"engine": kind}
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # or nobody would empty the pipe
        }
        self._process = subprocess.Popen(
            [sys.executable, script, *sys.argv[1:], "--child", f"{kind}@{model}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._limit_s = limit_s

    def _end(self, why: str) -> None:
        self.row.setdefault("failed", why)
        self._process.kill()

    def listen(self, until: str = "load") -> None:
        """Take what the process says until it has done that; its end before is a failure. The limit
        counts from here: the time of others, whom it waited for, is not its own."""
        assert self._process.stdout is not None
        why = f"took more than {self._limit_s:g} s to {until}"
        timer = threading.Timer(self._limit_s, self._end, [why])
        timer.start()
        try:
            for line in self._process.stdout:
                kind, _, row = line.partition(" {")
                if kind in ("ROW", "SO FAR"):
                    self.row |= json.loads("{" + row)
                if kind == "ROW":
                    return
                print(line, end="")
        finally:
            timer.cancel()
        self.row.setdefault("failed", f"the process ended with status {self._process.wait()}")

    def go_on(self) -> None:
        """Measure, unless loading failed."""
        if "failed" not in self.row:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            self.listen("measure")

    def close(self) -> None:
        """Wait for the end of the process, which frees its memory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve_child(of: str, options: argparse.Namespace, rows: Any = child) -> int:
    """The other end of `Child`; `rows` says what there is to say, given what `child` is given."""
    kind, _, model = of.partition("@")
    register_loader()
    try:
        for row in rows(kind, model, options):
            if not kind.startswith("cache"):
                row["ours"] = sorted(name for name in OURS if name in sys.modules)
            print("ROW", json.dumps(row), flush=True)
            if not sys.stdin.readline():
                break
    except Exception as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {error}"[:300]
        print("ROW", json.dumps({"failed": failed}), flush=True)
        return 1
    return 0


def main() -> int:
    """Measure every engine, print a table."""
    options = parse()
    if options.child is not None:
        return serve_child(options.child, options)
    if options.routing:
        os.environ["PREFETCH_BENCH_ROUTING"] = str(options.routing.resolve())
    model = options.model
    if model is None:
        changes: dict[str, Any] = {}
        if options.layers is not None:
            changes["num_hidden_layers"] = options.layers
        if EXPERTS[options.experts][0] is not None:
            changes["quantization_config"] = EXPERTS[options.experts][0]
        folder = Path(tempfile.mkdtemp(prefix="prefetch-runtime-shape-"))
        model = str(write_shape(options.shape, folder, **changes))
    rows: list[dict[str, Any]] = []
    for group in options.engines.split(";"):
        children = [Child(kind, model, options.limit) for kind in group.split(",")]
        for one in children:
            one.listen()
        print(f"LOADED {group}", flush=True)
        while options.after is not None and not options.after.exists():
            time.sleep(0.2)
        for one in children:
            one.go_on()
            show(one.row, rows, options)
            rows.append(one.row)
        for one in children:
            one.close()
        if options.out is not None:
            options.out.write_text(json.dumps(rows))
    return 0


def show(row: dict[str, Any], before: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a row, and whether what it computed is what the first resident engine computed."""
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print("ROW", json.dumps({k: v for k, v in shown.items() if k not in ("record", "stats")}))
    reference = next((r for r in before if r["engine"] == "resident" and "record" in r), None)
    if reference is not None and "record" in row and not options.routing:
        compare(row, reference)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
