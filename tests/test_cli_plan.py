"""`plan` and `doctor` as commands: what they print, on 80 columns, their JSON and exit status."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from prefetch_runtime import cli, cli_plan, doctor, early_refusals, model_shape, plan_report
from prefetch_runtime.doctor import GpuFacts, Machine
from prefetch_runtime.host_memory import MemoryLimit
from prefetch_runtime.model_shape import MAX_CONFIG_BYTES, ModelError, load_config
from tests.helpers.model_configs import GPT_OSS_20B, QWEN3_30B

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "tiny-moe")
TRACE = str(ROOT / "models" / "tiny-moe-trace.npz")


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `prefetch-runtime` as the console script does, on 80 columns and without a GPU."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def go(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["prefetch-runtime", *arguments])
        status: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return Ran(int(status or 0), captured.out, captured.err)

    return go


def test_a_context_that_vllm_would_refuse(
    tmp_path: Path, qwen: str, run: Callable[..., Ran]
) -> None:
    size = "--gpu-gib", "24", "--context"
    assert run("plan", qwen, *size, "40960").status == 0
    refused = run("plan", qwen, *size, "40961")
    assert refused.status == 2
    assert refused.out == ""
    assert "--context 40961: the model takes sequences of 40960 tokens" in refused.err
    assert "give at most 40960" in refused.err
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    longer = _folder(tmp_path, {**QWEN3_30B.config, "rope_scaling": yarn})
    assert run("plan", longer, *size, "131072").status == 0


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return _folder(tmp_path, QWEN3_30B.config)


def _folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def _narrow(text: str, *, but: str = "  prefetch-runtime serve") -> None:
    """On 80 columns, except for what is to be copied whole: names and commands."""
    for line in text.splitlines():
        assert len(line) <= 80 or line.startswith((but, "/", "  vllm serve")), line
    assert "…" not in text


class TestPlan:
    def test_without_a_gpu_each_common_size_is_a_row(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, "--target", "20", "--prefetch-mode", "full")
        assert (ran.status, ran.err) == (0, "")
        _narrow(ran.out)
        rows = {
            words[0]: words
            for words in map(str.split, ran.out.splitlines())
            if words[1:2] == ["RTX"]
        }
        assert list(rows) == ["8", "12", "16", "24", "32"]
        assert rows["8"][4:] == ["too", "small", "71"]
        assert rows["24"][4:] == ["37/128", "82%", "27", "38", "24"]
        assert "H200" in ran.out
        assert "all 54.00 GiB" in ran.out

    def test_one_size_is_shown_in_full(self, run: Callable[..., Ran], qwen: str) -> None:
        ran = run("plan", qwen, "--gpu-gib", "24", "--target", "20", "--prefetch-mode", "full")
        assert (ran.status, ran.err) == (0, "")
        _narrow(ran.out)
        for part in (
            "54.00 GiB, page-locked",
            "15.97 = 37 of 128 experts per layer",
            "37/128  15.61   82%  full       11       26       37        27       38",
            "20 tokens/s take 24 slots per layer (10.12 GiB): they fit.",
            "base: a step without misses; copy: the misses over the link; step: both",
            "published, qwen3-30b-a3b",
            "25 GB/s, assumed",
            "uniform routing, which no eviction can help",
            "--moe-expert-cache-size 37 --max-model-len 8192",
            "\nstart it with all that fit (the target takes 24)\n",
        ):
            assert part in ran.out

    def test_rates_that_are_uniform_are_not_said_to_be_worse_with_uniform_routing(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, "--gpu-gib", "24", "--curve", "uniform")
        assert "37/128" in ran.out
        assert "assumed: uniform routing" in ran.out
        assert "which no eviction can help" not in ran.out

    def test_the_command_that_it_ends_with_is_one_that_serve_takes(
        self, run: Callable[..., Ran], qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ending = run("plan", qwen, "--gpu-gib", "24").out.partition("start it with\n")[2]
        command = ending.splitlines()[0].split()
        (told,) = json.loads(run("plan", qwen, "--gpu-gib", "24", "--json").out)["plans"]
        assert told["command"].split() == command
        executed: list[str] = []
        monkeypatch.setattr("os.execv", lambda _, arguments: executed.extend(arguments))
        monkeypatch.setattr(early_refusals, "is_cpu_build", lambda: False)
        assert command[0] == "prefetch-runtime"
        save_file({"model.norm.weight": torch.zeros(1)}, Path(qwen) / "model.safetensors")
        assert run(*command[1:]).status == 0
        assert executed[-1] == '{"prefetch_runtime": {"slots_per_layer": 37}}'

    def test_the_command_repeats_all_that_the_slots_depend_on(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        given = ["--staging-slots", "4", "--gpu-memory-utilization", "0.8", "--context", "4096"]
        command = run("plan", qwen, "--gpu-gib", "48", *given).out.partition("start it with\n")[2]
        assert "--staging-slots 4 --max-model-len 4096" in command
        assert "--gpu-memory-utilization 0.8" in command

    def test_the_default_mode_is_that_of_serve_and_the_other_is_named(
        self, run: Callable[..., Ran], qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = run("plan", qwen, "--gpu-gib", "24", "--prefetch-mode", "eager")
        assert "eager       67       26       93        11" in ran.out
        assert "(--prefetch-mode full): 27 tokens/s with 37 slots." in ran.out
        assert "--moe-expert-cache-size 37 --prefetch-mode eager" in ran.out
        room = MemoryLimit("MemAvailable", 100 << 30, "")  # what is free changes between two runs
        monkeypatch.setattr(plan_report, "tightest_host_limit", lambda: room)
        default = run("plan", qwen, "--gpu-gib", "24").out
        assert default == run("plan", qwen, "--gpu-gib", "24", "--prefetch-mode", "full").out
        assert doctor.AUTO_MODE == "full"

    def test_vllms_names_for_context_and_batch_are_taken_as_well(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        ours = run("plan", qwen, "--gpu-gib", "24", "--context", "2048", "--batch", "4", "--json")
        its = ("--max-model-len", "2048", "--max-num-seqs", "4")
        assert run("plan", qwen, "--gpu-gib", "24", *its, "--json").out == ours.out
        assert json.loads(ours.out)["plans"]

    @pytest.mark.parametrize("gpu", [[], ["--gpu-gib", "24"]], ids=["sizes", "one"])
    def test_mode_segmented_says_what_it_assumes_of_the_host(
        self, gpu: list[str], run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, *gpu, "--prefetch-mode", "segmented")
        assert (ran.status, ran.err) == (0, "")
        _narrow(ran.out)
        text = " ".join(ran.out.split())
        assert "host assumed: 65 us at each MoE layer, as beside one H200" in text
        assert "misses in mode segmented have not been compared" in text
        given = run("plan", qwen, *gpu, "--prefetch-mode", "segmented", "--host-us", "90.5")
        assert "host 90.5 us at each MoE layer, given" in " ".join(given.out.split())
        if gpu:
            assert "37/128  15.61   82%  segmented       14" in ran.out
            assert "37/128  15.61   82%  segmented       15" in given.out
            assert "(--prefetch-mode full): 27 tokens/s with 37 slots." in text
            assert "--moe-expert-cache-size 37 --prefetch-mode segmented" in text
        else:
            assert "This is mode segmented, which waits for the host at each MoE layer" in text
        assert "host" not in json.loads(run("plan", qwen, *gpu, "--json").out)["assumptions"]

    def test_a_gpu_that_holds_all_is_told_to_do_without(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, "--gpu-gib", "80")
        assert "all experts fit: no cache needed" in ran.out
        assert ran.out.splitlines()[-1].startswith("  vllm serve")

    @pytest.mark.parametrize(("free_gib", "warned"), [(8, True), (512, False)])
    def test_too_little_host_memory_is_said_under_the_command_too(
        self,
        free_gib: int,
        warned: bool,
        run: Callable[..., Ran],
        qwen: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        limit = MemoryLimit("MemAvailable", free_gib << 30, "")
        monkeypatch.setattr(plan_report, "memory_limits", lambda: [limit])
        ran = run("plan", qwen, "--gpu-gib", "24")
        _narrow(ran.out)
        below = ran.out.partition("start it with")[2]
        assert ("on a machine with more host memory" in below) == warned

    def test_small_sizes_are_in_mib(self, run: Callable[..., Ran]) -> None:
        ran = run(
            "plan", str(ROOT / "models" / "tiny-moe"), "--gpu-gib", "0.01", "--staging-slots", "16"
        )
        assert ran.status == 1
        assert "9.42 MiB" in ran.out
        assert "0.91 = too little: 4 slots take 1.50 MiB" in ran.out

    @pytest.mark.parametrize(
        ("gib", "said"),
        [("8", "too little: 8 slots take 3.38 GiB"), ("2", "too little for the rest of the model")],
    )
    def test_a_gpu_that_holds_too_little_ends_with_status_1(
        self, gib: str, said: str, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, "--gpu-gib", gib)
        assert ran.status == 1
        _narrow(ran.out)
        assert said in ran.out
        assert "start it with" not in ran.out
        levers = "What makes room: an int4 (GPTQ, AWQ) checkpoint" if gib == "8" else "No shorter"
        assert levers in ran.out
        assert "As it is, it takes a GPU of 9 GiB." in ran.out

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("50", "50 tokens/s take 69 slots per layer (29.11 GiB): 37 fit."),
            ("9000", "9000 tokens/s is out of reach: 94 with every expert resident."),
        ],
    )
    def test_a_target_that_is_missed_ends_with_status_1(
        self, target: str, said: str, run: Callable[..., Ran], qwen: str
    ) -> None:
        all_fit = run("plan", qwen, "--gpu-gib", "80", "--target", "9000")
        assert all_fit.status == 1
        assert "\nshort of the target: 200 tokens/s with every expert resident\n" in all_fit.out
        ran = run("plan", qwen, "--gpu-gib", "24", "--target", target, "--prefetch-mode", "full")
        assert ran.status == 1
        assert said in ran.out
        assert "start it with" not in ran.out
        assert "\nshort of the target: 27 tokens/s with the 37 that fit\n" in ran.out

    def test_a_target_that_takes_all_that_fit_or_no_cache_needs_no_remark(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        exact = run("plan", qwen, "--gpu-gib", "24", "--target", "26.8")
        assert "take 37 slots per layer (15.61 GiB): they fit." in exact.out
        assert "\nstart it with\n" in exact.out
        assert "\nstart it with\n" in run("plan", qwen, "--gpu-gib", "80", "--target", "9").out

    def test_what_to_put_for_the_model_of_a_named_shape_is_said(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", "qwen3-30b-a3b", "--gpu-gib", "24")
        _narrow(ran.out)
        assert "serve MODEL --moe" in ran.out
        assert ran.out.endswith(
            "\nMODEL: a checkpoint of qwen3-30b-a3b's shape, a folder or a name on the hub\n"
        )
        assert "MODEL" not in run("plan", qwen, "--gpu-gib", "24").out

    def test_json_is_alone_and_holds_the_numbers(self, run: Callable[..., Ran], qwen: str) -> None:
        ran = run("plan", qwen, "--gpu-gib", "24", "--target", "50", "--json")
        assert ran.err == ""
        told = json.loads(ran.out)
        assert told["experts_bytes"] == told["pinned_bytes"] == 54 * 2**30
        assert told["model"]["expert_bytes"] == 9_437_184
        assert told["assumptions"]["link"].startswith("25 GB/s, assumed")
        (plan,) = told["plans"]
        assert plan["memory"]["slots_per_layer"] == 37
        assert [e["slots_per_layer"] for e in plan["estimates"]] == [8, 16, 32, 37]
        assert plan["target_fits"] is False
        assert ran.status == 1

    def test_a_smaller_batch_that_decodes_more_in_all_is_named(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        batch = ["--batch", "16", "--prefetch-mode", "full"]
        ran = run("plan", qwen, "--gpu-gib", "24", *batch)
        assert ran.status == 0
        _narrow(ran.out)
        said = (
            "Batch 1 reaches 27 tokens/s in all: the KV cache of 16 x 8192 tokens takes the slots' "
            "memory."
        )
        assert said in " ".join(ran.out.split())
        (plan,) = json.loads(run("plan", qwen, "--gpu-gib", "24", *batch, "--json").out)["plans"]
        assert plan["better_batch"] == {
            "batch": 1,
            "slots_per_layer": 37,
            "tokens_per_s": pytest.approx(27, rel=0.02),
            "why": "the KV cache of 16 x 8192 tokens takes the slots' memory",
        }
        alone = run("plan", qwen, "--gpu-gib", "24")
        assert "tokens/s in all" not in alone.out
        sizes = run("plan", qwen, *batch)
        _narrow(sizes.out)
        text = " ".join(sizes.out.split())
        assert "Fewer sequences reach more tokens/s in all: batch 1 on 12 GiB (11)," in text
        assert "batch 8 on 80 GiB" in text
        told = json.loads(run("plan", qwen, "--json").out)
        assert [plan["better_batch"] for plan in told["plans"]] == [None] * 8
        traced = ["--trace", TRACE, "--batch", "64"]
        few = run("plan", TINY, "--gpu-gib", "0.05", "--context", "128", *traced)
        assert few.err == ""

    def test_json_of_all_sizes(self, run: Callable[..., Ran], qwen: str) -> None:
        told = json.loads(run("plan", qwen, "--json").out)
        assert [plan["gpu"]["gib"] for plan in told["plans"]] == [8, 12, 16, 24, 32, 48, 80, 141]

    def test_what_is_given_is_used_and_called_given(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        options = ["--link-gbs", "11", "--memory-gbs", "700", "--context", "100", "--batch", "2"]
        ran = run("plan", qwen, "--gpu-gib", "24", *options)
        for part in ("11 GB/s, given", "700 GB/s, given", "2 x 100 tokens", "share the slots"):
            assert part in ran.out
        ran = run("plan", qwen, "--gpu-gib", "24", "--resident-ms", "7.5")
        assert "7.5 ms without misses, given" in ran.out
        assert "data sheet" not in ran.out

    def test_a_trace_gives_the_hit_rates(self, run: Callable[..., Ran]) -> None:
        ran = run("plan", TINY, "--gpu-gib", "8", "--trace", TRACE, "--batch", "8")
        assert ran.status == 0
        _narrow(ran.out)
        assert "simulated: LRU on the trace" in ran.out
        assert "below 1 MiB do not fill the link" in ran.out

    def test_the_model_in_this_repository_fits_everywhere(self, run: Callable[..., Ran]) -> None:
        ran = run("plan", TINY)
        assert ran.status == 0
        _narrow(ran.out)
        assert ran.out.count(" all ") >= 8
        assert "uniform routing" in ran.out

    def test_experts_that_the_worker_refuses_are_said_to_be(
        self, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        config = {**QWEN3_30B.config, "quantization_config": nvfp4}
        model = _folder(tmp_path, config)
        for options in (["--gpu-gib", "12"], []):
            ran = run("plan", model, *options)
            assert (ran.status, ran.err) == (1, "")
            _narrow(ran.out)
            text = " ".join(ran.out.split())
            assert "the cache refuses this: experts in modelopt's NVFP4 have no kernel" in text
            assert "; use an unquantised, fp8, GPTQ, AWQ, compressed-tensors" in text
            assert "all 15.1" in text
            assert "start it with" not in text
            assert "61/128" not in text, "no speed of a cache that would not start"
            ran = run("plan", model, *options, "--json")
            assert (ran.status, ran.err) == (1, "")
            assert json.loads(ran.out)["refused"].startswith("experts in modelopt's NVFP4")
            commands = [plan["command"] for plan in json.loads(ran.out)["plans"]]
            assert commands[0] is None
            assert not any("expert-cache" in command for command in commands if command)

    def test_sizes_that_would_take_the_refused_cache_are_told_from_those_that_need_none(
        self, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        model = _folder(tmp_path, {**QWEN3_30B.config, "quantization_config": nvfp4})
        ran = run("plan", model, "--target", "160", "--batch", "4")
        rows = {row[0]: row for row in map(str.split, ran.out.splitlines()) if len(row) > 4}
        assert rows["12"][4:] == ["refused", "all"]
        assert rows["80"][4] == rows["80"][-1] == "all"
        assert "Fewer sequences" not in ran.out

    def test_a_refused_model_that_fits_whole_needs_no_cache(
        self, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        config = {**QWEN3_30B.config, "quantization_config": nvfp4}
        ran = run("plan", _folder(tmp_path, config), "--gpu-gib", "80")
        assert ran.status == 0
        assert "the cache refuses this" in ran.out
        assert ran.out.splitlines()[-1].startswith("  vllm serve")

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (
                {**QWEN3_30B.config, "quantization_config": {"quant_method": "gguf"}},
                "experts of quant_method 'gguf' have no kernel that it serves; use an unquantised",
            ),
            (
                {"model_type": "dbrx", "d_model": 6144, "ffn_config": {"moe_num_experts": 16}},
                "models of type dbrx bring an experts class of their own (DbrxExperts)",
            ),
        ],
        ids=["gguf", "dbrx"],
    )
    def test_a_refused_model_without_known_sizes_ends_with_the_refusal(
        self, config: dict[str, Any], said: str, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        model = _folder(tmp_path, config)
        ran = run("plan", model)
        assert (ran.status, ran.err) == (1, "")
        _narrow(ran.out)
        assert ran.out.startswith("the cache refuses this: ")
        assert said in " ".join(ran.out.split())
        assert "modelopt" not in ran.out, "no format that is not served"
        ran = run("plan", model, "--json")
        assert ran.status == 1
        assert said in json.loads(ran.out)["refused"]

    def test_rows_in_waves_are_called_so_and_the_slots_without_them_are_named(
        self, run: Callable[..., Ran], qwen: str
    ) -> None:
        def modes(out: str) -> dict[str, str]:
            rows = (line.split() for line in out.splitlines())
            return {row[0]: row[3] for row in rows if len(row) == 9 and "/128" in row[0]}

        ran = run("plan", qwen, "--gpu-gib", "16", "--batch", "3")
        _narrow(ran.out)
        assert modes(ran.out) == dict.fromkeys(("8/128", "16/128", "18/128"), "full+waves")
        assert "full+waves: fewer slots than the batch may need; in waves inside" in ran.out
        assert "outside of any graph." not in ran.out
        assert "24 slots would decode this batch without waves; 18 do so for 2" in ran.out
        text = " ".join(ran.out.split())
        assert "tokens/s: of all sequences, by that step" in text
        assert "waves assumed: 59 us for each wave but the first of an MoE layer inside" in text
        fits = run("plan", qwen, "--gpu-gib", "24", "--batch", "3")
        assert list(modes(fits.out).items())[-3:] == [
            ("24/128", "full"),
            ("32/128", "full"),
            ("34/128", "full"),
        ]
        assert "would decode this batch" not in fits.out
        fitting = run("plan", qwen, "--gpu-gib", "24")
        assert "full+waves" not in fitting.out
        assert "59 us" not in fitting.out
        eager = run("plan", qwen, "--gpu-gib", "16", "--batch", "3", "--prefetch-mode", "eager")
        assert set(modes(eager.out).values()) == {"waves"}
        assert "24 slots would decode this batch without waves" in eager.out
        assert "waves: fewer slots than the batch may need; outside of any graph.\n" in eager.out
        assert "59 us" not in eager.out
        assert "As one CUDA graph per step, waves inside (--prefetch-mode full): 10" in eager.out
        alone = run("plan", qwen, "--gpu-gib", "16", "--prefetch-mode", "eager")
        assert set(modes(alone.out).values()) == {"eager"}
        every = run("plan", qwen, "--gpu-gib", "24", "--batch", "16", "--context", "512")
        assert "4 sequences without waves; this batch may need every expert." in every.out
        told = json.loads(run("plan", qwen, "--gpu-gib", "16", "--batch", "3", "--json").out)
        found = {(e["mode"], e["waves"]) for e in told["plans"][0]["estimates"]}
        assert found == {("full", 2)}
        assert told["assumptions"]["waves"].endswith("as many as the worst routing needs")

    def test_why_waves_are_outside_of_the_graph_is_said(
        self, run: Callable[..., Ran], qwen: str, tmp_path: Path
    ) -> None:
        ran = run("plan", qwen, "--gpu-gib", "24", "--batch", "65", "--context", "64")
        _narrow(ran.out)
        text = " ".join(ran.out.split())
        assert "outside of any graph, which takes 64 sequences and 9 waves at most." in text
        few = ["--gpu-gib", "24", "--batch", "5", "--staging-slots", "2", "--context", "512"]
        rows = [line.split() for line in run("plan", qwen, *few).out.splitlines()]
        modes = {row[0]: row[3] for row in rows if len(row) == 9 and "/128" in row[0]}
        assert list(modes.items())[1:3] == [("16/128", "waves"), ("32/128", "full+waves")]
        awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
        model = _folder(tmp_path, {**QWEN3_30B.config, "quantization_config": awq})
        ran = run("plan", model, "--gpu-gib", "8", "--batch", "8", "--context", "512")
        _narrow(ran.out)
        assert "full+waves" in ran.out

    def test_sizes_that_decode_in_waves_are_named(self, run: Callable[..., Ran], qwen: str) -> None:
        ran = run("plan", qwen, "--batch", "3")
        _narrow(ran.out)
        text = " ".join(ran.out.split())
        assert "In waves, inside the graph, on 12, 16 GiB: the batch may need 24 slots." in text
        assert "outside of any graph, on" not in text
        assert "In waves" not in run("plan", qwen).out
        both = run("plan", qwen, "--batch", "6", "--context", "512", "--staging-slots", "4")
        text = " ".join(both.out.split())
        assert "In waves, inside the graph, on 24 GiB: the batch may need 48 slots." in text
        assert "In waves, outside of any graph, on 8, 12, 16 GiB: the batch may need 48" in text

    def test_the_kernel_that_serves_a_quantised_model_is_in_its_command(
        self, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        mxfp4 = {"quant_method": "mxfp4"}
        config = {**GPT_OSS_20B.config, "quantization_config": mxfp4}
        ran = run("plan", _folder(tmp_path, config), "--gpu-gib", "12")
        assert ran.status == 0
        _narrow(ran.out)
        assert " --moe-backend marlin --max-model-len" in ran.out
        assert "the cache refuses" not in ran.out

    def test_the_present_gpu_is_measured(
        self, run: Callable[..., Ran], qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = GpuFacts(
            name="NVIDIA [test]",
            total_bytes=24 * 2**30,
            free_bytes=2**30,
            compute_capability="8.9",
            link_gbs=23.4,
            memory_gbs=870.0,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor, "gpu_facts", lambda: facts)
        ran = run("plan", qwen)
        assert ran.status == 0
        assert "24 GiB of GPU memory (NVIDIA [test])" in ran.out
        assert "23.4 GB/s, measured" in ran.out
        broken = replace(facts, link_gbs=None, memory_gbs=None, failure="out of memory")
        monkeypatch.setattr(doctor, "gpu_facts", lambda: broken)
        ran = run("plan", qwen)
        assert ran.status == 2
        assert "cannot be measured: out of memory; give --gpu-gib" in ran.err
        assert run("plan", qwen, "--gpu-gib", "24").status == 0

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--gpu-gib", "-8"], "a GPU's size must be positive and finite, got -8"),
            (["--gpu-gib", "0"], "a GPU's size"),
            (["--gpu-gib", "nan"], "a GPU's size"),
            (["--link-gbs", "0"], "a link bandwidth"),
            (["--link-gbs", "inf"], "a link bandwidth"),
            (["--memory-gbs", "-1"], "a memory bandwidth"),
            (["--resident-ms", "-1"], "a step's time"),
            (["--batch", "0"], "batch must be at least 1"),
            (["--context", "-5"], "context must be at least 1"),
            (["--target", "0"], "a target must be positive"),
            (["--gpu-memory-utilization", "1.2"], "above 0 and at most 1"),
            (["--staging-slots", "0"], "staging slots must be 'auto' or 2 to 1024"),
            (["--staging-slots", "many"], "'auto' or a whole number of experts, got 'many'"),
            (["--curve", "uniforn"], "did you mean 'uniform'?"),
            (["--curve", "uniform", "--trace", TRACE], "leave one out"),
            (["--trace", TRACE], "--trace: the trace belongs to another model"),
            (["--trace", "/no/such.npz"], "--trace: "),
            (["--trace", TINY], "--trace: "),
            (["--prefetch-mode", "fast"], "one of auto, full, segmented, eager, got 'fast'"),
            (["--host-us", "20"], "--host-us is of mode segmented, and this plans for full"),
            (
                ["--prefetch-mode", "segmented", "--host-us", "-1"],
                "the host's time at a layer must be 0 to 1e6 us, got -1",
            ),
            (["--prefetch-mode", "segmented", "--host-us", "nan"], "0 to 1e6 us, got nan"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_an_option_that_cannot_be_ends_in_one_line(
        self, options: list[str], said: str, run: Callable[..., Ran], qwen: str
    ) -> None:
        ran = run("plan", qwen, *options)
        assert ran.status == 2
        assert ran.out == ""
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
        assert said in ran.err

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ("{", "is not valid JSON"),
            ("[]", "must hold an object"),
            ('{"model_type": "llama"}', "a dense model"),
            ('{"num_experts": 8, "num_experts_per_tok": 2}', "no positive whole number hidden_s"),
        ],
    )
    def test_a_config_that_is_none_ends_in_one_line(
        self, config: str, said: str, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text(config)
        ran = run("plan", str(tmp_path))
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.count("\n") == 1
        assert said in ran.err

    def test_text_of_a_config_is_printed_as_it_is(
        self, run: Callable[..., Ran], tmp_path: Path
    ) -> None:
        folder = tmp_path / "[red]model"
        folder.mkdir()
        ran = run("plan", _folder(folder, {**QWEN3_30B.config, "model_type": "[bold]x\x1b[31m"}))
        assert "[red]model" in ran.out
        assert "\x1b" not in ran.out
        assert "model type unnamed" in " ".join(ran.out.split())


class TestHub:
    NAME = "Qwen/Qwen3-30B-A3B"

    def test_the_hubs_cache_is_read_first(self, qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")
        modelopt = Path(qwen, "hf_quant_config.json")
        modelopt.write_text(
            '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}'
        )
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda _, name: f"{qwen}/{name}")
        assert load_config(self.NAME) == {
            **QWEN3_30B.config,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        }
        Path(qwen, "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
        modelopt.unlink()
        monkeypatch.setattr(model_shape, "_fetch_format", lambda _: pytest.fail("asked the hub"))
        assert load_config(self.NAME)["quantization_config"] == {"quant_method": "fp8"}

    def test_a_config_is_fetched_alone_and_only_if_it_is_small(
        self, qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = pytest.importorskip("huggingface_hub")
        fetched: list[tuple[str, str]] = []

        class Metadata(NamedTuple):
            size: int

        def download(repo: str, name: str) -> str:
            fetched.append((repo, name))
            return f"{qwen}/config.json"

        def metadata(url: str) -> Metadata:
            if url.endswith("/hf_quant_config.json"):
                raise hub.errors.EntryNotFoundError("404")
            return Metadata(size)

        size = MAX_CONFIG_BYTES
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
        monkeypatch.setattr(hub, "get_hf_file_metadata", metadata)
        monkeypatch.setattr(hub, "hf_hub_download", download)
        assert load_config(self.NAME) == QWEN3_30B.config
        assert fetched == [(self.NAME, "config.json")]
        size += 1
        with pytest.raises(ModelError, match="larger than 4 MiB"):
            load_config(self.NAME)
        assert len(fetched) == 1

    @pytest.mark.parametrize(("size", "fits"), [(MAX_CONFIG_BYTES, True), (1 << 40, False)])
    def test_modelopts_own_file_is_fetched_only_if_it_is_small(
        self, size: int, fits: bool, qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = pytest.importorskip("huggingface_hub")
        modelopt = Path(qwen, "hf_quant_config.json")
        modelopt.write_text(
            '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "fp8"}}'
        )

        def cached(_: str, name: str) -> str | None:
            return f"{qwen}/{name}" if name == "config.json" else None

        monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
        monkeypatch.setattr(hub, "get_hf_file_metadata", lambda _: SimpleNamespace(size=size))
        monkeypatch.setattr(hub, "hf_hub_download", lambda _, name: f"{qwen}/{name}")
        if fits:
            assert load_config(self.NAME)["quantization_config"]["quant_algo"] == "FP8"
        else:
            with pytest.raises(ModelError, match=r"the hf_quant_config.json of .* than 4 MiB"):
                load_config(self.NAME)

    def test_a_config_from_the_cache_needs_no_network(
        self, qwen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = pytest.importorskip("huggingface_hub")

        def cached(_: str, name: str) -> str | None:
            return f"{qwen}/{name}" if name == "config.json" else None

        def fail(_: str) -> None:
            raise hub.errors.OfflineModeIsEnabled("offline")

        monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
        monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
        assert load_config(self.NAME) == QWEN3_30B.config

    @pytest.fixture
    def out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")

        def fail(_: str) -> None:
            raise ConnectionError("no route to host\nmany details")

        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
        monkeypatch.setattr(hub, "get_hf_file_metadata", fail)

    @pytest.mark.usefixtures("out_of_reach")
    def test_a_hub_out_of_reach_ends_in_one_line(self, run: Callable[..., Ran]) -> None:
        ran = run("plan", self.NAME)
        assert (ran.status, ran.out) == (2, "")
        assert "cannot be had from the hub (no route to host); give a folder" in ran.err
        assert ran.err.count("\n") == 1

    @pytest.mark.usefixtures("out_of_reach")
    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
            ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
            ("openai/gpt-oss-120b", "gpt-oss-120b"),
            ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
            ("Qwen/Qwen3-80B-A3B", None),
            ("deepseek-ai/DeepSeek-V3.2", None),
            ("mistralai/Mixtral-8x22B", None),
        ],
    )
    def test_a_hub_out_of_reach_offers_the_named_shape(self, name: str, shape: str | None) -> None:
        with pytest.raises(ModelError, match="give a folder that holds it") as refused:
            load_config(name)
        offer = f", or, without network, the named shape {shape} (as first published)"
        assert str(refused.value).endswith(offer if shape else "give a folder that holds it")

    def test_without_the_hubs_package_a_folder_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelError, match=r"without the package huggingface_hub.*qwen3-30b"):
            load_config(self.NAME)

    def test_serve_still_leaves_names_to_vllm(self) -> None:
        assert model_shape.read_config(self.NAME) is None


class TestDoctor:
    def _on(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "examine", lambda: machine)

    def _machine(self, **versions: str | None) -> Machine:
        gpu = GpuFacts(
            name="NVIDIA H200 [red]",
            total_bytes=140 * 2**30,
            free_bytes=139 * 2**30,
            compute_capability="9.0",
            link_gbs=54.31,
            memory_gbs=4100.0,
        )
        return Machine(
            versions={"vllm": "0.33.0", "triton": "3.9.0", "cuda-python": "13.0", **versions},
            python="3.11.7",
            torch_cuda="13.0",
            driver="580.65.06",
            gpu=gpu,
            limits=[MemoryLimit("cgroup memory.max of " + "/a" * 60, 2**30, "raise it")],
            lock_limit=8 << 20,
        )

    def test_a_gpu_is_described_on_80_columns(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._on(self._machine(), monkeypatch)
        ran = run("doctor")
        assert ran.status == 0
        _narrow(ran.out)
        for part in (
            "NVIDIA H200 [red], compute capability 9.0",
            "54.3 GB/s, measured",
            "580.65.06",
            "RLIMIT_MEMLOCK 8.00 MiB",
            "note: RLIMIT_MEMLOCK",
            "segmented  runs; it needs CUDA graphs, so not with --enforce-eager; it waits",
            "no problems found",
        ):
            assert part in ran.out

    def test_problems_end_with_status_1(
        self, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._on(self._machine(vllm=None), monkeypatch)
        ran = run("doctor")
        assert ran.status == 1
        assert "problem: vLLM is not installed; pip install 'prefetch-runtime[vllm]'" in ran.out
        assert "no problems found" not in ran.out
        ran = run("doctor", "--json")
        assert ran.status == 1
        told = json.loads(ran.out)
        assert "vLLM is not installed" in told["problems"][0]
        assert told["gpu"]["link_gbs"] == 54.3
        assert ran.err == ""

    def test_this_machine(self, run: Callable[..., Ran]) -> None:
        ran = run("doctor")
        assert ran.status in (0, 1)
        _narrow(ran.out)
        assert (ran.status == 0) == ("no problems found" in ran.out)


class TestPage:
    PAGE = (ROOT / "docs" / "choosing-slots.md").read_text()
    COMMANDS = re.findall(r"^ {4,}(prefetch-runtime .*)$", PAGE, re.MULTILINE)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_of_the_page_runs(
        self,
        command: str,
        run: Callable[..., Ran],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder = tmp_path / "Qwen" / "Qwen3-30B-A3B"  # taken before the hub's model of that name
        folder.mkdir(parents=True)
        _folder(folder, QWEN3_30B.config)
        (tmp_path / "models").symlink_to(ROOT / "models")
        monkeypatch.chdir(tmp_path)
        ran = run(*shlex.split(command)[1:])
        assert ran.err == ""
        assert ran.status == 0 or command == "prefetch-runtime doctor"
        assert ran.out

    def test_the_page_shows_plan_and_doctor(self) -> None:
        assert {command.split()[1] for command in self.COMMANDS} == {"plan", "doctor"}

    def test_every_option_that_the_page_names_is_there(self) -> None:
        named = set(re.findall(r"`(--[a-z-]+)`", self.PAGE))
        assert len(named) > 6
        ran = CliRunner().invoke(cli.app, ["plan", "--help"], env={"COLUMNS": "80"})
        assert [option for option in named if option not in ran.stdout] == []


class TestHelp:
    @pytest.mark.parametrize("command", ["plan", "doctor"])
    def test_help_fits_80_columns(self, command: str) -> None:
        ran = CliRunner().invoke(
            cli.app, [command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
        )
        assert ran.exit_code == 0
        assert max(map(len, ran.stdout.splitlines())) <= 80
        assert "…" not in ran.stdout

    def test_what_status_1_means_is_on_one_line(self) -> None:
        ran = CliRunner().invoke(
            cli.app, ["plan", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
        )
        assert "fits, or not the target, or the cache refuses the model." in ran.stdout

    def test_a_typo_suggests_the_command(self) -> None:
        ran = CliRunner().invoke(cli.app, ["plam"], env={"COLUMNS": "80"})
        assert ran.exit_code == 2
        assert "plan" in ran.output


def test_the_reports_of_both_commands_share_no_digits_they_do_not_have() -> None:
    assert [plan_report._speed(v) for v in (1234.5, 94.4, 9.87, 0.123)] == [
        "1,200",
        "94",
        "9.9",
        "0.1",
    ]
    assert cli_plan._rounded({"a": [1.23456, 7, "x"]}) == {"a": [1.23, 7, "x"]}
