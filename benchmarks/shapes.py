"""Named model shapes without weights, and a loader that fills any of them with sensible numbers.

Imports vLLM and torch only: reference runs use it too, so that every engine gets the same bytes,
wherever it keeps them. vLLM's own dummy weights are about 1e-3, differ between CPU and CUDA, and
give the same tokens whatever a broken mapping does.
"""

import json
import zlib
from pathlib import Path
from typing import Any

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 8192,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES = {"qwen3-30b-a3b": QWEN3_30B_A3B}
LOAD_FORMAT = "scaled-random"


def write_shape(name: str, folder: Path, **changes: Any) -> Path:
    """Write the shape's `config.json` into `folder`; `changes` replace entries of it."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES[name], **changes}))
    return folder


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

    if tensor.dim() == 1:  # norms
        tensor.fill_(1.0)
        return
    rows = list(tensor) if tensor.dim() == 3 else [tensor]
    for index, row in enumerate(rows):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name}:{index}".encode()))
        scale = 1.0 if "embed" in name else row.shape[-1] ** -0.5
        made = torch.randn(row.shape, generator=generator, device=device, dtype=torch.float32)
        row.copy_((made * scale).to(tensor.dtype))
