"""Entry point of the `vllm.general_plugins` group: lets vLLM's processes find the package."""


def register() -> None:
    """Register nothing. The cache is there only in a worker started with `--worker-cls`.

    vLLM calls this in every process of every model it serves, so a plugin that replaced classes
    here would change runs that never asked for a cache.
    """
