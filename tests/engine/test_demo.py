"""The demo through real engines: its verdict is yes, and no when it should be."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefetch_runtime import cli
from prefetch_runtime import demo as demo_module
from prefetch_runtime.demo import run_demo
from prefetch_runtime.offline import Generation, generate
from tests.engine.conftest import CORRUPTING, MODEL, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 16


@pytest.fixture(scope="module")
def residents() -> list[Generation]:
    """What vLLM alone has generated; one start of it serves both tests."""
    return []


@pytest.fixture
def demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residents: list[Generation]
) -> Callable[[], tuple[int, list[str]]]:
    """Runs the demo; returns its exit status and what it printed."""

    def once(*args: Any, settings: Mapping[str, Any] | None, **more: Any) -> Generation:
        if settings is not None:
            return generate(*args, settings=settings, **more)
        if not residents:
            residents.append(generate(*args, settings=None, **more))
        return residents[0]

    monkeypatch.setattr(demo_module, "generate", once)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the corrupting worker is found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    log = tmp_path / "demo.log"

    def run() -> tuple[int, list[str]]:
        arguments = ["demo", "--model", MODEL, "--max-tokens", str(TOKENS), "--log", str(log)]
        ran = CliRunner().invoke(cli.app, arguments)
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception
        return ran.exit_code, ran.stdout.splitlines()

    return run


def test_the_verdict_is_yes_with_all_threads(
    demo: Callable[[], tuple[int, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    status, lines = demo()
    log = (tmp_path / "demo.log").read_text()
    assert "Expert cache: mode 'eager', for mode 'full' needs a CUDA device" in log
    assert "Expert cache: 8 of 32 experts per MoE layer on the device" in log
    assert "mode eager, policy lru, predictor next_gate\n" in log
    assert lines[-1] == f"identical: yes, {4 * TOKENS} tokens"
    assert status == 0
    assert any("mode eager: mode 'full' needs a CUDA device" in line for line in lines)
    assert any("8/32" in line for line in lines), "the counters are printed"
    heads = next(line.split() for line in lines if "layer" in line and "stall" in line)
    total = next(line.split() for line in lines if line.strip().startswith("all"))
    used = heads.index("used") - len(heads)
    assert int(total[used]) > 0, "prefetched experts are demanded"


def test_a_wrong_mapping_makes_the_verdict_no_and_the_exit_status_1(
    demo: Callable[[], tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_demo", partial(run_demo, worker_cls=CORRUPTING))
    status, lines = demo()
    assert lines[-1].startswith("identical: no, prompt ")
    assert status == 1
