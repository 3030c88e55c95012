"""Offline generation in a child process: what it is told, and how its failures come back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime import offline
from prefetch_runtime.config import ConfigError
from prefetch_runtime.offline import WORKER_CLS, Generation, GenerationError, empty_log, generate

ROOT = Path(__file__).resolve().parents[1]

PRELUDE = "import json, os, sys\nspec = json.load(open(sys.argv[1]))\n"
ECHO = """
rpc = {"prefetch_stats": None} if spec["rpc"] else {}
result = {"texts": ["x"], "token_ids": [[1, 2, 3]], "seconds": 0.5, "rpc": rpc}
json.dump(result, open(sys.argv[2], "w"))
json.dump({"spec": spec, "env": dict(os.environ)}, open(LOG + ".seen", "w"))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "engine.log"


@pytest.fixture
def script(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program in place of the one that runs vLLM."""

    def use(program: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + program.replace("LOG", repr(str(log))))
        monkeypatch.setattr(offline, "SCRIPT", path)

    return use


def _generate(log: Path, settings: dict[str, Any] | None = None, **options: Any) -> Generation:
    return generate("m", ["a"], settings=settings, log=log, max_tokens=3, **options)


def _seen(log: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(Path(f"{log}.seen").read_text())
    return seen


def test_a_run_with_settings_names_our_worker_and_asks_for_its_counters(
    log: Path, script: Callable[[str], None]
) -> None:
    script(ECHO)
    result = _generate(log, {"slots_per_layer": 8}, engine_options={"max_model_len": 64})
    assert (result.num_tokens, result.stats) == (3, None)
    spec = _seen(log)["spec"]
    assert spec["llm"] == {
        "model": "m",
        "disable_log_stats": True,
        "max_model_len": 64,
        "worker_cls": WORKER_CLS,
        "additional_config": {"prefetch_runtime": {"slots_per_layer": 8}},
    }
    assert spec["rpc"] == [["prefetch_stats"]]
    assert spec["sampling"] == {"temperature": 0.0, "max_tokens": 3, "ignore_eos": False}


def test_a_run_without_settings_says_nothing_of_us(
    log: Path, script: Callable[[str], None]
) -> None:
    script(ECHO)
    _generate(log)
    spec = _seen(log)["spec"]
    assert spec["llm"] == {"model": "m", "disable_log_stats": True}
    assert spec["rpc"] == []


def test_the_callers_environment_has_the_last_word(
    log: Path, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(ECHO)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    _generate(log)
    env = _seen(log)["env"]
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert env["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ.get("VLLM_NO_USAGE_STATS") is None


def test_the_engines_output_is_appended_to_the_log(
    log: Path, script: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    script("print('to stdout')\nprint('to stderr', file=sys.stderr)\n" + ECHO)
    _generate(log)
    _generate(log)
    assert log.read_text().count("to stdout") == 2
    assert log.read_text().count("to stderr") == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        pytest.param(
            "json.dump({'error': 'ValueError: no'}, open(sys.argv[2], 'w'))\nsys.exit(1)",
            "ValueError: no (engine log: ",
            id="error",
        ),
        pytest.param(
            "sys.exit(3)", "the engine's process ended with status 3; its log is ", id="3"
        ),
        pytest.param("os.kill(os.getpid(), 9)", "ended with status -9", id="killed"),
        pytest.param("", "ended with status 0", id="no result"),
        pytest.param(ECHO + "os.kill(os.getpid(), 9)", "ended with status -9", id="killed late"),
        pytest.param(
            "open(sys.argv[2], 'w').write('{\"texts\": [')\nos.kill(os.getpid(), 9)",
            "ended with status -9",
            id="killed while writing",
        ),
    ],
)
def test_a_failed_engine_is_an_error_that_says_why(
    program: str, message: str, log: Path, script: Callable[[str], None]
) -> None:
    script(program)
    with pytest.raises(GenerationError) as error:
        _generate(log)
    assert message in str(error.value)
    assert str(log) in str(error.value)


def test_a_log_is_emptied_and_nothing_but_a_plain_file_is_touched(tmp_path: Path) -> None:
    log = tmp_path / "new" / "engine.log"
    empty_log(log)
    log.write_text("of an earlier run")
    empty_log(log)
    assert log.read_bytes() == b""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path):
        with pytest.raises(ConfigError, match="is no plain file; name another one"):
            empty_log(path)
    assert fifo.exists()
    for path in (log / "below", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="--log: cannot write"):
            empty_log(path)


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_terminated_takes_its_engine_along(
    ends: signal.Signals, tmp_path: Path
) -> None:
    child = tmp_path / "engine.py"
    child.write_text("import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    script = (
        "import sys; from pathlib import Path; import prefetch_runtime.offline as o;"
        "from prefetch_runtime import cli;"
        f"o.SCRIPT = Path({str(child)!r});"
        "sys.argv = ['prefetch-runtime', 'generate', 'models/tiny-moe', '-p', 'a', '--log', "
        f"{str(tmp_path / 'log')!r}]; cli.main()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT)
    try:
        log = tmp_path / "log"
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().strip()):
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.05)
        engine = int(log.read_text())
        command.send_signal(ends)
        assert command.wait(30) == 128 + ends
    finally:
        command.kill()
        command.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert not list(tmp_path.glob("prefetch-runtime-*"))
