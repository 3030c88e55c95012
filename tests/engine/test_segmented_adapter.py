"""What mode `segmented` changes around vLLM: who captures, on which stream, what is recorded."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphs.segments import SegmentedCaptures, SegmentedGraph
from tests.helpers.replayed_ops import ReplayedOps

pytestmark = [pytest.mark.engine]


class Runner:
    """Captures as vLLM's runners do, and says with which class."""

    def capture_model(self, *, profile_only: bool = False) -> Any:
        return torch.cuda.CUDAGraph, profile_only

    def profile_cudagraph_memory(self) -> Any:
        return self.capture_model(profile_only=True)[0]


def runner_with(captures: Any) -> Any:
    from prefetch_runtime.vllm.engine import PrefetchEngine
    from prefetch_runtime.vllm.model_runner import runner_class

    runner = runner_class(Runner)()
    engine = SimpleNamespace(captures=captures)
    runner.prefetch_engine = SimpleNamespace(
        warm_up=lambda: None,
        capturing=lambda: PrefetchEngine.capturing(cast(PrefetchEngine, engine)),
    )
    return runner


def test_what_vllm_captures_is_segmented_and_nothing_else_is() -> None:
    torchs: Any = torch.cuda.CUDAGraph
    runner = runner_with(SegmentedCaptures(ReplayedOps))
    made, profile_only = runner.capture_model(profile_only=True)
    assert issubclass(made, SegmentedGraph)
    assert profile_only
    assert issubclass(runner.profile_cudagraph_memory(), SegmentedGraph)
    assert torch.cuda.CUDAGraph is torchs


def test_in_other_modes_vllm_captures_what_it_always_does() -> None:
    torchs: Any = torch.cuda.CUDAGraph
    runner = runner_with(None)
    assert runner.capture_model() == (torchs, False)
    assert runner.profile_cudagraph_memory() is torchs


def test_the_kernels_are_loaded_before_vllm_profiles_its_graphs() -> None:
    called: list[str] = []

    class Noting(Runner):
        def profile_cudagraph_memory(self) -> Any:
            called.append("profile")

    from prefetch_runtime.vllm.model_runner import runner_class

    runner: Any = runner_class(Noting)()
    runner.prefetch_engine = SimpleNamespace(
        warm_up=lambda: called.append("warm up"), capturing=nullcontext
    )
    runner.profile_cudagraph_memory()
    assert called == ["warm up", "profile"]


def test_shared_experts_get_no_stream_of_their_own() -> None:
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

    from prefetch_runtime.vllm.engine import keep_on_one_stream

    shared: Any = SharedExperts.__new__(SharedExperts)
    torch.nn.Module.__init__(shared)
    shared._stream = "aux"
    other: Any = torch.nn.Linear(1, 1)
    other._stream = "aux"
    keep_on_one_stream(torch.nn.ModuleList([torch.nn.Sequential(shared), other]))
    assert shared._stream is None
    assert other._stream == "aux"


def test_a_router_that_reads_more_than_the_experts_is_none_that_guesses() -> None:
    """As in models whose experts work on a projection of the hidden states."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from prefetch_runtime.vllm.engine import gates_of

    def block(width: int, experts_width: int) -> torch.nn.Module:
        runner: Any = MoERunner.__new__(MoERunner)
        torch.nn.Module.__init__(runner)
        runner.gate = None
        experts: Any = torch.nn.Module()
        experts.hidden_size_asked = experts_width
        runner.routed_experts = experts
        gate: Any = torch.nn.Linear(width, 4)
        gate.input_size = width  # as vLLM's linear layers say it
        return torch.nn.ModuleDict({"gate": gate, "experts": runner})

    same, latent = block(8, 8), block(8, 2)
    gates = gates_of(torch.nn.ModuleList([same, latent]))
    assert [gate is not None for gate in gates] == [True, False]


class TestTrace:
    def start(self, mode: str, *, next_gate: bool, graphs_guess: bool = False) -> Any:
        from prefetch_runtime.vllm.worker import PrefetchWorker

        @contextmanager
        def undisturbed() -> Any:
            yield

        scheduler = SimpleNamespace(reset=lambda: None, recorder=None)
        store = SimpleNamespace(layer=lambda _: SimpleNamespace(num_experts=4), layers=[1, 2])
        engine = SimpleNamespace(
            mode=mode,
            check_gates=lambda _who, _remedy: None,
            scheduler=scheduler,
            host_store=store,
            graphs_guess=graphs_guess,
        )
        worker: Any = SimpleNamespace(prefetch_engine=engine, _metrics_go_on=undisturbed)
        PrefetchWorker.prefetch_trace_start(worker, 10, next_gate)
        return scheduler.recorder

    @pytest.mark.parametrize(
        ("mode", "next_gate", "graphs_guess"),
        [
            ("eager", True, False),
            ("segmented", False, False),
            ("segmented", True, True),
        ],
    )
    def test_is_recorded_where_the_host_sees_it(
        self, mode: str, next_gate: bool, graphs_guess: bool
    ) -> None:
        recorder = self.start(mode, next_gate=next_gate, graphs_guess=graphs_guess)
        assert recorder is not None

    def test_says_that_guesses_may_be_left_out_where_a_router_is_missing(self) -> None:
        from prefetch_runtime.config import ConfigError
        from prefetch_runtime.vllm.engine import PrefetchEngine
        from prefetch_runtime.vllm.worker import PrefetchWorker

        engine: Any = PrefetchEngine.__new__(PrefetchEngine)
        engine._gates = [torch.nn.Linear(1, 1), None]
        worker: Any = SimpleNamespace(prefetch_engine=engine)
        with pytest.raises(ConfigError, match=r"was not found in layer 1; .*--no-next-gate"):
            PrefetchWorker.prefetch_trace_start(worker, 10, True)

    def test_guesses_that_no_graph_computes_are_refused(self) -> None:
        from prefetch_runtime.vllm.checks import UnsupportedError

        with pytest.raises(UnsupportedError, match=r"do not run the next layers' routers.*'eager'"):
            self.start("segmented", next_gate=True)
