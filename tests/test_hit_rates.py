"""Hit rates: curves, batches of independent streams against the simulator, and names."""

from pathlib import Path

import numpy as np
import pytest

from prefetch_runtime.config import ConfigError
from prefetch_runtime.hit_rates import (
    CURVES,
    Curve,
    CurveHitRates,
    Demand,
    HitRates,
    TraceHitRates,
    create_hit_rates,
    matching_curve,
)
from prefetch_runtime.trace import Trace, TraceError, load_trace

ROOT = Path(__file__).resolve().parent.parent


def _qwen(name: str = "qwen3-30b-a3b", batch: int = 1) -> HitRates:
    return create_hit_rates(name, num_experts=128, top_k=8, batch=batch)


class TestCurves:
    @pytest.mark.parametrize("name", CURVES)
    def test_a_curve_rises_from_none_to_all(self, name: str) -> None:
        rates = [CURVES[name].hit_rate(share) for share in np.linspace(0, 1, 101)]
        assert (rates[0], rates[-1]) == (0.0, 1.0)
        assert rates == sorted(rates)
        assert CURVES[name].source

    @pytest.mark.parametrize("name", CURVES)
    def test_every_curve_beats_uniform_routing(self, name: str) -> None:
        curve = CURVES[name]
        for slots in curve.points:
            assert curve.hit_rate(slots / curve.num_experts) > slots / curve.num_experts

    def test_one_stream_gets_the_published_rates(self) -> None:
        for slots, rate in CURVES["qwen3-30b-a3b"].points.items():
            demand = _qwen().demand(slots)
            assert demand.demanded == 8
            assert demand.hit_rate == pytest.approx(rate)

    def test_between_two_points_it_is_a_straight_line(self) -> None:
        assert _qwen().demand(16).hit_rate == pytest.approx((0.366 + 0.741) / 2)

    def test_another_models_curve_is_used_by_share_and_says_so(self) -> None:
        rates = _qwen("olmoe-1b-7b")
        assert rates.demand(32).hit_rate == pytest.approx(0.514)
        assert "a model with 64 experts, 8 per token" in rates.origin
        assert "a model with" not in _qwen().origin

    def test_an_unknown_name_gets_the_names_and_a_suggestion(self) -> None:
        with pytest.raises(ConfigError, match=r"choose one of .*did you mean 'mixtral-8x7b'\?"):
            _qwen("mixtral-8x22b")

    @pytest.mark.parametrize(
        ("shape", "name"),
        [
            (("qwen3_moe", 128, 8), "qwen3-30b-a3b"),
            (("olmoe", 64, 8), "olmoe-1b-7b"),
            (("gpt_oss", 32, 4), "gpt-oss-20b"),
            (("mixtral", 8, 2), "mixtral-8x7b"),
            (("gpt_oss", 128, 4), "uniform"),
            (("qwen3_moe", 32, 4), "uniform"),
            (("deepseek_v3", 256, 8), "uniform"),
        ],
    )
    def test_only_a_model_of_the_same_shape_gets_a_curve_unasked(
        self, shape: tuple[str, int, int], name: str
    ) -> None:
        assert matching_curve(*shape) == name


class TestBatches:
    @pytest.mark.parametrize("batch", [1, 2, 8, 64])
    @pytest.mark.parametrize("slots", [8, 32, 100])
    def test_uniform_routing_hits_the_share_of_slots_at_any_batch(
        self, batch: int, slots: int
    ) -> None:
        assert _qwen("uniform", batch).demand(slots).hit_rate == pytest.approx(slots / 128)

    def test_a_batch_demands_the_union_of_its_tokens(self) -> None:
        assert _qwen(batch=2).demand(64).demanded == pytest.approx(8 + 8 * 120 / 128)
        assert _qwen(batch=4000).demand(64).demanded == pytest.approx(128)

    def test_a_step_too_wide_for_the_slots_hits_a_little_less_than_one_that_fits(self) -> None:
        too_wide, fits = (_qwen(batch=8).demand(slots).hit_rate for slots in (51, 52))
        assert 51 / 128 < too_wide < fits < too_wide + 0.02  # it demands 51.6

    def test_all_slots_miss_nothing(self) -> None:
        assert _qwen(batch=8).demand(128).absent == 0

    def test_more_sequences_leave_each_fewer_slots(self) -> None:
        rates = [_qwen(batch=batch).demand(64).hit_rate for batch in (1, 2, 4, 8, 16)]
        assert rates == sorted(rates, reverse=True)

    @pytest.mark.parametrize("batch", [2, 4, 8, 16])
    def test_a_batch_is_predicted_from_one_stream_as_the_simulator_has_it(self, batch: int) -> None:
        trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
        alone = TraceHitRates(trace, batch=1)
        points = {slots: alone.demand(slots).hit_rate for slots in (4, 8, 16, 24)}
        curve = Curve(source="", num_experts=32, top_k=4, points=points)
        predicted = CurveHitRates(curve, "", num_experts=32, top_k=4, batch=batch)
        simulated = TraceHitRates(trace, batch=batch)
        for slots in (8, 16, 24):
            ours, truth = predicted.demand(slots), simulated.demand(slots)
            assert ours.demanded == pytest.approx(truth.demanded, rel=0.05)
            assert ours.absent == pytest.approx(truth.absent, rel=0.1)


class TestTrace:
    def test_every_expert_comes_once_when_all_fit(self) -> None:
        topk = np.array([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]], dtype=np.int16)
        trace = Trace(topk=topk, sequence=np.zeros(4, dtype=np.int32), num_experts=4)
        rates = TraceHitRates(trace, batch=1)
        assert rates.demand(4) == Demand(demanded=2, absent=1)  # four of eight
        assert rates.demand(2) == Demand(demanded=2, absent=2)
        assert "4 of 4 tokens" in rates.origin

    def test_a_long_trace_is_cut_and_says_so(self) -> None:
        trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
        assert "1024 of 4096 tokens" in TraceHitRates(trace, batch=1).origin

    def test_a_batch_larger_than_the_trace_is_an_error(self) -> None:
        trace = load_trace(ROOT / "models" / "tiny-moe-trace.npz")
        with pytest.raises(TraceError, match="batch_size must be between 1 and the 4096 tokens"):
            TraceHitRates(trace, batch=5000)
