"""The bench without engines: what is started, what is kept, what is said."""

import copy
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from prefetch_runtime import cli
from prefetch_runtime.bench import child, environment, plots, report, servers
from prefetch_runtime.bench import session as sessions
from prefetch_runtime.bench.cases import (
    Case,
    Layers,
    cases_of,
    check_lengths,
    divide_layers,
    engine_spec,
    needed_tokens,
    refusal,
)
from prefetch_runtime.bench.child import Outcome, plain, run_process
from prefetch_runtime.bench.config import (
    QUICK,
    BenchConfig,
    load_config_file,
    parse_engine,
    slot_counts,
)
from prefetch_runtime.bench.results import (
    RowStore,
    break_even,
    key_of,
    measured_row,
    metrics_ratios,
    with_parts,
)
from prefetch_runtime.bench.routing import make_routing, rates_for, save_routing
from prefetch_runtime.bench.session import Session
from prefetch_runtime.config import ConfigError
from prefetch_runtime.model_sizes import ModelSizes, model_sizes
from prefetch_runtime.shapes import shape_config
from prefetch_runtime.trace import save_trace

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "tiny-moe")
H200: dict[str, Any] = {
    "code": "abc",
    "commit": None,
    "command": ["prefetch-runtime", "bench", "x.toml"],
    "machine": {
        "driver": "580",
        "versions": {"torch": "2.11", "vllm": "0.26.0"},
        "gpu": {
            "name": "NVIDIA H200",
            "total_bytes": 141 << 30,
            "free_bytes": 140 << 30,
            "link_gbs": 50.0,
            "memory_gbs": 4000.0,
        },
    },
}
CPU: dict[str, Any] = {"code": "abc", "command": [], "machine": {"gpu": None, "versions": {}}}


def config_of(**changes: Any) -> BenchConfig:
    base: dict[str, Any] = {"model": "qwen3-30b-a3b", "layers": 16, "batches": [1, 8]}
    return BenchConfig.from_mapping({**base, **changes})


@pytest.fixture
def sizes() -> ModelSizes:
    return model_sizes(shape_config("qwen3-30b-a3b", layers=16))


class TestConfiguration:
    def test_the_shipped_file_is_valid(self) -> None:
        config = BenchConfig.from_mapping(
            load_config_file(ROOT / "benchmarks" / "qwen3-30b-a3b.toml")
        )
        assert config.layers == 16
        assert config.batches == [1, 2, 4, 8, 16, 32]
        assert {"resident", "uva", "offloader", "full", "full+next_gate"} <= set(config.engines)

    def test_quick_is_valid(self) -> None:
        assert BenchConfig.from_mapping(QUICK).model == "models/tiny-moe"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"batchs": [1]}, "unknown setting 'batchs'; did you mean 'batches'"),
            ({"batches": []}, "batches: name at least one"),
            ({"batches": [1, 0]}, "batches: value 2 must be at least 1, got 0$"),
            ({"batches": [2048]}, "2048 is more than 1024"),
            ({"batches": [1, 1]}, "named twice"),
            ({"batches": "1"}, r"batches: must be a list in \[ \], got '1'$"),
            ({"staging_slots": 1}, "staging_slots: must be at least 2 or 'auto', got 1$"),
            ({"staging_slots": 9999}, "staging_slots: must be at most 1024 or 'auto', got 9999$"),
            ({"staging_slots": "x"}, "staging_slots: must be a whole number or 'auto', got 'x'$"),
            ({"prefetch_budget_mib": -1}, "must be at least 0 or 'auto', got -1$"),
            ({"prefetch_budget_mib": []}, "must be a number or 'auto', got "),
            ({"slots": [8, 1.5]}, "slots: value 2 must be a number of experts or a share such as "),
            ({"slots_of": {"full": 8}}, r"slots_of.full: must be a list in \[ \], got 8$"),
            ({"slots_of": {"full": [[]]}}, "slots_of.full: value 1 must be a number of experts or"),
            ({"limits_s": {"full": -1}}, "limits_s.full: must be more than 0, got -1$"),
            ({"limits_s": 3}, "limits_s: must be a table, a line `name = value` for each, got 3$"),
            ({"seconds_per_batch": float("inf")}, "must be a finite number, got inf$"),
            ({"new_tokens": True}, "new_tokens: must be a whole number, got true$"),
            ({"prompt_tokens": 1 << 21}, "prompt_tokens: must be at most 1048576, got 2097152$"),
            ({"compile": "yes"}, "compile: must be true or false, got 'yes'$"),
            ({"dtype": "fp8"}, "dtype: must be 'auto', 'bfloat16', .*, got 'fp8'$"),
            ({"model": ""}, "model: must not be empty, got ''$"),
            ({"model": "x" * 1001}, "model: must be at most 1000 characters long, got 'xxx"),
            ({"routing": 3}, "routing: must be text in quotes, got 3$"),
            ({"engines": ["full", 3]}, "engines: value 2 must be text in quotes, got 3$"),
            ({"servers": [{}]}, "servers: name of server 1 is missing$"),
            ({"servers": [3]}, "servers: server 1 must be a table, .*, got 3$"),
            ({"slots": ["25 percent"]}, "neither a number of experts nor a share"),
            ({"slots": ["0%"]}, "neither a number"),
            ({"slots": [-1]}, "neither a number"),
            ({"engines": ["residnet"]}, "unknown engine 'residnet'; did you mean 'resident'"),
            ({"engines": ["full+next_gat"]}, "did you mean 'next_gate'"),
            ({"engines": ["uva+metrics"]}, "only eager, segmented, full take a 'metrics'"),
            ({"engines": []}, "name at least one engine"),
            ({"limits_s": {"uwa": 3}}, "did you mean 'uva'"),
            ({"limit_s": float("nan")}, "limit_s"),
            ({"limit_s": -1.0}, "limit_s"),
            ({"slots_of": {"ful": [1]}}, "did you mean 'full'"),
            ({"slots_of": {"uva-all": [1]}}, "'uva-all' has no slots to choose"),
            ({"trust_remote_code": True}, "unknown setting 'trust_remote_code'"),
            (
                {"servers": [{"name": "a", "url": "file:///etc/passwd", "model": "m"}]},
                "servers: url of server 1 must look like http://host:port, got 'file:///etc/passwd",
            ),
            (
                {"servers": [{"name": "a", "url": "http://a", "model": "m", "modle": "m"}]},
                "servers: modle of server 1 is no setting there; did you mean 'model'",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config_of(**changes)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"model = ", "not valid TOML"),
            (b"\xff\xfe", "not valid TOML"),
            (b"a=" + b"[" * 50_000, "not valid TOML"),
            (b"#" * ((64 << 10) + 1), "larger than 64 KiB"),
            (b"model = 1\n" + b"a." * 30_000 + b"a = 1", "line 2 has more than 64 dots"),
            (b"a = [{b = 0x" + b"f" * 5000 + b"}]", "whole number of more than 64 bits"),
            ('"\u2028".'.encode() * 10_000 + b"a = 1", "line 1 has more than 64 dots"),
        ],
        ids=["cut", "no text", "nested", "huge", "deep", "huge number", "deep in odd lines"],
    )
    def test_a_broken_file_is_refused(self, content: bytes, message: str, tmp_path: Path) -> None:
        path = tmp_path / "bench.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_config_file(path)

    def test_dots_in_values_and_comments_are_no_depth(self, tmp_path: Path) -> None:
        path = tmp_path / "bench.toml"
        path.write_text(f"# {'.' * 80}\nmodel = '{'../' * 32}m'\n")
        assert load_config_file(path) == {"model": "../" * 32 + "m"}

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no configuration file"):
            load_config_file(tmp_path / "none.toml")

    def test_an_engine_is_a_mode_with_what_comes_on_top(self) -> None:
        engine = parse_engine("full+lfru+next_gate+metrics")
        assert (engine.base, engine.policy, engine.predictor, engine.metrics) == (
            *("full", "lfru", "next_gate"),
            True,
        )
        assert engine.has_graphs
        assert not parse_engine("resident-eager").has_graphs

    def test_shares_become_slots(self) -> None:
        slots: list[int | str] = ["25%", "50%", 64, "100%"]
        assert slot_counts(slots, num_experts=128, top_k=8) == [32, 64, 128]

    @pytest.mark.parametrize(
        ("slots", "named"), [(4, "4 of"), (129, "129 of"), ("1%", "1% are 1 of")]
    )
    def test_slots_that_the_model_cannot_have_are_refused(
        self, slots: int | str, named: str
    ) -> None:
        message = f"^slots: {named} 128 experts, but a token needs 8; choose between 8 and 128$"
        with pytest.raises(ConfigError, match=message):
            slot_counts([slots], num_experts=128, top_k=8)


class TestCases:
    def test_baselines_come_once_or_at_equal_memory(self, sizes: ModelSizes) -> None:
        engines = ["resident", "uva", "full"]
        names = [case.name for case in cases_of(config_of(engines=engines), sizes)]
        assert names == ["resident", "uva:32", "uva:64", "full:32", "full:64", "full:128"]

    def test_an_engine_may_have_slots_of_its_own(self, sizes: ModelSizes) -> None:
        config = config_of(engines=["full", "eager"], slots_of={"eager": [16]})
        assert [c.name for c in cases_of(config, sizes)][-1] == "eager:16"

    @pytest.mark.parametrize("budget", [1, 2, 3, 4, 7.5, 8, 12, 15, 16])
    @pytest.mark.parametrize("layers", [4, 16, 27, 48])
    def test_the_offloader_stays_within_its_memory(self, layers: int, budget: float) -> None:
        division = divide_layers(layers, budget)
        assert division is not None
        away = sum(i % division.group >= division.group - division.offloaded for i in range(layers))
        assert layers - away + division.ahead <= budget
        assert away % division.ahead == 0

    def test_the_offloader_spreads_its_layers(self) -> None:
        assert divide_layers(16, 8) == Layers(3, 2, 2)
        assert divide_layers(16, 0.5) is None

    def spec(
        self,
        name: str,
        slots: int | None,
        sizes: ModelSizes,
        *,
        positions: int | None = None,
        **changes: Any,
    ) -> Any:
        return engine_spec(
            Case(parse_engine(name), slots),
            config_of(**changes),
            sizes,
            model="m",
            vocabulary=1000,
            random_weights=True,
            has_gpu=True,
            routing=None,
            batches=[1],
            positions=positions,
        )

    def test_uva_offloads_what_the_slots_leave_and_no_tensor_more(self, sizes: ModelSizes) -> None:
        llm = self.spec("uva", 32, sizes)["llm"]
        limit = int(llm["cpu_offload_gb"] * 1024**3)
        absent = 16 * 96 * sizes.expert_bytes
        taken = 0
        # As vLLM does it: tensor by tensor until the limit is reached.
        for tensor in [sizes.expert_bytes * 128 * 2 // 3, sizes.expert_bytes * 128 // 3] * 16:
            if taken >= limit:
                break
            taken += tensor
        assert taken == absent

    def test_uva_all_offloads_every_tensor(self, sizes: ModelSizes) -> None:
        spec = self.spec("uva-all", None, sizes)
        every = 16 * 128 * sizes.expert_bytes
        last = sizes.expert_bytes * 128 // 3
        assert every - last < spec["llm"]["cpu_offload_gb"] * 1024**3 < every
        assert spec["offloads"]

    def test_graphs_in_pieces_are_cut_at_the_moe_op(self, sizes: ModelSizes) -> None:
        spec = self.spec("resident-pieces", None, sizes)
        assert spec["llm"]["compilation_config"]["cudagraph_mode"] == "PIECEWISE"
        assert spec["in_pieces"]
        assert not self.spec("resident", None, sizes)["in_pieces"]

    def test_every_engine_with_graphs_has_the_same_ones(self, sizes: ModelSizes) -> None:
        specs = [
            self.spec(name, slots, sizes)["llm"]
            for name, slots in (("resident", None), ("uva", 32), ("offloader", 32), ("full", 32))
        ]
        assert {json.dumps(spec["compilation_config"]) for spec in specs} == {
            '{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}'
        }
        assert len({spec["kv_cache_memory_bytes"] for spec in specs}) == 1
        eager = self.spec("eager", 32, sizes)["llm"]
        assert eager["enforce_eager"]
        assert "compilation_config" not in eager

    def test_nothing_runs_code_of_a_model(self, sizes: ModelSizes) -> None:
        assert self.spec("resident", None, sizes)["llm"]["trust_remote_code"] is False

    def test_requests_outlast_the_timed_steps(self, sizes: ModelSizes) -> None:
        spec = self.spec("full", 32, sizes, batches=[32], prompt_tokens=256)
        assert spec["prompt_steps"] >= 32 * 256 / 2048
        needed = 256 + spec["prompt_steps"] + spec["warm"] + spec["new_tokens"]
        assert spec["llm"]["max_model_len"] >= needed + 2
        assert spec["llm"]["max_model_len"] % 16 == 0

    def test_sequences_that_just_fit_are_no_longer_than_the_model_takes(
        self, sizes: ModelSizes
    ) -> None:
        needed = needed_tokens(config_of())
        for positions in (needed, needed + 1):
            llm = self.spec("full", 32, sizes, positions=positions)["llm"]
            assert llm["max_model_len"] == positions
            check_lengths(config_of(), positions)
        check_lengths(config_of(), None)
        with pytest.raises(ConfigError, match=f"of {needed} tokens .* takes {needed - 1}; lower"):
            check_lengths(config_of(), needed - 1)

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("uva", "needs a CUDA device"),
            ("uva-all", "needs a CUDA device"),
            ("offloader", "needs a CUDA"),
            ("resident-pieces", "no CUDA device"),
            ("full", "no CUDA device"),
            ("segmented", "no CUDA device"),
        ],
    )
    def test_what_needs_a_gpu_is_refused_without(
        self, name: str, why: str, sizes: ModelSizes
    ) -> None:
        case = Case(parse_engine(name), 32)
        assert why in str(refusal(case, has_gpu=False, compiled=True, sizes=sizes))
        assert refusal(case, has_gpu=True, compiled=True, sizes=sizes) is None

    def test_experts_of_many_gib_are_not_timed_on_a_cpu(self) -> None:
        large = model_sizes(shape_config("qwen3-30b-a3b"))
        for name in ("resident", "eager"):
            case = Case(parse_engine(name), 32)
            why = str(refusal(case, has_gpu=False, compiled=True, sizes=large))
            assert why.startswith("54.0 GiB of experts take minutes a step on a CPU")
            assert refusal(case, has_gpu=True, compiled=True, sizes=large) is None

    def test_graphs_in_pieces_are_refused_uncompiled(self, sizes: ModelSizes) -> None:
        case = Case(parse_engine("resident-pieces"), None)
        assert "compile = true" in str(refusal(case, has_gpu=True, compiled=False, sizes=sizes))

    def test_an_offloader_without_room_is_refused(self, sizes: ModelSizes) -> None:
        case = Case(parse_engine("offloader"), 1)
        assert "no room" in str(refusal(case, has_gpu=True, compiled=True, sizes=sizes))


class TestChild:
    def run(self, code: str, tmp_path: Path, limit_s: float = 20) -> tuple[int | None, float]:
        started = time.monotonic()
        status = run_process(
            [sys.executable, "-c", code], limit_s=limit_s, log=tmp_path / "log", environment={}
        )
        return status, time.monotonic() - started

    def test_a_hang_ends_at_its_limit(self, tmp_path: Path) -> None:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        status, seconds = self.run(code, tmp_path, limit_s=1)
        assert status is None
        assert seconds < 10

    def test_what_a_child_started_goes_with_it(self, tmp_path: Path) -> None:
        code = (
            "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); "
            "print(p.pid, flush=True)"
        )
        status, _ = self.run(code, tmp_path)
        assert status == 0
        pid = int((tmp_path / "log").read_text())
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()

    def test_the_wait_for_a_turn_is_not_of_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "turn").mkdir()
        turn = child.Turn(tmp_path / "turn")
        path = tmp_path / "engine.py"
        path.write_text(
            "import json, sys, time\nfrom pathlib import Path\n"
            "turn = Path(json.loads(Path(sys.argv[1]).read_text())['turn'])\n"
            "(turn / 'loaded').touch()\n"
            "while not (turn / 'go').exists(): time.sleep(0.01)\n"
            "open(sys.argv[2], 'a').write('{\"event\": \"end\"}\\n')\n"
        )
        monkeypatch.setattr(child, "SCRIPT", path)
        timer = threading.Timer(7, turn.go)
        timer.start()
        outcome = child.run_case({"metrics": False}, limit_s=6, log=tmp_path / "log", turn=turn)
        assert outcome.status == "ok"
        assert outcome.seconds > 6

    def test_one_that_has_been_timed_waits_until_all_have_been(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        turns = [child.Turn(tmp_path / name) for name in ("one", "other")]
        path = tmp_path / "engine.py"
        path.write_text(
            "import json, signal, sys\nfrom pathlib import Path\n"
            "open(sys.argv[2], 'a').write('{\"event\": \"end\"}\\n')\n"
            "Path(json.loads(Path(sys.argv[1]).read_text())['turn'], 'timed').touch()\n"
            "signal.pause()\n"
        )
        monkeypatch.setattr(child, "SCRIPT", path)
        for turn in turns:
            turn.folder.mkdir()
            turn.go()
            outcome = child.run_case({"metrics": False}, limit_s=9, log=tmp_path / "log", turn=turn)
            assert outcome.status == "ok"
        kept = [turn.kept for turn in turns]
        assert [process.poll() for process in kept if process is not None] == [None, None]
        child.end_kept(turns)
        assert all(process.poll() == -signal.SIGTERM for process in kept if process is not None)
        assert not child._running

    def outcome(self, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
        path = tmp_path / "engine.py"
        path.write_text(f"import sys, json, os\nevents = open(sys.argv[2], 'a')\n{script}")
        monkeypatch.setattr(child, "SCRIPT", path)
        return child.run_case({"metrics": False}, limit_s=2, log=tmp_path / "log")

    STAGE = 'print(\'{"event": "stage", "name": "timing batch 4"}\', file=events, flush=True)\n'

    def test_a_case_that_hangs_keeps_its_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = (
            'print(\'{"event": "loaded"}\\n{"event": "batch", "batch": 1}\', file=events)\n'
            + self.STAGE
            + "import time; time.sleep(60)"
        )
        outcome = self.outcome(script, tmp_path, monkeypatch)
        assert outcome.status == "timeout"
        assert outcome.reason == "time limit of 2 s reached while timing batch 4"
        assert [batch["batch"] for batch in outcome.batches] == [1]

    def test_an_interrupt_keeps_the_batches_of_its_case(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(command: list[str], **_: Any) -> int:
            Path(command[-1]).write_text('{"event": "loaded"}\n{"event": "batch", "batch": 1}\n')
            raise KeyboardInterrupt

        monkeypatch.setattr(child, "run_process", interrupted)
        with pytest.raises(child.Interrupted) as caught:
            child.run_case({"metrics": False}, limit_s=2, log=tmp_path / "log")
        assert caught.value.outcome.status == "not run"
        assert [batch["batch"] for batch in caught.value.outcome.batches] == [1]

    def test_an_error_is_told_with_its_stage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        event = {"event": "error", "message": "ValueError: no", "stage": "loading"}
        script = f"events.write({json.dumps(event)!r})\nevents.close(); sys.exit(1)"
        outcome = self.outcome(script, tmp_path, monkeypatch)
        assert (outcome.status, outcome.reason) == ("failed", "while loading: ValueError: no")

    def test_a_killed_engine_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = (
            self.STAGE + 'events.write(\'{"event": "ba\')\nevents.flush()\nos.kill(os.getpid(), 9)'
        )
        outcome = self.outcome(script, tmp_path, monkeypatch)
        assert outcome.status == "failed"
        assert "while timing batch 4: " in str(outcome.reason)
        assert "SIGKILL" in str(outcome.reason)

    def test_a_model_that_does_not_fit_is_called_so(self) -> None:
        error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
        assert plain(error).startswith("does not fit: ")
        assert plain("ValueError: a\n b") == "ValueError: a b"


def measured(engine: str, slots: int | None, batch: int, step: float, **more: Any) -> Any:
    return {
        "engine": engine,
        "slots": slots,
        "batch": batch,
        "key": f"{engine}{slots}{batch}",
        "status": "ok",
        "graphs": not engine.endswith("eager"),
        "step_ms": step,
        "ttft_ms": [10.0, 11.0, 12.0],
        "tpot_ms": [step, step, step * 2],
        "tokens_per_s": batch * 1e3 / step,
        **more,
    }


ROWS = [
    measured("resident", None, 1, 2.0),
    measured("resident", None, 8, 3.0),
    measured("uva", 32, 1, 20.0),
    measured("uva", 32, 8, 50.0),
    measured("full", 32, 1, 5.0, demand_bytes_per_step=100e6, hit_rate=0.8, stall_ms=1.5),
    measured("full", 32, 8, 60.0, demand_bytes_per_step=2e9, hit_rate=0.5, stall_ms=58.0),
    measured("full+metrics", 32, 1, 5.02),
    {
        "engine": "offloader",
        "slots": 32,
        "batch": 1,
        "key": "x",
        "status": "timeout",
        "reason": "time limit of 150 s reached while loading",
    },
]


class TestRows:
    def test_a_step_is_cut_into_parts_that_add_up(self) -> None:
        rows = with_parts(ROWS, 50.0)
        full = rows[4]
        assert full["compute_ms"] == 2.0
        assert full["compute_ms"] + full["stall_ms"] + full["overhead_ms"] == 5.0
        assert full["limit_ms"] == 2.0, "100 MB take as long as the resident step"
        wide = rows[5]
        assert wide["overhead_ms"] == 0.0
        assert wide["compute_ms"] == 2.0, "less than the resident step: the stall leaves no more"
        assert wide["compute_ms"] + wide["stall_ms"] == 60.0
        assert wide["limit_ms"] == 40.0
        assert "compute_ms" not in rows[0]

    def test_eager_steps_are_not_compared_with_graphs(self) -> None:
        rows = with_parts([*ROWS, measured("eager", 32, 1, 30.0)], 50.0)
        assert "compute_ms" not in rows[-1]

    def test_break_even_is_marked(self) -> None:
        lines = "\n".join(break_even(ROWS))
        assert "full:32 than uva: faster at batch 1 (4.00x at batch 1, 0.83x at 8)" in lines
        assert "than resident: at no batch faster (0.40x at batch 1" in lines

    def test_what_is_printed_as_equal_is_not_called_faster(self) -> None:
        rows = [measured("resident", None, batch, 5.0) for batch in (1, 2)]
        rows += [measured("full", 32, 1, 4.98), measured("full", 32, 2, 4.97)]
        (line,) = break_even(rows)
        assert line == "full:32 than resident: faster at batch 2 (1.00x at batch 1, 1.01x at 2)"

    def test_a_baseline_without_slots_is_compared_with_every_number_of_them(self) -> None:
        rows = [
            *ROWS,
            measured("uva-all", None, 1, 30.0),
            measured("resident-pieces", None, 1, 15.0),
        ]
        lines = "\n".join(break_even(rows))
        assert "than uva-all: faster at every batch (6.00x at batch 1)" in lines
        assert "than resident-pieces: faster at every batch (3.00x at batch 1)" in lines
        assert with_parts(rows, 50.0)[4]["compute_ms"] == 2.0, "pieces are no measure of compute"

    def test_metrics_on_is_compared_with_off(self) -> None:
        (ratio,) = metrics_ratios(ROWS)
        assert ratio == ("full+metrics", 32, 1, pytest.approx(1.004))

    def test_events_become_a_row(self) -> None:
        loaded = {
            "load_s": 9.0,
            "mode": "full",
            "slot_bytes": 2**30,
            "staging_bytes": 0,
            "pinned_bytes": 2**31,
            "host_bytes": 2**31,
        }
        batch = {
            "batch": 1,
            "repeats": 2,
            "steps": 10,
            "decode_s": 0.5,
            "hits": 60,
            "late": 10,
            "misses": 30,
            "bytes_copied": 10**9,
            "bytes_prefetched": 10**9,
            "waves": 0,
            "stall_seconds": 0.2,
            "bytes_useful": 1,
            "bytes_wasted": 1,
            "host_calls": 0,
            "peak_bytes": 2**30,
            "device_bytes": 2**31,
            "ttft_ms": [1, 1, 1],
            "tpot_ms": [1, 1, 1],
            "step_ms": 50,
            "step_mean_ms": 50,
            "tokens_per_s": 20,
        }
        row = measured_row(loaded, batch, is_cache=True)
        assert row["hit_rate"] == 0.6
        assert row["link_gbs"] == 4.0
        assert row["demand_bytes_per_step"] == 1e8
        assert row["stall_ms"] == 20.0
        assert (row["expert_gib"], row["pinned_gib"]) == (1.0, 2.0)

    def test_a_key_names_the_work_and_not_its_place(self, sizes: ModelSizes) -> None:
        case = TestCases()
        spec = case.spec("full", 32, sizes)
        digests = {"model": "m", "routing": "r"}
        moved = copy.deepcopy(spec)
        moved["llm"]["model"] = "/elsewhere"
        moved["batches"] = [1, 2]
        assert key_of(spec, 1, digests) == key_of(moved, 1, digests)
        assert key_of(spec, 1, digests) != key_of(spec, 2, digests)
        assert key_of(spec, 1, digests) != key_of(spec, 1, {**digests, "model": "n"})
        assert key_of(spec, 1, digests) != key_of(case.spec("full", 64, sizes), 1, digests)


class TestStore:
    def test_rows_are_found_again(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {"gpu": "a"})
        store.add({"key": "k", "status": "ok", "step_ms": 1.0})
        store.add({"key": "f", "status": "timeout"})
        store.close()
        store = RowStore(tmp_path, {"gpu": "a"})
        assert (store.find("k") or {})["step_ms"] == 1.0
        assert store.find("f") is not None
        assert store.find("f", retry=True) is None
        store.close()

    def test_rows_of_another_machine_are_left_alone(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {"gpu": "a"})
        store.add({"key": "k", "status": "ok"})
        store.close()
        other = RowStore(tmp_path, {"gpu": "b"})
        assert other.find("k") is None
        assert other.ignored == 1
        other.close()

    def test_a_torn_line_costs_no_other_row(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_bytes(b'{"key": "\xff\xfe')
        for _ in range(2):
            store = RowStore(tmp_path, {})
            found = store.find("whole")
            store.add({"key": "whole", "status": "ok"})
            store.close()
        assert found is not None

    def test_rows_of_other_code_count_only_when_asked(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {"gpu": "a", "code": "1"})
        store.add({"key": "k", "status": "ok"})
        store.close()
        for code, gpu, any_code, found in (
            ("2", "a", False, False),
            ("2", "a", True, True),
            ("2", "b", True, False),
        ):
            store = RowStore(tmp_path, {"gpu": gpu, "code": code}, any_code=any_code)
            assert (store.find("k") is not None) == found
            store.close()

    def test_broken_lines_are_passed_over(self, tmp_path: Path) -> None:
        lines = ["{", "[1]", '{"key": 3}', "[" * 100_000, '{"key": "k", "status": "ok", "ide']
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        store = RowStore(tmp_path, {})
        assert store.find("k") is None
        store.close()

    def test_two_benches_do_not_share_a_folder(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {})
        with pytest.raises(ConfigError, match="another bench is writing"):
            RowStore(tmp_path, {})
        with pytest.raises(ConfigError, match="another bench is writing"):
            RowStore(tmp_path, {}, fresh=True)
        store.close()

    def test_a_fresh_start_forgets_only_when_it_may(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {})
        store.add({"key": "k", "status": "ok"})
        with pytest.raises(ConfigError):
            RowStore(tmp_path, {}, fresh=True)
        store.close()
        assert '"k"' in (tmp_path / "rows.jsonl").read_text()
        store = RowStore(tmp_path, {}, fresh=True)
        assert store.find("k") is None
        store.close()

    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="--out: cannot write"):
            RowStore(tmp_path / "file", {})

    def test_a_full_disk_loses_no_row(self, tmp_path: Path) -> None:
        store = RowStore(tmp_path, {})
        store._file.close()
        store._file = open("/dev/full", "a")  # noqa: SIM115 (closed by the store)
        store.add({"key": "k", "status": "ok"})
        assert store.failure == "rows.jsonl could not be written: No space left on device"
        assert store.find("k") is not None
        store.close()


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Engines that answer at once; the specs that they were given."""
    given: list[dict[str, Any]] = []

    def run_case(spec: dict[str, Any], **_: Any) -> Outcome:
        given.append(spec)
        if spec["llm"].get("offload_backend") == "uva":
            return Outcome("failed", "while loading: RuntimeError: no uva")
        loaded = {
            "load_s": 1.0,
            "streamed_bytes": 0,
            "device_expert_bytes": 1,
            "offloaded_bytes": 0,
        }
        loaded |= {"mode": "full", "slot_bytes": 1, "staging_bytes": 1, "pinned_bytes": 1}
        loaded["host_bytes"] = 1
        batches = [
            {
                "batch": batch,
                "repeats": 1,
                "steps": 10,
                "decode_s": 0.1,
                "hits": 8,
                "late": 0,
                "misses": 2,
                "bytes_copied": 10**8,
                "bytes_prefetched": 0,
                "bytes_useful": 0,
                "bytes_wasted": 0,
                "host_calls": 0,
                "waves": 0,
                "stall_seconds": 0.2,
                "peak_bytes": 1,
                "device_bytes": 1,
                "ttft_ms": [5.0, 6.0, 7.0],
                "tpot_ms": [10.0, 11.0, 12.0],
                "step_ms": 10.0,
                "step_mean_ms": 10.0,
                "tokens_per_s": 100.0,
            }
            for batch in spec["batches"]
        ]
        return Outcome("ok", None, loaded, batches, 2.0)

    monkeypatch.setattr(sessions, "run_case", run_case)
    return given


class TestSession:
    def go(self, tmp_path: Path, env: dict[str, Any] = H200, **options: Any) -> sessions.Report:
        engines = {"engines": ["resident", "uva", "full", "offloader"]}
        # Half a layer's experts on the device: no room for one of the offloader's buffers.
        refused = {"layers": 8, "slots_of": {"offloader": [8]}}
        given = options.pop("config", {**engines, **refused})
        return Session(config_of(**given), env, tmp_path, **options).run()

    def test_every_case_is_a_row(self, tmp_path: Path, fake: list[dict[str, Any]]) -> None:
        done = self.go(tmp_path)
        states = {(row["engine"], row["slots"], row["batch"]): row["status"] for row in done.rows}
        assert states["resident", None, 1] == "ok"
        assert states["uva", 32, 8] == "failed"
        assert states["full", 128, 8] == "ok"
        assert states["offloader", 8, 1] == "refused"
        assert len(states) == 2 * (1 + 2 + 3 + 1)
        assert len(fake) == 6

    def test_what_was_measured_is_not_measured_again(
        self, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        first = self.go(tmp_path)
        count = len(fake)
        again = self.go(tmp_path)
        assert len(fake) == count
        assert [r["key"] for r in again.rows] == [r["key"] for r in first.rows]
        self.go(tmp_path, retry=True)
        assert len(fake) == count + 2, "the two sizes of uva"
        self.go(tmp_path, fresh=True)
        assert len(fake) == 2 * count + 2

    def test_rows_of_other_code_are_told_apart(
        self, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        config = {"engines": ["resident"]}
        self.go(tmp_path, config=config)
        done = self.go(tmp_path, {**H200, "code": "new"}, config=config, any_code=True)
        assert len(fake) == 1
        assert done.notes == []
        wider = {"engines": ["resident", "full"], "slots": [64]}
        done = self.go(tmp_path, {**H200, "code": "new"}, config=wider, any_code=True)
        assert "rows of different code stand together: abc, new" in done.notes

    def test_an_engine_more_measures_only_that(
        self, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        self.go(tmp_path, config={"engines": ["resident"]})
        self.go(tmp_path, config={"engines": ["resident", "full"], "slots": [64]})
        assert [spec["llm"].get("worker_cls") is not None for spec in fake] == [False, True]

    def test_an_interrupt_keeps_what_there_is(
        self, tmp_path: Path, fake: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer: Callable[..., Outcome] = sessions.run_case

        def interrupted(spec: dict[str, Any], **options: Any) -> Outcome:
            if len(fake) == 3:
                whole = answer(spec, **options)
                raise child.Interrupted(
                    replace(whole, status="not run", reason="x", batches=whole.batches[:1])
                )
            return answer(spec, **options)

        monkeypatch.setattr(sessions, "run_case", interrupted)
        done = self.go(tmp_path)
        assert done.interrupted
        states = [row["status"] for row in done.rows]
        assert states[:8] == ["ok", "ok", *["failed"] * 4, "ok", "not run"]
        assert set(states[8:]) == {"not run"}
        monkeypatch.setattr(sessions, "run_case", answer)
        finished = self.go(tmp_path)
        assert "not run" not in {row["status"] for row in finished.rows}
        assert [spec["batches"] for spec in fake] == [[1, 8]] * 4 + [[8], [1, 8], [1, 8]]

    def test_cases_load_side_by_side_and_are_timed_one_at_a_time(
        self, tmp_path: Path, fake: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer: Callable[..., Outcome] = sessions.run_case
        lock, loading, most_loading, timing = threading.Lock(), [0], [0], [0]

        def slow(spec: dict[str, Any], *, turn: child.Turn, **options: Any) -> Outcome:
            with lock:
                loading[0] += 1
                most_loading[0] = max(most_loading[0], loading[0])
            time.sleep(0.2)
            (turn.folder / "loaded").touch()
            while turn.waits:
                time.sleep(0.01)
            with lock:
                timing[0] += 1
                assert timing[0] == 1, "two cases are timed at once"
                assert loading[0] == most_loading[0], "one is timed while another loads"
            time.sleep(0.1)
            with lock:
                timing[0] -= 1
                return answer(spec, **options)

        alone = self.go(tmp_path / "alone")
        monkeypatch.setattr(sessions, "run_case", slow)
        changes = {"layers": 8, "slots_of": {"offloader": [8]}, "side_by_side": 8}
        config = {"engines": ["resident", "uva", "full", "offloader"], **changes}
        done = self.go(tmp_path / "beside", config=config)
        assert most_loading == [6]
        assert len(fake) == 12
        own = ("key", "case_s", "at")
        assert [{k: v for k, v in row.items() if k not in own} for row in done.rows] == [
            {k: v for k, v in row.items() if k not in own} for row in alone.rows
        ]

    def test_an_interrupt_ends_cases_that_wait_for_their_turn(
        self, tmp_path: Path, fake: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not fake

        def waits(_: dict[str, Any], *, turn: child.Turn, **__: Any) -> Outcome:
            turn.ended.wait(20)
            return Outcome("timeout", "time limit reached")

        monkeypatch.setattr(sessions, "run_case", waits)
        monkeypatch.setattr(sessions, "wait", _interrupt)
        done = self.go(tmp_path, config={"engines": ["resident", "full"], "side_by_side": 4})
        assert done.interrupted
        assert {row["status"] for row in done.rows} == {"not run"}

    def test_no_case_starts_without_time(self, tmp_path: Path, fake: list[dict[str, Any]]) -> None:
        done = self.go(tmp_path, minutes=1e-4)
        assert not fake
        assert {row["status"] for row in done.rows} == {"not run", "refused"}

    def test_a_case_cut_by_the_session_comes_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            sessions, "run_case", lambda *_, **__: Outcome("timeout", "time limit reached")
        )
        done = self.go(tmp_path, minutes=1.0, config={"engines": ["resident"]})
        assert {row["status"] for row in done.rows} == {"not run"}
        done = self.go(tmp_path, minutes=100.0, config={"engines": ["resident"]})
        assert {row["status"] for row in done.rows} == {"timeout"}

    def test_a_case_whose_log_cannot_be_written_is_a_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> Outcome:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(sessions, "run_case", full)
        done = self.go(tmp_path, config={"engines": ["resident"]})
        assert "No space left" in done.rows[0]["reason"]

    @pytest.mark.parametrize(("version", "runner"), [("0.26.0", "0"), ("0.33.0", None)])
    def test_offloaders_get_the_runner_that_has_them(
        self, version: str, runner: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[bool, Any] = {}

        def run_case(spec: dict[str, Any], **options: Any) -> Outcome:
            given[spec["offloads"]] = options["environment"].get("VLLM_USE_V2_MODEL_RUNNER")
            return Outcome("failed", "x")

        monkeypatch.setattr(sessions, "run_case", run_case)
        env = copy.deepcopy(H200)
        env["machine"]["versions"]["vllm"] = version
        self.go(tmp_path, env, config={"engines": ["resident", "uva"], "slots": [64]})
        assert given == {False: None, True: runner}

    def test_plan_stands_beside_each_of_ours(
        self, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        assert fake == []
        done = self.go(tmp_path, config={"engines": ["full", "uva"], "routing": "calibrated"})
        by = {(row["engine"], row["slots"], row["batch"]): row for row in done.rows}
        assert by["full", 32, 1]["plan_step_ms"] > by["full", 128, 1]["plan_step_ms"] > 0
        assert 0.6 < by["full", 32, 1]["plan_hit_rate"] < 0.95
        assert "plan_step_ms" not in by["uva", 32, 1]

    def test_plan_knows_which_waves_run_inside_the_graph(
        self, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        assert fake == []

        def step_ms(**more: Any) -> float:
            config = {"engines": ["full"], "slots": [32], "layers": 8, "batches": [8], **more}
            (row,) = self.go(tmp_path, config=config).rows
            return float(row["plan_step_ms"])

        # 64 experts may take 3 waves with the default ring, and 33 with the smallest.
        inside = step_ms()
        outside = step_ms(staging_slots=2)
        assert 4 < outside - inside < 8 * 1.0
        assert step_ms(moe_backend="marlin") == pytest.approx(inside)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layers": 49}, "has 48 layers"),
            ({"model": "models/tiny-moe"}, "only a named shape can be cut"),
            ({"slots": [4]}, "choose between 8 and 128"),
            (
                {"routing": "calibratd"},
                "^routing: cannot read 'calibratd': No such file or directory; "
                "give a trace, or one of model, calibrated, uniform$",
            ),
            ({"prompt_file": "a.txt"}, "has no tokenizer"),
            (
                {"prompt_tokens": 8192},
                r"prompt_tokens 8192, warm 8 and new_tokens 64 make sequences of 8300 tokens \(36 "
                r"for steps that read the prompts of batch 8\), but 'qwen3-30b-a3b' takes 8192;",
            ),
            ({"model": TINY, "layers": None, "slots": [8], "prompt_file": "x"}, "no file 'x'"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_runs(
        self, changes: dict[str, Any], message: str, tmp_path: Path, fake: list[dict[str, Any]]
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            self.go(tmp_path, config=changes)
        assert not fake

    def test_a_hostile_trace_is_refused(self, tmp_path: Path, fake: list[dict[str, Any]]) -> None:
        path = tmp_path / "trace.npz"
        np.savez(path, topk=np.array([object()], dtype=object), sequence=np.zeros(1))
        with pytest.raises(ConfigError, match="routing: "):
            self.go(tmp_path, config={"routing": str(path)})
        assert not fake

    def test_a_trace_of_another_model_is_refused(self, tmp_path: Path) -> None:
        trace = str(ROOT / "models" / "tiny-moe-trace.npz")
        with pytest.raises(ConfigError, match="another model"):
            self.go(tmp_path, config={"routing": trace})

    def test_a_gpu_in_use_is_said(self, tmp_path: Path, fake: list[dict[str, Any]]) -> None:
        assert fake == []
        env = copy.deepcopy(H200)
        env["machine"]["gpu"]["free_bytes"] = 100 << 30
        done = self.go(tmp_path, env, config={"engines": ["resident"]})
        assert any("something else is running" in note for note in done.notes)


class TestRouting:
    def test_every_engine_gets_the_same_steps(self, sizes: ModelSizes, tmp_path: Path) -> None:
        config = config_of(routing="calibrated", batches=[1, 4])
        trace = make_routing(config, sizes)
        assert trace is not None
        save_routing(trace, 4, tmp_path / "routing.npz")
        with np.load(tmp_path / "routing.npz") as arrays:
            routing, guesses = arrays["routing"], arrays["guesses"]
        assert routing.shape == (256, 16, 4, 8)
        assert guesses.shape == (256, 15, 4, 16)
        # Step 3, token 2 of the trace, in layer 5.
        assert routing[3, 5, 2].tolist() == trace.topk[3 * 4 + 2, 5].tolist()

    def test_plans_see_the_streams_that_run(self, sizes: ModelSizes) -> None:
        config = config_of(routing="uniform", batches=[1, 4])
        trace = make_routing(config, sizes)
        rates = rates_for(trace, config, sizes, random_weights=True)
        assert rates(1).demand(64).demanded == 8
        assert rates(4).demand(64).demanded == pytest.approx(128 * (1 - (15 / 16) ** 4), rel=0.01)
        assert rates(1).demand(64).hit_rate == pytest.approx(0.5, abs=0.05)

    def test_plans_see_the_steps_as_they_run(self, sizes: ModelSizes) -> None:
        config = config_of(routing="calibrated", batches=[1, 4])
        trace = make_routing(config, sizes)
        assert trace is not None
        steps = trace.topk.reshape(256, 4, 16, 8)
        unique = [
            len(set(steps[step, :, layer].ravel().tolist()))
            for step in range(256)
            for layer in range(16)
        ]
        demand = rates_for(trace, config, sizes, random_weights=True)(4).demand(128)
        assert demand.demanded == pytest.approx(sum(unique) / len(unique), rel=1e-6)

    def test_a_predictor_that_guesses_needs_a_trace_with_guesses(
        self, sizes: ModelSizes, tmp_path: Path
    ) -> None:
        full = make_routing(config_of(routing="uniform", batches=[1]), sizes)
        assert full is not None
        path = tmp_path / "t.npz"
        save_trace(path, replace(full, next_gate=None))
        given: dict[str, Any] = {"routing": str(path), "batches": [1]}
        learning = config_of(**given, engines=["eager", "eager+transition"])
        assert make_routing(learning, sizes) is not None
        guessing = config_of(**given, engines=["eager", "full+next_gate"])
        with pytest.raises(ConfigError, match=r"no next_gate, which 'full\+next_gate' predicts"):
            make_routing(guessing, sizes)
        save_trace(path, full)
        assert make_routing(guessing, sizes) is not None

    def test_the_model_routes_when_nothing_is_said(self, sizes: ModelSizes) -> None:
        assert make_routing(config_of(), sizes) is None


class TestServers:
    def server(self, url: str = "http://127.0.0.1:9", model: str = "m") -> Any:
        found = [{"name": "s", "url": url, "model": model}]
        return config_of(engines=[], servers=found).servers[0]

    def test_an_unreachable_server_is_a_row(self, tmp_path: Path) -> None:
        config = {"engines": ["full"], "slots": [64]}
        servers_ = [{"name": "other", "url": "http://127.0.0.1:9", "model": "m"}]
        done = Session(config_of(**config, servers=servers_), CPU, tmp_path).run()
        rows = [row for row in done.rows if row["engine"] == "other"]
        assert [row["status"] for row in rows] == ["failed", "failed"]
        assert "cannot be reached" in rows[0]["reason"]
        assert len(done.rows) == 4, "the rest is there as well"

    def test_a_server_alone_needs_no_model_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = [{"name": "s", "url": "http://127.0.0.1:9", "model": "some.gguf"}]
        config = BenchConfig.from_mapping(
            {"model": "some.gguf", "engines": [], "servers": found, "batches": [1]}
        )
        row = measured("s", None, 1, 4.0)
        monkeypatch.setattr(servers, "reach", lambda server: server)
        monkeypatch.setattr(servers, "measure", lambda *_, **__: row)
        done = Session(config, CPU, tmp_path).run()
        assert [r["status"] for r in done.rows] == ["ok"]
        report.print_report(done, Console(width=80, highlight=False))
        assert "some.gguf; prompts of 256 tokens" in capsys.readouterr().out
        assert len(plots.draw(report.as_json(done), tmp_path)) == 1
        assert "| s |  |  | 4.00 |" in report.markdown(report.as_json(done))

    @pytest.mark.parametrize(
        ("status", "body", "why"),
        [
            (404, b"", "is no OpenAI-compatible server"),
            (200, b"<html>", "is no OpenAI-compatible server"),
            (200, b'{"data": 3}', "is no OpenAI-compatible server"),
            (200, b'{"data": ["m"]}', "is no OpenAI-compatible server"),
            (200, b"[" * 100_000, "is no OpenAI-compatible server"),
            (200, b'{"data": [{"id": "other"}]}', "serves other, not m"),
            (200, b'{"data": [{"id": "\\ud800\\u001b"}]}', r"serves '\ud800\x1b', not m"),
            (200, b'{"data": [{"id": "m"}]}', None),
        ],
    )
    def test_a_port_that_something_else_holds_is_said(
        self, status: int, body: bytes, why: str | None
    ) -> None:
        found = self.reached(status, body)
        assert found.tokenizer is None if why is None else why in found

    def test_the_tokenizer_is_that_of_the_model_behind_the_served_name(
        self, tmp_path: Path
    ) -> None:
        for root, tokenizer in (
            ("owner/name", "owner/name"),
            (str(tmp_path), str(tmp_path)),
            (str(tmp_path / "elsewhere"), None),
            (None, None),
            ("", None),
            ("--trust-remote-code", None),
            ("a\0b", None),
            ("\ud800", None),
        ):
            body = json.dumps({"data": [{"id": "n", "root": "x"}, {"id": "m", "root": root}]})
            found = self.reached(200, body.encode())
            assert found.tokenizer == tokenizer
            command = servers.command_of(found, config_of(), 1, tmp_path)
            named = [command[command.index(at) + 1] for at in ("--model", "--served-model-name")]
            assert named == [tokenizer or "m", "m"]
        body = json.dumps({"data": [{"id": "m", "root": "owner/name"}]})
        given = self.reached(200, body.encode(), tokenizer="mine")
        assert given.tokenizer == "mine"

    def reached(self, status: int, body: bytes, **more: str) -> Any:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
            thread = threading.Thread(target=listening.handle_request)
            thread.start()
            server = self.server(f"http://127.0.0.1:{listening.server_port}")
            found = servers.reach(server.model_copy(update=more))
            thread.join()
        return found

    def measured(
        self, result: str | None, status: int | None, tmp_path: Path, monkeypatch: Any
    ) -> dict[str, Any]:
        def run(command: list[str], **_: Any) -> int | None:
            if result is not None:
                folder = command[command.index("--result-dir") + 1]
                Path(folder, "result.json").write_text(result)
            return status

        monkeypatch.setattr(servers, "run_process", run)
        log = tmp_path / "log"
        log.write_text("first\nlast words")
        return servers.measure(self.server(), config_of(repeats=2), 4, limit_s=9, log=log)

    def test_what_vllm_measured_is_the_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = {f"p{p}_{what}_ms": 1.0 for p in (50, 90, 99) for what in ("ttft", "itl")}
        result |= {"completed": 8, "output_throughput": 9.0, "median_itl_ms": 1.0}
        row = self.measured(json.dumps(result), 0, tmp_path, monkeypatch)
        assert (row["status"], row["tokens_per_s"]) == ("ok", 9.0)
        row = self.measured(json.dumps({**result, "completed": 7}), 0, tmp_path, monkeypatch)
        assert row == {"status": "failed", "reason": "7 of 8 requests were answered"}

    def test_a_failed_measurement_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "last words" in self.measured(None, 1, tmp_path, monkeypatch)["reason"]
        assert self.measured(None, None, tmp_path, monkeypatch)["status"] == "timeout"

    def test_the_command_is_vllms_own(self, tmp_path: Path) -> None:
        command = servers.command_of(self.server(), config_of(repeats=3), 4, tmp_path)
        text = " ".join(command)
        assert "prefetch_runtime.vllm.serve bench serve" in text
        assert "--num-prompts 12 --max-concurrency 4" in text
        assert "--base-url http://127.0.0.1:9 " in text


class TestReport:
    def results(self) -> Any:
        config = config_of(engines=["resident", "uva", "full", "offloader"], slots=[32])
        model = {
            "name": "qwen3-30b-a3b",
            "layers": 16,
            "of_layers": 48,
            "num_experts": 128,
            "top_k": 8,
        }
        return sessions.Report(config, H200, model, copy.deepcopy(ROWS), not_measured=["energy"])

    def test_it_reads_well_on_80_columns(self, capsys: pytest.CaptureFixture[str]) -> None:
        done = self.results()
        for row in done.rows:
            if row["status"] == "ok":
                row |= {"load_s": 130.2, "expert_gib": 18.02, "device_gib": 140.1}
                row |= {"pinned_gib": 54.0, "plan_step_ms": 1234.5, "link_gbs": 53.2}
                row |= {"ttft_ms": [12345.6, 1, 1], "tpot_ms": [1234.5, 2345.6, 3456.7]}
                row["hit_rate"] = 1.0
        done.files = ["plot: steps.png", "all figures: results.json"]
        report.print_report(done, Console(width=80, highlight=False))
        text = capsys.readouterr().out
        assert text.splitlines()[-2:] == ["  plot: steps.png", "  all figures: results.json"]
        assert max(map(len, text.splitlines())) <= 80
        assert "\u2026" not in text
        assert "16 of 48 layers" in text
        assert "NVIDIA H200, driver 580, link 50.0 GB/s" in text
        assert "offloader:32, batch 1: timeout: time limit of 150 s reached" in text
        assert "1.004x the step without metrics" in text
        assert "not measured" in text

    def test_the_readme_table_marks_the_fastest(self) -> None:
        table = report.markdown(report.as_json(self.results()))
        assert "| full | 32 |  | **5.00** (80%) | 60.00 (50%) |" in table
        assert "| uva | 32 |  | 20.00 | **50.00** |" in table
        assert "| offloader | 32 |  | timeout |  |" in table

    def test_the_short_table_has_three_batches(self) -> None:
        done = self.results()
        done.config = config_of(batches=[1, 2, 4, 8, 16, 32])
        table = report.markdown(report.as_json(done), short=True)
        assert "| batch 1 | batch 8 | batch 32 |" in table
        assert "Compared" not in table
        assert "| offloader |" not in table
        assert "Without figures: offloader (timeout)." in table

    def test_the_script_puts_the_table_between_its_marks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from scripts import bench_table

        assert report.save_json(self.results(), tmp_path) is None
        page = tmp_path / "page.md"
        page.write_text(f"before\n{bench_table.BEGIN}\nformer\n{bench_table.END}\nafter\n")
        arguments = ["bench_table.py", str(tmp_path / "results.json"), str(page)]
        monkeypatch.setattr(sys, "argv", arguments)
        for _ in range(2):
            assert bench_table.main() == 0
            text = page.read_text()
            assert text.startswith("before\n")
            assert text.endswith("\nafter\n")
            assert "former" not in text
            assert text.count("| full | 32 |") == 1
            assert "    prefetch-runtime bench x.toml\n" in text
        page.write_text("no marks")
        with pytest.raises(ValueError, match="the page needs one line"):
            bench_table.main()

    def test_the_pages_have_the_marks(self) -> None:
        from scripts.bench_table import put

        for page in ("README.md", "benchmarks/README.md"):
            assert "new" in put((ROOT / page).read_text(), "new\n")

    def test_json_is_read_back(self, tmp_path: Path) -> None:
        assert report.save_json(self.results(), tmp_path) is None
        found = report.load_json(tmp_path / report.RESULTS_FILE)
        assert found["rows"][0]["engine"] == "resident"

    @pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', "[" * 100_000])
    def test_other_json_is_refused(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ConfigError):
            report.load_json(tmp_path / "results.json")

    def test_a_full_disk_is_said(self, tmp_path: Path) -> None:
        failure = report.save_json(self.results(), tmp_path / "none")
        assert "could not be written" in str(failure)

    @staticmethod
    def legend_of(figure: Any) -> set[str]:
        return {text for axis in figure.axes for text in axis.get_legend_handles_labels()[1]}

    def test_plots_are_drawn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        figures: list[Any] = []
        monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
        drawn = plots.draw(report.as_json(self.results()), tmp_path)
        assert [path.name for path in drawn] == ["steps.png", "parts.png"]
        for path in drawn:
            assert path.read_bytes().startswith(b"\x89PNG")
        steps, parts = (self.legend_of(figure) for figure in figures)
        assert {"full", "uva", "limit of full: max(resident step, missed bytes / link)"} <= steps
        assert len(parts) == 3

    def test_servers_alone_are_drawn_and_have_no_slots(self, tmp_path: Path) -> None:
        done = self.results()
        done.rows = [measured("other", None, 1, 4.0)]
        for earlier in ("parts.png", "other.png"):
            (tmp_path / earlier).touch()
        assert len(plots.draw(report.as_json(done), tmp_path)) == 1
        assert {path.name for path in tmp_path.iterdir()} == {"steps.png", "other.png"}
        assert "| other |  |  | 4.00 |  |" in report.markdown(report.as_json(done))

    def test_nothing_measured_draws_nothing(self, tmp_path: Path) -> None:
        done = self.results()
        done.rows = done.rows[-1:]
        assert plots.draw(report.as_json(done), tmp_path) == []


class TestCommand:
    """`prefetch-runtime bench` as it is called."""

    @pytest.fixture
    def run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str, str]]:
        monkeypatch.setattr(environment, "look_around", lambda: copy.deepcopy(H200))
        monkeypatch.chdir(tmp_path)

        def go(*arguments: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["prefetch-runtime", "bench", *arguments])
            status: Any = 0
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
            captured = capsys.readouterr()
            return int(status), captured.out, captured.err

        return go

    SMALL = ("--model", "qwen3-30b-a3b", "--layers", "8", "--batches", "1", "--slots", "50%")

    def test_a_run_ends_with_tables_and_files(
        self, run: Callable[..., tuple[int, str, str]], fake: list[dict[str, Any]]
    ) -> None:
        status, out, err = run(*self.SMALL, "--engines", "resident,full+next_gate", "--out", "o")
        assert status == 0
        assert "measuring full+next_gate:64, batch 1" in err
        assert "8 of 48 layers" in out
        assert len(fake) == 2
        assert {p.name for p in Path("o").iterdir()} == {
            *("rows.jsonl", "results.json", "steps.png", "parts.png"),
        }
        status, out, _ = run(*self.SMALL, "--engines", "resident", "--out", "o", "--json")
        assert status == 0
        assert json.loads(out)["rows"][0]["status"] == "ok"

    def test_options_take_the_place_of_the_file(
        self, run: Callable[..., tuple[int, str, str]], fake: list[dict[str, Any]]
    ) -> None:
        file = str(ROOT / "benchmarks" / "qwen3-30b-a3b.toml")
        arguments = ["--engines", "resident", "--batches", "2", "--routing", "uniform"]
        assert run(file, *arguments)[0] == 0
        assert [spec["batches"] for spec in fake] == [[2]]

    def test_nothing_measured_is_status_1(
        self, run: Callable[..., tuple[int, str, str]], fake: list[dict[str, Any]]
    ) -> None:
        assert fake == []
        status, out, _ = run(*self.SMALL, "--engines", "uva")
        assert status == 1
        assert "failed: while loading: RuntimeError: no uva" in out

    def test_what_fails_for_every_batch_is_said_once(
        self, run: Callable[..., tuple[int, str, str]], fake: list[dict[str, Any]]
    ) -> None:
        few = [*self.SMALL[:4], "--batches", "1,2,4", "--slots", "25%,50%"]
        _, _, err = run(*few, "--engines", "uva,resident", "--routing", "uniform")
        assert fake
        said = [line for line in err.splitlines() if "no uva" in " ".join(line.split())]
        assert len(said) == 2, "once for each number of slots"
        assert "uva:32 from batch 1: while loading: RuntimeError: no uva" in err
        assert err.count(" ms a step") == 3

    def test_an_interrupt_is_status_130(
        self, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "run_case", _interrupt)
        status, out, _ = run(*self.SMALL, "--engines", "resident")
        assert status == 130
        assert "interrupted; run the same command again" in out

    def test_a_full_disk_at_the_end_is_said_and_the_table_is_there(
        self,
        run: Callable[..., tuple[int, str, str]],
        fake: list[dict[str, Any]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(plots, "draw", full)
        monkeypatch.setattr(report, "save_json", lambda *_: "results.json could not be written")
        status, out, _ = run(*self.SMALL, "--engines", "resident")
        assert status == 1
        assert len(fake) == 1
        assert "no plots: [Errno 28] No space left on device" in out
        assert "results.json could not be written" in out
        assert "resident" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "say what to measure"),
            (["misspelt.toml"], "unknown setting 'modle'; did you mean 'model'?"),
            (["none.toml"], "there is no configuration file 'none.toml'\n"),
            ([TINY], f"configuration file {TINY!r}; a model is given by --model"),
            (["olmoe-1b-7b"], "configuration file 'olmoe-1b-7b'; a model is given by --model"),
            (["--model", "qwen3-30b-a3b", "--minutes", "-1"], "--minutes must be positive"),
            (["--model", "qwen3-30b-a3b", "--engines", "ful"], "did you mean 'full'"),
            (["--model", "qwen3-30b-a3b", "--slots", "few"], "neither a number of experts"),
            (
                ["--model", "qwen3-30b-a3b", "--batches", "x"],
                "batches: value 1 must be a whole number",
            ),
            (["--model", "qwen3-30b-a3b", "--out", "/proc/none"], "--out: cannot write"),
            (["--url", "localhost:8000", "--served-model", "m"], "--url must look like"),
            (["--url", "http://localhost:8000"], "--url needs --served-model"),
            (["--model", "./none"], "there is no model folder"),
            (["--model", "olmoe"], "did you mean 'olmoe-1b-7b'?"),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_what_is_wrong_is_one_line_and_status_2(
        self,
        arguments: list[str],
        message: str,
        run: Callable[..., tuple[int, str, str]],
        tmp_path: Path,
    ) -> None:
        (tmp_path / "misspelt.toml").write_text('modle = "olmoe-1b-7b"\n')
        arguments = [str(tmp_path / a) if a == "misspelt.toml" else a for a in arguments]
        status, out, err = run(*arguments)
        assert status == 2
        assert out == ""
        assert err.splitlines()[-1].startswith("error: ")
        assert message in err
        assert "Traceback" not in err


class TestEnvironment:
    def test_the_code_has_a_name(self) -> None:
        found = environment.source()
        assert len(found["code"]) == 16

    def test_a_doctor_that_fails_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*_: Any, **__: Any) -> Any:
            return subprocess.CompletedProcess([], 3, "", "Traceback\nBoom: no")

        monkeypatch.setattr(environment.subprocess, "run", run)
        monkeypatch.setattr(environment, "source", dict)
        machine = environment.look_around()["machine"]
        assert machine["failure"] == "doctor failed (3): Boom: no"
        assert not environment.has_gpu({"machine": machine})


def test_shapes_are_those_of_the_models() -> None:
    from tests.helpers import model_configs

    for name, public in (
        ("qwen3-30b-a3b", model_configs.QWEN3_30B),
        ("mixtral-8x7b", model_configs.MIXTRAL),
        ("olmoe-1b-7b", model_configs.OLMOE),
        ("deepseek-v2-lite", model_configs.DEEPSEEK_V2_LITE),
        ("gpt-oss-20b", model_configs.GPT_OSS_20B),
    ):
        config = shape_config(name)
        differing = ("dtype", "torch_dtype", "max_position_embeddings")
        for key, value in public.config.items():
            if key not in differing:
                assert config[key] == value, (name, key)


def test_an_interrupt_ends_the_command_and_its_children(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from prefetch_runtime.bench.child import run_process\n"
        "run_process([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'],\n"
        f"    limit_s=60, log=Path({str(tmp_path / 'log')!r}), environment={{}})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not ((tmp_path / "log").exists() and (tmp_path / "log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert time.monotonic() - started < 15
    assert b"KeyboardInterrupt" in error
