"""The ring by itself; what the scheduler does with it is in test_scheduler.py."""

from typing import Any

import numpy as np

from prefetch_runtime.copier import CopyTicket
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.staging import StagingRing
from tests.helpers.small_cache import CPU, LAYOUT


def _ring(rows: int = 2) -> StagingRing:
    return StagingRing([SlotBuffers(rows, LAYOUT, CPU) for _ in range(2)])


def _ids(*experts: int) -> Any:
    return np.array(experts, dtype=np.int32)


def _ticket(serial: int) -> CopyTicket:
    return CopyTicket(serial, None, 0)


def test_waves_alternate_between_the_halves() -> None:
    waves, in_vain, wasted = _ring().take(0, _ids(5, 3, 9, 1, 7))
    assert [wave.experts.tolist() for wave in waves] == [[5, 3], [9, 1], [7]]
    assert [wave.rows.tolist() for wave in waves] == [[0, 1], [0, 1], [0]]
    assert [wave.half for wave in waves] == [0, 1, 0]
    assert all(wave.copies is None for wave in waves)
    assert (in_vain, wasted) == ([], 0)


def test_what_was_sent_ahead_comes_first_and_the_next_wave_takes_the_other_half() -> None:
    ring = _ring()
    ring.put_ahead(4, 1, _ids(2, 6), _ticket(1))
    assert ring.ahead_of(4).tolist() == [2, 6]
    assert ring.ahead_of(3).tolist() == []
    waves, in_vain, wasted = ring.take(4, _ids(1, 2, 3, 6))
    assert [wave.experts.tolist() for wave in waves] == [[2, 6], [1, 3]]
    assert [wave.half for wave in waves] == [1, 0]
    assert waves[0].copies == _ticket(1)
    assert (in_vain, wasted) == ([], 0)
    assert ring.ahead_of(4).size == 0, "taken once"


def test_a_wave_that_nobody_wants_leaves_its_half_to_the_next() -> None:
    ring = _ring()
    ring.put_ahead(4, 1, _ids(2, 6), _ticket(1))
    ring.put_ahead(4, 0, _ids(7, 8), _ticket(2))
    waves, in_vain, wasted = ring.take(4, _ids(1, 3, 8))
    assert [(wave.half, wave.experts.tolist(), wave.rows.tolist()) for wave in waves] == [
        (0, [8], [1]),
        (1, [1, 3], [0, 1]),
    ]
    assert (in_vain, wasted) == ([_ticket(1)], 3)


def test_what_was_sent_for_another_layer_is_in_vain() -> None:
    ring = _ring()
    ring.put_ahead(4, 1, _ids(2, 6), _ticket(1))
    waves, in_vain, wasted = ring.take(5, _ids(2, 6))
    assert [wave.copies for wave in waves] == [None]
    assert (in_vain, wasted) == ([_ticket(1)], 2)


def test_sending_ahead_for_a_later_layer_forgets_the_earlier() -> None:
    ring = _ring()
    ring.put_ahead(4, 1, _ids(2, 6), _ticket(1))
    ring.put_ahead(5, 0, _ids(3), _ticket(2))
    assert ring.ahead_of(5).tolist() == [3]
    assert ring.ahead_of(4).size == 0
