"""The two processes of `make test`: together they run every test, and one that fails fails both."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import run_tests

ROOT = Path(__file__).resolve().parent.parent


def files_of(arguments: list[str]) -> set[str]:
    """The test files that pytest would collect."""
    given = [argument for argument in arguments if not argument.startswith("-")]
    ignored = {a.removeprefix("--ignore=") for a in arguments if a.startswith("--ignore=")}
    roots = [ROOT / name for name in given if (ROOT / name).is_dir()]
    found = {
        str(file.relative_to(ROOT))
        for root in roots
        for pattern in ("test_*.py", "bench_*.py")
        for file in root.rglob(pattern)
    }
    assert ignored <= found, "what is left out is there"
    return found - ignored


def test_every_test_file_is_in_one_process_and_no_more() -> None:
    others, engines = map(files_of, run_tests.parts().values())
    assert not others & engines
    assert others | engines == files_of(["tests", "benchmarks"])
    assert {"tests/engine/test_exactness.py", "tests/engine/test_families.py"} <= engines
    assert {
        "tests/test_slots.py",
        "tests/engine/test_demo.py",
        "benchmarks/bench_copy.py",
    } <= others


def test_threads_are_shared_out_and_what_is_given_wins() -> None:
    def threads(cores: int, together: bool, **given: str) -> str | None:
        return run_tests.environment(cores, together, given).get("OMP_NUM_THREADS")

    assert (threads(8, True), threads(3, True), threads(1, True)) == ("4", "1", "1")
    assert threads(8, False) is None
    assert threads(8, True, OMP_NUM_THREADS="3") == "3"
    assert run_tests.environment(2, True, {"HOME": "/h"})["HOME"] == "/h"


def saying(text: str, status: int = 0, wait_s: float = 0.0) -> list[str]:
    code = (
        f"import sys, time; print({text!r} + ' begins', flush=True); time.sleep({wait_s}); "
        f"print({text!r} + ' ends'); sys.exit({status})"
    )
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("together", [True, False], ids=["together", "in turn"])
@pytest.mark.parametrize("statuses", [(0, 0), (1, 0), (0, 1), (0, 5)], ids=str)
def test_both_run_to_their_end_and_their_output_is_not_mixed(
    statuses: tuple[int, int], together: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {"one": saying("one", statuses[0], 0.3), "two": saying("two", statuses[1], 0.1)}
    found = run_tests.run(commands, together, os.environ)
    assert found == dict(zip(commands, statuses, strict=True))
    said = re.findall(r"(?:one|two) (?:begins|ends)", capfd.readouterr().out)
    assert said == ["one begins", "one ends", "two begins", "two ends"]


def test_one_that_fails_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for statuses, expected in (([0, 0], 0), ([0, 1], 1), ([2, 0], 1), ([0], 1)):
        names = ["the others", "engines"][: len(statuses)]
        result = dict(zip(names, statuses, strict=True))
        monkeypatch.setattr(run_tests, "run", lambda *_, result=result: result)
        assert run_tests.main() == expected
    assert "the others failed (2), engines passed" in capsys.readouterr().out


def test_together_takes_as_long_as_the_longer() -> None:
    started = time.monotonic()
    commands = {name: saying(name, wait_s=2.0) for name in ("one", "two")}
    run_tests.run(commands, True, os.environ)
    assert time.monotonic() - started < 3.9


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]
    code = (
        "import os; from scripts import run_tests; "
        f"print(run_tests.run({{'one': {waiting!r}, 'two': {waiting!r}}}, True, os.environ))"
    )
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )
        deadline = time.monotonic() + 20
        while b"up" not in (tmp_path / "out").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # the second is up, too
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=20) == 0
    text = (tmp_path / "out").read_text()
    assert re.search(r"\{'one': -?[1-9]\d*, 'two': -?[1-9]\d*\}", text), text
