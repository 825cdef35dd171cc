"""y = x @ W^T for up to 128 rows: every weight is read once, and reading them is what it costs.

Up to 4 rows go without tensor cores (``gemv``), and may start with the RMSNorm of x; more rows are
one tile of ``tl.dot``. Epilogues: bias, SiLU gating, residual addition, rounded where separate
operations would round, so that fusing changes no bit. Gate and up stay two halves of one matrix:
a program reads the matching rows of both, which needs no interleaving, and leaves the matrix as
cuBLAS wants it for many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from surefoot.kernels.triton.activation import silu_times
from surefoot.kernels.triton.launch import next_power_of_2, processors
from surefoot.kernels.triton.matmul_plan import GEMV_ROWS, MAX_ROWS, MatmulPlan, plan_for


@triton.jit
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
    if SILU:
        result = silu_times(acc, up, STORED)
    else:
        result = acc.to(STORED)
    if RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + residual).to(STORED)
    tl.store(y_ptr + place, result, mask=inside)


@triton.jit
def rows_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, rows, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLIT_K) * BLOCK_K
    low = split * share
    high = tl.minimum(low + share, inputs)
    weights = w_ptr + column[None, :].to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(low, high, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + row[:, None] * inputs + k[None, :],
            mask=(row < rows)[:, None] & (k < high)[None, :],
            other=0.0,
            eviction_policy="evict_last",
        )
        needed = (column < outputs)[None, :] & (k < high)[:, None]
        w = tl.load(
            weights + k[:, None], mask=needed, other=0.0, eviction_policy="evict_first"
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if SILU:
            w = tl.load(
                weights + second + k[:, None],
                mask=needed,
                other=0.0,
                eviction_policy="evict_first",
            )
            up = tl.dot(x, w, up, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    if SPLIT_K == 1:
        finish(
            acc, up, bias_ptr, residual_ptr, y_ptr, row[:, None], column[None, :], inside,
            outputs, BIAS, RESIDUAL, SILU, y_ptr.dtype.element_ty,
        )  # fmt: skip
    else:
        width = outputs * 2 if SILU else outputs
        place = (split * rows + row[:, None]).to(tl.int64) * width + column[None, :]
        tl.store(part_ptr + place, acc, mask=inside)
        if SILU:
            tl.store(part_ptr + place + outputs, up, mask=inside)


@triton.jit
def reduce_kernel(
    part_ptr, bias_ptr, residual_ptr, y_ptr, rows, outputs,
    BLOCK: tl.constexpr, SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    width = outputs * 2 if SILU else outputs
    acc = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        place = (split * rows + row).to(tl.int64) * width + column
        acc += tl.load(part_ptr + place, mask=inside, other=0.0)
        if SILU:
            up += tl.load(part_ptr + place + outputs, mask=inside, other=0.0)
    finish(
        acc, up, bias_ptr, residual_ptr, y_ptr, row, column, inside, outputs,
        BIAS, RESIDUAL, SILU, y_ptr.dtype.element_ty,
    )  # fmt: skip


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
    dtype: torch.dtype | None = None,
    plan: MatmulPlan | None = None,
) -> torch.Tensor:
    """``x`` [N, in] (N <= 128) times ``weight`` [out, in], both bf16 or both fp32, contiguous;
    ``bias`` [out] of any float type -> [N, out] in ``dtype`` (default: x's).

    ``silu``: the weight's halves are gate and up, and the result is SiLU(gate) * up [N, out / 2].
    ``residual`` [N, out] is added after rounding. ``norm`` = (weight [in], eps) takes the RMSNorm
    of x first, for N <= 4 only. Sums are fp32. ValueError for more rows than that.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    if rows > (MAX_ROWS if norm is None else GEMV_ROWS):
        raise ValueError(f"a product of {rows} rows" + ("" if norm is None else " with its norm"))
    y = x.new_empty((rows, outputs), dtype=dtype or x.dtype)
    sms = processors(x.device)
    plan = plan or plan_for(rows, outputs, inputs, silu, sms)
    flags = (bias is not None, residual is not None, silu)
    if rows <= GEMV_ROWS:
        from surefoot.kernels.triton.gemv import launch_gemv

        launch_gemv(x, weight, bias, residual, norm, y, plan, flags)
        return y
    part = None
    if plan.split_k > 1:
        size = (plan.split_k, rows, weight.shape[0])
        part = x.new_empty(size, dtype=torch.float32)
    rows_kernel[(triton.cdiv(outputs, plan.block_n), plan.split_k)](
        x, weight, bias, residual, y, part, rows, outputs, inputs,
        next_power_of_2(rows, 16), plan.block_n, plan.block_k, plan.split_k, *flags,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if part is not None:
        block = min(1024, next_power_of_2(outputs))
        reduce_kernel[(rows, triton.cdiv(outputs, block))](
            part, bias, residual, y, rows, outputs, block, plan.split_k, *flags, num_warps=4
        )
    return y
