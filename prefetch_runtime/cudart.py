"""The CUDA runtime calls that pinning and copying need, with every return code checked."""

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

# Values of the CUDA runtime's flags: registered pages count as pinned in every context, and are
# mapped into the device's address space.
_REGISTER_PORTABLE_MAPPED = 0x01 | 0x02
_PREFER_OVERLAP_WITH_COMPUTE = 0x01


class CudaError(RuntimeError):
    """A CUDA call returned something else than success."""

    def __init__(self, call: str, code: int, meaning: str) -> None:
        super().__init__(f"{call} returned {meaning}")
        self.code = code


class HostPages(Protocol):
    """Page-locks host memory. Each call raises `CudaError` unless CUDA reports success."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock the range and map it for the device. Untouched pages become resident."""

    def unregister(self, address: int) -> None:
        """Undo `register` of a range that starts at `address`."""

    def device_pointer(self, address: int) -> int:
        """The address by which a kernel reads the registered host `address`."""


class CudaPython:
    """The calls through cuda-python (`cuda.bindings.runtime`, 12.8 or later)."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._attributes: list[Any] | None = None

    def register(self, address: int, nbytes: int) -> None:
        self._check(
            "cudaHostRegister",
            self._runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_MAPPED),
        )

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(address))

    def device_pointer(self, address: int) -> int:
        result = self._runtime.cudaHostGetDevicePointer(address, 0)
        self._check("cudaHostGetDevicePointer", result)
        return int(result[1])

    def copy_batch(
        self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Enqueue host-to-device copies with one call. `stream` must not be the legacy stream 0.

        The copies of a batch run in any order among themselves, so they must not overlap.
        """
        if stream == 0:
            raise ValueError("batched copies need a stream of their own, got the legacy stream 0")
        if self._attributes is None:
            self._attributes = [self._copy_attributes()]
        result = self._runtime.cudaMemcpyBatchAsync(
            dsts, srcs, sizes, len(sizes), self._attributes, [0], 1, stream
        )
        # cuda-python for CUDA 12 adds the index of the copy that failed, or SIZE_MAX; 13 does not.
        where = ""
        if len(result) > 1 and result[1] is not None and result[1] < len(sizes):
            where = f" of {len(sizes)}, at copy {result[1]} ({sizes[result[1]]} bytes)"
        self._check(f"cudaMemcpyBatchAsync{where}", result)

    def copy_each(
        self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Enqueue host-to-device copies one by one."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        for dst, src, size in zip(dsts, srcs, sizes, strict=True):
            result = self._runtime.cudaMemcpyAsync(dst, src, size, kind, stream)
            self._check("cudaMemcpyAsync", result)

    def _copy_attributes(self) -> Any:
        attributes = self._runtime.cudaMemcpyAttributes()
        order = self._runtime.cudaMemcpySrcAccessOrder
        # Records outlive their copies, and stream order keeps a reused record safe.
        attributes.srcAccessOrder = order.cudaMemcpySrcAccessOrderStream
        attributes.flags = _PREFER_OVERLAP_WITH_COMPUTE
        return attributes

    def _check(self, call: str, result: Sequence[Any]) -> None:
        error = result[0]
        if int(error) == 0:
            return
        # Take the error off the runtime, or an unrelated later call would report it.
        self._runtime.cudaGetLastError()
        _, text = self._runtime.cudaGetErrorString(error)
        raise CudaError(call, int(error), f"{error.name} ({text.decode()})")


class TorchCudart:
    """Page-locking through torch's own CUDA runtime, for installations without cuda-python."""

    def __init__(self, cudart: Any, driver: Any = None) -> None:
        """`cudart` is `torch.cuda.cudart()`, `driver` the loaded libcuda (found when None)."""
        self._cudart = cudart
        self._driver = driver

    def register(self, address: int, nbytes: int) -> None:
        self._check(
            "cudaHostRegister",
            self._cudart.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_MAPPED),
        )

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def device_pointer(self, address: int) -> int:
        # torch's runtime module lacks this call; the driver's form needs the context that
        # registering has made current.
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64()
        code = self._driver.cuMemHostGetDevicePointer_v2(
            ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        if code:
            raise CudaError("cuMemHostGetDevicePointer", code, f"CUresult {code}")
        return pointer.value

    def _check(self, call: str, error: Any) -> None:
        if int(error) != 0:
            text = self._cudart.cudaGetErrorString(error)
            raise CudaError(call, int(error), f"error {int(error)} ({text})")


def load_cuda_python() -> CudaPython | None:
    """cuda-python if it is installed (`pip install prefetch-runtime[cuda]`), else None."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return CudaPython(runtime)


def load_host_pages() -> HostPages:
    """The best way to page-lock on this machine; needs a torch built with CUDA."""
    cuda_python = load_cuda_python()
    if cuda_python is not None:
        return cuda_python
    return TorchCudart(torch.cuda.cudart())  # type: ignore[no-untyped-call]
