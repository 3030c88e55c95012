"""A hidden size that vLLM pads for the kernel of the experts, on a GPU: gpt-oss in MXFP4 (Marlin).

gpt-oss-20b has 2880 columns, which are padded to 3072; here 288 to 512. What is brought in ahead
is chosen by the next layer's router, which knows nothing of the padding.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.formats import MODES, REFERENCE, RUNS, kinds_of
from tests.engine.gpu_runs import Plan, assert_same, engine, record_of, run_plans, runs_of, stats_of
from tests.helpers import checkpoints
from tests.helpers.checkpoints import FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(400)]

HIDDEN = 288


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of every engine."""
    folder: Path = tmp_path_factory.mktemp("hidden-size")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "HIDDEN", HIDDEN)
        model = checkpoints.write(folder, "gpt-oss", "mxfp4", config={"hidden_size": HIDDEN})
    kinds = kinds_of(model, FORMATS["mxfp4"].backend)
    settings = {"slots_per_layer": 8, "predictor": "next_gate"}
    engines = [
        engine("graphs", RUNS, llm=kinds["graphs"], widest=[2, 4]),
        engine("eager", RUNS, llm=kinds["eager"]),
    ]
    engines.extend(
        engine(
            f"cache-{mode}",
            RUNS,
            {**settings, "mode": mode},
            llm=kinds[REFERENCE[mode]],
        )
        for mode in MODES
    )
    steps = max(run["max_tokens"] for run in RUNS) + 64
    return run_plans([Plan("hidden-size", engines, steps=steps)], folder / "run", budget_s=300)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    mode: str, records: dict[str, Any]
) -> None:
    # With 8 slots and 4 experts a token, `segmented` replays two tokens at most.
    widest = {"eager": None, "full": 4, "segmented": 2}[mode]
    expected = runs_of(records, "eager" if widest is None else "graphs", widest)
    ours = runs_of(records, f"cache-{mode}")
    assert_same(ours, expected)
    assert [line for run in ours.values() for line in run["audit"]] == []


@pytest.mark.parametrize("mode", MODES)
def test_the_next_router_brings_in_what_is_used(mode: str, records: dict[str, Any]) -> None:
    stats = stats_of(record_of(records, f"cache-{mode}")["runs"]["four"])
    assert stats.mode == mode
    assert stats.total("prefetch_used") > 0
