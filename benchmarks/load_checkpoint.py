"""Loads a real checkpoint of quantised experts through the cache, and says what memory that took.

    python benchmarks/load_checkpoint.py --experts int4 --layers 16 --slots 32 --resident

Writes a checkpoint of Qwen3-30B-A3B's shape with random weights (`random_checkpoint.py`; an index
and a safetensors file per layer) into --folder, unless it is there. Then one process per engine
loads it through vLLM's own loader, eagerly: the expert cache, and with --resident vLLM alone, in a
process that loads none of this project. Both then decode the same prompts, which are compared, with
what the first and the last MoE layer returned.

Memory is that of the process while vLLM's loader runs (`load_model`: layers made, weights read,
post-processed), beside what it was when that began. Host memory is sampled every 50 ms:

    anon       RssAnon: the host store, page-locked or not, and all that Python and torch allocate
    shmem      RssShmem: memory shared with other processes or mapped by the driver
    file       RssFile: pages of the mapped checkpoint, which the kernel drops when it needs room
    rss, hwm   VmRSS and VmHWM: the three together, now and at most
    locked     VmLck; pin is VmPin. CUDA's page-locking need not show in either
    available  by how much MemAvailable of the machine fell, whoever took it

A field that the kernel does not tell is null. `pinned` is what the host store has page-locked by
its own count. The judged number is the peak of anon + shmem (of available where anon is null) over
the experts' final bytes and one layer's; the bar is 1.15. Without a GPU slots and other weights are
in host memory, too, so nothing is judged.
"""

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
from engines import EXPERTS, Child, compare, engine_arguments
from load_memory import BAR, GIB, Watch, gib, host_memory, judged
from random_checkpoint import write_checkpoint
from shapes import shape_config

SHAPE = "qwen3-30b-a3b"


def parse(arguments: list[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="int4", choices=list(EXPERTS))
    parser.add_argument("--layers", type=int, default=48, help="cut the shape to so many layers")
    parser.add_argument("--slots", type=int, default=32, help="slots per layer")
    parser.add_argument("--resident", action="store_true", help="also load with vLLM alone")
    parser.add_argument("--new", type=int, default=8, help="tokens to decode for each prompt")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that an engine may use")
    parser.add_argument("--kv-mib", type=int, default=1024, help="KV cache of the engines")
    parser.add_argument("--settings", default="{}", help="more settings of the cache, JSON")
    parser.add_argument("--change", default="{}", help="entries of config.json to replace, JSON")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/prefetch-runtime-checkpoint"))
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# Memory


@contextmanager
def watched_loading(row: dict[str, Any]) -> Iterator[None]:
    """Fill `row` with what vLLM's loader takes, whichever loader runs in the block."""
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    has_gpu = torch.cuda.is_available()

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = Watch()
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        watch.start()
        started = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            row["weights_s"] = time.perf_counter() - started
            watch.stop()
            if has_gpu:
                row["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
                row["gpu_loaded_gib"] = torch.cuda.memory_allocated() / GIB
            row["samples"] = watch.samples
            row["before_gib"] = {name: gib(value) for name, value in watch.before.items()}
            row["peak_gib"] = {name: gib(watch.peak.get(name)) for name in ("host", *watch.before)}

    BaseModelLoader.load_model = load_model
    try:
        yield
    finally:
        BaseModelLoader.load_model = original


def watch_pinned() -> dict[str, int]:
    """From now on, the most bytes that the host store had page-locked at once, under "most"."""
    from prefetch_runtime.pinned import Pinner

    most = {"most": 0}
    original = Pinner.pin

    def pin(self: Any, *args: Any) -> int:
        address = original(self, *args)
        most["most"] = max(most["most"], self.pinned_bytes)
        return address

    Pinner.pin = pin  # type: ignore[method-assign]
    return most


# Engines


def child(kind: str, model: str, options: Namespace) -> Iterator[dict[str, Any]]:
    """In an engine's own process: its row."""
    import torch
    from vllm import LLM

    is_cache, has_gpu = kind.startswith("cache"), torch.cuda.is_available()
    pinned = watch_pinned() if is_cache else {}
    llm_arguments = engine_arguments(kind, model, options) | {
        "load_format": "safetensors",
        "kv_cache_memory_bytes": options.kv_mib << 20,
    }
    if not has_gpu:
        del llm_arguments["moe_backend"]
    row: dict[str, Any] = {"engine": kind}
    started = time.perf_counter()
    with watched_loading(row):
        llm = LLM(**llm_arguments)
    try:
        row["load_s"] = time.perf_counter() - started
        row["end_gib"] = {name: gib(value) for name, value in host_memory().items()}
        if is_cache:
            stats = llm.collective_rpc("prefetch_stats")[0]
            row["experts_gib"] = stats["host_bytes"] / GIB
            row["slots_gib"] = stats["slot_bytes"] / GIB
            row["pinned_end_gib"] = stats["pinned_bytes"] / GIB
            row["pinned_peak_gib"] = pinned["most"] / GIB
            row |= judged(row, len(stats["layers"]))
        row["record"] = engines.record(llm, options)
        if is_cache:
            row["audit"] = llm.collective_rpc("prefetch_audit")[0][:5]
        yield row
    finally:
        llm.llm_engine.engine_core.shutdown()


def readable(row: dict[str, Any]) -> str:
    """A row for people."""
    if "failed" in row:
        return f"{row['engine']}: failed: {row['failed']}"
    peak = {name: "?" if v is None else f"{v:.2f}" for name, v in row["peak_gib"].items()}
    said = [
        f"{row['engine']}: {row['checkpoint_gib']:.2f} GiB of checkpoint, engine up in "
        f"{row['load_s']:.1f} s, weights in {row['weights_s']:.1f} s "
        f"({row['checkpoint_gib'] / row['weights_s']:.2f} GiB/s)",
        f"  host peak above start, GiB: {peak['host']} judged; anon {peak['anon']}, shmem "
        f"{peak['shmem']}, file {peak['file']}, VmHWM {peak['hwm']}, machine {peak['available']}",
    ]
    if "gpu_peak_gib" in row:
        said.append(
            f"  GPU while loading: peak {row['gpu_peak_gib']:.2f} GiB, "
            f"{row['gpu_loaded_gib']:.2f} when loaded"
        )
    if "experts_gib" in row:
        verdict = {True: "within", False: "ABOVE", None: "not judged by"}[row["ok"]]
        ratio = "?" if row["ratio"] is None else f"{row['ratio']:.3f}"
        said.append(
            f"  experts {row['experts_gib']:.2f} GiB; pinned {row['pinned_end_gib']:.2f}, at most "
            f"{row['pinned_peak_gib']:.2f}; host peak is {ratio} of experts and one layer, "
            f"{verdict} the bar of {BAR}"
        )
    return "\n".join(said)


def checkpoint(options: Namespace) -> tuple[Path, int]:
    """The checkpoint's folder and bytes; writes it if it is not there."""
    config = {**shape_config(SHAPE, layers=options.layers), **json.loads(options.change)}
    quantised = EXPERTS[options.experts][0]
    if quantised is not None:
        config["quantization_config"] = quantised
    target = options.folder / f"{SHAPE}-{options.experts}-{options.layers}"
    started = time.perf_counter()
    total = write_checkpoint(target, config, options.experts)
    took = time.perf_counter() - started
    print(f"{target}: {total / 1e9:.2f} GB, written or found in {took:.1f} s", flush=True)
    return target, total


def main() -> int:
    """Write the checkpoint, load it with every engine, print the rows. Fails if an engine did."""
    options = parse()
    # What `engines` asks of its options beside these.
    for name, value in {
        "model": None,
        "graphs": False,
        "routing": None,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "prompt": 128,
        "batches": "2",
        "record": f"0,{options.layers - 1}",
    }.items():
        setattr(options, name, value)
    if options.child is not None:
        return engines.serve_child(options.child, options, child)
    model, total = checkpoint(options)
    rows: list[dict[str, Any]] = []
    for kind in [f"cache:{options.slots}:eager", *(["resident"] if options.resident else [])]:
        one = Child(kind, str(model), options.limit, __file__)
        one.listen()
        one.close()
        one.row |= {"experts": options.experts, "layers": options.layers}
        one.row["checkpoint_gib"] = total / GIB
        rows.append(one.row)
        print("ROW", json.dumps({k: v for k, v in one.row.items() if k != "record"}))
        print(readable(one.row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows))
    if len(rows) == 2 and not any("failed" in row for row in rows):
        compare(rows[0], rows[1])
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
