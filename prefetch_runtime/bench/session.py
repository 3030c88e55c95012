"""One measurement: every case after the other, rows as they come, whatever happens to a case."""

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefetch_runtime.bench import servers
from prefetch_runtime.bench.cases import Case, cases_of, check_lengths, engine_spec, refusal
from prefetch_runtime.bench.child import Interrupted, Outcome, Turn, end_all, end_kept, run_case
from prefetch_runtime.bench.config import BenchConfig, Server
from prefetch_runtime.bench.environment import has_gpu, identity
from prefetch_runtime.bench.interrupts import interrupts
from prefetch_runtime.bench.results import (
    Row,
    RowStore,
    key_of,
    measured_row,
    named,
    unmeasured_row,
    with_parts,
)
from prefetch_runtime.bench.routing import make_routing, rates_for, save_routing
from prefetch_runtime.config import ConfigError
from prefetch_runtime.model_shape import load_config, most_positions, sources
from prefetch_runtime.model_sizes import ModelSizes, model_sizes
from prefetch_runtime.plan import Gpu, Planner, Workload
from prefetch_runtime.shapes import SHAPES, shape_config
from prefetch_runtime.trace import Trace

MAX_TEXT_BYTES = 64 << 20
"""Of a file that prompts are cut from."""

NOT_MEASURED = (
    "Whether the outputs are right: tests/engine compares them, a timed run does not.",
    "Requests that come and go: each batch starts together, and decodes side by side.",
    "Time per token is that of steps in which every sequence decodes; steps that also read prompts "
    "count for the first token only.",
    "HTTP, tokenising and detokenising, except for a server, whose tokens/s include its prompts.",
    "Energy, several GPUs, a link that others use at the same time.",
    "What overhead consists of: it is the step less the resident engine's step and less the stall "
    "that the runtime counts.",
)
_INVENTED = (
    "The quality of routing: weights are random, so {0}.",
    "Guesses of a predictor are the trace's, at the accuracy that it was made with.",
)


@dataclass(slots=True)
class Report:
    """What a session found, finished or not."""

    config: BenchConfig
    environment: dict[str, Any]
    model: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Where figures and plots were written."""
    not_measured: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def link_gbs(self) -> float | None:
        """The link as doctor measured it; None on a CPU."""
        gpu = (self.environment.get("machine") or {}).get("gpu") or {}
        link: float | None = gpu.get("link_gbs")
        return link

    def finished_rows(self) -> list[Row]:
        """The rows with their step cut into parts."""
        return with_parts(self.rows, self.link_gbs)


class Session:
    """Runs a configuration; `report` is whole at every moment."""

    def __init__(
        self,
        config: BenchConfig,
        environment: dict[str, Any],
        folder: Path,
        *,
        fresh: bool = False,
        retry: bool = False,
        any_code: bool = False,
        minutes: float | None = None,
        on_case: Callable[[str], None] = lambda _: None,
        on_row: Callable[[Row], None] = lambda _: None,
    ) -> None:
        """Raises ConfigError or ModelError for what can be known to be wrong before anything runs.

        Args:
            folder: rows, logs and the report go there.
            minutes: no case is started, or goes on, beyond so much time.
        """
        self.config = config
        self.folder = folder
        self._retry = retry
        self._one_at_a_time = threading.RLock()
        self._on_case, self._on_row = on_case, on_row
        self._deadline = None if minutes is None else time.monotonic() + minutes * 60
        self._gpu = has_gpu(environment)
        # A server knows its model; ours is looked at only where an engine of ours loads it.
        self.declared = _model_config(config) if config.engines else {}
        sizes = model_sizes(self.declared) if config.engines else None
        self.cases = [] if sizes is None else cases_of(config, sizes)
        self._positions = most_positions(self.declared)
        if self.cases:
            check_lengths(config, self._positions)
        self.trace: Trace | None = None if sizes is None else make_routing(config, sizes)
        self._sizes = sizes
        _check_prompts(config)
        self.store = RowStore(folder, identity(environment), fresh=fresh, any_code=any_code)
        self._random_weights = config.model in SHAPES
        self._digests = {
            "model": _digest(json.dumps(self.declared, sort_keys=True).encode()),
            "routing": "model" if self.trace is None else _digest(self.trace.topk.tobytes()),
        }
        self.report = Report(config, environment, _about(config, sizes))
        self._describe()

    @property
    def sizes(self) -> ModelSizes:
        """Of the model that the engines load."""
        assert self._sizes is not None, "no engine, no model"
        return self._sizes

    def run(self) -> Report:
        """Measure what is not measured yet. Ctrl-C leaves a report of what there is."""
        with interrupts.once(end_all):
            return self._measure()

    def _measure(self) -> Report:
        config = self.config
        with tempfile.TemporaryDirectory(prefix="prefetch-runtime-bench-") as scratch:
            try:
                with self._model_and_routing(Path(scratch)) as (model, routing):
                    for some in batched(self.cases, config.side_by_side):
                        self._run_cases(some, model, routing)
                self._run_servers()
            except KeyboardInterrupt:
                self.report.interrupted = True
                self.report.notes.append(
                    "interrupted; run the same command again to measure what is missing"
                )
                self._fill_in("interrupted before it was measured")
        self._order()
        codes = sorted({row["identity"]["code"] for row in self.report.rows if "identity" in row})
        if len(codes) > 1:
            self.report.notes.append(f"rows of different code stand together: {', '.join(codes)}")
        if self.store.failure is not None:
            self.report.notes.append(f"{self.store.failure}; these rows are in this output only")
        self.store.close()
        return self.report

    def _run_cases(self, cases: Sequence[Case], model: str, routing: Path | None) -> None:
        """Cases that load side by side; each is timed alone."""
        if self.config.side_by_side == 1:
            self._run_case(cases[0], model, routing, None)
            return
        with tempfile.TemporaryDirectory(prefix="prefetch-runtime-turns-") as scratch:
            turns = []
            for index in range(len(cases)):
                folder = Path(scratch, str(index))
                folder.mkdir()
                turns.append(Turn(folder, self._deadline))
            pool = ThreadPoolExecutor(len(cases))
            with ExitStack() as ending:
                for _ in range(2):  # Ctrl-C may come in the midst of the first
                    ending.callback(_end_turns, turns, pool)
                running = [
                    pool.submit(self._run_case, case, model, routing, turn)
                    for case, turn in zip(cases, turns, strict=True)
                ]
                self._take_turns(turns, running)

    def _take_turns(self, turns: Sequence[Turn], running: "Sequence[Future[None]]") -> None:
        def is_ready(index: int) -> bool:
            return turns[index].has_loaded or running[index].done()

        while not all(is_ready(index) for index in range(len(turns))):
            wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            time.sleep(0.05)
        for turn, case in zip(turns, running, strict=True):
            turn.go()
            case.result()

    def _run_case(self, case: Case, model: str, routing: Path | None, turn: Turn | None) -> None:
        keys = {batch: self._key(case, batch) for batch in self.config.batches}
        missing = []
        with self._one_at_a_time:
            for batch, key in keys.items():
                found = self.store.find(key, retry=self._retry)
                if found is None:
                    missing.append(batch)
                else:
                    self._take(found)
        if not missing:
            return
        why_not = self._refusal(case)
        limit_s = self._limit(case)
        if why_not is not None:
            outcome = Outcome("refused", why_not)
        elif limit_s is None:
            outcome = Outcome("not run", "no time was left; run the same command again")
        else:
            self._on_case(f"{case.name}, batch {', '.join(map(str, missing))}")
            spec = self._spec(case, model, routing, missing)
            log = self.folder / f"{case.name.replace(':', '-')}.log"
            try:
                outcome = self._guarded(spec, limit_s, log, routing, turn)
            except Interrupted as interrupt:
                for batch in missing:
                    self._finish(case, batch, keys[batch], interrupt.outcome)
                raise
            if outcome.status == "timeout" and turn is not None and turn.ended.is_set():
                outcome = replace(outcome, status="not run", reason="interrupted")
            elif outcome.status == "timeout" and self._is_cut(case, limit_s):
                # Not its own limit but the session's: the next run tries it again.
                stage = str(outcome.reason).rpartition(" while ")[2]
                cut = f"cut short while {stage}: no time was left; run the same command again"
                outcome = replace(outcome, status="not run", reason=cut)
        with self._one_at_a_time:
            for batch in missing:
                self._finish(case, batch, keys[batch], outcome)

    def _is_cut(self, case: Case, limit_s: float) -> bool:
        """Whether a case that was ended had reached the session's limit, not its own."""
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return over or limit_s < self.config.limit_of(case.engine)

    def _guarded(
        self,
        spec: dict[str, Any],
        limit_s: float,
        log: Path,
        routing: Path | None,
        turn: Turn | None,
    ) -> Outcome:
        """A case whose files cannot be written is a row, too."""
        environment = {} if routing is None else {"PREFETCH_RUNTIME_ROUTING": str(routing)}
        if spec["random_weights"] or Path(self.config.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"  # all is here: nothing waits for a network
        versions = (self.report.environment.get("machine") or {}).get("versions") or {}
        if spec["offloads"] and str(versions.get("vllm")).startswith("0.26."):
            # That version has its offloaders in the V1 runner only.
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        try:
            log.unlink(missing_ok=True)
            return run_case(spec, limit_s=limit_s, log=log, environment=environment, turn=turn)
        except OSError as error:
            return Outcome("failed", f"the case could not be started: {error.strerror or error}")

    def _finish(self, case: Case, batch: int, key: str, outcome: Outcome) -> None:
        measured = next((e for e in outcome.batches if e["batch"] == batch), None)
        if measured is None or outcome.loaded is None:
            status = outcome.status if outcome.status != "ok" else "failed"
            reason = outcome.reason or "the engine ended without measuring this batch"
            row = unmeasured_row(case, batch, key, status, reason)
        else:
            row = {
                **named(case, batch, key),
                "status": "ok",
                "graphs": self._gpu and case.engine.has_graphs,
                **measured_row(outcome.loaded, measured, is_cache=case.engine.is_cache),
                **self._predicted(case, batch),
            }
        row["case_s"] = outcome.seconds
        self._take(row if row["status"] == "not run" else self.store.add(row))

    def _predicted(self, case: Case, batch: int) -> dict[str, Any]:
        """What `prefetch-runtime plan` says of this case, from config.json, link and routing."""
        gpu = (self.report.environment.get("machine") or {}).get("gpu") or {}
        if not gpu.get("link_gbs") or not gpu.get("memory_gbs"):
            return {}
        if case.engine.base not in ("full", "eager", "resident"):
            return {}
        workload = Workload(
            context=self.config.prompt_tokens + self.config.new_tokens,
            batch=batch,
            mode="full" if case.engine.has_graphs else "eager",
            staging_slots=self.config.staging_slots,
        )
        planner = Planner(
            self.sizes,
            Gpu(
                name=gpu["name"],
                gib=gpu["total_bytes"] / 2**30,
                memory_gbs=gpu["memory_gbs"],
                link_gbs=gpu["link_gbs"],
                memory_origin="measured",
                link_origin="measured",
            ),
            workload,
            rates_for(self.trace, self.config, self.sizes, random_weights=self._random_weights)(
                batch
            ),
        )
        estimate = planner.estimate(case.slots or self.sizes.num_experts)
        return {
            "plan_step_ms": batch / estimate.tokens_per_s * 1e3,
            "plan_best_ms": batch / estimate.tokens_per_s_at_best * 1e3,
            "plan_hit_rate": estimate.hit_rate,
        }

    def _limit(self, case: Case) -> float | None:
        """Seconds that a case may take now; None: too few to start it."""
        limit = self.config.limit_of(case.engine)
        if self._deadline is None:
            return limit
        left = self._deadline - time.monotonic()
        return None if left < min(30.0, limit) else min(limit, left)

    def _run_servers(self) -> None:
        for server in self.config.servers:
            keys = {b: _digest(f"{server!r} {self._work()} {b}".encode()) for b in self._batches()}
            reached: Server | str | None = None
            for batch, key in keys.items():
                found = self.store.find(key, retry=True)
                row: Row = {"engine": server.name, "slots": None, "batch": batch, "key": key}
                if found is not None:
                    self._take(found)
                    continue
                self._on_case(f"{server.name} at {server.url}, batch {batch}")
                reached = reached or servers.reach(server)
                if isinstance(reached, str):
                    row |= {"status": "failed", "reason": reached}
                else:
                    log = self.folder / f"server-{_digest(server.name.encode())}.log"
                    row |= servers.measure(
                        reached, self.config, batch, limit_s=self.config.limit_s, log=log
                    )
                self._take(self.store.add(row))

    def _batches(self) -> list[int]:
        return self.config.batches

    def _work(self) -> str:
        config = self.config
        return f"{config.prompt_tokens} {config.new_tokens} {config.repeats} {config.seed}"

    def _take(self, row: Row) -> None:
        self.report.rows.append(row)
        self._on_row(row)

    def _fill_in(self, reason: str) -> None:
        """A row for everything that was not reached."""
        have = {(row["engine"], row["slots"], row["batch"]) for row in self.report.rows}
        for case in self.cases:
            for batch in self.config.batches:
                if (case.engine.name, case.slots, batch) not in have:
                    key = self._key(case, batch)
                    found = self.store.find(key) or unmeasured_row(
                        case, batch, key, "not run", reason
                    )
                    self.report.rows.append(found)

    def _order(self) -> None:
        """By case as configured, then by batch, however they came."""
        order = {(c.engine.name, c.slots): i for i, c in enumerate(self.cases)}
        self.report.rows.sort(
            key=lambda row: (
                order.get((row["engine"], row["slots"]), len(order)),
                row["engine"],
                row["batch"],
            )
        )

    def _refusal(self, case: Case) -> str | None:
        return refusal(case, has_gpu=self._gpu, compiled=self.config.compile, sizes=self.sizes)

    def _key(self, case: Case, batch: int) -> str:
        if self._refusal(case) is not None:
            return _digest(f"{case.name} {batch} {self._digests} {self._gpu}".encode())
        spec = self._spec(case, "", None, [batch])
        return key_of(spec, batch, self._digests)

    def _spec(
        self, case: Case, model: str, routing: Path | None, batches: list[int]
    ) -> dict[str, Any]:
        spec = engine_spec(
            case,
            self.config,
            self.sizes,
            model=model,
            vocabulary=_vocabulary(self.declared),
            random_weights=self._random_weights,
            has_gpu=self._gpu,
            routing=Path("given") if self.trace is not None and routing is None else routing,
            batches=batches,
            positions=self._positions,
        )
        return spec

    @contextmanager
    def _model_and_routing(self, scratch: Path) -> Iterator[tuple[str, Path | None]]:
        """Where vLLM finds the model, and the worker its routing."""
        model = self.config.model
        if self._random_weights:
            folder = scratch / model
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(self.declared))
            model = str(folder)
        routing = None
        if self.trace is not None:
            routing = scratch / "routing.npz"
            save_routing(self.trace, max(self.config.batches), routing)
        yield model, routing

    def _describe(self) -> None:
        report, config = self.report, self.config
        report.not_measured = list(NOT_MEASURED)
        if config.routing != "model":
            kind = {
                "calibrated": "routing is a generated trace as local as Qwen3-30B-A3B's is "
                "published to be",
                "uniform": "routing is a generated trace without locality",
            }.get(config.routing, f"routing is the trace {config.routing}")
            report.not_measured += [
                f"What the model would route or say: in decode steps {kind}, the same for every "
                "engine.",
                _INVENTED[1],
            ]
        elif self._random_weights:
            report.not_measured.append(_INVENTED[0].format("a router's choice has no locality"))
        if self.store.ignored:
            report.notes.append(
                f"{self.store.ignored} rows in {self.folder} are of another machine or other code; "
                "they were left alone"
            )
        machine = report.environment.get("machine") or {}
        if machine.get("failure"):
            report.notes.append(f"the machine could not be examined: {machine['failure']}")
        gpu = machine.get("gpu") or {}
        if gpu and gpu["free_bytes"] < 0.95 * gpu["total_bytes"]:
            report.notes.append(
                f"{(gpu['total_bytes'] - gpu['free_bytes']) / 2**30:.1f} GiB of the GPU were taken "
                "before anything was started: something else is running on it"
            )


def _end_turns(turns: Sequence[Turn], pool: ThreadPoolExecutor) -> None:
    """End the cases that still run and those that have been timed, and wait for them."""
    for turn in turns:
        turn.ended.set()
    pool.shutdown()
    end_kept(turns)


def _model_config(config: BenchConfig) -> dict[str, Any]:
    if config.model in SHAPES and not Path(config.model).is_dir():
        try:
            return shape_config(config.model, layers=config.layers)
        except ValueError as error:
            raise ConfigError(f"layers: {error}") from None
    if config.layers is not None:
        raise ConfigError(
            f"layers: only a named shape can be cut ({', '.join(SHAPES)}), not {config.model!r}"
        )
    return load_config(config.model)


def batched(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    """The cases, so many at a time."""
    for start in range(0, len(cases), size):
        yield cases[start : start + size]


def _check_prompts(config: BenchConfig) -> None:
    """Raise ConfigError for a text that no engine could read."""
    if config.prompt_file is None or not config.engines:
        return
    if config.model in SHAPES:
        raise ConfigError(f"prompt_file: the shape {config.model!r} has no tokenizer; leave it out")
    path = Path(config.prompt_file)
    if not path.is_file():
        raise ConfigError(f"prompt_file: there is no file {config.prompt_file!r}")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ConfigError(f"prompt_file: more than {MAX_TEXT_BYTES >> 20} MiB of text")


def _vocabulary(declared: dict[str, Any]) -> int:
    for source in sources(declared):
        size = source.get("vocab_size")
        if isinstance(size, int) and size > 32:
            return size
    raise ConfigError("the config.json has no vocab_size of at least 33")


def _about(config: BenchConfig, sizes: ModelSizes | None) -> dict[str, Any]:
    if sizes is None:
        return {"name": config.model}
    return {
        "name": config.model,
        "layers": sizes.num_layers,
        "moe_layers": sizes.num_moe_layers,
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
        "expert_bytes": sizes.expert_bytes,
        "experts_gib": sizes.experts_bytes / 2**30,
        "of_layers": SHAPES[config.model]["num_hidden_layers"] if config.model in SHAPES else None,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
