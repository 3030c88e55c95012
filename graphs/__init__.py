"""The kernels, capture and replay of a decode step that looks its experts up on the device."""

from graphs.capture import CapturedGraph, GraphCapture
from graphs.fill import ExpertFill
from graphs.prefetch import PrefetchBranch, PrefetchHook
from graphs.records import LayerRecords, RecordField, RecordTable, field_of
from graphs.segments import SegmentedCaptures, SegmentedGraph, between_segments
from graphs.slot_table import DeviceCounters, DeviceSlotTable, SlotTableError
from graphs.stream import ExpertStream, StreamedWave

__all__ = [
    "CapturedGraph",
    "DeviceCounters",
    "DeviceSlotTable",
    "ExpertFill",
    "ExpertStream",
    "GraphCapture",
    "LayerRecords",
    "PrefetchBranch",
    "PrefetchHook",
    "RecordField",
    "RecordTable",
    "SegmentedCaptures",
    "SegmentedGraph",
    "SlotTableError",
    "StreamedWave",
    "between_segments",
    "field_of",
]
