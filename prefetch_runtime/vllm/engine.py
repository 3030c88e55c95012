"""What the worker builds once and every MoE layer uses: store, copier, scheduler, slot counts."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from predictors import LearnedPredictor, Predictor, PredictorShape, create_predictor
from predictors.npz import NpzError
from prefetch_runtime.budget import BudgetController
from prefetch_runtime.config import ConfigError, PrefetchConfig, spelled
from prefetch_runtime.copier import create_copier
from prefetch_runtime.host_prefetch import HostPrefetcher
from prefetch_runtime.host_store import HostStore, LayerStore
from prefetch_runtime.injection import RoutingInjection
from prefetch_runtime.refusals import mode_refused
from prefetch_runtime.scheduler import Between, ExpertWave, Guesses, Scheduler
from prefetch_runtime.vllm.checks import check_slots
from prefetch_runtime.waves import ring_bytes

logger = init_logger(__name__)

_current: ContextVar["PrefetchEngine"] = ContextVar("prefetch_engine")


class PrefetchEngine:
    """Owns the expert cache of one worker."""

    def __init__(
        self, vllm_config: VllmConfig, config: PrefetchConfig, device: torch.device, *, mode: str
    ) -> None:
        """`mode`: "full", "segmented" or "eager", see `checks.choose_mode`."""
        self.config = config
        self.device = device
        self.host_store = HostStore()
        self.mode = mode
        self.captures: Any = None
        """What has vLLM capture graphs that the host can interrupt, in mode `segmented`."""
        between: Between | None = None
        if mode == "segmented":
            self.captures, between = self._segments()
        self.scheduler: Scheduler = _scheduler_class(mode)(
            copier=create_copier(device),
            host_store=self.host_store,
            device=device,
            policy=config.policy,
            staging_slots=config.staging_slots,
            mode=mode,
            # vLLM 0.26's kernels cannot take -1 after a remap. Rows whose id is -1 belong to no
            # token, and vLLM drops what they yield, so any slot will do.
            id_for_padding=0,
            between=between,
        )
        graphs = vllm_config.compilation_config.cudagraph_mode
        self._pads = graphs is not None and graphs != CUDAGraphMode.NONE
        self.injection: RoutingInjection | None = None
        self._top_k = 0
        self._bar: tqdm[None] | None = None
        self._gates: list[torch.nn.Module | None] = []
        self._prefetcher: HostPrefetcher | None = None
        self._has_begun = False
        self.record_guesses = False
        """Whether a recorded trace holds the next routers' guesses."""
        self.counts_loads = False
        """Whether experts came through vLLM's loader, tensor by tensor."""
        self._vllm_config = vllm_config
        self._num_layers = 0
        self._wave_rows: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._auto: float | None = None
        self._slot_bytes: int | None = None

    def _segments(self) -> tuple[Any, Between]:
        from graphs import SegmentedCaptures, between_segments  # imports triton

        return SegmentedCaptures(), between_segments

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within this context what vLLM captures is what the mode replays."""
        with ExitStack() as stack:
            if self.captures is not None:
                stack.enter_context(self.captures.here())
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within this context the layers that vLLM builds belong to this engine."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def seal(self, model: torch.nn.Module) -> None:
        """Called when the model is loaded: fix the tables, start the predictor.

        Raises:
            ConfigError: the mode, or the predictor, cannot work with this model.
        """
        try:
            self.scheduler.seal()
        except ValueError as error:
            why_not = f"cannot serve this model: {error}"
            raise ConfigError(
                mode_refused(self.mode, why_not, "use 'segmented' or 'eager'")
            ) from None
        self._gates = gates_of(model)
        self._make_room_for_a_trace()
        if self.captures is not None:
            keep_on_one_stream(model)
        config = self.config
        if config.predictor == "none":
            return
        try:
            predictor = self._new_predictor()
            budget = config.prefetch_budget_mib
            budget_bytes = 0 if budget == "auto" else int(budget * 2**20)
            if self.mode == "full":
                self.scheduler.predict_on_device(predictor, budget_bytes=budget_bytes)
            else:
                self._prefetcher = HostPrefetcher(
                    predictor,
                    create_copier(self.device),
                    num_layers=self._num_layers,
                    top_k=self._top_k,
                    widen=config.predictor_widen,
                    budget_bytes=budget_bytes,
                )
                self.scheduler.attach_prefetcher(self._prefetcher)
        except NpzError as error:
            raise ConfigError(f"{spelled('predictor_table')}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{spelled('predictor')} {config.predictor!r}: {error}") from None
        if budget == "auto":
            layers = self.host_store.layers
            self.scheduler.control_budgets(
                BudgetController([layer.layout.payload_bytes for layer in layers])
            )
        if self.scheduler.needs_guesses:
            self.check_gates(
                f"{spelled('predictor')} {config.predictor!r}", "choose another predictor"
            )

    def _new_predictor(self) -> Predictor:
        shape = PredictorShape(
            num_layers=self._num_layers,
            num_experts=self.host_store.layer(0).num_experts,
            top_k=self._top_k,
        )
        table = self.config.predictor_table
        return create_predictor(
            self.config.predictor, shape, table=None if table is None else Path(table)
        )

    def learn_anew(self) -> None:
        """Let the predictor begin with its table, or with nothing, whatever has been computed."""
        if self._prefetcher is not None:
            self._prefetcher.predictor = self._new_predictor()
            self._has_begun = True

    @property
    def learned(self) -> LearnedPredictor | None:
        """What the predictor has learned since `learn_anew`; None if it keeps no table."""
        predictor = None if self._prefetcher is None else self._prefetcher.predictor
        return predictor if self._has_begun and isinstance(predictor, LearnedPredictor) else None

    def _make_room_for_a_trace(self) -> None:
        """Captured graphs record what they were captured to record."""
        tokens, scheduler = self.config.trace_tokens, self.scheduler
        if self.mode != "full" or not tokens:
            return
        from prefetch_runtime.device_scheduler import DeviceScheduler  # imports triton

        assert isinstance(scheduler, DeviceScheduler)
        has_gates = bool(self._gates) and None not in self._gates
        widest = min(
            self.config.predictor_widen * self._top_k, self.host_store.layer(0).num_experts
        )
        scheduler.make_room_for_a_trace(
            top_k=self._top_k, num_guesses=widest if has_gates else 0, max_tokens=tokens
        )

    @property
    def graphs_guess(self) -> bool:
        """Whether every step, captured ones included, runs the next layers' routers."""
        if self.scheduler.needs_guesses:
            return True
        traces = self.mode == "segmented" and self.config.trace_tokens > 0
        return traces and bool(self._gates) and None not in self._gates

    def warm_up(self) -> None:
        """Load the kernels: before vLLM first captures a graph, and again costs little."""
        most = self._vllm_config.scheduler_config.max_num_batched_tokens
        self.scheduler.warm_up(self._top_k, most)

    def preload(self) -> None:
        """Fill the layers whose experts all have a slot, so that no request waits for them."""
        started = time.perf_counter()
        scheduler = self.scheduler
        num_layers = scheduler.preload(self._top_k)
        if num_layers == 0:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        logger.info(
            "Expert cache: all experts of %d of %d MoE layers are on the device (%.1f s)",
            num_layers,
            len(scheduler.layers),
            time.perf_counter() - started,
        )

    def check_gates(self, who: str, remedy: str) -> None:
        """Raise ConfigError, with who needs them, unless every MoE layer has one in `gates_of`."""
        if None in self._gates or not self._gates:
            missing = self._gates.index(None) if self._gates else 0
            raise ConfigError(
                f"{who} needs each MoE layer's router, but one that reads what the experts read "
                f"was not found in layer {missing}; "
                f"{remedy}"
            )

    def guesses(self, layer_idx: int, x: torch.Tensor) -> Guesses | None:
        """What makes [T, widen * top_k] ids, best first, out of this layer's input [T, H], without
        padding of H, and the next MoE layer's router; None past the last layer or when nobody wants
        to know."""
        recorder = self.scheduler.recorder
        wanted = self.graphs_guess or (recorder is not None and self.record_guesses)
        if not wanted or layer_idx + 1 >= self._num_layers:
            return None
        gate = self._gates[layer_idx + 1]
        assert gate is not None
        widest = self.config.predictor_widen * self._top_k

        injection = self.injection
        if (
            injection is not None
            and injection.guesses is not None
            and x.shape[0] <= injection.max_tokens
        ):
            return partial(injection.guess, layer_idx, x.shape[0])

        def guess() -> torch.Tensor:
            if x.is_cuda:
                # On a forked stream: the memory must not be given to the compute stream's next
                # tensor while the router reads it here.
                x.record_stream(torch.cuda.current_stream(x.device))
            logits = gate(x.contiguous())
            if isinstance(logits, tuple):  # vLLM's linear layers return (output, bias)
                logits = logits[0]
            best: torch.Tensor = logits.topk(min(widest, logits.shape[-1]), dim=-1).indices
            return best

        return guess

    def next_layer_idx(self) -> int:
        """Number the MoE layers in the order in which the model builds them."""
        self._num_layers += 1
        return self._num_layers - 1

    def moved_in(self, layer_idx: int) -> None:
        """One more layer is in its final form; moves the progress bar on standard error."""
        if self._bar is None:
            self._bar = tqdm(total=self._num_layers, desc="Moving experts in", unit="layer")
        self._bar.update()
        if layer_idx + 1 == self._num_layers:
            self._bar.close()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's storage is in the host store."""
        if parameter.device.type != "cpu":
            return False
        address = parameter.data_ptr()
        return any(
            store.address <= address < store.address + store.nbytes
            for store in self.host_store.layers
        )

    def check_budget(self, layer_name: str, store: LayerStore, *, top_k: int) -> None:
        """Called when a layer has been built, before anything is loaded: a total that is too small
        for the layers so far stays so with those to come.

        Raises:
            ConfigError: it gives each of them fewer than top_k.
        """
        gib = self.config.expert_cache_gib
        if gib is None:
            return
        num_slots = int(gib * 2**30 // self._bytes_of_a_slot_in_each_layer())
        check_slots(
            min(num_slots, store.num_experts),
            top_k=top_k,
            num_experts=store.num_experts,
            layer_name=layer_name,
            asked=f"{spelled('expert_cache_gib')} {gib:g}",
            at_most=True,
        )

    def slots_for(self, layer_name: str, store: LayerStore, *, top_k: int, is_first: bool) -> int:
        """How many experts of a layer fit on the device.

        Raises:
            ConfigError: fewer than top_k or more than the layer's experts.
        """
        self._top_k = max(self._top_k, top_k)
        config = self.config
        if config.expert_cache_gib is not None:
            asked = f"{spelled('expert_cache_gib')} {config.expert_cache_gib:g}"
            num_slots = self._slots_within(config.expert_cache_gib * 2**30, store)
        elif config.slots_per_layer == "auto":
            asked = f"{spelled('slots_per_layer')} 'auto'"
            num_slots = self._slots_within(self._auto_bytes(top_k), store)
        else:
            asked = f"{spelled('slots_per_layer')} {config.slots_per_layer}"
            num_slots = config.slots_per_layer
        check_slots(
            num_slots,
            top_k=top_k,
            num_experts=store.num_experts,
            layer_name=layer_name,
            asked=asked,
        )
        if is_first:
            logger.info(
                "Expert cache: %d of %d experts per MoE layer on the device (%s), mode %s, "
                "policy %s, predictor %s",
                num_slots,
                store.num_experts,
                asked,
                self.mode,
                config.policy,
                config.predictor,
            )
        return num_slots

    def most_tokens(self) -> int:
        """Most tokens of a step that fits the slots whatever its routing is."""
        return self.scheduler.most_tokens_at_once(self._top_k)

    def captures_tokens(self, num_tokens: int) -> bool:
        """Whether a decode step of so many tokens may be captured, whatever its routing is."""
        return self.scheduler.captures(num_tokens, self._top_k)

    def _slots_within(self, budget_bytes: float, store: LayerStore) -> int:
        """Slots per layer, the same for all, that fit a budget for all layers together."""
        if self._slot_bytes is None:  # at the first layer: later some have their kernels' layout
            self._slot_bytes = self._bytes_of_a_slot_in_each_layer()
        if budget_bytes >= self._slot_bytes * store.num_experts:
            return store.num_experts
        return int(budget_bytes // self._slot_bytes)

    def _bytes_of_a_slot_in_each_layer(self) -> int:
        return sum(layer.layout.payload_bytes for layer in self.host_store.layers)

    def _auto_bytes(self, top_k: int) -> float:
        """The budget of 'auto'; decided once, at the first layer, before any slot is allocated."""
        if self._auto is None:
            self._auto = auto_budget(
                self._vllm_config,
                self.device,
                self.host_store.total_bytes,
                wave_rows_bytes=self._bytes_of_wave_rows(top_k),
                staging_bytes=self._bytes_of_ring(),
            )
        return self._auto

    def _bytes_of_wave_rows(self, top_k: int) -> int:
        model = self._vllm_config.model_config
        max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        return int(max_tokens * top_k * model.get_hidden_size() * model.dtype.itemsize)

    def _bytes_of_ring(self) -> int:
        """Of the layer that has the heaviest."""
        return max(
            ring_bytes(
                self.config.staging_slots,
                expert_bytes=layer.layout.payload_bytes,
                num_experts=layer.num_experts,
            )
            for layer in self.host_store.layers
        )

    def wave_rows(self, top_k: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """[max tokens, top_k, hidden] that keeps a wide step's rows apart; shared by all layers."""
        key = (top_k, hidden_size, dtype)
        if key not in self._wave_rows:
            max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            # Zeros: a graph's rows of padding keep what is there, and no NaN may reach a router.
            self._wave_rows[key] = torch.zeros(
                (max_tokens, top_k, hidden_size), dtype=dtype, device=self.device
            )
        return self._wave_rows[key]

    def routed(self, layer_idx: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """The router's ids, or injected ones in their place (for measurements).

        Steps of more tokens than the injected routing has keep the router's ids.
        """
        if self.injection is None or topk_ids.shape[0] > self.injection.max_tokens:
            return topk_ids
        if layer_idx == 0:
            self.injection.advance()
        return self.injection.replace(layer_idx, topk_ids)

    def padding(self, num_tokens: int) -> torch.Tensor | None:
        """Which of a call's rows belong to no token, as `Scheduler.fetch` takes it.

        vLLM pads batches to the size of a captured graph, and gives such rows a negative place in
        the KV cache. Both of its runners keep that tensor at one address, for captures and replays
        alike, and depend on it themselves. (The V2 runner's `is_padding` says the same, but from
        0.32 on only under VLLM_MOE_SKIP_PADDING; without it every row stays marked as padding.)
        Only attention is asked: layers that keep a state instead (Mamba, linear attention) have
        such a tensor too, but nobody writes it, and it would call every row padding.
        """
        if not self._pads or not is_forward_context_available():
            return None
        context = get_forward_context()
        slot_mapping = context.slot_mapping
        if not isinstance(slot_mapping, dict):
            return None
        for name, kv_slots in slot_mapping.items():
            if isinstance(context.no_compile_layers.get(name), Attention | MLAAttention):
                return kv_slots[:num_tokens] if kv_slots.shape[0] >= num_tokens else None
        return None

    def waves(
        self,
        layer_idx: int,
        topk_ids: torch.Tensor,
        guesses: Guesses | None,
        *,
        padding: torch.Tensor | None,
        whole: bool,
    ) -> Iterator[ExpertWave]:
        """A wide step of a layer, split by expert: by the host or, in a capture, by the device.

        `padding` as `Scheduler.fetch` takes it: only a graph is padded. See
        `Scheduler.expert_waves`.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            scheduler: Any = self.scheduler  # mode `full`, or the step would not be captured
            waves: Iterator[ExpertWave] = scheduler.captured_waves(
                layer_idx, topk_ids, guesses, padding=padding, whole=whole
            )
            return waves
        return self.scheduler.expert_waves(layer_idx, topk_ids, guesses, whole=whole)

    def close(self) -> None:
        """Free the cache; graphs that the host interrupts go with it. Safe to call twice."""
        if self.captures is not None:
            self.captures.close()
        self.scheduler.close()
        self._wave_rows.clear()


def gates_of(model: torch.nn.Module) -> list[torch.nn.Module | None]:
    """The router of each MoE layer, in order: held by vLLM's runner, or beside it in the block.

    None where it is not found, or cannot read what the layer's experts read.
    """
    gates: list[torch.nn.Module | None] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, MoERunner):
            continue
        block = modules.get(name.rpartition(".")[0])
        gate = module.gate
        for attribute in ("gate", "router"):
            if gate is None and block is not None:
                gate = getattr(block, attribute, None)
        is_one = isinstance(gate, torch.nn.Module) and _reads(gate, module.routed_experts)
        gates.append(gate if is_one else None)
    return gates


def _reads(gate: Any, experts: Any) -> bool:
    """Whether a router can be shown what the experts are given, as far as it says its width: where
    experts work in a smaller space, they are given what a projection has made of the router's."""
    width = getattr(gate, "input_size", None)  # of vLLM's linear layers
    return width is None or width == experts.hidden_size_asked


def keep_on_one_stream(model: torch.nn.Module) -> None:
    """Have shared experts run on the stream of the routed ones, not beside them on their own.

    Between the two streams' fork and join the host decides, and no segment may end unjoined.
    """
    for module in model.modules():
        if isinstance(module, SharedExperts):
            module._stream = None


def _scheduler_class(mode: str) -> type[Scheduler]:
    if mode == "full":
        from prefetch_runtime.device_scheduler import DeviceScheduler  # imports triton

        return DeviceScheduler
    return Scheduler


def current_engine() -> PrefetchEngine:
    """The engine whose model is being built.

    Raises:
        RuntimeError: no worker of ours is loading a model.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "PrefetchRoutedExperts was built outside PrefetchWorker.load_model; start vLLM with "
            "--worker-cls prefetch_runtime.vllm.PrefetchWorker"
        ) from None


def auto_budget(
    vllm_config: VllmConfig,
    device: torch.device,
    experts_bytes: int,
    *,
    wave_rows_bytes: int,
    staging_bytes: int,
) -> float:
    """Device bytes for slots when the user leaves the choice to us.

    The KV cache is planned first: what `--kv-cache-memory-bytes` says, else room for eight
    sequences of full length, but at most half of what the dense weights leave. A tenth of the
    budget stays free for activations. The rows of waves come before slots, too, and the staging
    ring, unless all experts fit: then nothing is streamed. On a CPU device half of the experts are
    cached.
    """
    if device.type != "cuda":
        return experts_bytes / 2
    total = torch.cuda.get_device_properties(device).total_memory
    cache = vllm_config.cache_config
    left = total * cache.gpu_memory_utilization * 0.9 - torch.cuda.memory_allocated(device)
    kv_bytes = cache.kv_cache_memory_bytes
    if kv_bytes is None:
        kv_bytes = min(left / 2, _kv_bytes(vllm_config))
    left -= kv_bytes + wave_rows_bytes
    if left < experts_bytes:
        left -= staging_bytes
    return float(max(0.0, left))


def _kv_bytes(vllm_config: VllmConfig) -> int:
    """Of the sequences that `auto_budget` makes room for."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    per_token = (
        2
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * model.get_num_layers(parallel)
        * torch.empty(0, dtype=model.dtype).element_size()
    )
    sequences = min(8, vllm_config.scheduler_config.max_num_seqs)
    return int(sequences * model.max_model_len * per_token)
