"""What drafters that draft whole blocks do beside their products, one small kernel each.

Twins: ``kernels.drafting.Drafting``. Launched as ``pdl`` says.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.drafter_parts import BlockRows, LiveRows
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

CHANNELS = 512
"""Of a row, convolved by one program."""


@jit(do_not_specialize=["requests", "rows", "filler"])
def block_rows_kernel(
    token_ptr, key_ptr, position_ptr, requests, rows, filler,
    out_token_ptr, out_position_ptr, out_key_ptr, owner_ptr, first_row_ptr, count_ptr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    inside = row < rows
    place = request * rows + row
    source = row * requests + request
    token = tl.where(row == 0, tl.load(token_ptr + request), filler)
    tl.store(out_token_ptr + place, token, mask=inside)
    key = tl.load(key_ptr + source, mask=inside, other=0)
    tl.store(out_key_ptr + place, key, mask=inside)
    position = tl.load(position_ptr + source, mask=inside, other=0)
    tl.store(out_position_ptr + place, position, mask=inside)
    tl.store(owner_ptr + place, request + 0 * row, mask=inside)
    tl.store(first_row_ptr + request, request * rows)
    tl.store(count_ptr + request, rows + 0 * request)


def block_rows(live: LiveRows, rows: int, filler: int) -> BlockRows:
    """``Drafting.block_rows``."""
    count = live.tokens.shape[0]
    tokens, positions, keys, owners = (live.tokens.new_empty(count * rows) for _ in range(4))
    first_rows, counts = (live.tokens.new_empty(count) for _ in range(2))
    block_rows_kernel[(count,)](
        live.tokens, live.keys, live.positions, count, rows, filler,
        tokens, positions, keys, owners, first_rows, counts, next_power_of_2(rows),
        num_warps=1, **pdl(live.tokens.device),
    )  # fmt: skip
    return BlockRows(tokens, positions, keys, owners, first_rows, counts)


@jit(do_not_specialize=["block"])
def convolve_kernel(
    y_ptr, base_ptr, dynamic_ptr, dynamic_stride, out_ptr, block,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    within = row % block
    acc = tl.zeros([BLOCK], tl.float32)
    await_inputs(PDL)
    for tap in tl.static_range(TAPS):
        weight = tl.load(base_ptr + tap * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
        group = row * dynamic_stride + tap * (WIDTH // GROUP) + channel // GROUP
        weight += tl.load(dynamic_ptr + group, mask=inside, other=0.0).to(tl.float32)
        there = inside & (within >= tap)
        y = tl.load(y_ptr + (row - tap) * WIDTH + channel, mask=there, other=0.0)
        acc += weight * y.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + channel, acc.to(out_ptr.dtype.element_ty), mask=inside)


def convolve(
    y: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block: int
) -> torch.Tensor:
    """``Drafting.convolve``. Rows of ``dynamic`` may be strided; sums are fp32, rounded once."""
    rows, width = y.shape
    taps, groups = dynamic.shape[1:]
    y, base, out = y.contiguous(), base.contiguous(), torch.empty_like(y)
    if dynamic.stride(2) != 1 or dynamic.stride(1) != groups:
        dynamic = dynamic.contiguous()
    size = min(CHANNELS, next_power_of_2(width))
    convolve_kernel[(rows, cdiv(width, size))](
        y, base, dynamic, dynamic.stride(0), out, block, width, width // groups, taps, size,
        num_warps=4, **pdl(y.device),
    )  # fmt: skip
    return out
