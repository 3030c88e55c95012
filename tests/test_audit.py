"""The audit: silent on a sound cache, and every kind of damage is named."""

from collections.abc import Sequence

import pytest
import torch

from prefetch_runtime.audit import audit
from prefetch_runtime.copier import CopyJob, CopyTicket, HostCopier
from tests.helpers.small_cache import SmallCache, small_cache

MAP = torch.tensor([-1, 2, -1, 0, 3, 1])


def _used(expert_map: torch.Tensor | None = None) -> SmallCache:
    """A cache after a few steps: all slots taken, one expert evicted."""
    num_experts = 8 if expert_map is None else 4
    cache = small_cache(num_experts, 3, num_layers=2, expert_map=expert_map)
    for ids in ([1, 3], [4, 3], [5, 1]):
        cache.scheduler.begin_step()
        for layer_idx in range(2):
            cache.scheduler.fetch(layer_idx, torch.tensor([ids]))
    return cache


@pytest.mark.parametrize("expert_map", [None, MAP], ids=["plain", "expert-map"])
def test_a_sound_cache_has_nothing_to_report(expert_map: torch.Tensor | None) -> None:
    assert audit(_used(expert_map).scheduler) == []


@pytest.mark.parametrize("expert_map", [None, MAP], ids=["plain", "expert-map"])
def test_a_wrong_mapping_entry_is_caught(expert_map: torch.Tensor | None) -> None:
    cache = _used(expert_map)
    mapping = cache.layer(1).mapping
    swapped = mapping[[5, 1]].tolist()
    mapping[[1, 5]] = torch.tensor(swapped, dtype=torch.int32)
    problems = "\n".join(audit(cache.scheduler))
    for expert, slot, table in ((1, swapped[0], swapped[1]), (5, swapped[1], swapped[0])):
        assert (
            f"layer 1: expert {expert} is in slot {slot} on the device, but in slot {table}"
        ) in problems
        assert f"layer 1: slot {slot} should hold expert {expert}, but" in problems
    assert "layer 0" not in problems


def test_an_entry_of_an_expert_that_is_absent_is_caught() -> None:
    cache = _used()
    absent, slot = cache.mapping().index(-1), cache.mapping()[1]
    cache.layer().mapping[absent] = slot
    problems = audit(cache.scheduler)
    assert (
        f"layer 0: expert {absent} is in slot {slot} on the device, but in slot -1" in problems[0]
    )
    assert any("two experts share a slot" in problem for problem in problems)


def test_an_entry_that_names_no_slot_is_caught() -> None:
    cache = _used()
    cache.layer().mapping[0] = 3
    problems = audit(cache.scheduler)
    assert "layer 0: expert 0 is mapped to slot 3, which does not exist" in problems


def test_a_copy_that_never_ran_is_caught() -> None:
    class Forgetful(HostCopier):
        def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
            kept = [job for job in jobs if job.expert_id != 6]
            return super().submit(kept, after_compute=after_compute)

    cache = small_cache(copier=Forgetful())
    cache.scheduler.fetch(0, torch.tensor([[2, 6]]))
    problems = audit(cache.scheduler)
    assert [problem.split(" of ")[-1] for problem in problems] == [
        "w13_weight differ",
        "w2_weight differ",
        "w13_weight_scale differ",
    ]
    assert all("layer 0: slot 1 should hold expert 6" in problem for problem in problems)


def test_one_wrong_byte_in_any_tensor_is_caught() -> None:
    for name in ("w13_weight", "w2_weight", "w13_weight_scale"):
        cache = _used()
        slot = cache.mapping()[5]
        cache.layer().buffers.row_bytes(name, slot)[3] ^= 1
        (problem,) = audit(cache.scheduler)
        assert problem.startswith(f"layer 0: slot {slot} should hold expert 5, but 1 of ")
        assert problem.endswith(f" bytes of {name} differ")


def test_nan_payloads_are_compared_by_their_bits() -> None:
    cache = small_cache()
    cache.layer().store.slab.fill_(0xFF)
    cache.scheduler.fetch(0, torch.tensor([[0]]))
    assert audit(cache.scheduler) == []
    cache.layer().buffers.row_bytes("w2_weight", 0)[0] ^= 1  # still NaN
    assert len(audit(cache.scheduler)) == 1


def test_a_slot_that_a_newcomer_overwrote_while_the_old_expert_is_mapped_is_caught() -> None:
    cache = _used()
    device_row = cache.layer().mapping.clone()
    cache.scheduler.begin_step()
    cache.scheduler.fetch(0, torch.tensor([[6, 7]]))
    cache.layer().mapping.copy_(device_row)  # as if the publication had been lost
    evicted = [e for e, slot in enumerate(device_row[:-1].tolist()) if slot >= 0]
    evicted = [e for e in evicted if cache.layer().table.mapping[e] < 0]
    problems = "\n".join(audit(cache.scheduler))
    assert evicted
    for expert in evicted:
        slot = int(device_row[expert])
        assert f"expert {expert} is in slot {slot} on the device, but in slot -1" in problems
        assert f"slot {slot} should hold expert {expert}, but" in problems
