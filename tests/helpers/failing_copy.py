"""Run as a program on a GPU: a copy fails, and every later call of the copier must say so.

A process of its own, because the failure may leave the CUDA context unusable.
Usage: python failing_copy.py refused|late
"""

import os
import sys

import torch

from prefetch_runtime.copier import CopyError, CopyJob
from prefetch_runtime.cuda_copier import CudaCopier
from prefetch_runtime.host_store import HostStore, RecordLayout
from prefetch_runtime.slot_buffers import CopyRange, SlotBuffers


def main(how: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layout = RecordLayout.from_tensors({"w": ((4096,), torch.uint8)})
    store = HostStore()
    layer = store.add_layer(0, 4, layout)
    layer.slab.fill_(1)
    store.pin(0)
    slots = SlotBuffers(4, layout, device)
    copier = CudaCopier(device)
    job = CopyJob(layer, 0, slots, 0)
    ticket = copier.submit([job])
    copier.synchronize()
    calls = [lambda: copier.submit([job]), lambda: copier.wait(ticket), copier.synchronize]
    if how == "refused":
        # Slots at address 0.
        nowhere = SlotBuffers(4, layout, device)
        nowhere._ranges[id(layout)] = (layout, (CopyRange("w", 0, 4096, 0, 4096),))
        calls.insert(0, lambda: copier.submit([CopyJob(layer, 0, nowhere, 0)]))
    else:
        # A kernel on the copy stream faults, and with it all that comes after.
        with torch.cuda.stream(copier.copy_stream):
            torch.zeros(4, device=device)[torch.tensor([10**9], device=device)]
        calls.insert(0, copier.synchronize)
    for number, call in enumerate(calls):
        try:
            call()
        except CopyError as error:
            print(f"call {number}: {error}")  # noqa: T201 - the result of this program
        else:
            sys.exit(f"call {number} after the failure did not raise CopyError")
    copier.close()
    print("submit, wait and synchronize raise CopyError", flush=True)  # noqa: T201 - as above
    os._exit(0)  # tearing down a broken context may abort


if __name__ == "__main__":
    main(sys.argv[1])
