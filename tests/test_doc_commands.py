"""Every command in the documentation is run as it is written; engines are stood in for.

What starts engines for real (`make demo`, `generate`, `bench --quick`, a server) is run by the
tests under `tests/engine` with the same options.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from predictors import PredictorShape, TransitionPredictor
from prefetch_runtime import cli, early_refusals, model_shape, offline
from prefetch_runtime.bench import environment, routing, servers
from prefetch_runtime.bench import session as sessions
from prefetch_runtime.bench.child import Outcome
from prefetch_runtime.config import PrefetchConfig
from prefetch_runtime.offline import WORKER_CLS
from prefetch_runtime.shapes import shape_config
from prefetch_runtime.trace import load_trace, save_trace

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
PROGRAMS = ("prefetch-runtime", "make", "vllm", "pip", "python", "pre-commit")
HARMLESS = ("curl", "export", "git", "docker", "ulimit")
"""Commands that are named and not run: of the system, or of a server that is not there."""


class Command(NamedTuple):
    """A command as a page has it."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Its name without a folder."""
        return self.words[0].removeprefix(".venv/bin/").replace("python3", "python")


def code_lines(text: str) -> Iterator[str]:
    """Lines of the indented blocks of a page, continuations joined."""
    held = ""
    for line in text.splitlines():
        if not re.match(r" {4,}\S", line) and not held:
            continue
        line = held + line.strip()
        if line.endswith("\\"):
            held = line[:-1]
            continue
        held = ""
        yield line


def words_of(line: str) -> tuple[str, ...]:
    """A line as a shell reads it, without comment and leading variables."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose, or a formula
        return ()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    return tuple(words)


def commands() -> Iterator[Command]:
    for path in PAGES:
        for line in code_lines(path.read_text()):
            words = words_of(line)
            if words:
                command = Command(str(path.relative_to(ROOT)), words)
                if command.program in PROGRAMS:
                    yield command


COMMANDS = list(dict.fromkeys(commands()))


def test_there_are_commands_on_every_page_for_users() -> None:
    found = {command.page for command in COMMANDS}
    assert {"README.md", "CONTRIBUTING.md", "docs/benchmarks.md", "docs/choosing-slots.md"} <= found
    assert len(COMMANDS) > 30


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, where a command may leave files."""
    (tmp_path / "models").mkdir()
    for name in ("benchmarks", "models/tiny-moe"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Short, for a page may simulate much of it.
    trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
    short = replace(
        trace,
        **{
            name: array[:256]
            for name in ("topk", "sequence", "next_gate", "step")
            if (array := getattr(trace, name)) is not None
        },
    )
    for place in (tmp_path / "trace.npz", tmp_path / "models" / "tiny-moe-trace.npz"):
        save_trace(place, short)
    shape = PredictorShape(num_layers=8, num_experts=32, top_k=4)
    TransitionPredictor(shape).save(tmp_path / "table.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _generated(spec: dict[str, Any], _: Path) -> dict[str, Any]:
    """What an engine's process would leave."""
    count = len(spec["prompts"])
    rpc: dict[str, Any] = {name: None for name, *_ in spec["rpc"]}
    if "prefetch_trace_save" in rpc:
        rpc["prefetch_trace_save"] = {
            "tokens": 1,
            "layers": 8,
            "steps": 1,
            "dropped": 0,
            "dropped_steps": 0,
        }
    return {"texts": ["x"] * count, "token_ids": [[1]] * count, "seconds": 1.0, "rpc": rpc}


def _looked_around() -> dict[str, Any]:
    gpu = {"name": "H200", "total_bytes": 1 << 37, "free_bytes": 1 << 37}
    machine = {"gpu": {**gpu, "link_gbs": 50.0, "memory_gbs": 4000.0}, "versions": {}}
    return {"code": "c", "command": ["bench"], "machine": machine}


_TIMES: dict[str, Any] = {
    **dict.fromkeys(("ttft_ms", "tpot_ms"), [1.0] * 3),
    **dict.fromkeys(("step_ms", "step_mean_ms", "tokens_per_s"), 1.0),
}


def _ran(spec: dict[str, Any], **_: Any) -> Outcome:
    """An engine that was timed."""
    loaded = {
        **dict.fromkeys(("load_s", "streamed_bytes", "device_expert_bytes", "offloaded_bytes"), 1),
        **dict.fromkeys(("slot_bytes", "staging_bytes", "pinned_bytes", "host_bytes"), 1),
        "mode": "full",
    }
    counters = ("hits", "late", "misses", "bytes_copied", "bytes_prefetched", "bytes_useful")
    more = ("bytes_wasted", "host_calls", "waves", "peak_bytes", "device_bytes", "stall_seconds")
    base = {**dict.fromkeys((*counters, *more), 1), **_TIMES}
    return Outcome(
        "ok",
        None,
        loaded,
        [
            {**base, "batch": batch, "repeats": 1, "steps": 8, "decode_s": 1.0}
            for batch in spec["batches"]
        ],
    )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """No engine, no hub, no server; the commands that would have replaced this process."""
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: replaced.append(arguments))
    monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
    monkeypatch.setattr(offline, "_run", _generated)
    monkeypatch.setattr(environment, "look_around", _looked_around)
    monkeypatch.setattr(sessions, "run_case", _ran)
    monkeypatch.setattr(servers, "reach", lambda server: server)
    monkeypatch.setattr(servers, "measure", lambda *_, **__: {**_TIMES, "status": "ok"})
    monkeypatch.setattr(routing, "_STEPS", 16)
    served = {"qwen3-30b-a3b": shape_config("qwen3-30b-a3b")}

    def fetch(model: str) -> Path:
        path = Path("hub.json").resolve()
        path.write_text(json.dumps(served[model.rpartition("/")[2].lower()]))
        return path

    monkeypatch.setattr(model_shape, "_fetch", fetch)
    monkeypatch.setattr(model_shape, "_fetch_format", lambda _: None)
    return replaced


def _of(program: str) -> list[Command]:
    found = [command for command in COMMANDS if command.program == program]
    assert found, program
    return found


def _id(command: Command) -> str:
    return f"{command.page}: {' '.join(command.words)}"[:90]


@pytest.mark.parametrize("command", _of("prefetch-runtime"), ids=_id)
def test_our_commands_run(
    command: Command,
    project: Path,
    stand_ins: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert project.is_dir()
    monkeypatch.setattr(sys, "argv", ["prefetch-runtime", *command.words[1:]])
    try:
        cli.main()
        status: Any = 0
    except SystemExit as end:
        status = end.code or 0
    error = capsys.readouterr().err
    if command.words[1] == "doctor" or "--target" in command.words:
        assert status in (0, 1), error  # what it says of this machine, or of a target
    else:
        assert status == 0, error
    assert bool(stand_ins) == (command.words[1] == "serve")


@pytest.mark.parametrize("command", _of("vllm"), ids=_id)
def test_vllms_commands_name_a_worker_and_settings_that_exist(command: Command) -> None:
    assert command.words[1] == "serve"
    options = dict(zip(command.words, command.words[1:], strict=False))
    assert options["--worker-cls"] == WORKER_CLS
    config = PrefetchConfig.from_additional_config(json.loads(options["--additional-config"]))
    assert config.enabled


@pytest.mark.parametrize("command", _of("make"), ids=_id)
def test_make_has_the_target(command: Command) -> None:
    arguments = command.words[1:]
    finished = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout


@pytest.mark.parametrize("command", _of("pip"), ids=_id)
def test_extras_exist(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"[\w-]+", " ".join(re.findall(r"\[(.*?)\]", " ".join(command.words)))):
        assert extra in project["optional-dependencies"], extra


def _helps(arguments: list[str]) -> str:
    environment_ = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, *arguments, "--help"],
        cwd=ROOT,
        env=environment_,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("command", _of("python"), ids=_id)
def test_python_scripts_and_tests_are_there(command: Command) -> None:
    words = list(command.words[1:])
    if words[:2] == ["-m", "pytest"]:
        config = tomllib.loads((ROOT / "pyproject.toml").read_text())
        marks = {m.partition(":")[0] for m in config["tool"]["pytest"]["ini_options"]["markers"]}
        for previous, word in pairwise(words[1:]):
            if previous == "-m":
                assert set(word.split()) - {"not", "and", "or"} <= marks, word
            elif not word.startswith("-"):
                assert (ROOT / word).exists(), word
        return
    script = words[:2] if words[0] == "-m" else words[:1]
    if words[0] == "-m":
        assert (ROOT / (words[1].replace(".", "/") + ".py")).is_file(), words[1]
    else:
        assert (ROOT / words[0]).is_file(), words[0]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if options:
        text = _helps(script)
        for option in options:
            assert option in text, option


def subcommands() -> dict[str, Any]:
    group: Any = typer.main.get_command(cli.app)
    found: dict[str, Any] = group.commands
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_within_a_sentence_name_what_there_is(path: Path) -> None:
    known = subcommands()
    for span in re.findall(r"`(prefetch-runtime [^`]*)`", path.read_text()):
        _, name, *rest = span.split()
        if not name[0].isalpha():
            continue
        assert name in known, span
        options = {option for parameter in known[name].params for option in parameter.opts}
        for word in rest:
            if word.startswith("--") and name != "serve":
                assert word in options, span


class TestThese:
    """They must be able to fail."""

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("A=1 B=2 make test  # a comment", ("make", "test")),
            ("prefetch-runtime plan 'a b'", ("prefetch-runtime", "plan", "a b")),
            ("it's prose", ()),
        ],
    )
    def test_lines_are_read_as_a_shell_reads_them(self, line: str, words: tuple[str, ...]) -> None:
        assert words_of(line) == words

    def test_lines_are_joined(self) -> None:
        text = "text\n\n    make \\\n        test\n    make demo\nmake none\n"
        assert list(code_lines(text)) == ["make test", "make demo"]

    def test_a_wrong_option_is_found(
        self,
        project: Path,
        stand_ins: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        command = Command("x.md", ("prefetch-runtime", "plan", "models/tiny-moe", "--gpu", "24"))
        with pytest.raises(AssertionError):
            test_our_commands_run(command, project, stand_ins, monkeypatch, capsys)

    def test_every_word_at_the_start_of_a_line_is_known_or_no_command(self) -> None:
        """A new program in the documentation needs a test here."""
        unknown: Callable[[str], bool] = lambda word: (  # noqa: E731
            shutil.which(word) is not None and word not in (*PROGRAMS, *HARMLESS)
        )
        found = {
            words[0]
            for path in PAGES
            for line in code_lines(path.read_text())
            if (words := words_of(line)) and unknown(words[0].removeprefix(".venv/bin/"))
        }
        assert found <= set(), found
