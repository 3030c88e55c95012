"""Capture of a step as a CUDA graph, and its replay."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from graphs.prefetch import PrefetchBranch
from graphs.slot_table import DeviceSlotTable, TableShape


class InputSpec(NamedTuple):
    """What a replay's input must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _spec_of(tensor: torch.Tensor) -> InputSpec:
    return InputSpec(tuple(tensor.shape), tensor.dtype, tensor.device)


class GraphCapture:
    """Captures one step of a slot table. The finished thing is a `CapturedGraph`.

    The step is called twice before it is captured, on a side stream, so that its kernels are
    compiled and loaded; it must leave the slot table usable, which any whole step does.
    """

    def __init__(
        self,
        table: DeviceSlotTable,
        *,
        pool: Any = None,
        branch: PrefetchBranch | None = None,
    ) -> None:
        """
        Args:
            table: the slot table that the step works on.
            pool: a graph memory pool to share, from `torch.cuda.graph_pool_handle()`.
            branch: the branch that the step forks, checked to be joined.

        Raises:
            RuntimeError: the table is closed, or is not on a CUDA device.
        """
        if table.is_closed:
            raise RuntimeError("the slot table is closed; build one before capturing a step")
        if table.device.type != "cuda":
            raise RuntimeError(
                f"CUDA graphs need a CUDA device, the slot table is on {table.device}; "
                f"call the step directly"
            )
        self._table = table
        self._pool = pool
        self._branch = branch

    def run(
        self,
        step: Callable[..., torch.Tensor | None],
        inputs: Mapping[str, torch.Tensor],
    ) -> "CapturedGraph":
        """Capture `step(**static_inputs)`, the inputs being copies of `inputs`.

        `step` must advance the clock once, join what it forks, and return its output, if any.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a capture is under way on this stream already")
        self._require_joined("before")
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        device = self._table.device
        warm_up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                step(**static)
        torch.cuda.current_stream(device).wait_stream(warm_up)
        torch.cuda.synchronize(device)
        self._require_joined("after the warm-up of")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step(**static)
            self._require_joined("in")
        return CapturedGraph(graph, self._table, static, output)

    def _require_joined(self, when: str) -> None:
        if self._branch is not None and self._branch.is_forked:
            raise RuntimeError(
                f"the prefetch branch is not joined {when} the capture; "
                f"call branch.join() before the step ends"
            )


class CapturedGraph:
    """A captured step. Owns its graph; borrows the slot table, which stays open until `close`."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        table: DeviceSlotTable,
        inputs: Mapping[str, torch.Tensor],
        output: torch.Tensor | None,
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._table = table
        self._table_shape = table.shape
        self._inputs = dict(inputs)
        self._specs = {name: _spec_of(tensor) for name, tensor in inputs.items()}
        self._output = output
        table.hold_open_for(self)

    @property
    def is_closed(self) -> bool:
        return self._graph is None

    @property
    def table_shape(self) -> TableShape:
        return self._table_shape

    def load(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy the inputs into the static ones, in the order of the current stream.

        Raises RuntimeError if the graph is closed, ValueError for inputs other than captured.
        """
        self._require_open()
        if inputs.keys() != self._specs.keys():
            raise ValueError(
                f"graph captured for inputs {sorted(self._specs)}, got {sorted(inputs)}"
            )
        for name, tensor in inputs.items():
            if _spec_of(tensor) != self._specs[name]:
                raise ValueError(
                    f"graph captured for {name} = {self._specs[name]}, called with "
                    f"{_spec_of(tensor)}; capture this shape first"
                )
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)

    def replay(
        self,
        inputs: Mapping[str, torch.Tensor] | None = None,
        *,
        table: DeviceSlotTable | None = None,
    ) -> torch.Tensor | None:
        """Load the inputs and replay on the current stream.

        The output is graph storage: the next replay overwrites it.

        Args:
            inputs: the same names, shapes, types and device as at the capture; None replays with
                what was loaded last.
            table: checked to be the captured one, for callers that hold several.

        Raises:
            RuntimeError: the graph is closed.
            ValueError: an input, or the table, is not what was captured.
        """
        graph = self._require_open()
        if table is not None and table is not self._table:
            if table.shape != self._table_shape:
                raise ValueError(
                    f"graph captured for a slot table of {self._table_shape}, called with "
                    f"{table.shape}; capture this shape first"
                )
            raise ValueError(
                "graph captured for another slot table of the same shape, whose addresses it "
                "holds; capture the step for this table first"
            )
        if inputs is not None:
            self.load(inputs)
        graph.replay()
        return self._output

    def close(self) -> None:
        """Wait for replays under way and release the graph. Safe to call twice."""
        if self._graph is None:
            return
        if self._table.device.type == "cuda":
            torch.cuda.synchronize(self._table.device)
        self._graph.reset()
        self._graph = None
        self._inputs.clear()
        self._output = None

    def _require_open(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise RuntimeError("the captured graph is closed; capture the step again")
        return self._graph
