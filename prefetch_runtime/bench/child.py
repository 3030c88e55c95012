"""One case in a process of its own, with a time limit; nothing of it outlives the call."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefetch_runtime.bench.interrupts import interrupts
from prefetch_runtime.config import METRICS_FOLDER_VARIABLE

SCRIPT = Path(__file__).resolve().parent.parent / "vllm" / "bench_engine.py"
_GRACE_S = 3.0
"""Between the polite signal and the one that cannot be ignored."""
_running: set[int] = set()
"""Groups of processes that `run_process` has started and not ended."""


class Turn:
    """Has a case that has loaded wait while others load or are timed; its time limit waits, too.

    Once timed it waits again, until all have been: what a process of many pinned GiB needs to end
    is added to no other's time, and they end together (`end_kept`).
    """

    def __init__(self, folder: Path, deadline: float | None = None) -> None:
        """`folder`: an empty one of this case's own; `deadline`, by the monotonic clock, ends the
        case even while it waits."""
        self.folder = folder
        self.deadline = math.inf if deadline is None else deadline
        self.ended = threading.Event()
        """Set by who runs the case when it is over; or before, to end it."""
        self.kept: subprocess.Popen[bytes] | None = None
        """The process, once it has been timed and waits for the others."""

    @property
    def has_loaded(self) -> bool:
        """The engine is ready to be timed."""
        return Path(self.folder, "loaded").exists()

    def go(self) -> None:
        """Let it be timed."""
        Path(self.folder, "go").touch()

    @property
    def is_timed(self) -> bool:
        """All that was to be measured has been."""
        return Path(self.folder, "timed").exists()

    @property
    def waits(self) -> bool:
        """It is ready, and has not been told to go on."""
        return self.has_loaded and not Path(self.folder, "go").exists()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child left."""

    status: str
    """"ok", "failed", "timeout", "refused" or "not run"."""
    reason: str | None = None
    """Why it is not "ok"."""
    loaded: Mapping[str, Any] | None = None
    batches: Sequence[Mapping[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a case ran; `outcome` is what it had measured."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def run_case(
    spec: Mapping[str, Any],
    *,
    limit_s: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    turn: Turn | None = None,
) -> Outcome:
    """Time an engine as `vllm/bench_engine.py` does; its output goes to `log`.

    Raises:
        Interrupted: on Ctrl-C, once the engine is gone.
    """
    started = time.monotonic()
    if turn is not None:
        spec = {**spec, "turn": str(turn.folder)}
    with tempfile.TemporaryDirectory(prefix="prefetch-runtime-bench-") as folder:
        spec_path, events_path = Path(folder, "spec.json"), Path(folder, "events.jsonl")
        metrics = {}
        if spec["metrics"]:  # must be there before the engine imports prometheus_client
            Path(folder, "metrics").mkdir()
            metrics[METRICS_FOLDER_VARIABLE] = str(Path(folder, "metrics"))
        spec_path.write_text(json.dumps(spec))
        interrupted = False
        status = None
        try:
            status = run_process(
                [sys.executable, "-P", str(SCRIPT), str(spec_path), str(events_path)],
                limit_s=limit_s,
                log=log,
                environment={
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    **os.environ,
                    **metrics,
                    **(environment or {}),
                },
                turn=turn,
            )
        except KeyboardInterrupt:
            interrupted = True
        events = _events(events_path)
    seconds = time.monotonic() - started
    stage = next((e["name"] for e in reversed(events) if e["event"] == "stage"), "starting")
    error = next((e for e in events if e["event"] == "error"), None)
    ended = any(e["event"] == "end" for e in events)
    if status is None:
        verdict, reason = "timeout", f"time limit of {seconds_of(limit_s)} reached while {stage}"
    elif error is not None:
        verdict, reason = "failed", f"while {error['stage']}: {plain(str(error['message']))}"
    elif not ended:
        verdict, reason = "failed", f"while {stage}: {_death(status, log)}"
    else:
        verdict, reason = "ok", None
    if interrupted:
        verdict, reason = "not run", f"interrupted while {stage}"
    outcome = Outcome(
        verdict,
        reason,
        next((e for e in events if e["event"] == "loaded"), None),
        [e for e in events if e["event"] == "batch"],
        seconds,
    )
    if interrupted:
        raise Interrupted(outcome)
    return outcome


def run_process(
    command: Sequence[str],
    *,
    limit_s: float,
    log: Path,
    environment: Mapping[str, str],
    turn: Turn | None = None,
) -> int | None:
    """Run a command and end it, with all it started, when the time is up or we are interrupted.

    With a turn, a process that has been timed is kept there, for `end_kept` to end.

    Returns:
        The exit status, 0 for one that is kept, or None when the time was up.
    """
    process = None
    try:
        with log.open("ab") as output, interrupts.held():
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C comes to us, and we end the whole group
            )
            _running.add(process.pid)
        if turn is None:
            return process.wait(timeout=limit_s)
        return _wait(process, turn, limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process is not None and (turn is None or turn.kept is not process):
            _end(process)


def end_kept(turns: Iterable[Turn]) -> None:
    """End the processes that wait although they have been timed, all at once."""
    kept = [(turn, turn.kept) for turn in turns if turn.kept is not None]
    for _, process in kept:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for turn, process in kept:
        _end(process)
        turn.kept = None


def end_all() -> None:
    """End what still runs, at once; who called `run_process` hears of it as of any other end."""
    for group in tuple(_running):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _wait(process: "subprocess.Popen[bytes]", turn: Turn, limit_s: float) -> int | None:
    """As `Popen.wait`, but the time in which the case waits for its turn does not count."""
    left, before = limit_s, time.monotonic()
    while left > 0 and before < turn.deadline and not turn.ended.is_set():
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.1)
        if turn.is_timed:
            turn.kept = process
            return 0
        now = time.monotonic()
        left -= 0.0 if turn.waits else now - before
        before = now
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=_GRACE_S)
    finally:  # whatever interrupts the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _running.discard(process.pid)


def _events(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole; a child that was killed may have left half of one."""
    events = []
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return events


def seconds_of(limit_s: float) -> str:
    """A time limit, without digits that nobody asked for."""
    return f"{limit_s:.0f} s" if limit_s >= 10 else f"{limit_s:g} s"


def plain(message: str) -> str:
    """An engine's error in one line; a model that does not fit is called so."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = " ".join(lines) if len(lines) < 4 else " ".join([lines[0], lines[-1]])
    if re.search(r"out of memory|OutOfMemory|Cannot allocate memory", text, re.IGNORECASE):
        text = f"does not fit: {text}"
    return text[:400]


def _death(status: int, log: Path) -> str:
    """How a process ended that could not say it itself."""
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (killed from outside, as when memory runs out)" if status == -9 else ""
        return f"the engine's process was ended by {name}{hint}; its log is {log}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return f"the engine's process ended with status {status}: {plain(' '.join(last))} (log: {log})"
