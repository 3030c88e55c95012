"""The map of the code names what is there."""

import re
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
