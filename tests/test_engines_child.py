"""A process of `benchmarks/engines.py`: its rows, its limit, and what is kept when it is killed."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
HEAD = "import sys, time\nsay = lambda text: print(text, flush=True)\n"


Started = Callable[..., Any]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Starts `Child` with a program in the engine's place."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # its modules are scripts
    engines = importlib.import_module("engines")

    def start(body: str, limit_s: float = 30.0) -> Any:
        script = tmp_path / f"child-{len(list(tmp_path.iterdir()))}.py"
        script.write_text(HEAD + body)
        return engines.Child("cache:8", "model", limit_s, str(script))

    return start


def test_rows_of_loading_and_of_measuring_become_one(child: Started) -> None:
    one = child(
        "say('ROW {\"load_s\": 1}')\nassert sys.stdin.readline() == 'go\\n'\n"
        "say('a warning')\nsay('ROW {\"ms\": 2}')\n",
    )
    one.listen()
    assert one.row == {"engine": "cache:8", "load_s": 1}
    one.go_on()
    one.close()
    assert one.row == {"engine": "cache:8", "load_s": 1, "ms": 2}


def test_what_was_measured_before_the_limit_is_kept(child: Started) -> None:
    one = child(
        "say('ROW {}')\nsys.stdin.readline()\nsay('SO FAR {\"ms_b1\": 3}')\ntime.sleep(60)\n",
        limit_s=2.0,
    )
    one.listen()
    one.go_on()
    one.close()
    assert one.row == {"engine": "cache:8", "ms_b1": 3, "failed": "took more than 2 s to measure"}


def test_an_engine_that_never_loads_is_not_measured(child: Started) -> None:
    one = child("time.sleep(60)\n", limit_s=1.0)
    one.listen()
    one.go_on()
    one.close()
    assert one.row["failed"] == "took more than 1 s to load"


def test_waiting_for_others_is_not_an_engines_own_time(child: Started) -> None:
    slow = child("time.sleep(3)\nsay('ROW {}')\nsys.stdin.readline()\n", limit_s=30.0)
    quick = child("say('ROW {}')\nsys.stdin.readline()\nsay('ROW {\"ms\": 1}')\n", limit_s=2.0)
    for one in (slow, quick):
        one.listen()
    quick.go_on()
    for one in (slow, quick):
        one.close()
    assert quick.row == {"engine": "cache:8", "ms": 1}


@pytest.mark.parametrize("status", [0, 3])
def test_an_end_without_a_word_is_a_failure(child: Started, status: int) -> None:
    one = child(f"sys.exit({status})\n")
    one.listen()
    one.close()
    assert one.row["failed"] == f"the process ended with status {status}"
