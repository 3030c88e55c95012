"""Run as a program: compiles every kernel for a GPU (sm_90), on any machine, and checks the PTX.

A process of its own: here Triton must compile, in the tests it interprets.
Prints one line per kernel; exits with 1 if one does not compile or is not what it should be.
"""

import sys
from collections.abc import Callable, Collection
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphs import (
    block_kernels,
    demand_kernels,
    fill_kernels,
    layout,
    prefetch_kernels,
    resolve_kernels,
    wide_kernels,
)
from prefetch_runtime.policies import create_device_form

INT64 = {
    "topk_ids", "counters", "bytes_before", "header", "units", "budget", "out", "stamps", "begun",
}  # fmt: skip
SCALARS = dict.fromkeys(
    (
        "layer_idx", "n", "row_stride", "num_scores", "num_wanted", "num_layers", "evict",
        "num_waves", "first", "num_tokens", "num_ids", "num_blocks", "num_experts",
    ),
    "i32",
)  # fmt: skip


def compile_kernel(
    kernel: Any, num_warps: int, *, int64: Collection[str] = INT64, **constants: Any
) -> str:
    """The PTX, with every pointer aligned to 16 bytes as torch's are."""
    signature, values, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
        elif name in SCALARS:
            signature[name] = SCALARS[name]
        else:
            signature[name] = "*i64" if name in int64 else "*i32"
            if name == "padding":
                signature[name] = "*i1" if _marks(constants) else "*i64"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    target = GPUTarget("cuda", 90, 32)
    ptx: str = triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]
    return ptx


def _marks(constants: dict[str, Any]) -> bool:
    return bool(constants["PAD"] == layout.Padding.MASK)


def check(name: str, ptx: str, *, holds: Callable[[str], bool] = bool) -> bool:
    ok = holds(ptx)
    sys.stdout.write(f"{'ok ' if ok else 'BAD'} {name}: {len(ptx.splitlines())} lines\n")
    return ok


def moves_16_bytes(ptx: str) -> bool:
    return "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def ends_with_its_word(ptx: str) -> bool:
    """Whether all threads meet between the last ids and the word that says they are there."""
    lines = ptx.splitlines()
    *_, ids, word = (at for at, line in enumerate(lines) if "st.global" in line)
    return any("bar.sync" in line or "barrier.sync" in line for line in lines[ids:word])


def begins_early(ptx: str) -> bool:
    """Whether the kernel waits for the one before it, and does nothing earlier but fetch what it
    reads again then (`ld.volatile.global`, which leaves nothing in a cache that would be stale)."""
    head, waits, _ = ptx.partition("griddepcontrol.wait")
    return bool(waits) and not any(does in head for does in ("ld.global", "st.global", "atom"))


def not_early(ptx: str) -> bool:
    return "griddepcontrol" not in ptx


def main() -> int:
    table: dict[str, Any] = {
        "E": 128, "S": 48, "U": 289, "F": 16, "TOP_K": 8, "BLOCK": 32,
        "E_BLOCK": 128, "S_BLOCK": 64, "F_BLOCK": 16, "TOUCH": False,
    }  # fmt: skip
    copy: dict[str, Any] = {"UNIT_BYTES": 32768, "TAIL": 4096}
    results = []
    for policy in ("lru", "lfru"):
        form = create_device_form(policy)
        resolve_kernel = resolve_kernels.resolve_kernel_of(form.hit, form.insert)
        for hook in (False, True):
            for padding in layout.Padding:
                ptx = compile_kernel(
                    resolve_kernel, 1,
                    **table, HOOK=hook, PAD=int(padding), EARLY=False,
                )  # fmt: skip
                about = f"resolve {policy} hook={hook} {padding.name}"
                results.append(check(about, ptx, holds=not_early))
        ptx = compile_kernel(resolve_kernel, 1, **table, HOOK=False, PAD=2, EARLY=True)
        results.append(check(f"resolve {policy}, early", ptx, holds=begins_early))
    wide = {"E": 1000, "S": 777, "BLOCK": 8192, "E_BLOCK": 1024, "S_BLOCK": 1024, "TOP_K": 3}
    ptx = compile_kernel(
        resolve_kernel, 8,
        **table | wide, HOOK=True, PAD=0, EARLY=True,
    )  # fmt: skip
    results.append(check("resolve, wide, early", ptx, holds=begins_early))
    one = {"E": 1, "S": 1, "E_BLOCK": 1, "S_BLOCK": 1, "F": 1, "F_BLOCK": 1, "TOP_K": 1}
    ptx = compile_kernel(resolve_kernel, 1, **table | one, HOOK=True, PAD=0, EARLY=True)
    results.append(check("resolve, one slot, early", ptx, holds=begins_early))
    ptx = compile_kernel(
        resolve_kernel, 1, **table | {"TOUCH": True}, HOOK=False, PAD=0, EARLY=False
    )
    results.append(check("touch", ptx))
    ptx = compile_kernel(resolve_kernels.advance_kernel, 4, UNITS_PER_STEP=32, BLOCK=1024)
    results.append(check("advance", ptx))
    for early in (False, True):
        ptx = compile_kernel(fill_kernels.fill_kernel, 16, **copy, S=48, U=289, EARLY=early)
        results.append(check("fill", ptx, holds=lambda p: moves_16_bytes(p) and "globaltimer" in p))
        results.append(
            check(f"fill, early={early}", ptx, holds=begins_early if early else not_early)
        )
    ptx = compile_kernel(fill_kernels.prefetch_fill_kernel, 16, **copy, E=128, F=16, U=289)
    results.append(
        check("prefetch fill", ptx, holds=lambda p: moves_16_bytes(p) and "acquire" in p)
    )
    for slots in (64, 1024):
        ptx = compile_kernel(
            prefetch_kernels.reserve_kernel, 4, E=128, S=slots, F=64, S_BLOCK=slots, F_BLOCK=64
        )
        results.append(check(f"reserve, {slots} slots", ptx))
    for early in (False, True):
        ptx = compile_kernel(
            prefetch_kernels.post_kernel, 1, E=128, TOP_K=8, BLOCK=32, PAD=2, EARLY=early
        )
        results.append(check("post", ptx, holds=lambda p: "release" in p))
        results.append(check("post", ptx, holds=begins_early if early else not_early))
    ptx = compile_kernel(wide_kernels.count_kernel, 4, E=128, BLOCK=1024)
    results.append(check("count", ptx, holds=lambda p: "red.global" in p or "atom.global" in p))
    for experts, slots, rows in ((1, 1, 1), (30, 7, 3), (128, 48, 16), (1024, 1024, 512)):
        about = f"{experts} experts"
        ptx = compile_kernel(
            wide_kernels.choose_kernel, 4, E=experts, S=slots, CHUNK=16,
            E_BLOCK=triton.next_power_of_2(experts), S_BLOCK=triton.next_power_of_2(slots),
        )  # fmt: skip
        results.append(check(f"choose, {about}", ptx))
        stride = experts // 4 * 4 + 4
        for whole in (False, True):
            ptx = compile_kernel(
                wide_kernels.wave_maps_kernel, 4, E=experts, STRIDE=stride, R=rows, WHOLE=whole,
                BLOCK=triton.next_power_of_2(stride),
            )  # fmt: skip
            results.append(check(f"wave maps, {about} whole={whole}", ptx))
        ptx = compile_kernel(wide_kernels.stream_kernel, 16, **copy, R=rows, U=289)
        results.append(check(f"stream, {rows} rows", ptx, holds=moves_16_bytes))
    for padding in layout.Padding:
        for int64 in ({"guesses"}, {"topk_ids", "guesses", "slot_ids"}):
            about = f"padding {padding.name}, {len(int64)} tensors of int64"
            told: dict[str, Any] = {"E": 128, "K": 6, "PAD": int(padding), "BLOCK": 256}
            for guesses in (0, 12):
                ptx = compile_kernel(demand_kernels.send_kernel, 4, int64=int64, **told, G=guesses)
                about_guesses = f"send, {about}, {guesses} guesses"
                results.append(check(about_guesses, ptx, holds=ends_with_its_word))
            ptx = compile_kernel(demand_kernels.rename_kernel, 4, int64=int64, **told)
            results.append(check(f"rename, {about}", ptx))
    for early in (False, True):
        ptx = compile_kernel(block_kernels.seat_kernel, 2, BLOCK=256, EARLY=early)
        results.append(check("seat", ptx, holds=begins_early if early else not_early))
    for wait in (wide_kernels.begin_wait_kernel, wide_kernels.end_wait_kernel):
        ptx = compile_kernel(wait, 1)
        results.append(check(wait.__name__, ptx, holds=lambda p: "globaltimer" in p))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
