"""Times one vLLM engine as a spec says. A script of its own: it imports nothing of this package.

    python bench_engine.py SPEC.json EVENTS.jsonl

SPEC: see `prefetch_runtime.bench.cases.engine_spec`. EVENTS: a line per thing that happened, as it
happens, so that an engine that hangs or is killed leaves what it had measured:
{"event": "stage", "name"}, {"event": "loaded", ...}, {"event": "batch", "batch", ...},
{"event": "end"} or {"event": "error", "message", "stage"}. Times are in seconds, read once every
token of the step is on the host.
"""

import ctypes
import gc
import json
import os
import signal
import statistics
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = ("prefetch_runtime", "graphs", "predictors")
MIN_STEPS = 8
"""Decode steps that are timed even when a batch's time is up."""


def read_module(path: Path) -> Any:
    """A file of this project, without its package."""
    spec = spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Events:
    """What happened, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stage = "starting"

    def emit(self, event: str, **values: Any) -> None:
        """Append one line and have it on disk before going on."""
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def enter(self, stage: str) -> None:
        """From here on the engine does something else."""
        self.stage = stage
        self.emit("stage", name=stage)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):  # another system; the parent ends its children by itself
        return


def inject_routing(path: str) -> None:
    """Have vLLM's own MoE layers route as the file says, in steps of so few tokens."""
    import numpy as np
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    injection_of = read_module(HERE.parent / "injection.py").RoutingInjection
    with np.load(path, allow_pickle=False) as arrays:
        routing = torch.from_numpy(arrays["routing"].astype(np.int32))
    original = RoutedExperts.forward_modular
    made: dict[str, Any] = {}
    order: dict[int, int] = {}

    def forward_modular(
        self: Any, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        injection = made.get("injection")
        if injection is None:
            injection = made["injection"] = injection_of(routing, topk_ids.device)
        index = order.setdefault(id(self), len(order))
        if topk_ids.shape[0] <= injection.max_tokens:
            if index == 0:
                injection.advance()
            topk_ids = injection.replace(index, topk_ids)
        return original(self, x, topk_weights, topk_ids, *args, **kwargs)

    RoutedExperts.forward_modular = forward_modular


def expert_parameters(model: Any) -> list[Any]:
    """The matrices of the routed experts, wherever they are."""
    return [
        parameter
        for name, module in model.named_modules()
        if name.endswith("routed_experts")
        for parameter in module._parameters.values()
        if parameter is not None and parameter.dim() >= 3
    ]


def worker_memory(worker: Any) -> dict[str, int]:
    """Bytes: of experts on the device and offloaded by vLLM, of vLLM's buffers for them."""
    from vllm.model_executor.offloader.base import get_offloader

    on_device: dict[int, int] = {}
    uva = 0
    for parameter in expert_parameters(worker.get_model()):
        if getattr(parameter, "_vllm_is_uva_offloaded", False):
            uva += parameter.nbytes
        elif parameter.device.type != "cpu" or worker.device.type == "cpu":
            # Layers of vLLM's prefetch offloader share their buffers: count each storage once.
            storage = parameter.untyped_storage()
            on_device[storage.data_ptr()] = storage.nbytes()
    streamed = int(getattr(get_offloader(), "total_offloaded_bytes", 0))
    return {
        "device_expert_bytes": sum(on_device.values()),
        "offloaded_bytes": uva + streamed,
        "streamed_bytes": streamed,
    }


def splitting_ops() -> list[str]:
    """vLLM's own, and its MoE ops: a layer whose host decides would run between graphs so."""
    from vllm.config import CompilationConfig

    return [*CompilationConfig._attention_ops, "vllm::moe_forward", "vllm::moe_forward_shared"]


def experts_are_zero(worker: Any) -> bool:
    """Whether some MoE layer has nothing but zeros, on which no time means anything."""
    parameters = expert_parameters(worker.get_model())
    return any(float(parameter.data[0].abs().max()) == 0 for parameter in parameters)


class Bench:
    """One engine and the batches that it is timed with."""

    def __init__(self, spec: dict[str, Any], events: Events) -> None:
        self.spec = spec
        self.events = events
        self.runs = 0

    def start(self) -> None:
        """Build the engine."""
        from vllm import LLM

        self.events.enter("loading")
        started = time.perf_counter()
        arguments: dict[str, Any] = {
            # JSON has no sets, and vLLM takes nothing else for these.
            name: set(value) if name in ("cpu_offload_params", "offload_params") else value
            for name, value in self.spec["llm"].items()
        }
        if self.spec["in_pieces"]:
            arguments["compilation_config"]["splitting_ops"] = splitting_ops()
        self.llm: Any = LLM(**arguments)
        self.engine: Any = self.llm.llm_engine
        seconds = time.perf_counter() - started
        memory = self.llm.collective_rpc(worker_memory)[0]
        if self.spec["offloads"] and not memory["offloaded_bytes"]:
            raise RuntimeError("this baseline has offloaded nothing, so it would measure nothing")
        if not self.spec["is_cache"]:
            loaded = [name for name in OURS if name in sys.modules]
            if loaded:
                raise RuntimeError(f"this baseline has loaded {loaded} of the cache's code")
        self.events.emit("loaded", load_s=seconds, **memory, **self._memory(), **self._cache())

    def wait_for_turn(self) -> None:
        """Where other engines load beside this one: wait until it may be timed."""
        turn = self.spec.get("turn")
        if turn is None:
            return
        self.events.enter("waiting for its turn")
        Path(turn, "loaded").touch()
        while not Path(turn, "go").exists():
            time.sleep(0.02)

    def run(self) -> None:
        """Time every batch. A cache first decodes the widest untimed, so that it is not cold."""
        if self.spec["is_cache"]:
            self.events.enter("filling the slots")
            warm = self.spec["warm"]
            self._generate(len(self.spec["prompts"]), steps=MIN_STEPS, deadline=0.0, warm=warm)
        for index, size in enumerate(self.spec["batches"]):
            self.events.enter(f"warming up batch {size}")
            self._generate(size, steps=MIN_STEPS, deadline=0.0, warm=0)
            if index == 0 and self.llm.collective_rpc(experts_are_zero)[0]:
                raise RuntimeError("the experts are all zeros: nothing was loaded")
            self.events.enter(f"timing batch {size}")
            self.events.emit("batch", **self._batch(size))

    def wait_for_the_others(self) -> None:
        """Where other engines are timed after this one: wait until this process is ended."""
        turn = self.spec.get("turn")
        if turn is not None:
            Path(turn, "timed").touch()
            while True:
                signal.pause()

    def close(self) -> None:
        """Free the engine."""
        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()

    def _batch(self, size: int) -> dict[str, Any]:
        deadline = time.perf_counter() + self.spec["seconds_per_batch"]
        runs = []
        for _ in range(self.spec["repeats"]):
            runs.append(
                self._generate(
                    size, steps=self.spec["new_tokens"], deadline=deadline, warm=self.spec["warm"]
                )
            )
            if time.perf_counter() > deadline:
                break
        step_s = [gap for run in runs for gap in run["steps"]]
        token_s = [gap for run in runs for gap in run["gaps"]]
        seconds = sum(run["seconds"] for run in runs)
        counted = {name: sum(run["counted"][name] for run in runs) for name in runs[0]["counted"]}
        return {
            **counted,
            "batch": size,
            "repeats": len(runs),
            "steps": len(step_s),
            "ttft_ms": [percentile([t for r in runs for t in r["first"]], p) for p in (50, 90, 99)],
            "tpot_ms": [percentile(token_s, p) for p in (50, 90, 99)],
            "step_ms": statistics.median(step_s) * 1e3,
            "step_mean_ms": seconds / len(step_s) * 1e3,
            "tokens_per_s": sum(run["tokens"] for run in runs) / seconds,
            "decode_s": seconds,
            **self._memory(),
        }

    def _generate(self, size: int, *, steps: int, deadline: float, warm: int) -> dict[str, Any]:
        """Send a batch, read its prompts, discard `warm` decode steps, time the next ones."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.runs += 1
        prompts = self.spec["prompts"][:size]
        slack = self.spec["prompt_steps"]
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=slack + warm + steps + 2,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names = [f"{self.runs}-{index}" for index in range(size)]
        synchronize()
        started = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        first: dict[str, float] = {}
        while len(first) < size:
            for name, _ in self._step():
                first.setdefault(name, time.perf_counter() - started)
        for _ in range(warm):
            self._step()
        synchronize()
        before = self._counters()
        begun = previous = time.perf_counter()
        last: dict[str, float] = {}
        gaps: list[float] = []
        step_gaps: list[float] = []
        tokens = 0
        while len(step_gaps) < steps:
            arrived = self._step()
            now = time.perf_counter()
            if not arrived:
                if not self.engine.has_unfinished_requests():
                    raise RuntimeError("the requests ended before all steps were timed")
                continue
            step_gaps.append(now - previous)
            previous = now
            for name, count in arrived:
                tokens += count
                gaps.append((now - last.get(name, begun)) / count)
                last[name] = now
            if now > deadline and len(step_gaps) >= MIN_STEPS:
                break
        synchronize()
        seconds = time.perf_counter() - begun
        after = self._counters()
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {
            "first": list(first.values()),
            "gaps": gaps,
            "steps": step_gaps,
            "tokens": tokens,
            "seconds": seconds,
            "counted": {name: after[name] - before[name] for name in after},
        }

    def _step(self) -> list[tuple[str, int]]:
        """(request, new tokens) of one step of the engine."""
        return [
            (output.request_id, len(output.outputs[0].token_ids))
            for output in self.engine.step()
            if output.outputs[0].token_ids
        ]

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.llm.collective_rpc("prefetch_stats")[0]
        return stats

    def _counters(self) -> dict[str, float]:
        """The cache's counters, layers added up; nothing for other engines."""
        if not self.spec["is_cache"]:
            return {}
        stats = self._stats()
        layers = stats["layers"]
        whole = {name: value for name, value in stats.items() if type(value) in (int, float)}
        summed = {
            name: sum(layer[name] for layer in layers)
            for name, value in layers[0].items()
            if type(value) in (int, float) and name not in ("layer_idx", "num_experts", "num_slots")
        }
        return {**whole, **summed}

    def _cache(self) -> dict[str, Any]:
        """What the cache holds: bytes of slots, ring and pinned memory, and its mode."""
        if not self.spec["is_cache"]:
            return {}
        stats = self._stats()
        held = {name: value for name, value in stats.items() if name.endswith("_bytes")}
        return {**held, "mode": stats["mode"], "num_slots": stats["layers"][0]["num_slots"]}

    def _memory(self) -> dict[str, int]:
        """Device bytes: allocated by torch at most so far, and taken from the device."""
        import torch

        if not torch.cuda.is_available():
            return {"peak_bytes": 0, "device_bytes": 0}
        free, total = torch.cuda.mem_get_info()
        alone = self.spec.get("turn") is None
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            # Beside other engines only torch's share is this one's.
            "device_bytes": total - free if alone else torch.cuda.max_memory_reserved(),
        }


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def percentile(seconds: list[float], share: int) -> float:
    """In milliseconds; the nearest of the values, so that the largest is never smoothed away."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1)))] * 1e3


def prompts_of(spec: dict[str, Any]) -> list[list[int]]:
    """As many prompts as the widest batch has requests, all of one length."""
    count, length = max(spec["batches"]), spec["prompt_tokens"]
    if spec["prompt_file"] is None:
        vocabulary = spec["vocabulary"]
        return [
            [(7919 * (i + 1) * (j + 3)) % (vocabulary - 16) + 10 for j in range(length)]
            for i in range(count)
        ]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec["llm"]["model"])
    text = Path(spec["prompt_file"]).read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < length:
        raise ValueError(
            f"{spec['prompt_file']} has {len(ids)} tokens, a prompt takes {length}; give more text"
        )
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def main() -> int:
    """Run the spec; the error that ended it is the last event."""
    die_with_parent()
    spec_path, events_path = map(Path, sys.argv[1:])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = ""  # a worker class brings our code in, a plugin must not
    spec = json.loads(spec_path.read_text())
    events = Events(events_path)
    bench = Bench(spec, events)
    try:
        if spec["random_weights"]:
            read_module(HERE / "random_weights.py").register_loader()
        if spec["routing"] is not None and not spec["is_cache"]:
            inject_routing(spec["routing"])
        spec["prompts"] = prompts_of(spec)
        bench.start()
        bench.wait_for_turn()
        bench.run()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        events.emit("error", message=message[:2000], stage=events.stage)
        raise
    # A measured engine has said all it had to say, even if it does not shut down well.
    events.emit("end")
    bench.wait_for_the_others()
    bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
