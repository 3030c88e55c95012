"""Where a decode step's time goes: host functions, operators and device kernels.

    python benchmarks/profile_steps.py --engine cache:64:full --batches 8,16,32 --out DIR

One engine of `engines.py`, with random weights and, for cache engines, routing that is calibrated
to Qwen3-30B-A3B; or with --model, which routes itself. For each batch size, after --warm steps:
--steps steps timed one by one with the device drained; as many under torch's profiler; as many
under Python's. Printed: the median step, how long kernels and copies ran in it, the kernels,
operators and functions that took most. --out gets the same as text, and a trace for Perfetto.

Profiling slows the host down; only the timed steps are figures.
"""

import argparse
import cProfile
import io
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = 28


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a model folder; else --shape")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--engine", default="cache:64:full", help="as in engines.py")
    parser.add_argument("--experts", default="bf16", help="as in engines.py")
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--eager", action="store_true", help="no compilation, no graphs")
    parser.add_argument("--settings", default="{}", help="more settings of the cache, JSON")
    parser.add_argument("--out", type=Path, default=None, help="folder for texts and traces")
    return parser.parse_args(arguments)


def calibrated(layers: int, tokens: int, steps: int) -> "np.ndarray[Any, Any]":
    """[steps, layers, tokens, 8] int16."""
    from prefetch_runtime.routing_generator import create_routing_model, generate_routing

    model = create_routing_model("qwen3-30b-a3b", num_layers=layers)
    topk = generate_routing(model, steps, batch_size=tokens, seed=1).topk
    by_step = topk.reshape(steps, tokens, layers, topk.shape[-1])
    return np.ascontiguousarray(by_step.transpose(0, 2, 1, 3))


def start(options: argparse.Namespace, batches: list[int]) -> Any:
    """The engine, in this process."""
    import engines
    from shapes import register_loader, write_shape
    from vllm import LLM

    given = ["--engines", options.engine, "--experts", options.experts, "--record", ""]
    given += ["--max-model-len", "1024"]
    given += ["--settings", options.settings, "--sizes", ",".join(map(str, batches))]
    given += [] if options.eager else ["--graphs"]
    model = options.model
    if model is not None:
        given += ["--model", model]
    else:
        changes: dict[str, Any] = {"num_hidden_layers": options.layers}
        quantisation = engines.EXPERTS[options.experts][0]
        if quantisation is not None:
            changes["quantization_config"] = quantisation
        folder = Path(tempfile.mkdtemp(prefix="profile-steps-"))
        model = str(write_shape(options.shape, folder / "model", **changes))
        if options.engine.startswith("cache"):
            routing = folder / "routing.npy"
            np.save(routing, calibrated(options.layers, max(batches), 256))
            os.environ["PREFETCH_BENCH_ROUTING"] = str(routing)
            given += ["--routing", str(routing)]
    register_loader()
    return LLM(**engines.engine_arguments(options.engine, model, engines.parse(given)))


def decode(llm: Any, size: int, tokens: int) -> Callable[[], None]:
    """Have `size` requests of `tokens` more tokens decode; a call is one step."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    for index in range(size):
        ids = [(7919 * (index + 1) * (j + 3)) % 8000 + 10 for j in range(16)]
        engine.add_request(f"{size}-{index}", {"prompt_token_ids": ids}, sampling)
    engine.step()
    return lambda: engine.step()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each step."""
    found = []
    for _ in range(steps):
        synchronize()
        begun_at = time.perf_counter()
        step()
        synchronize()
        found.append((time.perf_counter() - begun_at) * 1e3)
    return found


def profiled(step: Callable[[], None], steps: int, trace: Path | None) -> str:
    """Tables of torch's profiler: by time on the device, by the host's own time."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages()
    on_device = [row for row in averages if row.device_type != torch.autograd.DeviceType.CPU]
    copies = sum(row.self_device_time_total for row in on_device if "Memcpy" in row.key)
    kernels = sum(row.self_device_time_total for row in on_device) - copies
    return "\n".join(
        [
            f"device, ms a step: kernels {kernels / steps / 1e3:.2f}, copies "
            f"{copies / steps / 1e3:.2f} (copies may run beside kernels)",
            averages.table(
                sort_by="self_device_time_total", row_limit=ROWS, max_name_column_width=70
            ),
            averages.table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=70),
        ]
    )


def functions(step: Callable[[], None], steps: int) -> str:
    """Python's functions, by their own time and with what they call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    synchronize()
    profiler.disable()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats(ROWS)
    stats.sort_stats("cumtime").print_stats(2 * ROWS)
    return text.getvalue()


def main() -> int:
    """Profile every batch size."""
    options = parse()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_PLUGINS"] = ""
    batches = [int(size) for size in options.batches.split(",")]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    llm = start(options, batches)
    try:
        for size in batches:
            step = decode(llm, size, options.warm + 4 * options.steps + 64)
            for _ in range(options.warm):
                step()
            figures = timed(step, options.steps)
            name = f"{options.engine.replace(':', '-')}-b{size}"
            head = (
                f"== {options.engine}, {options.layers} layers, batch {size}: median step "
                f"{statistics.median(figures):.2f} ms, {min(figures):.2f} to {max(figures):.2f}"
            )
            print(head, flush=True)
            trace = None if options.out is None else options.out / f"{name}.json.gz"
            text = profiled(step, options.steps, trace) + functions(step, options.steps)
            print(text.splitlines()[0], flush=True)
            if options.out is None:
                print(text)
            else:
                (options.out / f"{name}.txt").write_text(f"{head}\n{text}")
            llm.llm_engine.abort_request([f"{size}-{index}" for index in range(size)])
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    finally:
        llm.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
