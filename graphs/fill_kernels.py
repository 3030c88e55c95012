# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The kernels that move: records from device-mapped pinned memory into slots, 16 bytes at a time.

A record is cut into units (see `records.py`), and the units of all listed experts are dealt out to
a few programs. Addresses are integers in a table, so one kernel serves any number of tensors.
"""

import triton
import triton.language as tl

from graphs import layout
from graphs.clock_kernels import await_last, nanoseconds
from graphs.resolve_kernels import (
    FILLED,
    NUM_COUNTERS,
    NUM_STAMPS,
    PLANNED,
    STALL_NS,
    count,
)

HOST_BASE = tl.constexpr(int(layout.Header.HOST_BASE))
RECORD_BYTES = tl.constexpr(int(layout.Header.RECORD_BYTES))
NUM_UNITS = tl.constexpr(int(layout.Header.NUM_UNITS))
PAYLOAD_BYTES = tl.constexpr(int(layout.Header.PAYLOAD_BYTES))
NUM_HEADER = tl.constexpr(layout.NUM_HEADER)

SOURCE_OFFSET = tl.constexpr(int(layout.Unit.SOURCE_OFFSET))
SLOT_ADDRESS = tl.constexpr(int(layout.Unit.SLOT_ADDRESS))
SLOT_STRIDE = tl.constexpr(int(layout.Unit.SLOT_STRIDE))
VECTOR_BYTES = tl.constexpr(int(layout.Unit.VECTOR_BYTES))
NBYTES = tl.constexpr(int(layout.Unit.NBYTES))
NUM_UNIT_COLUMNS = tl.constexpr(layout.NUM_UNIT_COLUMNS)


@triton.jit
def copy_unit(row, record, slot, UNIT_BYTES: tl.constexpr, TAIL: tl.constexpr):
    """Copy one unit of the record at address `record` into a slot. All programs' threads agree."""
    source = record + tl.load(row + SOURCE_OFFSET)
    target = tl.load(row + SLOT_ADDRESS) + slot * tl.load(row + SLOT_STRIDE)
    vector_bytes = tl.load(row + VECTOR_BYTES)
    nbytes = tl.load(row + NBYTES)
    word = tl.arange(0, UNIT_BYTES // 4)
    # The table's builder has checked that these addresses are multiples of 16.
    words_in = tl.cast(source, tl.pointer_type(tl.int32)) + word
    words_out = tl.cast(target, tl.pointer_type(tl.int32)) + word
    words_in = tl.max_contiguous(tl.multiple_of(words_in, 16), UNIT_BYTES // 4)
    words_out = tl.max_contiguous(tl.multiple_of(words_out, 16), UNIT_BYTES // 4)
    if vector_bytes == UNIT_BYTES:
        tl.store(words_out, tl.load(words_in))
    elif vector_bytes > 0:
        inside = word < (vector_bytes // 16) * 4
        tl.store(words_out, tl.load(words_in, mask=inside), mask=inside)
    if vector_bytes < nbytes:
        bytes_in = tl.cast(source, tl.pointer_type(tl.int8))
        bytes_out = tl.cast(target, tl.pointer_type(tl.int8))
        for start in range(vector_bytes, nbytes, TAIL):
            at = start + tl.arange(0, TAIL)
            tl.store(bytes_out + at, tl.load(bytes_in + at, mask=at < nbytes), mask=at < nbytes)


@triton.jit
def copy_listed(
    misses, num_listed, header, units, pid, num_programs,
    UNIT_BYTES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """This program's share of the units of every listed (expert, slot, first unit)."""
    host_base = tl.load(header + HOST_BASE)
    record_bytes = tl.load(header + RECORD_BYTES)
    num_units = tl.load(header + NUM_UNITS).to(tl.int32)
    turn = pid  # deal on from where the last expert's units ended, so that shares stay equal
    for i in range(num_listed):
        expert = tl.load(misses + 3 * i).to(tl.int64)
        slot = tl.load(misses + 3 * i + 1).to(tl.int64)
        unit = tl.load(misses + 3 * i + 2) + turn
        while unit < num_units:
            copy_unit(
                units + unit * NUM_UNIT_COLUMNS,
                host_base + expert * record_bytes, slot, UNIT_BYTES, TAIL,
            )  # fmt: skip
            unit += num_programs
        turn = unit - num_units


@triton.jit
def count_stall(finished, counters, stamps, layer_idx, num_programs):
    """The last program of a fill to end adds the time since the plan. `finished` [L] is left 0."""
    tl.debug_barrier()  # all threads have copied
    ended = nanoseconds()
    if tl.atomic_add(finished + layer_idx, 1, sem="acq_rel") == num_programs - 1:
        tl.store(finished + layer_idx, 0)
        planned = tl.load(stamps + layer_idx * NUM_STAMPS + PLANNED)
        count(counters + layer_idx * NUM_COUNTERS, STALL_NS, ended - planned)


@triton.jit(do_not_specialize=["layer_idx"])
def fill_kernel(
    misses, miss_count, counters, stamps, finished, header, units, layer_idx,
    S: tl.constexpr, U: tl.constexpr, UNIT_BYTES: tl.constexpr, TAIL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Copy what the layer's last plan listed; nothing listed, nothing read but the count. EARLY
    says that the kernel is launched before the last one has ended."""
    if EARLY:
        await_last()
    num_listed = tl.load(miss_count + layer_idx)
    if num_listed > 0:
        copy_listed(
            misses + layer_idx * (3 * S), num_listed, header + layer_idx * NUM_HEADER,
            units + layer_idx.to(tl.int64) * (U * NUM_UNIT_COLUMNS),
            tl.program_id(0), tl.num_programs(0), UNIT_BYTES, TAIL,
        )  # fmt: skip
        count_stall(finished, counters, stamps, layer_idx, tl.num_programs(0))


@triton.jit(do_not_specialize=["layer_idx"])
def prefetch_fill_kernel(
    entries, entry_count, progress, epoch, demand, budget, clock, stamps, header, units,
    layer_idx,
    E: tl.constexpr, F: tl.constexpr, U: tl.constexpr,
    UNIT_BYTES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Copy the reserved experts, best guess first, a unit at a time, beside the compute stream.

    Before each unit a program looks whether the demand has been posted: if so, what is not demanded
    stops, and what is demanded goes on without regard to the budget. Units are claimed in order,
    one by one, and a claimed unit is copied, so `progress` units from the front are whole.
    """
    num_entries = tl.load(entry_count + layer_idx)
    if num_entries > 0:
        step = tl.load(clock + 1)
        header += layer_idx * NUM_HEADER
        units += layer_idx.to(tl.int64) * (U * NUM_UNIT_COLUMNS)
        host_base = tl.load(header + HOST_BASE)
        record_bytes = tl.load(header + RECORD_BYTES)
        num_units = tl.load(header + NUM_UNITS).to(tl.int32)
        payload_bytes = tl.load(header + PAYLOAD_BYTES)
        left = tl.load(budget + layer_idx)
        for i in range(num_entries):
            expert = tl.load(entries + layer_idx * (2 * F) + 2 * i)
            slot = tl.load(entries + layer_idx * (2 * F) + 2 * i + 1).to(tl.int64)
            claims = progress + layer_idx * F + i
            affordable = (tl.maximum(left, 0) + (UNIT_BYTES - 1)) // UNIT_BYTES
            affordable = tl.minimum(affordable, num_units).to(tl.int32)
            # Fields that do not fill their last units make more units than bytes say.
            affordable = tl.where(left >= payload_bytes, num_units, affordable)
            unit = tl.zeros([], tl.int32)
            limit = tl.full([], 1, tl.int32)
            while unit < limit:
                limit = affordable
                if tl.atomic_add(epoch + layer_idx, 0, sem="acquire") == step:
                    # Volatile: another stream's kernel wrote it while this one was running.
                    demanded = tl.load(demand + layer_idx * E + expert, volatile=True) == step
                    limit = tl.where(demanded, num_units, 0)
                unit = tl.atomic_add(claims, 0, sem="relaxed")
                if unit < limit:
                    found = tl.atomic_cas(claims, unit, unit + 1, sem="relaxed")
                    if found == unit:
                        copy_unit(
                            units + unit * NUM_UNIT_COLUMNS,
                            host_base + expert.to(tl.int64) * record_bytes,
                            slot, UNIT_BYTES, TAIL,
                        )  # fmt: skip
            left -= payload_bytes
        tl.debug_barrier()  # all threads have copied
        tl.atomic_max(stamps + layer_idx * NUM_STAMPS + FILLED, nanoseconds(), sem="relaxed")
