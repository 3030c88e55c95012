"""Runs vLLM as a spec says and records tokens and MoE layer outputs, to be compared bit for bit.

    python benchmarks/reference.py SPEC.json OUT.pt

Imports vLLM and torch and nothing of this project: a run whose engine names no worker class is
vLLM's own, and says so by failing if any of our packages was loaded. The spec is one JSON object:

    {"engines": [{"name": "resident", "llm": {... arguments of vllm.LLM ...}}],
     "batches": [{"name": "b4", "prompts": ["text", [token, ids]], "max_tokens": 16}],
     "layers": [0, 7],            MoE layers to record, none by default
     "digest": true,              keep a hash of each output in place of the output
     "rpc": ["prefetch_stats"]}   worker methods to call after each batch

OUT holds {engine: {batch: {"tokens": [[int]], "layers": {layer: [tensor or digest per forward]},
"seconds": float, "rpc": {method: result}}}}.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = ("prefetch_runtime", "graphs", "predictors")


def moe_layers(model: Any) -> list[Any]:
    """The model's MoE runners in layer order."""
    return [module for module in model.modules() if "MoERunner" in _class_names(module)]


def _class_names(module: Any) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


class LayerRecorder:
    """Keeps what chosen MoE layers return, one entry per forward, in order."""

    def __init__(self, model: Any, layers: list[int], *, digest: bool) -> None:
        self.outputs: dict[int, list[Any]] = {layer: [] for layer in layers}
        self._digest = digest
        runners = moe_layers(model)
        if layers and max(layers) >= len(runners):
            raise ValueError(
                f"layer {max(layers)} asked for, the model has {len(runners)} MoE layers"
            )
        self._hooks = [runners[i].register_forward_hook(self._hook(i)) for i in layers]

    def _hook(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 (torch's signature)
            rows = output.detach().to("cpu", copy=True)
            self.outputs[layer].append(digest_of(rows) if self._digest else rows)

        return keep

    def take(self) -> dict[int, list[Any]]:
        """What was recorded since the last call."""
        taken = {layer: list(rows) for layer, rows in self.outputs.items()}
        for rows in self.outputs.values():
            rows.clear()
        return taken

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def digest_of(rows: Any) -> str:
    """A hash of shape, dtype and every bit of a tensor."""
    import torch

    digest = hashlib.sha256(f"{tuple(rows.shape)} {rows.dtype}".encode())
    digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def differences(ours: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """How one engine's record differs from another's, a line each; empty when bit-equal.

    Raises:
        ValueError: there is nothing to compare, or the records are of other batches or layers.
    """
    if not reference or ours.keys() != reference.keys():
        raise ValueError(f"records of other batches: {sorted(ours)} and {sorted(reference)}")
    found: list[str] = []
    for batch, expected in reference.items():
        got = ours[batch]
        _check_comparable(batch, got, expected)
        for index, (a, b) in enumerate(zip(got["tokens"], expected["tokens"], strict=True)):
            if a != b:
                at = next(
                    (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                    min(len(a), len(b)),
                )
                found.append(f"{batch}: prompt {index}: tokens differ from {at} on")
        for layer, outputs in expected["layers"].items():
            theirs = got["layers"][layer]
            if len(theirs) != len(outputs):
                found.append(f"{batch}: layer {layer}: {len(theirs)} forwards, not {len(outputs)}")
                continue
            for step, (a, b) in enumerate(zip(theirs, outputs, strict=True)):
                if not _same_bits(a, b):
                    found.append(f"{batch}: layer {layer}: forward {step}: output differs")
    return found


def _check_comparable(batch: str, ours: dict[str, Any], reference: dict[str, Any]) -> None:
    prompts = [len(record["tokens"]) for record in (ours, reference)]
    if prompts[0] != prompts[1]:
        raise ValueError(f"{batch}: records of {prompts[0]} and {prompts[1]} prompts")
    if ours["layers"].keys() != reference["layers"].keys():
        raise ValueError(f"{batch}: records of other layers")
    if not all([reference["tokens"], *reference["tokens"], *reference["layers"].values()]):
        raise ValueError(f"{batch}: nothing was recorded, so nothing can be compared")


def _same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs, or two digests, are the same to the last bit."""
    import torch

    if isinstance(a, str) or isinstance(b, str):
        return bool(type(a) is type(b) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_engine(
    engine: dict[str, Any],
    spec: dict[str, Any],
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Start one engine, run every batch, return its record.

    `before` is called with the engine (`vllm.LLM`) when it is up, before the first batch; `after`
    behind the last.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(**engine["llm"])
    recorder: list[LayerRecorder] = []
    layers, digest = list(spec.get("layers", [])), bool(spec.get("digest", True))
    record: dict[str, Any] = {}
    try:
        if before is not None:
            before(llm)
        if layers:
            llm.collective_rpc(
                lambda worker: recorder.append(
                    LayerRecorder(worker.get_model(), layers, digest=digest)
                )
            )
        for batch in spec["batches"]:
            prompts = [
                prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                for prompt in batch["prompts"]
            ]
            sampling = SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=batch["max_tokens"]
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            record[batch["name"]] = {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "seconds": time.perf_counter() - started,
                "layers": recorder[0].take() if recorder else {},
                "rpc": {name: llm.collective_rpc(name)[0] for name in engine.get("rpc", [])},
            }
        if after is not None:
            after(llm)
    finally:
        if recorder:
            recorder[0].close()
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return record


def main() -> int:
    """Run every engine of the spec, one after another, in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    spec = json.loads(arguments.spec.read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Our plugin would load our package; without it only a worker class can.
    os.environ["VLLM_PLUGINS"] = ""

    import torch

    records: dict[str, Any] = {}
    for engine in spec["engines"]:
        records[engine["name"]] = run_engine(engine, spec)
        loaded = [name for name in OURS if name in sys.modules]
        if loaded and "worker_cls" not in engine["llm"]:
            raise RuntimeError(f"the reference run {engine['name']!r} has loaded {loaded}")
        torch.save(records, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
