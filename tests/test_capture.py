"""The contract of a captured graph; with a stand-in for the graph where there is no GPU."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from graphs import CapturedGraph, DeviceSlotTable, GraphCapture, PrefetchBranch
from prefetch_runtime.policies import create_device_form

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


class StandIn:
    """Replays by calling a function."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step
        self.is_reset = False

    def replay(self) -> None:
        self.step()

    def reset(self) -> None:
        self.is_reset = True


def make_table(num_slots: int = 4, num_experts: int = 8) -> DeviceSlotTable:
    return DeviceSlotTable(
        num_layers=1,
        num_experts=num_experts,
        num_slots=num_slots,
        policy=create_device_form("lru"),
        units_per_step=1,
        device=DEVICE,
    )


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int32, device=DEVICE)


def stand_in_capture(table: DeviceSlotTable) -> tuple[CapturedGraph, StandIn]:
    static = {"topk_ids": ids_of(0, 0)}
    graph = StandIn(lambda: table.resolve(0, static["topk_ids"]))
    out = table.resolve(0, static["topk_ids"])
    return CapturedGraph(cast(Any, graph), table, static, out), graph


def test_a_replay_takes_its_inputs_and_returns_the_static_output() -> None:
    table = make_table()
    graph, _ = stand_in_capture(table)
    first = graph.replay({"topk_ids": ids_of(5, 6)}, table=table)
    assert first is not None
    assert first.tolist() == [[1, 2]]
    second = graph.replay({"topk_ids": ids_of(6, 5)})
    assert second is first
    assert second.tolist() == [[2, 1]]


def test_a_replay_after_close_is_an_error() -> None:
    table = make_table()
    graph, stand_in = stand_in_capture(table)
    graph.close()
    graph.close()
    assert stand_in.is_reset
    with pytest.raises(RuntimeError, match="graph is closed; capture the step again"):
        graph.replay({"topk_ids": ids_of(1, 2)})


def test_a_table_of_another_shape_is_refused() -> None:
    table = make_table()
    graph, _ = stand_in_capture(table)
    with pytest.raises(ValueError, match=r"num_slots=4.*called with.*num_slots=6.*capture this"):
        graph.replay({"topk_ids": ids_of(1, 2)}, table=make_table(num_slots=6))
    with pytest.raises(ValueError, match="another slot table of the same shape"):
        graph.replay({"topk_ids": ids_of(1, 2)}, table=make_table())
    assert int(table.counters_of(0).misses) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"captured for inputs \['topk_ids'\], got \[\]"),
        ({"topk_ids": ids_of(1, 2), "more": ids_of(1)}, "captured for inputs"),
        ({"topk_ids": ids_of(1, 2, 3)}, r"captured for topk_ids.*\(1, 2\).*called with.*\(1, 3\)"),
        ({"topk_ids": ids_of(1, 2).long()}, "int32.*called with.*int64"),
    ],
)
def test_inputs_that_were_not_captured_are_refused(
    inputs: dict[str, torch.Tensor], message: str
) -> None:
    graph, _ = stand_in_capture(make_table())
    with pytest.raises(ValueError, match=message):
        graph.replay(inputs)


def test_a_table_stays_open_while_its_graphs_are() -> None:
    table = make_table()
    graph, _ = stand_in_capture(table)
    with pytest.raises(RuntimeError, match="close the captured graphs of this slot table before"):
        table.close()
    graph.close()
    table.close()
    assert table.is_closed


@pytest.mark.skipif(ON_GPU, reason="there is a CUDA device")
def test_a_capture_without_a_cuda_device_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device, the slot table is on"):
        GraphCapture(make_table())


@pytest.mark.gpu
def test_a_graph_captured_of_one_table_refuses_another_and_ends_with_close() -> None:
    table = make_table()

    def step(topk_ids: torch.Tensor) -> torch.Tensor:
        table.advance()
        return table.resolve(0, topk_ids)

    graph = GraphCapture(table).run(step, {"topk_ids": ids_of(0, 0)})
    out = graph.replay({"topk_ids": ids_of(5, 6)}, table=table)
    assert out is not None
    assert out.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="capture this shape first"):
        graph.replay({"topk_ids": ids_of(5, 6)}, table=make_table(num_slots=6))
    graph.close()
    with pytest.raises(RuntimeError, match="graph is closed"):
        graph.replay({"topk_ids": ids_of(5, 6)})
    table.close()


@pytest.mark.gpu
def test_a_step_that_does_not_join_its_branch_is_refused() -> None:
    table = make_table()
    branch = PrefetchBranch(DEVICE)

    def step(topk_ids: torch.Tensor) -> torch.Tensor:
        if not branch.is_forked:
            with branch.fork():
                table.advance()
        return table.resolve(0, topk_ids)

    with pytest.raises(
        RuntimeError, match=r"not joined after the warm-up of the capture.*join\(\)"
    ):
        GraphCapture(table, branch=branch).run(step, {"topk_ids": ids_of(0, 0)})
    with pytest.raises(RuntimeError, match="not joined before the capture"):
        GraphCapture(table, branch=branch).run(step, {"topk_ids": ids_of(0, 0)})
    branch.join()
