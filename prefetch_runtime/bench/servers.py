"""A running OpenAI-compatible server, measured from outside by `vllm bench serve`."""

import http.client
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefetch_runtime.bench.child import run_process, seconds_of
from prefetch_runtime.bench.config import BenchConfig, Server

_ANSWER_S = 10.0
_MOST_BYTES = 4 << 20


def reach(server: Server) -> Server | str:
    """The server as it can be measured, or why it cannot.

    vLLM says which model stands behind the name that it serves it by: where no tokenizer was
    given, it is that model's.
    """
    url = server.url.rstrip("/") + "/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            found = json.loads(answer.read(_MOST_BYTES))
        served = {str(model["id"]): model.get("root") for model in found["data"]}
    except urllib.error.HTTPError as error:
        return f"what answers at {server.url} is no OpenAI-compatible server ({url}: {error.code})"
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
        http.client.HTTPException,
    ):
        return f"what answers at {server.url} is no OpenAI-compatible server ({url} is no list)"
    except OSError as error:
        reason = getattr(error, "reason", error)
        return f"{server.url} cannot be reached: {reason}"
    if server.model not in served:
        names = ", ".join(name if name.isprintable() else ascii(name) for name in served)
        return f"{server.url} serves {names[:200] or 'nothing'}, not {server.model}"
    root = served[server.model]
    if server.tokenizer is not None or not isinstance(root, str) or not _is_a_name(root):
        return server
    if Path(root).is_absolute() and not Path(root).is_dir():  # a folder of the server's machine
        return server
    return server.model_copy(update={"tokenizer": root})


def _is_a_name(root: str) -> bool:
    """Whether a program can be given it and takes it for no option: a server may say anything."""
    return root.isprintable() and not root.startswith("-") and bool(root)


def command_of(server: Server, config: BenchConfig, batch: int, folder: Path) -> list[str]:
    """`vllm bench serve`, with the lengths of the other engines and `batch` requests at a time."""
    return [
        *(sys.executable, "-P", "-m", "prefetch_runtime.vllm.serve"),
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", server.url.rstrip("/"), "--model", server.tokenizer or server.model),
        *("--served-model-name", server.model),
        *("--dataset-name", "random", "--random-input-len", str(config.prompt_tokens)),
        *("--random-output-len", str(config.new_tokens), "--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(batch * config.repeats), "--max-concurrency", str(batch)),
        *("--num-warmups", str(batch), "--seed", str(config.seed), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]


def measure(
    server: Server, config: BenchConfig, batch: int, *, limit_s: float, log: Path
) -> dict[str, Any]:
    """`status`, and a reason or the figures. Token times are those between tokens of a request."""
    with tempfile.TemporaryDirectory(prefix="prefetch-runtime-bench-") as folder:
        status = run_process(
            command_of(server, config, batch, Path(folder)),
            limit_s=limit_s,
            log=log,
            environment={"VLLM_NO_USAGE_STATS": "1", **os.environ},
        )
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = json.loads(Path(folder, "result.json").read_text())
    if status is None:
        return {"status": "timeout", "reason": f"time limit of {seconds_of(limit_s)} reached"}
    if status != 0 or not found:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        reason = f"`vllm bench serve` ended with status {status}: {last[0][:200]} (log: {log})"
        return {"status": "failed", "reason": reason}
    asked, completed = batch * config.repeats, int(found.get("completed", 0))
    if completed != asked:
        return {"status": "failed", "reason": f"{completed} of {asked} requests were answered"}
    return {
        "status": "ok",
        "ttft_ms": [found[f"p{p}_ttft_ms"] for p in (50, 90, 99)],
        "tpot_ms": [found[f"p{p}_itl_ms"] for p in (50, 90, 99)],
        "step_ms": found["median_itl_ms"],
        "tokens_per_s": found["output_throughput"],
        "repeats": config.repeats,
        "steps": config.new_tokens * config.repeats,
    }
