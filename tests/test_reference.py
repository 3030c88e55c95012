"""The reference recorder: it finds one flipped bit, and compares nothing with nothing never."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reference import LayerRecorder, differences, digest_of, moe_layers

ROOT = Path(__file__).resolve().parent.parent


def _record(*, digest: bool = False) -> dict[str, Any]:
    """Two batches of two prompts, two layers, three forwards each."""
    generator = torch.Generator().manual_seed(5)

    def rows() -> Any:
        made = torch.randn((4, 8), generator=generator).to(torch.bfloat16)
        return digest_of(made) if digest else made

    return {
        batch: {
            "tokens": [[1, 2, 3], [4, 5, 6]],
            "layers": {layer: [rows() for _ in range(3)] for layer in (0, 7)},
            "seconds": 1.0,
            "rpc": {},
        }
        for batch in ("b1", "b2")
    }


class TestDifferences:
    @pytest.mark.parametrize("digest", [False, True])
    def test_equal_records_have_none(self, digest: bool) -> None:
        assert differences(_record(digest=digest), _record(digest=digest)) == []

    def test_times_and_rpc_results_are_not_compared(self) -> None:
        ours = _record()
        ours["b1"]["seconds"], ours["b1"]["rpc"] = 9.0, {"prefetch_stats": {}}
        assert differences(ours, _record()) == []

    def test_one_flipped_bit_is_found(self) -> None:
        ours = _record()
        ours["b2"]["layers"][7][1].view(torch.int16)[3, 5] ^= 1
        assert differences(ours, _record()) == ["b2: layer 7: forward 1: output differs"]

    def test_one_flipped_bit_is_found_by_its_digest(self) -> None:
        rows = torch.zeros((4, 8), dtype=torch.bfloat16)
        other = rows.clone()
        other.view(torch.int16)[3, 5] ^= 1
        ours, reference = _record(digest=True), _record(digest=True)
        reference["b1"]["layers"][0][2] = digest_of(rows)
        ours["b1"]["layers"][0][2] = digest_of(other)
        assert differences(ours, reference) == ["b1: layer 0: forward 2: output differs"]

    def test_the_sign_of_zero_and_the_payload_of_nan_count(self) -> None:
        for a, b in ((0x8000, 0), (0x7FC0, 0x7FC1)):
            ours, reference = _record(), _record()
            ours["b1"]["layers"][0][0].view(torch.int32)[0, 0] = a
            reference["b1"]["layers"][0][0].view(torch.int32)[0, 0] = b
            assert len(differences(ours, reference)) == 1

    def test_one_other_token_is_found(self) -> None:
        ours = _record()
        ours["b1"]["tokens"][1][2] = 7
        assert differences(ours, _record()) == ["b1: prompt 1: tokens differ from 2 on"]

    def test_tokens_that_end_early_are_found(self) -> None:
        ours = _record()
        ours["b1"]["tokens"][0] = [1, 2]
        assert differences(ours, _record()) == ["b1: prompt 0: tokens differ from 2 on"]

    def test_another_number_of_forwards_is_found(self) -> None:
        ours = _record()
        ours["b1"]["layers"][0].pop()
        assert differences(ours, _record()) == ["b1: layer 0: 2 forwards, not 3"]

    def test_another_shape_or_dtype_is_found(self) -> None:
        for shape in ((2, 16), (8, 4)):
            ours = _record()
            ours["b1"]["layers"][0][0] = ours["b1"]["layers"][0][0].reshape(shape)
            assert differences(ours, _record()) == ["b1: layer 0: forward 0: output differs"]
        ours = _record()
        ours["b1"]["layers"][0][0] = ours["b1"]["layers"][0][0].view(torch.float16)
        assert differences(ours, _record()) == ["b1: layer 0: forward 0: output differs"]

    @pytest.mark.parametrize(
        "emptied",
        [
            pytest.param(lambda _: {}, id="no batch"),
            pytest.param(lambda record: {"b1": record["b1"]}, id="a batch less"),
        ],
    )
    def test_records_of_other_batches_are_refused(self, emptied: Any) -> None:
        with pytest.raises(ValueError, match="records of other batches"):
            differences(emptied(_record()), _record())
        with pytest.raises(ValueError, match="records of other batches"):
            differences(_record(), emptied(_record()))
        with pytest.raises(ValueError, match="records of other batches"):
            differences({}, {})

    def test_records_of_other_layers_are_refused(self) -> None:
        ours = _record()
        del ours["b1"]["layers"][7]
        with pytest.raises(ValueError, match="b1: records of other layers"):
            differences(ours, _record())

    @pytest.mark.parametrize("what", ["prompts", "tokens", "forwards"])
    def test_records_of_nothing_are_refused(self, what: str) -> None:
        empty = _record()
        if what == "prompts":
            empty["b1"]["tokens"] = []
        elif what == "tokens":
            empty["b1"]["tokens"] = [[], []]
        else:
            empty["b1"]["layers"] = {0: [], 7: []}
        with pytest.raises(ValueError, match="b1: nothing was recorded"):
            differences(copy.deepcopy(empty), empty)

    def test_records_of_other_prompts_are_refused(self) -> None:
        ours = _record()
        ours["b1"]["tokens"].pop()
        with pytest.raises(ValueError, match="b1: records of 1 and 2 prompts"):
            differences(ours, _record())


class MoERunner(torch.nn.Module):
    """Stands in for vLLM's class of this name: doubles its input, which it then spoils."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(MoERunner(), torch.nn.ReLU(), MoERunner())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(rows)
        return made.zero_()  # as vLLM reuses its workspaces


class TestLayerRecorder:
    def test_outputs_are_kept_as_they_were(self) -> None:
        model = _Model()
        recorder = LayerRecorder(model, [0, 1], digest=False)
        model(torch.ones(1, 2))
        model(torch.ones(2, 2))
        taken = recorder.take()
        assert [rows.tolist() for rows in taken[0]] == [[[2, 2]], [[2, 2], [2, 2]]]
        assert [rows.tolist() for rows in taken[1]] == [[[4, 4]], [[4, 4], [4, 4]]]
        assert recorder.take() == {0: [], 1: []}

    def test_a_digest_stands_for_shape_type_and_bits(self) -> None:
        model = _Model()
        recorder = LayerRecorder(model, [1], digest=True)
        model(torch.ones(1, 2))
        assert recorder.take() == {1: [digest_of(torch.full((1, 2), 4.0))]}
        rows = torch.zeros(2, 2)
        others = [rows.reshape(4), rows.view(torch.int32), -rows]
        assert len({digest_of(rows), *map(digest_of, others)}) == 4

    def test_a_closed_recorder_keeps_nothing(self) -> None:
        model = _Model()
        recorder = LayerRecorder(model, [0], digest=False)
        recorder.close()
        model(torch.ones(1, 2))
        assert recorder.take() == {0: []}

    def test_only_moe_layers_count_and_a_layer_too_many_is_refused(self) -> None:
        model = _Model()
        assert len(moe_layers(model)) == 2
        with pytest.raises(ValueError, match="layer 2 asked for, the model has 2 MoE layers"):
            LayerRecorder(model, [0, 2], digest=False)


def test_the_recorder_imports_nothing_of_ours() -> None:
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import reference; "
        "print([name for name in reference.OURS if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
