"""A worker that runs mode `segmented` on a CPU: a stand-in records operations and replays them."""

from typing import Any

import torch

from graphs.segments import SegmentedCaptures, SegmentedGraph
from prefetch_runtime.vllm.worker import PrefetchWorker
from tests.helpers.replayed_ops import ReplayedOps


class Replayed:
    """A model's forward whose decode steps are captured by their number of tokens, then replayed.

    Does what vLLM's own wrapper does on a GPU.
    """

    def __init__(self, model: Any, worker: Any) -> None:
        self._model = model.forward
        self._worker = worker
        self.graphs: dict[int, tuple[SegmentedGraph, Any]] = {}
        self.num_replays = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        num_tokens = _decoded()
        if num_tokens is None or not self._worker.prefetch_engine.captures_tokens(num_tokens):
            return self._model(*args, **kwargs)
        if num_tokens not in self.graphs:
            self.graphs[num_tokens] = self._capture(*args, **kwargs)
        else:
            self.num_replays += 1
            self.graphs[num_tokens][0].replay()
        return self.graphs[num_tokens][1].clone()  # the other sizes' graphs may share it on a GPU

    def _capture(self, *args: Any, **kwargs: Any) -> tuple[SegmentedGraph, Any]:
        # The recorder of the tests counts forward passes, and these are two of the same step.
        clock = self._worker.step_recorder._clock
        before = clock.clone()
        self._model(*args, **kwargs)  # a warm-up, which also brings in what the capture computes on
        clock.copy_(before)
        with self._worker.prefetch_engine.capturing():
            graph: Any = torch.cuda.CUDAGraph()
        graph.capture_begin()
        output = self._model(*args, **kwargs)
        graph.capture_end()
        return graph, output


def _decoded() -> int | None:
    """Tokens of the step, if every request has one; None otherwise."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return None
    layer: Any = next(iter(metadata.values()))
    starts = layer.query_start_loc
    return int(starts[-1]) if bool((starts.diff() == 1).all()) else None


class SegmentedWorker(PrefetchWorker):
    """`PrefetchWorker` whose decode steps are segments, where the product refuses the mode."""

    def _choose_mode(self, vllm_config: Any) -> str:  # noqa: ARG002
        return "segmented"

    def init_device(self) -> None:
        super().init_device()
        if self.prefetch_engine is not None:
            self.prefetch_engine.captures = SegmentedCaptures(ReplayedOps)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.replayed = Replayed(self.get_model(), self)
        self.get_model().forward = self.replayed

    def segmented_facts(self) -> dict[str, Any]:
        """What was captured, and how often it was replayed."""
        graphs = self.replayed.graphs
        return {
            "segments": {tokens: graph.num_segments for tokens, (graph, _) in graphs.items()},
            "replays": self.replayed.num_replays,
        }
