"""Counts what a checkpoint brought for each expert, and refuses one that is not whole.

vLLM serves what it finds: an expert whose tensor is missing keeps whatever its memory held, a
missing scale is 1.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import torch
from safetensors import SafetensorError

from prefetch_runtime.checkpoint_files import INDEX, damaged_file, files_read
from prefetch_runtime.config import ConfigError
from prefetch_runtime.expert_tensors import misfit
from prefetch_runtime.host_memory import HostMemoryError

_ALL = -1
_WEIGHTS = ("weight", "qweight", "weight_packed")
_NEVER_IN_A_CHECKPOINT = ("sort_indices",)
_MAY_BE_ABSENT = ("g_idx", "weight_shape", "qzeros", "bias")
"""Tensors that a format may leave out for all experts together."""
ONE_EXPERTS = ("gpt_oss_w13", "gpt_oss_w2")
"""Parts under which newer vLLM versions load one expert's whole tensor, of any shape."""
_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""Values of vLLM's `--load-format`; others invent weights, or read other files."""
_FAILURES = (
    AssertionError, FileNotFoundError, IndexError, KeyError, RuntimeError, TypeError, ValueError,
    SafetensorError,
)  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that lacks experts' tensors, or holds some that do not fit the model."""


class LoadedExperts:
    """What was loaded into one layer's per-expert parameters."""

    def __init__(self, layer_name: str, num_experts: int) -> None:
        self._layer_name = layer_name
        self._num_experts = num_experts
        self._found: dict[str, dict[str, set[int]]] = {}
        """Parameter to part ("w1", "w2", "w3", ...) to experts; `_ALL` for all at once."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing went through vLLM's loader of experts."""
        return not self._found

    def load(
        self,
        name: str,
        load: Callable[[], bool | None],
        loaded: torch.Tensor,
        *,
        into: torch.dtype,
        part: str | None,
        expert_id: int | None,
        numel: int | None = None,
    ) -> bool | None:
        """Call `load`, which copies `loaded` into parameter `name` of dtype `into`, and note it.

        `numel` is how many numbers are due. vLLM takes fewer, for the sake of layers that it pads.

        Raises:
            CheckpointError: the tensor does not fit the model, or is of another precision.
        """
        if not _same_kind(name.partition("_")[2], loaded.dtype, into):
            raise CheckpointError(
                f"{self._layer_name}: {_which(name, part)} of {_whose(expert_id)} is "
                f"{loaded.dtype} in the checkpoint, but the model's config.json asks for {into}; "
                "copied over, its numbers would be others"
            )
        if expert_id is None and loaded.dim() > 1 and loaded.shape[0] != self._num_experts:
            raise CheckpointError(
                f"{self._layer_name}: {name} in the checkpoint is {tuple(loaded.shape)} "
                f"{loaded.dtype}, of {loaded.shape[0]} experts, but the model's config.json makes "
                f"it {self._num_experts} experts"
            )
        if numel is not None and loaded.numel() != numel:
            raise CheckpointError(
                f"{self._layer_name}: {_which(name, part)} of {_whose(expert_id)} in the "
                f"checkpoint is {tuple(loaded.shape)} {loaded.dtype}, but the model's config.json "
                f"makes it {numel} numbers"
            )
        try:
            success = load()
        except (RuntimeError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"{self._layer_name}: {_which(name, part)} of {_whose(expert_id)} in the "
                f"checkpoint is {tuple(loaded.shape)} {loaded.dtype}, which does not fit the "
                f"model: {error}"
            ) from error
        if success is not False:
            whole = expert_id is None or (loaded.dim() == 3 and part not in ONE_EXPERTS)
            experts = self._found.setdefault(name, {}).setdefault(part or "", set())
            experts.add(_ALL if whole or expert_id is None else expert_id)
        return success

    def check(self, names: Iterable[str], *, needed: Iterable[str] = (), is_gated: bool) -> None:
        """Raise unless every expert has all its tensors.

        Args:
            names: the layer's per-expert parameters.
            needed: those that may not be absent, though the format in general lets them be.
            is_gated: whether w13 has two halves.

        Raises:
            CheckpointError: names the first expert and tensor that is missing.
        """
        missing: list[tuple[str, str, int | None]] = []
        for name in names:
            parts = self._found.get(name, {})
            if not parts:
                optional = any(word in name for word in _MAY_BE_ABSENT) and name not in needed
                if not optional and not any(word in name for word in _NEVER_IN_A_CHECKPOINT):
                    missing.append((name, "", None))
                continue
            expected = set(parts)
            if is_gated and name.startswith("w13") and expected & {"w1", "w3"}:
                expected |= {"w1", "w3"}
            for part in sorted(expected):
                experts = parts.get(part, set())
                if _ALL not in experts:
                    absent = sorted(set(range(self._num_experts)) - experts)
                    missing.extend((name, part, expert) for expert in absent)
        if missing:
            name, part, expert = missing[0]
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{self._layer_name}: the checkpoint has no {_which(name, part)} of "
                f"{_whom(expert)}{more}; it is incomplete, or not of the model and the "
                "quantisation that its config.json names"
            )


def check_sizes(vllm_config: Any) -> bool:
    """Refuse a checkpoint whose experts are not of the sizes, or the number, that are declared.

    What vLLM's loader cuts to fit is counted nowhere, so the headers of the files are read.

    Returns:
        False where not all files are surely here (yet), or they are not of a kind with headers.

    Raises:
        CheckpointError: names the tensor.
    """
    model = vllm_config.model_config
    folder = _folder_of(vllm_config)
    if folder is None:
        return False
    wrong = misfit(folder, model.hf_text_config.to_dict())
    if wrong is not None:
        raise CheckpointError(f"{model.model!r}: {wrong}")
    return files_read(folder)[1]


def _folder_of(vllm_config: Any) -> Path | None:
    """Where the safetensors files that vLLM reads are, if they are on this machine."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) not in _READS_SAFETENSORS:
        return None
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    for name in (INDEX, "model.safetensors"):
        try:
            cached = hub.try_to_load_from_cache(
                model.model, name, cache_dir=load.download_dir, revision=model.revision
            )
        except ValueError:  # no name on the hub
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Within this context a checkpoint that vLLM cannot read is a CheckpointError that says so.

    vLLM's loaders trust their files: where one is not what they expect, they fail by whatever
    comes next, an assertion, a missing key, an operation on tensors.

    Args:
        model: its folder, or its name on the hub.
    """
    try:
        yield
    except _FAILURES as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_loading = any(frame.name == "load_weights" for frame in frames)
        of_the_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error)
        ours = isinstance(error, ConfigError | CheckpointError | HostMemoryError)
        if ours or of_the_device or not is_loading:
            raise
        said = " ".join(str(error).split())[:400] or f"in `{frames[-1].line}`"
        file = damaged_file(Path(model))
        why = (
            "it is damaged, incomplete, or not of the model and the quantisation that its "
            "config.json names"
            if file is None
            else f"{file} is cut off or damaged"
        )
        raise CheckpointError(
            f"the checkpoint of {model!r} cannot be loaded: {why} ({type(error).__name__}: {said})"
        ) from error


def check_written(layer_name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise if nothing was ever written into an expert's weight, [E, ...] on the host.

    For loaders that fill parameters by themselves, whose writes nobody counts. Memory that nobody
    wrote is zero; biases are not looked at, for they may be.

    Raises:
        CheckpointError: names the first expert and tensor.
    """
    for name, weight in weights.items():
        if name.partition("_")[2] not in _WEIGHTS:
            continue
        for expert_id, rows in enumerate(weight):
            numbers = rows.reshape(-1).view(torch.uint8)
            if not numbers[:4096].any() and not numbers.any():
                raise CheckpointError(
                    f"{layer_name}: {name} of {_whom(expert_id)} was not loaded; the checkpoint is "
                    "incomplete, or not of the model that its config.json names"
                )


def _same_kind(field: str, loaded: torch.dtype, into: torch.dtype) -> bool:
    """Whether a tensor can be copied into a parameter and still mean the same."""
    if field in _WEIGHTS or field == "bias":
        return _kind(loaded) == _kind(into)
    if "scale" in field:
        return loaded.is_floating_point == into.is_floating_point
    return True


def _kind(dtype: torch.dtype) -> str | int:
    """Weights of one kind can be copied into each other: floating point of 16 bits and more, of 8
    bits, or packed integers of one size."""
    if dtype.is_floating_point:
        return "wide" if dtype.itemsize > 1 else "fp8"
    return dtype.itemsize


def _which(name: str, part: str | None) -> str:
    inside = {"w1": " (gate_proj, w1)", "w3": " (up_proj, w3)", "w2": " (down_proj, w2)"}
    return name + inside.get(part or "", "")


def _whose(expert_id: int | None) -> str:
    return "all experts" if expert_id is None else f"expert {expert_id}"


def _whom(expert_id: int | None) -> str:
    return "any expert" if expert_id is None else f"expert {expert_id}"


def needed_of(method: Any) -> set[str]:
    """Per-expert parameters that a quantisation method cannot do without, optional as they are."""
    config = getattr(method, "quant_config", None)
    needed: set[str] = set()
    if getattr(getattr(method, "moe", None), "has_bias", False):
        needed |= {"w13_bias", "w2_bias"}
    if type(method).__name__ == "AutoAWQMoEMethod" or getattr(config, "is_sym", True) is False:
        needed |= {"w13_qzeros", "w2_qzeros"}
    if getattr(config, "desc_act", False):
        needed |= {"w13_g_idx", "w2_g_idx"}
    if getattr(method, "actorder", None) == "group":
        needed |= {"w13_weight_g_idx", "w2_weight_g_idx"}
    return needed
