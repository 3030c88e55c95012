"""One step of the scheduler: what is copied, in which order, and what the device is told when."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetch_runtime.audit import audit
from prefetch_runtime.copier import CopyError, CopyJob, CopyTicket, HostCopier
from prefetch_runtime.demand_reader import DemandReader, Sent
from prefetch_runtime.scheduler import LayerCache, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import NotEnoughSlots
from prefetch_runtime.staging import StagingRing
from tests.helpers.small_cache import (
    CPU,
    LAYOUT,
    RecordingCopier,
    SmallCache,
    filled_layer,
    holds,
    small_cache,
)

RING_ROWS = 2


class RingScheduler(Scheduler):
    """A scheduler whose staging ring has two rows a half, as on a CUDA device, here on the CPU."""

    def _staging_of(self, layer: LayerCache) -> StagingRing:
        key = tuple((f.name, f.shape, f.dtype) for f in layer.store.layout.fields)
        if key not in self._staging:
            halves = [SlotBuffers(RING_ROWS, LAYOUT, CPU) for _ in range(2)]
            self._staging[key] = StagingRing(halves)
        return self._staging[key]


def _ids(*rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _step(cache: SmallCache, *rows: Sequence[int]) -> torch.Tensor:
    cache.scheduler.begin_step()
    return cache.scheduler.fetch(0, _ids(*rows))


# One step


class PublicationSpy(RecordingCopier):
    """Notes the mapping on the device at the moment of each wait."""

    cache: SmallCache

    def wait(self, ticket: CopyTicket) -> None:
        super().wait(ticket)
        self.log.append(("mapping", self.cache.mapping()))


def test_the_mapping_is_published_after_the_copy_and_its_wait() -> None:
    copier = PublicationSpy()
    cache = copier.cache = small_cache(num_experts=4, num_slots=2, copier=copier)
    _step(cache, [2, 0])
    assert copier.log == [("submit", 0), ("wait", 0), ("mapping", [-1, -1, -1, -1])]
    assert copier.experts == [[0, 2]]
    assert cache.mapping() == [0, -1, 1, -1]


def test_a_step_of_hits_copies_waits_and_publishes_nothing() -> None:
    copier = RecordingCopier()
    cache = small_cache(num_experts=4, num_slots=2, copier=copier)
    _step(cache, [2, 0])
    copier.log.clear()
    cache.layer().mapping[0] = 77  # a publication would put this right
    _step(cache, [2, 2])
    assert copier.log == []
    assert cache.mapping()[0] == 77


def test_copies_wait_for_the_readers_of_their_slots() -> None:
    copier = RecordingCopier()  # asserts after_compute at every submit
    cache = small_cache(num_experts=8, num_slots=2, copier=copier)
    for first in range(6):
        _step(cache, [first, first + 1])
    assert len(copier.jobs) == 6


def test_only_the_absent_are_copied_and_into_the_slots_of_the_plan() -> None:
    copier = RecordingCopier()
    cache = small_cache(num_experts=8, num_slots=3, copier=copier)
    _step(cache, [1, 2])
    slot_ids = _step(cache, [2, 5])
    assert copier.experts == [[1, 2], [5]]
    assert [job.slot_id for job in copier.jobs[1]] == [int(slot_ids[0, 1])]
    assert copier.jobs[1][0].buffers is cache.layer().buffers


def test_a_layer_is_not_touched_by_another_layers_step() -> None:
    cache = small_cache(num_layers=2)
    cache.scheduler.begin_step()
    cache.scheduler.fetch(1, _ids([3, 4]))
    assert cache.mapping(0) == [-1] * 8
    assert cache.mapping(1) == [-1, -1, -1, 0, 1, -1, -1, -1]
    assert holds(cache.layer(1).buffers, 0, cache.layer(1).store, 3)


def test_the_clock_advances_once_a_step_so_layers_age_alike() -> None:
    cache = small_cache(num_experts=6, num_slots=2, num_layers=2)
    for ids in ([0, 1], [1, 1], [2, 2]):
        cache.scheduler.begin_step()
        for layer_idx in range(2):
            cache.scheduler.fetch(layer_idx, _ids(ids))
    for layer_idx in range(2):  # 0 was used longest ago
        assert cache.mapping(layer_idx) == [-1, 1, 0, -1, -1, -1]


def test_a_failed_copy_ends_the_step_before_the_mapping_is_published() -> None:
    class Failing(HostCopier):
        def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
            raise CopyError(f"the link is gone: {jobs}, {after_compute}")

    cache = small_cache(copier=Failing())
    with pytest.raises(CopyError, match="the link is gone"):
        _step(cache, [0, 1])
    assert cache.mapping() == [-1] * 8


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@given(
    steps=st.lists(st.lists(st.integers(-1, 11), min_size=1, max_size=4), min_size=1, max_size=20)
)
@settings(max_examples=30, deadline=None)
def test_every_step_finds_the_bytes_it_asked_for(policy: str, steps: list[list[int]]) -> None:
    copier = RecordingCopier()
    cache = small_cache(num_experts=12, num_slots=4, copier=copier, policy=policy)
    layer = cache.layer()
    for ids in steps:
        slot_ids = _step(cache, ids)
        for expert, slot in zip(ids, slot_ids[0].tolist(), strict=True):
            assert slot == -1 if expert < 0 else holds(layer.buffers, slot, layer.store, expert)
        layer.table.check_integrity()
        assert audit(cache.scheduler) == []


# Waves by token


def test_fits_counts_distinct_experts() -> None:
    cache = small_cache(num_experts=8, num_slots=3)
    assert cache.scheduler.fits(0, _ids([0, 1], [1, 2], [-1, 0]))
    assert not cache.scheduler.fits(0, _ids([0, 1], [2, 3]))


def test_fits_does_not_read_the_ids_of_a_step_that_cannot_be_too_wide() -> None:
    cache = small_cache(num_experts=8, num_slots=4)
    unreadable = torch.empty((2, 2), dtype=torch.int32, device="meta")
    assert cache.scheduler.fits(0, unreadable)
    with pytest.raises(NotImplementedError):
        cache.scheduler.fits(0, torch.empty((3, 2), dtype=torch.int32, device="meta"))


def test_token_waves_rename_every_token_while_its_experts_are_resident() -> None:
    cache = small_cache(num_experts=8, num_slots=3)
    layer = cache.layer()
    ids = _ids([0, 1], [1, 2], [3, 4], [-1, 5], [0, 1])
    cache.scheduler.begin_step()
    seen = []
    for run, slot_ids in cache.scheduler.token_waves(0, ids):
        seen.extend(range(run.start, run.stop))
        pairs = zip(ids[run].ravel().tolist(), slot_ids.ravel().tolist(), strict=True)
        for expert, slot in pairs:
            assert slot == -1 if expert < 0 else holds(layer.buffers, slot, layer.store, expert)
        assert audit(cache.scheduler) == []
    assert seen == [0, 1, 2, 3, 4]
    stats = cache.scheduler.stats().layers[0]
    assert (stats.steps, stats.waves) == (1, 3)
    assert (stats.hits, stats.misses, stats.evictions) == (0, 8, 5)


def test_token_waves_refuse_a_token_wider_than_the_slots() -> None:
    cache = small_cache(num_experts=8, num_slots=2)
    with pytest.raises(ValueError, match="token 1 alone needs 3 experts of 2 slots"):
        list(cache.scheduler.token_waves(0, _ids([0, 1, 0], [2, 3, 4])))


# Waves by expert


def _ring_cache(num_experts: int = 12, num_slots: int = 4) -> tuple[SmallCache, RecordingCopier]:
    copier = RecordingCopier()
    cache = small_cache(num_experts, num_slots, copier=copier, scheduler_class=RingScheduler)
    return cache, copier


def _run_waves(
    cache: SmallCache, ids: torch.Tensor, log: list[tuple[str, object]], layer_idx: int = 0
) -> list[object]:
    """Compute every wave and check it; returns which (token, k) each wave computed."""
    layer = cache.layer(layer_idx)
    computed = torch.zeros(ids.shape, dtype=torch.int64)
    waves: list[object] = []
    for wave in cache.scheduler.expert_waves(layer_idx, ids):
        assert not (waves and waves[-1] == "last"), "a wave after the last one"
        rows = torch.where(ids >= 0, wave.expert_map[ids.clamp(min=0).long()], -1)
        for expert, row in zip(ids.ravel().tolist(), rows.ravel().tolist(), strict=True):
            if row >= 0:
                assert holds(wave.buffers, row, layer.store, expert)
        computed += rows >= 0
        assert torch.equal(wave.in_wave, rows >= 0)
        experts = torch.where(wave.expert_map >= 0)[0].tolist()
        where = "slots" if wave.buffers is layer.buffers else "ring"
        log.append(("compute", len(waves)))
        waves.append((where, experts))
        if wave.is_last:
            waves.append("last")
    assert waves[-1] == "last"
    assert torch.equal(computed, (ids >= 0).long()), "each (token, k) once"
    return waves[:-1]


def test_each_absent_expert_is_copied_once_and_residents_not_at_all() -> None:
    cache, copier = _ring_cache()
    _step(cache, [8, 9, 10, 11])
    cache.scheduler.begin_step()
    waves = _run_waves(cache, _ids([0, 8, 1], [2, 9, 3], [4, 0, 1], [-1, -1, -1]), copier.log)
    assert waves == [("slots", [8, 9]), ("ring", [0, 1]), ("ring", [2, 3]), ("ring", [4])]
    copied = [expert for experts in copier.experts[1:] for expert in experts]
    assert sorted(copied) == [0, 1, 2, 3, 4]
    assert cache.mapping() == [-1] * 8 + [0, 1, 2, 3]
    assert audit(cache.scheduler) == []


def test_a_prompt_does_not_push_out_what_was_resident() -> None:
    cache, copier = _ring_cache()
    _step(cache, [0, 1, 2, 3])
    before = cache.mapping()
    for _ in range(3):
        cache.scheduler.begin_step()
        _run_waves(cache, torch.arange(4, 12, dtype=torch.int32).reshape(4, 2), copier.log)
    assert cache.mapping() == before
    assert cache.scheduler.stats().layers[0].evictions == 0


def test_a_wide_batch_that_decodes_takes_the_slots_that_it_does_not_need() -> None:
    cache, copier = _ring_cache()
    _step(cache, [0, 1, 2, 3])
    cache.scheduler.begin_step(decodes=True)
    # 0 and 1 stay; 7 is demanded by three tokens, 5 by two, the others by one.
    waves = _run_waves(cache, _ids([0, 7], [1, 7], [5, 7], [5, 4], [6, 8]), copier.log)
    assert waves == [("slots", [0, 1, 5, 7]), ("ring", [4, 6]), ("ring", [8])]
    assert audit(cache.scheduler) == []
    stats = cache.scheduler.stats().layers[0]
    assert (stats.hits, stats.misses, stats.evictions) == (2, 4 + 5, 2)
    assert stats.bytes_copied == (4 + 5) * LAYOUT.payload_bytes, "each expert once"
    cache.scheduler.begin_step(decodes=True)
    copier.jobs.clear()
    _run_waves(cache, _ids([0, 7], [1, 7], [5, 7], [5, 4], [6, 8]), copier.log)
    assert sum(map(len, copier.jobs)) == 3, "what it asks for most is there"


def test_every_copy_is_under_way_before_the_first_wave() -> None:
    cache, copier = _ring_cache()
    _step(cache, [0, 1, 2, 3])
    cache.scheduler.begin_step(decodes=True)
    copier.log.clear()
    waves = _run_waves(cache, _ids([0, 7], [1, 7], [5, 7], [5, 4], [6, 8]), copier.log)
    assert waves == [("slots", [0, 1, 5, 7]), ("ring", [4, 6]), ("ring", [8])]
    assert copier.log == [  # 1 into slots, 2 and 3 into the ring
        ("submit", 1),
        ("submit", 2),
        ("submit", 3),
        ("wait", 1),
        ("compute", 0),
        ("wait", 2),
        ("compute", 1),
        ("wait", 3),
        ("compute", 2),
    ]
    assert cache.scheduler.stats().layers[0].waves == 1 + 3
    assert audit(cache.scheduler) == []


def test_waves_of_a_kernel_that_computes_every_block_name_a_row_for_every_expert() -> None:
    cache, _ = _ring_cache()
    _step(cache, [0, 1, 2, 3])
    cache.scheduler.begin_step(decodes=True)
    ids = _ids([0, 7], [1, 7], [5, 7], [5, 4], [6, 8])
    layer, computed = cache.layer(), []
    for wave in cache.scheduler.expert_waves(0, ids, whole=True):
        of_wave = sorted({int(expert) for expert in ids[wave.in_wave]})
        computed.append(of_wave)
        for expert in of_wave:
            assert holds(wave.buffers, int(wave.expert_map[expert]), layer.store, expert)
        rows = {int(wave.expert_map[expert]) for expert in of_wave}
        assert set(wave.expert_map.tolist()) == rows, "others read a row that the wave has"
    assert computed == [[0, 1, 5, 7], [4, 6], [8]]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """The demands that the host has waited for."""
    taken: list[Sent] = []
    receive = DemandReader.receive

    def counted(reader: DemandReader, sent: Sent) -> object:
        taken.append(sent)
        return receive(reader, sent)

    monkeypatch.setattr(DemandReader, "receive", counted)
    return taken


def test_the_ids_of_a_layer_are_read_once(received: list[Sent]) -> None:
    cache, copier = _ring_cache()
    for ids in (_ids([0, 1, 2, 3], [4, 5, 6, 7]), _ids([0, 1, 2, 3], [0, 1, 2, 3])):
        cache.scheduler.begin_step()
        received.clear()
        if cache.scheduler.fits(0, ids):
            assert torch.equal(cache.scheduler.fetch(0, ids), cache.layer().mapping[ids.long()])
        else:
            _run_waves(cache, ids, copier.log)
        assert len(received) == 1


def test_the_ids_of_rows_without_a_token_are_read_once_and_not_counted(
    received: list[Sent],
) -> None:
    cache = small_cache()
    ids, padding = _ids([0, 1], [2, 3], [5, 6]), torch.tensor([4, 7, -1])
    cache.scheduler.begin_step()
    assert not cache.scheduler.fits(0, ids)
    received.clear()
    assert cache.scheduler.fits(0, ids, padding=padding)
    slots = cache.scheduler.fetch(0, ids, padding=padding)
    assert len(received) == 1
    assert torch.equal(slots[:2], cache.layer().mapping[ids[:2].long()])
    assert slots[2].tolist() == [-1, -1]
    assert (cache.layer().table.mapping >= 0).nonzero()[0].tolist() == [0, 1, 2, 3]


def test_ids_that_were_looked_at_for_another_layer_or_step_are_not_taken() -> None:
    cache = small_cache(num_layers=2)
    ids = _ids([0, 1, 2, 3, 0])
    cache.scheduler.begin_step()
    assert cache.scheduler.fits(0, ids)
    ids[0, 3] = 2
    cache.scheduler.fetch(1, ids)
    assert cache.scheduler.stats().layers[1].misses == 3
    assert cache.scheduler.fits(0, ids)
    cache.scheduler.begin_step()
    ids[0] = 7
    cache.scheduler.fetch(0, ids)
    assert cache.mapping() == [-1] * 7 + [0]


def test_empty_slots_are_filled_first_with_the_most_demanded() -> None:
    cache, copier = _ring_cache(num_slots=3)
    _step(cache, [11, 11])
    cache.scheduler.begin_step()
    # 6 is demanded three times, 9 twice, the others once.
    waves = _run_waves(cache, _ids([6, 0], [6, 1], [6, 9], [2, 9]), copier.log)
    assert waves == [("slots", [6, 9]), ("ring", [0, 1]), ("ring", [2])]
    assert copier.experts[1] == [6, 9]
    assert cache.mapping()[6] >= 0
    assert cache.mapping()[9] >= 0
    assert audit(cache.scheduler) == []


def test_the_next_wave_is_copied_while_one_computes_and_a_half_is_reused_after_its_reader() -> None:
    cache, copier = _ring_cache()
    _step(cache, [8, 9, 10, 11])
    copier.log.clear()
    cache.scheduler.begin_step()
    _run_waves(cache, _ids([0, 1, 2, 3, 4, 5, 6, 7]), copier.log)
    # Nothing demanded is resident: four waves through two halves, copies 1 to 4.
    assert copier.log == [
        ("submit", 1),
        ("submit", 2),
        ("wait", 1),
        ("compute", 0),
        ("submit", 3),
        ("wait", 2),
        ("compute", 1),
        ("submit", 4),
        ("wait", 3),
        ("compute", 2),
        ("wait", 4),
        ("compute", 3),
    ]
    halves = [jobs[0].buffers for jobs in copier.jobs[1:]]
    assert halves[0] is halves[2]
    assert halves[1] is halves[3]
    assert halves[0] is not halves[1]


def test_newcomers_in_empty_slots_are_waited_for_and_published_before_their_wave() -> None:
    copier = PublicationSpy()
    cache = copier.cache = small_cache(
        num_experts=8, num_slots=2, copier=copier, scheduler_class=RingScheduler
    )
    cache.scheduler.begin_step()
    waves = cache.scheduler.expert_waves(0, _ids([0, 1, 2, 3]))
    first = next(waves)
    assert first.buffers is cache.layer().buffers
    assert copier.log == [("submit", 0), ("submit", 1), ("wait", 0), ("mapping", [-1] * 8)]
    assert cache.mapping() == [0, 1, -1, -1, -1, -1, -1, -1]


def test_a_wide_step_that_finds_all_resident_is_one_wave() -> None:
    cache, copier = _ring_cache()
    _step(cache, [0, 1, 2, 3])
    cache.scheduler.begin_step()
    assert _run_waves(cache, _ids([0, 1], [2, 3]), copier.log) == [("slots", [0, 1, 2, 3])]
    assert len(copier.jobs) == 1


def test_a_wide_step_without_any_token_is_one_wave_of_nothing() -> None:
    cache, copier = _ring_cache()
    assert _run_waves(cache, _ids([-1, -1], [-1, -1]), copier.log) == [("slots", [])]
    assert copier.jobs == []


def test_the_ring_is_shared_by_the_layers_and_lies_outside_their_slots() -> None:
    cache = small_cache(num_layers=3, scheduler_class=RingScheduler)
    stats = cache.scheduler.stats()
    assert stats.staging_bytes == 2 * RING_ROWS * LAYOUT.payload_bytes
    assert stats.slot_bytes == 3 * 4 * LAYOUT.payload_bytes


def test_waves_count_hits_and_misses_by_distinct_expert() -> None:
    cache, copier = _ring_cache()
    _step(cache, [8, 9, 10, 11])
    cache.scheduler.begin_step()
    _run_waves(cache, _ids([0, 8], [0, 9], [1, 8], [2, 3]), copier.log)
    stats = cache.scheduler.stats().layers[0]
    assert (stats.steps, stats.waves) == (2, 1 + 3)
    assert (stats.hits, stats.misses, stats.evictions) == (2, 4 + 4, 0)
    assert stats.bytes_copied == 8 * LAYOUT.payload_bytes


# Ahead of the next layer


def _two_layers(num_experts: int = 10, num_slots: int = 2) -> tuple[SmallCache, RecordingCopier]:
    """Two layers, each with its last experts resident."""
    copier = RecordingCopier()
    cache = small_cache(
        num_experts, num_slots, num_layers=2, copier=copier, scheduler_class=RingScheduler
    )
    cache.scheduler.begin_step()
    for layer_idx in range(2):
        cache.scheduler.fetch(layer_idx, _ids(list(range(num_experts - num_slots, num_experts))))
    copier.log.clear()
    copier.jobs.clear()
    cache.scheduler.begin_step()
    return cache, copier


EVERY = _ids([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


def test_the_next_layers_first_waves_are_sent_behind_the_last_of_this_one() -> None:
    cache, copier = _two_layers()
    _run_waves(cache, EVERY, copier.log)
    # Four waves of layer 0, then two for layer 1 before its router has been heard.
    layers = [jobs[0].store.layer_idx for jobs in copier.jobs]
    assert layers == [0, 0, 0, 0, 1, 1]
    assert copier.experts[4:] == [[0, 1], [2, 3]]
    # Each follows the last reader of the half that it overwrites.
    log = [entry for entry in copier.log if entry[0] != "wait"]
    assert log[-4:] == [("compute", 3), ("submit", 4), ("compute", 4), ("submit", 5)]
    for jobs, reader in zip(copier.jobs[4:], copier.jobs[2:4], strict=True):
        assert jobs[0].buffers is reader[0].buffers
    waves = _run_waves(cache, EVERY, copier.log, layer_idx=1)
    assert waves == [("slots", [8, 9]), *(("ring", [n, n + 1]) for n in (0, 2, 4, 6))]
    of_layer_1 = [job.expert_id for jobs in copier.jobs for job in jobs if job.store.layer_idx == 1]
    assert sorted(of_layer_1) == list(range(8)), "each absent expert once"
    assert audit(cache.scheduler) == []


def test_what_was_sent_ahead_in_vain_is_waited_for_before_its_place_is_taken() -> None:
    cache, copier = _two_layers()
    _run_waves(cache, EVERY, copier.log)
    copier.log.clear()
    waves = _run_waves(cache, _ids([4, 5, 6, 8, 9]), copier.log, layer_idx=1)
    assert waves == [("slots", [8, 9]), ("ring", [4, 5]), ("ring", [6])]
    assert copier.log[:2] == [("wait", 4), ("wait", 5)]
    stats = cache.scheduler.stats().layers[1]
    assert (stats.misses, stats.bytes_copied) == (2 + 3, (2 + 4 + 3) * LAYOUT.payload_bytes)


def test_of_what_was_sent_ahead_the_demanded_part_is_used_where_it_lies() -> None:
    cache, copier = _two_layers()
    _run_waves(cache, EVERY, copier.log)
    waves = _run_waves(cache, _ids([1, 2, 3, 7, 8]), copier.log, layer_idx=1)
    assert waves == [("slots", [8]), ("ring", [1]), ("ring", [2, 3]), ("ring", [7])]
    assert copier.experts[6:] == [[7]]


@pytest.mark.parametrize(
    "ids", [EVERY[:, :4], _ids([0, 1, 2, 3])], ids=["eight of ten", "four of ten"]
)
def test_nothing_is_sent_ahead_of_a_step_that_demands_a_part(ids: torch.Tensor) -> None:
    cache, copier = _two_layers()
    _run_waves(cache, ids, copier.log)
    assert {jobs[0].store.layer_idx for jobs in copier.jobs} == {0}


def test_nothing_is_sent_ahead_to_a_layer_with_empty_slots() -> None:
    copier = RecordingCopier()
    cache = small_cache(10, 2, num_layers=2, copier=copier, scheduler_class=RingScheduler)
    _run_waves(cache, EVERY, copier.log)
    assert {jobs[0].store.layer_idx for jobs in copier.jobs} == {0}


def test_what_was_sent_ahead_before_a_step_broke_off_is_not_taken_for_another_layers() -> None:
    cache, copier = _two_layers()
    _run_waves(cache, EVERY, copier.log)  # and layer 1 never runs
    cache.scheduler.begin_step()
    waves = _run_waves(cache, EVERY, copier.log)
    assert waves == [("slots", [8, 9]), *(("ring", [n, n + 1]) for n in (0, 2, 4, 6))]
    _run_waves(cache, EVERY, copier.log, layer_idx=1)
    assert audit(cache.scheduler) == []


@given(
    steps=st.lists(
        st.lists(st.sets(st.integers(0, 9), min_size=3, max_size=10), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_waves_of_any_layers_compute_every_row_once(steps: list[list[set[int]]]) -> None:
    copier = RecordingCopier()
    cache = small_cache(10, 3, num_layers=3, copier=copier, scheduler_class=RingScheduler)
    for index, step in enumerate(steps):
        cache.scheduler.begin_step(decodes=index % 2 == 0)
        for layer_idx, demanded in enumerate(step):
            _run_waves(cache, _ids(sorted(demanded)), copier.log, layer_idx)
            assert audit(cache.scheduler) == []


def test_expert_waves_work_under_an_expert_map() -> None:
    copier = RecordingCopier()
    expert_map = torch.tensor([-1, 5, 4, -1, 3, 2, 1, 0])
    cache = small_cache(6, 2, copier=copier, expert_map=expert_map, scheduler_class=RingScheduler)
    layer = cache.layer()
    ids = _ids([1, 2, 3], [4, 5, 0], [6, 7, -1])
    computed = []
    for wave in cache.scheduler.expert_waves(0, ids):
        assert wave.expert_map.shape == (8,)
        for expert in torch.where(wave.expert_map >= 0)[0].tolist():
            row = int(wave.expert_map[expert])
            assert holds(wave.buffers, row, layer.store, int(expert_map[expert]))
            computed.append(expert)
    assert sorted(computed) == [1, 2, 4, 5, 6, 7]
    assert audit(cache.scheduler) == []


@given(
    routing=st.lists(
        st.lists(st.integers(-1, 11), min_size=3, max_size=3), min_size=1, max_size=12
    ),
    resident=st.sets(st.integers(0, 11), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_waves_compute_every_row_once_whatever_the_routing(
    routing: list[list[int]], resident: set[int]
) -> None:
    cache, copier = _ring_cache()
    _step(cache, [*resident, -1])
    for _ in range(2):
        cache.scheduler.begin_step()
        _run_waves(cache, _ids(*routing), copier.log)
        assert all(cache.mapping()[expert] >= 0 for expert in resident)
        cache.layer().table.check_integrity()
        assert audit(cache.scheduler) == []
    demanded = {expert for row in routing for expert in row if expert >= 0}
    copied = [expert for experts in copier.experts for expert in experts]
    for expert in demanded - resident:
        assert 1 <= copied.count(expert) <= 2  # once a step
    assert not [expert for expert in resident if copied.count(expert) != 1]


# Set-up and end


class AtOnce(RingScheduler):
    """Notes every hit before it goes on."""

    def _prepare_sent(self, layer: LayerCache, sent: Sent) -> None:
        self._prepare(layer, *self._receive(layer, sent))


def _noted(scheduler: Scheduler) -> list[object]:
    """All that a step leaves behind, a part per layer."""
    return [
        (
            [part.tolist() for part in layer.table.snapshot()[:4]],
            replace(layer.table.counters),
            layer.mapping.tolist(),
            (layer.steps, layer.waves, layer.experts_read, layer.last_step, layer.is_stale),
        )
        for layer in scheduler.layers
    ]


@pytest.mark.parametrize("how", ["waves by expert", "waves by token", "ids known"])
def test_hits_are_noted_before_the_same_layer_runs_again(how: str) -> None:
    scheduler = small_cache(4, 2, num_layers=2, scheduler_class=RingScheduler).scheduler
    for _ in range(2):
        scheduler.begin_step(decodes=True)
        scheduler.fetch(0, _ids([0, 1]))
    owed = scheduler._owed
    assert owed is not None
    others = _ids([2], [3], [2])
    match how:
        case "waves by expert":
            assert len(list(scheduler.expert_waves(0, others))) == 1
        case "waves by token":
            assert len(list(scheduler.token_waves(0, others))) == 1
        case _:
            assert scheduler.fits(0, others)
            scheduler.fetch(0, others)
    layer = scheduler.stats().layers[0]
    assert (layer.hits, layer.misses, layer.steps) == (2, 4, 2)


@pytest.mark.parametrize("seed", range(8))
def test_hits_that_are_noted_later_leave_what_hits_noted_at_once_do(seed: int) -> None:
    """Whatever comes between: wide steps, padding, steps that break off, layers that run twice."""
    chosen = np.random.default_rng(seed)
    num_layers, num_experts, top_k = 3, 6, 2
    expert_map = None
    if seed % 3 == 1:
        ranks = np.concatenate([np.arange(num_experts), np.full(num_experts, -1)])
        expert_map = torch.from_numpy(chosen.permutation(ranks).astype(np.int32))
    caches = [
        small_cache(
            num_experts,
            num_slots=int(3 + seed % 4),
            num_layers=num_layers,
            expert_map=expert_map,
            scheduler_class=scheduler_class,
            policy=("lru", "lfru")[seed % 2],
        )
        for scheduler_class in (RingScheduler, AtOnce)
    ]
    later, at_once = (cache.scheduler for cache in caches)
    num_ids = num_experts if expert_map is None else 2 * num_experts
    hot = chosen.integers(0, num_ids, (num_layers, 3))
    were_owed = 0

    def both(action: Callable[[Scheduler], object]) -> None:
        results: list[object] = []
        for scheduler in (later, at_once):
            try:
                results.append(action(scheduler))
            except (NotEnoughSlots, ValueError) as error:
                results.append(str(error))
        assert results[0] == results[1]

    for _ in range(100):
        if chosen.random() > 0.4:
            both(lambda scheduler: scheduler.begin_step(decodes=True))
        is_wide = chosen.random() < 0.4
        for layer_idx in range(num_layers):
            if chosen.random() < 0.3:
                continue  # as where a step breaks off
            rows = 5 if is_wide else int(chosen.integers(1, 3))
            ids = torch.from_numpy(chosen.choice(hot[layer_idx], (rows, top_k)).astype(np.int32))
            if chosen.random() < 0.3:
                ids[:] = torch.from_numpy(chosen.integers(-1, num_ids, (rows, top_k)))
            if chosen.random() < 0.01:
                ids[0, 0] = -3
            padding = torch.from_numpy(chosen.random(rows) < 0.2)
            kind = int(chosen.integers(0, 3))

            def step(
                scheduler: Scheduler,
                layer_idx: int = layer_idx,
                ids: torch.Tensor = ids,
                padding: torch.Tensor = padding,
                kind: int = kind if is_wide else 3 + kind % 2,
            ) -> list[object]:
                match kind:
                    case 0:
                        waves = scheduler.expert_waves(layer_idx, ids)
                        return [(w.expert_map.tolist(), w.in_wave.tolist()) for w in waves]
                    case 1 | 2:
                        return [s.tolist() for _, s in scheduler.token_waves(layer_idx, ids)]
                    case 3 if not scheduler.fits(layer_idx, ids):
                        return []
                pad = None if kind == 3 else padding
                return [scheduler.fetch(layer_idx, ids, padding=pad).tolist()]

            both(step)
            were_owed += later._owed is not None
            if chosen.random() < 0.01:
                both(lambda scheduler: scheduler.reset())
        if chosen.random() < 0.5:
            both(lambda scheduler: [layer.hits for layer in scheduler.stats().layers])
            assert _noted(later) == _noted(at_once)
    assert were_owed > 20
    for cache in caches:
        assert audit(cache.scheduler) == []
        cache.scheduler.close()


def test_a_layer_cannot_be_added_twice() -> None:
    cache = small_cache()
    with pytest.raises(ValueError, match=r"layer 0 .* is already under the scheduler"):
        cache.scheduler.add_layer(0, "again", cache.layer().store, cache.layer().buffers)


def test_more_slots_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_slots must be between 1 and the layer's 4 experts"):
        small_cache(num_experts=4, num_slots=5)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown eviction policy 'nope'; choose one of lru, lfru"):
        small_cache(policy="nope")


def test_reset_empties_the_slots_and_restarts_the_counters() -> None:
    cache = small_cache()
    first = _step(cache, [0, 5])
    cache.scheduler.reset()
    assert cache.mapping() == [-1] * 8
    assert audit(cache.scheduler) == []
    stats = cache.scheduler.stats()
    assert [stats.total(name) for name in ("hits", "misses", "waves", "steps", "bytes_copied")] == [
        0
    ] * 5
    assert torch.equal(_step(cache, [0, 5]), first)


@pytest.mark.parametrize("policy", ["lru", "lfru", "forecast"])
def test_with_a_slot_for_each_expert_no_step_misses_after_a_preload(policy: str) -> None:
    cache = small_cache(8, 8, num_layers=2, policy=policy)
    _step(cache, [3, 1])
    cache.scheduler.reset()
    assert cache.scheduler.preload(top_k=2) == 2
    assert audit(cache.scheduler) == []
    assert sorted(cache.mapping(1)) == list(range(8))
    empty = cache.scheduler.stats()
    counters = ("hits", "misses", "waves", "steps", "bytes_copied")
    assert [empty.total(name) for name in counters] == [0] * 5
    assert empty.steps_with_misses == 0
    _step(cache, [0, 5])
    stats = cache.scheduler.stats()
    assert [stats.total(name) for name in counters] == [2, 0, 1, 1, 0]
    assert audit(cache.scheduler) == []


def test_fewer_slots_than_experts_are_left_empty_by_a_preload() -> None:
    cache = small_cache(8, 7)
    assert cache.scheduler.preload(top_k=2) == 0
    assert cache.mapping() == [-1] * 8


def test_stats_say_what_the_cache_holds() -> None:
    cache = small_cache(num_experts=8, num_slots=4, num_layers=2)
    _step(cache, [0, 1])
    _step(cache, [1, 2])
    stats = cache.scheduler.stats()
    assert (stats.mode, stats.policy) == ("eager", "lru")
    assert stats.slot_bytes == 2 * 4 * LAYOUT.payload_bytes
    assert stats.host_bytes == cache.host_store.total_bytes
    assert stats.pinned_bytes == 0
    first, second = stats.layers
    assert (first.layer_idx, first.num_experts, first.num_slots) == (0, 8, 4)
    assert first.layer_name == "model.layers.0.mlp.experts"
    assert (first.steps, first.waves, first.hits, first.misses) == (2, 2, 1, 3)
    assert first.bytes_copied == 3 * LAYOUT.payload_bytes
    assert (second.steps, second.hits, second.misses, second.bytes_copied) == (0, 0, 0, 0)


def test_the_copier_is_closed_before_the_store_that_it_reads() -> None:
    class Closing(RecordingCopier):
        cache: SmallCache

        def close(self) -> None:
            assert self.cache.host_store.layers, "the store was closed first"
            super().close()

    copier = Closing()
    cache = copier.cache = small_cache(copier=copier)
    cache.scheduler.close()
    cache.scheduler.close()
    assert copier.log == [("close", None)]
    assert cache.host_store.layers == []
    assert cache.scheduler.layers == []


def test_layers_of_other_shapes_get_a_ring_of_their_own() -> None:
    cache = small_cache(num_layers=1)
    other = type(LAYOUT).from_tensors({"w13_weight": ((2, 2), torch.float32)})
    store = cache.host_store.add_layer(1, 4, other)
    cache.scheduler.add_layer(1, "other", store, SlotBuffers(2, other, CPU))
    rows = cache.scheduler.stats().staging_bytes
    assert rows == 2 * (LAYOUT.payload_bytes + other.payload_bytes)


def test_filled_layers_differ_in_every_expert() -> None:
    """The helper's own check: with equal experts, none of the above could fail."""
    cache = small_cache(num_layers=2)
    slabs = [cache.layer(i).store.slab for i in range(2)]
    rows = np.concatenate([slab.numpy() for slab in slabs])
    assert len(np.unique(rows, axis=0)) == 16
    assert filled_layer.__doc__
