"""What a model's `config.json` says about its experts; reads nothing else, runs no code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 4 << 20


class ModelError(ValueError):
    """A model folder that cannot be read, or that has no experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of a model."""

    num_experts: int
    top_k: int


def read_config(model: str) -> dict[str, Any] | None:
    """The `config.json` of a model folder, or None when `model` is a name on a hub.

    Raises:
        ModelError: the folder is missing, has no readable config, or is no model at all.
    """
    folder = Path(model)
    looks_local = model.startswith((".", "/", "~")) or folder.exists() or model.count("/") > 1
    if not looks_local:
        return None
    if not folder.expanduser().is_dir():
        raise ModelError(f"there is no model folder {model!r}")
    path = folder.expanduser() / "config.json"
    if not path.is_file():
        raise ModelError(f"{model!r} holds no config.json, so it is no model folder")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(
            f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB: not a model's config"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold an object, it holds a {type(config).__name__}")
    return config


def expert_shape(config: dict[str, Any]) -> ExpertShape | None:
    """The experts that a config declares, or None when it declares none (a dense model)."""
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, dict) else [config]
    for source in sources:
        experts = _first_int(source, "num_experts", "num_local_experts", "n_routed_experts")
        top_k = _first_int(source, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
        if experts and experts > 1 and top_k:
            return ExpertShape(num_experts=experts, top_k=top_k)
    return None


def _first_int(config: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
