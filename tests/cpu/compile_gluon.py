"""Compiles the kernels in Gluon for Hopper, without a GPU (``test_gluon.py``).

A program of its own: what is defined while Triton interprets does not compile.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from surefoot.kernels.triton.chunk_kernel import chunk_kernel, combine_chunks_kernel
from surefoot.kernels.triton.prompt_kernel import prompt_kernel
from surefoot.kernels.triton.shares_kernel import shares_kernel

FOUR_HEADS, ROWS = NVMMASharedLayout(128, 16, 3), NVMMASharedLayout(128, 16, 2)
TYPES = {
    "out_ptr": "*bf16", "part_ptr": "*fp32", "sums_ptr": "*fp32", "items_ptr": "*i32",
    "tiles_ptr": "*i32", "split_ptr": "*i32", "tables_ptr": "*i32", "scale": "fp32",
}  # fmt: skip
HEADS = dict(HEADS=32, PACK=4, HEAD_DIM=128)
STEPS = dict(KV_HEADS=8, BLOCK_SIZE=16, BLOCK_N=128, CHUNK=2, STAGES=2)
ATTENTION = {
    "q_desc": f"tensordesc<bf16[16, 4, 128],{FOUR_HEADS!r}>",
    "kv_desc": f"tensordesc<bf16[16, 128],{ROWS!r}>",
    "path_desc": f"tensordesc<bf16[16, 128],{ROWS!r}>",
}


def products(part: int, rest: int) -> dict[str, str]:
    """Descriptors of ``shares_kernel``'s tensors."""
    second = rest or 16
    narrow = NVMMASharedLayout(min(128, 2 * second), 16, 2)
    boxes = {
        "x_desc": (128, 64, ROWS), "w_desc": (part, 64, ROWS), "w_rest_desc": (second, 64, ROWS),
        "y_desc": (64, part, ROWS), "y_rest_desc": (64, second, narrow),
    }  # fmt: skip
    return {n: f"tensordesc<bf16[{a}, {b}],{layout!r}>" for n, (a, b, layout) in boxes.items()}


KERNELS: list[tuple[Any, dict[str, str], dict[str, int]]] = [
    (chunk_kernel, ATTENTION, dict(**HEADS, **STEPS, USED=4, TREES=False)),
    (chunk_kernel, ATTENTION, dict(**HEADS, **STEPS, USED=4, TREES=True)),
    (prompt_kernel, ATTENTION, dict(**HEADS, **STEPS)),
    (combine_chunks_kernel, {}, dict(**HEADS, USED=4, MEMBERS=16, TOGETHER=4, FEW=4, MANY=16)),
    (shares_kernel, products(128, 128), dict(PART=128, REST=128, SHARES=3, GROUP=4, STAGES=3)),
    (shares_kernel, products(64, 16), dict(PART=64, REST=16, SHARES=3, GROUP=4, STAGES=3)),
]

if __name__ == "__main__":
    for kernel, types, constants in KERNELS:
        names, types = kernel.arg_names, TYPES | types
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs={})
        options = {"num_warps": 4, "maxnreg": 168}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(compiled.metadata.name, "wgmma" in compiled.asm["ptx"])
