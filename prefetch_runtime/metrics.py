"""The cache's counters as Prometheus series, written once a second by a thread of the worker.

The worker is another process than the API server that answers `/metrics`, so the series go through
the files of prometheus_client's multiprocess mode: the server adds up what all processes have left
in the folder that `PROMETHEUS_MULTIPROC_DIR` names.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, values

import prefetch_runtime
from prefetch_runtime.config import METRICS_FOLDER_VARIABLE, ConfigError, spelled
from prefetch_runtime.stats import RuntimeStats

PREFIX = "prefetch_runtime_"

logger = logging.getLogger(__name__)


class Series(NamedTuple):
    """One number of `RuntimeStats` or of each `LayerStats` as a series."""

    field: str
    name: str
    description: str
    kind: str = ""
    """Value of the label of the same name; empty: no such label."""


COPIED = ("copied_bytes_total", "Bytes of experts copied to the device, by what became of them.")

LAYER_COUNTERS = (
    Series("steps", "steps_total", "Steps in which the layer ran."),
    Series(
        "waves",
        "waves_total",
        "Parts in which the layer's steps were computed; several where experts exceed the slots.",
    ),
    Series("hits", "expert_hits_total", "Demanded experts that were in a slot."),
    Series("misses", "expert_misses_total", "Demanded experts that were not on the device."),
    Series("late", "expert_late_total", "Demanded experts whose prefetch was under way."),
    Series("evictions", "expert_evictions_total", "Experts that lost their slot to another."),
    Series("prefetched", "expert_prefetches_total", "Experts brought in before any demand."),
    Series("prefetch_used", "expert_prefetches_used_total", "Prefetched, then demanded in time."),
    Series(
        "prefetch_at_once",
        "expert_prefetches_at_once_total",
        "Prefetched, then demanded by the step that they were predicted for.",
    ),
    Series(
        "prefetch_dropped",
        "expert_prefetches_dropped_total",
        "Prefetched, and given up or evicted before any demand.",
    ),
    Series("bytes_copied", *COPIED, kind="demand"),
    Series("bytes_useful", *COPIED, kind="useful"),
    Series("bytes_late", *COPIED, kind="late"),
    Series("bytes_wasted", *COPIED, kind="wasted"),
    Series("stall_seconds", "stall_seconds_total", "Compute waited so long for demanded experts."),
    Series(
        "link_free_seconds",
        "link_free_seconds_total",
        "From the layer's predictions to its demands: the link's time for prefetches.",
    ),
)
LAYER_GAUGES = (
    Series("num_slots", "slots", "Experts of the layer that fit on the device."),
    Series("num_experts", "experts", "Experts of the layer."),
    Series(
        "prefetch_budget_bytes",
        "prefetch_budget_bytes",
        "What a step may prefetch for the layer; 0 where speculation is off.",
    ),
)
COUNTERS = (
    Series(
        "steps_with_misses",
        "steps_with_misses_total",
        "Steps in which a demanded expert of any layer was not on the device.",
    ),
)
GAUGES = (
    Series("slot_bytes", "slot_bytes", "Device memory of all slots."),
    Series("staging_bytes", "staging_bytes", "Device memory of the ring that prompts stream by."),
    Series("host_bytes", "host_bytes", "Host memory of all experts."),
    Series("pinned_bytes", "pinned_bytes", "Of the host memory, the part that is page-locked."),
)
INFO = Series("", "info", "Always 1; the labels say what runs.")
SNAPSHOT_TIME = Series(
    "", "snapshot_timestamp_seconds", "Unix time at which the counters were read last."
)
INFO_LABELS = ("version", "mode", "policy", "predictor")


class Scheduler(Protocol):
    """What is asked of the scheduler, from another thread than the one that steps it."""

    def counter_tensors(self) -> Sequence[torch.Tensor]:
        """Counters that are on the device; none where the host counts."""

    def stats_from(self, copies: Sequence[torch.Tensor]) -> RuntimeStats:
        """The counters, given copies of `counter_tensors`; never waits for the device."""


def check_multiprocess_mode() -> None:
    """Raise ConfigError unless what this process counts reaches the API server's `/metrics`."""
    folder = os.environ.get(METRICS_FOLDER_VARIABLE, "")
    remedy = (
        f"set {METRICS_FOLDER_VARIABLE} to an empty folder of its own before `vllm serve` starts, "
        "or start with `prefetch-runtime serve`, which does so"
    )
    if not folder:
        raise ConfigError(
            f"{spelled('metrics')} needs the environment variable {METRICS_FOLDER_VARIABLE}: the "
            f"worker is another process than the one that serves /metrics; {remedy}"
        )
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"{spelled('metrics')}: {METRICS_FOLDER_VARIABLE} is {folder!r}, which is not a "
            f"folder that this process may write to; {remedy}"
        )
    if not getattr(values.ValueClass, "_multiprocess", False):
        raise ConfigError(
            f"{spelled('metrics')}: {METRICS_FOLDER_VARIABLE} was set after prometheus_client had "
            f"been imported, which is too late; {remedy}"
        )


class CacheSeries:
    """The series, and what each stood at. Counters never go down, whatever `RuntimeStats` does."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None in multiprocess mode, where the files are what is collected."""
        self._registry = registry
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, int], Any] = {}
        self._seen: dict[tuple[str, int], float] = {}
        self._info: Any = None

    def write(self, stats: RuntimeStats, read_at: float | None = None) -> None:
        """Bring every series to where `stats` is; the first call creates them, at zero.

        `read_at`: Unix time before `stats` was read, now by default. It is written last, so that
        whoever sees it sees counters that are no older.
        """
        if read_at is None:
            read_at = time.time()
        for layer in stats.layers:
            for series in LAYER_COUNTERS:
                self._advance(series, getattr(layer, series.field), layer.layer_idx)
            for series in LAYER_GAUGES:
                self._set(series, getattr(layer, series.field), layer.layer_idx)
        for series in COUNTERS:
            self._advance(series, getattr(stats, series.field))
        for series in GAUGES:
            self._set(series, getattr(stats, series.field))
        if self._info is None:
            self._info = self._metric(Gauge, INFO, INFO_LABELS).labels(
                version=prefetch_runtime.__version__,
                mode=stats.mode,
                policy=stats.policy,
                predictor=stats.predictor,
            )
            self._info.set(1)
        self._metric(Gauge, SNAPSHOT_TIME, ()).set(read_at)

    def restarted(self) -> None:
        """The counters of `RuntimeStats` start from zero again; the series go on from where they
        are. Not needed for what `write` can see by itself: values that are lower than before."""
        counters = {series.field for series in (*LAYER_COUNTERS, *COUNTERS)}
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] not in counters}

    def _advance(self, series: Series, value: float, layer_idx: int = -1) -> None:
        key = (series.field, layer_idx)
        seen = self._seen.get(key, 0)
        child = self._child(Counter, series, layer_idx)
        if value != seen:
            # Fewer than before: the counters were restarted since, so all of it is new.
            child.inc(value - seen if value > seen else value)
            self._seen[key] = value

    def _set(self, series: Series, value: float, layer_idx: int = -1) -> None:
        key = (series.field, layer_idx)
        if self._seen.get(key) != value:
            self._child(Gauge, series, layer_idx).set(value)
            self._seen[key] = value

    def _child(self, kind: Any, series: Series, layer_idx: int) -> Any:
        key = (series.field, layer_idx)
        if key not in self._children:
            labels = {"layer": str(layer_idx)} if layer_idx >= 0 else {}
            if series.kind:
                labels["kind"] = series.kind
            metric = self._metric(kind, series, tuple(labels))
            self._children[key] = metric.labels(**labels) if labels else metric
        return self._children[key]

    def _metric(self, kind: Any, series: Series, labels: Sequence[str]) -> Any:
        if series.name not in self._metrics:
            # Of several processes, the one that wrote last knows best.
            how = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
            self._metrics[series.name] = kind(
                PREFIX + series.name, series.description, labels, registry=self._registry, **how
            )
        return self._metrics[series.name]


class SnapshotReader:
    """Reads the counters beside a running step. Borrows the compute stream.

    What the device counts is copied into pinned memory, in the order of the compute stream, so
    that a snapshot lies between two kernels (two replays, where a step is one graph). Nobody but
    the caller waits for the copy: it is not to be called by the thread that steps.
    """

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        """Called by the thread that steps: its current stream is the compute stream."""
        self._scheduler = scheduler
        self._device = device
        self._tensors = tuple(scheduler.counter_tensors())
        on_cuda = device.type == "cuda" and bool(self._tensors)
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
            for tensor in self._tensors
        ]
        self._stream = torch.cuda.current_stream(device) if on_cuda else None
        self._copied: torch.cuda.Event | None = None
        if on_cuda:
            # A blocking event puts the waiting thread to sleep instead of spinning.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def read(self) -> RuntimeStats | None:
        """The counters of a moment ago; None while the stream is being captured into a graph."""
        if self._stream is None or self._copied is None:
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor)
            return self._scheduler.stats_from(self._copies)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if torch.cuda.is_current_stream_capturing():
                return None
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._copied.record(self._stream)
        # RAW: the host reads the copies only when they are there.
        self._copied.synchronize()
        return self._scheduler.stats_from(self._copies)


class MetricsPublisher:
    """Writes the series once an interval, in a thread of its own."""

    def __init__(
        self,
        read: Callable[[], RuntimeStats | None],
        series: CacheSeries,
        *,
        interval_s: float = 1.0,
    ) -> None:
        self._read = read
        self._series = series
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-cache-metrics", daemon=True)

    def start(self) -> None:
        """Write the series for the first time, then go on in the thread."""
        self.publish()
        self._thread.start()

    def publish(self) -> None:
        """Write the series now."""
        with self._lock:
            self._publish()

    @contextmanager
    def restarting(self) -> Iterator[None]:
        """Within this context the counters are restarted; nothing that they had is lost."""
        with self._lock:
            self._publish()
            yield
            self._series.restarted()

    def close(self) -> None:
        """End the thread. Safe to call twice. Before the scheduler is closed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _publish(self) -> None:
        read_at = time.time()  # before: what happens while it is read may be missing
        stats = self._read()
        if stats is not None:
            self._series.write(stats, read_at)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self.publish()
            except Exception:
                # Whoever steps the engine meets the same trouble, or none: serving goes on.
                logger.exception(
                    "The expert cache's metrics have stopped: %s%s stands still from here on",
                    PREFIX,
                    SNAPSHOT_TIME.name,
                )
                return


def start_metrics(scheduler: Scheduler, device: torch.device) -> MetricsPublisher:
    """Publish a scheduler's counters until the publisher is closed.

    Called by the thread that steps, after the last graph has been captured.
    """
    reader = SnapshotReader(scheduler, device)
    publisher = MetricsPublisher(reader.read, CacheSeries())
    publisher.start()
    return publisher
