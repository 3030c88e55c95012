"""A loader that fills any model with sensible numbers. Imports vLLM and torch only.

Runs without this package read it as well, by its path, so that every engine gets the same bytes,
wherever it keeps them. vLLM's own dummy weights are about 1e-3, differ between CPU and CUDA, and
give the same tokens whatever a broken mapping does.
"""

import zlib
from typing import Any

LOAD_FORMAT = "scaled-random"


def register_loader() -> None:
    """Make `--load-format scaled-random` known to vLLM in this process."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class ScaledRandomLoader(BaseModelLoader):
        """Fills weights with N(0, 1 / fan_in), each from a seed made of its name and row."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002
            """Fill every parameter, experts one by one."""
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            scratch = _Scratch(device)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    _fill(name, parameter.data, scratch)


class _Scratch:
    """Device memory that is used again and again.

    While vLLM loads, it has torch's allocator not split blocks of 20 MiB, which every request of 1
    to 10 MiB gets one of, and which none gets back once it is free: such temporaries would take all
    of the GPU that is left.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._held: dict[Any, Any] = {}

    def of(self, shape: Any, dtype: Any) -> Any:
        """A tensor of any content, until the next one of this type."""
        import torch

        numel = shape.numel()
        held = self._held.get(dtype)
        if held is None or held.numel() < numel:
            self._held[dtype] = None  # freed before the larger one is taken
            held = self._held[dtype] = torch.empty(numel, dtype=dtype, device=self.device)
        return held[:numel].view(shape)

    def put(self, made: Any, row: Any) -> None:
        """Copy what was made, in the type of `row`, to wherever that is."""
        is_given = made.dtype == row.dtype
        row.copy_(made if is_given else self.of(made.shape, row.dtype).copy_(made))


def _fill(name: str, tensor: Any, scratch: _Scratch) -> None:
    import torch

    if tensor.dim() == 1 and tensor.is_floating_point():  # norms
        tensor.fill_(1.0)
        return
    if not tensor.is_floating_point() or "scale" in name:
        _fill_quantised(name, tensor, scratch)
        return
    rows = list(tensor) if tensor.dim() == 3 else [tensor]
    for index, row in enumerate(rows):
        made = scratch.of(row.shape, torch.float32)
        made.normal_(generator=_generator(name, index, scratch))
        made.mul_(1.0 if "embed" in name else row.shape[-1] ** -0.5)
        scratch.put(made, row)


def _fill_quantised(name: str, tensor: Any, scratch: _Scratch) -> None:
    """Packed weights of random bits, and scales that make them numbers of sensible size."""
    import torch

    for index, row in enumerate(tensor):
        generator = _generator(name, index, scratch)
        if "scale" not in name:
            limits = torch.iinfo(tensor.dtype)
            most = 2**31 - 1 if tensor.dtype == torch.int32 else limits.max + 1
            made = scratch.of(row.shape, torch.int64)
            scratch.put(made.random_(0, most, generator=generator), row)
        elif tensor.dtype == torch.uint8:  # exponents; 4-bit floats reach 6
            row.fill_(120)
        else:
            made = scratch.of(row.shape, torch.float32).uniform_(generator=generator).add_(0.5)
            # fp8 weights are filled as if they had no scale, 4-bit integers reach 8.
            scratch.put(made.mul_(1.0 if tensor.dtype == torch.float32 else 0.005), row)


def _generator(name: str, index: int, scratch: _Scratch) -> Any:
    import torch

    seed = zlib.crc32(f"{name}:{index}".encode())
    return torch.Generator(scratch.device).manual_seed(seed)
