"""Packages point one way, and the heavy imports stay where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported(path: Path) -> Iterator[str]:
    """Top-level names of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


def files_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no Python file"
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("predictors", {"graphs", "prefetch_runtime", "vllm"}),
        ("graphs", {"predictors", "prefetch_runtime", "vllm"}),
    ],
)
def test_packages_point_one_way(package: str, forbidden: set[str]) -> None:
    for path in files_of(package):
        assert not forbidden & set(imported(path)), path


def test_only_the_adapter_imports_vllm() -> None:
    adapter = ROOT / "prefetch_runtime" / "vllm"
    for path in files_of("prefetch_runtime"):
        if adapter not in path.parents:
            assert "vllm" not in set(imported(path)), path


@pytest.mark.parametrize("package", ["prefetch_runtime", "graphs", "predictors"])
def test_nothing_shipped_imports_tests_or_benchmarks(package: str) -> None:
    for path in files_of(package):
        assert not {"tests", "benchmarks", "conftest"} & set(imported(path)), path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import prefetch_runtime", {"torch", "triton", "vllm"}),
        ("import prefetch_runtime.vllm", {"torch", "triton", "vllm"}),
        ("import prefetch_runtime.scheduler", {"triton", "vllm"}),
        ("import prefetch_runtime.cli", {"torch", "triton", "vllm"}),
        ("import predictors", {"triton", "vllm"}),
    ],
)
def test_an_import_brings_nothing_heavy(statement: str, absent: set[str]) -> None:
    script = f"import sys; {statement}; print(*sorted(m for m in {absent!r} if m in sys.modules))"
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert finished.stdout.split() == []


@pytest.mark.parametrize("package", ["prefetch_runtime", "graphs", "predictors"])
def test_each_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
