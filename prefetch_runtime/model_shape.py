"""What a model's `config.json` says about its experts; reads nothing else, runs no code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 4 << 20

# What the models that vLLM serves call them.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)


class ModelError(ValueError):
    """A model folder that cannot be read, or that has no experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of a model."""

    num_experts: int
    top_k: int | None
    """Experts that one token is routed to; None where the config has no name for it we know."""


def read_config(model: str) -> dict[str, Any] | None:
    """The `config.json` of a model folder, or None when `model` is a name on a hub.

    Raises:
        ModelError: the folder is missing, has no readable config, or is no model at all.
    """
    try:
        path = _config_path(model)
        text = None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"the config.json of {model!r} is not text: {error}") from None
    except (OSError, RuntimeError) as error:  # no such user, no permission, a name too long
        raise ModelError(f"{model!r} cannot be read: {error}") from None
    if text is None:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold an object, it holds a {type(config).__name__}")
    return config


def _config_path(model: str) -> Path | None:
    folder = Path(model)
    looks_local = model.startswith((".", "/", "~")) or folder.exists() or model.count("/") > 1
    if not looks_local:
        return None
    folder = folder.expanduser()
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {model!r}")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{model!r} holds no config.json, so it is no model folder")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB: not a model's config"
        )
    return path


def expert_shape(config: dict[str, Any]) -> ExpertShape | None:
    """The experts that a config declares, or None when it declares none (a dense model)."""
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, dict) else [config]
    for source in sources:
        experts = _first_int(source, *NUM_EXPERTS)
        if experts and experts > 1:
            return ExpertShape(num_experts=experts, top_k=_first_int(source, *TOP_K))
    return None


def _first_int(config: dict[str, Any], *names: str) -> int | None:
    """The first positive number under one of the names; of a number per layer, the largest."""
    for name in names:
        value = config.get(name)
        numbers: list[Any] = value if isinstance(value, list) else [value]
        if numbers and all(type(number) is int and number > 0 for number in numbers):
            return int(max(numbers))
    return None
