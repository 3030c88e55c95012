"""How much host memory this process may still take, and page-lock. Imports no torch."""

import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 14


class HostMemoryError(RuntimeError):
    """Host memory cannot be had or page-locked; says how much, the limit and the remedy."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on the memory that this process may still take."""

    name: str
    available_bytes: int
    remedy: str


def gib(num_bytes: int) -> str:
    """A size for people: GiB with two decimals, MiB below 0.1 GiB."""
    if num_bytes * 10 >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def memory_limits(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """Free memory of the machine and of every cgroup (v1 or v2) that this process is in.

    Clean file pages count as free in both: loading weights fills them, and the kernel drops them.
    """
    limits = [
        MemoryLimit(
            "MemAvailable",
            _meminfo_bytes(proc, "MemAvailable"),
            "free host memory or use a machine with more",
        )
    ]
    for folder, limit_file, usage_file, prefix in _memory_cgroups(proc, cgroup):
        text = _read(folder / limit_file)
        usage = _read(folder / usage_file)
        # Without a limit v2 says "max" and v1 a number near 2**63.
        if text is None or usage is None or text == "max" or int(text) >= 1 << 60:
            continue
        reclaimable = _stat_bytes(folder, f"{prefix}inactive_file", f"{prefix}active_file")
        limits.append(
            MemoryLimit(
                f"cgroup {limit_file} of {folder}",
                max(0, int(text) - max(0, int(usage) - reclaimable)),
                "raise the container's memory limit (docker run --memory, Kubernetes "
                "resources.limits.memory)",
            )
        )
    return limits


def lock_limit(proc: Path = Path("/proc")) -> int | None:
    """RLIMIT_MEMLOCK in bytes; None when there is none or this process is exempt from it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    for line in (_read(proc / "self" / "status") or "").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    return soft


def check_room(needed_bytes: int, limits: Iterable[MemoryLimit], what: str) -> None:
    """Raise `HostMemoryError` naming the tightest limit if `needed_bytes` does not fit them all."""
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and needed_bytes > tightest.available_bytes:
        raise HostMemoryError(
            f"{what} need {gib(needed_bytes)} of host memory, but only "
            f"{gib(tightest.available_bytes)} are left by {tightest.name}; {tightest.remedy}"
        )


def _memory_cgroups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folder, limit file, usage file and key prefix of each memory cgroup, innermost first."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
            files = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = cgroup / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # A container often sees its own group as the mount, under a path from outside, which then
        # has no files here.
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield (folder, *files)
            folder = folder.parent
        yield (mount, *files)


def _read(path: Path) -> str | None:
    """The text of a kernel file, or None where this kernel does not have it."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def _meminfo_bytes(proc: Path, key: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise HostMemoryError(f"{proc / 'meminfo'} has no line {key}; Linux 3.14 or later is needed")


def _stat_bytes(folder: Path, *keys: str) -> int:
    stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    return sum(int(stat.get(key, 0)) for key in keys)
