"""Our log lines go where vLLM's go, in its format."""

import logging


def log_like_vllm() -> None:
    """Give the logger `prefetch_runtime` what vLLM gave the logger `vllm`: handlers and level.

    vLLM configures its own loggers only; without this, lines below WARNING would go nowhere. A
    logger that somebody else has configured (VLLM_LOGGING_CONFIG_PATH) is left alone.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("prefetch_runtime")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
