"""Where the lines of our loggers go."""

import logging
from collections.abc import Iterator

import pytest

pytestmark = [pytest.mark.engine]


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The project's logger, as it was before anything configured it; put back afterwards."""
    logger = logging.getLogger("prefetch_runtime")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers, logger.level, logger.propagate = before


def test_they_go_where_those_of_vllm_go(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefetch_runtime.vllm.logs import log_like_vllm

    theirs = logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    log_like_vllm()
    assert ours.handlers == theirs.handlers
    assert logging.getLogger("prefetch_runtime.vllm.checks").isEnabledFor(logging.INFO)
    log_like_vllm()
    assert len(ours.handlers) == len(theirs.handlers), "each line once"


def test_a_logger_that_somebody_configured_is_left_alone(ours: logging.Logger) -> None:
    from prefetch_runtime.vllm.logs import log_like_vllm

    ours.setLevel(logging.ERROR)
    log_like_vllm()
    assert (ours.level, ours.handlers) == (logging.ERROR, [])
