"""What a model's `config.json` and the sizes of its files rule out, said before vLLM starts."""

import json
from pathlib import Path

from prefetch_runtime.config import ConfigError, PrefetchConfig, spelled
from prefetch_runtime.model_shape import ModelError, expert_shape, read_config
from prefetch_runtime.shapes import SHAPES

_MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format."""


def check_model(model: str, config: PrefetchConfig) -> None:
    """Say now what the worker would say after a minute of start-up.

    Raises:
        ModelError: no such folder, a file in it that is cut off, or a model without experts.
        ConfigError: a number of slots that the model cannot have.
    """
    declared = read_config(model)
    if not config.enabled:
        return
    if declared is None:
        if "/" not in model:
            hint = "; it is a shape without weights, for plan and bench" if model in SHAPES else ""
            raise ModelError(
                f"there is no model folder {model!r}, and names on the hub have an owner before "
                f"them (owner/{model}){hint}"
            )
        return
    shape = expert_shape(declared)
    if shape is None:
        raise ModelError(
            f"{model!r} declares no experts (a dense model), so there is nothing to cache; "
            f"leave {spelled('slots_per_layer')} out"
        )
    slots, top_k = config.slots_per_layer, shape.top_k or 1
    if isinstance(slots, int) and slots and not top_k <= slots <= shape.num_experts:
        raise ConfigError(
            f"{spelled('slots_per_layer')} is {slots}, but {model!r} routes each token to "
            f"{shape.top_k or 'some'} of {shape.num_experts} experts; set it between {top_k} and "
            f"{shape.num_experts}"
        )
    damaged = damaged_file(Path(model))
    if damaged is not None:
        raise ModelError(f"{damaged} in {model!r} is cut off or damaged; download it again")


def damaged_file(folder: Path) -> str | None:
    """The first safetensors file in a folder whose size is not what its header says, or None."""
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            return path.name
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > min(size, _MOST_HEADER_BYTES):
                return path.name
            try:
                header = json.loads(file.read(start - 8))
                ends = [of["data_offsets"][1] for name, of in header.items() if name[0] != "_"]
                expected = start + max(ends, default=0)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
                return path.name
        if expected != size:
            return path.name
    return None
