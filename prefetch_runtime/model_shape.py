"""What a model's `config.json` says about its experts, and modelopt's `hf_quant_config.json` about
their format; reads nothing else, runs no code."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from prefetch_runtime.checkpoint_files import GGUF_IS_NOT_READ, gguf_hint
from prefetch_runtime.shapes import SHAPES, published_config

MAX_CONFIG_BYTES = 4 << 20
LARGEST = 1 << 31
"""More than any number of a model's sizes."""
CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
"""Where NVIDIA's modelopt, up to 0.29, wrote what later versions write into config.json."""
TINY_MOE = "models/tiny-moe"
"""The model that comes with the project, as `demo` and `bench --quick` ask for it."""

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

_TEXT = ("text_config", "llm_config", "language_config")
"""What multimodal models call the part of their language model."""


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

    Its `quantization_config` is that of `hf_quant_config.json` where only this has one.

    Raises:
        ModelError: the folder is missing, has no readable config, or is no model at all.
    """
    folder = find_folder(model)
    if folder is None:
        return None
    path, beside = folder / CONFIG, folder / QUANT_CONFIG
    if not path.is_file():
        hint = _of_the_hubs_cache(folder) or gguf_hint(folder)
        raise ModelError(f"{model!r} holds no {CONFIG}, so it is no model folder{hint}")
    return _with_format(
        read_config_file(path, f"{model!r}"), beside if beside.is_file() else None, f"{model!r}"
    )


def _of_the_hubs_cache(folder: Path) -> str:
    """What to give in place of a folder in which the hub's client keeps a model."""
    kind, *name = folder.name.split("--")
    if kind != "models" or not name or not (folder / "snapshots").is_dir():
        return ""
    return f", but the hub's cache of one: give the model's name, {'/'.join(name)!r}"


def read_config_file(path: Path, whose: str) -> dict[str, Any]:
    """The object in a JSON file; `whose` names the model in errors. Raises ModelError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(_too_large(str(path)))
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"the {path.name} of {whose} is not text: {error}") from None
    except OSError as error:
        raise ModelError(f"{whose} cannot be read: {error}") from None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold an object, it holds a {type(config).__name__}")
    return config


def load_config(model: str) -> dict[str, Any]:
    """The `config.json` of a model folder, a named shape as it is published, or a model on the hub
    (nothing else of it is fetched, but the format as in `read_config`).

    Raises:
        ModelError: as `read_config`; or an unknown name without an owner; or the hub has no such
            model, or cannot be reached.
    """
    config = read_config(model)
    if config is not None:
        return config
    if "/" not in model:
        return _named(model)
    config = read_config_file(_fetch(model), f"{model!r}")
    if _names_format(config):
        return config
    return _with_format(config, _fetch_format(model), f"{model!r}")


def _names_format(config: dict[str, Any]) -> bool:
    return any(part.get("quantization_config") is not None for part in sources(config))


def _with_format(config: dict[str, Any], path: Path | None, whose: str) -> dict[str, Any]:
    """The config with the format in modelopt's own file, unless it names one itself."""
    if path is None or _names_format(config):
        return config
    found = read_config_file(path, whose)
    producer, quantization = found.get("producer"), found.get("quantization")
    if not isinstance(quantization, dict):
        raise ModelError(f"{path} has no object under quantization")
    algorithm = quantization.get("quant_algo")
    # As vLLM reads it. Without an algorithm only the KV cache is quantised.
    if not isinstance(producer, dict) or producer.get("name") != "modelopt" or algorithm is None:
        return config
    format_ = {"quant_method": "modelopt", **quantization, "quant_algo": str(algorithm).upper()}
    return {**config, "quantization_config": format_}


def _named(name: str) -> dict[str, Any]:
    """The config of a named shape; the hub is not asked for a name without an owner."""
    if name in SHAPES:
        return published_config(name)
    near = get_close_matches(name.lower(), SHAPES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else offer_tiny_moe(name)
    raise ModelError(
        f"{name!r} is no named shape, and there is no such folder. Shapes with a name are "
        f"{', '.join(SHAPES)}; names on the hub have an owner before them (owner/{name}){hint}"
    )


def offer_tiny_moe(name: str) -> str:
    """The end of a message on a name that lacks only the folder of the project's own model."""
    is_meant = get_close_matches(name.lower(), [Path(TINY_MOE).name], n=1, cutoff=0.8)
    return f"; did you mean {TINY_MOE!r}?" if is_meant and Path(TINY_MOE).is_dir() else ""


def _fetch(model: str) -> Path:
    """Where the `config.json` of a model on the hub is, fetched unless it is in the hub's cache."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ModelError(
            f"{model!r} is no folder here, and without the package huggingface_hub it cannot be "
            "looked up on the hub; install it, or give a folder with the model's config.json"
            f"{_or_shape(model)}"
        ) from None
    try:
        return _download(hub, model, "config.json")
    except ModelError:
        raise
    except Exception as error:  # the hub's client raises what its HTTP library raises
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the config.json of {model!r} cannot be had from the hub ({reason}); give a folder "
            f"that holds it{_or_shape(model)}"
        ) from error


def _or_shape(model: str) -> str:
    """The named shape that stands for a model on the hub, where there is one, as an offer."""
    name = model.rpartition("/")[2].lower()
    near = [shape for shape in SHAPES if f"{name}-".startswith(f"{shape}-")]
    return f", or, without network, the named shape {near[0]} (as first published)" if near else ""


def _fetch_format(model: str) -> Path | None:
    """The same of modelopt's file; None where there is none.

    A hub that cannot be reached has none: a config.json from the cache must do without a network.
    """
    import huggingface_hub as hub

    try:
        return _download(hub, model, QUANT_CONFIG)
    except ModelError:
        raise
    except Exception:  # no such file, or no network
        return None


def _download(hub: Any, model: str, name: str) -> Path:
    cached = hub.try_to_load_from_cache(model, name)
    if isinstance(cached, str):
        return Path(cached)
    size = hub.get_hf_file_metadata(hub.hf_hub_url(model, name)).size
    if size is not None and size > MAX_CONFIG_BYTES:
        raise ModelError(_too_large(f"the {name} of {model!r}"))
    return Path(hub.hf_hub_download(model, name))


def find_folder(model: str) -> Path | None:
    """The folder that a model is in; None for a name on a hub, or an address in a cloud's storage.

    `folder/name` is a name on a hub unless there is such a folder here, as `models/`.

    Raises:
        ModelError: there is no such folder, or it is a file.
    """
    try:
        folder = Path(model)
        looks_local = (
            model.startswith((".", "/", "~", "models/")) or folder.exists() or model.count("/") > 1
        )  # the hub has no owner "models": that is the address of its list
        if "://" in model or not (looks_local or _starts_with_a_folder(model)):
            return None
        if folder.expanduser().is_file() and folder.suffix == ".gguf":
            raise ModelError(f"{model!r}: {GGUF_IS_NOT_READ}")
        if folder.expanduser().is_file():
            raise ModelError(
                f"there is no model folder {model!r}: it is a file; give its folder, "
                f"{str(folder.parent)!r}"
            )
        if not folder.expanduser().is_dir():
            near = _nearest_sibling(folder.expanduser())
            hint = f"; did you mean {str(folder.with_name(near))!r}?" if near else ""
            owner = f" ({str(folder.parent)!r} is a folder here, so the hub is not asked)"
            not_asked = "" if looks_local else owner
            if model == TINY_MOE and not folder.parent.is_dir():
                hint = "; it is in the project's own folder: go there, or give its whole path"
            raise ModelError(f"there is no model folder {model!r}{not_asked}{hint}")
        folder = folder.expanduser()
    except (OSError, RuntimeError) as error:  # no such user, no permission, a name too long
        raise ModelError(f"{model!r} cannot be read: {error}") from None
    return folder


def _starts_with_a_folder(model: str) -> bool:
    """Whether `folder/name` is of a folder here, and of no model that the hub's cache holds."""
    owner, slash, _ = model.partition("/")
    if not slash or not Path(owner).is_dir():
        return False
    try:
        import huggingface_hub as hub

        return not isinstance(hub.try_to_load_from_cache(model, CONFIG), str)
    except (ImportError, ValueError):  # no hub, or no name that one could have
        return True


def _nearest_sibling(folder: Path) -> str | None:
    if not folder.parent.is_dir():
        return None
    names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    near = get_close_matches(folder.name, names, n=1)
    return near[0] if near else None


def _too_large(what: str) -> str:
    return f"{what} is larger than {MAX_CONFIG_BYTES >> 20} MiB: not a model's config"


def expert_shape(config: dict[str, Any]) -> ExpertShape | None:
    """The experts that a config declares, or None when it declares none (a dense model)."""
    for source in sources(config):
        experts = first_int(source, *NUM_EXPERTS)
        if experts and experts > 1:
            return ExpertShape(num_experts=experts, top_k=first_int(source, *TOP_K))
    return None


def most_positions(config: dict[str, Any]) -> int | None:
    """Tokens that vLLM lets a sequence have at most, or more; None where the config does not say.

    What rope scaling adds is counted as vLLM counts it, or too high.
    """
    text = next((p for p in reversed(sources(config)) if first_int(p, *NUM_EXPERTS)), None)
    declared = None if text is None else first_int(text, "max_position_embeddings")
    if text is None or declared is None:
        return None
    most = max(declared, first_int(text, "model_max_length") or 0)
    found = [text.get("rope_scaling"), text.get("rope_parameters")]
    for rope in found:
        if not isinstance(rope, dict):
            continue
        found += rope.values()  # newer configs have one for each type of layer
        factor, kind = rope.get("factor"), rope.get("rope_type", rope.get("type"))
        if (
            not isinstance(factor, int | float)
            or not factor > 0
            or kind in ("su", "longrope", "llama3")
        ):
            continue
        original = first_int(rope, "original_max_position_embeddings") or declared
        most = max(most, int(min(original * factor, 1 << 31)))
    return most


def sources(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a config may speak of the language model: at the top, or in a part of its own."""
    thinker = config.get("thinker_config")
    whole = [config, thinker] if isinstance(thinker, dict) else [config]
    texts = [part.get(name) for part in whole for name in _TEXT]
    return [config, *(text for text in texts if isinstance(text, dict))]


def may_have_experts(config: object) -> bool:
    """Whether a number of experts stands anywhere in a config, however deep."""
    left: list[object] = [config]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if (first_int(part, *NUM_EXPERTS) or 0) > 1:
                return True
            left += part.values()
        elif isinstance(part, list):
            left += part
    return False


def check_whole(config: dict[str, Any], *names: str) -> None:
    """Raise ModelError where the first of the names that is there holds no kind of whole number."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is not None and isinstance(config[name], str | float | dict):
        raise ModelError(
            f"the config.json has {name} {str(config[name])[:40]!r}, which is no whole number; "
            "take the file from where the model comes from"
        )


def first_int(config: dict[str, Any], *names: str) -> int | None:
    """The first positive number under one of the names; of a number per layer, the largest."""
    for name in names:
        value = config.get(name)
        numbers: list[Any] = value if isinstance(value, list) else [value]
        if numbers and all(type(number) is int and number > 0 for number in numbers):
            return int(max(numbers))
    return None


def bounded(config: dict[str, Any], *names: str, most: int = LARGEST) -> int:
    """The first positive number under one of the names; ModelError if there is none, or absurd."""
    check_whole(config, *names)
    value = optional(config, *names, most=most)
    if value is None:
        raise ModelError(f"the config.json has no positive whole number {' or '.join(names)}")
    return value


def optional(config: dict[str, Any], *names: str, most: int = LARGEST) -> int | None:
    """The same where it may be missing."""
    value = first_int(config, *names)
    if value is not None and value > most:
        raise ModelError(f"the config.json has an absurd {names[0]}, more than {most}")
    return value
