"""However often Ctrl-C comes, and whenever: no engine is left, and the end is near."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime.bench import child
from prefetch_runtime.bench.interrupts import Interrupts, interrupts

ROOT = Path(__file__).resolve().parent.parent

STUBBORN = """\
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
Path({folder!r}, str(os.getpid())).touch()
time.sleep(60)
"""
"""An engine that takes no hint, and starts a process more."""

BENCH = """\
import sys
from pathlib import Path
from prefetch_runtime import cli
from prefetch_runtime.bench import child, environment
child.SCRIPT = Path({engine!r})
environment.look_around = lambda: {{"code": "abc", "command": [], "machine": {{"versions": {{}}}}}}
sys.argv = ["prefetch-runtime", "bench", {config!r}, "--out", {out!r}]
cli.main()
"""


@pytest.mark.parametrize(
    ("side_by_side", "number", "pauses_s"),
    [
        (1, signal.SIGINT, (0.3, 0.3)),
        (3, signal.SIGINT, (0.001, 0.001)),
        (3, signal.SIGINT, (0.3, 0.3)),
        (3, signal.SIGTERM, (0.1, 0.1, 0.1)),
    ],
    ids=str,
)
def test_no_engine_outlives_a_bench_that_is_interrupted_often(
    side_by_side: int, number: signal.Signals, pauses_s: tuple[float, ...], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    engine, config = tmp_path / "engine.py", tmp_path / "bench.toml"
    engine.write_text(STUBBORN.format(folder=str(pids)))
    config.write_text(
        f'model = "{ROOT / "models" / "tiny-moe"}"\nengines = ["eager"]\nslots = [4, 8, 16]\n'
        f"batches = [1]\nside_by_side = {side_by_side}\n"
    )
    script = BENCH.format(engine=str(engine), config=str(config), out=str(tmp_path / "out"))
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while len(list(pids.iterdir())) < 2 * side_by_side:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal(number)
        for pause in pauses_s:
            time.sleep(pause)
            process.send_signal(number)
        # A signal to a process that is about to end anyhow has the interpreter end by it.
        assert process.wait(20) in (128 + number, -number)
        assert time.monotonic() - started < 10
        assert not [pid.name for pid in pids.iterdir() if runs(int(pid.name))]
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        for pid in pids.iterdir():
            if runs(int(pid.name)):
                os.kill(int(pid.name), signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def raising(ended: list[str]) -> Iterator[Interrupts]:
    guard = Interrupts()
    with guard.once(lambda: ended.append("end")):
        yield guard


def test_only_the_first_signal_is_raised() -> None:
    ended: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with raising(ended):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert ended == ["end"] * 2
    assert ended == ["end"] * 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_raised_again_when_the_end_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raising([]):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        later = time.monotonic() + 11
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_waits_for_the_start_of_a_process() -> None:
    steps: list[str] = []
    with raising([]) as guard:

        def start() -> None:
            with guard.held():
                signal.raise_signal(signal.SIGINT)
                steps.append("started")

        with pytest.raises(KeyboardInterrupt):
            start()
        steps.append("raised")
    assert steps == ["started", "raised"]


def test_an_interrupt_while_an_engine_is_being_started_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)  # nobody knows of it yet

    monkeypatch.setattr(child.subprocess, "Popen", Interrupted)
    with interrupts.once(child.end_all), pytest.raises(KeyboardInterrupt):
        child.run_process(["sleep", "60"], limit_s=30, log=tmp_path / "log", environment={})
    assert started[0].returncode is not None
    assert not child._running


def test_one_inside_another_changes_nothing() -> None:
    ended: list[str] = []
    with raising(ended) as guard:
        with guard.once(lambda: ended.append("inner")):
            pass
        assert ended == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_has_no_signals() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with raising([]) as guard, guard.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raising([]):
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
