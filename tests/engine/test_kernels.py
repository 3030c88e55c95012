"""What keeps vLLM's expert kernels exact: the launch configuration, and the rows of waves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime.vllm import kernels
from prefetch_runtime.vllm.kernels import RowKeeper, TunedConfigs, launched_as

pytestmark = pytest.mark.engine

CONFIG = {"BLOCK_SIZE_M": 16}


class TestLaunchedAs:
    def test_the_configuration_holds_inside_and_not_after(self) -> None:
        assert not kernels.fused_moe.get_config()
        with launched_as(CONFIG):
            assert kernels.fused_moe.get_config() == CONFIG
        assert not kernels.fused_moe.get_config()

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_an_exception_passes_and_leaves_nothing_behind(
        self, error: type[BaseException]
    ) -> None:
        def fail() -> None:
            with launched_as(CONFIG):
                raise error("a kernel failed")

        with pytest.raises(error, match="a kernel failed"):
            fail()
        assert not kernels.fused_moe.get_config()

    def test_vllms_own_override_has_the_last_word(self) -> None:
        tuning = {"BLOCK_SIZE_M": 64}
        with kernels.fused_moe.override_config(tuning):
            with launched_as(CONFIG):
                assert kernels.fused_moe.get_config() == tuning
            assert kernels.fused_moe.get_config() == tuning


class TestTunedConfigs:
    def test_it_is_looked_up_for_all_experts_once_per_number_of_tokens(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[Any, ...]] = []

        def look_up(w1: Any, w2: Any, top_k: int, dtype: Any, tokens: int, **more: Any) -> Any:
            asked.append((tuple(w1), tuple(w2), top_k, dtype, tokens, more))
            return {"BLOCK_SIZE_M": tokens}

        monkeypatch.setattr(kernels, "try_get_optimal_moe_config", look_up)
        experts = SimpleNamespace(
            quant_config=SimpleNamespace(config_name=str), block_shape=[128, 128]
        )
        tuned = TunedConfigs(experts, num_experts=128, top_k=8)
        w13, w2 = torch.empty(16, 6, 4), torch.empty(16, 4, 3)
        for tokens in (1, 7, 1, 7):
            assert tuned.of(torch.empty(tokens, 4), w13, w2) == {"BLOCK_SIZE_M": tokens}
        more = {"block_shape": [128, 128]}
        assert asked == [
            ((128, 6, 4), (128, 4, 3), 8, "torch.float32", tokens, more) for tokens in (1, 7)
        ]


class TestRowKeeper:
    T, K, H = 5, 3, 4

    def _kernel(self) -> tuple[Any, list[torch.Tensor]]:
        """A kernel object of vLLM's, and what its own sum was given."""
        given: list[torch.Tensor] = []

        def moe_sum(rows: torch.Tensor, output: torch.Tensor) -> None:
            given.append(rows.clone())
            torch.sum(rows, dim=1, out=output)

        return SimpleNamespace(moe_sum=moe_sum), given

    def test_outside_of_waves_it_is_vllms_sum(self) -> None:
        kernel, given = self._kernel()
        kept = torch.zeros(8, self.K, self.H)
        RowKeeper(kernel, kept)
        rows, output = torch.randn(self.T, self.K, self.H), torch.empty(self.T, self.H)
        kernel.moe_sum(rows, output)
        assert torch.equal(output, rows.sum(1))
        assert len(given) == 1
        assert not kept.any()

    def test_rows_of_all_waves_are_summed_once_at_the_last(self) -> None:
        kernel, given = self._kernel()
        keeper = RowKeeper(kernel, torch.full((8, self.K, self.H), torch.nan))
        rows = torch.randn(self.T, self.K, self.H)
        wave_of = torch.arange(self.T * self.K).reshape(self.T, self.K) % 3
        output = torch.empty(self.T, self.H)
        for index in range(3):
            in_wave = wave_of == index
            # Rows outside of the wave are whatever lies in vLLM's workspace.
            workspace = torch.where(in_wave.unsqueeze(-1), rows, torch.nan)
            with keeper.wave(in_wave, is_last=index == 2):
                kernel.moe_sum(workspace, output)
            assert len(given) == (index == 2)
        assert torch.equal(given[0], rows)
        assert torch.equal(output, rows.sum(1))

    @pytest.mark.parametrize("has_map", [True, False])
    def test_the_sum_of_all_waves_knows_no_expert_map(self, has_map: bool) -> None:
        # Marlin's sum has to be given ids; one wave's map would leave out the other waves' rows.
        given: list[tuple[Any, ...]] = []
        kernel = SimpleNamespace(moe_sum=lambda rows, output, *more: given.append(more))  # noqa: ARG005
        keeper = RowKeeper(kernel, torch.zeros(8, self.K, self.H))
        ids = torch.zeros(self.T, self.K, dtype=torch.int32)
        rows, in_wave = torch.zeros(self.T, self.K, self.H), ids == 0
        more = (ids, torch.zeros(4) if has_map else None)
        with keeper.wave(in_wave, is_last=True):
            kernel.moe_sum(rows, torch.empty(self.T, self.H), *more)
        assert given == [() if has_map else more]

    def test_a_wave_that_fails_leaves_vllms_sum_in_force(self) -> None:
        kernel, _ = self._kernel()
        keeper = RowKeeper(kernel, torch.zeros(8, self.K, self.H))

        def fail() -> None:
            with keeper.wave(torch.zeros(self.T, self.K, dtype=torch.bool), is_last=False):
                raise RuntimeError("a kernel failed")

        with pytest.raises(RuntimeError, match="a kernel failed"):
            fail()
        rows, output = torch.randn(self.T, self.K, self.H), torch.empty(self.T, self.H)
        kernel.moe_sum(rows, output)
        assert torch.equal(output, rows.sum(1))
