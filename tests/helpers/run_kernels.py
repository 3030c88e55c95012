"""Run as a program on a GPU: every kernel of `graphs`, for steps of random routing, then a check.

    python -m tests.helpers.run_kernels [--short]

Made to run under compute-sanitizer. `--short` gives one layer a slot less than its table says, so
that the fill writes behind the slots: the sanitizer has to find that.
"""

import sys

import torch

from tests.test_prefetch_hook import DEVICE, MAX_FORECAST, Rig

STEPS = 40
TOP_K = 2


def main() -> int:
    """Exit status 1 if a mapped slot holds other bytes than its expert."""
    missing = 1 if "--short" in sys.argv else 0
    rig = Rig(num_layers=2, num_experts=12, num_slots=6, missing_rows=missing)
    generator = torch.Generator().manual_seed(1)

    def ids(rows: int, count: int) -> torch.Tensor:
        chosen = [torch.randperm(12, generator=generator)[:count] for _ in range(rows)]
        return torch.stack(chosen).to(DEVICE, torch.int32)

    for step in range(STEPS):
        rig.advance()
        tokens = 1 + step % 2
        padding = torch.tensor([0, -1][:tokens], dtype=torch.int64, device=DEVICE)
        for layer_idx in range(2):
            demand = ids(tokens, TOP_K)
            rig.hook.post(layer_idx, demand, padding=padding)
            rig.table.resolve(layer_idx, demand, padding=padding)
            rig.demand_fill.fill(layer_idx)
            rig.table.touch(layer_idx, demand)
            if layer_idx == 0:
                rig.hook.reserve(1, ids(1, MAX_FORECAST)[0])
                rig.hook.fill(1)
    torch.cuda.synchronize()
    rig.table.check_errors()
    for layer_idx in range(2):
        mapping = rig.table.mapping[layer_idx].tolist()
        for expert, slot in enumerate(mapping):
            host = rig.hosts[layer_idx][expert, : rig.payload_bytes]
            if slot >= 0 and not torch.equal(rig.slots[layer_idx][slot].cpu(), host):
                sys.stdout.write(f"layer {layer_idx}: slot {slot} does not hold expert {expert}\n")
                return 1
    sys.stdout.write(f"{STEPS} steps, every mapped slot holds its expert\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
