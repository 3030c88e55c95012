"""A refusal reaches the command that started vLLM, and is lost nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefetch_runtime.refusals import REFUSAL_VARIABLE, collected, told

ROOT = Path(__file__).resolve().parent.parent


@told(ValueError)
def refuse(error: Exception) -> None:
    """What a worker's method does."""
    raise error


def test_a_refusal_of_another_process_is_read_in_one_line() -> None:
    code = (
        "from prefetch_runtime.refusals import told\n"
        "with told(KeyError, ValueError):\n    raise ValueError('a\\n  b')"
    )
    with collected() as path:
        finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
        assert path.read_text() == "a b"
    assert b"ValueError" in finished.stderr, "the error goes on as it is"
    assert not path.exists()
    assert REFUSAL_VARIABLE not in os.environ


def test_other_errors_are_no_refusals() -> None:
    with collected() as path:
        with pytest.raises(RuntimeError):
            refuse(RuntimeError("out of memory"))
        assert path.read_text() == ""
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                refuse(ValueError("no"))
        assert path.read_text() == "no"


def test_nothing_happens_where_nobody_asked() -> None:
    with pytest.raises(ValueError, match="no"):
        refuse(ValueError("no"))


def test_a_file_that_cannot_be_written_loses_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFUSAL_VARIABLE, "/proc/no/such/file")
    with pytest.raises(ValueError, match="no"):
        refuse(ValueError("no"))


def test_collecting_within_collecting_gives_back_the_outer_file() -> None:
    with collected() as outer, collected() as inner:
        assert outer != inner
    with collected() as outer:
        with collected():
            pass
        with pytest.raises(ValueError, match="no"):
            refuse(ValueError("no"))
        assert outer.read_text() == "no"
