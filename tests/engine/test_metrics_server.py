"""`prefetch-runtime serve` with metrics: /metrics says what the worker counts; Ctrl-C ends it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from prefetch_runtime.metrics import COUNTERS, GAUGES, LAYER_COUNTERS, LAYER_GAUGES, PREFIX
from prefetch_runtime.stats import RuntimeStats
from tests.engine.conftest import BATCHES, MODEL, ROOT
from tests.engine.test_processes import _belongs, _still_running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Server:
    """A running `prefetch-runtime serve`, in a session of its own."""

    def __init__(self, options: list[str], environment: dict[str, str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-c", "from prefetch_runtime.cli import main; main()"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "serve", MODEL, "--host", "127.0.0.1", "--port", str(port), *options],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def call(self, path: str, body: Any = None) -> str:
        """The answer to a GET, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = answer.read().decode()
        return text

    def wait_until_ready(self, patience_s: float = 300) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self.call("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"no server:\n{self.log.read_text(errors='replace')[-6000:]}")
                time.sleep(0.3)

    def complete(self, prompt: Any, max_tokens: int) -> int:
        """Tokens that were generated."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = json.loads(self.call("/v1/completions", {**body, "ignore_eos": True}))
        tokens: int = answer["usage"]["completion_tokens"]
        return tokens

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """A request whose answer has begun; who calls reads and closes it."""
        body = {"model": MODEL, "prompt": "import", "max_tokens": max_tokens, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120)
        assert answer.readline().startswith(b"data: ")
        return answer

    def worker_stats(self) -> RuntimeStats:
        (stats,) = json.loads(self.call("/collective_rpc", {"method": "prefetch_stats"}))["results"]
        return RuntimeStats.from_dict(stats)

    def scrape(self) -> tuple[list[Metric], Scrape]:
        """The cache's metrics, and each sample by name and labels."""
        families = [
            family
            for family in text_string_to_metric_families(self.call("/metrics"))
            if family.name.startswith(PREFIX)
        ]
        samples = [sample for family in families for sample in family.samples]
        values = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
        assert len(values) == len(samples), "a series twice"
        return families, values

    def scrape_after(self, moment: float) -> tuple[list[Metric], Scrape]:
        """The first scrape whose counters were read after `moment`, Unix time."""
        deadline = time.monotonic() + 20
        while True:
            found = self.scrape()
            if found[1][(PREFIX + "snapshot_timestamp_seconds", ())] > moment:
                # That scrape may have read the counters' file before the time's: the next has not.
                return self.scrape()
            assert time.monotonic() < deadline, "the counters are not read any more"
            time.sleep(0.1)

    def processes(self) -> list[int]:
        return [pid for pid in psutil.pids() if _belongs(pid, self.process.pid)]

    def kill(self) -> None:
        """Whatever is left of it."""
        for pid in _still_running(self.process.pid, patience_s=0):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _as_scraped(stats: RuntimeStats) -> Scrape:
    """What /metrics should say, given the worker's counters."""
    expected: Scrape = {}
    for layer in stats.layers:
        for series in (*LAYER_COUNTERS, *LAYER_GAUGES):
            kind = [("kind", series.kind)] if series.kind else []
            labels = (*kind, ("layer", str(layer.layer_idx)))
            expected[(PREFIX + series.name, labels)] = getattr(layer, series.field)
    for series in (*COUNTERS, *GAUGES):
        expected[(PREFIX + series.name, ())] = getattr(stats, series.field)
    return expected


def _observe(server: Server, folder: Path) -> dict[str, Any]:
    """One server's life, seen from outside."""
    seen: dict[str, Any] = {}
    server.wait_until_ready()
    seen["folders"] = [path.name for path in folder.iterdir() if "metrics" in path.name]
    seen["before"] = server.scrape()[1]
    prompts = [prompt for batch in BATCHES[:3] for prompt in batch["prompts"]]
    seen["tokens"] = [server.complete(prompt, 8) for prompt in prompts]
    seen["stats"] = server.worker_stats()
    now = time.time()
    seen["scrapes"] = [server.scrape_after(now) for _ in range(4)]
    server.call("/collective_rpc", {"method": "prefetch_reset"})
    server.complete(BATCHES[0]["prompts"][0], 8)
    seen["stats after a reset"] = server.worker_stats()
    now = time.time()
    seen["after a reset"] = server.scrape_after(now)[1]
    seen["processes"] = len(server.processes())

    with server.stream(max_tokens=480):  # and its client stays
        begin = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does
        left = _still_running(server.process.pid, patience_s=60)
        seen["seconds to end"] = time.monotonic() - begin
    seen["left"] = left
    seen["folders left"] = [path.name for path in folder.iterdir() if "metrics" in path.name]
    return seen


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n}-api-server")
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    engine_environment: dict[str, str],
) -> dict[str, Any]:
    """What was seen of a server with one API process, and with two."""
    folder = tmp_path_factory.mktemp("metrics-server")
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {
        **engine_environment,
        "TMPDIR": str(temporary),
        "VLLM_SERVER_DEV_MODE": "1",  # the worker's own counters, over HTTP
    }
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    options = [
        *("--moe-expert-cache-size", "8", "--expert-cache-metrics", "--enforce-eager"),
        *("--max-model-len", "512", "--gpu-memory-utilization", "0.2"),
        *("--api-server-count", str(request.param)),
    ]
    running = Server(options, environment, folder / "log")
    try:
        return {"api servers": request.param, **_observe(running, temporary)}
    finally:
        running.kill()


def test_every_series_is_there_at_zero_before_the_first_request(server: dict[str, Any]) -> None:
    counters = {key: value for key, value in server["before"].items() if key[0].endswith("_total")}
    assert len(counters) == 8 * len(LAYER_COUNTERS) + len(COUNTERS)
    assert set(counters.values()) == {0}


def test_the_values_are_the_workers_counters_whichever_api_server_answers(
    server: dict[str, Any],
) -> None:
    stats: RuntimeStats = server["stats"]
    assert server["tokens"] == [8] * 6
    assert stats.total("misses") > 0
    assert stats.total("hits") > 0
    assert stats.total("evictions") > 0
    assert 0 < stats.steps_with_misses <= max(layer.steps for layer in stats.layers)
    for _, values in server["scrapes"]:
        told = {name: value for name, value in values.items() if name in _as_scraped(stats)}
        assert told == _as_scraped(stats)


def test_types_and_labels_are_as_they_should_be(server: dict[str, Any]) -> None:
    families, values = server["scrapes"][0]
    types = {family.name: family.type for family in families}
    assert set(types.values()) == {"counter", "gauge"}
    assert all(
        (types[name.removesuffix("_total")] == "counter") == name.endswith("_total")
        for name, _ in values
    )
    assert {label for _, labels in values for label, _ in labels} == {
        *("layer", "kind", "version", "mode", "policy", "predictor")
    }
    ((_, info),) = [key for key in values if key[0] == PREFIX + "info"]
    assert dict(info).keys() == {"version", "mode", "policy", "predictor"}
    assert dict(info)["mode"] == "eager"


def test_after_a_reset_of_the_cache_the_counters_go_on(server: dict[str, Any]) -> None:
    before, since = _as_scraped(server["stats"]), _as_scraped(server["stats after a reset"])
    for (name, labels), value in server["after a reset"].items():
        if name.endswith("_total"):
            assert value == before[name, labels] + since[name, labels], (name, labels)
    assert sum(value for (name, _), value in since.items() if name.endswith("_total")) > 0


def test_one_private_folder_while_it_runs_and_none_afterwards(server: dict[str, Any]) -> None:
    (folder,) = server["folders"]
    assert folder.startswith("prefetch-runtime-metrics-")
    assert server["folders left"] == []


def test_ctrl_c_amid_a_request_ends_it_in_under_10_seconds_with_no_process_left(
    server: dict[str, Any],
) -> None:
    assert server["processes"] >= 2 + server["api servers"]
    assert server["left"] == []
    assert server["seconds to end"] < 10
