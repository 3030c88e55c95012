"""Records, the layers' slabs and their page-locking; on a made-up CUDA, and the real one on a GPU.

Shapes: E = experts in the layer.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from prefetch_runtime.cudart import CudaError
from prefetch_runtime.host_memory import HostMemoryError, MemoryLimit
from prefetch_runtime.host_store import HostStore, RecordLayout
from tests.helpers.page_lock import is_page_locked

GIB = 1 << 30
MIB = 1 << 20

LAYOUT = RecordLayout.from_tensors(
    {
        "w13_weight": ((6, 5), torch.bfloat16),
        "w2_weight": ((5, 3), torch.float8_e4m3fn),
        "w2_weight_scale": ((), torch.float32),
        "w2_g_idx": ((0,), torch.int32),
    }
)


class FakePages:
    """Registers up to `limit` bytes, or refuses."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        if address in self.registered:
            raise CudaError("cudaHostRegister", 712, "cudaErrorHostMemoryAlreadyRegistered (no)")
        if sum(self.registered.values()) + nbytes > self.limit:
            raise CudaError("cudaHostRegister", 2, "cudaErrorMemoryAllocation (out of memory)")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def device_pointer(self, address: int) -> int:
        return address + 1


def room_of(num_bytes: int) -> Callable[[], list[MemoryLimit]]:
    return lambda: [MemoryLimit("a limit", num_bytes, "use less")]


def layout_of(num_bytes: int) -> RecordLayout:
    return RecordLayout.from_tensors({"w": ((num_bytes,), torch.uint8)})


def test_every_field_of_a_record_starts_on_256_bytes() -> None:
    assert [(f.name, f.offset, f.nbytes) for f in LAYOUT.fields] == [
        ("w13_weight", 0, 60),
        ("w2_weight", 256, 15),
        ("w2_weight_scale", 512, 4),
        ("w2_g_idx", 768, 0),
    ]
    assert LAYOUT.record_bytes == 768
    assert LAYOUT.payload_bytes == 79
    assert layout_of(257).record_bytes == 512


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "needs a tensor that is not empty"),
        ({"w": ((0, 3), torch.int8)}, "needs a tensor that is not empty"),
        ({"w": ((2, -3), torch.int8)}, r"w has a negative dimension: \(2, -3\)"),
    ],
)
def test_a_record_of_nothing_is_refused(
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RecordLayout.from_tensors(tensors)


def test_each_tensor_is_a_view_of_its_bytes_in_every_record() -> None:
    with HostStore(pinning=False) as store:
        layer = store.add_layer(3, num_experts=4, layout=LAYOUT)
        assert layer.slab.shape == (4, 768)
        for number, field in enumerate(LAYOUT.fields, start=1):
            view = layer.tensor(field.name)
            assert view.shape == (4, *field.shape)
            assert view.dtype == field.dtype
            same_bytes = torch.full((field.nbytes,), number, dtype=torch.uint8)
            view.copy_(same_bytes.view(field.dtype).view(field.shape).expand_as(view))
        for expert_id in range(4):
            record = layer.record(expert_id)
            assert record.data_ptr() == layer.address + expert_id * 768
            for start, nbytes, value in [(0, 60, 1), (256, 15, 2), (512, 4, 3)]:
                assert (record[start : start + nbytes] == value).all()
            assert int(record.sum()) == 60 * 1 + 15 * 2 + 4 * 3  # nothing between the fields


def test_threads_fill_different_experts_at_once() -> None:
    layout = RecordLayout.from_tensors({"w": ((300, 7), torch.float32)})
    source = torch.randn(16, 300, 7)
    with HostStore(pinning=False) as store:
        layer = store.add_layer(0, 16, layout)

        def load(first: int) -> None:
            for expert_id in range(first, 16, 4):
                layer.tensor("w")[expert_id].copy_(source[expert_id])

        threads = [threading.Thread(target=load, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(layer.tensor("w"), source)


def test_unknown_names_and_numbers_are_errors() -> None:
    with HostStore(pinning=False) as store:
        layer = store.add_layer(3, 4, LAYOUT)
        with pytest.raises(ValueError, match=r"layer 3 has no tensor 'w1'; it has w13_weight, w2"):
            layer.tensor("w1")
        for expert_id in (-1, 4):
            with pytest.raises(ValueError, match=f"experts 0 to 3, not {expert_id}"):
                layer.record(expert_id)
        with pytest.raises(ValueError, match="no layer 7 in the host store"):
            store.pin(7)
        with pytest.raises(ValueError, match="already; use replace_layer"):
            store.add_layer(3, 4, LAYOUT)
        with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
            store.add_layer(4, 0, LAYOUT)
        assert [layer.layer_idx for layer in store.layers] == [3]


def test_layers_that_are_not_filled_yet_count_too() -> None:
    """Memory that was handed out but not written yet still looks available."""
    store = HostStore(pinning=False, limits=room_of(GIB))
    store.add_layer(0, 600, layout_of(MIB))
    with pytest.raises(HostMemoryError, match=r"up to layer 1 need 1\.17 GiB.* only 1\.00 GiB"):
        store.add_layer(1, 600, layout_of(MIB))
    store.add_layer(1, 400, layout_of(MIB))
    store.close()


def test_memory_that_others_took_meanwhile_is_noticed() -> None:
    left = [4 * GIB]
    store = HostStore(pinning=False, limits=lambda: room_of(left[0])())
    store.add_layer(0, 1, layout_of(MIB))
    left[0] = GIB // 2
    with pytest.raises(HostMemoryError, match=r"layer 1 need 1\.00 GiB.* only 0\.50 GiB"):
        store.add_layer(1, 1024, layout_of(MIB))
    store.close()


def test_an_enforced_lock_limit_is_an_error_only_where_memory_is_pinned() -> None:
    with pytest.raises(HostMemoryError, match=r"RLIMIT_MEMLOCK allows 1\.00 MiB"):
        HostStore(host_pages=FakePages(limit=0), memlock=lambda: MIB).add_layer(
            0, 2, layout_of(MIB)
        )
    HostStore(pinning=False, memlock=lambda: MIB).add_layer(0, 2, layout_of(MIB))


@pytest.mark.parametrize("limit", [MIB, 2 * GIB])
def test_a_lock_limit_that_nobody_enforces_is_found_out_once(
    limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    class Noting(FakePages):
        def register(self, address: int, nbytes: int) -> None:
            tried.append(nbytes)
            super().register(address, nbytes)

    with HostStore(host_pages=Noting(), limits=room_of(9 * GIB), memlock=lambda: limit) as store:
        for layer_idx in range(3):
            store.add_layer(layer_idx, 3 * GIB // MIB, layout_of(MIB))
    assert len(tried) + len(caplog.records) == 1


def test_pinning_counts_bytes_and_gives_device_addresses() -> None:
    api = FakePages()
    with HostStore(host_pages=api) as store:
        first, second = (store.add_layer(index, 4, LAYOUT) for index in (1, 2))
        assert (first.pinned, first.device_address, store.pinned_bytes) == (False, 0, 0)
        store.pin(1)
        store.pin(1)
        assert (first.pinned, first.device_address) == (True, first.address + 1)
        assert api.registered == {first.address: 4 * 768}
        store.pin_all(progress=False)
        assert second.pinned
        assert store.pinned_bytes == store.total_bytes == 2 * 4 * 768
        address = first.address
    assert not api.registered
    assert (first.pinned, first.device_address, first.address) == (False, 0, 0)
    assert store.pinned_bytes == 0
    assert address


def test_pinning_all_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with HostStore(host_pages=FakePages()) as store:
        store.add_layer(0, 4, LAYOUT)
        store.pin_all()
    assert "page-locking experts: 100%" in capsys.readouterr().err
    with HostStore(pinning=False) as store:
        store.add_layer(0, 4, LAYOUT)
        store.pin_all()
    assert capsys.readouterr().err == ""


def test_without_cuda_pinning_does_nothing() -> None:
    with HostStore(pinning=False) as store:
        layer = store.add_layer(0, 4, LAYOUT)
        store.pin_all()
        assert (layer.pinned, layer.device_address, store.pinned_bytes) == (False, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_asked_for_without_cuda_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        HostStore(pinning=True)


def test_a_refused_pin_names_the_layer_and_what_was_pinned_and_leaves_that() -> None:
    with HostStore(host_pages=FakePages(limit=4 * 768)) as store:
        for layer_idx in (0, 1):
            store.add_layer(layer_idx, 4, layout_of(768))
        with pytest.raises(
            HostMemoryError,
            match=r"experts of layer 1 .*out of memory.* 0\.00 MiB of 0\.01 MiB were pinned before",
        ):
            store.pin_all(progress=False)
        assert [layer.pinned for layer in store.layers] == [True, False]
        assert store.pinned_bytes == 4 * 768


def test_a_replaced_layer_can_be_converted_into_the_new_one() -> None:
    api = FakePages()
    with HostStore(host_pages=api) as store:
        old = store.add_layer(0, 4, layout_of(512))
        old.tensor("w").copy_(torch.arange(512, dtype=torch.int16).to(torch.uint8).expand(4, 512))
        store.pin(0)
        new = store.replace_layer(0, 4, layout_of(256))
        assert store.layer(0) is new
        assert old.pinned  # it moves at the speed of the link while it is converted
        assert [*api.registered] == [old.address]
        new.tensor("w").copy_(old.tensor("w")[:, 256:])
        assert (new.tensor("w")[3] == torch.arange(256, dtype=torch.uint8)).all()
        assert store.total_bytes == 4 * 256
        store.pin_all(progress=False)
        assert not old.pinned
        assert [*api.registered] == [new.address]
        assert store.pinned_bytes == 4 * 256
        assert (old.tensor("w")[1] == old.tensor("w")[0]).all()


def test_closing_unlocks_a_replaced_layer_too() -> None:
    api = FakePages()
    store = HostStore(host_pages=api)
    old = store.add_layer(0, 4, LAYOUT)
    store.pin(0)
    store.replace_layer(0, 4, layout_of(256))
    assert [*api.registered] == [old.address]
    store.close()
    assert not api.registered
    assert not old.pinned
    with pytest.raises(RuntimeError, match="layer 0 is closed"):
        old.record(0)


def test_a_layer_replaced_twice_keeps_no_memory_locked() -> None:
    api = FakePages()
    with HostStore(host_pages=api) as store:
        store.add_layer(0, 4, LAYOUT)
        store.pin(0)
        store.replace_layer(0, 4, layout_of(256))
        store.replace_layer(0, 4, layout_of(512))
        assert not api.registered
        assert store.pinned_bytes == 0


def test_a_replaced_layer_counts_once() -> None:
    with HostStore(pinning=False, limits=room_of(5 * MIB)) as store:
        store.add_layer(0, 4, layout_of(MIB))
        store.replace_layer(0, 4, layout_of(MIB))
        assert store.total_bytes == 4 * MIB


def test_a_replacement_that_does_not_fit_leaves_the_layer_as_it_was() -> None:
    left = [4 * GIB]
    api = FakePages()
    with HostStore(host_pages=api, limits=lambda: room_of(left[0])()) as store:
        layer = store.add_layer(0, 4, layout_of(MIB))
        store.pin(0)
        left[0] = MIB
        with pytest.raises(HostMemoryError, match=r"layer 0 need 4\.00 MiB.* only 1\.00 MiB"):
            store.replace_layer(0, 4, layout_of(MIB))
        with pytest.raises(ValueError, match="at least 1"):
            store.replace_layer(0, 0, layout_of(MIB))
        assert store.layer(0) is layer
        assert layer.pinned
        with pytest.raises(ValueError, match="no layer 5"):
            store.replace_layer(5, 4, layout_of(MIB))


def test_a_store_that_is_dropped_without_being_closed_unlocks_its_memory() -> None:
    pages = FakePages()
    store = HostStore(host_pages=pages)
    store.add_layer(0, 4, LAYOUT)
    store.pin(0)
    assert pages.registered
    del store
    gc.collect()
    assert not pages.registered


def test_views_stay_readable_past_close_and_the_store_says_it_is_closed() -> None:
    store = HostStore(host_pages=FakePages())
    layer = store.add_layer(0, 4, LAYOUT)
    view = layer.tensor("w13_weight")
    view.fill_(5)
    store.pin(0)
    store.close()
    store.close()
    gc.collect()
    assert (view == 5).all()
    with pytest.raises(RuntimeError, match="layer 0 is closed"):
        layer.tensor("w13_weight")
    with pytest.raises(RuntimeError, match="layer 0 is closed"):
        layer.record(0)
    for call in (lambda: store.add_layer(1, 4, LAYOUT), lambda: store.pin_all(progress=False)):
        with pytest.raises(RuntimeError, match="the host store is closed"):
            call()


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_taken_as_it_is_written_and_given_back_on_close() -> None:
    before = rss_bytes()
    store = HostStore(pinning=False)
    layer = store.add_layer(0, 64, layout_of(2 * MIB))
    assert rss_bytes() - before < 8 * MIB
    for expert_id in range(8):
        layer.tensor("w")[expert_id].fill_(1)
    assert 14 * MIB < rss_bytes() - before < 28 * MIB
    store.close()
    gc.collect()
    assert rss_bytes() - before < 8 * MIB


# On a GPU


@pytest.fixture
def cuda_is_up() -> None:
    """CUDA's own memory and start-up time are spent before anything is measured."""
    torch.ones(1, device="cuda").add_(1)
    with HostStore() as store:
        store.add_layer(0, 1, LAYOUT)
        store.pin_all(progress=False)


@pytest.fixture
def filled() -> Iterator[HostStore]:
    """Three layers of 40 experts of 1.2 MB, written but not pinned."""
    store = HostStore()
    layout = RecordLayout.from_tensors({"a": ((300_000,), torch.float32), "b": ((7,), torch.int32)})
    for layer_idx in range(3):
        layer = store.add_layer(layer_idx, 40, layout)
        layer.tensor("a").copy_(torch.randn(40, 300_000))
        layer.tensor("b").copy_(torch.arange(280).view(40, 7) + 1000 * layer_idx)
    yield store
    store.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_is_up")
def test_pinned_memory_is_what_the_experts_weigh_and_goes_back(filled: HostStore) -> None:
    expected = 3 * 40 * (1_200_128 + 256)  # each field rounded up to 256 bytes
    assert filled.total_bytes == expected
    assert filled.pinned_bytes == 0
    before = rss_bytes()
    filled.pin_all(progress=False)
    assert filled.pinned_bytes == expected
    # torch's allocator would have rounded each layer from 46 to 64 MiB.
    assert rss_bytes() - before < 0.03 * expected + 16 * MIB
    slabs = [layer.slab for layer in filled.layers]
    assert all(is_page_locked(slab) for slab in slabs)
    filled.close()
    assert filled.pinned_bytes == 0
    assert not any(is_page_locked(slab) for slab in slabs)
    assert slabs[2].view(torch.uint8).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_is_up")
def test_pinning_a_filled_layer_takes_less_than_half_a_second_per_gib() -> None:
    """Measured 0.06 s per GiB on one host; torch's pinned allocator takes 0.6 to 0.8 s."""
    with HostStore() as store:
        layer = store.add_layer(0, 256, layout_of(4 * MIB))
        layer.slab.fill_(1)
        start = time.perf_counter()
        store.pin(0)
        seconds = time.perf_counter() - start
    assert seconds < 0.5, f"1 GiB took {seconds:.3f} s"


@pytest.mark.gpu
def test_a_kernel_reads_the_records_at_their_device_address(filled: HostStore) -> None:
    filled.pin_all(progress=False)
    layer = filled.layer(1)
    assert layer.device_address > 0
    offset = next(field.offset for field in layer.layout.fields if field.name == "b")

    class Mapped:
        """The field `b` of expert 39 as CUDA's array interface shows device memory."""

        __cuda_array_interface__ = {  # noqa: RUF012 - the interface wants a plain dict
            "shape": (7,),
            "typestr": "<i4",
            "data": (layer.device_address + 39 * layer.layout.record_bytes + offset, False),
            "version": 3,
        }

    on_device = torch.as_tensor(Mapped(), device="cuda")
    assert on_device.is_cuda
    doubled = on_device * 2  # a kernel, where a plain copy could be a memcpy
    assert doubled.tolist() == [2 * (1000 + 39 * 7 + index) for index in range(7)]


@pytest.mark.gpu
def test_pinned_again_after_close_works(filled: HostStore) -> None:
    filled.pin_all(progress=False)
    filled.close()
    with HostStore() as store:
        layer = store.add_layer(0, 64, layout_of(MIB))
        layer.slab.fill_(1)
        store.pin(0)
        assert is_page_locked(layer.slab)
