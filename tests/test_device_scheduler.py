"""The device scheduler on a CPU device: the host's decisions, made by interpreted kernels."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphs import prefetch
from graphs.layout import Clock
from predictors import MAX_FORECAST, PredictorShape, create_predictor
from predictors.base import by_rank
from prefetch_runtime.audit import audit
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.copier import HostCopier
from prefetch_runtime.device_scheduler import DeviceScheduler, _forecast
from prefetch_runtime.hit_rates import create_hit_rates
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.model_sizes import model_sizes
from prefetch_runtime.plan import Planner, Workload, typical_gpu
from prefetch_runtime.scheduler import LayerCache, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.staging import StagingRing
from prefetch_runtime.waves import worst_waves
from tests.helpers.model_configs import QWEN3_30B
from tests.helpers.small_cache import LAYOUT as SMALL
from tests.helpers.small_cache import RecordingCopier, small_cache

CPU = torch.device("cpu")
NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K = 2, 12, 5, 2
LAYOUT = RecordLayout.from_tensors(
    {"w13_weight": ((6, 4), torch.float32), "w2_weight": ((5,), torch.bfloat16)}
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without interpreter these kernels need device memory"
)


def _build(kind: type[Scheduler], *, policy: str = "lru", experts: int = NUM_EXPERTS) -> Scheduler:
    store = HostStore(pinning=False)
    scheduler = kind(
        copier=HostCopier(), host_store=store, device=CPU, policy=policy, id_for_padding=0
    )
    for layer_idx in range(NUM_LAYERS):
        layer = store.add_layer(layer_idx, experts, LAYOUT)
        for name in ("w13_weight", "w2_weight"):
            tensor = layer.tensor(name)
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)))
        scheduler.add_layer(
            layer_idx, f"layer {layer_idx}", layer, SlotBuffers(NUM_SLOTS, LAYOUT, CPU)
        )
    scheduler.seal()
    return scheduler


def _device(**more: object) -> DeviceScheduler:
    scheduler = _build(DeviceScheduler, **more)  # type: ignore[arg-type]
    assert isinstance(scheduler, DeviceScheduler)
    return scheduler


def _ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_it_decides_what_the_host_decides(policy: str) -> None:
    host, device = _build(Scheduler, policy=policy), _device(policy=policy)
    chosen = np.random.default_rng(1)
    for _ in range(15):
        host.begin_step()
        device.begin_step()
        for layer_idx in range(NUM_LAYERS):
            rows = [chosen.choice(NUM_EXPERTS, TOP_K, replace=False) for _ in range(2)]
            ids = torch.from_numpy(np.stack(rows).astype(np.int32))
            assert torch.equal(host.fetch(layer_idx, ids), device.fetch(layer_idx, ids))
        assert audit(device) == []
    for ours, theirs in zip(device.stats().layers, host.stats().layers, strict=True):
        for counter in ("hits", "misses", "evictions", "bytes_copied"):
            assert getattr(ours, counter) == getattr(theirs, counter)
    assert device.stats().total("evictions") > 0


@pytest.mark.parametrize("top_k", [1, 5, 8])
def test_with_a_slot_for_each_expert_no_step_misses_after_a_preload(top_k: int) -> None:
    cache = small_cache(8, 8, num_layers=2, scheduler_class=DeviceScheduler, id_for_padding=0)
    scheduler = cache.scheduler
    scheduler.seal()
    scheduler.begin_step()
    scheduler.fetch(0, _ids([6, 2]))
    scheduler.reset()
    assert scheduler.preload(top_k) == 2
    assert audit(scheduler) == []
    counters = ("hits", "misses", "evictions", "steps", "bytes_copied")
    assert [scheduler.stats().total(name) for name in counters] == [0] * 5
    assert scheduler.stats().steps_with_misses == 0
    for _ in range(2):
        scheduler.begin_step()
        for layer_idx in range(2):
            scheduler.fetch(layer_idx, _ids([7, 0], [3, 4]))
    stats = scheduler.stats()
    assert [stats.total(name) for name in counters] == [16, 0, 0, 4, 0]
    assert stats.steps_with_misses == 0
    assert audit(scheduler) == []


def _with_ring(kind: type[Scheduler], layout: RecordLayout = LAYOUT) -> type[Scheduler]:
    """A scheduler whose staging ring has two rows a half, as on a CUDA device, here on the CPU."""

    class WithRing(kind):  # type: ignore[valid-type,misc]
        def _staging_of(self, _: LayerCache) -> StagingRing:
            if not self._staging:
                halves = [SlotBuffers(2, layout, CPU) for _ in range(2)]
                self._staging[()] = StagingRing(halves)
            return self._staging[()]

    return WithRing


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_wide_steps_are_what_they_are_on_the_host(policy: str) -> None:
    host = _build(_with_ring(Scheduler), policy=policy)
    device = _build(_with_ring(DeviceScheduler), policy=policy)
    chosen = np.random.default_rng(3)
    for step in range(24):
        host.begin_step(decodes=step % 3 > 0)
        device.begin_step(decodes=step % 3 > 0)
        width = int(chosen.integers(4, NUM_EXPERTS + 1)) if step % 4 else NUM_EXPERTS
        for layer_idx in range(NUM_LAYERS):
            experts = chosen.choice(NUM_EXPERTS, width, replace=False)
            ids = torch.from_numpy(np.resize(experts, (NUM_EXPERTS // 2, 2)).astype(np.int32))
            waves = zip(
                host.expert_waves(layer_idx, ids),
                device.expert_waves(layer_idx, ids),
                strict=True,
            )
            computed = torch.zeros(ids.shape, dtype=torch.int64)
            for ours, theirs in waves:
                assert torch.equal(ours.expert_map, theirs.expert_map)
                assert ours.is_last == theirs.is_last
                rows = theirs.expert_map[ids.long()]
                computed += rows >= 0
                store = device.layer(layer_idx).store
                for expert in torch.where(theirs.expert_map >= 0)[0].tolist():
                    for name in ("w13_weight", "w2_weight"):
                        row = theirs.buffers.tensors[name][int(theirs.expert_map[expert])]
                        assert torch.equal(row, store.tensor(name)[expert])
            assert torch.equal(computed, torch.ones_like(computed)), "each (token, k) once"
        assert audit(device) == []
        assert audit(host) == []
    for ours, theirs in zip(device.stats().layers, host.stats().layers, strict=True):
        for counter in ("hits", "misses", "evictions", "waves", "bytes_copied"):
            assert getattr(ours, counter) == getattr(theirs, counter), counter
    assert device.stats().total("evictions") > 0


@pytest.mark.parametrize("whole", [False, True], ids=["", "whole"])
@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_captured_waves_are_the_hosts_and_empty_ones(
    policy: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = _build(_with_ring(Scheduler), policy=policy)
    monkeypatch.setattr(host, "_read_ahead", lambda *_: None)  # a graph sends nothing ahead
    device = _build(_with_ring(DeviceScheduler), policy=policy)
    assert isinstance(device, DeviceScheduler)
    chosen = np.random.default_rng(4)
    shape = (NUM_EXPERTS // 2, 2)
    padding = torch.zeros(shape[0], dtype=torch.int64)
    for step in range(9):
        host.begin_step(decodes=True)
        device.begin_step(decodes=True)
        padding[:] = 0
        padding[shape[0] - step % 3 :] = -1
        width = int(chosen.integers(2, NUM_EXPERTS + 1)) if step % 4 else NUM_EXPERTS
        for layer_idx in range(NUM_LAYERS):
            experts = chosen.choice(NUM_EXPERTS, width, replace=False)
            ids = torch.from_numpy(np.resize(experts, shape).astype(np.int32))
            if step % 2:
                ids[padding < 0] = -1 if step % 4 == 1 else 1 << 30  # whatever is there
            demanded = ids.masked_fill(padding.unsqueeze(1) < 0, -1)
            theirs = [wave.expert_map.clone() for wave in host.expert_waves(layer_idx, demanded)]
            computed = torch.zeros(shape, dtype=torch.int64)
            store = device.layer(layer_idx).store
            waves = device.captured_waves(layer_idx, ids, padding=padding, whole=whole)
            for number, wave in enumerate(waves):
                computed += wave.in_wave
                assert wave.is_last == (number == 1 + (NUM_EXPERTS - NUM_SLOTS + 1) // 2 - 1)
                rows = theirs[number] if number < len(theirs) else torch.full_like(theirs[0], -1)
                held = rows[demanded.clamp(min=0).long()] >= 0
                assert torch.equal(wave.in_wave, (demanded >= 0) & held)
                if whole:
                    there = wave.expert_map[rows >= 0]
                    assert wave.expert_map.min() >= 0, "some row for every expert"
                    assert set(wave.expert_map.tolist()) <= {*there.tolist(), 0}
                    assert torch.equal(there, rows[rows >= 0])
                else:
                    assert torch.equal(wave.expert_map, rows)
                for expert in torch.where(rows >= 0)[0].tolist():
                    for name in ("w13_weight", "w2_weight"):
                        row = wave.buffers.tensors[name][int(wave.expert_map[expert])]
                        assert torch.equal(row, store.tensor(name)[expert])
            assert number == 4, "as many as the worst routing needs"
            real = padding >= 0
            assert torch.equal(computed[real], torch.ones_like(computed[real]))
        assert audit(device) == []
    for ours, others in zip(device.stats().layers, host.stats().layers, strict=True):
        for counter in ("hits", "misses", "evictions", "waves", "bytes_copied"):
            assert getattr(ours, counter) == getattr(others, counter), counter
    assert device.stats().total("evictions") > 0


def test_a_graph_holds_steps_that_fit_or_run_in_few_waves() -> None:
    device = _build(_with_ring(DeviceScheduler))
    captured = [n for n in range(1, 100) if device.captures(n, TOP_K)]
    assert captured == list(range(1, 65)), "at most 1 + 4 waves whatever the routing"
    many = _build(_with_ring(DeviceScheduler), experts=64)
    # Nine waves: the slots', and eight of two experts each.
    assert [n for n in range(1, 100) if many.captures(n, TOP_K)] == list(range(1, 11))
    host = _build(_with_ring(Scheduler))
    assert [n for n in range(1, 100) if host.captures(n, TOP_K)] == [1, 2]
    assert isinstance(many, DeviceScheduler)
    with pytest.raises(ValueError, match="22 assignments may take 10 waves, room is for 9"):
        list(many.captured_waves(0, torch.zeros(11, 2, dtype=torch.int32)))


@pytest.mark.parametrize("num_assignments", [1, 5, 6, 7, 8, 12, 100])
def test_a_plan_without_kernels_counts_the_same_waves(num_assignments: int) -> None:
    device = _build(_with_ring(DeviceScheduler))
    assert isinstance(device, DeviceScheduler)
    sizes = {"num_experts": NUM_EXPERTS, "num_slots": NUM_SLOTS, "rows": 2}
    ids = torch.arange(num_assignments, dtype=torch.int32).view(-1, 1) % NUM_EXPERTS
    waves = list(device.captured_waves(0, ids))
    assert len(waves) == worst_waves(num_assignments, **sizes)
    assert torch.stack([wave.in_wave for wave in waves]).sum(0).eq(1).all(), "enough for all"


@pytest.mark.parametrize("experts", [NUM_EXPERTS, 64])
def test_a_plan_knows_what_is_captured(experts: int) -> None:
    device = _build(_with_ring(DeviceScheduler), experts=experts)
    sizes = replace(model_sizes(QWEN3_30B.config), num_experts=experts, top_k=TOP_K)
    for batch in range(1, 70):
        rates = create_hit_rates("uniform", num_experts=experts, top_k=TOP_K, batch=batch)
        work = Workload(context=1, batch=batch, staging_slots=4)
        estimate = Planner(sizes, typical_gpu(24), work, rates).estimate(NUM_SLOTS)
        assert (estimate.mode == "full") == device.captures(batch, TOP_K), batch


def test_copies_of_a_wide_step_that_failed_end_before_a_graph_may_use_their_ring() -> None:
    copier = RecordingCopier()
    cache = small_cache(
        NUM_EXPERTS, NUM_SLOTS, num_layers=2, copier=copier, id_for_padding=0,
        scheduler_class=_with_ring(DeviceScheduler, SMALL),
    )  # fmt: skip
    device = cache.scheduler
    device.seal()
    device.begin_step()
    waves = device.expert_waves(0, torch.arange(NUM_EXPERTS, dtype=torch.int32).view(-1, 2))
    next(waves)
    waves.close()  # what computes the wave has failed; two halves of the ring are being filled
    last = len(copier.jobs) - 1
    assert last >= 2
    assert ("wait", last) not in copier.log
    device.begin_step()
    assert copier.log[-1] == ("wait", last), "the last: copies follow each other"
    device.begin_step()
    assert copier.log.count(("wait", last)) == 1


def test_what_a_failed_step_has_sent_ahead_is_forgotten() -> None:
    device = _build(_with_ring(DeviceScheduler))
    ring = device._staging_of(device.layer(0))
    ids = torch.arange(NUM_EXPERTS, dtype=torch.int32).view(-1, 2)
    for layer_idx in range(NUM_LAYERS):  # a prompt fills the slots
        list(device.expert_waves(layer_idx, ids))
    device.begin_step()
    list(device.expert_waves(0, ids))
    assert ring.ahead_of(1).size, "all experts: the next layer's are on their way"
    device.begin_step()  # the next layer never ran
    assert not ring.ahead_of(1).size


@pytest.mark.parametrize("where", ["before its copies", "before its fill", "at the last copies"])
def test_no_step_follows_one_that_was_cut_short_while_it_brought_experts_in(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while the host waits for what the device has planned."""
    device = _build(_with_ring(DeviceScheduler))
    assert isinstance(device, DeviceScheduler)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def narrow() -> None:
        device.fetch(0, _ids([1, 2]))

    def wide() -> None:
        list(device.expert_waves(0, torch.arange(NUM_EXPERTS, dtype=torch.int32).view(-1, 2)))

    owner, name, step = {
        "before its copies": (device, "_to_host", wide),
        "before its fill": (device._demand_fill, "fill", narrow),
        "at the last copies": (device._copier, "wait", wide),
    }[where]
    device.begin_step(decodes=True)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            step()
    with pytest.raises(RuntimeError, match=r"cut short while it brought experts in.*reset"):
        device.begin_step()
    device.reset()
    device.begin_step()
    device.fetch(0, _ids([1, 2]))
    assert audit(device) == []
    device.begin_step()


def test_steps_are_counted_on_when_their_number_leaves_int32() -> None:
    # After 100 days at 250 steps a second. The clock of the policy moves back; this one does not.
    scheduler = _device()
    clocks = scheduler.table.clocks
    clocks[[Clock.STEP, Clock.MISSED_STEPS]] = 2**31 - 1
    seen = []
    for expert in range(3):
        scheduler.begin_step()
        for layer_idx in range(NUM_LAYERS):
            scheduler.fetch(layer_idx, _ids([expert, 7]))
        stats = scheduler.stats()
        seen.append((stats.layers[0].steps, stats.steps_with_misses))
    assert seen == [(2**31 - 1 + i, 2**31 + i) for i in range(3)]
    assert (scheduler.stats().layers[0].hits, scheduler.stats().layers[0].misses) == (2, 4)
    assert audit(scheduler) == []


def test_padding_costs_nothing() -> None:
    device = _device()
    padding = torch.tensor([3, -1], dtype=torch.int64)
    device.fetch(0, _ids([1, 2], [7, 8]), padding=padding)
    assert device.stats().layers[0].misses == 2


def test_a_wrong_entry_in_the_device_table_is_caught() -> None:
    device = _device()
    device.fetch(0, _ids([1, 2]))
    slots = device.table.mapping[0]
    slots[[1, 2]] = slots[[2, 1]]
    problems = audit(device)
    assert any("should hold expert 1" in problem for problem in problems)
    assert any("but in slot" in problem for problem in problems)


def test_a_fill_that_never_ran_is_caught() -> None:
    device = _device()
    for tensor in device.slot_buffers(0).tensors.values():
        tensor.fill_(0)
    device.table.advance()
    device.table.resolve(0, _ids([1, 2]))
    assert any("bytes of w13_weight differ" in problem for problem in audit(device))


def test_warming_up_leaves_an_empty_cache() -> None:
    device = _device()
    device.warm_up(TOP_K, 16)
    stats = device.stats()
    assert (device.table.mapping < 0).all()
    assert stats.total("hits") + stats.total("misses") == 0
    assert int(device.table.step.item()) == 1


class _Launches:
    """In place of a kernel: runs it, and notes what it is compiled for."""

    def __init__(self, kernel: Any, *constants: str) -> None:
        self._kernel = kernel
        self._constants = constants
        self.variants: set[tuple[int, ...]] = set()

    def __getitem__(self, grid: Any) -> Any:
        names = inspect.signature(self._kernel.fn).parameters

        def launch(*args: Any, **more: Any) -> None:
            given = {**dict(zip(names, args, strict=False)), **more}
            self.variants.add(tuple(int(given[name]) for name in self._constants))
            self._kernel[grid](*args, **more)

        return launch


@pytest.mark.parametrize(
    ("predicts", "traced", "max_tokens"),
    [(False, False, 4096), (False, False, 5), (True, False, 4096), (True, True, 4096)],
)
def test_warming_up_loads_the_kernels_of_every_step_that_fits(
    predicts: bool, traced: bool, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 40 slots and top 6: up to 6 tokens, whose 36 assignments are more than a block of 32.
    cache = small_cache(64, 40, num_layers=2, scheduler_class=DeviceScheduler, id_for_padding=0)
    device = cache.scheduler
    assert isinstance(device, DeviceScheduler)
    device.seal()
    if predicts:
        shape = PredictorShape(num_layers=2, num_experts=64, top_k=6)
        device.predict_on_device(create_predictor("next_gate", shape))
    if traced:
        device.make_room_for_a_trace(top_k=6, num_guesses=6, max_tokens=16)
    kept = ("BLOCK", "num_warps", "PAD", "TOP_K")
    resolve = _Launches(device.table._resolve_kernel, *kept, "TOUCH")
    post = _Launches(prefetch.post_kernel, *kept)
    monkeypatch.setattr(device.table, "_resolve_kernel", resolve)
    monkeypatch.setattr(prefetch, "post_kernel", post)
    device.warm_up(6, max_tokens)
    loaded = [set(kernel.variants) for kernel in (resolve, post)]
    for num_tokens in range(1, min(6, max_tokens) + 1):
        ids = torch.full((num_tokens, 6), -1, dtype=torch.int32)
        for padding in (None, torch.zeros(num_tokens, dtype=torch.int64)):
            device.fetch(0, ids, padding=padding, guesses=ids.clone if predicts else None)
            device.fetch(1, ids, padding=padding)
        assert [kernel.variants for kernel in (resolve, post)] == loaded, num_tokens


def test_a_step_fits_only_if_any_routing_would() -> None:
    device = _device()
    assert device.fits(0, _ids([1, 1], [1, 1]))
    assert not device.fits(0, _ids([1, 1], [1, 1], [1, 1]))
    assert device.most_tokens_at_once(TOP_K) == 2


def test_layers_of_two_sizes_are_refused() -> None:
    store = HostStore(pinning=False)
    scheduler = DeviceScheduler(copier=HostCopier(), host_store=store, device=CPU)
    for layer_idx, experts in enumerate((8, 12)):
        layer = store.add_layer(layer_idx, experts, LAYOUT)
        scheduler.add_layer(layer_idx, "", layer, SlotBuffers(NUM_SLOTS, LAYOUT, CPU))
    with pytest.raises(ValueError, match="the same number of experts and slots in every MoE layer"):
        scheduler.seal()


def test_a_forecast_is_brought_in_before_its_demand() -> None:
    device = _device()
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    device.predict_on_device(create_predictor("next_gate", shape))
    device.fetch(0, _ids([1, 2]), guesses=lambda: torch.tensor([[9, 3, 4]]))
    device.fetch(1, _ids([9, 5]))
    layer = device.stats().layers[1]
    assert (layer.hits, layer.misses, layer.prefetched, layer.prefetch_used) == (1, 1, 3, 1)
    assert audit(device) == []


class _Guesses(torch.Tensor):
    """Guesses that say which stream they are read on, as tensors on a GPU must be told."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        _READ_ON.append(stream)


_READ_ON: list[object] = []


def test_guesses_that_are_recorded_first_are_kept_until_the_branch_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They are made on the compute stream, whose next tensor would get their memory.
    device = _device()
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    device.predict_on_device(create_predictor("next_gate", shape))
    device.make_room_for_a_trace(top_k=TOP_K, num_guesses=3, max_tokens=4)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the branch")
    _READ_ON.clear()
    guesses = torch.tensor([[9, 3, 4]]).as_subclass(_Guesses)
    device.fetch(0, _ids([1, 2]), guesses=lambda: guesses)
    assert _READ_ON == ["the branch"]
    device.fetch(1, _ids([9, 5]))
    assert device.stats().layers[1].hits == 1


@pytest.mark.parametrize(("tokens", "width"), [(3, 4), (16, 4), (5, 16), (40, 6)])
@pytest.mark.parametrize("num_experts", [16, 128])
def test_both_forms_predict_the_same_experts(tokens: int, width: int, num_experts: int) -> None:
    """Of many guesses that are alike, too: repeats take no place among the 64."""
    random = np.random.default_rng(tokens)
    for low in (0.3, 4.0):  # most of the guesses are of few experts; of all
        ids = (num_experts * random.beta(low, 4.0, (tokens, width))).astype(np.int64)
        padding = torch.from_numpy(random.integers(-1, 3, tokens))
        known = ids[padding.numpy() >= 0]
        want = by_rank(known, min(MAX_FORECAST, width * len(known)))
        forecast = _forecast(torch.from_numpy(ids), padding, MAX_FORECAST, num_experts)
        assert forecast.dtype == torch.int32
        assert forecast.numel() <= MAX_FORECAST
        assert [e for e in dict.fromkeys(forecast.tolist()) if e >= 0] == want


def test_a_wide_steps_last_guess_is_prefetched_behind_many_repeats() -> None:
    device = _device()
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    device.predict_on_device(create_predictor("next_gate", shape))
    guesses = torch.tensor([[9, 3]] * 40 + [[9, 4]])  # 4 is the last of 82
    device.fetch(0, _ids([1, 2]), guesses=lambda: guesses)
    device.fetch(1, _ids([4, 5]))
    layer = device.stats().layers[1]
    assert (layer.hits, layer.prefetched) == (1, 3)


@pytest.mark.parametrize("how", ["captured", "by the host", "by token"])
def test_a_forecast_for_a_layer_that_runs_in_waves_ends_before_them(how: str) -> None:
    """As where layers differ in top_k, so that one step fits the slots of some alone."""
    device = _build(_with_ring(DeviceScheduler))
    assert isinstance(device, DeviceScheduler)
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    device.predict_on_device(create_predictor("next_gate", shape))
    store, branch = device.layer(1).store, device._branch
    assert branch is not None
    ids = _ids(*([2 * at, 2 * at + 1] for at in range(NUM_EXPERTS // 2)))
    for _ in range(2):
        device.begin_step(decodes=True)
        device.fetch(0, _ids([1, 2]), guesses=lambda: torch.tensor([[9, 3, 4]]))
        assert branch.is_forked
        if how == "by token":
            for run, slots in device.token_waves(1, ids):
                rows = device.slot_buffers(1).tensors["w13_weight"][slots.long()]
                assert torch.equal(rows, store.tensor("w13_weight")[ids[run].long()])
        else:
            run_in_waves = device.captured_waves if how == "captured" else device.expert_waves
            for wave in run_in_waves(1, ids):
                assert not branch.is_forked
                experts = ids[wave.in_wave].long()
                rows = wave.buffers.tensors["w13_weight"][wave.expert_map[experts].long()]
                assert torch.equal(rows, store.tensor("w13_weight")[experts])
        assert not branch.is_forked
        assert audit(device) == []
        device.table.check_integrity()
    assert device.stats().layers[1].prefetched > 0


@pytest.mark.parametrize("then", ["begin_step", "reset"])
def test_a_prefetch_of_a_step_that_failed_ends_before_the_next_begins(then: str) -> None:
    # A replay joins its own branch alone, and would take for whole what is still being copied.
    device = _device()
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    assert device.stats().predictor == "none"
    device.predict_on_device(create_predictor("next_gate", shape))
    assert device.stats().predictor == "next_gate"
    branch = device._branch
    assert branch is not None
    device.begin_step()
    device.fetch(0, _ids([1, 2]), guesses=lambda: torch.tensor([[9, 3, 4]]))
    assert branch.is_forked
    getattr(device, then)()  # the next layer never ran
    assert not branch.is_forked
    for layer_idx in range(NUM_LAYERS):
        device.fetch(layer_idx, _ids([9, 5]))
    assert audit(device) == []
    device.table.check_integrity()


def test_a_predictor_without_kernels_is_refused() -> None:
    device = _device()
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    with pytest.raises(ValueError, match="'transition' has no kernels; mode 'full' takes"):
        device.predict_on_device(create_predictor("transition", shape))


def _predicting(**more: object) -> DeviceScheduler:
    device = _device(**more)
    shape = PredictorShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    device.predict_on_device(create_predictor("next_gate", shape))
    return device


def _steps(device: DeviceScheduler, count: int, guesses: list[int]) -> None:
    """Steps that demand experts 1 and 2 of both layers in turn with 3 and 4."""
    for step in range(count):
        device.begin_step()
        ids = _ids([1, 2] if step % 2 else [3, 4])
        device.fetch(0, ids, guesses=lambda: torch.tensor([guesses]))
        device.fetch(1, ids)


def test_budgets_are_set_between_steps_and_seen_in_the_counters() -> None:
    device = _predicting()
    device.set_budgets([0, 1])
    _steps(device, 1, [7, 8])
    assert device.stats().layers[1].prefetched == 1
    assert [layer.prefetch_budget_bytes for layer in device.stats().layers] == [0, 1]
    device.set_budgets([0, 0])
    _steps(device, 3, [9, 10])
    assert device.stats().layers[1].prefetched == 1
    assert device.stats().layers[1].prefetch_budget_bytes == 0
    with pytest.raises(ValueError, match="3 budgets for 2 layers"):
        device.set_budgets([0, 0, 0])
    with pytest.raises(ValueError, match="budget_bytes must be 0 to"):
        device.set_budgets([0, -1])


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller looks after few steps, since interpreted kernels take long."""
    monkeypatch.setattr("prefetch_runtime.device_scheduler.CONTROL_STEPS", 8)


@pytest.mark.usefixtures("_often")
def test_a_controller_switches_off_what_never_comes_true() -> None:
    device = _predicting()
    nbytes = LAYOUT.payload_bytes
    device.control_budgets(BudgetController([nbytes] * NUM_LAYERS, min_steps=4))
    assert device.stats().layers[1].prefetch_budget_bytes == nbytes
    for guess in range(24):  # another one each time, or it would be resident
        _steps(device, 2, [5 + guess % 7])
    assert device.stats().layers[1].prefetched > 16
    assert device.stats().layers[1].prefetch_budget_bytes == 0
    before = device.stats().layers[1].prefetched
    _steps(device, 8, [5])
    assert device.stats().layers[1].prefetched == before


@pytest.mark.usefixtures("_often")
def test_a_controller_starts_again_with_the_counters() -> None:
    device = _predicting()
    controller = BudgetController([LAYOUT.payload_bytes] * NUM_LAYERS, min_steps=4)
    device.control_budgets(controller)
    layer = controller._layers[0]
    _steps(device, 10, [5])
    before = layer.seen.steps
    assert before > 4
    device.reset()
    _steps(device, 7, [5])
    assert 0 < layer.seen.steps < before, (
        "counters that have begun anew are looked at, not waited for"
    )
    assert controller.is_on == [True, True]


def test_prefetches_that_were_demanded_at_once_are_told_from_those_that_waited() -> None:
    device = _predicting()
    device.fetch(0, _ids([1, 2]), guesses=lambda: torch.tensor([[9, 3]]))
    device.fetch(1, _ids([9, 5]))
    device.fetch(0, _ids([1, 2]), guesses=lambda: torch.tensor([[-1, -1]]))
    device.fetch(1, _ids([3, 5]))
    layer = device.stats().layers[1]
    assert (layer.prefetch_used, layer.prefetch_at_once) == (2, 1)


def test_a_budget_of_one_expert_brings_in_one_of_many_small_fields_whole() -> None:
    device = _predicting()
    device.set_budgets([0, LAYOUT.payload_bytes])
    _steps(device, 1, [7, 8])
    assert device.stats().layers[1].prefetched == 1
    assert device.stats().layers[1].prefetch_dropped == 0


def test_padding_that_is_planned_like_tokens_is_no_part_of_a_trace() -> None:
    device = _device()
    device.make_room_for_a_trace(top_k=TOP_K, num_guesses=0, max_tokens=20)
    assert device.device_recorder is not None
    device.device_recorder.start(20)
    device.padding_rows = torch.tensor([5, -1], dtype=torch.int64)
    for layer_idx in range(NUM_LAYERS):
        device.fetch(layer_idx, _ids([1, 2], [7, 8]))
    assert device.stats().layers[0].misses == 4
    assert device.device_recorder.trace().topk.tolist() == [[[1, 2]] * NUM_LAYERS]
