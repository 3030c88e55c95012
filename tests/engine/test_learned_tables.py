"""What a worker does with the table of its predictor; no engine is started."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from predictors import FrequencyPredictor, PredictorShape
from prefetch_runtime.config import ConfigError, PrefetchConfig
from prefetch_runtime.vllm.checks import UnsupportedError
from prefetch_runtime.vllm.engine import PrefetchEngine
from prefetch_runtime.vllm.worker import PrefetchWorker

SHAPE = PredictorShape(num_layers=3, num_experts=8, top_k=2)
IDS = np.array([[1, 5]])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of `frequency` in which every expert was chosen seven times."""
    predictor = FrequencyPredictor(SHAPE)
    predictor.counts[:] = 7
    predictor.save(tmp_path / "before.npz")
    return tmp_path / "before.npz"


def _engine(predictor: str, *, num_layers: int = 3, **settings: Any) -> Any:
    """As far as it goes when the model has been loaded."""
    given = {"slots_per_layer": 4, "prefetch_budget_mib": 1.0, **settings}
    engine: Any = PrefetchEngine.__new__(PrefetchEngine)
    engine.config = PrefetchConfig(predictor=predictor, **given)
    engine.mode, engine.device = "eager", torch.device("cpu")
    engine.host_store = SimpleNamespace(layer=lambda _: SimpleNamespace(num_experts=8), layers=[])
    engine._num_layers, engine._top_k, engine.captures = num_layers, 2, None
    engine._prefetcher, engine._has_begun = None, False
    engine.check_gates = lambda *_: None
    engine.scheduler = SimpleNamespace(
        seal=lambda: None,
        attach_prefetcher=lambda _: None,
        control_budgets=lambda _: None,
        needs_guesses=False,
    )
    return engine


def _worker(engine: Any, save_table: Path | None = None) -> Any:
    worker: Any = PrefetchWorker.__new__(PrefetchWorker)
    worker.prefetch_engine = engine
    path = None if save_table is None else str(save_table)
    worker.prefetch_config = PrefetchConfig(slots_per_layer=4, save_table=path)
    return worker


def test_a_table_of_another_number_of_layers_is_refused_once_they_are_counted(table: Path) -> None:
    engine = _engine("frequency", num_layers=4, predictor_table=str(table))
    with pytest.raises(ConfigError, match=r"^'predictor_table' .*\[3, 8\], expected \[4, 8\];"):
        engine.seal(torch.nn.Module())


def test_the_predictor_begins_with_its_table_whatever_the_warm_up_routed(
    table: Path, tmp_path: Path
) -> None:
    engine = _engine("frequency", predictor_table=str(table))
    worker = _worker(engine, tmp_path / "after.npz")
    engine.seal(torch.nn.Module())
    engine._prefetcher.observe(0, IDS)
    with pytest.raises(UnsupportedError, match="nothing is learned that could be saved"):
        worker.prefetch_save_table(str(tmp_path / "early.npz"))
    worker._keep_what_is_learned()
    assert worker.prefetch_saver is None
    assert [path.name for path in tmp_path.iterdir()] == ["before.npz"], "nothing before the start"
    engine.learn_anew()
    worker._keep_what_is_learned()
    engine._prefetcher.observe(2, IDS)
    worker.prefetch_saver.close()
    worker.prefetch_save_table(str(tmp_path / "asked.npz"))
    for name in ("after", "asked"):
        counts = FrequencyPredictor.load(tmp_path / f"{name}.npz", SHAPE).counts
        assert counts.tolist() == [[7] * 8, [7] * 8, [7, 8, 7, 7, 7, 8, 7, 7]]


def test_a_predictor_without_a_table_saves_none(tmp_path: Path) -> None:
    engine = _engine("previous_token")
    engine.seal(torch.nn.Module())
    engine.learn_anew()
    for worker in (_worker(engine), _worker(None), _worker(_engine("none"))):
        worker._keep_what_is_learned()
        assert worker.prefetch_saver is None
        with pytest.raises(UnsupportedError, match=r"to transition or frequency"):
            worker.prefetch_save_table(str(tmp_path / "t.npz"))
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_written_before_vllm_shuts_down_even_if_that_fails(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine("frequency", predictor_table=str(table))
    engine.seal(torch.nn.Module())
    engine.learn_anew()
    closed: list[bool] = []
    worker = _worker(engine, tmp_path / "after.npz")
    worker._close_cache = lambda: closed.append(True)
    worker._keep_what_is_learned()

    def shutdown(_: Any) -> None:
        assert (tmp_path / "after.npz").is_file()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(PrefetchWorker.__bases__[0], "shutdown", shutdown)
    with pytest.raises(RuntimeError, match="the device is gone"):
        worker.shutdown()
    assert closed == [True]
