"""A run of mode `full` with interpreted kernels, recorded on the device and replayed."""

import pytest
import torch

from prefetch_runtime.offline import Generation, generate
from prefetch_runtime.simulate import SimulationSettings, simulate
from prefetch_runtime.trace import Trace, load_trace
from tests.engine.conftest import ROOT
from tests.engine.test_trace_and_prediction import BUDGET_MIB, COUNTERS, EXPERT_BYTES, MODEL

PROMPTS = ["import torch", "#include <linux/"]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are compiled"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Generation, Trace]:
    folder = tmp_path_factory.mktemp("full-trace")
    path = folder / "trace.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        result = generate(
            MODEL,
            PROMPTS,
            settings={
                "slots_per_layer": 8,
                "policy": "lfru",
                "predictor": "next_gate",
                "prefetch_budget_mib": BUDGET_MIB,
                "trace_tokens": 512,
            },
            log=folder / "log",
            max_tokens=8,
            ignore_eos=True,
            engine_options={"max_model_len": 256, "enforce_eager": True, "seed": 0},
            worker_cls="tests.engine.full_worker.FullWorker",
            before=[["prefetch_trace_start", 512, True]],
            after=[["prefetch_audit"], ["prefetch_trace_save", str(path)]],
        )
    return result, load_trace(path)


def test_the_simulator_counts_what_the_kernels_counted(
    recorded: tuple[Generation, Trace],
) -> None:
    generation, trace = recorded
    stats = generation.stats
    assert stats is not None
    assert stats.mode == "full"
    assert generation.rpc["prefetch_audit"] == []
    simulated = simulate(
        trace,
        SimulationSettings(
            num_slots=8,
            policy="lfru",
            predictor="next_gate",
            link_gbs=float("inf"),  # host copies are there at once
            expert_bytes=EXPERT_BYTES,
            budget_bytes=int(BUDGET_MIB * 2**20),
            wide_steps="token",
            wide_if_it_might=True,
        ),
    )
    for engine, model in zip(stats.layers, simulated.layers, strict=True):
        for counter in COUNTERS:
            assert getattr(engine, counter) == getattr(model, counter), (engine.layer_idx, counter)
    assert stats.total("prefetch_used") > 0


def test_the_trace_holds_every_token_and_who_asked_for_it(
    recorded: tuple[Generation, Trace],
) -> None:
    generation, trace = recorded
    assert trace.next_gate is not None
    assert trace.next_gate.shape[1:] == (7, 8)
    assert set(trace.sequence.tolist()) == {0, 1}
    # The last token of each request is never fed back.
    assert trace.num_tokens > generation.num_tokens - len(PROMPTS)
