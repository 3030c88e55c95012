"""Return codes of the CUDA calls, on made-up runtimes; and the real ones where there is a GPU."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefetch_runtime import cudart
from prefetch_runtime.cudart import CudaError, CudaPython, TorchCudart
from prefetch_runtime.pinned import Pages
from tests.helpers.page_lock import is_page_locked


class FakeError(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2


class FakeRuntime:
    """`cuda.bindings.runtime` as far as it is used. `batch_tail` is what CUDA 12 adds."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="H2D")
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="stream order")

    def __init__(self, error: FakeError = FakeError.cudaSuccess, batch_tail: tuple[Any, ...] = ()):
        self.error = error
        self.batch_tail = batch_tail
        self.last_error_taken = 0
        self.calls: list[tuple[Any, ...]] = []

    def cudaMemcpyAttributes(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cudaHostRegister(self, *args: int) -> tuple[FakeError]:
        self.calls.append(args)
        return (self.error,)

    def cudaHostUnregister(self, *args: int) -> tuple[FakeError]:
        self.calls.append(args)
        return (self.error,)

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[FakeError, int | None]:
        self.calls.append((address, flags))
        return (self.error, None if self.error else address + 1)

    def cudaMemcpyBatchAsync(self, *args: Any) -> tuple[Any, ...]:
        self.calls.append(args)
        return (self.error, *self.batch_tail)

    def cudaMemcpyAsync(self, *args: Any) -> tuple[FakeError]:
        self.calls.append(args)
        return (self.error,)

    def cudaGetErrorString(self, error: FakeError) -> tuple[FakeError, bytes]:
        return FakeError.cudaSuccess, f"text of {int(error)}".encode()

    def cudaGetLastError(self) -> tuple[FakeError]:
        self.last_error_taken += 1
        return (self.error,)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("register", (4096, 8192)),
        ("unregister", (4096,)),
        ("device_pointer", (4096,)),
        ("copy_batch", ([1], [2], [3], 7)),
        ("copy_each", ([1], [2], [3], 7)),
    ],
)
def test_every_return_code_is_checked(call: str, args: tuple[Any, ...]) -> None:
    runtime = FakeRuntime(FakeError.cudaErrorMemoryAllocation)
    with pytest.raises(CudaError, match=r"cudaErrorMemoryAllocation \(text of 2\)") as raised:
        getattr(CudaPython(runtime), call)(*args)
    assert raised.value.code == 2
    assert runtime.last_error_taken == 1


def test_pages_are_registered_as_mapped_and_portable() -> None:
    runtime = FakeRuntime()
    cuda = CudaPython(runtime)
    cuda.register(4096, 8192)
    assert runtime.calls == [(4096, 8192, 3)]
    assert cuda.device_pointer(4096) == 4097


@pytest.mark.parametrize("batch_tail", [(), (2**64 - 1,), (None,)], ids=["13", "12", "12-none"])
def test_a_batch_is_one_call_in_stream_order(batch_tail: tuple[Any, ...]) -> None:
    runtime = FakeRuntime(batch_tail=batch_tail)
    cuda = CudaPython(runtime)
    cuda.copy_batch([10, 20], [30, 40], [5, 6], stream=9)
    (call,) = runtime.calls
    assert call[:4] == ([10, 20], [30, 40], [5, 6], 2)
    assert call[4][0].srcAccessOrder == "stream order"
    assert call[5:] == ([0], 1, 9)


def test_a_failed_batch_names_the_copy_where_cuda_does() -> None:
    cuda = CudaPython(FakeRuntime(FakeError.cudaErrorInvalidValue, batch_tail=(1,)))
    with pytest.raises(CudaError, match=r"of 2, at copy 1 \(6 bytes\).*cudaErrorInvalidValue"):
        cuda.copy_batch([10, 20], [30, 40], [5, 6], stream=9)


@pytest.mark.parametrize("batch_tail", [(), (2**64 - 1,)], ids=["13", "12"])
def test_a_failed_batch_without_a_culprit_is_an_error_too(batch_tail: tuple[Any, ...]) -> None:
    cuda = CudaPython(FakeRuntime(FakeError.cudaErrorInvalidValue, batch_tail=batch_tail))
    with pytest.raises(CudaError, match=r"^cudaMemcpyBatchAsync returned cudaErrorInvalidValue"):
        cuda.copy_batch([10, 20], [30, 40], [5, 6], stream=9)


def test_a_batch_on_the_legacy_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="legacy stream 0"):
        CudaPython(FakeRuntime()).copy_batch([10], [20], [5], stream=0)


def test_single_copies_are_one_call_each() -> None:
    runtime = FakeRuntime()
    CudaPython(runtime).copy_each([10, 20], [30, 40], [5, 6], stream=9)
    assert runtime.calls == [(10, 30, 5, "H2D", 9), (20, 40, 6, "H2D", 9)]


def test_torchs_own_runtime_is_checked_as_well() -> None:
    refusing = SimpleNamespace(
        cudaHostRegister=lambda *_: 2,
        cudaHostUnregister=lambda *_: 1,
        cudaGetErrorString=lambda error: f"text of {error}",
    )
    driver = SimpleNamespace(cuMemHostGetDevicePointer_v2=lambda *_: 201)
    pages = TorchCudart(refusing, driver)
    with pytest.raises(CudaError, match=r"cudaHostRegister returned error 2 \(text of 2\)"):
        pages.register(4096, 8192)
    with pytest.raises(CudaError, match=r"cudaHostUnregister returned error 1"):
        pages.unregister(4096)
    with pytest.raises(CudaError, match="CUresult 201"):
        pages.device_pointer(4096)


def test_cuda_python_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cudart.importlib, "import_module", absent)
    assert cudart.load_cuda_python() is None


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["cuda-python", "torch"])
def test_the_real_calls_pin_map_and_refuse(way: str) -> None:
    torch.cuda.init()
    cuda_python = cudart.load_cuda_python()
    if way == "cuda-python":
        if cuda_python is None:
            pytest.skip("cuda-python is not installed")
        api: cudart.HostPages = cuda_python
    else:
        api = TorchCudart(torch.cuda.cudart())
    pages = Pages(1 << 20)
    pages.tensor.fill_(3)
    assert not is_page_locked(pages.tensor)
    api.register(pages.address, pages.nbytes)
    try:
        assert is_page_locked(pages.tensor)
        assert api.device_pointer(pages.address) > 0
        if cuda_python is not None:
            # Asked through cuda-python either way: torch would keep the error for its next call.
            with pytest.raises(CudaError, match="cudaErrorHostMemoryAlreadyRegistered"):
                cuda_python.register(pages.address, pages.nbytes)
    finally:
        api.unregister(pages.address)
    assert not is_page_locked(pages.tensor)
    assert torch.ones(3, device="cuda").sum().item() == 3  # no error was left behind
