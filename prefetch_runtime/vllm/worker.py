"""`--worker-cls prefetch_runtime.vllm.PrefetchWorker`: a vLLM worker with an expert cache."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

import prefetch_runtime
from predictors import LEARNED
from prefetch_runtime.audit import audit
from prefetch_runtime.config import ConfigError, PrefetchConfig, spelled
from prefetch_runtime.early_refusals import refuse_tables
from prefetch_runtime.host_memory import HostMemoryError
from prefetch_runtime.metrics import MetricsPublisher, check_multiprocess_mode, start_metrics
from prefetch_runtime.recorder import TraceRecorder
from prefetch_runtime.refusals import told
from prefetch_runtime.table_saver import TableSaver
from prefetch_runtime.trace import save_trace
from prefetch_runtime.vllm import routed_experts
from prefetch_runtime.vllm.checkpoint import CheckpointError, check_sizes, explained
from prefetch_runtime.vllm.checks import (
    UnsupportedError,
    check_declared_slots,
    check_vllm_config,
    choose_mode,
    explain_mode,
    prepare_compilation,
)
from prefetch_runtime.vllm.engine import PrefetchEngine
from prefetch_runtime.vllm.logs import log_like_vllm
from prefetch_runtime.vllm.model_runner import adopt

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

logger = init_logger(__name__)

REFUSALS = (ConfigError, CheckpointError, HostMemoryError)

P = ParamSpec("P")
T = TypeVar("T")
Asked = Callable[Concatenate["PrefetchWorker", P], T]


def _refused(what: str, then: str = "") -> Callable[[Asked[P, T]], Asked[P, T]]:
    """Have a method of the worker raise UnsupportedError while the cache is on."""

    def refused(method: Asked[P, T]) -> Asked[P, T]:
        @wraps(method)
        def asked(worker: "PrefetchWorker", /, *args: P.args, **kwargs: P.kwargs) -> T:
            if worker.prefetch_engine is None:
                return method(worker, *args, **kwargs)
            raise UnsupportedError(
                f"{what} is not supported with the expert cache ({spelled('slots_per_layer')}); "
                f"restart without it{then}"
            )

        return asked

    return refused


class PrefetchWorker(BaseWorker):
    """vLLM's worker for the platform, with the experts in host memory and a slot cache before them.

    Without settings, or with `slots_per_layer` 0, it is vLLM's worker and nothing else.
    """

    prefetch_engine: PrefetchEngine | None = None
    prefetch_metrics: MetricsPublisher | None = None
    prefetch_saver: TableSaver | None = None

    @told(*REFUSALS)
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError for settings, options or models that the cache cannot serve."""
        log_like_vllm()
        self.prefetch_config = PrefetchConfig.from_additional_config(vllm_config.additional_config)
        if self.prefetch_config.enabled:
            check_vllm_config(vllm_config)
            check_declared_slots(vllm_config, self.prefetch_config)
            refuse_tables(self.prefetch_config, vllm_config.model_config.get_num_experts() or None)
            if self.prefetch_config.metrics:
                check_multiprocess_mode()
            self.prefetch_mode = self._choose_mode(vllm_config)
            # Before the next line changes what it depends on.
            self.prefetch_mode_reason = explain_mode(
                self.prefetch_mode, vllm_config, self.prefetch_config
            )
            prepare_compilation(
                vllm_config, mode=self.prefetch_mode, version=prefetch_runtime.__version__
            )
        elif "slots_per_layer" not in self.prefetch_config.model_fields_set:
            # The worker was asked for, its size forgotten: soon all experts are put on the device.
            logger.warning("Expert cache: off, vLLM alone; on with %s", spelled("slots_per_layer"))
        super().__init__(vllm_config, *args, **kwargs)

    def _choose_mode(self, vllm_config: VllmConfig) -> str:
        return choose_mode(vllm_config, self.prefetch_config)

    @told(*REFUSALS)
    def init_device(self) -> None:
        """Build vLLM's runner, then put the expert cache beside it."""
        super().init_device()
        if self.prefetch_config.enabled:
            self.prefetch_engine = PrefetchEngine(
                self.vllm_config, self.prefetch_config, self.device, mode=self.prefetch_mode
            )
            self.model_runner: Any = adopt(self.model_runner, self.prefetch_engine)

    @told(*REFUSALS)
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; a failure leaves no pinned memory behind."""
        try:
            if self.prefetch_config.enabled:
                is_here = check_sizes(self.vllm_config)
                with explained(self.model_config.model), routed_experts.registered():
                    super().load_model(*args, **kwargs)
                if not is_here:  # it, or a part of it, was fetched while it was loaded
                    check_sizes(self.vllm_config)
            else:
                super().load_model(*args, **kwargs)
        except BaseException:
            self._close_cache()
            raise

    @told(*REFUSALS)
    def compile_or_warm_up_model(self) -> Any:
        """Warm up, then forget what the warm-up routed: its tokens were not real."""
        if self.prefetch_engine is not None:
            self.prefetch_engine.warm_up()
        times = super().compile_or_warm_up_model()
        if self.prefetch_engine is not None:
            self.prefetch_engine.scheduler.reset()
            self.prefetch_engine.learn_anew()
            self.prefetch_engine.preload()
            self._keep_what_is_learned()
            if self.prefetch_config.metrics:
                self.prefetch_metrics = start_metrics(self.prefetch_engine.scheduler, self.device)
        return times

    def shutdown(self) -> None:
        """Shut down, the cache last: vLLM's graphs hold addresses of its slots."""
        if self.prefetch_metrics is not None:
            self.prefetch_metrics.close()
        try:
            if self.prefetch_saver is not None:
                self.prefetch_saver.close()
        finally:
            try:
                super().shutdown()
            finally:
                self._close_cache()

    def _keep_what_is_learned(self) -> None:
        """Where the settings say so, from now on."""
        path = self.prefetch_config.save_table
        learned = None if self.prefetch_engine is None else self.prefetch_engine.learned
        if path is not None and learned is not None:
            self.prefetch_saver = TableSaver(learned, Path(path))

    def _close_cache(self) -> None:
        if self.prefetch_engine is not None:
            self.prefetch_engine.close()

    # Called by name through `LLM.collective_rpc`

    def prefetch_stats(self) -> dict[str, Any] | None:
        """The counters (`RuntimeStats.as_dict`), or None when the cache is off."""
        if self.prefetch_engine is None:
            return None
        stats = self.prefetch_engine.scheduler.stats().as_dict()
        return {**stats, "mode_reason": self.prefetch_mode_reason}

    def prefetch_reset(self) -> None:
        """Empty the cache and restart the counters. Between requests only."""
        if self.prefetch_engine is not None:
            with self._metrics_go_on():
                self.prefetch_engine.scheduler.reset()

    def _metrics_go_on(self) -> AbstractContextManager[None]:
        """Within this context the counters may be restarted; what is published goes on."""
        metrics = self.prefetch_metrics
        return nullcontext() if metrics is None else metrics.restarting()

    def prefetch_audit(self) -> list[str]:
        """What is wrong with the slots now: empty when every mapped byte equals the host store."""
        if self.prefetch_engine is None:
            return []
        return audit(self.prefetch_engine.scheduler)

    def prefetch_trace_start(self, max_tokens: int, next_gate: bool) -> None:
        """Empty the cache, restart the counters, and record the routing from here on.

        Raises:
            UnsupportedError: the cache is off, or mode `full` was started without room for so long
                a trace, or without the guesses.
        """
        engine = self.prefetch_engine
        if engine is None:
            raise UnsupportedError(
                f"recording a trace needs the expert cache; set {spelled('slots_per_layer')}"
            )
        if next_gate:
            engine.check_gates(
                "a trace with the next routers' guesses", "leave them out (--no-next-gate)"
            )
            if engine.mode == "segmented" and not engine.graphs_guess:
                raise UnsupportedError(
                    "the captured graphs do not run the next layers' routers; to record their "
                    f"guesses start with {spelled('trace_tokens')} {max_tokens}, or with "
                    f"{spelled('mode')} 'eager'"
                )
        on_device = getattr(engine.scheduler, "device_recorder", None)
        if engine.mode == "full" and (on_device is None or on_device.max_tokens < max_tokens):
            raise UnsupportedError(
                f"captured graphs record only what they have room for: to record {max_tokens} "
                f"tokens start with {spelled('trace_tokens')} {max_tokens}, or with "
                f"{spelled('mode')} 'eager'"
            )
        engine.record_guesses = next_gate
        with self._metrics_go_on():
            engine.scheduler.reset()
        if on_device is not None:
            on_device.start(max_tokens)
            engine.scheduler.recorder = on_device
            return
        first = engine.host_store.layer(0)
        engine.scheduler.recorder = TraceRecorder(
            len(engine.host_store.layers), first.num_experts, max_tokens
        )

    def prefetch_trace_save(self, path: str) -> dict[str, int]:
        """Write the trace to an .npz and stop recording. Returns what it holds.

        Where it cannot be written nothing is lost: call again with another path.
        """
        engine = self.prefetch_engine
        recorder = None if engine is None else engine.scheduler.recorder
        if engine is None or recorder is None:
            raise RuntimeError("no trace is being recorded; call prefetch_trace_start first")
        recorder.stop()
        trace = recorder.trace()
        save_trace(path, trace)
        engine.scheduler.recorder = None
        return {
            "tokens": trace.num_tokens,
            "layers": trace.num_layers,
            "steps": len(trace.step_bounds()) - 1,
            "dropped": recorder.num_dropped,
            "dropped_steps": recorder.num_dropped_steps,
        }

    def prefetch_save_table(self, path: str) -> None:
        """Write what the predictor has learned so far to an .npz, for `predictor_table`.

        Raises:
            UnsupportedError: the predictor keeps no table.
        """
        learned = None if self.prefetch_engine is None else self.prefetch_engine.learned
        if learned is None:
            raise UnsupportedError(
                f"nothing is learned that could be saved; set {spelled('predictor')} to "
                f"{' or '.join(LEARNED)}"
            )
        learned.save(Path(path))

    # Refused while the cache is on

    @_refused("reloading weights")
    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: experts are loaded once, at start."""
        super().reload_weights(*args, **kwargs)

    @_refused("updating weights")
    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: experts are loaded once, at start."""
        super().update_weights(*args, **kwargs)

    @_refused(
        "sleep mode",
        "; vLLM has paused the engine before it asked, and no request runs until wake_up (POST "
        "/wake_up) is called",
    )
    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: the slots cannot be discarded yet."""
        super().sleep(*args, **kwargs)

    @_refused("resetting weights")
    def reset_weights(self) -> None:
        """Raises UnsupportedError: it would clear the slots, and leave the experts as they are."""
        super().reset_weights()

    @_refused("computing checksums of weights")
    def compute_weight_checksums(self) -> dict[str, str]:
        """Raises UnsupportedError: what is in the slots changes with every step."""
        checksums: dict[str, str] = super().compute_weight_checksums()
        return checksums

    @_refused("saving weights")
    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: the slots would be written as if they were all experts."""
        super().save_sharded_state(*args, **kwargs)

    @_refused("saving weights")
    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError, as `save_sharded_state`."""
        super().save_tensorized_model(*args, **kwargs)
