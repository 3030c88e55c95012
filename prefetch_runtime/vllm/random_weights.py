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
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    _fill(name, parameter.data, device)


def _fill(name: str, tensor: Any, device: Any) -> None:
    import torch

    if tensor.dim() == 1 and tensor.is_floating_point():  # norms
        tensor.fill_(1.0)
        return
    if not tensor.is_floating_point() or "scale" in name:
        _fill_quantised(name, tensor, device)
        return
    rows = list(tensor) if tensor.dim() == 3 else [tensor]
    for index, row in enumerate(rows):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}:{index}".encode()))
        scale = 1.0 if "embed" in name else row.shape[-1] ** -0.5
        made = torch.randn(row.shape, generator=generator, device=device, dtype=torch.float32)
        row.copy_((made * scale).to(tensor.dtype))


def _fill_quantised(name: str, tensor: Any, device: Any) -> None:
    """Packed weights of random bits, and scales that make them numbers of sensible size."""
    import torch

    for index, row in enumerate(tensor):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}:{index}".encode()))
        if "scale" not in name:
            limits = torch.iinfo(tensor.dtype)
            most = 2**31 - 1 if tensor.dtype == torch.int32 else limits.max + 1
            made = torch.randint(0, most, row.shape, generator=generator, device=device)
            row.copy_(made.to(tensor.dtype))
        elif tensor.dtype == torch.uint8:  # exponents; 4-bit floats reach 6
            row.fill_(120)
        else:
            made = torch.rand(row.shape, generator=generator, device=device) + 0.5
            # fp8 weights are filled as if they had no scale, 4-bit integers reach 8.
            row.copy_((made * (1.0 if tensor.dtype == torch.float32 else 0.005)).to(tensor.dtype))
