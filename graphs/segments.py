"""A capture that the host interrupts: CUDA graphs, and calls of Python between them.

For a step that is captured except where the host must decide. A segment reads and writes fixed
addresses like any captured graph, and all segments of a capture share one memory pool, so that
tensors of one live on in the next. The idea is SGLang's breakable CUDA graph.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch

Action = Callable[[], None]

_CAN_CAPTURE: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


class Graph(Protocol):
    """What a segment needs of a graph; `torch.cuda.CUDAGraph` has it."""

    def capture_begin(self, pool: Any = None, **options: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...

    def pool(self) -> Any: ...


_here = threading.local()


class SegmentedGraph:
    """Captured and replayed like a `torch.cuda.CUDAGraph`, which it replaces. For one thread.

    While it captures, `between_segments` ends a segment and begins the next.
    """

    def __init__(self, make_graph: Callable[[], Any] = torch.cuda.CUDAGraph) -> None:
        """`make_graph` makes the `Graph` of one segment."""
        self._make_graph: Callable[[], Graph] = make_graph
        self._graphs: list[Graph] = []
        self._steps: list[Action] = []
        self._capturing: Graph | None = None
        self._pool: Any = None
        self._options: dict[str, Any] = {}
        self._closed = False

    @property
    def num_segments(self) -> int:
        """Graphs that a replay launches."""
        return len(self._graphs)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        """Begin the first segment on the current stream. Arguments as `torch.cuda.CUDAGraph`'s.

        Raises:
            RuntimeError: this graph was captured before, or this thread is capturing another.
        """
        self._require_open()
        if self._graphs:
            raise RuntimeError("this graph is captured already; make another one")
        if current() is not None:
            raise RuntimeError("this thread is capturing a segmented graph already")
        self._pool, self._options = pool, options
        self._begin()
        _here.graph = self

    def capture_end(self) -> None:
        """End the last segment."""
        _here.graph = None
        if self._capturing is not None:  # None after a failure at an interruption
            self._end()

    def interrupt(self, action: Action) -> None:
        """End a segment, note `action` for every replay, begin the next segment.

        `action` is not called now: while capturing, the device computes nothing that it could
        read. It runs on the host with everything before it launched and nothing after it.
        """
        if self._capturing is None:
            raise RuntimeError("only a capture that is under way can be interrupted")
        self._end()
        self._steps.append(action)
        self._begin()

    def replay(self) -> None:
        """Launch the segments on the current stream, each action in its place.

        What an action raises ends the replay.

        Raises:
            RuntimeError: the graph is closed, or was not captured.
        """
        self._require_open()
        if not self._steps:
            raise RuntimeError("capture the graph before replaying it")
        for step in self._steps:
            step()

    def pool(self) -> Any:
        """The memory pool that all segments share, for other captures."""
        self._require_open()
        return self._graphs[0].pool()

    def reset(self) -> None:
        """As `close`: `torch.cuda.CUDAGraph`'s name for it."""
        self.close()

    def close(self) -> None:
        """Release the segments; the caller has seen their replays end. Safe to call twice."""
        self._closed = True
        self._steps.clear()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _begin(self) -> None:
        graph = self._make_graph()
        graph.capture_begin(pool=self._pool, **self._options)
        self._capturing = graph

    def _end(self) -> None:
        graph, self._capturing = self._capturing, None
        assert graph is not None
        graph.capture_end()
        self._graphs.append(graph)
        self._steps.append(graph.replay)
        if self._pool is None:
            self._pool = graph.pool()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the segmented graph is closed with the expert cache that it belongs to; "
                "capture the step again"
            )


def current() -> SegmentedGraph | None:
    """What this thread is capturing."""
    graph: SegmentedGraph | None = getattr(_here, "graph", None)
    return graph


def between_segments(action: Action) -> None:
    """Call `action` now; under a segmented capture, at each replay instead, between two segments.

    Raises:
        RuntimeError: the stream is being captured by other means, which cannot be interrupted.
    """
    graph = current()
    if graph is not None:
        graph.interrupt(action)
        return
    if _CAN_CAPTURE and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the host must decide here, and this capture cannot be interrupted; capture with "
            "graphs.SegmentedGraph"
        )
    action()


class SegmentedCaptures:
    """Has code that captures `torch.cuda.CUDAGraph`s capture segmented ones; closes them together.

    vLLM makes, captures and replays its graphs itself, in several places and versions, and always
    by that name.
    """

    def __init__(self, make_graph: Callable[[], Any] | None = None) -> None:
        """`make_graph` makes the `Graph` of one segment; None: torch's class."""
        self._make_graph = make_graph
        self._made: WeakSet[SegmentedGraph] = WeakSet()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Within this context `torch.cuda.CUDAGraph` is a class of segmented graphs. May nest."""
        replaced: Any = torch.cuda.CUDAGraph
        if isinstance(replaced, type) and issubclass(replaced, SegmentedGraph):
            yield  # vLLM may profile its captures by capturing
            return
        make_graph = self._make_graph or replaced
        made = self._made

        class Captured(SegmentedGraph):
            def __init__(self) -> None:
                super().__init__(make_graph)
                made.add(self)

        setattr(torch.cuda, "CUDAGraph", Captured)  # noqa: B010 - mypy: cannot assign to a type
        try:
            yield
        finally:
            setattr(torch.cuda, "CUDAGraph", replaced)  # noqa: B010

    @property
    def num_segments(self) -> list[int]:
        """Of each graph that still exists, ascending."""
        return sorted(graph.num_segments for graph in self._made)

    def close(self) -> None:
        """Close every graph that still exists. Safe to call twice."""
        for graph in list(self._made):
            graph.close()
