"""Splitting a step that needs more experts than slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetch_runtime.waves import RING_BYTES, cut_by_expert, cut_by_token, rows_of_half

TOP_K = 3
ROUTINGS = st.lists(
    st.lists(st.integers(-1, 11), min_size=TOP_K, max_size=TOP_K), min_size=0, max_size=30
)


def _experts(rows: np.ndarray) -> set[int]:
    return {int(expert) for expert in rows.ravel() if expert >= 0}


class TestByToken:
    @given(ROUTINGS, st.integers(TOP_K, 12))
    def test_runs_cover_every_token_once_in_order_and_fit(
        self, routing: list[list[int]], num_slots: int
    ) -> None:
        ids = np.array(routing, dtype=np.int32).reshape(-1, TOP_K)
        runs = list(cut_by_token(ids, num_slots))
        assert [t for run in runs for t in range(run.start, run.stop)] == list(range(len(ids)))
        for run in runs:
            assert len(_experts(ids[run])) <= num_slots
            if run is not runs[-1]:  # one token more would not have fitted
                assert len(_experts(ids[run.start : run.stop + 1])) > num_slots

    def test_what_fits_is_one_run(self) -> None:
        assert list(cut_by_token(np.array([[0, 1], [1, 0], [0, 1]]), 2)) == [slice(0, 3)]

    def test_no_token_is_no_run(self) -> None:
        assert list(cut_by_token(np.empty((0, 4), dtype=np.int32), 4)) == []

    def test_rows_of_minus_one_need_no_slot(self) -> None:
        assert list(cut_by_token(np.array([[0, 1], [-1, -1], [-1, 0]]), 2)) == [slice(0, 3)]

    def test_a_token_that_needs_more_than_the_slots_is_refused(self) -> None:
        with pytest.raises(ValueError, match="token 1 alone needs 3 experts of 2 slots"):
            list(cut_by_token(np.array([[0, 0, 0], [0, 1, 2]]), 2))


class TestByExpert:
    @given(st.lists(st.integers(0, 500), unique=True, max_size=40), st.integers(1, 9))
    def test_waves_keep_the_order_and_the_size(self, absent: list[int], size: int) -> None:
        waves = cut_by_expert(absent, size)
        assert [expert for wave in waves for expert in wave.tolist()] == absent
        assert all(wave.size == size for wave in waves[:-1])
        assert all(1 <= wave.size <= size for wave in waves)
        assert all(wave.dtype == np.int32 for wave in waves)

    def test_nothing_absent_is_no_wave(self) -> None:
        assert cut_by_expert([], 4) == []

    @pytest.mark.parametrize("size", [0, -1])
    def test_a_wave_of_nothing_is_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"wave_size must be at least 1, got {size}"):
            cut_by_expert([1], size)


class TestRowsOfHalf:
    @pytest.mark.parametrize(
        ("expert_bytes", "num_experts", "rows"),
        [
            (9 << 20, 128, 16),
            (RING_BYTES // 64, 128, 32),
            (RING_BYTES // 64, 24, 24),
            (336 << 20, 8, 2),
            (336 << 20, 128, 2),
            (24 << 20, 128, 6),
            (4096, 1024, 512),
        ],
        ids=[
            "9 MiB",
            "a quarter of it",
            "few of them",
            "large",
            "large and many",
            "in between",
            "tiny",
        ],
    )
    def test_a_ring_holds_as_many_as_weigh_the_same_and_two_in_each_half(
        self, expert_bytes: int, num_experts: int, rows: int
    ) -> None:
        assert rows_of_half("auto", expert_bytes=expert_bytes, num_experts=num_experts) == rows

    @pytest.mark.parametrize(("asked", "rows"), [(2, 1), (5, 2), (16, 8), (64, 12)])
    def test_a_number_is_that_of_both_halves(self, asked: int, rows: int) -> None:
        assert rows_of_half(asked, expert_bytes=1, num_experts=12) == rows
