"""vLLM's configuration file for `serve`: what it says of the cache is kept, or refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefetch_runtime import cli
from prefetch_runtime.config import CLI_SPELLING, ConfigError
from prefetch_runtime.offline import WORKER_CLS
from prefetch_runtime.serve_file import ServeFile, read_serve_file

HUB = "Qwen/Qwen3-30B-A3B"
INSIDE = "additional-config: {prefetch_runtime: {slots_per_layer: 8, policy: lfru}, other: 1}\n"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "serve.yaml").write_text(text)
        return str(tmp_path / "serve.yaml")

    return write


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What `serve` would run, from the subcommand on."""

    def of(*arguments: str) -> list[str]:
        executed: list[list[str]] = []
        monkeypatch.setattr(os, "execv", lambda _, command: executed.append(command))
        CliRunner().invoke(cli.app, ["serve", *arguments], catch_exceptions=False)
        ((*_, module, subcommand),) = [c[:5] for c in executed]
        assert (module, subcommand) == ("prefetch_runtime.vllm.serve", "serve")
        return executed[0][4:]

    return of


def test_the_cache_of_a_file_is_switched_on(
    file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    path = file("port: 8001\n" + INSIDE)
    *start, settings = command(HUB, "--config", path, "--seed", "1")
    assert start == [
        *("serve", HUB, "--config", path, "--seed", "1"),
        *("--worker-cls", WORKER_CLS, "--additional-config"),
    ]
    assert json.loads(settings) == {
        "prefetch_runtime": {"slots_per_layer": 8, "policy": "lfru"},
        "other": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--moe-expert-cache-size", "16"], {"slots_per_layer": 16, "policy": "lfru"}),
        (["--eviction-policy", "lru"], {"slots_per_layer": 8, "policy": "lru"}),
        (
            ["--additional-config", '{"prefetch_runtime": {"policy": "lru"}, "more": 2}'],
            {"slots_per_layer": 8, "policy": "lru"},
        ),
    ],
)
def test_the_command_line_comes_before_the_file_setting_by_setting(
    arguments: list[str],
    found: dict[str, object],
    file: Callable[[str], str],
    command: Callable[..., list[str]],
) -> None:
    settings = json.loads(command(HUB, "--config", file(INSIDE), *arguments)[-1])
    assert settings.pop("prefetch_runtime") == found
    assert settings.pop("other") == 1
    assert settings == ({"more": 2} if "--additional-config" in arguments else {})


def test_a_cache_switched_off_on_the_command_line_stays_off_whatever_the_file_says(
    file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    path = file(f"worker-cls: {WORKER_CLS}\n{INSIDE}")
    found = command(HUB, "--config", path, "--moe-expert-cache-size", "0")
    assert "--worker-cls" not in found
    assert json.loads(found[-1])["prefetch_runtime"]["slots_per_layer"] == 0


@pytest.mark.parametrize("joined", [False, True])
def test_the_model_may_be_in_the_file(
    joined: bool, file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    path = file(f"model: {HUB}\n{INSIDE}")
    given = [f"--config={path}"] if joined else ["--config", path]
    assert command(*given)[:4] == ["serve", HUB, "--config", path]
    assert command("--port", "1", *given)[:6] == ["serve", HUB, "--port", "1", "--config", path]
    assert command("owner/other", *given)[:2] == ["serve", "owner/other"]


def test_keys_may_be_abbreviated_as_vllm_takes_them(
    file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    path = file("additional-conf: {prefetch_runtime: {slots_per_layer: 8}, other: 1}\n")
    *_, worker, option, settings = command(HUB, "--config", path)
    assert (worker, option) == (WORKER_CLS, "--additional-config")
    assert json.loads(settings) == {"prefetch_runtime": {"slots_per_layer": 8}, "other": 1}
    with pytest.raises(ConfigError, match="has another"):
        command(HUB, "--config", file(f"worker_c: mine.Worker\n{INSIDE}"))


def test_a_file_without_a_cache_is_passed_on_and_nothing_else(
    file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    path = file("port: 8001\nworker-cls: mine.Worker\n")
    assert command(HUB, "--config", path) == ["serve", HUB, "--config", path]


def test_metrics_of_a_file_get_their_folder(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: executed.append(command))
    path = file("additional_config:\n  prefetch_runtime: {slots_per_layer: 8, metrics: true}\n")
    CliRunner().invoke(cli.app, ["serve", HUB, "--config", path], catch_exceptions=False)
    assert executed[0][4] == "--metrics"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port: 1\nmoe-expert-cache-size: 8\neviction_policy: lfru\n",
            "moe-expert-cache-size, eviction-policy would be unknown to vLLM, which reads this "
            'file; write there `additional-config: {"prefetch_runtime": {"slots_per_layer": 8, '
            '"policy": "lfru"}}`, or give the options of prefetch-runtime on the command line',
        ),
        (
            "prefetch_runtime: {slots_per_layer: 8}",
            'write there `additional-config: {"prefetch_runtime": {"slots_per_layer": 8}}`',
        ),
        ("slots_per_layer: 8", '{"prefetch_runtime": {"slots_per_layer": 8}}'),
        ("prefetch_runtime: [8]", "prefetch-runtime would be unknown to vLLM"),
        ("prefetch_runtime:", "prefetch-runtime would be unknown to vLLM"),
        ("prefetch_runtime: &a {slots_per_layer: *a}", '{"prefetch_runtime": {...}}'),
        ("prefetch_runtime: {2020-01-01: 3}", '{"prefetch_runtime": {...}}'),
        ("additional-config.prefetch_runtime.policy: lru", "as one mapping, not key by key"),
        ("additional-config: [1]", "additional-config must be a mapping"),
        ("additional-config: 2026-01-01", "nothing that JSON holds"),
        ("additional-config: '{'", "nothing that JSON holds"),
        ("additional-config: &a {x: *a}", "nothing that JSON holds"),
        ("model: [a]", "model must be a name, got ['a']"),
        ("- 1", "must hold `option: value` lines"),
        ("", "must hold `option: value` lines"),
        ("a: [", "is not valid YAML"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("#" * ((1 << 20) + 1), "is larger than 1 MiB"),
    ],
    ids=lambda value: value[:30],
)
def test_what_cannot_be_read_is_one_line(
    text: str, message: str, file: Callable[[str], str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_serve_file(file(text))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", CLI_SPELLING.values())
def test_every_option_of_ours_is_known_in_a_file(option: str, file: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match=f"{option.removeprefix('--')} would be unknown to vLLM"):
        read_serve_file(file(f"{option.removeprefix('--')}: 1"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.yaml", "cannot be read: No such file"), ("x.json", "end in .yaml or .yml, not")],
)
def test_another_file_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_serve_file(str(tmp_path / name))


def test_json_in_a_string_is_what_vllm_reads(file: Callable[[str], str]) -> None:
    path = file('additional-config: \'{"prefetch_runtime": {"slots_per_layer": 8}}\'\n')
    assert read_serve_file(path) == ServeFile(
        path,
        additional_config={"prefetch_runtime": {"slots_per_layer": 8}},
        options=("additional-config",),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--moe-expert-cache-size", "4"], "has another; leave it out there"),
        (["--config", "b.yaml"], "--config is given twice"),
        (["--config=b.yaml"], "--config is given twice"),
    ],
)
def test_what_clashes_is_refused(
    arguments: list[str], message: str, file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("worker-cls: mine.Worker\n")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("vLLM was started"))
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(
            cli.app, ["serve", HUB, "--config", path, *arguments], catch_exceptions=False
        )


@pytest.mark.parametrize("arguments", [["--config"], ["--config", "none.yaml"]], ids=str)
def test_a_missing_file_is_an_error_and_not_a_model(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--config"):
        CliRunner().invoke(cli.app, ["serve", *arguments], catch_exceptions=False)


@pytest.mark.engine
def test_vllm_reads_the_command_as_it_is_meant(
    file: Callable[[str], str], command: Callable[..., list[str]]
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    parser.add_argument("subcommand")
    parser.add_argument("model_tag", nargs="?")
    for option in ("--config", "--model", "--port", "--worker-cls"):
        parser.add_argument(option)
    parser.add_argument("--additional-config", type=json.loads)
    path = file(f"port: 8001\nmodel: {HUB}\nworker_cls: {WORKER_CLS}\n{INSIDE}")
    given = ("--port", "2", f"--config={path}", "--moe-expert-cache-size", "16")
    found = parser.parse_args(command(*given))
    assert (found.model_tag, found.port, found.worker_cls) == (HUB, "2", WORKER_CLS)
    assert found.additional_config == {
        "prefetch_runtime": {"slots_per_layer": 16, "policy": "lfru"},
        "other": 1,
    }
    assert parser.parse_args(command("--config", path)).port == "8001"
