"""docs/extending.md, followed step by step in a copy of the project, leaves it in order."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictors import Evidence, PredictorShape
from prefetch_runtime.slots import SlotTable
from prefetch_runtime.trace import load_trace, save_trace

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
POLICY, PREDICTOR = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TESTED = ("policies", "predictors", "config", "docs")
FOLDERS = ("docs", "graphs", "predictors", "prefetch_runtime", "scripts", "tests")


def made(source: str, package: str, name: str):
    """A class of the page, as it would be in a file of the package."""
    names = {"__name__": f"{package}.example", "__package__": package}
    exec(source, names)
    return names[name]


def test_the_policy_evicts_the_first() -> None:
    policy = made(POLICY, "prefetch_runtime.policies", "FirstInFirstOut")()
    table = SlotTable(num_experts=8, num_slots=2, policy=policy)
    for step, expert in enumerate((1, 2, 1, 3), start=1):
        table.plan(np.array([expert]), now=step)
        table.check_integrity()
    assert sorted(int(expert) for expert in table.owner) == [2, 3]


def test_the_predictor_names_what_followed() -> None:
    shape = PredictorShape(num_layers=3, num_experts=8, top_k=2)
    predictor = made(PREDICTOR, "predictors", "EchoPredictor")(shape)
    predictor.observe(0, np.array([[0, 1], [6, 7], [-1, -1]]))
    predictor.observe(1, np.array([[3, 5], [5, 4], [-1, -1]]))
    assert predictor.predict(1, Evidence(np.array([[6, 2], [0, 2]])), 8) == [5, 4, 3]
    assert predictor.predict(1, Evidence(np.array([[6, 2], [0, 2]])), 1) == [5]
    assert predictor.predict(1, Evidence(np.array([[2, 6]])), 8) == []
    assert predictor.predict(2, Evidence(np.array([[3, 5]])), 8) == []
    with pytest.raises(ValueError, match="layer 0 cannot be predicted"):
        predictor.predict(0, Evidence(np.array([[0, 1]])), 8)


def edited(path: Path, *changes: tuple[str, str]) -> None:
    """Put text in front of an anchor that occurs once."""
    text = path.read_text()
    for anchor, added in changes:
        assert text.count(anchor) == 1, anchor
        text = text.replace(anchor, added + anchor)
    path.write_text(text)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which the steps of the page were taken."""
    root = tmp_path_factory.mktemp("extended")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py", "README.md"):
        shutil.copy(ROOT / name, root / name)
    for name in ("benchmarks", "models"):
        (root / name).symlink_to(ROOT / name)
    trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
    short = {name: getattr(trace, name)[:256] for name in ("topk", "sequence", "next_gate")}
    save_trace(root / "trace.npz", replace(trace, **short))
    policies = root / "prefetch_runtime" / "policies"
    (policies / "fifo.py").write_text(POLICY)
    edited(
        policies / "__init__.py",
        ("from .forecast import", "from .fifo import FirstInFirstOut\n"),
        ('    "Forecast",\n', '    "FirstInFirstOut",\n'),
        (
            '        case "forecast":',
            '        case "fifo":\n            return FirstInFirstOut()\n',
        ),
    )
    names = policies / "__init__.py"
    text = names.read_text()
    assert text.count('HOST_POLICY_NAMES = ("forecast",') == 1
    names.write_text(text.replace('("forecast",', '("forecast", "fifo",'))
    (root / "predictors" / "echo.py").write_text(PREDICTOR)
    edited(
        root / "predictors" / "__init__.py",
        ("from .frequency import", "from .echo import EchoPredictor\n"),
        ('    "Evidence",\n', '    "EchoPredictor",\n'),
        (
            '        case "oracle":',
            '        case "echo":\n            return EchoPredictor(shape)\n',
        ),
        ('    "oracle",\n', '    "echo",\n'),
    )
    done = call(root, "scripts/options_page.py")
    assert done.returncode == 0, done.stderr
    return root


def call(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in the copy, with the copy's packages."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tests_pass_with_the_examples_in_place(extended: Path) -> None:
    files = [f"tests/test_{name}.py" for name in TESTED]
    others = ["tests/test_scheduler.py::test_an_unknown_policy_is_refused"]
    # Slow, and not about names.
    without = "not on_the_recorded_trace and not interpreter and not triton and not device_form"
    done = call(extended, "-m", "pytest", "-q", "-k", without, *files, *others)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_checkers_pass_with_the_examples_in_place(extended: Path) -> None:
    files = [
        "predictors/echo.py",
        "predictors/__init__.py",
        "prefetch_runtime/policies/fifo.py",
        "prefetch_runtime/policies/__init__.py",
    ]
    lint = call(extended, "-m", "ruff", "check", *files)
    assert lint.returncode == 0, lint.stdout
    types = call(extended, "-m", "mypy", "--cache-dir", ".mypy_cache", *files)
    assert types.returncode == 0, types.stdout


def test_the_command_of_the_page_shows_a_difference(extended: Path) -> None:
    command = ["-m", "prefetch_runtime", "simulate", "--trace", "trace.npz", "--json"]
    done = call(extended, *command, "--slots=8", "--policy=lru,fifo", "--predictor=none,echo")
    assert done.returncode == 0, done.stderr
    stalls = [row["stall_us_per_step"] for row in json.loads(done.stdout)]
    assert len(set(stalls)) == 4, stalls
