"""RMSNorm, alone and after a residual addition or a product in shares.
Twin: ``kernels.reference.rms_norm``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next


@jit
def rms_norm_kernel(
    x_ptr, inner, outer_stride, bias_ptr, residual_ptr, weight_ptr, sum_ptr, kept_ptr, kept_stride,
    out_ptr, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr,
    KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if SHARES > 0:
        # The kernel ahead is the product: the residual is older.
        residual = tl.load(residual_ptr + row * width + column, mask=inside, other=0.0)
    await_inputs(PDL)
    if SHARES > 0:
        wide = tl.zeros([BLOCK], tl.float32)
        for share in tl.static_range(SHARES):
            place = (share * tl.num_programs(0) + row) * width + column
            wide += tl.load(x_ptr + place, mask=inside, other=0.0)
        if BIAS:
            wide += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = wide.to(out_ptr.dtype.element_ty)
    else:
        place = (row // inner) * outer_stride + (row % inner) * width + column
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
    if ADD:
        if SHARES == 0:
            residual = tl.load(residual_ptr + row * width + column, mask=inside, other=0.0)
        # Rounded before it is normed, as the sum of two tensors would be.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + column, x, mask=inside)
        if KEEP:
            tl.store(kept_ptr + row * kept_stride + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(out_ptr + row * width + column, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [N, width] bf16 or fp32, contiguous; ``weight`` [width] bf16 or fp32 -> like ``x``. Or
    [B, n, width], of which the first dimension may be strided -> [B * n, width]."""
    out = x.new_empty((x.shape[:-1].numel(), x.shape[-1]))
    _launch(x, None, None, weight, eps, None, None, out, 0)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual, rms_norm(x + residual)); all [N, width] of one dtype, contiguous. ``kept``: a
    second place for the sum, whose rows may be strided."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, None, residual, weight, eps, total, kept, out, 0)
    return total, out


def sum_add_rms_norm(
    shares: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` of a product that came in ``shares`` [n, N, width] fp32 from
    ``products.multiply`` and lacks its ``bias`` [width]; the rest as there. To be launched right
    behind that product."""
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    _launch(shares, bias, residual, weight, eps, total, kept, out, shares.shape[0])
    return total, out


def _launch(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
    kept: torch.Tensor | None,
    out: torch.Tensor,
    shares: int,
) -> None:
    rows, width = out.shape
    block = next_power_of_2(width)
    # Rows that lie behind each other are groups of one.
    inner = 1 if x.is_contiguous() else x.shape[1]
    rms_norm_kernel[(rows,)](
        x, inner, width if inner == 1 else x.stride(0), bias, residual, weight, total,
        kept, 0 if kept is None else kept.stride(0), out, width, eps,
        residual is not None, block, shares, bias is not None, kept is not None,
        # A row's sum of squares has one order in all variants of the kernel: how many warps add it
        # goes by the width, and no compiler chooses which products to fuse with additions.
        num_warps=min(16, max(1, block // 256)), enable_fp_fusion=False, **pdl(x.device),
    )  # fmt: skip
