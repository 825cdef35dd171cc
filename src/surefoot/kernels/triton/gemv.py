"""Products of 1 to 4 rows: one multiplication a weight and row, without tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from surefoot.kernels.triton.activation import silu_times
from surefoot.kernels.triton.matmul_plan import MatmulPlan


@triton.jit
def row_scale(x_ptr, inputs, eps, NORM: tl.constexpr, BLOCK_K: tl.constexpr):
    """RMSNorm's factor for one row; 1 without a norm."""
    scale = 1.0
    if NORM:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for base in range(0, inputs, BLOCK_K):
            k = base + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=k < inputs, other=0.0, eviction_policy="evict_last")
            squares += x.to(tl.float32) * x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / inputs + eps)
    return scale


@triton.jit
def input_tile(x_ptr, k, inputs, norm, scale, NORM: tl.constexpr):
    """[1, BLOCK_K] of one row as fp32, normed and then rounded as a norm by itself would."""
    x = tl.load(x_ptr + k, mask=k < inputs, other=0.0, eviction_policy="evict_last")
    wide = x.to(tl.float32)
    if NORM:
        wide = (wide * scale * norm).to(x.dtype).to(tl.float32)
    return wide[None, :]


@triton.jit
def store_row(
    acc, up, bias_ptr, residual_ptr, y_ptr, column, outputs,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Sum a row's partial products [BLOCK_N, BLOCK_K] and finish it."""
    inside = column < outputs
    stored: tl.constexpr = y_ptr.dtype.element_ty
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        second = tl.sum(up, axis=1)
        if BIAS:
            second += tl.load(bias_ptr + outputs + column, mask=inside, other=0.0).to(tl.float32)
        result = silu_times(total, second, stored)
    else:
        result = total.to(stored)
    if RESIDUAL:
        residual = tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + residual).to(stored)
    tl.store(y_ptr + column, result, mask=inside)


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, norm_ptr, y_ptr, outputs, inputs, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = w_ptr + column[:, None].to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    # Rows by name: Triton keeps no arrays of tiles in registers. Unused ones compile to nothing.
    x1, x2, x3 = x_ptr + inputs, x_ptr + 2 * inputs, x_ptr + 3 * inputs
    scale0 = row_scale(x_ptr, inputs, eps, NORM, BLOCK_K)
    scale1 = row_scale(x1, inputs, eps, NORM and ROWS > 1, BLOCK_K)
    scale2 = row_scale(x2, inputs, eps, NORM and ROWS > 2, BLOCK_K)
    scale3 = row_scale(x3, inputs, eps, NORM and ROWS > 3, BLOCK_K)
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3, up0, up1, up2, up3 = acc0, acc0, acc0, acc0, acc0, acc0, acc0
    for base in range(0, inputs, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        needed = (column < outputs)[:, None] & (k < inputs)[None, :]
        w = tl.load(
            weights + k[None, :], mask=needed, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        u = w
        if SILU:
            u = tl.load(
                weights + second + k[None, :],
                mask=needed,
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
        norm = 1.0
        if NORM:
            norm = tl.load(norm_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)
        x = input_tile(x_ptr, k, inputs, norm, scale0, NORM)
        acc0 += w * x
        if SILU:
            up0 += u * x
        if ROWS > 1:
            x = input_tile(x1, k, inputs, norm, scale1, NORM)
            acc1 += w * x
            if SILU:
                up1 += u * x
        if ROWS > 2:
            x = input_tile(x2, k, inputs, norm, scale2, NORM)
            acc2 += w * x
            if SILU:
                up2 += u * x
        if ROWS > 3:
            x = input_tile(x3, k, inputs, norm, scale3, NORM)
            acc3 += w * x
            if SILU:
                up3 += u * x
    store_row(
        acc0, up0, bias_ptr, residual_ptr, y_ptr, column, outputs, BIAS, RESIDUAL, SILU
    )  # fmt: skip
    if ROWS > 1:
        store_row(
            acc1, up1, bias_ptr, residual_ptr + outputs if RESIDUAL else residual_ptr,
            y_ptr + outputs, column, outputs, BIAS, RESIDUAL, SILU,
        )  # fmt: skip
    if ROWS > 2:
        store_row(
            acc2, up2, bias_ptr, residual_ptr + 2 * outputs if RESIDUAL else residual_ptr,
            y_ptr + 2 * outputs, column, outputs, BIAS, RESIDUAL, SILU,
        )  # fmt: skip
    if ROWS > 3:
        store_row(
            acc3, up3, bias_ptr, residual_ptr + 3 * outputs if RESIDUAL else residual_ptr,
            y_ptr + 3 * outputs, column, outputs, BIAS, RESIDUAL, SILU,
        )  # fmt: skip


def launch_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    y: torch.Tensor,
    plan: MatmulPlan,
    flags: tuple[bool, bool, bool],
) -> None:
    """See ``matmul.matmul``; ``flags``: (bias, residual, SiLU gating)."""
    rows, outputs = y.shape
    norm_weight, eps = norm if norm is not None else (None, 0.0)
    gemv_kernel[(triton.cdiv(outputs, plan.block_n),)](
        x, weight, bias, residual, norm_weight, y, outputs, x.shape[1], eps,
        rows, plan.block_n, plan.block_k, *flags, norm is not None,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
