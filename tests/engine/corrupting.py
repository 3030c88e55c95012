"""A worker whose mapping is wrong whenever it is published: what the proofs must notice."""

from typing import Any

from prefetch_runtime.scheduler import LayerCache
from prefetch_runtime.vllm import PrefetchWorker


class CorruptingWorker(PrefetchWorker):
    """Moves every resident expert's entry on by one, so that each names a neighbour's slot."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        assert self.prefetch_engine is not None
        scheduler = self.prefetch_engine.scheduler
        publish = scheduler._publish

        def publish_wrongly(layer: LayerCache) -> None:
            publish(layer)
            row = layer.mapping[:-1]
            row[row >= 0] = row[row >= 0].roll(1)

        scheduler._publish = publish_wrongly  # type: ignore[method-assign]
