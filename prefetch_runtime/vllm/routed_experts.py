"""The experts of one MoE layer, served from slots: replaces vLLM's `RoutedExperts`."""

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from prefetch_runtime.provider import CachedWeightProvider
from prefetch_runtime.scheduler import ExpertWave, Guesses
from prefetch_runtime.vllm.checkpoint import (
    ONE_EXPERTS,
    LoadedExperts,
    check_written,
    needed_of,
)
from prefetch_runtime.vllm.engine import PrefetchEngine, current_engine
from prefetch_runtime.vllm.kernels import (
    ROWS_BY_BLOCK,
    RowKeeper,
    TunedConfigs,
    check_kernel,
    check_method,
    launched_as,
)
from prefetch_runtime.vllm.loading import create_on_host, process_in_chunks
from prefetch_runtime.vllm.marlin import MarlinBlocks
from prefetch_runtime.vllm.seats import Seats, fields_in_use

logger = init_logger(__name__)

REPLACED = "RoutedExperts"
OF_MODELS = {"GptOssRoutedExperts": "vllm.model_executor.models.gpt_oss"}
"""Classes of single models that only load their checkpoint differently, and where newer vLLM
versions have them."""


class PrefetchRoutedExperts(RoutedExperts):
    """vLLM's `RoutedExperts` with its weights in the host store and its kernel on the slots.

    The parameters `w13_weight`, `w2_weight` and what else the format needs are [S, ...] slots once
    the model is loaded; `forward_modular` renames expert ids to slots before the kernel sees them.
    """

    _cache_provider: CachedWeightProvider | None = None
    _wave_map: torch.Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cache_engine: PrefetchEngine = current_engine()
        self._cache_layer_idx = self._cache_engine.next_layer_idx()
        self._cache_store: Any = None
        self._loaded: LoadedExperts | None = None
        super().__init__(*args, **kwargs)

    # Loading

    def _get_quant_method(self, *args: Any, **kwargs: Any) -> Any:
        method = super()._get_quant_method(*args, **kwargs)
        check_method(self.layer_name, method)
        self._loaded = LoadedExperts(self.layer_name, self.local_num_experts)
        self._sizes_asked = self._sizes  # the method may round them up
        create, process = method.create_weights, method.process_weights_after_loading

        def create_weights(layer: Any, **arguments: Any) -> None:
            self._cache_store = create_on_host(
                create,
                layer,
                layer_idx=self._cache_layer_idx,
                num_experts=self.local_num_experts,
                host_store=self._cache_engine.host_store,
                arguments=arguments,
            )
            self._cache_engine.check_budget(self.layer_name, self._cache_store, top_k=self.top_k)
            self._count_copies()

        def process_weights_after_loading(layer: Any) -> None:
            assert layer is self
            self._move_in(process)

        # On the instance: vLLM asks for the method's type and name elsewhere.
        method.create_weights = create_weights
        method.process_weights_after_loading = process_weights_after_loading
        return method

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's own loader; what it loads is counted, to be checked once all is there.

        Raises:
            CheckpointError: the tensor does not fit the model.
        """
        inherited: Callable[..., bool | None] = super().weight_loader
        assert self._loaded is not None
        names = [name for name, known in self._parameters.items() if known is param]
        return self._loaded.load(
            names[0] if names else weight_name,
            lambda: inherited(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            ),
            loaded_weight,
            into=param.dtype,
            part=shard_id,
            expert_id=expert_id,
            numel=self._numel_due(param, loaded_weight, shard_id, expert_id),
        )

    def _count_copies(self) -> None:
        """Have what is copied into a whole parameter counted as if `weight_loader` had loaded it.

        So does vLLM's loader of unquantised gpt-oss: `parameter.copy_(tensor)`, which also spreads
        one expert over all.
        """
        layer = weakref.ref(self)
        for field in self._cache_store.layout.fields:
            parameter = self._parameters[field.name]
            # Weak: vLLM keeps a parameter's attributes, for reloading, as long as the layer lives.
            counted = partial(_copy_counted, layer, field.name, weakref.ref(parameter))
            vars(parameter)["copy_"] = counted

    @property
    def hidden_size_asked(self) -> int:
        """Columns of a token that mean something; vLLM may have padded the rest with zeros."""
        return self._sizes_asked[0]

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.hidden_size, self.moe_config.intermediate_size_per_partition

    def _numel_due(
        self,
        param: torch.nn.Parameter,
        loaded: torch.Tensor,
        part: str | None,
        expert_id: int | None,
    ) -> int | None:
        """How many numbers come at once; None where that is not known."""
        if self._sizes != self._sizes_asked:
            return None
        if part is None and expert_id is None:
            return param.numel()
        if part in ONE_EXPERTS:
            return param[0].numel()
        if param.dim() != 3 or loaded.dim() != 2:
            return None
        halves = {"w1": 2 if self._is_gated else 1, "w3": 2, "w2": 1}
        return param[0].numel() // halves[part] if part in halves else None

    @property
    def _is_gated(self) -> bool:
        return bool(getattr(self.moe_config, "is_act_and_mul", True))

    def _check_loaded(self) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor of an expert.

        Loaders that fill parameters by themselves (random weights) are not counted.
        """
        for parameter in self._parameters.values():
            if parameter is not None:
                vars(parameter).pop("copy_", None)
        loaded, method = self._loaded, self.quant_method
        assert loaded is not None
        store = self._cache_store
        if loaded.is_empty and not self._cache_engine.counts_loads:
            names = [field.name for field in store.layout.fields]
            check_written(self.layer_name, {name: store.tensor(name) for name in names})
            return
        self._cache_engine.counts_loads = True
        loaded.check(
            (field.name for field in store.layout.fields),
            needed=needed_of(method),
            is_gated=self._is_gated,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The parameters, with stand-ins for those in the host store while the model is loaded.

        vLLM's loader asks a layer for its parameters (`recurse` left as it is) in order to move
        those on the host to the device, all experts at once. A stand-in has the name and shape,
        no storage, and lies on neither. What writes the checkpoint into the parameters looks them
        up with `recurse=False`, or from the model down, which does not come through here.
        """
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if recurse and self._cache_provider is None and self._cache_engine.holds(parameter):
                stand_in = torch.empty_like(parameter, device="meta")
                yield name, torch.nn.Parameter(stand_in, requires_grad=False)
            else:
                yield name, parameter

    def _move_in(self, process: Any) -> None:
        """Post-process the experts and put the layer under the scheduler's care."""
        engine = self._cache_engine
        self._check_loaded()
        num_slots = engine.slots_for(
            self.layer_name, self._cache_store, top_k=self.top_k, is_first=self._is_first
        )
        store, buffers = process_in_chunks(
            process,
            self,
            store=self._cache_store,
            num_slots=num_slots,
            device=engine.device,
            host_store=engine.host_store,
            in_use=fields_in_use,
        )
        self._cache_store = store
        self._experts = check_kernel(self.layer_name, self.quant_method)
        self._seats = Seats(self, buffers.tensors)
        engine.scheduler.add_layer(
            self._cache_layer_idx, self.layer_name, store, buffers, expert_map=self.expert_map
        )
        self._tuned: TunedConfigs | None = None
        self._blocks: MarlinBlocks | None = None
        self._rows: RowKeeper | None = None
        if engine.device.type == "cuda":
            if type(self._experts).__name__ in ROWS_BY_BLOCK:
                self._blocks = MarlinBlocks(self._experts, store.num_experts, self.top_k)
            else:
                self._tuned = TunedConfigs(self._experts, store.num_experts, self.top_k)
            self._rows = RowKeeper(
                self._experts, engine.wave_rows(self.top_k, self.hidden_size, self.params_dtype)
            )
        self._cache_provider = CachedWeightProvider(engine.scheduler, self._cache_layer_idx)
        engine.moved_in(self._cache_layer_idx)

    @property
    def _is_first(self) -> bool:
        return self._cache_layer_idx == 0

    # Serving

    @property
    def expert_map(self) -> torch.Tensor | None:
        """[E] row of each expert in the present wave, or vLLM's own map outside of waves."""
        if self._wave_map is not None:
            return self._wave_map
        inherited: torch.Tensor | None = super().expert_map
        return inherited

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the routed experts on [T, H] `x`, bit for bit as if all were on the device."""
        engine, provider = self._cache_engine, self._cache_provider
        assert provider is not None, "forward before the weights were loaded"
        topk_ids = engine.routed(self._cache_layer_idx, topk_ids)
        scheduler = engine.scheduler
        scheduler.host_calls += 1
        with ExitStack() as stack:
            if self._tuned is not None:
                config = self._tuned.of(x, self.w13_weight, self.w2_weight)
                stack.enter_context(launched_as(config))
            no_tokens = padding = engine.padding(topk_ids.shape[0])
            if self._blocks is not None:
                # Rows of padding are in the blocks, and weigh on the others' bits.
                scheduler.padding_rows, padding = padding, None
            guesses = engine.guesses(self._cache_layer_idx, x[:, : self.hidden_size_asked])
            if scheduler.fits(self._cache_layer_idx, topk_ids, padding=padding):
                result = provider.prepare(topk_ids, padding=padding, guesses=guesses)
                if self._blocks is None:
                    topk_ids = result.topk_ids
                else:
                    slot_of = scheduler.mapping_of(self._cache_layer_idx)
                    stack.enter_context(
                        self._blocks.on(slot_of, x, self.w13_weight, self.w2_weight)
                    )
                return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)
            if self._rows is None:
                return self._forward_by_token(guesses, x, topk_weights, topk_ids, *args, **kwargs)
            waves = engine.waves(
                self._cache_layer_idx,
                topk_ids,
                guesses,
                padding=no_tokens,
                whole=self._blocks is not None,
            )
            return self._forward_by_expert(waves, x, topk_weights, topk_ids, *args, **kwargs)

    def _forward_by_token(
        self,
        guesses: Guesses | None,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        scheduler = self._cache_engine.scheduler
        for run, slot_ids in scheduler.token_waves(self._cache_layer_idx, topk_ids, guesses):
            output[run] = super().forward_modular(
                x[run], topk_weights[run], slot_ids, *args, **kwargs
            )
        return output

    def _forward_by_expert(
        self,
        waves: Iterator[ExpertWave],
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        assert self._rows is not None
        output: Any = None
        try:
            for wave in waves:
                self._seats.point(wave.buffers.tensors)
                with ExitStack() as stack:
                    stack.enter_context(self._rows.wave(wave.in_wave, is_last=wave.is_last))
                    if self._blocks is None:
                        self._wave_map = wave.expert_map
                    else:
                        stack.enter_context(
                            self._blocks.on(wave.expert_map, x, self.w13_weight, self.w2_weight)
                        )
                    output = super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)
        finally:
            self._wave_map = None
            self._seats.restore()
        return output


def _copy_counted(
    layer_ref: "weakref.ref[PrefetchRoutedExperts]",
    name: str,
    parameter_ref: "weakref.ref[torch.nn.Parameter]",
    loaded: torch.Tensor,
    non_blocking: bool = False,
) -> torch.nn.Parameter:
    layer, parameter = layer_ref(), parameter_ref()
    assert layer is not None
    assert parameter is not None

    def copy() -> None:
        torch.Tensor.copy_(parameter, loaded, non_blocking)

    assert layer._loaded is not None
    layer._loaded.load(
        name,
        copy,
        loaded,
        into=parameter.dtype,
        part=None,
        expert_id=None,
        numel=parameter.numel(),
    )
    return parameter


@contextmanager
def registered() -> Iterator[None]:
    """Within this context vLLM builds `PrefetchRoutedExperts` wherever a model asks for
    `RoutedExperts`; before and after it, whatever becomes of the engine, models are vLLM's own.

    Raises:
        RuntimeError: another plugin has taken its place.
    """
    taken: dict[str, type[RoutedExperts]] = {REPLACED: PrefetchRoutedExperts}
    for name, module in OF_MODELS.items():
        theirs = getattr(importlib.import_module(module), name, None)
        if theirs is not None:
            taken[name] = type(f"Prefetch{name}", (PrefetchRoutedExperts, theirs), {})
    for name in taken:
        if name in op_registry_oot:
            raise RuntimeError(
                f"another plugin has replaced vLLM's {name} with "
                f"{op_registry_oot[name].__name__}; the expert cache cannot stack on it"
            )
    for name, ours in taken.items():
        PluggableLayer.register_oot(name=name)(ours)
    try:
        yield
    finally:
        for name in taken:
            op_registry_oot.pop(name, None)
