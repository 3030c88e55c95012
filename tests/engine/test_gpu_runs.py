"""The harness of the GPU tests: what it records, and how it tells of engines that are lost."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.reference import digest_of
from tests.engine import gpu_runs
from tests.engine.gpu_child import StepRecorder, replay_up_to
from tests.engine.gpu_runs import Plan, assert_same, batch, end_of, engine, run_plans, runs_of

HIDDEN, MOST_TOKENS, NUM_STEPS = 4, 8, 5


class MoERunner(torch.nn.Module):
    """Found by its name, like vLLM's."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def _forward_impl(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


class Worker:
    """What a recorder asks of vLLM's worker."""

    def __init__(self) -> None:
        self.layers = torch.nn.ModuleList(MoERunner(factor) for factor in (1.0, 2.0))
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST_TOKENS),
            model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
        )

    def get_model(self) -> torch.nn.Module:
        return self.layers

    def forward(self, rows: torch.Tensor) -> None:
        for layer in self.layers:
            layer._forward_impl(rows)  # type: ignore[operator]


def rows_of(step: int, tokens: int) -> torch.Tensor:
    return torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN) + 100 * step


class TestStepRecorder:
    @pytest.fixture
    def worker(self) -> Worker:
        return Worker()

    @pytest.fixture
    def recorder(self, worker: Worker) -> StepRecorder:
        recorder = StepRecorder(worker, NUM_STEPS)
        worker.forward(rows_of(9, 3))  # a warm-up, as vLLM runs some
        recorder.begin()
        return recorder

    def test_every_layers_real_rows_are_kept_step_by_step(
        self, worker: Worker, recorder: StepRecorder
    ) -> None:
        worker.forward(rows_of(0, 8))  # five tokens and three rows of padding
        recorder.note({"a": 4, "b": 1})
        worker.forward(rows_of(1, 2))
        recorder.note({"a": 1, "b": 1})
        recorder.note({})  # vLLM gives steps without tokens, too
        taken = recorder.take()
        assert taken["steps"] == [(5, 4, 2), (2, 1, 2)]
        for layer, factor in ((0, 1.0), (1, 2.0)):
            assert taken["layers"][layer] == [
                digest_of(rows_of(0, 8)[:5] * factor),
                digest_of(rows_of(1, 2) * factor),
            ]

    def test_a_replay_counts_no_calls(self, worker: Worker, recorder: StepRecorder) -> None:
        worker.forward(rows_of(0, 1))
        recorder.note({"a": 1})
        recorder._clock.add_(1)  # what a replayed graph would do
        recorder.note({"a": 1})
        assert [calls for _, _, calls in recorder.take()["steps"]] == [2, 0]

    def test_a_step_that_was_not_recorded_is_an_error(
        self, worker: Worker, recorder: StepRecorder
    ) -> None:
        worker.forward(rows_of(0, 1))
        recorder.note({"a": 1})
        recorder.note({"a": 1})
        with pytest.raises(RuntimeError, match="2 steps were given, 1 were recorded"):
            recorder.take()

    def test_more_steps_than_the_ring_holds_are_an_error(
        self, worker: Worker, recorder: StepRecorder
    ) -> None:
        for step in range(NUM_STEPS + 1):
            worker.forward(rows_of(step, 1))
            recorder.note({"a": 1})
        with pytest.raises(RuntimeError, match="6 steps, the ring holds 5"):
            recorder.take()


class _Key(NamedTuple):
    """A description of a graph."""

    num_tokens: int


@pytest.mark.engine
class TestReplayUpTo:
    def test_the_first_runners_graphs_are_left_out_and_come_back(self) -> None:
        from vllm.config import CUDAGraphMode

        full = CUDAGraphMode.FULL
        dispatcher = SimpleNamespace(cudagraph_keys={full: {_Key(1), _Key(2), _Key(8)}})
        worker = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_dispatcher=dispatcher))
        for most, left in ((2, {1, 2}), (1, {1}), (8, {1, 2, 8})):
            replay_up_to(worker, most)
            assert {key.num_tokens for key in dispatcher.cudagraph_keys[full]} == left

    def test_the_second_runners_graphs_too(self) -> None:
        manager = SimpleNamespace(_candidates={(1, 0): [_Key(1)], (2, 0): [_Key(8)]})
        worker = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_manager=manager))
        replay_up_to(worker, 1)
        assert manager._candidates == {(1, 0): [_Key(1)], (2, 0): []}
        replay_up_to(worker, 8)
        assert manager._candidates == {(1, 0): [_Key(1)], (2, 0): [_Key(8)]}


class TestPlans:
    RUNS = (batch("one", [5], 4, seed=1),)

    @pytest.fixture
    def children(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int | str]]:
        """What each child does in turn: the engines that it finishes, and its exit status."""
        script: list[tuple[list[str], int | str]] = []

        def run_child(arguments: Sequence[str], _env: Any, log: Path, _deadline: float) -> Any:
            spec, out = map(Path, arguments)
            given = [engine["name"] for engine in json.loads(spec.read_text())["engines"]]
            finished, status = script.pop(0)
            assert finished == given[: len(finished)], "engines run in order, once"
            log.write_text(f"the log after {given}")
            if finished:
                torch.save({name: {"runs": {"one": {"seconds": 1.0}}} for name in finished}, out)
            return status

        monkeypatch.setattr(gpu_runs, "_run_child", run_child)
        return script

    def records(self, folder: Path, names: str, budget_s: float = 60.0) -> dict[str, Any]:
        engines = [engine(name, self.RUNS) for name in names]
        return run_plans([Plan("plan", engines)], folder, budget_s=budget_s)

    def test_all_engines_of_a_plan_run_in_one_process(
        self, children: list[Any], tmp_path: Path
    ) -> None:
        children.append((["a", "b"], 0))
        assert list(self.records(tmp_path, "ab")) == ["a", "b"]

    def test_an_engine_that_takes_the_process_down_is_told_with_its_log(
        self, children: list[Any], tmp_path: Path
    ) -> None:
        children += [(["a"], 1), (["c"], 0)]
        records = self.records(tmp_path, "abc")
        assert "runs" in records["a"]
        assert "the process ended (1) in engine b:\nthe log after" in records["b"]["error"]
        assert "runs" in records["c"], "the next one runs in a process of its own"

    def test_an_engine_that_broke_the_device_has_its_record_and_the_rest_go_on(
        self, children: list[Any], tmp_path: Path
    ) -> None:
        children += [(["a", "b"], 3), (["c"], 0)]
        records = self.records(tmp_path, "abc")
        assert all("runs" in record for record in records.values())

    def test_engines_that_time_left_no_room_for_are_told(
        self, children: list[Any], tmp_path: Path
    ) -> None:
        records = self.records(tmp_path, "ab", budget_s=0.0)
        assert children == []
        assert "plan plan had no time left" in records["b"]["error"]

    def test_logs_and_a_summary_are_kept_where_the_environment_says(
        self, children: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(gpu_runs.KEEP, str(tmp_path / "kept"))
        children += [(["a"], 1)]
        self.records(tmp_path / "runs", "ab")
        assert "the log after" in (tmp_path / "kept" / "runs-plan.log").read_text()
        summary = json.loads((tmp_path / "kept" / "runs.json").read_text())
        assert summary["a"]["runs"]["one"]["seconds"] == 1.0
        assert "the process ended" in summary["b"]["error"]


class TestLooking:
    def test_a_hang_is_shown_with_what_came_before_it_and_the_main_thread(self) -> None:
        others = "Thread 0x1 (most recent call first):\n" + '  File "x"\n' * 50
        main = "Thread 0x2 (most recent call first):\n" + "\n".join(f"  f{i}" for i in range(60))
        shown = end_of(f"before\nTimeout (0:02:30)!\n{others}\n{main}\n")
        assert shown.startswith("before\n")
        assert "Timeout (0:02:30)!" in shown
        assert "  f0\n" in shown
        assert 'File "x"' not in shown

    def test_another_end_is_shown_as_it_is(self) -> None:
        assert end_of("x" * 9000 + "\nend") == ("x" * 9000 + "\nend")[-6000:]

    def test_runs_of_a_round_are_found_by_their_plain_names(self) -> None:
        record = {"runs": {"2/one": {"tokens": 1}, "16/one": {"tokens": 2}, "2/four": {}}}
        assert runs_of({"a": record}, "a", 2) == {"one": {"tokens": 1}, "four": {}}

    def test_an_error_fails_the_test_that_asks(self) -> None:
        with pytest.raises(pytest.fail.Exception, match="engine a: it broke"):
            runs_of({"a": {"error": "it broke"}}, "a")

    def test_differences_are_told(self) -> None:
        reference = {"one": {"tokens": [[1, 2]], "layers": {0: ["x", "y"]}}}
        assert_same(reference, {**reference, "more": {}})
        ours = {"one": {"tokens": [[1, 2]], "layers": {0: ["x", "z"]}}}
        with pytest.raises(AssertionError, match="one: layer 0: forward 1: output differs"):
            assert_same(ours, reference)
