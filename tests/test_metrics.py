"""The cache's Prometheus series: names, labels, values, and that counters never go down."""

import json
import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

import prefetch_runtime
from prefetch_runtime import cli, early_refusals, metrics
from prefetch_runtime.config import METRICS_FOLDER_VARIABLE, ConfigError
from prefetch_runtime.metrics import (
    COUNTERS,
    GAUGES,
    INFO,
    LAYER_COUNTERS,
    LAYER_GAUGES,
    PREFIX,
    SNAPSHOT_TIME,
    CacheSeries,
    MetricsPublisher,
    SnapshotReader,
    check_multiprocess_mode,
    start_metrics,
)
from prefetch_runtime.stats import LayerStats, RuntimeStats
from tests.helpers.small_cache import CPU, SmallCache, small_cache

ROOT = Path(__file__).resolve().parent.parent
ALL = (*LAYER_COUNTERS, *COUNTERS, *LAYER_GAUGES, *GAUGES, INFO, SNAPSHOT_TIME)
NAMES = {PREFIX + series.name for series in ALL}
FIELDS = [series.field for series in LAYER_COUNTERS]


def _layer(layer_idx: int = 0, **counters: int) -> LayerStats:
    return LayerStats(
        layer_idx=layer_idx, layer_name=f"l{layer_idx}", num_experts=32, num_slots=8, **counters
    )


def _stats(*layers: LayerStats) -> RuntimeStats:
    return RuntimeStats(
        mode="eager",
        policy="lru",
        predictor="next_gate",
        slot_bytes=1 << 20,
        staging_bytes=1 << 10,
        host_bytes=1 << 22,
        pinned_bytes=1 << 21,
        steps_with_misses=9,
        layers=layers,
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own for each test."""
    return CollectorRegistry()


def _scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    """What a Prometheus server would read, by the name it would know it by."""
    text = generate_latest(registry).decode()
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    value = registry.get_sample_value(PREFIX + name, labels)
    assert value is not None, f"no {name} with {labels}"
    return value


# Names and labels


def test_names_follow_the_conventions_of_prometheus() -> None:
    for series in ALL:
        name = PREFIX + series.name
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), "no colons: those are for rules"
        assert name.endswith("_total") == (series in (*LAYER_COUNTERS, *COUNTERS))
        assert not re.search(r"_(mib|gib|kb|mb|gb|ms|us|milliseconds|minutes|count|sum)(_|$)", name)
        assert series.description.endswith(".")


def test_names_carry_the_unit_of_their_field() -> None:
    for series in ALL:
        in_bytes = "bytes" in series.field
        assert re.search(r"_bytes(_total)?$", PREFIX + series.name) if in_bytes else True
        assert in_bytes or "bytes" not in series.name


def test_every_number_of_the_stats_is_exported() -> None:
    told_otherwise = {"layer_idx", "layer_name", "mode", "policy", "predictor", "layers"}  # labels
    told_otherwise |= {"mode_reason"}  # a sentence, for the table of `generate`
    told_in_parts = {"bytes_prefetched"}  # useful, late and wasted
    not_a_counter_of_the_cache = {"host_calls"}
    exported = {series.field for series in ALL}
    held = {field.name for kind in (LayerStats, RuntimeStats) for field in fields(kind)}
    assert held - exported == told_otherwise | told_in_parts | not_a_counter_of_the_cache


def test_the_labels_are_layer_and_kind_and_nothing_that_grows(registry: CollectorRegistry) -> None:
    CacheSeries(registry).write(_stats(*map(_layer, range(3))))
    found = _scrape(registry)
    assert set(found) == NAMES
    for name, family in found.items():
        seen = {
            label: {sample.labels[label] for sample in family.samples}
            for label in (family.samples[0].labels if family.samples else {})
        }
        if name == PREFIX + "info":
            assert set(seen) == {"version", "mode", "policy", "predictor"}
            continue
        assert set(seen) <= {"layer", "kind"}
        assert seen.get("layer", {"0", "1", "2"}) == {"0", "1", "2"}
        assert seen.get("kind", {"demand"}) <= {"demand", "useful", "late", "wasted"}


def test_the_kinds_of_bytes_are_one_metric(registry: CollectorRegistry) -> None:
    layer = _layer(bytes_copied=10, bytes_useful=20, bytes_late=30, bytes_wasted=40)
    CacheSeries(registry).write(_stats(layer))
    copied = {
        kind: _value(registry, "copied_bytes_total", layer="0", kind=kind)
        for kind in ("demand", "useful", "late", "wasted")
    }
    assert copied == {"demand": 10, "useful": 20, "late": 30, "wasted": 40}


def test_the_info_says_what_runs(registry: CollectorRegistry) -> None:
    CacheSeries(registry).write(_stats(_layer()))
    labels = {
        "version": prefetch_runtime.__version__,
        "mode": "eager",
        "policy": "lru",
        "predictor": "next_gate",
    }
    assert _value(registry, "info", **labels) == 1


# Values


def test_every_series_is_there_at_zero_before_the_first_step(registry: CollectorRegistry) -> None:
    CacheSeries(registry).write(_stats(_layer(0), _layer(1)))
    for family in _scrape(registry).values():
        assert family.samples
        if family.type == "counter" and family.samples[0].labels:
            assert {sample.value for sample in family.samples} == {0}


def test_the_values_are_those_of_the_stats(registry: CollectorRegistry) -> None:
    series = CacheSeries(registry)
    for factor in (1, 3):
        counters = {field: factor * (index + 1) for index, field in enumerate(FIELDS)}
        series.write(_stats(_layer(0, **counters), _layer(1, hits=factor)))
    for index, item in enumerate(LAYER_COUNTERS):
        labels = {"layer": "0"} | ({"kind": item.kind} if item.kind else {})
        assert _value(registry, item.name, **labels) == 3 * (index + 1)
    assert _value(registry, "expert_hits_total", layer="1") == 3
    assert _value(registry, "slots", layer="1") == 8
    assert _value(registry, "experts", layer="1") == 32
    assert _value(registry, "steps_with_misses_total") == 9
    assert _value(registry, "slot_bytes") == 1 << 20
    assert _value(registry, "staging_bytes") == 1 << 10
    assert _value(registry, "host_bytes") == 1 << 22
    assert _value(registry, "pinned_bytes") == 1 << 21


def test_the_time_of_the_snapshot_is_told(registry: CollectorRegistry) -> None:
    before = time.time()
    CacheSeries(registry).write(_stats(_layer()))
    assert before <= _value(registry, "snapshot_timestamp_seconds") <= time.time()


# Counters never go down


def test_a_restart_of_the_counters_that_nobody_announced_adds_what_is_new(
    registry: CollectorRegistry,
) -> None:
    series = CacheSeries(registry)
    for hits in (10, 3, 5):
        series.write(_stats(_layer(hits=hits)))
    assert _value(registry, "expert_hits_total", layer="0") == 15


def test_an_announced_restart_loses_nothing_though_the_counters_overtake(
    registry: CollectorRegistry,
) -> None:
    series = CacheSeries(registry)
    series.write(_stats(_layer(hits=10)))
    series.restarted()
    series.write(_stats(_layer(hits=12)))
    assert _value(registry, "expert_hits_total", layer="0") == 22
    assert _value(registry, "steps_with_misses_total") == 18
    assert _value(registry, "slots", layer="0") == 8


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "write", "restart"])), max_size=30)
)
def test_counters_never_go_down_and_end_at_the_sum_of_all_that_was_counted(
    events: list[tuple[int, str]],
) -> None:
    registry = CollectorRegistry()
    series = CacheSeries(registry)
    now = {"hits": 0}
    publisher = MetricsPublisher(lambda: _stats(_layer(hits=now["hits"])), series)
    publisher.publish()
    total, last = 0, 0.0
    for amount, then in events:
        now["hits"] += amount
        total += amount
        if then == "write":
            publisher.publish()
        elif then == "restart":
            with publisher.restarting():
                now["hits"] = 0
        value = _value(registry, "expert_hits_total", layer="0")
        assert value >= last
        last = value
    publisher.publish()
    assert _value(registry, "expert_hits_total", layer="0") == total


# Multiprocess mode


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes prometheus_client believe that it is the process of that name."""
    monkeypatch.setenv(METRICS_FOLDER_VARIABLE, str(tmp_path))

    def become(name: str) -> None:
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: name))

    return become


@pytest.fixture
def collected(process: Callable[[str], None], tmp_path: Path) -> Iterator[CollectorRegistry]:
    """What an API server collects from the folder."""
    process("worker")
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    yield registry
    values.ValueClass.close_all_files()


def test_another_process_reads_the_same_series(collected: CollectorRegistry) -> None:
    CacheSeries().write(_stats(_layer(0, hits=7), _layer(1, hits=8)))
    assert set(_scrape(collected)) == NAMES
    assert _value(collected, "expert_hits_total", layer="1") == 8
    assert _value(collected, "slots", layer="1") == 8
    info = _scrape(collected)[PREFIX + "info"].samples[0].labels
    assert set(info) == {"version", "mode", "policy", "predictor"}, "no label of the process"


def test_a_worker_that_starts_again_in_the_same_folder_goes_on(
    collected: CollectorRegistry, process: Callable[[str], None]
) -> None:
    CacheSeries().write(_stats(_layer(hits=7)))
    process("second")
    CacheSeries().write(replace(_stats(_layer(hits=2)), slot_bytes=5))
    assert _value(collected, "expert_hits_total", layer="0") == 9
    assert _value(collected, "slot_bytes") == 5, "the one that wrote last"
    process("second")  # the same name again, as in a container that was restarted
    CacheSeries().write(_stats(_layer(hits=3)))
    assert _value(collected, "expert_hits_total", layer="0") == 12


class TestMultiprocessModeIsChecked:
    def test_it_is_there(self, process: Callable[[str], None]) -> None:
        process("worker")
        check_multiprocess_mode()

    @pytest.mark.parametrize("folder", [None, ""])
    def test_no_variable(self, folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(METRICS_FOLDER_VARIABLE, raising=False)
        if folder is not None:
            monkeypatch.setenv(METRICS_FOLDER_VARIABLE, folder)
        with pytest.raises(ConfigError) as refused:
            check_multiprocess_mode()
        said = str(refused.value)
        assert said.startswith(
            "'metrics' (--expert-cache-metrics) needs the environment variable "
            "PROMETHEUS_MULTIPROC_DIR: "
        )
        assert "before `vllm serve` starts" in said
        assert "or start with `prefetch-runtime serve`" in said

    def test_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        path.touch()
        monkeypatch.setenv(METRICS_FOLDER_VARIABLE, str(path))
        with pytest.raises(ConfigError, match=f"is '{path}', which is not a folder"):
            check_multiprocess_mode()

    def test_set_too_late(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(METRICS_FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(values, "ValueClass", values.MutexValue)
        with pytest.raises(ConfigError, match="after prometheus_client had been imported"):
            check_multiprocess_mode()


# The thread


class Source:
    """Counters that a test moves."""

    def __init__(self) -> None:
        self.hits = 0
        self.reads: list[float] = []
        self.failure: Exception | None = None

    def read(self) -> RuntimeStats | None:
        self.reads.append(time.monotonic())
        if self.failure is not None:
            raise self.failure
        return _stats(_layer(hits=self.hits))


@pytest.fixture
def publishers() -> Iterator[list[MetricsPublisher]]:
    """Publishers to be closed after the test."""
    started: list[MetricsPublisher] = []
    yield started
    for publisher in started:
        publisher.close()


def _started(
    source: Source,
    registry: CollectorRegistry,
    publishers: list[MetricsPublisher],
    interval_s: float = 0.02,
) -> MetricsPublisher:
    publisher = MetricsPublisher(source.read, CacheSeries(registry), interval_s=interval_s)
    publishers.append(publisher)
    publisher.start()
    return publisher


def _eventually(what: Callable[[], bool], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_the_series_are_there_when_start_returns(
    registry: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    _started(Source(), registry, publishers, interval_s=100)
    assert set(_scrape(registry)) == NAMES


def test_what_was_counted_last_is_published_though_no_step_follows(
    registry: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    source = Source()
    _started(source, registry, publishers)
    source.hits = 41
    _eventually(lambda: _value(registry, "expert_hits_total", layer="0") == 41)


def test_the_counters_are_read_once_an_interval_at_most(
    registry: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    source = Source()
    _started(source, registry, publishers, interval_s=0.1)
    _eventually(lambda: len(source.reads) >= 4)
    by_the_thread = source.reads[1:]
    assert all(b - a >= 0.1 for a, b in pairwise(by_the_thread))


def test_by_default_the_interval_is_a_second(registry: CollectorRegistry) -> None:
    assert MetricsPublisher(Source().read, CacheSeries(registry))._interval_s == 1.0


def test_close_ends_the_thread_at_once_and_may_be_called_again(
    registry: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    before = threading.active_count()
    publisher = _started(Source(), registry, publishers, interval_s=100)
    assert threading.active_count() == before + 1
    begin = time.monotonic()
    publisher.close()
    publisher.close()
    assert time.monotonic() - begin < 5
    assert threading.active_count() == before


def test_close_before_start_is_allowed(registry: CollectorRegistry) -> None:
    MetricsPublisher(Source().read, CacheSeries(registry)).close()


def test_a_failure_is_logged_once_and_ends_the_thread_not_the_process(
    registry: CollectorRegistry,
    publishers: list[MetricsPublisher],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source()
    before = threading.active_count()
    _started(source, registry, publishers)
    with caplog.at_level(logging.ERROR, logger=metrics.__name__):
        source.failure = RuntimeError("the device is gone")
        _eventually(lambda: threading.active_count() == before)
    (record,) = caplog.records
    assert "prefetch_runtime_snapshot_timestamp_seconds stands still" in record.message
    assert "the device is gone" in caplog.text


def test_a_failure_at_the_start_is_the_callers(
    registry: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    source = Source()
    source.failure = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        _started(source, registry, publishers)


# Snapshots of a scheduler


def _step(cache: SmallCache, *rows: Sequence[int]) -> None:
    cache.scheduler.begin_step()
    for layer in cache.scheduler.layers:
        cache.scheduler.fetch(layer.layer_idx, torch.tensor(rows, dtype=torch.int32))


def _scheduler_class(name: str) -> Any:
    if name == "Scheduler":
        from prefetch_runtime.scheduler import Scheduler

        return Scheduler
    pytest.importorskip("triton")
    from prefetch_runtime.device_scheduler import DeviceScheduler

    return DeviceScheduler


@pytest.fixture(params=["Scheduler", "DeviceScheduler"])
def cache(request: pytest.FixtureRequest) -> Iterator[SmallCache]:
    """Two layers, counted by the host or (interpreted) by kernels."""
    cache = small_cache(num_layers=2, scheduler_class=_scheduler_class(request.param))
    cache.scheduler.seal()
    yield cache
    cache.scheduler.close()


def test_a_snapshot_is_what_stats_says(cache: SmallCache) -> None:
    reader = SnapshotReader(cache.scheduler, CPU)
    for rows in ([0, 1], [1, 2]), ([2, 3],), ([4, 5],):
        _step(cache, *rows)
        snapshot = reader.read()
        assert snapshot == cache.scheduler.stats()
    assert snapshot is not None
    assert [layer.steps for layer in snapshot.layers] == [3, 3]
    assert [layer.misses for layer in snapshot.layers] == [6, 6]
    assert [layer.hits for layer in snapshot.layers] == [1, 1]
    expert_bytes = cache.layer().store.layout.payload_bytes
    assert [layer.bytes_copied for layer in snapshot.layers] == [6 * expert_bytes] * 2


def test_a_step_in_which_several_layers_miss_is_one_step_with_misses(cache: SmallCache) -> None:
    seen = []
    for rows in ([0, 1],), ([1, 0],), ([0, 2],), ([2, 0],), ([5, 6],):
        _step(cache, *rows)
        seen.append(cache.scheduler.stats().steps_with_misses)
    assert seen == [1, 1, 2, 2, 3]
    cache.scheduler.reset()
    assert cache.scheduler.stats().steps_with_misses == 0
    _step(cache, [0, 1])
    assert cache.scheduler.stats().steps_with_misses == 1


def test_a_miss_of_the_last_layer_alone_is_a_step_with_misses(cache: SmallCache) -> None:
    _step(cache, [0, 1])
    cache.scheduler.begin_step()
    cache.scheduler.fetch(0, torch.tensor([[0, 1]], dtype=torch.int32))
    cache.scheduler.fetch(1, torch.tensor([[0, 7]], dtype=torch.int32))
    assert cache.scheduler.stats().steps_with_misses == 2


def test_a_wide_step_with_absent_experts_is_a_step_with_misses(cache: SmallCache) -> None:
    everything = torch.arange(8, dtype=torch.int32).reshape(4, 2)
    for _ in range(2):
        cache.scheduler.begin_step()
        assert not cache.scheduler.fits(0, everything)
        for _ in cache.scheduler.expert_waves(0, everything):
            pass
    assert cache.scheduler.stats().steps_with_misses == 2


def test_start_metrics_publishes_a_scheduler_and_goes_on_over_a_reset(
    cache: SmallCache, collected: CollectorRegistry, publishers: list[MetricsPublisher]
) -> None:
    _step(cache, [0, 1])
    publisher = start_metrics(cache.scheduler, CPU)
    publishers.append(publisher)
    _step(cache, [1, 2])
    with publisher.restarting():
        cache.scheduler.reset()
    _step(cache, [1, 2])
    publisher.publish()
    assert _value(collected, "expert_hits_total", layer="1") == 1
    assert _value(collected, "expert_misses_total", layer="1") == 5
    assert _value(collected, "steps_total", layer="1") == 3


class OnDevice:
    """A scheduler with one counter, on a GPU."""

    def __init__(self, counter: torch.Tensor) -> None:
        self.counter = counter

    def counter_tensors(self) -> Sequence[torch.Tensor]:
        return (self.counter,)

    def stats_from(self, copies: Sequence[torch.Tensor]) -> RuntimeStats:
        return _stats(_layer(hits=int(copies[0][0])))


@pytest.mark.gpu
def test_on_a_gpu_a_snapshot_follows_the_stream_and_the_stepping_thread_waits_for_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counter = torch.zeros(16, dtype=torch.int64, device=device)
    found: list[RuntimeStats | None] = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        reader = SnapshotReader(OnDevice(counter), device)
        reader.read()
        counter.add_(0)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        counter.fill_(5)
        thread = threading.Thread(target=lambda: found.append(reader.read()))
        thread.start()
        begin = time.monotonic()
        for _ in range(100):
            counter.add_(0)
        launched_s = time.monotonic() - begin
        assert not found, "the copy waits for what was on the stream before it"
        thread.join()
    assert launched_s < 0.2
    assert found[0] is not None
    assert found[0].layers[0].hits == 5


@pytest.mark.gpu
def test_on_a_gpu_a_stream_that_is_being_captured_is_left_alone() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counter = torch.ones(16, dtype=torch.int64, device=device)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        reader = SnapshotReader(OnDevice(counter), device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        assert reader.read() is None
        counter.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    snapshot = reader.read()
    assert snapshot is not None
    assert snapshot.layers[0].hits == 2


# The dashboard and the page


def _names_in(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}[a-z_]+", text))


def test_the_dashboard_asks_for_series_that_exist() -> None:
    path = ROOT / "docs" / "grafana" / "expert-cache.json"
    dashboard = json.loads(path.read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    asked = _names_in(" ".join(queries))
    assert asked <= NAMES
    assert _names_in(json.dumps(dashboard["templating"])) == {f"{PREFIX}info"}, "its variables"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_dashboard_asks_for_labels_that_its_series_have() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "expert-cache.json").read_text())
    of_layers = {
        PREFIX + s.name: {"layer", *(["kind"] if s.kind else [])}
        for s in (*LAYER_COUNTERS, *LAYER_GAUGES)
    }
    checked = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            names = _names_in(target["expr"])
            selected = re.findall(r"(\w+)=~?\"", target["expr"])
            grouped = re.findall(r"by \((\w+)\)", target["expr"])
            for label in {*selected, *grouped} - {"instance"}:  # this is Prometheus's own
                assert any(label in of_layers.get(name, ()) for name in names), target["expr"]
                checked.add(label)
            shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            assert shown == set(grouped), "a line for each group, named by it"
    assert checked == {"layer", "kind"}


def test_the_dashboard_divides_rates_by_rates() -> None:
    text = (ROOT / "docs" / "grafana" / "expert-cache.json").read_text()
    for series in (*LAYER_COUNTERS, *COUNTERS):
        for use in re.findall(rf"(\w+)\({PREFIX}{series.name}", text):
            assert use in ("rate", "increase"), f"{series.name} is a counter"


def test_the_page_lists_every_series_once_with_its_labels() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(rf"^\| `({PREFIX}[a-z_]+)` \|([^|]*)\|", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(NAMES)
    labels = {PREFIX + series.name: "" for series in (*COUNTERS, *GAUGES, SNAPSHOT_TIME)}
    labels |= {PREFIX + series.name: "`layer`" for series in (*LAYER_COUNTERS, *LAYER_GAUGES)}
    labels |= {PREFIX + s.name: "`layer`, `kind`" for s in LAYER_COUNTERS if s.kind}
    labels[PREFIX + INFO.name] = "`version`, `mode`, `policy`, `predictor`"
    assert {name: told.strip() for name, told in rows} == labels


def test_the_command_on_the_page_starts_a_server_with_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    (command,) = re.findall(r"^ +prefetch-runtime (serve .*)$", page, re.MULTILINE)
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: executed.append(arguments))
    monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
    monkeypatch.setattr(sys, "argv", ["prefetch-runtime", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    assert executed[0][3:6] == ["prefetch_runtime.vllm.serve", "--metrics", "serve"]
    assert json.loads(executed[0][-1])["prefetch_runtime"]["metrics"] is True


def test_without_the_option_a_server_has_no_folder_for_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: executed.append(arguments))
    monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
    options = ["--moe-expert-cache-size", "8"]
    monkeypatch.setattr(sys, "argv", ["prefetch-runtime", "serve", "Qwen/Qwen3-30B-A3B", *options])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--metrics" not in executed[0]
