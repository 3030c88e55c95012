"""Writes docs/options.md from the settings and the command line themselves.

python scripts/options_page.py
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from predictors import PredictorShape, RunsOn, create_predictor
from prefetch_runtime.bench.config import BenchConfig
from prefetch_runtime.cli import app
from prefetch_runtime.config import CLI_SPELLING, PREDICTORS, PrefetchConfig
from prefetch_runtime.policies import HOST_POLICY_NAMES, POLICY_NAMES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

Written by `python scripts/options_page.py` from the code; a test compares the two.

## Settings of the expert cache

For vLLM's own command they stand in `--additional-config '{"prefetch_runtime": {...}}'`, with
`--worker-cls prefetch_runtime.vllm.PrefetchWorker`. An unknown key, a wrong type or a value out
of range is refused before anything is loaded. The column "option" names the commands of
`prefetch-runtime` that have it; `serve` also takes `--additional-config` itself, for the others.

vLLM's own file for `serve`, `--config FILE.yaml`, holds them under the same key. `prefetch-runtime
serve` adds the worker class and lets the command line come first, setting by setting; for vLLM's
command `worker-cls` must be there, too.

    model: Qwen/Qwen3-30B-A3B
    additional-config:
      prefetch_runtime: {slots_per_layer: 48, predictor: next_gate}
"""

BENCH = """## A configuration file of `prefetch-runtime bench`

TOML, every key optional but `model`. `benchmarks/qwen3-30b-a3b.toml` is an example, and
`docs/benchmarks.md` says what is measured.
"""


def documented(model: type[BaseModel]) -> dict[str, str]:
    """What the string after each field says, in one line; "" for fields without one."""
    (cls,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(cls, ast.ClassDef)
    found: dict[str, str] = {}
    for node, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            found[node.target.id] = text
    return found


def default_of(model: type[BaseModel], name: str) -> str:
    """The default as it would be written, or nothing."""
    value: Any = model.model_fields[name].get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    return "" if value is None or value in ([], {}) else f"`{_written(value)}`"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_written(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _names(full: Sequence[str], host: Sequence[str]) -> str:
    return f' One of {", ".join(full)}; not in mode "full": {", ".join(host)}.'


def _choices(model: type[BaseModel], name: str) -> str:
    if model is PrefetchConfig and name == "policy":
        return _names(POLICY_NAMES, HOST_POLICY_NAMES)
    if model is PrefetchConfig and name == "predictor":
        shape = PredictorShape(num_layers=2, num_experts=2, top_k=1)
        full = [p for p in PREDICTORS if create_predictor(p, shape).runs_on is RunsOn.BOTH]
        return _names(full, [p for p in PREDICTORS if p not in full])
    arguments = get_args(model.model_fields[name].annotation)
    words = [word for word in arguments if isinstance(word, str)]
    return f" One of {', '.join(words)}." if len(words) > 1 else ""


def having(option: str) -> list[str]:
    """The commands that size the expert cache and have the option."""
    sizing = CLI_SPELLING["slots_per_layer"]
    found = {name: {o for p in c.params for o in p.opts} for name, c in commands().items()}
    return [name for name, opts in found.items() if sizing in opts and option in opts]


def settings_table(model: type[BaseModel], *, options: bool) -> Iterator[str]:
    """A row for each field."""
    yield f"| setting |{' option |' if options else ''} default | meaning |"
    yield f"| --- |{' --- |' if options else ''} --- | --- |"
    for name, text in documented(model).items():
        option = ""
        if options:
            spelling = CLI_SPELLING[name]
            option = f" `{spelling}` ({', '.join(having(spelling))}) |"
        meaning = (text + _choices(model, name)).strip().replace("|", "\\|")
        yield f"| `{name}` |{option} {default_of(model, name)} | {meaning} |"


def commands() -> dict[str, Any]:
    """The subcommands by name."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = dict(group.commands)
    return found


def command_text(name: str, command: Any) -> Iterator[str]:
    """A section for a subcommand."""
    yield f"### `prefetch-runtime {name}`"
    yield ""
    yield " ".join((command.help or "").split("\n\n")[0].split())
    yield ""
    yield "| option | meaning |"
    yield "| --- | --- |"
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        is_option = bool(parameter.opts[0].startswith("-"))
        names = (
            ", ".join(parameter.opts)
            if is_option
            else (parameter.metavar or str(parameter.name).upper())
        )
        meaning = " ".join((parameter.help or "").split()).replace("|", "\\|")
        if parameter.required and is_option:
            meaning += " Needed."
        elif parameter.default is not None and parameter.default is not False and is_option:
            meaning += f" Default: {parameter.default}."
        yield f"| `{names.replace('|', chr(92) + '|')}` | {meaning} |"
    if command.epilog:
        yield ""
        yield command.epilog
    yield ""


def page() -> str:
    """The whole page."""
    lines = [HEAD, *settings_table(PrefetchConfig, options=True), "", "## Commands", ""]
    for name, command in commands().items():
        lines += command_text(name, command)
    lines += [BENCH, *settings_table(BenchConfig, options=False), ""]
    return "\n".join(lines)


def main() -> int:
    """Write it."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
