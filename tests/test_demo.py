"""The demo: the verdict is computed from the tokens, and each run gets what it should."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime import demo
from prefetch_runtime.demo import PROMPTS, DemoResult, run_demo
from prefetch_runtime.offline import WORKER_CLS, Generation


def _result(cached: Sequence[Sequence[int]], resident: Sequence[Sequence[int]]) -> DemoResult:
    return DemoResult(
        PROMPTS, Generation([], cached, 1.0, None), Generation([], resident, 1.0, None)
    )


@pytest.mark.parametrize(
    ("cached", "resident", "verdict"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], "identical: yes, 3 tokens"),
        ([[1, 2], [3]], [[1, 2], [4]], "identical: no, prompt 1 differs from token 0 on"),
        ([[1, 2], [3]], [[1, 9], [9]], "identical: no, prompt 0 differs from token 1 on"),
        ([[1], [3]], [[1, 2], [3]], "identical: no, prompt 0 differs from token 1 on"),
        ([[1, 2, 3], [3]], [[1, 2], [3]], "identical: no, prompt 0 differs from token 2 on"),
        ([[], []], [[], []], "identical: no, no tokens"),
        ([], [], "identical: no, no tokens"),
    ],
)
def test_the_verdict_is_of_every_token(
    cached: Sequence[Sequence[int]], resident: Sequence[Sequence[int]], verdict: str
) -> None:
    result = _result(cached, resident)
    assert result.verdict == verdict
    assert result.identical == verdict.startswith("identical: yes")


def test_runs_of_different_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer"):
        _ = _result([[1]], [[1], [2]]).verdict


def test_the_second_run_has_none_of_our_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []

    def generate(model: str, prompts: Sequence[str], **options: Any) -> Generation:
        calls.append({"model": model, "prompts": prompts, **options})
        return Generation([], [[len(calls)]], 1.0, None)

    monkeypatch.setattr(demo, "generate", generate)
    log, stages = tmp_path / "demo.log", list[str]()
    log.write_text("of an earlier run")
    result = run_demo("m", slots=8, max_tokens=5, log=log, on_stage=stages.append)
    cached, resident = calls
    assert cached["settings"] == {"slots_per_layer": 8, "predictor": "next_gate"}
    assert resident["settings"] is None
    same = [{key: call[key] for key in call if key != "settings"} for call in calls]
    assert same[0] == same[1]
    assert cached["ignore_eos"]
    assert cached["worker_cls"] == WORKER_CLS
    assert (result.cached.token_ids, result.resident.token_ids) == ([[1]], [[2]])
    assert log.read_bytes() == b""  # the earlier one is gone
    assert len(stages) == 2
