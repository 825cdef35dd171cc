"""RMSNorm, alone and after a residual addition. Twin: ``kernels.reference.rms_norm``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from surefoot.kernels.triton.launch import next_power_of_2


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * width + column, mask=inside, other=0.0)
        # Rounded before it is normed, as the sum of two tensors would be.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [N, width] bf16 or fp32, contiguous; ``weight`` [width] bf16 or fp32 -> like ``x``."""
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, None, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual, rms_norm(x + residual)); all [N, width] of one dtype, contiguous."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, eps, total, out)
    return total, out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows, width = x.shape
    block = next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x, residual, weight, total, out, width, eps, residual is not None, block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
