"""Measures the kernels of `graphs` inside captured graphs: resolve and fill when all hit, the fill
of absent experts over the link, and a prefetch on a forked branch beside compute.

Shape: Qwen3-30B-A3B's experts (128, top 8), in bf16 9.4 MB each; the fill also in fp8 and int4. 48
layers when all hit, 8 when something is copied, with one pinned copy of the records. Times of a
layer include the gaps between kernels of one graph. Not measured: the expert kernels, anything of
vLLM.
`python -m benchmarks.bench_graph_kernels` prints one short table.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import triton
from pytest_benchmark.fixture import BenchmarkFixture

import graphs.slot_table
from benchmarks.clocks import synced_clock
from graphs import (
    CapturedGraph,
    DeviceSlotTable,
    ExpertFill,
    GraphCapture,
    LayerRecords,
    PrefetchBranch,
    PrefetchHook,
    RecordTable,
    field_of,
)
from prefetch_runtime.policies import create_device_form, create_policy

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 128, 8, 2048, 768
ALL_HIT_LAYERS = 48  # they share the slots of NUM_LAYERS layers
W13, W2 = 2 * WIDTH * HIDDEN, HIDDEN * WIDTH  # weights of an expert
FORMATS = {
    "bf16": (2 * W13, 2 * W2),
    "fp8": (W13, W2, W13 // 128**2 * 4, W2 // 128**2 * 4),  # a float32 scale for 128 x 128
    "int4": (W13 // 2, W2 // 2, W13 // 128 * 2, W2 // 128 * 2),  # a bfloat16 scale for 128
}
"""Bytes of an expert's tensors, as vLLM's kernels read them: 9.4, 4.7 and 2.4 MB together."""
COMPUTE_BYTES = 96 << 20  # read and written once: about the time of a decode layer

Inputs = dict[str, torch.Tensor]


class Memory:
    """The records in pinned host memory, and slot buffers enough for every expert resident."""

    def __init__(self, expert_format: str = "bf16") -> None:
        self.device = torch.device("cuda", 0)
        fields = FORMATS[expert_format]
        self.offsets = list(accumulate(fields, initial=0))
        self.record_bytes = self.offsets.pop()
        made = torch.randint(
            0, 256, (NUM_EXPERTS, self.record_bytes), dtype=torch.uint8, device=self.device
        )
        self.host = torch.empty(made.shape, dtype=torch.uint8, pin_memory=True)
        self.host.copy_(made)
        self.records = made
        shape = (NUM_LAYERS, NUM_EXPERTS)
        self.slots = [
            torch.zeros((*shape, nbytes), dtype=torch.uint8, device=self.device)
            for nbytes in fields
        ]
        self.work = torch.zeros(COMPUTE_BYTES, dtype=torch.uint8, device=self.device)


class Model:
    """A slot table with its fill, hook and branch, and demands that miss as much as asked."""

    def __init__(
        self,
        memory: Memory,
        *,
        num_slots: int,
        num_layers: int = NUM_LAYERS,
        policy: str = "lru",
        programs: int = 8,
        with_hook: bool = False,
        early: bool = True,
    ) -> None:
        self.memory = memory
        # As the engine launches them.
        self.early = early
        self.plans_early = early and not with_hook
        self.table = DeviceSlotTable(
            num_layers=num_layers,
            num_experts=NUM_EXPERTS,
            num_slots=num_slots,
            policy=create_device_form(policy),
            units_per_step=create_policy(policy).units_per_step,
            device=memory.device,
        )
        layers = [
            LayerRecords(
                memory.host.data_ptr(),
                memory.record_bytes,
                tuple(
                    field_of(field[layer_idx % NUM_LAYERS, :num_slots], offset)
                    for field, offset in zip(memory.slots, memory.offsets, strict=True)
                ),
            )
            for layer_idx in range(num_layers)
        ]
        records = RecordTable(layers, device=memory.device)
        self.fill = ExpertFill(self.table, records, programs=programs)
        self.hook = PrefetchHook(self.fill, max_forecast=TOP_K) if with_hook else None
        self.branch = PrefetchBranch(memory.device)

    def warm(self) -> None:
        """Every slot holds an expert."""
        for first in range(0, self.table.num_slots, TOP_K):
            ids = torch.arange(first, first + TOP_K, dtype=torch.int32)
            ids = ids.to(self.memory.device)[None, :]
            self.table.advance()
            for layer_idx in range(self.table.num_layers):
                self.table.resolve(layer_idx, ids)
                self.fill.fill(layer_idx)

    def demand(self, num_tokens: int, num_misses: int = 0) -> torch.Tensor:
        """[L, T, K] int32: different experts in a row, `num_misses` of a layer's absent."""
        rows = []
        for owner in self.table.owner.tolist():
            resident = [expert_id for expert_id in owner if expert_id >= 0]
            absent = [e for e in range(NUM_EXPERTS) if e not in set(resident)]
            layer = [
                [resident[i] for i in torch.randperm(len(resident))[:TOP_K].tolist()]
                for _ in range(num_tokens)
            ]
            layer[0][:num_misses] = absent[:num_misses]
            rows.append(layer)
        return torch.tensor(rows, dtype=torch.int32, device=self.memory.device)

    def check(self) -> None:
        """Every mapped expert's bytes are in its slot, in the first and the last layer."""
        self.table.check_errors()
        self.table.check_integrity()
        for layer_idx in (0, NUM_LAYERS - 1):
            for expert_id, slot_id in enumerate(self.table.mapping[layer_idx].tolist()):
                if slot_id >= 0:
                    held = [field[layer_idx, slot_id] for field in self.memory.slots]
                    assert torch.equal(torch.cat(held), self.memory.records[expert_id])

    def compute(self) -> None:
        self.memory.work.add_(1)

    # Steps: what is captured

    def split(self, topk_ids: torch.Tensor) -> None:
        self.table.advance()
        for layer_idx in range(self.table.num_layers):
            self.table.resolve(layer_idx, topk_ids[layer_idx], early=self.plans_early)
            self.fill.fill(layer_idx, early=self.early)

    def resolve_only(self, topk_ids: torch.Tensor) -> None:
        self.table.advance()
        for layer_idx in range(self.table.num_layers):
            self.table.resolve(layer_idx, topk_ids[layer_idx], early=self.plans_early)

    def compute_only(self, topk_ids: torch.Tensor) -> None:  # noqa: ARG002
        self.table.advance()
        for _ in range(self.table.num_layers):
            self.compute()

    def demand_only(self, topk_ids: torch.Tensor) -> None:
        self.table.advance()
        for layer_idx in range(self.table.num_layers):
            self.table.resolve(layer_idx, topk_ids[layer_idx], early=self.plans_early)
            self.fill.fill(layer_idx, early=self.early)
            self.compute()

    def prefetching(self, topk_ids: torch.Tensor, forecast: torch.Tensor) -> None:
        hook, branch = self.hook, self.branch
        assert hook is not None
        self.table.advance()
        for layer_idx in range(self.table.num_layers):
            if layer_idx:
                hook.post(layer_idx, topk_ids[layer_idx], early=self.early)
                branch.join()
            self.table.resolve(layer_idx, topk_ids[layer_idx], early=self.plans_early)
            self.fill.fill(layer_idx, early=self.early)
            if layer_idx + 1 < self.table.num_layers:
                with branch.fork():
                    hook.reserve(layer_idx + 1, forecast[layer_idx + 1])
                    hook.fill(layer_idx + 1)
            self.compute()

    def capture(self, step: Callable[..., None], inputs: Inputs) -> CapturedGraph:
        return GraphCapture(self.table, branch=self.branch).run(step, inputs)


def _timing_events() -> tuple[Any, Any]:
    made: Any = torch.cuda.Event  # untyped in some versions of torch
    return made(enable_timing=True), made(enable_timing=True)


def event_us(
    graph: CapturedGraph, inputs: Callable[[], Inputs], *, rounds: int = 20, drop: int = 3
) -> float:
    """Median device time of a replay per layer."""
    times = []
    for _ in range(rounds + drop):
        made = inputs()
        start, end = _timing_events()
        graph.load(made)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / graph.table_shape.num_layers)
    return statistics.median(times[drop:])


def _constant(inputs: Inputs) -> Callable[[], Inputs]:
    return lambda: inputs


def _missing(model: Model, num_misses: int, forecast: str | None = None) -> Callable[[], Inputs]:
    def make() -> Inputs:
        topk_ids = model.demand(1, num_misses)
        if forecast is None:
            return {"topk_ids": topk_ids}
        guess = topk_ids[:, 0].clone()
        if forecast == "wrong":  # absent, and not demanded
            for layer_idx, row in enumerate(guess.tolist()):
                owner = set(model.table.owner[layer_idx].tolist())
                strangers = [e for e in range(NUM_EXPERTS) if e not in owner and e not in row]
                guess[layer_idx] = torch.tensor(strangers[:TOP_K])
        return {"topk_ids": topk_ids, "forecast": guess}

    return make


@pytest.fixture(scope="module")
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    yield Memory(getattr(request, "param", "bf16"))
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.benchmark(group=f"all hit x {ALL_HIT_LAYERS} layers", timer=synced_clock)
@pytest.mark.parametrize("num_tokens", [1, 4, 32], ids=lambda n: f"tokens={n}")
@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("form", ["resolve_only", "split"])
def bench_all_hit(
    benchmark: BenchmarkFixture, memory: Memory, form: str, policy: str, num_tokens: int
) -> None:
    """Every demanded expert is resident: what a warm cache costs."""
    model = Model(memory, num_slots=NUM_EXPERTS, num_layers=ALL_HIT_LAYERS, policy=policy)
    model.warm()
    inputs = {"topk_ids": model.demand(num_tokens)}
    graph = model.capture(getattr(model, form), inputs)
    graph.load(inputs)
    benchmark(graph.replay)
    benchmark.extra_info["us_per_layer"] = round(event_us(graph, _constant(inputs)), 2)
    assert model.table.counters_of(0).misses == NUM_EXPERTS
    model.check()
    graph.close()


@pytest.mark.gpu
@pytest.mark.benchmark(group=f"fill x {NUM_LAYERS} layers", timer=synced_clock)
@pytest.mark.parametrize("num_misses", [1, 2, 4, 8], ids=lambda n: f"misses={n}")
@pytest.mark.parametrize("programs", [4, 8, 16], ids=lambda n: f"programs={n}")
@pytest.mark.parametrize("memory", FORMATS, indirect=True)
def bench_fill(benchmark: BenchmarkFixture, memory: Memory, programs: int, num_misses: int) -> None:
    """Absent experts, one demand after the other; GB/s in extra_info."""
    model = Model(memory, num_slots=64, programs=programs)
    model.warm()
    make = _missing(model, num_misses)
    graph = model.capture(model.split, make())
    hit_us = event_us(graph, _missing(model, 0))
    timed: Any = benchmark.pedantic  # untyped
    timed(graph.replay, setup=lambda: graph.load(make()), rounds=10)
    miss_us = event_us(graph, make, rounds=8)
    moved = num_misses * memory.record_bytes
    benchmark.extra_info["gbps"] = round(moved / (miss_us - hit_us) / 1e3, 1)
    benchmark.extra_info["us_per_layer"] = round(miss_us, 1)
    model.check()
    graph.close()


@pytest.mark.gpu
@pytest.mark.benchmark(group=f"prefetch beside compute x {NUM_LAYERS} layers", timer=synced_clock)
@pytest.mark.parametrize("num_misses", [0, 1, 2], ids=lambda n: f"misses={n}")
@pytest.mark.parametrize("forecast", ["none", "right", "wrong"])
def bench_prefetch(
    benchmark: BenchmarkFixture, memory: Memory, forecast: str, num_misses: int
) -> None:
    """A layer's compute with its demand; `none` is the baseline without a hook."""
    model = Model(memory, num_slots=64, with_hook=forecast != "none")
    model.warm()
    make = _missing(model, num_misses, None if forecast == "none" else forecast)
    step = model.demand_only if forecast == "none" else model.prefetching
    graph = model.capture(step, make())
    timed: Any = benchmark.pedantic  # untyped
    timed(graph.replay, setup=lambda: graph.load(make()), rounds=10)
    benchmark.extra_info["us_per_layer"] = round(event_us(graph, make, rounds=8), 1)
    model.check()
    graph.close()


def _always(num_warps: int, _: int) -> int:
    return num_warps


def main() -> None:
    """Print one table: the figures that decide, each checked for exactness."""
    memory = Memory()
    out: list[str] = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; us per layer"
    ]

    def report(line: str) -> None:
        out.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    sys.stdout.write(out[0] + "\n")

    def timed(
        model: Model, step: Callable[..., None], make: Callable[[], Inputs], **k: Any
    ) -> float:
        graph = model.capture(step, make())
        us = event_us(graph, make, **k)
        model.check()
        graph.close()
        return us

    def all_hit(policy: str, num_tokens: int, form: str, **changes: Any) -> float:
        model = Model(
            memory, num_slots=NUM_EXPERTS, num_layers=ALL_HIT_LAYERS, policy=policy, **changes
        )
        model.warm()
        make = _constant({"topk_ids": model.demand(num_tokens)})
        return timed(model, getattr(model, form), make, rounds=50)

    for policy in ("lru", "lfru"):
        for num_tokens in (1, 4, 32):
            times = [
                f"{form} {all_hit(policy, num_tokens, form):.2f} (not early "
                f"{all_hit(policy, num_tokens, form, early=False):.2f})"
                for form in ("resolve_only", "split")
            ]
            hooked = all_hit(policy, num_tokens, "split", with_hook=True)
            report(
                f"all hit, {policy}, {num_tokens:2} tokens: {', '.join(times)}, "
                f"split with hook {hooked:.2f}"
            )
    for num_tokens in (1, 8):
        # A real layer's weights pass the L2 cache between one plan and the next.
        alone = all_hit("lru", num_tokens, "compute_only")
        cold = all_hit("lru", num_tokens, "demand_only") - alone
        late = all_hit("lru", num_tokens, "demand_only", early=False) - alone
        moved = 2 * COMPUTE_BYTES >> 20
        report(
            f"all hit behind {moved} MiB of other traffic, {num_tokens} tokens: {cold:.2f} "
            f"(not early {late:.2f})"
        )
    chosen = graphs.slot_table.warps_for
    for num_tokens in (1, 32):
        times = []
        for num_warps in (1, 2, 4, 8):
            graphs.slot_table.warps_for = partial(_always, num_warps)
            times.append(f"{num_warps}: {all_hit('lru', num_tokens, 'resolve_only'):.2f}")
        report(f"resolve by warps, {num_tokens:2} tokens: {', '.join(times)}")
    graphs.slot_table.warps_for = chosen

    def fill(memory: Memory, programs: int) -> str:
        model = Model(memory, num_slots=64, programs=programs)
        model.warm()
        graph = model.capture(model.split, _missing(model, 0)())
        hit_us = event_us(graph, _missing(model, 0))
        figures = []
        for num_misses in (1, 2, 4, 8):
            us = event_us(graph, _missing(model, num_misses), rounds=8)
            gbps = num_misses * memory.record_bytes / (us - hit_us) / 1e3
            figures.append(f"{num_misses}: {us:.0f} us {gbps:.1f} GB/s")
        model.check()
        graph.close()
        return f"{programs:2} programs: hit {hit_us:.2f}; {'; '.join(figures)}"

    for programs in (4, 8, 16):
        report(f"fill, {fill(memory, programs)}")
    for expert_format in ("fp8", "int4"):
        report(f"fill, {expert_format}, {fill(Memory(expert_format), 8)}")

    model = Model(memory, num_slots=64)
    model.warm()
    alone = timed(model, model.compute_only, _missing(model, 0))
    report(f"compute alone {alone:.1f}")
    for num_misses in (0, 1, 2):
        plain = Model(memory, num_slots=64)
        plain.warm()
        figures = [f"no hook {timed(plain, plain.demand_only, _missing(plain, num_misses)):.1f}"]
        for forecast in ("right", "wrong"):
            hooked_model = Model(memory, num_slots=64, with_hook=True)
            hooked_model.warm()
            make = _missing(hooked_model, num_misses, forecast)
            us = timed(hooked_model, hooked_model.prefetching, make, rounds=8)
            counters = hooked_model.table.counters_of(1)
            figures.append(
                f"{forecast} forecast {us:.1f} (layer 1: used {counters.prefetch_used}, late "
                f"{counters.late}, dropped {counters.prefetch_dropped})"
            )
        report(f"beside compute, {num_misses} misses a layer: {'; '.join(figures)}")


if __name__ == "__main__":
    main()
