"""Options of `generate` and `trace` that are vLLM's: checked here, parsed by vLLM's own parser."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand

from prefetch_runtime.config import ConfigError
from prefetch_runtime.early_refusals import refuse_misspelt, refuse_options
from prefetch_runtime.serve_file import full_name

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of such a command."""
EPILOG = "Every other option is passed on to vLLM, as `vllm serve` takes it."

_LETTERS = re.compile("-[A-Za-oq-z][A-Za-z0-9]+")  # -pTEXT is a prompt
_PROMPT = ("-p", "--prompt")


class PassesOn(TyperCommand):
    """Such a command. Refuses vLLM's short options (-tp 2), which would be read as -t -p 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, argument in pairwise(["", *args]):
            if before not in _PROMPT and _LETTERS.fullmatch(argument):
                raise ConfigError(f"unknown option {argument}; vLLM's are taken in their long form")
        return super().parse_args(ctx, args)


_OVERRIDES = ("--hf-o", "--hf-c", "--config-f", "--loa")
"""How vLLM's --hf-overrides, --hf-config-path, --config-format and --load-format begin."""

_SET_HERE = {
    "--worker-cls": "the expert cache sets it itself",
    "--additional-config": "give the cache's settings as options",
    "--model": "the model is the first argument",
    "--config": "give the options themselves",
}


def option_name(argument: str) -> str:
    """The option that an argument sets, as vLLM reads it; "" for a value."""
    name = argument.partition("=")[0].replace("_", "-")
    return f"--{full_name(name[2:])}" if name.startswith("--") else ""


def overrides_model(arguments: Sequence[str]) -> bool:
    """Whether vLLM is told by these arguments to take something else for the model than its folder
    says."""
    return any(option_name(argument).startswith(_OVERRIDES) for argument in arguments)


def quantises(arguments: Sequence[str]) -> bool:
    """Whether vLLM is told by these arguments to load the model in another format."""
    return any(option_name(a).startswith("--q") or a.startswith("-q") for a in arguments)


def passed_on(
    context: typer.Context, *, instead_of_eager: str, is_cached: bool = True
) -> list[str]:
    """What a command was given beside its own options.

    Args:
        instead_of_eager: what to use in the place of vLLM's --enforce-eager.
        is_cached: whether there is a cache; vLLM alone serves what it does not.

    Raises:
        ConfigError: an option that is misspelt, that the command sets itself, or that the cache
            does not serve; or a text that belongs to no option.
    """
    arguments = list(context.args)
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"unexpected argument {arguments[0]!r}: quote a text with spaces, and give each prompt "
            "after --prompt"
        )
    own = {option for parameter in context.command.params for option in parameter.opts}
    refuse_misspelt(arguments, sorted(own))
    for argument in arguments:
        name, given = option_name(argument), argument.partition("=")[0]
        if name in _SET_HERE:
            raise ConfigError(f"{given} cannot be passed on: {_SET_HERE[name]}")
        if name.startswith(("--enforce-e", "--no-enforce-e")):
            raise ConfigError(f"{given} cannot be passed on: {instead_of_eager}")
    if is_cached:
        refuse_options(arguments)
    return arguments


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise ConfigError for a prompt whose bytes are no text, which no tokenizer takes."""
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--prompt {prompt!r} is not valid UTF-8") from None
