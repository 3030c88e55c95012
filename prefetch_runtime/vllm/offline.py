"""Runs vLLM offline as a spec says. A script of its own: it imports nothing of this package.

    python offline.py SPEC.json RESULT.json

SPEC: {"llm": {arguments of vllm.LLM}, "options": [more of them, as on vLLM's command line],
"prompts": [str], "sampling": {arguments of SamplingParams},
"before": [[worker method, arguments...]] to call before generating, "rpc": the same after it}.
RESULT: {"texts", "token_ids", "seconds", "rpc"} or {"error": message}. A spec without worker class
is vLLM alone, so that a run of ours can be compared with one that has loaded none of our code.
"""

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn


def parsed(options: list[str]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` from options as vLLM's command line takes them. Raises ValueError."""
    if not options:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"vLLM's options: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    # What stays absent was not given: vLLM knows its defaults.
    absent = object()
    every = vars(parser.parse_args([]))
    given = parser.parse_args(options, namespace=Namespace(**dict.fromkeys(every, absent)))
    return {name: value for name, value in vars(given).items() if value is not absent}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, generate, return the result."""
    from vllm import LLM, SamplingParams

    llm = LLM(**{**spec["llm"], **parsed(spec.get("options", []))})
    for name, *arguments in spec.get("before", []):
        llm.collective_rpc(name, args=tuple(arguments))
    started = time.perf_counter()
    outputs = llm.generate(spec["prompts"], SamplingParams(**spec["sampling"]), use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "texts": [output.outputs[0].text for output in outputs],
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "rpc": {
            name: llm.collective_rpc(name, args=tuple(arguments))[0]
            for name, *arguments in spec.get("rpc", [])
        },
    }


def main() -> int:
    """Write the result, or the error that ended the run, where the caller looks for it."""
    spec_path, result_path = map(Path, sys.argv[1:])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_PLUGINS"] = ""  # a worker class brings our code in, a plugin must not
    result: dict[str, Any]
    try:
        result = run(json.loads(spec_path.read_text()))
    except Exception as error:
        result_path.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    result_path.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
