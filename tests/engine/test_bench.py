"""The bench through real engines: every part of the harness runs, and what it says is true."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import MODEL, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

QUICK_S = 180
"""What `--quick` may take where nothing else runs."""
ENGINES = "resident,uva,eager+next_gate+metrics,full"


class Ran(NamedTuple):
    """A run of the command."""

    results: dict[str, Any]
    folder: Path
    seconds: float

    def row(self, engine: str, batch: int) -> dict[str, Any]:
        (row,) = (r for r in self.results["rows"] if (r["engine"], r["batch"]) == (engine, batch))
        found: dict[str, Any] = row
        return found


def bench(*arguments: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "prefetch_runtime", "bench", "--json", *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=False,
        timeout=600,
    )
    assert finished.returncode == 0, finished
    results: dict[str, Any] = json.loads(finished.stdout)
    return results


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """`--quick`, with routing injected into vLLM's own engine and into ours."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    started = time.monotonic()
    options = ["--quick", "--model", MODEL, "--engines", ENGINES, "--routing", "calibrated"]
    results = bench(*options, "--out", str(folder))
    return Ran(results, folder, time.monotonic() - started)


def test_every_case_is_a_row(quick: Ran) -> None:
    states = {(row["engine"], row["batch"]): row["status"] for row in quick.results["rows"]}
    assert states == {
        (engine, batch): status
        for batch in (1, 2)
        for engine, status in (
            ("resident", "ok"),
            ("uva", "refused"),
            ("eager+next_gate+metrics", "ok"),
            ("full", "refused"),
        )
    }
    assert quick.seconds < QUICK_S


@pytest.mark.parametrize("batch", [1, 2])
def test_times_are_those_of_the_steps(quick: Ran, batch: int) -> None:
    for engine in ("resident", "eager+next_gate+metrics"):
        row = quick.row(engine, batch)
        assert row["steps"] == 12
        assert 0 < row["tpot_ms"][0] <= row["tpot_ms"][1] <= row["tpot_ms"][2]
        assert 0 < row["ttft_ms"][0] <= row["ttft_ms"][2]
        decoded = row["tokens_per_s"] * row["step_mean_ms"] / 1e3
        assert decoded == pytest.approx(batch, rel=0.01), "a token of each sequence in every step"


def test_ours_reports_its_cache(quick: Ran) -> None:
    row = quick.row("eager+next_gate+metrics", 1)
    assert row["mode"] == "eager"
    # tiny-moe: 8 layers x 32 experts x 48 KiB.
    assert row["host_gib"] * 2**30 == 8 * 32 * 3 * 64 * 128 * 2
    assert row["expert_gib"] < row["host_gib"]
    assert 0.3 < row["hit_rate"] < 1
    assert row["demand_bytes_per_step"] > 0
    assert 0 < row["stall_ms"] < row["step_mean_ms"]
    assert row["prefetch_bytes_per_step"] > 0
    assert row["useful_bytes_per_step"] > row["wasted_bytes_per_step"], (
        "the guesses are the trace's"
    )


def test_the_files_are_there(quick: Ran) -> None:
    names = {path.name for path in quick.folder.iterdir()}
    assert {"rows.jsonl", "results.json", "steps.png", "resident.log"} <= names
    assert quick.results["environment"]["machine"]["versions"]["torch"]


def test_a_second_run_measures_nothing(quick: Ran) -> None:
    started = time.monotonic()
    options = ["--quick", "--model", MODEL, "--engines", ENGINES, "--routing", "calibrated"]
    again = bench(*options, "--out", str(quick.folder))
    assert again["rows"] == quick.results["rows"]
    assert time.monotonic() - started < 60
