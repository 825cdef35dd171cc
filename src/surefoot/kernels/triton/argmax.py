"""Argmax over a vocabulary, in two stages so that one row keeps many processors busy."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

BLOCK = 2048


@jit
def largest(values, index, limit):
    """(maximum, lowest index that has it) of a tile; ``limit`` where all are NaN."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, index, limit), axis=0)


@jit
def partial_argmax_kernel(
    logits_ptr, stride, width, value_ptr, index_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits_ptr + row * stride + column, mask=column < width, other=float("-inf")
    ).to(tl.float32)
    best, index = largest(values, column, width - 1)
    tl.store(value_ptr + row * tl.num_programs(1) + part, best)
    tl.store(index_ptr + row * tl.num_programs(1) + part, index)


@jit
def final_argmax_kernel(
    value_ptr, index_ptr, out_ptr, parts, width, PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < parts
    values = tl.load(value_ptr + row * parts + part, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=inside, other=width - 1)
    _, found = largest(values, index, width - 1)
    tl.store(out_ptr + row, found.to(tl.int64))


def parts_of(
    rows: int, width: int, device: torch.device, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the maximum (float32) of each ``block`` columns and its index (int32), [rows,
    parts]."""
    size = (rows, cdiv(width, block))
    return (
        torch.empty(size, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
    )


def reduce_parts(values: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """The second stage: [M, parts] each -> int64 [M]."""
    rows, parts = values.shape
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    final_argmax_kernel[(rows,)](
        values, indices, out, parts, width, next_power_of_2(parts), num_warps=1,
        **pdl(values.device),
    )  # fmt: skip
    return out


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` [M, vocab] float32 or bf16 without NaN, rows contiguous -> int64 [M]; the lowest
    index among equals."""
    rows, width = logits.shape
    values, indices = parts_of(rows, width, logits.device)
    partial_argmax_kernel[(rows, values.shape[1])](
        logits, logits.stride(0), width, values, indices, BLOCK, num_warps=4, **pdl(logits.device)
    )
    return reduce_parts(values, indices, width)
