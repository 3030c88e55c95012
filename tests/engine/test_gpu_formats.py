"""Formats and families on a GPU: eager and as FULL graphs, bit for bit what vLLM alone does.

The cells of `python -m tests.engine.formats` that matter most, in six processes at once.
"""

from collections.abc import Mapping

import pytest

from tests.engine.formats import Cell, run_cases, select
from tests.helpers.checkpoints import FORMATS, HIDDEN, INTERMEDIATE

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

MODES, SLOTS = ("eager", "full"), ("top_k", "half")
REFUSED = "qwen3-fp8-dynamic"
CASES = [
    "qwen3-fp8-static",
    REFUSED,
    "qwen3-fp8-block",
    "qwen3-fp8-block-marlin",
    "qwen3-ct-fp8-channel",
    "qwen3-ct-int4",
    "qwen3-gptq",
    "qwen3-awq",
    "gpt-oss-mxfp4",
    "gpt-oss-bf16",
    "deepseek-bf16",
    "qwen2-bf16",
]

Cells = Mapping[tuple[str, str, str], Cell]


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """What each cell came to."""
    logs = tmp_path_factory.mktemp("formats")
    found = run_cases(select(CASES), MODES, SLOTS, jobs=6, budget_s=330, logs=logs)
    return {(cell.case, cell.mode, cell.slots): cell for cell in found}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [case for case in CASES if case != REFUSED])
def test_tokens_and_layer_outputs_are_those_of_resident_experts(
    case: str, mode: str, slots: str, cells: Cells
) -> None:
    cell = cells[case, mode, slots]
    assert cell.outcome == "equal", cell.detail


@pytest.mark.parametrize("mode", MODES)
def test_a_format_that_waves_cannot_serve_is_refused_with_what_can(mode: str, cells: Cells) -> None:
    cell = cells[REFUSED, mode, "half"]
    assert cell.outcome == "refused"
    assert "add --moe-backend marlin" in cell.detail


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith("qwen3") and case != REFUSED]
)
def test_a_miss_moves_what_the_format_weighs(case: str, cells: Cells) -> None:
    _, _, format_name = case.partition("-")
    weights = 3 * HIDDEN * INTERMEDIATE * FORMATS[format_name].bits / 8
    assert weights < cells[case, "eager", "half"].expert_bytes <= 1.2 * weights
