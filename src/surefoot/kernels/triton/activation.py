"""SiLU(gate) * up. Twin: ``kernels.reference.silu_mul``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

BLOCK = 1024


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    """SiLU(gate) * up for fp32 tiles, rounded to ``dtype`` where torch rounds: inputs, SiLU,
    product."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


@jit
def silu_mul_kernel(packed_ptr, out_ptr, inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(packed_ptr + row * 2 * inner + column, mask=inside, other=0.0)
    up = tl.load(packed_ptr + row * 2 * inner + inner + column, mask=inside, other=0.0)
    result = silu_times(gate.to(tl.float32), up.to(tl.float32), packed_ptr.dtype.element_ty)
    tl.store(out_ptr + row * inner + column, result, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[N, 2 * inner]`` bf16 or fp32, contiguous, the gate first -> ``[N, inner]``."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, inner))
    silu_mul_kernel[(rows, cdiv(inner, BLOCK))](
        gate_up, out, inner, BLOCK, num_warps=4, **pdl(gate_up.device)
    )
    return out
