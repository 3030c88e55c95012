"""Segmented graphs: the order of their parts, and a small model whose routing changes.

Where there is no GPU, a stand-in records the operations and replays them; the tests marked gpu
capture for real.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphs.segments import SegmentedCaptures, SegmentedGraph, between_segments, current
from tests.helpers.replayed_ops import ReplayedOps


class Noted:
    """Notes what is asked of it."""

    log: list[str]
    count = 0

    def __init__(self) -> None:
        self.name = type(self).count
        type(self).count += 1

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.log.append(f"begin {self.name} {pool} {options}")

    def capture_end(self) -> None:
        self.log.append(f"end {self.name}")

    def replay(self) -> None:
        self.log.append(f"replay {self.name}")

    def reset(self) -> None:
        self.log.append(f"reset {self.name}")

    def pool(self) -> str:
        return f"pool of {self.name}"


@pytest.fixture
def log() -> list[str]:
    Noted.log, Noted.count = [], 0
    return Noted.log


def captured(*actions: Callable[[], None], **options: Any) -> SegmentedGraph:
    graph = SegmentedGraph(Noted)
    graph.capture_begin(**options)
    for action in actions:
        between_segments(action)
    graph.capture_end()
    return graph


def test_segments_share_a_pool_and_the_arguments_of_the_capture(log: list[str]) -> None:
    captured(lambda: log.append("action"), pool="given", capture_error_mode="relaxed")
    mode = {"capture_error_mode": "relaxed"}
    assert log == [f"begin 0 given {mode}", "end 0", f"begin 1 given {mode}", "end 1"]


def test_without_a_pool_the_first_segments_is_taken(log: list[str]) -> None:
    graph = captured(lambda: None, lambda: None)
    assert [line for line in log if line.startswith("begin")] == [
        "begin 0 None {}",
        "begin 1 pool of 0 {}",
        "begin 2 pool of 0 {}",
    ]
    assert graph.pool() == "pool of 0"


def test_a_replay_runs_every_action_between_its_segments(log: list[str]) -> None:
    graph = captured(lambda: log.append("first"), lambda: log.append("second"))
    assert graph.num_segments == 3
    assert "first" not in log, "an action is not called while capturing"
    for _ in range(2):
        log.clear()
        graph.replay()
        assert log == ["replay 0", "first", "replay 1", "second", "replay 2"]


def test_without_a_capture_an_action_is_called_at_once(log: list[str]) -> None:
    assert current() is None
    between_segments(lambda: log.append("action"))
    assert log == ["action"]


def test_what_an_action_raises_ends_the_replay(log: list[str]) -> None:
    def fail() -> None:
        raise ValueError("no such expert")

    graph = captured(fail)
    log.clear()
    with pytest.raises(ValueError, match="no such expert"):
        graph.replay()
    assert log == ["replay 0"]


def test_a_closed_graph_is_released_and_cannot_be_replayed(log: list[str]) -> None:
    graph = captured(lambda: None)
    log.clear()
    graph.close()
    graph.close()
    assert log == ["reset 0", "reset 1"]
    assert graph.is_closed
    for use in (graph.replay, graph.pool, graph.capture_begin):
        with pytest.raises(RuntimeError, match=r"closed with the expert cache.*capture the step"):
            use()


@pytest.mark.usefixtures("log")
def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(RuntimeError, match="capture the graph before replaying"):
        SegmentedGraph(Noted).replay()
    with pytest.raises(RuntimeError, match="only a capture that is under way"):
        SegmentedGraph(Noted).interrupt(lambda: None)
    with pytest.raises(RuntimeError, match="captured already"):
        captured().capture_begin()
    graph = SegmentedGraph(Noted)
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="capturing a segmented graph already"):
        SegmentedGraph(Noted).capture_begin()
    graph.capture_end()
    assert current() is None


def test_a_capture_that_fails_at_an_interruption_is_over(log: list[str]) -> None:
    class Failing(Noted):
        def capture_end(self) -> None:
            raise RuntimeError("a stream is not joined")

    graph = SegmentedGraph(Failing)
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not joined"):
        between_segments(lambda: None)
    graph.capture_end()
    assert current() is None
    between_segments(lambda: log.append("at once"))
    assert log[-1] == "at once"


@pytest.mark.usefixtures("log")
class TestCaptures:
    def test_graphs_made_within_are_segmented_and_closed_together(self) -> None:
        torchs: Any = torch.cuda.CUDAGraph
        captures = SegmentedCaptures(Noted)
        with captures.here():
            graph: Any = torch.cuda.CUDAGraph()
            graph.capture_begin(pool="given")
            between_segments(lambda: None)
            graph.capture_end()
        assert torch.cuda.CUDAGraph is torchs
        assert isinstance(graph, SegmentedGraph)
        assert graph.num_segments == 2
        assert captures.num_segments == [2]
        captures.close()
        assert graph.is_closed

    def test_one_context_may_stand_within_another(self) -> None:
        torchs: Any = torch.cuda.CUDAGraph
        captures = SegmentedCaptures(Noted)
        with captures.here():
            with captures.here():
                graph: Any = torch.cuda.CUDAGraph()
            graph.capture_begin()
            between_segments(lambda: None)
            between_segments(lambda: None)
            graph.capture_end()
            assert torch.cuda.CUDAGraph is type(graph)
        assert torch.cuda.CUDAGraph is torchs
        assert Noted.log[0] == "begin 0 None {}", "a segment is a graph, not a segmented one"
        assert captures.num_segments == [3]

    def test_the_class_is_put_back_after_a_failure(self) -> None:
        torchs: Any = torch.cuda.CUDAGraph
        with pytest.raises(KeyError), SegmentedCaptures(Noted).here():
            raise KeyError
        assert torch.cuda.CUDAGraph is torchs


# A small model: the host reads the ids that a segment has computed, and fills a row with what they
# name; the next segment computes with it.


class Chain:
    """Layers that each route by what the last one gave, and multiply by what the host fetched."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.x = torch.zeros(4, device=device)
        self.table = torch.arange(1.0, 9.0, device="cpu")
        self.fetched = [torch.zeros(4, device=device) for _ in range(num_layers)]
        self.ids = torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.seen: list[list[int]] = []

    def step(self) -> torch.Tensor:
        y = self.x + 1
        for fetched in self.fetched:
            y = self.layer(y, fetched)
        return y

    def layer(self, y: torch.Tensor, fetched: torch.Tensor) -> torch.Tensor:
        ids = y.long() % 8
        self.ids.copy_(ids, non_blocking=True)
        between_segments(lambda: self.fetch(fetched))
        return y * fetched + 1

    def fetch(self, fetched: torch.Tensor) -> None:
        if fetched.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.seen.append(self.ids.tolist())
        fetched.copy_(self.table[self.ids])

    def expected(self, x: list[float]) -> tuple[list[float], list[list[int]]]:
        y, seen = [value + 1 for value in x], []
        for _ in self.fetched:
            seen.append([int(value) % 8 for value in y])
            y = [value * (index + 1) + 1 for value, index in zip(y, seen[-1], strict=True)]
        return y, seen


INPUTS = [[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 0.0, 7.0], [3.0, 2.0, 1.0, 0.0]]


def check_chain(chain: Chain, graph: SegmentedGraph, output: torch.Tensor) -> None:
    assert graph.num_segments == len(chain.fetched) + 1
    for x in [*INPUTS, *INPUTS]:
        chain.x.copy_(torch.tensor(x))
        chain.seen.clear()
        graph.replay()
        wanted, ids = chain.expected(x)
        assert output.tolist() == wanted
        assert chain.seen == ids


def test_every_replay_reads_what_its_own_segments_computed() -> None:
    chain = Chain(3, torch.device("cpu"))
    graph = SegmentedGraph(ReplayedOps)
    graph.capture_begin()
    output = chain.step()
    graph.capture_end()
    assert chain.seen == []
    check_chain(chain, graph, output)


def warmed_up(*chains: Chain) -> None:
    """Load the kernels."""
    for chain in chains:
        chain.step()
        chain.seen.clear()
    torch.cuda.synchronize()


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()


@pytest.mark.gpu
class TestOnTheGpu:
    def test_every_replay_reads_what_its_own_segments_computed(self, cuda: torch.device) -> None:
        chain = Chain(3, cuda)
        warmed_up(chain)
        captures = SegmentedCaptures()
        pool = torch.cuda.graph_pool_handle()
        with captures.here():
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = chain.step()
        assert isinstance(graph, SegmentedGraph)
        check_chain(chain, graph, output)
        captures.close()
        with pytest.raises(RuntimeError, match="closed"):
            graph.replay()

    def test_two_captures_share_a_pool_and_replay_in_turn(self, cuda: torch.device) -> None:
        chains = [Chain(2, cuda), Chain(4, cuda)]
        warmed_up(*chains)
        pool = torch.cuda.graph_pool_handle()
        made = []
        with SegmentedCaptures().here():
            for chain in chains:
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    # As vLLM does: the output is copied out, what computed it may be overwritten.
                    output = chain.step()
                made.append((chain, graph, output))
        for _ in range(2):
            for chain, graph, output in made:
                check_chain(chain, graph, output)

    @pytest.mark.filterwarnings("ignore")  # of the compiler's
    def test_a_compiled_function_is_captured_around_its_interruptions(
        self, cuda: torch.device
    ) -> None:
        chain = Chain(3, cuda)

        @torch.library.custom_op("segments_test::layer", mutates_args=())
        def layer(y: torch.Tensor, index: int) -> torch.Tensor:
            # As in vLLM's op of a MoE layer, the break is in its Python body.
            return chain.layer(y, chain.fetched[index])

        @layer.register_fake
        def _(y: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG001
            return torch.empty_like(y)

        @torch.compile(fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            for index in range(3):
                y = layer(y, index)
            return y

        step(chain.x)
        chain.seen.clear()
        with SegmentedCaptures().here():
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = step(chain.x)
        assert chain.seen == []
        check_chain(chain, graph, output)

    def test_another_capture_is_told_that_it_cannot_be_interrupted(
        self, cuda: torch.device
    ) -> None:
        chain = Chain(1, cuda)
        warmed_up(chain)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="cannot be interrupted; capture with"),
            torch.cuda.graph(graph),
        ):
            chain.step()
