"""Run as a program: engines one after another in this process, for the tests on a GPU.

    python -m tests.engine.gpu_child SPEC.json OUT.pt

The spec is {"engines": [...], "steps": most steps of a run, or 0}. An engine is {"name", "llm":
{arguments of vllm.LLM}, "runs": [...], "limit_s": seconds}, and may have "widest": [most tokens
that a replayed batch may have, one round of the runs for each], "memory_gib": what the process may
allocate, "layers": MoE layers that are recorded by hooks, "mislead": true to falsify the mapping
after the runs, "weights": "random" for a shape without weights,
"holds_graphs": true for a second engine with graphs of vLLM's V2 runner.

A run is {"name", "prompts": [[token]], "max_tokens"}, or {"name", "requests": [[step, [token],
max_tokens]]} for requests that arrive while others are under way. It is greedy, or samples at its
"temperature" with a seed for each request: a small model left to itself repeats a few tokens, and
with them its experts.

With "steps" every MoE layer's output is kept on the device by operations that graphs capture, so
that replays are recorded too and nothing waits for the device. Nothing of this project is imported
here; an engine without a worker class fails if any of it was loaded.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.reference import OURS, LayerRecorder, digest_of, moe_layers
from benchmarks.shapes import register_loader


class StepRecorder:
    """What every MoE layer returned in every step, on the device until it is taken.

    Installed before vLLM captures its graphs: the copy into the ring, and the clock that says
    where, are part of each captured step. Rows beyond a step's tokens are padding and not looked
    at.
    Shapes: N = most steps of a run, B = most tokens of a step, H = hidden size.
    """

    def __init__(self, worker: Any, num_steps: int) -> None:
        """`worker`: vLLM's, its model loaded, nothing captured yet."""
        config = worker.vllm_config
        shape = (
            num_steps,
            config.scheduler_config.max_num_batched_tokens,
            config.model_config.get_hidden_size(),
        )
        runners = moe_layers(worker.get_model())
        dtype, device = config.model_config.dtype, worker.device
        self._rings = [torch.zeros(shape, dtype=dtype, device=device) for _ in runners]
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_steps = num_steps
        self._calls = 0
        self.steps: list[tuple[int, int, int]] = []
        """(tokens, most tokens of a request, MoE layer calls that the host made) of each step."""
        for index, runner in enumerate(runners):
            runner._forward_impl = self._keeping(index, runner._forward_impl)

    def _keeping(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        ring, clock = self._rings[index], self._clock

        def kept(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._calls += 1
            if index == 0:
                clock.add_(1).remainder_(self._num_steps)
            rows = output[-1] if isinstance(output, tuple) else output
            rows = rows[:, : ring.shape[2]]  # vLLM pads the hidden size for some kernels
            ring[:, : rows.shape[0]].index_copy_(0, clock, rows.unsqueeze(0))
            return output

        return kept

    def note(self, num_scheduled_tokens: dict[str, int]) -> None:
        """The worker has been given a step of so many tokens for each request."""
        if num_scheduled_tokens:
            tokens = num_scheduled_tokens.values()
            self.steps.append((sum(tokens), max(tokens), self._calls))
        self._calls = 0

    def begin(self) -> None:
        """Forget what was recorded; the next step is the first."""
        _synchronize()
        self._clock.fill_(-1)
        self.steps.clear()
        self._calls = 0

    def take(self) -> dict[str, Any]:
        """The steps since `begin`, and a digest of each layer's real rows in each."""
        _synchronize()
        if len(self.steps) > self._num_steps:
            raise RuntimeError(f"{len(self.steps)} steps, the ring holds {self._num_steps}")
        last = int(self._clock.item())
        if last != len(self.steps) - 1:
            raise RuntimeError(f"{len(self.steps)} steps were given, {last + 1} were recorded")
        layers = {}
        for index, ring in enumerate(self._rings):
            rows = ring[: len(self.steps)].cpu()
            layers[index] = [
                digest_of(row[:tokens])
                for row, (tokens, _, _) in zip(rows, self.steps, strict=True)
            ]
        return {"steps": list(self.steps), "layers": layers}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def record_steps(num_steps: int) -> None:
    """Have every worker that vLLM builds in this process keep a `StepRecorder`."""
    from vllm.platforms import current_platform

    worker_class: Any
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_worker

        worker_class = cpu_worker.CPUWorker
    else:
        from vllm.v1.worker import gpu_worker

        worker_class = gpu_worker.Worker
    warm_up, execute = worker_class.compile_or_warm_up_model, worker_class.execute_model

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.step_recorder = StepRecorder(self, num_steps)
        return warm_up(self, *args, **kwargs)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduler_output, *args, **kwargs)
        self.step_recorder.note(scheduler_output.num_scheduled_tokens)
        return result

    worker_class.compile_or_warm_up_model = compile_or_warm_up_model
    worker_class.execute_model = execute_model


def replay_up_to(worker: Any, most_tokens: int) -> None:
    """Let batches of more tokens run without a graph, as a cache with few slots lets them."""
    from vllm.config import CUDAGraphMode

    runner = worker.model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        keys = vars(dispatcher).setdefault("all_full_keys", dispatcher.cudagraph_keys)
        dispatcher.cudagraph_keys = {
            **keys,
            CUDAGraphMode.FULL: {
                key for key in keys[CUDAGraphMode.FULL] if key.num_tokens <= most_tokens
            },
        }
        return
    manager = runner.cudagraph_manager
    candidates = vars(manager).setdefault("all_candidates", manager._candidates)
    manager._candidates = {
        size: [desc for desc in descs if desc.num_tokens <= most_tokens]
        for size, descs in candidates.items()
    }


def captured_sizes(worker: Any) -> list[int]:
    """Batch sizes that have a FULL graph."""
    from vllm.config import CUDAGraphMode

    runner = worker.model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        keys = dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    else:
        keys = getattr(runner.cudagraph_manager, "graphs", {})
    return sorted({key.num_tokens for key in keys})


def memory_of(worker: Any) -> dict[str, int]:
    """Bytes of the parameters on the device: of routed experts, by storage, and of all else."""
    experts: dict[int, int] = {}
    others: dict[int, int] = {}
    for name, module in worker.get_model().named_modules():
        of = experts if name.endswith("routed_experts") else others
        for parameter in module._parameters.values():
            if parameter is not None and parameter.device.type != "cpu":
                storage = parameter.untyped_storage()
                of[storage.data_ptr()] = storage.nbytes()
    return {"experts": sum(experts.values()), "dense": sum(others.values())}


def describe(llm: Any) -> dict[str, Any]:
    """What runs: versions, classes, sizes."""
    import vllm
    from vllm.compilation.counter import compilation_counter

    found: dict[str, Any] = {}

    def look(worker: Any) -> None:
        runner = worker.model_runner
        found["runner"] = [f"{cls.__module__}.{cls.__name__}" for cls in type(runner).__mro__]
        found["memory"] = memory_of(worker)
        found["captured"] = captured_sizes(worker) if torch.cuda.is_available() else []
        captures = getattr(getattr(worker, "prefetch_engine", None), "captures", None)
        found["segments"] = [] if captures is None else captures.num_segments

    llm.collective_rpc(look)
    config = llm.llm_engine.vllm_config
    return {
        **found,
        "vllm": vllm.__version__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "aot_artifacts_loaded": compilation_counter.num_aot_artifacts_loaded,
    }


def generate(llm: Any, run: dict[str, Any]) -> list[list[int]]:
    """The tokens of each prompt or request."""
    from vllm import SamplingParams

    def sampling(index: int, max_tokens: int) -> Any:
        return SamplingParams(
            temperature=run.get("temperature", 0.0),
            seed=1000 + index,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
        )

    if "prompts" in run:
        prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
        asked = [sampling(index, run["max_tokens"]) for index in range(len(prompts))]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    engine = llm.llm_engine
    waiting = list(enumerate(run["requests"]))
    tokens: dict[str, list[int]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= step:
            index, (_, prompt, max_tokens) = waiting.pop(0)
            asked = sampling(index, max_tokens)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, asked)
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return [tokens[str(index)] for index in range(len(run["requests"]))]


class Session:
    """One engine, its recorder, and what it is asked."""

    def __init__(self, llm: Any, engine: dict[str, Any], num_steps: int) -> None:
        self._llm = llm
        self._ours = "worker_cls" in engine["llm"]
        self._steps: list[StepRecorder] = []
        self._layers: list[LayerRecorder] = []
        if num_steps:
            llm.collective_rpc(lambda worker: self._steps.append(worker.step_recorder))
        else:
            layers = engine.get("layers", [])
            llm.collective_rpc(
                lambda worker: self._layers.append(
                    LayerRecorder(worker.get_model(), layers, digest=True)
                )
            )

    def run(self, run: dict[str, Any]) -> dict[str, Any]:
        """One run's record, in the form that `benchmarks.reference.differences` compares."""
        before = self._stats()
        for steps in self._steps:
            steps.begin()
        started = time.perf_counter()
        tokens = generate(self._llm, run)
        seconds = time.perf_counter() - started
        record: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
        if self._steps:
            record |= self._steps[0].take()
        else:
            record["layers"] = self._layers[0].take()
        if torch.cuda.is_available():
            record["allocated"] = torch.cuda.memory_allocated()
        if before is not None:
            record["stats"] = self._stats()
            record["host_calls"] = record["stats"]["host_calls"] - before["host_calls"]
            record["audit"] = self._rpc("prefetch_audit")
        return record

    def _stats(self) -> dict[str, Any] | None:
        stats: dict[str, Any] | None = self._rpc("prefetch_stats") if self._ours else None
        return stats

    def _rpc(self, method: str) -> Any:
        return self._llm.collective_rpc(method)[0]

    def mislead(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Exchange two entries of one layer's mapping, put them back, then shift every layer's."""
        found: dict[str, Any] = {"layer": 3}

        def exchange(worker: Any) -> None:
            scheduler = worker.prefetch_engine.scheduler
            row = scheduler.mapping(scheduler.layer(found["layer"]))
            with torch.inference_mode():
                first, second = (row >= 0).nonzero().flatten()[:2].tolist()
                row[[first, second]] = row[[second, first]]
            found["experts"] = [first, second]

        def shift(worker: Any) -> None:
            scheduler = worker.prefetch_engine.scheduler
            with torch.inference_mode():
                for layer in scheduler.layers:
                    row = scheduler.mapping(layer)
                    row[row >= 0] = row[row >= 0].roll(1)

        self._llm.collective_rpc(exchange)
        found["audit_exchanged"] = self._rpc("prefetch_audit")
        self._llm.collective_rpc(exchange)
        found["audit_restored"] = self._rpc("prefetch_audit")
        self._llm.collective_rpc(shift)
        found["runs"] = {run["name"]: self.run(run) for run in runs}
        return found

    def close(self) -> None:
        for recorder in self._layers:
            recorder.close()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Within this context a hang ends the process, after every thread's stack is in the log."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


_held: list[tuple[Any, torch.Tensor]] = []


def hold_graph_pool() -> None:
    """Keep one small graph in vLLM's pool of graphs, which all engines of a process share.

    vLLM's V2 runner gives its graphs up with its engine; torch then refuses the pool to the next.
    """
    from vllm.platforms import current_platform

    if not _held:
        graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool()):
            number.add_(1)
        _held.append((graph, number))


def run_engine(engine: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Start one engine, run what the spec says, shut it down."""
    from vllm import LLM

    is_cuda = torch.cuda.is_available()
    if is_cuda and engine.get("holds_graphs"):
        hold_graph_pool()
    total = torch.cuda.get_device_properties(0).total_memory if is_cuda else 0
    if is_cuda:
        share = engine["memory_gib"] * 2**30 / total if "memory_gib" in engine else 1.0
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    llm = LLM(**engine["llm"])
    record: dict[str, Any] = {"start_s": time.perf_counter() - started, "runs": {}}
    if is_cuda:
        record["allocated"] = torch.cuda.memory_allocated()
    try:
        record["about"] = describe(llm)
        session = Session(llm, engine, num_steps)
        for widest in engine.get("widest", [None]):
            if widest is not None:
                llm.collective_rpc(lambda worker, most=widest: replay_up_to(worker, most))
            for run in engine["runs"]:
                name = run["name"] if widest is None else f"{widest}/{run['name']}"
                record["runs"][name] = session.run(run)
        if engine.get("mislead"):
            record["misled"] = session.mislead(engine["runs"][:2])
        session.close()
        del session
    finally:
        llm.llm_engine.engine_core.shutdown()
    if is_cuda:
        record["peak_allocated"] = torch.cuda.max_memory_allocated()
        record["peak_reserved"] = torch.cuda.max_memory_reserved()
    record["total_s"] = time.perf_counter() - started
    return record


def main() -> int:
    """Run every engine; one that fails is recorded, and the next one runs."""
    spec_path, out = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = ""  # our plugin would load our package
    if spec["steps"]:
        record_steps(spec["steps"])
    if any(engine.get("weights") == "random" for engine in spec["engines"]):
        register_loader()
    records: dict[str, Any] = {}
    for engine in spec["engines"]:
        is_broken = False
        with at_most(engine["limit_s"]):
            try:
                record = run_engine(engine, spec["steps"])
            except Exception:
                record = {"error": traceback.format_exc()}
                is_broken = not _is_usable()
        record["loaded"] = sorted(name for name in OURS if name in sys.modules)
        records[engine["name"]] = record
        torch.save(records, out.with_suffix(".part"))
        out.with_suffix(".part").replace(out)
        if is_broken:
            return 3  # the engines that are left need a process of their own
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def _is_usable() -> bool:
    """Whether the device still answers; after a fault in a kernel it does not."""
    try:
        _synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
