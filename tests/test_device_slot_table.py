"""Without a GPU these run under Triton's interpreter; with one, the same tests run on it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from graphs import DeviceSlotTable, GraphCapture, SlotTableError
from graphs.layout import EMPTY_SCORE, REBASE_SCORE, Control
from prefetch_runtime.policies import create_device_form, create_policy
from prefetch_runtime.slots import SlotTable

ROOT = Path(__file__).parents[1]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
POLICIES = ("lru", "lfru")

Ids = npt.NDArray[np.int64]


def make_table(
    policy: str = "lru",
    *,
    num_layers: int = 1,
    num_experts: int = 16,
    num_slots: int = 6,
    max_assignments: int = 1024,
) -> DeviceSlotTable:
    return DeviceSlotTable(
        num_layers=num_layers,
        num_experts=num_experts,
        num_slots=num_slots,
        policy=create_device_form(policy),
        units_per_step=create_policy(policy).units_per_step,
        device=DEVICE,
        max_assignments=max_assignments,
    )


def ids_of(rows: Sequence[Sequence[int]] | Ids, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(np.asarray(rows), dtype=dtype, device=DEVICE)


class Pair:
    """A device table and its reference, stepped together and compared after every plan."""

    def __init__(self, table: DeviceSlotTable, policy: str) -> None:
        self.table = table
        self.references = [
            SlotTable(table.num_experts, table.num_slots, create_policy(policy), layer_idx)
            for layer_idx in range(table.num_layers)
        ]
        self.now = 1

    def advance(self) -> None:
        self.table.advance()
        self.now += 1

    def plan(self, layer_idx: int, ids: Ids, dtype: torch.dtype = torch.int32) -> None:
        slots = self.table.resolve(layer_idx, ids_of(ids, dtype))
        self.check_plan(layer_idx, ids, slots)

    def check_plan(self, layer_idx: int, ids: Ids, slots: torch.Tensor) -> None:
        reference = self.references[layer_idx]
        plan = reference.plan(ids, self.now)
        expected = np.where(ids >= 0, reference.mapping[ids], 0)
        np.testing.assert_array_equal(slots.cpu().numpy(), expected)
        count = int(self.table.miss_count[layer_idx])
        listed = self.table.misses[layer_idx, :count].cpu().numpy()
        np.testing.assert_array_equal(listed[:, 0], plan.loads)
        np.testing.assert_array_equal(listed[:, 1], plan.load_slots)
        assert not listed[:, 2].any()
        self.compare(layer_idx)

    def compare(self, layer_idx: int) -> None:
        reference, table = self.references[layer_idx], self.table
        for name in ("mapping", "owner", "score"):
            actual = getattr(table, name)[layer_idx].cpu().numpy()
            np.testing.assert_array_equal(actual, getattr(reference, name), name)
        counters = table.counters_of(layer_idx)
        for name in reference.counters.__dataclass_fields__:
            assert getattr(counters, name) == getattr(reference.counters, name), name
        reference.check_integrity()


def random_ids(
    rng: np.random.Generator, num_experts: int, num_tokens: int, top_k: int, most: int
) -> Ids:
    """[T, K]: skewed, with repeats and -1, at most `most` different experts."""
    pool = rng.permutation(num_experts)[:most]
    weights = rng.dirichlet(np.full(len(pool), 0.5))
    ids = rng.choice(pool, size=(num_tokens, top_k), p=weights).astype(np.int64)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("num_experts", "num_slots", "num_tokens", "top_k"),
    [(7, 3, 1, 2), (33, 13, 3, 4), (128, 64, 4, 8), (200, 24, 32, 6), (5, 5, 2, 3), (1, 1, 1, 1)],
)
def test_random_traces_give_the_state_of_the_slot_table_after_every_plan(
    policy: str, num_experts: int, num_slots: int, num_tokens: int, top_k: int
) -> None:
    rng = np.random.default_rng(num_experts)
    table = make_table(policy, num_layers=2, num_experts=num_experts, num_slots=num_slots)
    pair = Pair(table, policy)
    for step in range(400 if ON_GPU else 10):
        pair.advance()
        for layer_idx in range(2):
            most = int(rng.integers(1, num_slots + 1))
            ids = random_ids(rng, num_experts, num_tokens, top_k, most)
            pair.plan(layer_idx, ids, (torch.int32, torch.int64)[step % 2])
    table.check_integrity()
    table.check_errors()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_slots", [8, 16])
def test_the_recorded_trace_gives_the_state_of_the_slot_table_after_every_plan(
    policy: str, num_slots: int
) -> None:
    with np.load(ROOT / "models" / "tiny-moe-trace.npz", allow_pickle=False) as trace:
        topk = trace["topk"].astype(np.int64)
    num_layers = topk.shape[1]
    table = make_table(policy, num_layers=num_layers, num_experts=32, num_slots=num_slots)
    pair = Pair(table, policy)
    for rows in topk[: 1024 if ON_GPU else 8]:
        pair.advance()
        for layer_idx in range(num_layers):
            pair.plan(layer_idx, rows[layer_idx][None, :])
    table.check_integrity()
    assert table.counters_of(0).hits > 0


def test_a_wide_plan_of_sizes_that_are_no_powers_of_two_agrees() -> None:
    rng = np.random.default_rng(3)
    table = make_table("lfru", num_experts=1000, num_slots=777, max_assignments=8192)
    pair = Pair(table, "lfru")
    for _ in range(2):
        pair.advance()
        pair.plan(0, random_ids(rng, 1000, 1024, 8, most=777 if ON_GPU else 40))


def test_an_expert_that_many_rows_demand_is_used_once() -> None:
    pair = Pair(make_table("lfru"), "lfru")
    for _ in range(3):
        pair.advance()
        pair.plan(0, np.full((8, 4), 5))
    assert pair.table.counters_of(0).hits == 2
    assert pair.table.counters_of(0).misses == 1


def test_several_plans_in_one_step_agree() -> None:
    pair = Pair(make_table("lfru"), "lfru")
    pair.advance()
    for first in (0, 3, 6, 1, 0):
        pair.plan(0, np.arange(first, first + 6)[None, :])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clock_moves_back_before_scores_overflow_and_the_order_stays(policy: str) -> None:
    rng = np.random.default_rng(5)
    pair = Pair(make_table(policy, num_slots=14), policy)
    last = (REBASE_SCORE - 1) // pair.table.units_per_step
    pair.plan(0, np.array([[0, 1]]))
    pair.now = last - 2
    pair.table.clock.fill_(pair.now)
    clocks = []
    for _ in range(6):
        pair.plan(0, random_ids(rng, 16, 2, 3, most=4))
        pair.advance()
        clocks.append(int(pair.table.clock))
    assert clocks == [last - 1, last, 1, 2, 3, 4]
    pair.table.check_integrity()
    assert int(pair.table.step) == 7


def test_the_number_of_plans_may_wrap() -> None:
    rng = np.random.default_rng(6)
    pair = Pair(make_table(), "lru")
    pair.table._control[0, Control.PLAN] = 2**31 - 3
    for _ in range(6):
        pair.advance()
        pair.plan(0, random_ids(rng, 16, 2, 3, most=6))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_number_of_plans_never_comes_around(policy: str) -> None:
    # After 200 days at 250 steps a second it would be that of no plan, then those of old ones:
    # experts that have long been there would count as missing.
    rng = np.random.default_rng(7)
    pair = Pair(make_table(policy, num_layers=2), policy)
    for layer_idx in range(2):
        pair.plan(layer_idx, np.array([[0, 1]]))
    pair.now = (REBASE_SCORE - 1) // pair.table.units_per_step - 1
    pair.table.clock.fill_(pair.now)
    pair.table._control[:, Control.PLAN] = -3  # 2**32 - 3 of them
    pair.table._mark[pair.table._mark > 0] = -3
    numbers = []
    for _ in range(6):
        pair.advance()
        for layer_idx in range(2):
            pair.plan(layer_idx, random_ids(rng, 16, 2, 3, most=6))
        numbers.append(pair.table._control[:, Control.PLAN].tolist())
    assert numbers == [[-2] * 2, *([number] * 2 for number in range(2, 7))]
    pair.table.check_integrity()
    pair.table.check_errors()


@pytest.mark.parametrize("form", ["mask", "slot_mapping", "slot_mapping_int32"])
def test_padding_rows_cost_nothing_and_come_out_as_slot_0(form: str) -> None:
    table = make_table()
    table.advance()
    padding = torch.tensor([False, True, True, False], device=DEVICE)
    if form != "mask":
        padding = torch.where(padding, -1, 7).to(
            torch.int32 if form.endswith("int32") else torch.int64
        )
    rows = ids_of([[3, 4], [5, 6], [7, 99], [4, -1]])
    slots = table.resolve(0, rows, padding=padding)
    assert slots.tolist() == [[0, 1], [0, 0], [0, 0], [1, 0]]
    assert table.owner[0].tolist() == [3, 4, -1, -1, -1, -1]
    assert table.counters_of(0).misses == 2
    table.check_errors()


def test_a_step_of_nothing_but_padding_changes_nothing() -> None:
    table = make_table()
    table.resolve(0, ids_of([[1, 2]]))
    before = [table.mapping.clone(), table.owner.clone(), table.score.clone()]
    table.advance()
    slots = table.resolve(0, ids_of([[-1, -1], [3, 4]]), padding=ids_of([[1], [0]])[:, 0] == 0)
    assert slots.tolist() == [[0, 0], [0, 0]]
    assert int(table.miss_count[0]) == 0
    after = [table.mapping, table.owner, table.score]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_come_in_the_type_of_the_ids_at_a_fixed_address(dtype: torch.dtype) -> None:
    table = make_table(num_layers=2)
    first = table.resolve(1, ids_of([[1, 2], [3, 1]], dtype))
    address = first.data_ptr()
    again = table.resolve(1, ids_of([[3, 2]], dtype))
    assert again.dtype == dtype
    assert again.shape == (1, 2)
    assert again.data_ptr() == address
    assert table.resolve(0, ids_of([[3, 2]], dtype)).data_ptr() != address


def test_the_callers_output_may_have_the_other_type() -> None:
    table = make_table()
    out = torch.full((2, 2), -7, dtype=torch.int64, device=DEVICE)
    assert table.resolve(0, ids_of([[9, 2], [2, 4]]), out=out) is out
    assert out.tolist() == [[2, 0], [0, 1]]


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    table = make_table()
    wide = ids_of([[1, 2, 99, 99], [3, 1, 99, 99]])
    assert table.resolve(0, wide[:, :2]).tolist() == [[0, 1], [2, 0]]
    table.check_errors()


def test_an_empty_slot_is_taken_before_any_resident() -> None:
    table = make_table()
    table.resolve(0, ids_of([[8, 9]]))
    table.resolve(0, ids_of([[1, 2, 3, 4]]))
    assert table.owner[0].tolist() == [8, 9, 1, 2, 3, 4]
    assert table.counters_of(0).evictions == 0


def test_more_experts_than_slots_are_counted_and_nothing_is_written_out_of_bounds() -> None:
    table = make_table(num_layers=3, num_slots=4)
    for layer_idx in (0, 2):
        table.resolve(layer_idx, ids_of([[1, 2, 3]]))
    others = [t[[0, 2]].clone() for t in (table.mapping, table.owner, table.score, table.misses)]
    slots = table.resolve(1, ids_of([[15, 2, 9, 4], [7, 1, 0, 12]]))
    assert 0 <= int(slots.min()) <= int(slots.max()) < 4
    assert int(table.miss_count[1]) == 4
    after = [t[[0, 2]] for t in (table.mapping, table.owner, table.score, table.misses)]
    assert all(torch.equal(x, y) for x, y in zip(others, after, strict=True))
    table.check_integrity()
    with pytest.raises(
        SlotTableError, match=r"layer 1: 4 demanded experts found no slot among 4.*slots_per_layer"
    ):
        table.check_errors()


@pytest.mark.parametrize("bad", [16, 17, 1 << 20, 2**31 - 1])
def test_ids_of_experts_that_do_not_exist_are_counted_and_not_followed(bad: int) -> None:
    table = make_table()
    assert table.resolve(0, ids_of([[bad, 3]])).tolist() == [[0, 0]]
    assert table.owner[0].tolist() == [3, -1, -1, -1, -1, -1]
    with pytest.raises(SlotTableError, match="layer 0: 1 assignments to experts outside 0 to 15"):
        table.check_errors()


@pytest.mark.parametrize("policy", POLICIES)
def test_touch_marks_residents_and_brings_nothing_in(policy: str) -> None:
    rng = np.random.default_rng(8)
    pair = Pair(make_table(policy), policy)
    for _ in range(6):
        pair.advance()
        pair.plan(0, random_ids(rng, 16, 2, 2, most=4))
        ids = random_ids(rng, 16, 5, 8, most=16)
        slots = pair.table.touch(0, ids_of(ids)).cpu().numpy()
        _, absent = pair.references[0].touch(ids, pair.now)
        mapping = pair.references[0].mapping
        np.testing.assert_array_equal(slots, np.where(ids >= 0, mapping[ids], -1))
        assert set(ids[(slots < 0) & (ids >= 0)]) == set(absent.tolist())
        assert int(pair.table.miss_count[0]) == 0
        pair.compare(0)
    pair.table.check_errors()


def test_clear_starts_anew() -> None:
    table = make_table()
    table.advance()
    table.resolve(0, ids_of([[1, 2]]))
    table.clear()
    assert int(table.clock) == 1
    assert table.score[0].tolist() == [EMPTY_SCORE] * 6
    assert table.counters_of(0).misses == 0
    assert table.resolve(0, ids_of([[5, 4]])).tolist() == [[1, 0]]


def test_a_wrong_mapping_entry_is_found() -> None:
    table = make_table()
    table.resolve(0, ids_of([[1, 2]]))
    table.check_integrity()
    table.mapping[0, 2] = 0
    with pytest.raises(RuntimeError, match="layer 0: two experts are mapped to one slot"):
        table.check_integrity()
    table.mapping[0, 2] = 3
    with pytest.raises(RuntimeError, match="layer 0: owner disagrees with mapping"):
        table.check_integrity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 17}, "num_slots must be between 1 and 16, got 17"),
        ({"num_slots": 0}, "num_slots must be between 1 and 16, got 0"),
        ({"num_experts": 1025, "num_slots": 8}, "num_experts must be between 1 and 1024"),
        ({"num_layers": 0}, "num_layers must be between 1"),
        ({"max_assignments": 8193}, "max_assignments must be between 1 and 8192, got 8193"),
    ],
)
def test_sizes_that_the_kernels_do_not_support_are_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_table(**changes)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_are_refused() -> None:
    table = make_table(max_assignments=8)
    ids = ids_of([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="layer_idx must be 0 to 0, got 1"):
        table.resolve(1, ids)
    with pytest.raises(ValueError, match=r"int32 or int64, got torch.int16 \(2, 2\)"):
        table.resolve(0, ids.to(torch.int16))
    with pytest.raises(ValueError, match=r"\[tokens, top_k\]"):
        table.resolve(0, ids[0])
    with pytest.raises(ValueError, match=r"10 assignments.*1 to 8 \(max_assignments\)"):
        table.resolve(0, ids_of(np.zeros((5, 2))))
    with pytest.raises(ValueError, match="0 assignments"):
        table.resolve(0, ids[:0])
    with pytest.raises(ValueError, match="rows of topk_ids must be contiguous"):
        table.resolve(0, ids.t())
    with pytest.raises(ValueError, match=r"padding must be contiguous \[2\], got \(3,\)"):
        table.resolve(0, ids, padding=torch.zeros(3, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match="padding must be bool"):
        table.resolve(0, ids, padding=torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="out must be contiguous int32 or int64"):
        table.resolve(0, ids, out=torch.zeros(2, 2, device=DEVICE))
    assert table.counters_of(0).misses == 0


def test_a_closed_table_says_so() -> None:
    table = make_table()
    table.close()
    table.close()
    for call in (
        table.advance,
        table.clear,
        lambda: table.resolve(0, ids_of([[1]])),
        lambda: GraphCapture(table),
    ):
        with pytest.raises(RuntimeError, match="slot table is closed"):
            call()


def test_every_kernel_compiles_for_a_gpu_and_moves_16_bytes_at_a_time() -> None:
    script = ROOT / "tests" / "helpers" / "compile_kernels.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Wide demands


@pytest.mark.parametrize(
    ("num_experts", "num_slots"), [(3, 1), (16, 6), (37, 36), (130, 64)], ids=str
)
def test_a_wide_demand_is_divided_as_on_the_host(num_experts: int, num_slots: int) -> None:
    rng = np.random.default_rng(num_experts)
    table = make_table(num_layers=2, num_experts=num_experts, num_slots=num_slots)
    pair = Pair(table, "lru")
    for step in range(12):
        pair.advance()
        evict = step % 3 > 0
        for layer_idx, dtype in enumerate((torch.int32, torch.int64)):
            popular = rng.permutation(num_experts)[: rng.integers(1, num_experts + 1)]
            ids = rng.choice(np.append(popular, -1), (int(rng.integers(1, 40)), 3))
            reference = pair.references[layer_idx]
            resident = set(np.flatnonzero(reference.mapping >= 0).tolist())
            wide = reference.plan_wide(ids, pair.now, evict=evict)
            report = table.plan_wide(layer_idx, ids_of(ids, dtype), evict=evict)
            planned, streamed, slots, counts = report.rows.cpu().numpy()
            num_hits, num_planned, num_streamed = counts[:3]
            table.touch(layer_idx, report.streamed)
            np.testing.assert_array_equal(planned[:num_hits], wide.plan.hits)
            assert set(planned[:num_hits].tolist()) <= resident
            newcomers = planned[num_hits:num_planned]
            order = np.argsort(newcomers)
            np.testing.assert_array_equal(newcomers[order], wide.plan.loads)
            np.testing.assert_array_equal(slots[num_hits:num_planned][order], wide.plan.load_slots)
            np.testing.assert_array_equal(streamed[:num_streamed], wide.streamed)
            pair.compare(layer_idx)
    table.check_integrity()
    table.check_errors()
    table.close()


def test_a_wide_demand_may_have_any_number_of_assignments() -> None:
    table = make_table(num_experts=16, num_slots=6, max_assignments=16)
    ids = np.resize(np.arange(8), (4000, 3))
    counts = table.plan_wide(0, ids_of(ids), evict=False).counts[:3].tolist()
    assert counts == [0, 6, 2]
    table.close()


def test_a_wide_demand_may_be_a_column_of_a_wider_tensor() -> None:
    # One expert per token: torch flattens such a column without a copy, with gaps between its ids.
    table = make_table(num_experts=16, num_slots=6)
    ids = ids_of([[3, 9], [5, 10], [3, 11]])[:, :1]
    report = table.plan_wide(0, ids, evict=True)
    assert report.planned[0, :3].tolist() == [3, 5, -1]
    table.close()


def test_a_wide_demand_of_experts_that_do_not_exist_is_reported() -> None:
    table = make_table(num_experts=16, num_slots=6)
    table.plan_wide(0, ids_of([[3, 16], [99, -1]]), evict=True)
    with pytest.raises(SlotTableError, match="2 assignments to experts outside 0 to 15"):
        table.check_errors()
    report = table.plan_wide(0, ids_of([[3, 4]]), evict=True)
    assert report.counts[:3].tolist() == [1, 2, 0], "counted anew"
    table.close()


def test_a_wide_demand_must_be_integers() -> None:
    table = make_table()
    with pytest.raises(ValueError, match="int32 or int64"):
        table.plan_wide(0, torch.zeros(2, 2, device=DEVICE), evict=True)
    table.close()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_tokens", [1, 4, 32])
def test_one_captured_graph_follows_routing_that_changes_between_replays(
    policy: str, num_tokens: int
) -> None:
    rng = np.random.default_rng(num_tokens)
    num_layers, num_experts, num_slots, top_k = 3, 128, 96, 8
    table = make_table(policy, num_layers=num_layers, num_experts=num_experts, num_slots=num_slots)

    def step(topk_ids: torch.Tensor) -> torch.Tensor:
        table.advance()
        slots = [table.resolve(i, topk_ids[i]) for i in range(num_layers)]
        return torch.stack(slots)

    def routing() -> Ids:
        return np.stack(
            [random_ids(rng, num_experts, num_tokens, top_k, num_slots) for _ in range(num_layers)]
        )

    graph = GraphCapture(table).run(step, {"topk_ids": ids_of(routing())})
    table.clear()  # the warm-up was a step, too
    pair = Pair(table, policy)
    for _ in range(500):
        ids = routing()
        slots = graph.replay({"topk_ids": ids_of(ids)})
        assert slots is not None
        pair.now += 1
        for layer_idx in range(num_layers):
            reference = pair.references[layer_idx]
            reference.plan(ids[layer_idx], pair.now)
            expected = np.where(ids[layer_idx] >= 0, reference.mapping[ids[layer_idx]], 0)
            np.testing.assert_array_equal(slots[layer_idx].cpu().numpy(), expected)
            pair.compare(layer_idx)
    table.check_integrity()
    table.check_errors()
    graph.close()
    table.close()
