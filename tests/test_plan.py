"""The planner's arithmetic, on a model whose numbers are known, and against what was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefetch_runtime.config import ConfigError
from prefetch_runtime.hit_rates import Demand, create_hit_rates
from prefetch_runtime.model_sizes import ModelSizes, model_sizes
from prefetch_runtime.plan import CARDS, Estimate, Gpu, Planner, Workload, rounded, typical_gpu
from tests.helpers.model_configs import MIXTRAL, QWEN3_30B

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
QWEN = model_sizes(QWEN3_30B.config)
QWEN_16_LAYERS = model_sizes({**QWEN3_30B.config, "num_hidden_layers": 16})


class Fixed:
    """So many demanded and absent experts, whatever the slots."""

    origin = "fixed"

    def __init__(self, demanded: float, hit_rate: float) -> None:
        self._demand = Demand(demanded, demanded * (1 - hit_rate))

    def demand(self, num_slots: int) -> Demand:  # noqa: ARG002
        return self._demand


def planner(
    gib: float = 24, *, sizes: ModelSizes = QWEN, curve: str = "qwen3-30b-a3b", **work: Any
) -> Planner:
    workload = Workload(**{"context": 8192, "mode": "full", **work})
    rates = create_hit_rates(
        curve, num_experts=sizes.num_experts, top_k=sizes.top_k, batch=workload.batch
    )
    return Planner(sizes, typical_gpu(gib), workload, rates)


class TestMemory:
    def test_what_is_left_is_divided_into_slots(self) -> None:
        memory = planner(24).memory()
        assert memory.usable == int(24 * GIB * 0.92)
        assert memory.dense == QWEN.dense_bytes
        assert memory.kv_cache == 8192 * 98304
        assert memory.staging == 32 * 9 * 2**20
        assert memory.activations == memory.usable // 10
        left = memory.usable - memory.dense - memory.kv_cache - memory.staging - memory.activations
        assert memory.left_for_slots == left
        assert memory.slots_per_layer == left // (48 * 9 * 2**20) == 37

    def test_a_batch_takes_a_cache_for_each_sequence(self) -> None:
        assert planner(batch=4).memory().kv_cache == 4 * planner().memory().kv_cache

    def test_all_experts_take_no_staging_ring_and_no_cache(self) -> None:
        plan = planner(80).plan()
        assert plan.memory.slots_per_layer == 128
        assert plan.memory.staging == 0
        assert plan.all_fit
        assert plan.best is not None
        assert plan.best.copy_ms == 0

    def test_fewer_slots_than_a_token_needs_are_none(self) -> None:
        plan = planner(8).plan(target=1)
        assert 0 < plan.memory.left_for_slots < QWEN.slot_bytes(8)
        assert plan.memory.slots_per_layer == 0
        assert plan.best is None
        assert plan.uniform is None
        assert not plan.target_fits

    def test_a_gpu_too_small_for_the_rest_has_less_than_nothing_left(self) -> None:
        assert planner(2).memory().left_for_slots < 0
        assert planner(2).memory().slots_per_layer == 0

    def test_the_staging_ring_holds_two_halves_of_at_most_all_experts(self) -> None:
        sizes = model_sizes(MIXTRAL.config)
        mixtral = planner(48, sizes=sizes, curve="mixtral-8x7b")
        assert mixtral.memory().staging == 2 * 2 * sizes.expert_bytes
        small = replace(QWEN, expert_bytes=QWEN.expert_bytes // 4)
        assert planner(12, sizes=small).memory().staging == planner().memory().staging
        assert planner(staging_slots=5).memory().staging == 4 * QWEN.expert_bytes


class TestEstimate:
    def test_a_step_is_the_resident_step_and_the_missed_bytes_over_the_link(self) -> None:
        gpu = replace(typical_gpu(24), link_gbs=10.0)
        work = Workload(context=1, mode="full", resident_ms=5.0)
        estimate = Planner(QWEN, gpu, work, Fixed(8, 0.75)).estimate(32)
        copy_ms = 48 * 2 * 9_437_184 / 10e9 * 1e3
        assert estimate.copy_ms == pytest.approx(copy_ms)
        assert estimate.resident_ms == 5.0
        assert estimate.hit_rate == pytest.approx(0.75)
        assert estimate.tokens_per_s == pytest.approx(1e3 / (5.0 + copy_ms))
        assert estimate.tokens_per_s_at_best == pytest.approx(1e3 / copy_ms)
        assert estimate.slot_bytes == 13.5 * GIB

    def test_a_batch_shares_a_step(self) -> None:
        alone = Planner(
            QWEN, typical_gpu(24), Workload(context=1, resident_ms=5.0), Fixed(8, 0.5)
        ).estimate(64)
        four = Planner(
            QWEN, typical_gpu(24), Workload(context=1, resident_ms=5.0, batch=4), Fixed(8, 0.5)
        ).estimate(64)
        assert four.tokens_per_s == pytest.approx(4 * alone.tokens_per_s)

    def test_more_slots_are_never_slower(self) -> None:
        for batch in (1, 4, 16):
            speeds = [planner(batch=batch).estimate(s).tokens_per_s for s in range(8, 129)]
            assert speeds == sorted(speeds)

    def test_uniform_routing_is_the_worst(self) -> None:
        plan = planner().plan()
        assert plan.best is not None
        assert plan.uniform is not None
        assert plan.uniform.tokens_per_s < plan.best.tokens_per_s < plan.best.tokens_per_s_at_best

    @pytest.mark.parametrize(
        ("slots", "batch", "more", "mode", "waves"),
        [
            (32, 4, {}, "full", 1),
            (32, 5, {}, "full", 2),  # 40 experts may not fit 32 slots; half of the ring holds 16
            (24, 5, {}, "full", 2),
            (23, 5, {}, "full", 3),
            (32, 5, {"staging_slots": 2}, "full", 9),
            (31, 5, {"staging_slots": 2}, "eager", 10),
            (8, 64, {}, "full", 9),
            (8, 65, {}, "eager", 9),
            (128, 16, {}, "resident", 1),
            (32, 1, {"mode": "eager"}, "eager", 1),
            (32, 5, {"mode": "eager"}, "eager", 2),
            (32, 5, {"mode": "segmented"}, "eager", 2),
            (128, 1, {"mode": "eager"}, "resident", 1),
        ],
    )
    def test_a_graph_holds_batches_that_fit_or_need_few_waves(
        self, slots: int, batch: int, more: dict[str, Any], mode: str, waves: int
    ) -> None:
        found = planner(batch=batch, **more).estimate(slots)
        assert (found.mode, found.waves) == (mode, waves)

    @pytest.mark.parametrize("resident_ms", [None, 5.0])
    def test_waves_inside_the_graph_come_on_top_of_its_step(
        self, resident_ms: float | None
    ) -> None:
        sizes = replace(QWEN, num_moe_layers=40)
        work = Workload(context=1, batch=5, resident_ms=resident_ms)
        of = Planner(sizes, typical_gpu(24), work, Fixed(30, 0.5))
        fits = of.estimate(40)
        for slots, more in ((39, 1), (24, 1), (23, 2), (8, 2)):
            found = of.estimate(slots)
            assert found.resident_ms == pytest.approx(fits.resident_ms + more * 40 * 0.059)
            assert found.copy_ms == fits.copy_ms == pytest.approx(40 * 15 * 9_437_184 / 25e6)

    @pytest.mark.parametrize(
        "more",
        [{"batch": 65}, {"mode": "eager"}, {"mode": "segmented"}],
    )
    def test_waves_outside_of_any_graph_hide_some_of_the_hosts_time_behind_copies(
        self, more: dict[str, Any]
    ) -> None:
        work = Workload(**{"context": 1, "batch": 16, **more})

        def found(hit_rate: float) -> Estimate:
            return Planner(QWEN, typical_gpu(24), work, Fixed(60, hit_rate)).estimate(64)

        assert found(0.5).waves > 1
        assert found(0.5).resident_ms == pytest.approx(48 * 1.0)
        few = found(0.999)
        assert 0 < few.copy_ms < 48 * 0.4
        assert few.resident_ms + few.copy_ms == pytest.approx(48 * 1.4)

    def test_a_step_takes_what_the_host_takes_however_small_the_model(self) -> None:
        small = replace(QWEN, num_layers=4, num_moe_layers=4)

        def of(hit_rate: float, **more: Any) -> Estimate:
            work = Workload(context=1, **more)
            return Planner(small, typical_gpu(141), work, Fixed(8, hit_rate)).estimate(64)

        assert of(1.0).resident_ms == pytest.approx(1.9)
        assert of(1.0, mode="segmented").resident_ms == pytest.approx(1.9 + 4 * 0.065)
        assert of(1.0).tokens_per_s_at_best == pytest.approx(1e3 / 1.9)
        some = of(0.9)  # beside copies the host goes on
        assert 0 < some.copy_ms < 1.9
        assert some.resident_ms + some.copy_ms == pytest.approx(1.9)
        many = of(0.1)
        assert many.tokens_per_s == pytest.approx(1e3 / (many.resident_ms + many.copy_ms))
        assert many.resident_ms < 1.9
        assert of(1.0, resident_ms=0.5).resident_ms == 0.5, "what was measured is taken as it is"

    @pytest.mark.parametrize(
        ("sizes", "mode", "batch", "slots", "hit_rate", "measured_ms"),
        [
            (QWEN, "full", 1, 128, 1.0, 4.08),
            (QWEN_16_LAYERS, "full", 1, 128, 1.0, 2.05),
            (QWEN_16_LAYERS, "full", 8, 128, 1.0, 3.10),
            (QWEN_16_LAYERS, "full", 8, 64, 0.74, 38.8),
            (QWEN, "eager", 1, 127, 1.0, 55.8),
            (QWEN, "eager", 1, 32, 0.864, 69.4),
            (QWEN, "eager", 1, 32, 0.854, 101.0),
            (QWEN, "eager", 8, 32, 0.346, 340.0),
            (QWEN, "eager", 8, 32, 0.346, 386.0),
        ],
    )
    def test_steps_measured_on_an_h200_are_met_at_the_measured_hit_rate(
        self,
        sizes: ModelSizes,
        mode: str,
        batch: int,
        slots: int,
        hit_rate: float,
        measured_ms: float,
    ) -> None:
        demanded = create_hit_rates("uniform", num_experts=128, top_k=8, batch=batch)
        rates = Fixed(demanded.demand(8).demanded, hit_rate)
        work = Workload(context=512, batch=batch, mode=mode)  # type: ignore[arg-type]
        estimate = Planner(sizes, typical_gpu(141), work, rates).estimate(slots)
        step_ms = estimate.resident_ms + estimate.copy_ms
        assert step_ms == pytest.approx(measured_ms, rel=0.35)

    @pytest.mark.parametrize(
        ("mode", "batch", "slots", "demanded", "absent", "measured_ms"),
        [
            ("full", 1, 128, 8.0, 0.0, 2.14),
            ("full", 2, 128, 14.0, 0.0, 2.06),
            ("full", 4, 128, 23.7, 0.0, 2.28),
            ("full", 8, 128, 37.0, 0.0, 2.65),
            ("full", 16, 128, 55.3, 0.0, 3.34),
            ("full", 32, 128, 77.0, 0.0, 4.11),
            ("full", 1, 64, 8.0, 0.42, 2.86),
            ("full", 2, 64, 14.0, 1.05, 4.78),
            ("full", 4, 64, 23.7, 3.19, 11.46),
            ("full", 8, 64, 37.0, 7.40, 24.55),
            ("full", 16, 64, 55.3, 15.45, 49.84),
            ("full", 32, 64, 77.0, 25.27, 78.22),
            ("full", 1, 32, 8.0, 1.38, 5.55),
            ("full", 2, 32, 14.0, 3.63, 12.47),
            ("full", 4, 32, 23.6, 9.15, 28.96),
            ("full", 8, 32, 37.4, 17.02, 52.91),
            ("full", 16, 32, 55.5, 28.87, 90.47),
            ("full", 32, 32, 77.3, 46.42, 141.88),
            ("eager", 1, 64, 8.0, 0.57, 26.95),
            ("eager", 2, 64, 14.0, 1.02, 28.50),
            ("eager", 4, 64, 23.7, 3.26, 34.01),
            ("eager", 8, 64, 37.0, 7.18, 35.89),
            ("eager", 16, 64, 55.3, 15.51, 61.27),
            ("eager", 32, 64, 77.0, 26.06, 84.79),
        ],
    )
    def test_a_bench_run_is_met_within_20_percent(
        self, mode: Any, batch: int, slots: int, demanded: float, absent: float, measured_ms: float
    ) -> None:
        """16 layers, calibrated routing, one H200, absent experts as it counted them: the table of
        benchmarks/README.md."""
        gpu = typical_gpu(141, memory_gbs=4060, link_gbs=54.9)
        work = Workload(context=160, batch=batch, mode=mode)
        rates = Fixed(demanded, 1 - absent / demanded)
        estimate = Planner(QWEN_16_LAYERS, gpu, work, rates).estimate(slots)
        step_ms = estimate.resident_ms + estimate.copy_ms
        assert step_ms == pytest.approx(measured_ms, rel=0.2)


EXPERT_BYTES = {"fp8": 4_719_744, "int4": 2_433_024}
"""Of Qwen3-30B-A3B's experts, scales included."""


def test_the_page_shows_what_is_computed() -> None:
    page = (ROOT / "docs" / "choosing-slots.md").read_text()
    table = page.partition("| layers | experts |")[2].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert len(rows) == 20
    for layers, experts, mode, batch, slots, hit_rate, _, computed in rows:
        sizes = QWEN if layers == "48" else QWEN_16_LAYERS
        if experts in EXPERT_BYTES:
            sizes = replace(sizes, expert_bytes=EXPERT_BYTES[experts])
        everything = slots == "all"
        rates = create_hit_rates("uniform", num_experts=128, top_k=8, batch=int(batch))
        hits = 1.0 if everything else float(hit_rate.rstrip(" %")) / 100
        mode = "full" if everything else mode.partition("`")[0]
        work: Any = {"mode": mode, "batch": int(batch), "context": 512}
        fixed = Fixed(rates.demand(8).demanded, hits)
        estimate = Planner(sizes, typical_gpu(141), Workload(**work), fixed).estimate(
            # With a slot for each expert it plans no cache.
            128 if everything else min(int(slots), 127)
        )
        step_ms = estimate.resident_ms + estimate.copy_ms
        assert step_ms == pytest.approx(float(computed), rel=0.03)


class TestPlan:
    def test_the_ladder_ends_with_the_most_that_fit(self) -> None:
        plan = planner(24).plan(ladder=True)
        assert [e.slots_per_layer for e in plan.estimates] == [8, 16, 32, 37]
        assert planner(24).plan().estimates == plan.estimates[-1:]

    def test_a_target_takes_the_fewest_slots_that_reach_it(self) -> None:
        some = planner(24)
        wanted = some.plan(target=50).target
        assert wanted is not None
        assert wanted.tokens_per_s >= 50
        assert some.estimate(wanted.slots_per_layer - 1).tokens_per_s < 50

    def test_a_low_target_takes_what_one_token_needs(self) -> None:
        wanted = planner(24).plan(target=0.1).target
        assert wanted is not None
        assert wanted.slots_per_layer == 8

    def test_a_target_may_fit_or_not(self) -> None:
        assert planner(24).plan(target=20).target_fits
        too_many = planner(24).plan(target=50)
        assert too_many.target is not None
        assert not too_many.target_fits

    def test_a_target_beyond_the_resident_step_is_out_of_reach(self) -> None:
        plan = planner(24).plan(target=1e6)
        assert plan.target is None
        assert not plan.target_fits

    @pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf")])
    def test_a_target_that_is_no_speed_is_refused(self, target: float) -> None:
        with pytest.raises(ConfigError, match="a target must be positive and finite"):
            planner().plan(target=target)


class TestGpus:
    @pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
    def test_each_common_size_has_its_card(self, card: Any) -> None:
        gpu = typical_gpu(card.gib)
        assert gpu.name == card.name
        assert gpu.link_gbs == card.link_gbs
        assert "assumed" in gpu.link_origin
        assert "assumed" in gpu.memory_origin

    @pytest.mark.parametrize(("gib", "card"), [(4, "RTX 4060"), (20, "RTX 4080"), (192, "H200")])
    def test_another_size_is_as_fast_as_the_next_smaller_card(self, gib: float, card: str) -> None:
        gpu = typical_gpu(gib)
        assert gpu.name == f"no common size; as fast as {card}"
        assert gpu.link_origin == f"assumed: usual ({card})"
        assert typical_gpu(gib, memory_gbs=900, link_gbs=11).name == "no common size"

    def test_what_is_given_is_taken(self) -> None:
        gpu = typical_gpu(24, memory_gbs=900, link_gbs=11)
        assert (gpu.memory_gbs, gpu.link_gbs) == (900, 11)
        assert (gpu.memory_origin, gpu.link_origin) == ("given", "given")

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300])
    @pytest.mark.parametrize("name", ["gib", "link_gbs", "memory_gbs"])
    def test_a_number_that_cannot_be_is_refused(self, name: str, value: float) -> None:
        with pytest.raises(ConfigError, match="must be positive and finite"):
            typical_gpu(**{"gib": 24, name: value})

    def test_a_gpu_checks_itself(self) -> None:
        with pytest.raises(ConfigError, match="a GPU's size"):
            Gpu(name="x", gib=-8, memory_gbs=1, link_gbs=1, memory_origin="", link_origin="")


class TestWorkload:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"context": 0}, "context must be at least 1"),
            ({"context": 1 << 40}, "context must be at least 1"),
            ({"batch": 0}, "batch must be at least 1"),
            ({"batch": -4}, "batch must be at least 1"),
            ({"utilization": 0}, "above 0 and at most 1"),
            ({"utilization": 1.5}, "above 0 and at most 1"),
            ({"utilization": float("nan")}, "above 0 and at most 1"),
            ({"staging_slots": 1}, "staging slots must be 'auto' or 2 to 1024"),
            ({"resident_ms": 0}, "a step's time must be positive"),
            ({"resident_ms": float("inf")}, "a step's time must be positive"),
        ],
        ids=str,
    )
    def test_a_number_that_cannot_be_is_refused(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            Workload(**{"context": 8192, **changes})


def test_estimates_keep_two_digits() -> None:
    assert [rounded(v) for v in (0, 0.01234, 1.26, 987.6)] == [0, 0.012, 1.3, 990]
    assert rounded(1.2345, 3) == 1.23


class TestSegmented:
    def test_a_step_is_that_of_mode_full_and_the_hosts_time_at_each_layer(self) -> None:
        full = planner().estimate(38)
        for host_us, waited_ms in ((None, 48 * 0.065), (0.0, 0.0), (100.0, 4.8)):
            found = planner(mode="segmented", host_us=host_us).estimate(38)
            assert found.mode == "segmented"
            assert found.resident_ms == pytest.approx(full.resident_ms + waited_ms)
            assert (found.hit_rate, found.copy_ms) == (full.hit_rate, full.copy_ms)

    def test_it_comes_on_top_of_a_measured_step(self) -> None:
        found = planner(mode="segmented", host_us=50.0, resident_ms=4.0).estimate(38)
        assert found.resident_ms == pytest.approx(4.0 + 48 * 0.05)

    def test_batches_that_might_not_fit_run_in_waves_and_all_experts_need_no_cache(self) -> None:
        wide = planner(mode="segmented", batch=8)
        eager = planner(mode="eager", batch=8).estimate(32)
        assert wide.estimate(32).resident_ms == eager.resident_ms
        assert wide.estimate(32).mode == "eager"
        assert wide.estimate(128).mode == "resident"
        assert wide.estimate(128).resident_ms == planner(batch=8).estimate(128).resident_ms

    @pytest.mark.parametrize("host_us", [-1.0, 1e6, float("nan"), float("inf")])
    def test_a_time_that_cannot_be_is_refused(self, host_us: float) -> None:
        with pytest.raises(ConfigError, match="the host's time at a layer must be 0 to 1e6 us"):
            Workload(context=1, mode="segmented", host_us=host_us)
