"""The pages say what is there: modules, options, messages, examples."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_files_that_a_page_names_are_there(path: Path) -> None:
    for name in re.findall(
        r"`((?:docs|benchmarks|scripts|tests|models|predictors)/[\w./-]+)`", path.read_text()
    ):
        if name not in ("predictors/echo.py",):  # docs/extending.md's example
            assert (ROOT / name).exists(), name
