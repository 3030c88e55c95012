"""The thread that keeps the file of a learned table up to date."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from predictors import FrequencyPredictor, PredictorShape
from prefetch_runtime.table_saver import TableSaver

SHAPE = PredictorShape(num_layers=2, num_experts=4, top_k=2)
IDS = np.array([[0, 3]])


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def counts_in(path: Path) -> list[int]:
    return FrequencyPredictor.load(path, SHAPE).counts[1].tolist() if path.exists() else []


def test_an_engine_that_is_killed_has_left_what_it_had_learned(tmp_path: Path) -> None:
    learned, path = FrequencyPredictor(SHAPE), tmp_path / "t.npz"
    saver = TableSaver(learned, path, every_s=0.02)
    time.sleep(0.1)
    assert not path.exists(), "nothing was learned"
    learned.observe(1, IDS)
    assert within(10, lambda: counts_in(path) == learned.counts[1].tolist())
    learned.observe(1, IDS)
    assert within(10, lambda: counts_in(path) == learned.counts[1].tolist())
    saver.close()


def test_a_table_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    learned, path = FrequencyPredictor(SHAPE), tmp_path / "t.npz"
    saver = TableSaver(learned, path, every_s=0.02)
    learned.observe(1, IDS)
    assert within(10, path.exists)
    time.sleep(0.1)  # a write under way when the counts changed
    written = path.stat().st_mtime_ns
    time.sleep(0.2)
    assert path.stat().st_mtime_ns == written
    saver.close()


def test_the_last_steps_are_written_when_it_is_closed(tmp_path: Path) -> None:
    learned, path = FrequencyPredictor(SHAPE), tmp_path / "t.npz"
    saver = TableSaver(learned, path, every_s=3600)
    learned.observe(1, IDS)
    saver.close()
    assert counts_in(path) == learned.counts[1].tolist()
    path.unlink()
    saver.close()
    assert not path.exists(), "closed twice, written once"


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned, path = FrequencyPredictor(SHAPE), tmp_path / "missing" / "t.npz"
    with caplog.at_level(logging.WARNING):
        saver = TableSaver(learned, path, every_s=0.02)
        learned.observe(1, IDS)
        assert within(10, lambda: bool(caplog.records))
        time.sleep(0.1)
    (record,) = caplog.records
    assert "could not be written to" in record.getMessage()
    path.parent.mkdir()
    assert within(10, path.exists)
    saver.close()
    path.unlink()
    path.parent.rmdir()


def test_a_table_that_cannot_be_written_in_the_end_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned, path = FrequencyPredictor(SHAPE), tmp_path / "missing" / "t.npz"
    saver = TableSaver(learned, path, every_s=3600)
    with pytest.raises(OSError, match="missing"):
        saver.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "Expert cache: what the predictor has learned could not be written to "
        f"{path}: No such file or directory"
    )
