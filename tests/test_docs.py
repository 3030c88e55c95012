"""The pages say what is there: modules, options, messages, examples."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictors import Evidence, PredictorShape
from prefetch_runtime.slots import SlotTable

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "docs" / "architecture.md").read_text()
MODULES = sorted(
    path
    for package in ("prefetch_runtime", "graphs", "predictors")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
)
# Folders with one file per implementation, and the kernels, are named together.
NAMED_ALONE = [
    path
    for path in MODULES
    if path.parent.name not in ("policies", "predictors") and not path.name.endswith("_kernels.py")
]


@pytest.mark.parametrize("path", NAMED_ALONE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_is_on_the_map(path: Path) -> None:
    assert re.search(rf"^ +{re.escape(path.name)} ", MAP, re.MULTILINE), path.name


def test_the_map_names_no_module_that_is_gone() -> None:
    present = {path.name for path in MODULES}
    named = set(re.findall(r"^ +([a-z_]+\.py) ", MAP, re.MULTILINE))
    assert named <= present


def test_the_options_page_is_what_the_code_says() -> None:
    from scripts.options_page import PAGE, page

    assert page() == PAGE.read_text(), "run `python scripts/options_page.py`"


def messages_of(path: Path) -> Iterator[str]:
    """Every string of a module, with "\\0" where values are put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


TROUBLE = ROOT / "docs" / "troubleshooting.md"
SAID = [message for path in MODULES for message in messages_of(path)]
DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", TROUBLE.read_text(), re.MULTILINE)


def is_said(message: str) -> bool:
    """Whether some string of the code is the documented message, `...` standing for anything."""
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(said) for said in SAID)


def test_there_are_messages() -> None:
    assert len(DOCUMENTED) > 25


@pytest.mark.parametrize("message", DOCUMENTED)
def test_a_documented_message_is_in_the_code(message: str) -> None:
    assert is_said(message)


def test_a_message_that_nobody_says_is_found() -> None:
    assert not is_said("the expert cache is ... today")


def blocks_of(path: Path) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


class TestTheExamples:
    """The policy and the predictor of docs/extending.md work as they stand there."""

    @pytest.fixture
    def made(self) -> dict[str, Any]:
        policy, predictor = blocks_of(ROOT / "docs" / "extending.md")
        names: dict[str, Any] = {}
        exec(policy, names)
        exec(predictor, names)
        return names

    def test_the_policy_evicts_the_first(self, made: dict[str, Any]) -> None:
        table = SlotTable(num_experts=8, num_slots=2, policy=made["FirstInFirstOut"]())
        for step, expert in enumerate((1, 2, 1, 3), start=1):
            table.plan(np.array([expert]), now=step)
            table.check_integrity()
        assert sorted(int(expert) for expert in table.owner) == [2, 3]

    def test_the_predictor_names_what_was_chosen(self, made: dict[str, Any]) -> None:
        shape = PredictorShape(num_layers=3, num_experts=8, top_k=2)
        predictor = made["SameAsLast"](shape)
        predictor.observe(1, np.array([[3, 5], [5, -1]]))
        assert predictor.predict(1, Evidence(np.array([[0, 1]])), 2) == [3, 5]
        assert predictor.predict(2, Evidence(np.array([[0, 1]])), 2) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_files_that_a_page_names_are_there(path: Path) -> None:
    for name in re.findall(
        r"`((?:docs|benchmarks|scripts|tests|models|predictors)/[\w./-]+)`", path.read_text()
    ):
        if name not in ("predictors/same_as_last.py",):
            assert (ROOT / name).exists(), name
