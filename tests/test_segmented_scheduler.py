"""The host's scheduler inside a segmented capture: a toy model on real slots, its routing changing.

On a CPU the operations are recorded and replayed by a stand-in; with a GPU, for real, by the tests
marked gpu. Shapes: L = layers, T = tokens, K = top_k, E = experts, S = slots.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from graphs.segments import SegmentedCaptures, SegmentedGraph, between_segments
from predictors import Evidence, PredictorShape, create_predictor
from prefetch_runtime import polled_reader
from prefetch_runtime.audit import audit
from prefetch_runtime.copier import CopyJob, CopyTicket, HostCopier, create_copier
from prefetch_runtime.host_prefetch import HostPrefetcher
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.policies import EMPTY_SCORE
from prefetch_runtime.recorder import TraceRecorder
from prefetch_runtime.scheduler import Guesses, LayerCache, Scheduler
from prefetch_runtime.slot_buffers import SlotBuffers
from prefetch_runtime.slots import NotEnoughSlots
from tests.helpers.replayed_ops import ReplayedKernel, ReplayedOps

LAYERS, EXPERTS, TOP_K = 4, 16, 2
CPU = torch.device("cpu")
LAYOUT = RecordLayout.from_tensors(
    {"w13_weight": ((64,), torch.float32), "w2_weight": ((16,), torch.float32)}
)


def worth(layer_idx: int, expert: int) -> int:
    """What an expert adds to a token; no two experts of the model have the same."""
    return 1 + expert + 37 * layer_idx


class Toy:
    """Every layer adds what its experts are worth; what that gave chooses the next layer's."""

    def __init__(
        self,
        device: torch.device,
        num_slots: int | Sequence[int],
        *,
        num_tokens: int = 2,
        predictor: Any = None,
        scheduler_class: type[Scheduler] = Scheduler,
        make_graph: Callable[[], Any] | None = None,
    ) -> None:
        self.device = device
        store = HostStore()
        self.scheduler = scheduler_class(
            copier=create_copier(device),
            host_store=store,
            device=device,
            mode="segmented",
            id_for_padding=0,
            between=between_segments,
        )
        for layer_idx in range(LAYERS):
            layer = store.add_layer(layer_idx, EXPERTS, LAYOUT)
            for expert in range(EXPERTS):
                for name in ("w13_weight", "w2_weight"):
                    layer.tensor(name)[expert].fill_(worth(layer_idx, expert))
            store.pin(layer_idx)
            of_layer = num_slots if isinstance(num_slots, int) else num_slots[layer_idx]
            slots = SlotBuffers(of_layer, LAYOUT, device)
            for tensor in slots.tensors.values():
                tensor.fill_(-999.0)
            self.scheduler.add_layer(layer_idx, f"layer {layer_idx}", layer, slots)
        self.scheduler.seal()
        if predictor is not None:
            prefetcher = HostPrefetcher(
                predictor, self.lane(), num_layers=LAYERS, top_k=TOP_K, widen=2
            )
            self.scheduler.attach_prefetcher(prefetcher)
        self.x = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.routing = torch.zeros(LAYERS, num_tokens, TOP_K, dtype=torch.int64, device=device)
        self.kv_slots = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.captures = SegmentedCaptures(make_graph)

    def lane(self) -> Any:
        return create_copier(self.device)

    def guesses(self, layer_idx: int, y: torch.Tensor) -> Guesses | None:
        if not self.scheduler.needs_guesses or layer_idx + 1 == LAYERS:
            return None
        return lambda: (self.routing[layer_idx + 1] + y.unsqueeze(1)) % EXPERTS

    def step(self) -> torch.Tensor:
        y = self.x.clone()
        for layer_idx in range(LAYERS):
            ids = ((self.routing[layer_idx] + y.unsqueeze(1)) % EXPERTS).int()
            slot_ids = self.scheduler.fetch(
                layer_idx, ids, padding=self.kv_slots, guesses=self.guesses(layer_idx, y)
            )
            slots = self.scheduler.slot_buffers(layer_idx).tensors
            rows = slots["w13_weight"][slot_ids.long()].amax(-1)
            rows = torch.minimum(rows, slots["w2_weight"][slot_ids.long()].amin(-1))
            y = y + rows.sum(1).long()
        return y

    def capture(self) -> tuple[SegmentedGraph, torch.Tensor]:
        """As vLLM does it: a warm-up, then the capture, under torch's own context on a GPU."""
        self.scheduler.begin_step()
        self.step()
        with self.captures.here():
            graph: Any = torch.cuda.CUDAGraph()
            if self.device.type == "cuda":
                with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
                    output = self.step()
            else:
                graph.capture_begin()
                output = self.step()
                graph.capture_end()
        self.scheduler.reset()
        return graph, output

    def expected(self, x: Sequence[int], routing: np.ndarray) -> tuple[list[int], list[list[int]]]:
        """(outputs, the experts that each layer's tokens demand)."""
        y, demanded = np.array(x), []
        for layer_idx in range(LAYERS):
            ids = (routing[layer_idx] + y[:, None]) % EXPERTS
            y = y + (1 + ids + 37 * layer_idx).sum(1)
            demanded.append(ids.ravel().tolist())
        return y.tolist(), demanded

    def load(self, x: Sequence[int], routing: np.ndarray, padding: Sequence[int] = ()) -> None:
        self.x.copy_(torch.tensor(x))
        self.routing.copy_(torch.from_numpy(routing))
        self.kv_slots.copy_(torch.tensor([-1 if at in padding else at for at in range(len(x))]))


def routings(count: int, num_tokens: int = 2) -> Iterator[tuple[list[int], np.ndarray]]:
    chosen = np.random.default_rng(7)
    for _ in range(count):
        x = chosen.integers(0, 100, num_tokens).tolist()
        first = chosen.integers(0, EXPERTS, (LAYERS, num_tokens, 1))
        yield x, np.concatenate([first, first + 1 + chosen.integers(0, EXPERTS - 1)], axis=2)


@pytest.fixture(params=["cpu", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On the CPU; there, but with the kernels that CUDA has, interpreted; on a GPU."""
    for name in ("send_kernel", "rename_kernel"):
        if request.param == "kernels":
            monkeypatch.setattr(polled_reader, name, ReplayedKernel(getattr(polled_reader, name)))
    yield request.param
    if request.param == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def device(where: str) -> torch.device:
    return torch.device("cuda", 0) if where == "cuda" else CPU


MakeToy = Callable[..., Toy]


@pytest.fixture
def make_toy(where: str, device: torch.device) -> Iterator[MakeToy]:
    """Makes a `Toy` on the device; every one is closed in the end, so that its pages are let go."""
    made: list[Toy] = []

    def make(num_slots: int | Sequence[int], **more: Any) -> Toy:
        make_graph = None if where == "cuda" else ReplayedOps
        made.append(Toy(device, num_slots, **{"make_graph": make_graph, **more}))
        if where == "kernels":
            made[-1].scheduler._polled = polled_reader.PolledReader(CPU)
        return made[-1]

    yield make
    for toy in made:
        toy.captures.close()
        toy.scheduler.close()


@pytest.mark.parametrize("num_slots", [4, 8, 16])
@pytest.mark.parametrize("predictor", ["none", "next_gate", "transition", "previous_token"])
def test_every_replay_computes_with_the_experts_that_it_routes_to(
    num_slots: int, predictor: str, make_toy: MakeToy, where: str
) -> None:
    shape = PredictorShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    chosen = None if predictor == "none" else create_predictor(predictor, shape)
    toy = make_toy(num_slots, predictor=chosen)
    graph, output = toy.capture()
    assert graph.num_segments == LAYERS + 1
    demanded = 0
    steps = 12 if where == "kernels" else 60  # interpreted ones are slow
    for x, routing in routings(steps):
        toy.load(x, routing)
        toy.scheduler.begin_step()
        graph.replay()
        wanted, ids = toy.expected(x, routing)
        assert output.tolist() == wanted
        demanded += sum(len(set(of_layer)) for of_layer in ids)
    stats = toy.scheduler.stats()
    assert stats.total("hits") + stats.total("late") + stats.total("misses") == demanded
    assert stats.total("steps") == LAYERS * steps
    assert stats.total("evictions") > 0 or num_slots == EXPERTS
    assert (stats.total("prefetched") > 0) == (predictor != "none")
    assert audit(toy.scheduler) == []


def test_replays_and_wide_eager_steps_share_the_slots(
    make_toy: MakeToy, device: torch.device
) -> None:
    toy = make_toy(6)
    graph, output = toy.capture()
    wide = torch.arange(EXPERTS, dtype=torch.int32, device=device).view(8, 2)
    for x, routing in routings(10):
        toy.load(x, routing)
        toy.scheduler.begin_step()
        graph.replay()
        assert output.tolist() == toy.expected(x, routing)[0]
        toy.scheduler.begin_step()
        for layer_idx in range(LAYERS):
            assert not toy.scheduler.fits(layer_idx, wide)
            for run, slot_ids in toy.scheduler.token_waves(layer_idx, wide):
                rows = toy.scheduler.slot_buffers(layer_idx).tensors["w2_weight"]
                found = rows[slot_ids.long()][..., 0].long().tolist()
                assert found == [[worth(layer_idx, e) for e in row] for row in wide[run].tolist()]
    assert audit(toy.scheduler) == []


@pytest.mark.parametrize("num_tokens", [2048, 2049])
def test_a_demand_of_a_prompt_is_copied_and_not_sent_by_one_program(
    num_tokens: int, make_toy: MakeToy, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = make_toy(EXPERTS)
    polled: Any = toy.scheduler._polled
    calls: list[int] = []
    if polled is not None:
        send = polled.send
        monkeypatch.setattr(
            polled, "send", lambda *given, **more: calls.append(0) or send(*given, **more)
        )
    ids = (torch.arange(2 * num_tokens, dtype=torch.int32) % EXPERTS).view(-1, 2).to(toy.device)
    for layer_idx in range(LAYERS):
        slot_ids = toy.scheduler.fetch(layer_idx, ids)
        owner = torch.from_numpy(toy.scheduler.layer(layer_idx).table.owner)
        assert torch.equal(owner[slot_ids.long().cpu()], ids.long().cpu())
    assert len(calls) == (LAYERS if where != "cpu" and num_tokens == 2048 else 0)


def test_padding_rows_demand_nothing(make_toy: MakeToy) -> None:
    toy = make_toy(4)
    graph, output = toy.capture()
    for at, (x, routing) in enumerate(routings(8)):
        toy.load(x, routing, padding=[1])
        toy.scheduler.begin_step()
        before = toy.scheduler.stats()
        graph.replay()
        assert output[0].item() == toy.expected(x, routing)[0][0]
        after = toy.scheduler.stats()
        counts = [stats.total("hits") + stats.total("misses") for stats in (before, after)]
        assert counts[1] - counts[0] == LAYERS * TOP_K, f"step {at}"


def test_a_trace_is_recorded_from_replays(make_toy: MakeToy) -> None:
    toy = make_toy(4)
    graph, _ = toy.capture()
    toy.scheduler.recorder = TraceRecorder(LAYERS, EXPERTS, max_tokens=100)
    wanted = []
    for x, routing in routings(5):
        toy.load(x, routing)
        toy.scheduler.begin_step()
        graph.replay()
        wanted.append(toy.expected(x, routing)[1])
    trace = toy.scheduler.recorder.trace()
    assert trace.topk.shape == (10, LAYERS, TOP_K)
    seen = trace.topk.reshape(5, 2, LAYERS, TOP_K).transpose(0, 2, 1, 3).reshape(5, LAYERS, -1)
    assert seen.tolist() == wanted


def test_a_trace_has_the_layers_in_order_whatever_the_host_puts_off(
    make_toy: MakeToy,
) -> None:
    toy = make_toy([EXPERTS, 6, 6, EXPERTS], num_tokens=4)  # the second and third look first
    toy.scheduler.recorder = TraceRecorder(LAYERS, EXPERTS, max_tokens=100)
    ids = torch.tensor([[3, 1], [0, 2], [2, 1], [3, 0]], dtype=torch.int32, device=toy.device)
    for _ in range(3):
        toy.scheduler.begin_step()
        for layer_idx in range(LAYERS):
            assert toy.scheduler.fits(layer_idx, ids)
            toy.scheduler.fetch(layer_idx, ids)
    assert toy.scheduler.recorder.trace().topk.shape == (12, LAYERS, TOP_K)


@pytest.mark.parametrize(
    "where", ["kernels", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_a_slot_that_the_device_believes_in_and_the_host_does_not_is_an_error(
    make_toy: MakeToy,
) -> None:
    toy = make_toy(4)
    graph, _ = toy.capture()
    routing = np.zeros((LAYERS, 2, TOP_K), dtype=np.int64)
    toy.load([0, 0], routing)
    toy.scheduler.begin_step()
    graph.replay()
    layer = toy.scheduler.layer(0)
    demanded = toy.expected([0, 0], routing)[1][0][0]
    toy.load([demanded + 1] * 2, routing)
    layer.mapping[demanded + 1] = 0
    toy.scheduler.begin_step()
    with pytest.raises(
        RuntimeError, match=r"layer 0 .*: the device's mapping has slots for experts"
    ):
        graph.replay()


class LaggingOps(ReplayedOps):
    """Computes when it is waited for, as a device that is behind the host."""

    launched: ClassVar[list[Callable[[], None]]] = []

    def replay(self) -> None:
        self.launched.append(super().replay)

    @classmethod
    def catch_up(cls) -> None:
        while cls.launched:
            cls.launched.pop(0)()


@pytest.mark.parametrize("cut_at", range(LAYERS))
@pytest.mark.parametrize("cut", ["wait", "take"])
@pytest.mark.parametrize(
    "where", ["kernels", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_a_step_that_was_cut_short_leaves_nothing_for_the_next_one_to_read(
    cut_at: int, cut: str, make_toy: MakeToy, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = make_toy(EXPERTS, **({} if where == "cuda" else {"make_graph": LaggingOps}))
    graph, output = toy.capture()
    polled: Any = toy.scheduler._polled
    whole = getattr(polled, cut)
    if where == "kernels":
        monkeypatch.setattr(polled_reader, "_ROUNDS", 1)
        monkeypatch.setattr(polled._end, "wait", LaggingOps.catch_up)
    calls = itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == cut_at:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(polled, cut, interrupted)
    for at, (x, routing) in enumerate(routings(4)):
        LaggingOps.catch_up()
        toy.load(x, routing)
        toy.scheduler.begin_step()
        if at == 0:
            with pytest.raises(KeyboardInterrupt):
                graph.replay()
            continue
        graph.replay()
        LaggingOps.catch_up()
        assert output.tolist() == toy.expected(x, routing)[0], f"step {at}"
    assert audit(toy.scheduler) == []


@pytest.mark.parametrize("cut_at", [0, LAYERS - 1])
@pytest.mark.parametrize("cut", ["submit", "wait"])
def test_after_a_step_that_was_cut_short_at_a_copy_the_slots_are_not_trusted(
    cut_at: int, cut: str, make_toy: MakeToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = make_toy(8)
    graph, output = toy.capture()
    ((x, routing),) = routings(1)
    toy.load(x, routing)
    whole = getattr(toy.scheduler._copier, cut)
    calls = itertools.count()

    def interrupted(*args: Any, **more: Any) -> Any:
        if next(calls) == cut_at:
            raise KeyboardInterrupt
        return whole(*args, **more)

    monkeypatch.setattr(toy.scheduler._copier, cut, interrupted)
    toy.scheduler.begin_step()
    with pytest.raises(KeyboardInterrupt):
        graph.replay()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cut short while it brought experts in.*reset"):
            toy.scheduler.begin_step()
    toy.scheduler.reset()
    for _ in range(2):
        toy.scheduler.begin_step()
        graph.replay()
        assert output.tolist() == toy.expected(x, routing)[0]
    assert audit(toy.scheduler) == []


def test_a_demand_that_is_refused_leaves_the_slots_as_they_were(make_toy: MakeToy) -> None:
    toy = make_toy(4)
    toy.scheduler.begin_step()
    for refused in ([*range(6)], [EXPERTS + 1]):
        ids = torch.tensor([refused], dtype=torch.int32, device=toy.device)
        with pytest.raises((NotEnoughSlots, ValueError)):
            toy.scheduler.fetch(0, ids)
        toy.scheduler.begin_step()
    ids = torch.tensor([[2, 3]], dtype=torch.int32, device=toy.device)
    assert toy.scheduler.fetch(0, ids).tolist() == [[0, 1]]


def test_a_failed_copy_ends_the_replay_and_every_later_one(make_toy: MakeToy) -> None:
    toy = make_toy(4)
    graph, _ = toy.capture()
    copier: Any = toy.scheduler._copier
    copier.close()
    for x, routing in routings(2):
        toy.load(x, routing)
        with pytest.raises(RuntimeError, match="the copier is closed"):
            graph.replay()


def test_after_the_cache_is_closed_nothing_is_replayed(make_toy: MakeToy) -> None:
    toy = make_toy(4)
    graph, _ = toy.capture()
    other, _ = toy.capture()
    toy.captures.close()
    with pytest.raises(RuntimeError, match="segmented graph is closed with the expert cache"):
        graph.replay()
    assert other.is_closed


def test_a_scheduler_that_is_closed_under_a_graph_says_so(
    make_toy: MakeToy, device: torch.device
) -> None:
    toy = make_toy(4)
    graph, _ = toy.capture()
    toy.scheduler.close()
    with pytest.raises(RuntimeError, match="expert cache is closed; graphs"):
        graph.replay()
    with pytest.raises(RuntimeError, match="expert cache is closed"):
        toy.scheduler.fetch(0, torch.zeros(1, 2, dtype=torch.int32, device=device))


# The order: predict, copy, event, mapping, replay

log: list[tuple[str, int]] = []


class NotedPredictor:
    name = "noted"
    runs_on: Any = None
    needs_guesses: Any = False

    def predict(self, layer_idx: int, evidence: Evidence, count: int) -> list[int]:
        log.append(("predict", layer_idx))
        return [(int(evidence.topk_ids[0, 0]) + at) % EXPERTS for at in range(count)]

    def observe(self, layer_idx: int, topk_ids: Any) -> None: ...


class NotedCopier(HostCopier):
    """Notes each copy of a lane and, as its event, that it has ended."""

    def __init__(self, lane: str) -> None:
        super().__init__()
        self._lane = lane

    def submit(self, jobs: Sequence[CopyJob], *, after_compute: bool = True) -> CopyTicket:
        layer_idx = jobs[0].store.layer_idx
        log.append((f"{self._lane} copy", layer_idx))
        assert after_compute
        ticket = super().submit(jobs, after_compute=after_compute)
        log.append((f"{self._lane} event", layer_idx))
        return ticket


class NotedScheduler(Scheduler):
    def _publish(self, layer: LayerCache) -> None:
        log.append(("mapping", layer.layer_idx))
        super()._publish(layer)


class NotedOps(ReplayedOps):
    def replay(self) -> None:
        log.append(("replay", self.index))
        super().replay()

    index = -1


def test_predict_copy_event_mapping_replay() -> None:
    made: list[NotedOps] = []

    def make_graph() -> NotedOps:
        made.append(NotedOps())
        made[-1].index = len(made) - 1
        return made[-1]

    class NotedToy(Toy):
        def lane(self) -> Any:
            return NotedCopier("early")

    toy = NotedToy(
        CPU,
        6,
        predictor=NotedPredictor(),
        scheduler_class=NotedScheduler,
        make_graph=make_graph,
    )
    toy.scheduler._copier = NotedCopier("late")
    graph, output = toy.capture()
    orders = set()
    for x, routing in routings(20):
        toy.load(x, routing)
        toy.scheduler.begin_step()
        log.clear()
        graph.replay()
        assert output.tolist() == toy.expected(x, routing)[0]
        assert [at for what, at in log if what == "replay"] == list(range(LAYERS + 1))
        for layer_idx in range(1, LAYERS):
            # Segment i computes layer i - 1's experts and layer i's router: what is for layer i
            # is begun while layer i - 1 is prepared, before segment i is launched; its mapping is
            # written between segments i and i + 1.
            mine = [
                event
                for event in log
                if (event[1] == layer_idx and event[0] != "replay")
                or event in (("replay", layer_idx), ("replay", layer_idx + 1))
            ]
            names = [what if what != "replay" else f"segment {at - layer_idx}" for what, at in mine]
            early = [name for name in names if name.startswith(("predict", "early"))]
            assert early == ["predict", *["early copy", "early event"] * (len(early) // 2)]
            assert names[: len(early)] == early, "before the segment that it runs beside"
            assert names[len(early)] == "segment 0"
            assert names[-1] == "segment 1"
            between = names[len(early) + 1 : -1]
            assert between in (
                [],
                ["mapping"],
                ["late copy", "late event", "mapping"],
            )
            if len(early) > 1:
                assert "mapping" in between, "what has arrived is published before its replay"
            orders.add(tuple(between))
    assert len(orders) > 1


def test_hits_are_noted_while_the_device_computes_and_misses_at_once() -> None:
    actions: list[Callable[[], None]] = []
    with HostStore() as store:
        scheduler = Scheduler(
            copier=create_copier(CPU),
            host_store=store,
            device=CPU,
            mode="segmented",
            between=actions.append,
        )
        tables = []
        for layer_idx in range(3):
            layer = store.add_layer(layer_idx, EXPERTS, LAYOUT)
            store.pin(layer_idx)
            slots = SlotBuffers(4, LAYOUT, CPU)
            tables.append(scheduler.add_layer(layer_idx, "", layer, slots).table)
        ids = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
        for layer_idx in range(3):
            scheduler.fetch(layer_idx, ids)

        def counted() -> list[tuple[int, int, int]]:
            return [(t.counters.hits, t.counters.misses, int(t.score.max())) for t in tables]

        def replay(layer_idx: int) -> None:
            scheduler._reader._room(ids.numel()).copy_(ids.ravel())  # as the segment before it does
            actions[layer_idx]()

        scheduler.begin_step()
        for layer_idx in range(3):
            replay(layer_idx)
        assert counted() == [(0, 3, 2)] * 3, "copies wait for nothing"
        scheduler.begin_step()
        replay(0)
        assert counted()[0] == (0, 3, 2), "the next segment is launched first"
        replay(1)
        assert counted() == [(3, 3, 3), (0, 3, 2), (0, 3, 2)]
        replay(2)
        assert counted() == [(3, 3, 3)] * 3, "nothing is owed after a step"
        scheduler.begin_step()
        replay(0)  # a step that fails here
        scheduler.begin_step()
        assert counted()[0] == (6, 3, 4), "noted at the time of its own step"
        replay(0)
        assert scheduler.stats().layers[0].hits == 9
        replay(0)
        scheduler.reset()
        scheduler.begin_step()
        assert counted()[0] == (0, 0, EMPTY_SCORE)
        scheduler.close()
