"""vLLM with its engine and worker in their own processes, and what is left when one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefetch_runtime.stats import RuntimeStats
from tests.engine.conftest import BATCHES, CACHED, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def separate(
    tmp_path_factory: pytest.TempPathFactory, engine_environment: dict[str, str]
) -> dict[str, Any]:
    """What `separate.py` saw, and what was still running when it had ended."""
    folder = tmp_path_factory.mktemp("separate")
    spec_path, out, log = folder / "spec.json", folder / "out.json", folder / "log"
    (engine,) = [engine for engine in CACHED if engine["name"] == "lru-8"]
    batch = BATCHES[0]
    spec = {
        "llm": engine["llm"],
        "prompt": batch["prompts"][0],
        "max_tokens": batch["max_tokens"],
    }
    spec_path.write_text(json.dumps(spec))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.separate", str(spec_path), str(out)],
            cwd=ROOT,
            env=engine_environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout=500)
        except subprocess.TimeoutExpired:
            status = "a timeout"
        finally:
            left = _still_running(process.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        pytest.fail(f"ended with {status}:\n{log.read_text(errors='replace')[-6000:]}")
    result: dict[str, Any] = json.loads(Path(out).read_text())
    return {**result, "left": left}


def _still_running(session: int, patience_s: float = 10.0) -> list[int]:
    """Processes of a session that do not end by themselves."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [pid for pid in psutil.pids() if _belongs(pid, session)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _belongs(pid: int, session: int) -> bool:
    try:
        alive = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return alive and os.getsid(pid) == session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def test_tokens_are_those_of_resident_experts(
    separate: dict[str, Any], resident: dict[str, Any]
) -> None:
    assert [separate["tokens"]] == resident["one-short"]["tokens"]


def test_the_worker_reports_its_cache_over_rpc(separate: dict[str, Any]) -> None:
    stats = RuntimeStats.from_dict(separate["stats"])
    assert [layer.num_slots for layer in stats.layers] == [8] * 8
    assert stats.total("evictions") > 0
    assert separate["audit"] == []


def test_a_killed_worker_fails_its_request_at_once(separate: dict[str, Any]) -> None:
    assert separate["failure"] == "EngineDeadError"
    assert separate["steps"] >= 3
    assert separate["seconds"] < 30


def test_a_killed_worker_leaves_no_process_behind(separate: dict[str, Any]) -> None:
    assert len(separate["children"]) >= 2
    assert separate["left"] == []
