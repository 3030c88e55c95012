"""Runs every test, and one call of every benchmark, as two pytest processes side by side.

    python scripts/run_tests.py

Most of the time goes into engine starts, which use one core each. So the tests of `tests/engine`
run beside all others, but for some that go with those, to make the two take about as long. The
output of the others is shown as it comes, that of the engines' behind it. Exit status 0 if both
passed. One after the other on a GPU machine, which engines fill and some tests time, and on one
core.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = "tests/engine"
WITH_THE_OTHERS = [f"{ENGINES}/test_{name}.py" for name in ("bench", "demo", "segmented_on_cpu")]
OTHERS = ["tests", "benchmarks", "--benchmark-disable"]


def parts() -> dict[str, list[str]]:
    """pytest's arguments for each process."""
    left_out = [f"--ignore={file}" for file in WITH_THE_OTHERS]
    engines = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / ENGINES).glob("test_*.py"))
        if str(file.relative_to(ROOT)) not in WITH_THE_OTHERS
    ]
    return {
        "the others": [*OTHERS, *(f"--ignore={file}" for file in engines)],
        # Its own cache: each process writes down what failed last.
        "engines": [ENGINES, *left_out, "-o", "cache_dir=.pytest_cache/engines"],
    }


def environment(cores: int, together: bool, given: Mapping[str, str]) -> dict[str, str]:
    """With two processes: threads of torch and vLLM that do not wait for the other's cores."""
    threads = {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return {**(threads if together else {}), **given, "PYTHONUNBUFFERED": "1"}


def has_gpu() -> bool:
    """Whether `nvidia-smi` works, as `scripts/setup.sh` asks."""
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found], capture_output=True).returncode == 0


def run(
    commands: Mapping[str, list[str]], together: bool, env: Mapping[str, str]
) -> dict[str, int]:
    """The exit status of each command; output in the order of `commands`, none of it mixed."""
    running: dict[str, tuple[subprocess.Popen[bytes], Path | None]] = {}
    statuses: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="prefetch-runtime-tests-") as folder:
        try:
            for index, (name, command) in enumerate(commands.items()):
                log = Path(folder, str(index)) if together and index else None
                running[name] = (_start(command, log, env), log)
                if not together:
                    statuses[name] = _finish(name, *running[name])
            for name, (process, log) in running.items():
                if name not in statuses:
                    statuses[name] = _finish(name, process, log)
        except KeyboardInterrupt:  # a terminal has told the processes, too
            for name, (process, log) in running.items():
                statuses[name] = process.wait() or 130
                _show(log, 0)
        finally:
            for process, _ in running.values():
                if process.poll() is None:
                    process.terminate()
                    process.wait()
    return statuses


def _start(command: list[str], log: Path | None, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if log is None:
        return subprocess.Popen(command, cwd=ROOT, env=env)
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)


def _finish(name: str, process: subprocess.Popen[bytes], log: Path | None) -> int:
    """Show what a process says until it has ended."""
    at = 0
    if log is not None:
        print(f"\n=== {name}, beside the above ===", flush=True)
        while process.poll() is None:
            at = _show(log, at)
            time.sleep(0.2)
    status = process.wait()
    _show(log, at)
    return status


def _show(log: Path | None, at: int) -> int:
    """Print a log from a byte on; where it ends now."""
    if log is None:
        return at
    with log.open("rb") as file:
        file.seek(at)
        text = file.read()
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    return at + len(text)


def main() -> int:
    """Run both parts; 1 if one of them failed."""
    cores = len(os.sched_getaffinity(0))
    together = cores > 1 and not has_gpu()
    color = ["--color=yes"] if sys.stdout.isatty() else []
    commands = {
        name: [sys.executable, "-m", "pytest", *color, *arguments]
        for name, arguments in parts().items()
    }
    started = time.monotonic()
    env = environment(cores, together, os.environ)
    statuses = run(commands, together, env)
    took = time.monotonic() - started
    said = ", ".join(
        f"{name} {'passed' if s == 0 else f'failed ({s})'}" for name, s in statuses.items()
    )
    print(f"\ntests: {said}; {took:.0f} s", flush=True)
    return int(len(statuses) < len(commands) or any(statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
