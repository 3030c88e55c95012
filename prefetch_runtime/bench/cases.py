"""Which engines are started, and with what: one case is one engine with one number of slots."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefetch_runtime.bench.config import BenchConfig, Engine, parse_engine, slot_counts
from prefetch_runtime.config import ADDITIONAL_CONFIG_KEY, ConfigError
from prefetch_runtime.model_sizes import ModelSizes
from prefetch_runtime.offline import WORKER_CLS

INJECTED_WORKER_CLS = "prefetch_runtime.vllm.injected_worker.InjectedWorker"
EXPERTS = ("w13_weight", "w2_weight")
OFFLOADERS = ("uva", "uva-all", "offloader")
"""vLLM's own, which must have offloaded something."""
_BLOCK = 16  # tokens of a KV cache block


@dataclass(frozen=True, slots=True)
class Case:
    """One engine with one number of slots; None: every expert resident."""

    engine: Engine
    slots: int | None

    @property
    def name(self) -> str:
        return self.engine.name if self.slots is None else f"{self.engine.name}:{self.slots}"


def cases_of(config: BenchConfig, sizes: ModelSizes) -> list[Case]:
    """Every case of a configuration, baselines with as many experts on the device as ours.

    Raises:
        ConfigError: an unknown engine, or slots that the model cannot have.
    """
    engines = [parse_engine(name) for name in config.engines]
    cases: list[Case] = []
    for engine in engines:
        if not engine.sized:
            cases.append(Case(engine, None))
            continue
        asked = config.slots_of.get(engine.name, config.slots)
        for slots in slot_counts(asked, num_experts=sizes.num_experts, top_k=sizes.top_k):
            if engine.is_cache or slots < sizes.num_experts:  # a full offloader is `resident`
                cases.append(Case(engine, slots))
    return cases


@dataclass(frozen=True, slots=True)
class Layers:
    """How vLLM's prefetch offloader divides the layers: the last `offloaded` of each `group`."""

    group: int
    offloaded: int
    ahead: int
    """Layers fetched ahead, which is also the number of its buffers on the device."""


def divide_layers(num_layers: int, budget: float) -> Layers | None:
    """The division with the most layers resident, buffers included, in `budget` layers of memory.

    Two buffers let one layer be copied while another is computed; one is taken where there is no
    room for two. vLLM 0.26 wraps its buffers wrongly unless their number divides that of the
    offloaded layers. None: not even one buffer fits.
    """
    best: tuple[tuple[int, int, int], Layers] | None = None
    for ahead in (2, 1):
        for group in range(1, num_layers + 1):
            for offloaded in range(1, group + 1):
                away = sum(i % group >= group - offloaded for i in range(num_layers))
                resident = num_layers - away
                if resident + ahead > budget or away % ahead or away < ahead:
                    continue
                rank = (ahead, resident, -group)
                if best is None or rank > best[0]:
                    best = (rank, Layers(group, offloaded, ahead))
    return None if best is None else best[1]


def needed_tokens(config: BenchConfig) -> int:
    """The longest sequence that is sent: prompt, steps that are timed or not, and those in which
    the prompts of the widest batch are read."""
    return config.prompt_tokens + _prompt_steps(config) + config.warm + config.new_tokens + 2


def _prompt_steps(config: BenchConfig) -> int:
    widest = max(config.batches)
    return math.ceil(widest * config.prompt_tokens / config.max_num_batched_tokens) + 2


def check_lengths(config: BenchConfig, positions: int | None) -> None:
    """Refuse sequences that vLLM would refuse of every engine.

    Args:
        positions: tokens that a sequence of the model may have; None: not known.

    Raises:
        ConfigError: names the settings.
    """
    needed = needed_tokens(config)
    if positions is None or needed <= positions:
        return
    reading = needed - config.prompt_tokens - config.warm - config.new_tokens
    raise ConfigError(
        f"prompt_tokens {config.prompt_tokens}, warm {config.warm} and new_tokens "
        f"{config.new_tokens} make sequences of {needed} tokens ({reading} for steps that read the "
        f"prompts of batch {max(config.batches)}), but {config.model!r} takes {positions}; lower "
        "one of them"
    )


MOST_BYTES_ON_A_CPU = 8 << 30
"""Of experts, for an engine to be timed where there is no GPU."""


def refusal(case: Case, *, has_gpu: bool, compiled: bool, sizes: ModelSizes) -> str | None:
    """Why a case is not even started; None: it is."""
    if not has_gpu and case.engine.base in OFFLOADERS:
        return "vLLM's offloader needs a CUDA device, and there is none"
    if not has_gpu and case.engine.base in ("full", "segmented", "resident-pieces"):
        return f"{case.engine.base} decodes as CUDA graphs, and there is no CUDA device"
    if not has_gpu and sizes.experts_bytes > MOST_BYTES_ON_A_CPU:
        return (
            f"{sizes.experts_bytes / 2**30:.1f} GiB of experts take minutes a step on a CPU; cut "
            "the model with layers, or take models/tiny-moe"
        )
    if case.engine.base == "resident-pieces" and not compiled:
        return "vLLM cuts its graphs into pieces only with compile = true"
    if case.engine.base == "offloader" and _division(case, sizes) is None:
        return "vLLM's prefetch offloader keeps a layer's experts whole: no room for one"
    return None


def _division(case: Case, sizes: ModelSizes) -> Layers | None:
    assert case.slots is not None
    budget = sizes.num_moe_layers * case.slots / sizes.num_experts
    return divide_layers(sizes.num_layers, budget)


def engine_spec(
    case: Case,
    config: BenchConfig,
    sizes: ModelSizes,
    *,
    model: str,
    vocabulary: int,
    random_weights: bool,
    has_gpu: bool,
    routing: Path | None,
    batches: list[int],
    positions: int | None = None,
) -> dict[str, Any]:
    """What `vllm/bench_engine.py` is given.

    Args:
        model: the folder or hub name that vLLM loads.
        batches: those that are not measured yet.
        positions: as of `check_lengths`.
    """
    widest, prompt_steps = max(config.batches), _prompt_steps(config)
    longest = _BLOCK * math.ceil((needed_tokens(config) + 14) / _BLOCK)
    if positions is not None and needed_tokens(config) <= positions:
        longest = min(longest, positions)
    llm: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": longest,
        "max_num_seqs": widest,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, widest),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "enforce_eager": not (has_gpu and case.engine.has_graphs),
    }
    in_pieces = case.engine.base == "resident-pieces"
    if has_gpu:
        # Fixed, so that no engine trades KV cache for experts. Room for a quarter more.
        kv_bytes = widest * sizes.kv_bytes(longest) * 5 // 4 + (64 << 20)
        llm["kv_cache_memory_bytes"] = kv_bytes
        if config.side_by_side > 1:
            # vLLM insists that so much is free when it starts; it takes what it needs.
            llm["gpu_memory_utilization"] = 0.05
        if case.engine.has_graphs:
            # What mode full allows, for every engine: prompts run without graphs.
            llm["compilation_config"] = {
                "cudagraph_mode": "PIECEWISE" if in_pieces else "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted(config.batches),
                **({} if config.compile else {"mode": 0}),
            }
    if random_weights:
        llm["load_format"] = "scaled-random"
    if config.attention_backend is not None:
        llm["attention_config"] = {"backend": config.attention_backend}
    if config.moe_backend is not None:
        llm["moe_backend"] = config.moe_backend
    llm |= _arguments_of(case, config, sizes, injected=routing is not None)
    return {
        "llm": llm,
        "is_cache": case.engine.is_cache,
        "metrics": case.engine.metrics,
        "offloads": case.engine.base in OFFLOADERS,
        "in_pieces": in_pieces,
        "random_weights": random_weights,
        "routing": None if routing is None else str(routing),
        "batches": batches,
        "prompt_tokens": config.prompt_tokens,
        "prompt_file": config.prompt_file,
        "prompt_steps": prompt_steps,
        "new_tokens": config.new_tokens,
        "warm": config.warm,
        "repeats": config.repeats,
        "seconds_per_batch": config.seconds_per_batch,
        "vocabulary": vocabulary,
    }


def _arguments_of(
    case: Case, config: BenchConfig, sizes: ModelSizes, *, injected: bool
) -> Mapping[str, Any]:
    """The arguments that make the engine what it is."""
    engine, slots = case.engine, case.slots
    if engine.is_cache:
        settings: dict[str, Any] = {
            "slots_per_layer": slots,
            "mode": engine.base,
            "policy": engine.policy,
            "predictor": engine.predictor,
            "staging_slots": config.staging_slots,
            "metrics": engine.metrics,
            "prefetch_budget_mib": config.prefetch_budget_mib,
        }
        return {
            "worker_cls": INJECTED_WORKER_CLS if injected else WORKER_CLS,
            "additional_config": {ADDITIONAL_CONFIG_KEY: settings},
        }
    if engine.base in ("uva", "uva-all"):
        absent = sizes.num_experts - (slots or 0)
        # vLLM goes on until the limit is reached: a byte less keeps it from one tensor too many.
        gib = (sizes.num_moe_layers * absent * sizes.expert_bytes - 1) / 2**30
        return {
            "offload_backend": "uva",
            "cpu_offload_gb": gib,
            "cpu_offload_params": list(EXPERTS),
        }
    if engine.base == "offloader":
        division = _division(case, sizes)
        assert division is not None
        return {
            "offload_backend": "prefetch",
            "offload_group_size": division.group,
            "offload_num_in_group": division.offloaded,
            "offload_prefetch_step": division.ahead,
            "offload_params": list(EXPERTS),
        }
    return {}
