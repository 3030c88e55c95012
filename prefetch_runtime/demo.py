"""`prefetch-runtime demo`: the same prompts with few slots and with every expert resident."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefetch_runtime.offline import WORKER_CLS, Generation, empty_log, generate

PROMPTS = (
    "import torch\nimport torch.nn as nn\n\nclass",
    "#include <linux/",
    "The novel opens in the year",
    "func (t *Type) String() string {",
)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both runs of the demo."""

    prompts: Sequence[str]
    cached: Generation
    resident: Generation

    @property
    def first_difference(self) -> tuple[int, int] | None:
        """(prompt, position) of the first token that differs, or None."""
        pairs = zip(self.cached.token_ids, self.resident.token_ids, strict=True)
        for prompt, (ours, theirs) in enumerate(pairs):
            for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    return prompt, position
            if len(ours) != len(theirs):
                return prompt, min(len(ours), len(theirs))
        return None

    @property
    def identical(self) -> bool:
        """Whether every token of every prompt is the same, and there are any."""
        return self.cached.num_tokens > 0 and self.first_difference is None

    @property
    def verdict(self) -> str:
        """The last line of the demo."""
        if self.identical:
            return f"identical: yes, {self.cached.num_tokens} tokens"
        at = self.first_difference
        where = "no tokens" if at is None else f"prompt {at[0]} differs from token {at[1]} on"
        return f"identical: no, {where}"


def run_demo(
    model: str,
    *,
    slots: int,
    predictor: str = "next_gate",
    max_tokens: int,
    log: Path,
    on_stage: Callable[[str], None],
    worker_cls: str = WORKER_CLS,
) -> DemoResult:
    """Generate twice, each time in a fresh process: from the cache, then without our code.

    Raises:
        GenerationError: one of the runs failed.
    """
    empty_log(log)
    # Two sequences at a time: with all four a step would need more experts than there are slots,
    # and nothing is predicted then.
    options = {"max_model_len": 512, "max_num_seqs": 2, "enforce_eager": True, "seed": 0}

    def go(settings: dict[str, Any] | None) -> Generation:
        return generate(
            model,
            PROMPTS,
            settings=settings,
            log=log,
            max_tokens=max_tokens,
            ignore_eos=True,
            engine_options=options,
            worker_cls=worker_cls,
        )

    on_stage(f"from the cache, {slots} slots per layer")
    cached = go({"slots_per_layer": slots, "predictor": predictor})
    on_stage("with every expert resident, vLLM alone")
    return DemoResult(PROMPTS, cached, go(None))
