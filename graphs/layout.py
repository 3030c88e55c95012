"""Numbers that the kernels and their host side agree on."""

from enum import IntEnum

EMPTY_SCORE = -(1 << 31)
"""Score of a slot that holds no readable expert; below every score of a policy."""

LOWEST_SCORE = -(1 << 30)
"""Lowest score of a resident expert; older ones are clamped here when the clock moves back."""

REBASE_SCORE = 1 << 30
"""The clock is moved back before clock * units_per_step reaches this."""

NEVER = 0
"""Mark of a slot whose expert was prefetched and not demanded yet; plans are numbered from 1."""


class Clock(IntEnum):
    """Entries of `DeviceSlotTable.clocks`, shared by all layers."""

    NOW = 0
    """What scores are made of, from 1; moved back in good time."""
    STEP = 1
    """Steps, from 1; never moved back. Kernels compare it for equality alone, so it may wrap."""
    MISSED_IN = 2
    """The last step in which a demanded expert was absent; 0 before any."""
    MISSED_STEPS = 3
    """How many such steps there were."""


NUM_CLOCKS = 4


class Counter(IntEnum):
    """Columns of `DeviceSlotTable.counters`. Experts are counted once per plan."""

    HITS = 0
    LATE = 1
    MISSES = 2
    EVICTIONS = 3
    PREFETCHED = 4
    PREFETCH_USED = 5
    PREFETCH_DROPPED = 6
    USED_BYTES = 7
    LATE_BYTES = 8
    WASTED_BYTES = 9
    UNPLACED = 10
    """Demanded experts that no slot was left for: a bug of the caller."""
    BAD_IDS = 11
    """Assignments to experts that do not exist: a bug of the caller."""
    STALL_NS = 12
    """Nanoseconds in which demanded experts were being copied, or their prefetches ended."""
    FREE_NS = 13
    """Nanoseconds from a reservation to the demand: what the link had for the prefetch."""
    AT_ONCE = 14
    """Prefetches that were whole, and demanded, when their step's demand came."""
    WAVES = 15
    """Waves that wide steps ran in inside graphs; without those that had no experts."""


NUM_COUNTERS = 16  # a row of 128 bytes


class Stamp(IntEnum):
    """Columns of `DeviceSlotTable.stamps`: the device's clock in nanoseconds, at the last ..."""

    RESERVED = 0
    """... reservation."""
    POSTED = 1
    """... posted demand; 0 once a plan has counted it."""
    FILLED = 2
    """... end of a prefetch fill."""
    PLANNED = 3
    """... plan that listed something to copy."""


NUM_STAMPS = 4


class Control(IntEnum):
    """Columns of a layer's control row."""

    PLAN = 0
    """Number of the last plan; from 1 again when the clock has moved back."""
    FIRST_PLAN = 1
    """Number of the first plan of the step of the last plan."""
    STEP = 2
    """Step of the last plan."""


NUM_CONTROL = 4


class WideCount(IntEnum):
    """Leading columns of the last row of `DeviceSlotTable.plan_wide`'s report."""

    HITS = 0
    PLANNED = 1
    """With the hits."""
    STREAMED = 2


NUM_WIDE_COUNTS = 4


class Padding(IntEnum):
    """How a resolve is told which rows are padding."""

    NONE = 0
    MASK = 1
    """bool [T], true where the row is padding."""
    SLOT_MAPPING = 2
    """int32 or int64 [T], negative where the row is padding (vLLM's KV slot mapping)."""


class Header(IntEnum):
    """Columns of a layer's row in `RecordTable.header`, int64."""

    HOST_BASE = 0
    RECORD_BYTES = 1
    NUM_UNITS = 2
    PAYLOAD_BYTES = 3


NUM_HEADER = 4


class Unit(IntEnum):
    """Columns of `RecordTable.units`, int64: one piece of one field of a record."""

    SOURCE_OFFSET = 0
    """Bytes from the start of the record."""
    SLOT_ADDRESS = 1
    """Address of the piece in slot 0."""
    SLOT_STRIDE = 2
    """Bytes from a slot to the next."""
    VECTOR_BYTES = 3
    """Leading bytes that can be moved 16 at a time; a multiple of 16."""
    NBYTES = 4


NUM_UNIT_COLUMNS = 6  # 48 bytes: keeps every row on 16 bytes
