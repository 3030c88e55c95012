"""Offline generation in a process of its own, with and without the cache, and their comparison."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefetch_runtime.config import ADDITIONAL_CONFIG_KEY, ConfigError
from prefetch_runtime.stats import RuntimeStats

WORKER_CLS = "prefetch_runtime.vllm.PrefetchWorker"
SCRIPT = Path(__file__).parent / "vllm" / "offline.py"


class GenerationError(RuntimeError):
    """The engine's process failed; the message says why and where its log is."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one run generated."""

    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    seconds: float
    stats: RuntimeStats | None
    """The cache's counters; None for a run without it."""
    rpc: Mapping[str, Any] = field(default_factory=dict)
    """What the worker methods called at the end returned, by name."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all prompts."""
        return sum(len(ids) for ids in self.token_ids)


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    settings: Mapping[str, Any] | None,
    log: Path,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    engine_options: Mapping[str, Any] | None = None,
    passed_on: Sequence[str] = (),
    worker_cls: str = WORKER_CLS,
    before: Sequence[Sequence[Any]] = (),
    after: Sequence[Sequence[Any]] = (),
) -> Generation:
    """Generate with vLLM in a child process; its output goes to `log`, appended.

    Args:
        settings: the cache's settings, or None to run vLLM alone, without any of our code.
        engine_options: more arguments of `vllm.LLM`.
        passed_on: still more, as options of vLLM's command line; of those that
            are in both, these count.
        before, after: worker methods to call around the generation, each with its arguments; only
            with the cache. What the latter return is in `Generation.rpc`.

    Raises:
        GenerationError: the engine did not start or failed; says why.
    """
    llm: dict[str, Any] = {"model": model, "disable_log_stats": True, **(engine_options or {})}
    rpc: list[Sequence[Any]] = []
    if settings is not None:
        llm["worker_cls"] = worker_cls
        llm["additional_config"] = {
            **llm.get("additional_config", {}),
            ADDITIONAL_CONFIG_KEY: dict(settings),
        }
        rpc = [*after, ["prefetch_stats"]]
    spec = {
        "llm": llm,
        "options": list(passed_on),
        "prompts": list(prompts),
        "sampling": {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
        },
        "before": list(before) if settings is not None else [],
        "rpc": rpc,
    }
    result = _run(spec, log)
    stats = result["rpc"].get("prefetch_stats")
    return Generation(
        result["texts"],
        result["token_ids"],
        result["seconds"],
        None if stats is None else RuntimeStats.from_dict(stats),
        result["rpc"],
    )


def empty_log(path: Path) -> None:
    """Make an empty log file, in the place of an older one. Never touches what is no plain file.

    Raises:
        ConfigError: something else is there, or the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--log: {path} is no plain file; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("wb").close()
    except OSError as error:
        raise ConfigError(f"--log: cannot write {path}: {error.strerror}") from None


def _run(spec: Mapping[str, Any], log: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="prefetch-runtime-") as folder:
        spec_path, result_path = Path(folder, "spec.json"), Path(folder, "result.json")
        spec_path.write_text(json.dumps(spec))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            finished = subprocess.run(
                [sys.executable, "-P", str(SCRIPT), str(spec_path), str(result_path)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                check=False,
            )
        result = _read(result_path)
    if "error" in result:
        raise GenerationError(f"{result['error']} (engine log: {log})")
    if finished.returncode != 0 or not result:
        raise GenerationError(
            f"the engine's process ended with status {finished.returncode}; its log is {log}"
        )
    return result


def _read(result_path: Path) -> dict[str, Any]:
    """What the engine's process left, or nothing if it ended before it was all there."""
    try:
        result: dict[str, Any] = json.loads(result_path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return result


def _environment() -> dict[str, str]:
    """The caller's environment, with defaults that keep a small machine and a log file happy."""
    return {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
