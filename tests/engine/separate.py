"""Run as a program: vLLM with engine and worker in their own processes; the worker is killed.

    python -m tests.engine.separate SPEC.json OUT.json

SPEC: {"llm": {arguments of vllm.LLM}, "prompt": [token], "max_tokens": int}. OUT: the tokens, what
the worker says of its cache, the processes that were started, and how the last request failed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Generate; then kill the worker while it generates."""
    from vllm import LLM, SamplingParams

    llm = LLM(**spec["llm"])
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=spec["max_tokens"])
    prompt = {"prompt_token_ids": spec["prompt"]}
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    result: dict[str, Any] = {
        "tokens": list(output.outputs[0].token_ids),
        "stats": llm.collective_rpc("prefetch_stats")[0],
        "audit": llm.collective_rpc("prefetch_audit")[0],
    }
    children = psutil.Process().children(recursive=True)
    result["children"] = [child.pid for child in children]
    (worker,) = [child for child in children if "Worker" in " ".join(child.cmdline())]

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
    engine.add_request("victim", prompt, sampling)
    steps, killed = 0, 0.0
    try:
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
            if steps == 3:
                killed = time.monotonic()
                worker.send_signal(signal.SIGKILL)
    except Exception as error:
        result["failure"] = type(error).__name__
        result["seconds"] = time.monotonic() - killed
    result["steps"] = steps
    return result


def main() -> int:
    """Write the result."""
    spec_path, out = map(Path, sys.argv[1:])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    out.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
