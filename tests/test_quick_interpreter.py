"""The interpreter that other tests run kernels with does what Triton's own does."""

import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.quick_interpreter import quicken

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@pytest.fixture
def fresh() -> ModuleType:
    """`triton.runtime.interpreter` as it is installed, not the one that tests have changed."""
    spec = importlib.util.find_spec("triton.runtime.interpreter")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_operations_are_replaced_and_restored(fresh: ModuleType) -> None:
    tl = fresh.tl
    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)

    def replaced() -> list[tuple[Any, str]]:
        scope = fresh._LangPatchScope()
        before = tl.load
        for package in packages:
            fresh._patch_builtin(package, fresh.interpreter_builder, scope)
        changes = [(package, name) for package, name, _ in scope._changes]
        assert tl.load is not before
        again = fresh._LangPatchScope()  # as where a kernel calls a function
        fresh._patch_builtin(tl, fresh.interpreter_builder, again)
        assert again._changes == []
        scope.restore()
        assert tl.load is before
        return changes

    plain = replaced()
    quicken(fresh)
    assert len(plain) > 100
    assert replaced() == plain
    assert replaced() == plain


def test_types_are_the_same(fresh: ModuleType) -> None:
    tl, plain = fresh.tl, fresh._get_np_dtype
    scalars = [tl.int1, tl.int8, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16,
               tl.float32, tl.float64, tl.float8e5]  # fmt: skip
    pointers = [tl.pointer_type(tl.int32), tl.pointer_type(tl.bfloat16)]
    kinds = [*scalars, *pointers, *(tl.block_type(kind, [4]) for kind in [*scalars, *pointers])]
    quicken(fresh)
    for _ in range(2):
        assert [fresh._get_np_dtype(kind) for kind in kinds] == [plain(kind) for kind in kinds]
    assert fresh._get_np_dtype(pointers[0]) == np.uint64


def test_it_is_changed_once(fresh: ModuleType) -> None:
    quicken(fresh)
    once = fresh._patch_builtin
    quicken(fresh)
    assert fresh._patch_builtin is once
    quicken(ModuleType("another version"))
