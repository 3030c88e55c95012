"""The script that times one engine, around an engine that answers as it is told."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from prefetch_runtime.vllm import bench_engine

ROOT = Path(__file__).resolve().parent.parent


class Request:
    """One that decodes a token per step once its prompt is read."""

    def __init__(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.name, self.left, self.prompt = name, max_tokens, len(prompt)


class Engine:
    """Reads `per_step` prompt tokens in a step, decodes meanwhile; may answer a step late."""

    def __init__(self, *, per_step: int = 8, empty_every: int = 0) -> None:
        self.per_step, self.empty_every = per_step, empty_every
        self.requests: dict[str, Request] = {}
        self.steps = 0
        self.asked: list[tuple[str, int, int]] = []
        self.aborted: list[list[str]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        ids = prompt["prompt_token_ids"]
        self.asked.append((name, len(ids), sampling.max_tokens))
        self.requests[name] = Request(name, ids, sampling.max_tokens)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.empty_every and self.steps % self.empty_every == 0:
            return []
        outputs = []
        room = self.per_step
        for request in list(self.requests.values()):
            taken = min(request.prompt, room)
            room -= taken
            request.prompt -= taken
            if request.prompt:
                continue
            request.left -= 1
            outputs.append(
                types.SimpleNamespace(
                    request_id=request.name, outputs=[types.SimpleNamespace(token_ids=[7])]
                )
            )
            if not request.left:
                del self.requests[request.name]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        self.aborted.append(names)
        for name in names:
            self.requests.pop(name, None)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for what the script imports of vLLM."""
    package: Any = types.ModuleType("vllm")
    package.SamplingParams = lambda **values: types.SimpleNamespace(**values)
    sampling: Any = types.ModuleType("vllm.sampling_params")
    sampling.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)


def made_bench(
    tmp_path: Path, engine: Engine, *, is_cache: bool = False, **changes: Any
) -> bench_engine.Bench:
    spec = {
        "batches": [2, 4],
        "prompt_tokens": 6,
        "prompt_steps": 5,
        "new_tokens": 10,
        "warm": 3,
        "repeats": 2,
        "seconds_per_batch": 60.0,
        "is_cache": is_cache,
        "vocabulary": 100,
        "prompt_file": None,
        **changes,
    }
    spec["prompts"] = bench_engine.prompts_of(spec)
    bench = bench_engine.Bench(spec, bench_engine.Events(tmp_path / "events"))
    bench.engine = engine
    bench.llm = types.SimpleNamespace(collective_rpc=lambda _: [_stats(engine)])
    return bench


def _stats(engine: Engine) -> dict[str, Any]:
    """Counters that move by one per layer and step."""
    layer = {"layer_idx": 0, "num_experts": 8, "num_slots": 4, "layer_name": "l"}
    counters = {"hits": engine.steps, "misses": 2 * engine.steps, "late": 0, "steps": engine.steps}
    return {
        "mode": "full",
        "host_calls": engine.steps,
        "slot_bytes": 5,
        "layers": [{**layer, **counters}, {**layer, **counters, "layer_idx": 1}],
    }


def test_a_batch_is_timed_once_all_decode_and_the_warm_steps_are_over(tmp_path: Path) -> None:
    engine = Engine()
    run = made_bench(tmp_path, engine)._generate(4, steps=10, deadline=1e18, warm=3)
    # 24 prompt tokens, 8 a step: the last request's first token comes in step 3.
    assert engine.steps == 3 + 3 + 10
    assert len(run["first"]) == 4
    assert sorted(run["first"]) == run["first"]
    assert len(run["steps"]) == 10
    assert len(run["gaps"]) == run["tokens"] == 40
    assert sum(run["steps"]) <= run["seconds"]
    assert engine.aborted == [["1-0", "1-1", "1-2", "1-3"]]
    assert not engine.requests


def test_requests_outlast_the_timed_steps(tmp_path: Path) -> None:
    engine = Engine()
    made_bench(tmp_path, engine)._generate(4, steps=10, deadline=1e18, warm=3)
    assert {max_tokens for _, _, max_tokens in engine.asked} == {5 + 3 + 10 + 2}


def test_requests_that_end_too_early_are_an_error(tmp_path: Path) -> None:
    bench = made_bench(tmp_path, Engine(), prompt_steps=-10)
    with pytest.raises(RuntimeError, match="ended before all steps were timed"):
        bench._generate(2, steps=10, deadline=1e18, warm=3)


def test_steps_without_a_token_are_part_of_the_next(tmp_path: Path) -> None:
    engine = Engine(empty_every=2)
    run = made_bench(tmp_path, engine)._generate(2, steps=10, deadline=1e18, warm=3)
    assert len(run["steps"]) == 10
    assert run["tokens"] == 20


def test_a_batch_whose_time_is_up_is_cut_short_but_never_to_nothing(tmp_path: Path) -> None:
    run = made_bench(tmp_path, Engine())._generate(2, steps=50, deadline=0.0, warm=3)
    assert len(run["steps"]) == bench_engine.MIN_STEPS


def test_counters_are_those_of_the_timed_steps(tmp_path: Path) -> None:
    row = made_bench(tmp_path, Engine(), is_cache=True)._batch(2)
    assert row["repeats"] == 2
    assert row["steps"] == 20, "steps of the engine, not the layers' counter of that name"
    assert row["hits"] == 2 * 20, "two layers"
    assert row["misses"] == 2 * 2 * 20
    assert row["host_calls"] == 20
    assert row["slot_bytes"] == 0
    assert row["tokens_per_s"] == pytest.approx(2 * 20 / row["decode_s"])
    assert row["tpot_ms"][0] <= row["tpot_ms"][1] <= row["tpot_ms"][2]


def test_repeats_end_when_the_time_is_up(tmp_path: Path) -> None:
    bench = made_bench(tmp_path, Engine(), repeats=1000, seconds_per_batch=0.01)
    assert bench._batch(2)["repeats"] < 1000


def test_prompts_differ_and_stay_within_the_vocabulary(tmp_path: Path) -> None:
    prompts = made_bench(tmp_path, Engine(), batches=[8], prompt_tokens=50).spec["prompts"]
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert {len(prompt) for prompt in prompts} == {50}
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_percentiles_are_values_that_were_measured() -> None:
    seconds = [0.001 * n for n in range(1, 101)]
    assert bench_engine.percentile(seconds, 50) == pytest.approx(51.0, abs=1.01)
    assert bench_engine.percentile(seconds, 99) == pytest.approx(99.0, abs=1.01)
    assert bench_engine.percentile([0.005], 99) == 5.0


class _Experts(torch.nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.full((4, 2, 2), fill))
        self.bias = torch.nn.Parameter(torch.zeros(2))


def _worker(*fills: float) -> Any:
    model = torch.nn.Module()
    for index, fill in enumerate(fills):
        layer = torch.nn.Module()
        layer.routed_experts = _Experts(fill)
        model.add_module(f"layer{index}", layer)
    return types.SimpleNamespace(get_model=lambda: model)


def test_zeros_are_noticed_in_any_layer() -> None:
    assert not bench_engine.experts_are_zero(_worker(1.0, 2.0))
    assert bench_engine.experts_are_zero(_worker(1.0, 0.0))


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the started engine has of experts."""
    memory = {"device_expert_bytes": 5, "offloaded_bytes": 0, "streamed_bytes": 0}

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            offloaded = arguments.get("offload_params", {"w2_weight"})
            assert offloaded == {"w2_weight"}, "a set, as vLLM wants it"
            self.arguments = arguments
            self.llm_engine = Engine()

        def collective_rpc(self, _: Any) -> list[Any]:
            return [memory]

    monkeypatch.setattr(sys.modules["vllm"], "LLM", LLM, raising=False)
    return memory


def test_a_baseline_that_offloads_nothing_is_an_error(
    starting: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = {"offload_params": ["w2_weight"]}
    bench = made_bench(tmp_path, Engine(), llm=llm, offloads=True, in_pieces=False)
    with pytest.raises(RuntimeError, match="has offloaded nothing"):
        bench.start()
    starting["offloaded_bytes"] = 3
    with pytest.raises(RuntimeError, match=r"has loaded \['prefetch_runtime'"):
        bench.start()
    monkeypatch.setattr(bench_engine, "OURS", ())
    bench.start()
    loaded = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert loaded["event"] == "loaded"
    assert loaded["offloaded_bytes"] == 3


def test_the_script_loads_nothing_of_ours() -> None:
    code = (
        "import runpy, sys; m = runpy.run_path(sys.argv[1]);"
        "m['read_module'](m['HERE'].parent / 'injection.py');"
        "m['read_module'](m['HERE'] / 'random_weights.py');"
        "print(*[n for n in m['OURS'] if n in sys.modules])"
    )
    script = str(ROOT / "prefetch_runtime" / "vllm" / "bench_engine.py")
    finished = subprocess.run(
        [sys.executable, "-P", "-c", code, script], capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == ""


@pytest.mark.usefixtures("starting")
def test_pieces_end_at_the_moe_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "OURS", ())
    llm = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    ops = types.SimpleNamespace(CompilationConfig=types.SimpleNamespace(_attention_ops=["a"]))
    monkeypatch.setitem(sys.modules, "vllm.config", ops)
    bench = made_bench(tmp_path, Engine(), llm=llm, offloads=False, in_pieces=True)
    bench.start()
    split = bench.llm.arguments["compilation_config"]["splitting_ops"]
    assert split == ["a", "vllm::moe_forward", "vllm::moe_forward_shared"]


@pytest.mark.parametrize("is_cache", [True, False])
def test_a_cache_is_not_timed_cold(is_cache: bool, tmp_path: Path) -> None:
    bench = made_bench(tmp_path, Engine(), is_cache=is_cache)
    stats = {"layers": [{"layer_idx": 0, "hits": 1}]}
    answers = {"prefetch_stats": [stats]}
    bench.llm = types.SimpleNamespace(collective_rpc=lambda asked: answers.get(asked, [False]))
    bench.run()
    widths = [len(names) for names in bench.engine.aborted]
    assert widths == [4] * is_cache + [2, 2, 2, 4, 4, 4]
