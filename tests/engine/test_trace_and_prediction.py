"""A recorded run replayed by the simulator, and tokens that no prediction changes."""

from pathlib import Path

import pytest

from prefetch_runtime.offline import Generation, generate
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.trace import Trace, load_trace

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "tiny-moe")
PROMPTS = ["import torch\nimport torch.nn as nn\n\nclass", "#include <linux/", "The novel opens"]
EXPERT_BYTES = 49152
BUDGET_MIB = 2 * EXPERT_BYTES / 2**20  # whole experts: the host copies no parts

COUNTERS = (
    "hits",
    "late",
    "misses",
    "evictions",
    "prefetched",
    "prefetch_used",
    "prefetch_dropped",
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def run(folder: Path, settings: dict[str, object]) -> tuple[Generation, Trace]:
    folder.mkdir()
    path = folder / "trace.npz"
    result = generate(
        MODEL,
        PROMPTS,
        settings={"slots_per_layer": 8, **settings},
        log=folder / "log",
        max_tokens=24,
        ignore_eos=True,
        engine_options={"max_model_len": 256, "enforce_eager": True, "seed": 0},
        before=[["prefetch_trace_start", 4096, True]],
        after=[["prefetch_audit"], ["prefetch_trace_save", str(path)]],
    )
    return result, load_trace(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Generation, Trace]:
    return run(tmp_path_factory.mktemp("trace") / "plain", {})


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Generation, Trace]:
    settings = {"predictor": "next_gate", "prefetch_budget_mib": BUDGET_MIB, "policy": "lfru"}
    return run(tmp_path_factory.mktemp("trace") / "predicted", settings)


def test_a_trace_holds_every_token_and_who_asked_for_it(plain: tuple[Generation, Trace]) -> None:
    generation, trace = plain
    assert trace.num_layers == 8
    assert trace.num_experts == 32
    assert trace.next_gate is not None
    assert set(trace.sequence.tolist()) == {0, 1, 2}
    # The last token of each request is never fed back.
    assert trace.num_tokens > generation.num_tokens - len(PROMPTS)


@pytest.mark.parametrize("which", ["plain", "predicted"])
def test_the_simulator_counts_what_the_engine_counted(
    which: str, request: pytest.FixtureRequest
) -> None:
    generation, trace = request.getfixturevalue(which)
    stats = generation.stats
    assert stats is not None
    settings = SimulationSettings(
        num_slots=8,
        policy=stats.policy,
        predictor="none" if which == "plain" else "next_gate",
        link_gbs=float("inf"),  # host copies are there at once
        expert_bytes=EXPERT_BYTES,
        budget_bytes=int(BUDGET_MIB * 2**20),
        wide_steps="token",
    )
    simulated = simulate(trace, settings)
    for engine, model in zip(stats.layers, simulated.layers, strict=True):
        for counter in COUNTERS:
            assert getattr(engine, counter) == getattr(model, counter), (engine.layer_idx, counter)
    assert bool(stats.total("prefetch_used")) == (which == "predicted")
    assert stats.total("bytes_copied") == stats.total("misses") * EXPERT_BYTES
    assert stats.total("bytes_prefetched") == stats.total("prefetched") * EXPERT_BYTES


def test_prediction_changes_hits_and_no_token(
    plain: tuple[Generation, Trace], predicted: tuple[Generation, Trace]
) -> None:
    assert predicted[0].token_ids == plain[0].token_ids
    assert predicted[0].rpc["prefetch_audit"] == []
    without, with_prediction = plain[0].stats, predicted[0].stats
    assert without is not None
    assert with_prediction is not None
    assert with_prediction.hit_rate > without.hit_rate
