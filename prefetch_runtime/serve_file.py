"""vLLM's own configuration file for `serve` (`--config FILE.yaml`): what it says of the cache.

vLLM turns the file's keys into options that stand before those of the command line, where the last
of a name counts. So what the command adds would replace what the file says, unless it is read here.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefetch_runtime.config import (
    ADDITIONAL_CONFIG_KEY,
    CLI_SPELLING,
    ConfigError,
    PrefetchConfig,
)

_MAX_BYTES = 1 << 20
_ADDITIONAL, _WORKER = "additional-config", "worker-cls"
_SETTINGS = {
    **{key.replace("_", "-"): key for key in PrefetchConfig.model_fields if "_" in key},
    **{option.removeprefix("--"): key for key, option in CLI_SPELLING.items()},
}
"""Settings by what their options would be called in such a file."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    """What a file says of the model and of the cache; the rest is vLLM's."""

    path: str
    model: str | None = None
    worker_cls: str | None = None
    additional_config: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Every option that the file gives, without its dashes in front."""


def read_serve_file(path: str) -> ServeFile:
    """Read vLLM's configuration file.

    Raises:
        ConfigError: it is no YAML, or holds settings of the cache where vLLM would not find them.
    """
    given = {full_name(str(key)): value for key, value in _mapping_of(path).items()}
    stray = {_SETTINGS[key]: value for key, value in given.items() if key in _SETTINGS}
    key = ADDITIONAL_CONFIG_KEY.replace("_", "-")
    if isinstance(given.get(key), Mapping):
        stray = {**given[key], **stray}
    if stray or key in given:
        try:
            shown = json.dumps({ADDITIONAL_CONFIG_KEY: stray}, default=str)
        except (TypeError, ValueError, RecursionError):
            shown = f'{{"{ADDITIONAL_CONFIG_KEY}": {{...}}}}'  # nothing that JSON holds
        line = f"{_ADDITIONAL}: {shown}"
        raise ConfigError(
            f"{path}: {', '.join(k for k in given if k in _SETTINGS or k == key)} would be unknown "
            f"to vLLM, which reads this file; write there `{line}`, or give the options of "
            "prefetch-runtime on the command line"
        )
    if any(key.startswith(f"{_ADDITIONAL}.") for key in given):
        raise ConfigError(f"{path}: give {_ADDITIONAL} as one mapping, not key by key")
    return ServeFile(
        path,
        _text(path, "model", given.get("model")),
        _text(path, _WORKER, given.get(_WORKER)),
        _additional(path, given.get(_ADDITIONAL)),
        tuple(given),
    )


def full_name(option: str) -> str:
    """The option, without its dashes in front, that vLLM takes a name for, or `name.key`.

    vLLM's parser takes abbreviations; those of the options that matter here are written out.
    """
    name = option.replace("_", "-")
    stem, dot, key = name.partition(".")
    for shortest, full in (("ad", _ADDITIONAL), ("worker-c", _WORKER)):
        if stem.startswith(shortest) and full.startswith(stem):
            return full + dot + key
    return name


def _mapping_of(path: str) -> Mapping[Any, Any]:
    if path.rpartition(".")[2] not in ("yaml", "yml"):
        raise ConfigError(f"--config: vLLM reads files that end in .yaml or .yml, not {path!r}")
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError("--config needs vLLM, which brings PyYAML; neither is there") from None
    try:
        file = Path(path)
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"--config: {path} is larger than {_MAX_BYTES >> 20} MiB")
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"--config: {path} is not valid YAML: {said}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config: {path} must hold `option: value` lines")
    return found


def _text(path: str, key: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{path}: {key} must be a name, got {value!r}")


def _additional(path: str, value: object) -> Mapping[str, Any]:
    """The mapping that vLLM would make of `additional-config`."""
    try:
        # vLLM writes a mapping as JSON, and reads a string as such.
        found = json.loads(value if isinstance(value, str) else json.dumps(value or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {_ADDITIONAL} is nothing that JSON holds: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {_ADDITIONAL} must be a mapping")
    return found
