"""What a model's `config.json` and the headers of its files rule out, said before vLLM starts."""

import math
from pathlib import Path
from typing import Any

from prefetch_runtime.checkpoint_files import absent_files, damaged_file, in_mistrals_layout
from prefetch_runtime.config import ConfigError, PrefetchConfig, spelled
from prefetch_runtime.expert_tensors import misfit
from prefetch_runtime.model_refusals import refused_family, refused_line, why_refused
from prefetch_runtime.model_shape import (
    NUM_EXPERTS,
    ModelError,
    check_whole,
    expert_shape,
    find_folder,
    may_have_experts,
    offer_tiny_moe,
    read_config,
    sources,
)
from prefetch_runtime.model_sizes import KNOWN_FAMILIES, model_sizes
from prefetch_runtime.shapes import SHAPES


def check_model(
    model: str, config: PrefetchConfig, *, as_declared: bool = True, as_stored: bool = True
) -> int | None:
    """Say now what the worker would say after a minute of start-up.

    Args:
        as_declared: False where options of vLLM replace what config.json says, or what is loaded;
            then only the folder is looked for.
        as_stored: False where an option of vLLM may change the experts' format.

    Returns:
        Experts of a MoE layer, where the folder says so.

    Raises:
        ModelError: no such folder, a file in it that is cut off or absent, experts of other sizes
            or of another number than declared, a model without experts, or one that the cache
            refuses.
        ConfigError: a number of slots, or a total for them, that the model cannot have.
    """
    folder = find_folder(model)
    if folder is not None and (not as_declared or in_mistrals_layout(folder)):
        return None
    declared = read_config(model)
    if not config.enabled:
        return None
    if folder is None or declared is None:
        if "/" not in model:
            shape = "; it is a shape without weights, for plan and bench"
            hint = shape if model in SHAPES else offer_tiny_moe(model)
            raise ModelError(
                f"there is no model folder {model!r}, and names on the hub have an owner before "
                f"them (owner/{model}){hint}"
            )
        return None
    num_experts = _check_declared(model, declared, config)
    if as_stored and config.expert_cache_gib is not None:
        _check_budget(model, declared, config.expert_cache_gib)
    _check_files(model, folder, declared)
    return num_experts


def _check_declared(model: str, declared: dict[str, Any], config: PrefetchConfig) -> int | None:
    shape = expert_shape(declared)
    refused = refused_family(declared) if shape is None else why_refused(declared)
    if refused is not None:
        raise ModelError(refused_line(refused))
    if shape is None:
        for part in sources(declared):
            check_whole(part, *NUM_EXPERTS)
        if may_have_experts(declared):  # in a place that is not known here
            return None
        raise ModelError(
            f"{model!r} declares no experts (a dense model), so there is nothing to cache; "
            f"leave {spelled('slots_per_layer')} out"
        )
    slots, top_k = config.slots_per_layer, shape.top_k or 1
    if top_k > shape.num_experts:
        raise ModelError(
            f"the config.json of {model!r} routes each token to {top_k} of {shape.num_experts} "
            "experts"
        )
    if isinstance(slots, int) and slots and not top_k <= slots <= shape.num_experts:
        raise ConfigError(
            f"{spelled('slots_per_layer')} is {slots}, but {model!r} routes each token to "
            f"{shape.top_k or 'some'} of {shape.num_experts} experts; set it between {top_k} and "
            f"{shape.num_experts}"
        )
    return shape.num_experts


def _check_budget(model: str, declared: dict[str, Any], gib: float) -> None:
    """Where config.json alone tells what the experts will weigh; the worker knows the rest."""
    try:
        sizes = model_sizes(declared)
    except ModelError:
        return  # vLLM may have a default for what is missing here
    if sizes.model_type not in KNOWN_FAMILIES or sizes.expert_format not in ("bfloat16", "float16"):
        return
    a_slot, top_k = sizes.slot_bytes(1), sizes.top_k
    num_slots = int(gib * 2**30 // a_slot)
    if num_slots < top_k:
        raise ConfigError(
            f"{spelled('expert_cache_gib')} {gib:g} gives {num_slots} slots to each MoE layer of "
            f"{model!r}, but one token needs {top_k} experts at once; give at least "
            f"{math.ceil(top_k * a_slot / 2**30 * 1000) / 1000:g}, or set "
            f"{spelled('slots_per_layer')} between {top_k} and {sizes.num_experts}"
        )


def _check_files(model: str, folder: Path, declared: dict[str, Any]) -> None:
    try:
        damaged = damaged_file(folder)
        absent = absent_files(folder)
        wrong = None if damaged is not None else misfit(folder, declared)
    except OSError as error:
        raise ModelError(f"{model!r} cannot be read: {error}") from None
    if damaged is not None:
        raise ModelError(f"{damaged} in {model!r} is cut off or damaged; download it again")
    if absent is not None:
        raise ModelError(f"{model!r} holds {absent}")
    if wrong is not None:
        raise ModelError(f"{model!r}: {wrong}")
