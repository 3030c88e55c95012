"""The table of what prediction saves: its arms on a CPU device, with interpreted kernels."""

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks.prefetch_table import (
    Arms,
    budgets_of,
    main,
    rows_of,
    stall_ratio,
    table,
    tensors_of,
)
from predictors import PredictorShape, create_predictor
from prefetch_runtime.device_scheduler import DeviceScheduler
from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.routing_generator import create_routing_model, generate_routing
from tests.helpers.small_cache import CPU, LAYOUT, small_cache

LAYERS, EXPERTS, SLOTS, TOP_K, BATCH, STEPS = 3, 12, 6, 2, 2, 12

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without interpreter these kernels need device memory"
)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    cache = small_cache(EXPERTS, SLOTS, num_layers=LAYERS, scheduler_class=DeviceScheduler)
    scheduler = cache.scheduler
    assert isinstance(scheduler, DeviceScheduler)
    scheduler.seal()
    shape = PredictorShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    scheduler.predict_on_device(create_predictor("next_gate", shape))
    model = create_routing_model(
        "qwen3-30b-a3b", num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, accuracy=0.5
    )
    trace = generate_routing(model, STEPS, batch_size=BATCH, seed=3)
    routing, guesses, oracle = tensors_of(trace, BATCH)
    assert routing.shape == (STEPS, LAYERS, BATCH, TOP_K)
    assert guesses.shape == oracle.shape == (STEPS, LAYERS - 1, BATCH, 2 * TOP_K)
    assert (oracle[:, :, :, :TOP_K] == routing[:, 1:]).all()
    assert routing[3, 1, 1].tolist() == trace.topk[3 * BATCH + 1, 1].tolist()
    injection = RoutingInjection(routing, CPU, guesses=guesses)
    nothing = torch.zeros(BATCH, TOP_K, dtype=torch.int32)

    def step() -> None:
        for layer_idx in range(LAYERS):
            if layer_idx == 0:
                injection.advance()
            guess = None
            if layer_idx + 1 < LAYERS:
                guess = lambda at=layer_idx: injection.guess(at, BATCH)  # noqa: E731
            scheduler.fetch(layer_idx, injection.replace(layer_idx, nothing), guesses=guess)

    arms = Arms(scheduler, injection, step)
    one = [LAYOUT.payload_bytes] * LAYERS
    measured = {}
    for name, named, budgets in (
        ("none", guesses, [0] * LAYERS),
        ("next_gate", guesses, one),
        ("oracle", oracle, one),
        ("auto", guesses, None),
        ("again", guesses, [0] * LAYERS),
    ):
        row = arms.measure(routing, named, warm=2, steps=STEPS - 2, budgets=budgets)
        measured[name] = {"slots": SLOTS, "batch": BATCH, "routing": "some", **row}
    return measured


def test_every_arm_starts_from_the_same_state(rows: dict[str, dict[str, Any]]) -> None:
    for counter in ("hits", "misses", "bytes_copied"):
        assert rows["again"][counter] == rows["none"][counter]


def test_the_oracle_is_right_and_the_next_gate_sometimes(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["none"]["prefetched"] == 0
    assert rows["oracle"]["prefetch_at_once"] == rows["oracle"]["prefetched"] > 0
    assert 0 < rows["next_gate"]["prefetch_at_once"] < rows["next_gate"]["prefetched"]
    assert rows["oracle"]["misses"] < rows["next_gate"]["misses"] < rows["none"]["misses"]


def test_the_controller_has_the_budgets(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["auto"]["budgets"] == [0, LAYOUT.payload_bytes, LAYOUT.payload_bytes]
    assert rows["auto"]["prefetched"] > 0


def test_a_budget_is_the_window_at_the_speed_of_demanded_copies() -> None:
    row = {"bytes_copied": 4e6, "stall_seconds": 2e-4, "windows_s": [0.0, 1e-4]}
    assert budgets_of(row) == [0, 2_000_000]


def test_the_stall_ratio_compares_with_the_oracle() -> None:
    def arm(predictor: str, stall_seconds: float) -> dict[str, Any]:
        return {"predictor": predictor, "stall_seconds": stall_seconds}

    arms = [arm("none", 5.0), arm("next_gate", 3.5), arm("oracle", 3.0)]
    assert stall_ratio(arms) == 0.75
    assert stall_ratio(arms[:2]) is None
    assert stall_ratio([arm("none", 3.0), *arms[1:]]) is None


def test_the_simulated_table_has_a_row_for_each_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--simulate",
        "--layers",
        "3",
        "--slots",
        "32",
        "--batches",
        "1",
        "--steps",
        "30",
        "--warm",
        "10",
    ]
    monkeypatch.setattr(sys, "argv", ["prefetch_table.py", *given])
    assert main() == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line, size in zip(lines, ("9.4 MB", "2.4 MB"), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == head.count("|") - 1
        assert cells[:3] == [size, "32", "1"]
        none, next_gate, oracle = map(float, cells[3].split(","))
        assert none > next_gate >= oracle > 0
        assert 0.9 < float(cells[5]) < 1.1


def test_the_table_is_made_of_files_of_rows(
    rows: dict[str, dict[str, Any]],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [{"predictor": name, **row} for name, row in rows.items()]
    for row, stall in zip(named, (5.0, 3.5, 3.0, 3.4, 5.0), strict=True):
        row["stall_seconds"] = stall
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(named[:2]))
    files[1].write_text(json.dumps(named[2:]))
    monkeypatch.setattr(sys, "argv", ["prefetch_table.py", "--table", *map(str, files)])
    assert main() == 0
    printed = capsys.readouterr().out
    assert printed == table(named) + "\n"
    assert "| stall removed, of the oracle's | 0.75 | 0.6 |" in printed
    assert "| step, auto / none |" in printed


class Engine:
    """In place of `engines.Child`: says what it was given, one after another."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.row: dict[str, Any] = {"engine": "cache-768:32:hook"}
        self.said = list(said)

    def go_on(self) -> None:
        self.row |= self.said.pop(0)


def test_an_engine_is_measured_until_it_has_finished() -> None:
    child = Engine({"batch": 1}, {"batch": 4}, {"finished": True})
    assert [row["batch"] for row in rows_of(child, float("inf"))] == [1, 4]
    assert "failed" not in child.row


def test_an_engine_that_fails_keeps_its_rows_and_says_why() -> None:
    child = Engine({"batch": 1}, {"failed": "ValueError"}, {"batch": 4})
    assert [row["batch"] for row in rows_of(child, float("inf"))] == [1]
    assert child.said


def test_an_engine_without_time_has_failed() -> None:
    child = Engine({"batch": 1})
    assert list(rows_of(child, 0.0)) == []
    assert "no time left" in child.row["failed"]
