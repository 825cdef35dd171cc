"""y = x @ W^T for up to 128 rows: every weight is read once, and reading them is what it costs.

A program multiplies a block of weight rows, the taller side of the tensor cores' tile, with all
rows of x, the flatter one. One row costs what 16 do, and sums are the same for any number of rows,
those of ``large_matmul`` included.
Tiles come through tensor descriptors (by the copy engine where there is one) where the matrix
allows it. Epilogues: bias, SiLU gating, residual addition, rounded where separate operations would
round, so that fusing changes no bit. Gate and up stay two halves of one matrix: a program reads the
matching rows of both, which needs no interleaving, and leaves the matrix as cuBLAS wants it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from surefoot.kernels.triton import matmul_plan
from surefoot.kernels.triton.activation import silu_times
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.matmul_plan import MAX_ROWS, MatmulPlan, row_tiles
from surefoot.kernels.triton.pdl import await_inputs, pdl, prefetch, release_next

SHARE_UNIT = tl.constexpr(matmul_plan.SHARE_UNIT)


@jit
def finish(
    acc, up, bias_ptr, residual_ptr, y_ptr, row, column, inside, outputs,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Epilogue of a tile of sums; ``row``, ``column`` and ``inside`` broadcast to its shape."""
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias_ptr + outputs + column, mask=inside, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * outputs + column
    result = silu_times(acc, up, STORED) if SILU else acc.to(STORED)
    if RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + residual).to(STORED)
    tl.store(y_ptr + place, result, mask=inside)


@jit
def tile(
    ptr, descriptor, first, low, count, high, stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] of a matrix from row ``first`` (of ``count``) and column ``low``, zero from
    column ``high`` on."""
    if DESCRIBED:
        # Columns from ``high`` on lie outside the matrix here.
        return descriptor.load([first, low])
    row = first + tl.arange(0, HEIGHT)
    column = low + tl.arange(0, WIDTH)
    return tl.load(
        ptr + row[:, None].to(tl.int64) * stride + column[None, :],
        mask=(row < count)[:, None] & (column < high)[None, :],
        other=0.0,
    )


@jit
def prefetch_weights(
    w_ptr, first, low, high, outputs, inputs, count, BLOCK_N: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The first ``count`` inputs (a multiple of 16) of a program's share, for each of its weight
    rows; without gating, two threads share a row."""
    element: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    index = tl.arange(0, 2 * BLOCK_N)
    if SILU:
        row = tl.minimum(first + index % BLOCK_N, outputs - 1) + index // BLOCK_N * outputs
        start, end = low, tl.minimum(high, low + count)
    else:
        row = tl.minimum(first + index // 2, outputs - 1)
        start = low + index % 2 * (count // 16 * 8)
        end = tl.minimum(high, start + count // 16 * 8)
    start = tl.minimum(start, high - 8)
    prefetch(w_ptr + row.to(tl.int64) * inputs + start, tl.maximum(end - start, 8) * element)


@jit
def put(
    acc, up, bias_ptr, residual_ptr, y_ptr, part_ptr, top, first, split, rows, outputs,
    HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write sums [HEIGHT, BLOCK_N] of the rows from ``top`` on: a share's, or the result."""
    row = top + tl.arange(0, HEIGHT)
    column = first + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    if SPLIT:
        width = outputs * 2 if SILU else outputs
        place = (split * rows + row[:, None]).to(tl.int64) * width + column[None, :]
        tl.store(part_ptr + place, acc, mask=inside)
        if SILU:
            tl.store(part_ptr + place + outputs, up, mask=inside)
    else:
        finish(
            acc, up, bias_ptr, residual_ptr, y_ptr, row[:, None], column[None, :], inside,
            outputs, BIAS, RESIDUAL, SILU, y_ptr.dtype.element_ty,
        )  # fmt: skip


@jit(do_not_specialize=["rows", "splits", "ahead"])
def rows_kernel(
    x_ptr, x_tiles, more_tiles, w_ptr, w_tiles, bias_ptr, residual_ptr, y_ptr, part_ptr,
    rows, outputs, inputs, splits, ahead,
    BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SILU: tl.constexpr, DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    low = 0
    high = inputs
    if SPLIT:
        # The same shares for every BLOCK_K, so that sums do not depend on it.
        share = tl.cdiv(tl.cdiv(inputs, SHARE_UNIT), splits) * SHARE_UNIT
        low = split * share
        high = tl.minimum(low + share, inputs)
    if PDL and DESCRIBED and (ahead > 0) & (low < high):
        prefetch_weights(w_ptr, first, low, high, outputs, inputs, ahead, BLOCK_N, SILU)
    await_inputs(PDL)
    width = outputs * 2 if SILU else outputs
    rest: tl.constexpr = MORE if MORE else 16
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    more_acc = tl.zeros([BLOCK_N, rest], tl.float32)
    more_up = tl.zeros([BLOCK_N, rest], tl.float32)
    for base in range(low, high, BLOCK_K):
        x = tile(x_ptr, x_tiles, 0, base, rows, high, inputs, BLOCK_M, BLOCK_K, DESCRIBED)
        w = tile(w_ptr, w_tiles, first, base, width, high, inputs, BLOCK_N, BLOCK_K, DESCRIBED)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if MORE:
            more = tile(
                x_ptr, more_tiles, BLOCK_M, base, rows, high, inputs, MORE, BLOCK_K, DESCRIBED
            )
            more_acc = tl.dot(w, tl.trans(more), more_acc, input_precision="ieee")
        if SILU:
            w = tile(
                w_ptr, w_tiles, outputs + first, base, width, high, inputs,
                BLOCK_N, BLOCK_K, DESCRIBED,
            )  # fmt: skip
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")
            if MORE:
                more_up = tl.dot(w, tl.trans(more), more_up, input_precision="ieee")
    # Not sooner: blocks that wait beside these cost more than they save (docs/log.md).
    release_next(PDL)
    put(
        tl.trans(acc), tl.trans(up), bias_ptr, residual_ptr, y_ptr, part_ptr, 0, first, split,
        rows, outputs, BLOCK_M, BLOCK_N, SPLIT, BIAS, RESIDUAL, SILU,
    )  # fmt: skip
    if MORE:
        put(
            tl.trans(more_acc), tl.trans(more_up), bias_ptr, residual_ptr, y_ptr, part_ptr,
            BLOCK_M, first, split, rows, outputs, MORE, BLOCK_N, SPLIT, BIAS, RESIDUAL, SILU,
        )  # fmt: skip


@jit(do_not_specialize=["rows"])
def reduce_kernel(
    part_ptr, bias_ptr, residual_ptr, y_ptr, rows, outputs,
    BLOCK: tl.constexpr, SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    width = outputs * 2 if SILU else outputs
    acc = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    await_inputs(PDL)
    for split in tl.static_range(SPLIT_K):
        place = (split * rows + row).to(tl.int64) * width + column
        acc += tl.load(part_ptr + place, mask=inside, other=0.0)
        if SILU:
            up += tl.load(part_ptr + place + outputs, mask=inside, other=0.0)
    finish(
        acc, up, bias_ptr, residual_ptr, y_ptr, row, column, inside, outputs,
        BIAS, RESIDUAL, SILU, y_ptr.dtype.element_ty,
    )  # fmt: skip


def outputs_of(weight: torch.Tensor, silu: bool) -> int:
    """Of a product with ``weight``; ``silu``: its halves are gated into one."""
    return weight.shape[0] // 2 if silu else weight.shape[0]


def describable(x: torch.Tensor) -> bool:
    """Whether tensor descriptors can address ``x`` [N, in], and weights of as many inputs."""
    return x.shape[1] * x.dtype.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def add_shares(
    part: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu: bool,
    y: torch.Tensor,
) -> None:
    """The product into ``y`` [N, out] from the sums of its shares, fp32 [split_k, N, out], that
    ``multiply_few`` or ``multiply_many`` returned."""
    rows, outputs = y.shape
    block = min(1024, next_power_of_2(outputs))
    reduce_kernel[(rows, cdiv(outputs, block))](
        part, bias, residual, y, rows, outputs, block, part.shape[0],
        bias is not None, residual is not None, silu, num_warps=4, **pdl(y.device),
    )  # fmt: skip


def multiply_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu: bool,
    y: torch.Tensor,
    plan: MatmulPlan,
) -> torch.Tensor | None:
    """The product of up to 128 rows as ``products.matmul`` says it, into ``y``; or, where ``plan``
    splits the inputs, sums of its shares without any epilogue, fp32 [split_k, N, out]."""
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"a product of {rows} rows")
    outputs, described = outputs_of(weight, silu), describable(x)
    part = None
    if plan.split_k > 1:
        bias, residual = None, None  # Whoever adds the shares adds them.
        size = (plan.split_k, rows, weight.shape[0])
        part = x.new_empty(size, dtype=torch.float32)
    x_tiles, more_tiles, w_tiles = None, None, None
    block_m, more = row_tiles(rows)
    if described:
        x_tiles = TensorDescriptor.from_tensor(x, [block_m, plan.block_k])
        if more:
            more_tiles = TensorDescriptor.from_tensor(x, [more, plan.block_k])
        w_tiles = TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k])
    rows_kernel[(cdiv(outputs, plan.block_n), plan.split_k)](
        x, x_tiles, more_tiles, weight, w_tiles, bias, residual, y, part,
        rows, outputs, inputs, plan.split_k, plan.prefetch,
        block_m, more, plan.block_n, plan.block_k, plan.split_k > 1,
        bias is not None, residual is not None, silu, described,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl(x.device),
    )  # fmt: skip
    return part
