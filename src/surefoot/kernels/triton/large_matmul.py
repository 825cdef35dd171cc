"""y = x @ W^T for more rows than ``matmul`` takes, to the same bits.

Tiles of rows by outputs are handed out to programs that stay: neighbouring tiles, which read the
same rows of x and the same weights, are computed at the same time, so that these come from the L2
cache. An output's inputs are added up in order, one share of them after the other, each from zero;
the sums of shares are added in ascending order. That is what ``matmul`` does with any tile, so a
row's product does not depend on how many rows there are. Shares of a tile are computed by one
program in turn, or *spread* over several where tiles alone would leave multiprocessors idle: those
write their sums, which ``add_shares`` or a norm adds up.
A tile has one part, or two side by side whose widths are powers of two: a gated product's parts
are its two halves.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Described
from triton.tools.tensor_descriptor import TensorDescriptor

from surefoot.kernels.triton.large_plan import LargePlan
from surefoot.kernels.triton.launch import cdiv, jit, processors
from surefoot.kernels.triton.matmul import SHARE_UNIT, describable, outputs_of, put, tile
from surefoot.kernels.triton.matmul_plan import share_length
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.shares_kernel import shares_kernel
from surefoot.kernels.triton.warpgroups import ROWS

GROUP, AHEAD_GROUP = 8, 4
"""Tiles of rows that share the weights of a column of tiles before the next column's turn."""
STEPS = NVMMASharedLayout(128, 16, 2)


@jit
def share_sums(
    x_ptr, x_tiles, w_ptr, w_tiles, rest_tiles, top, first, behind, low, high, rows, width, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Sums over the inputs from ``low`` to ``high`` of the rows from ``top`` on: fp32
    [BLOCK_M, BLOCK_N] of the weight's rows from ``first`` on, [BLOCK_M, REST] of those from
    ``behind`` on (zeros [BLOCK_M, 16] where REST is 0)."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rest = tl.zeros([BLOCK_M, REST if REST else 16], tl.float32)
    for base in range(low, high, BLOCK_K):
        x = tile(x_ptr, x_tiles, top, base, rows, high, inputs, BLOCK_M, BLOCK_K, DESCRIBED)
        w = tile(w_ptr, w_tiles, first, base, width, high, inputs, BLOCK_N, BLOCK_K, DESCRIBED)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if REST:
            w = tile(w_ptr, rest_tiles, behind, base, width, high, inputs, REST, BLOCK_K, DESCRIBED)
            rest = tl.dot(x, tl.trans(w), rest, input_precision="ieee")
    return acc, rest


@jit(do_not_specialize=["rows"])
def tiles_kernel(
    x_ptr, x_tiles, w_ptr, w_tiles, rest_tiles, bias_ptr, residual_ptr, y_ptr, part_ptr,
    rows, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT_K: tl.constexpr, SPREAD: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SILU: tl.constexpr, DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N + MORE)
    tiles = down * across
    units = tiles * SPLIT_K if SPREAD else tiles
    share = inputs
    if SPLIT_K > 1:
        share = tl.cdiv(tl.cdiv(inputs, SHARE_UNIT), SPLIT_K) * SHARE_UNIT
    # A tile's second part: the other half's outputs, or those behind the first part.
    REST: tl.constexpr = BLOCK_N if SILU else MORE
    width = outputs * 2 if SILU else outputs
    await_inputs(PDL)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        # One share of all tiles, then the next.
        split = unit // tiles
        place = unit % tiles
        group = place // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        within = place % (GROUP * across)
        top = (group * GROUP + within % height) * BLOCK_M
        first = within // height * (BLOCK_N + MORE)
        behind = outputs + first if SILU else first + BLOCK_N
        if SPREAD or SPLIT_K == 1:
            low = split * share
            acc, rest = share_sums(
                x_ptr, x_tiles, w_ptr, w_tiles, rest_tiles, top, first, behind,
                low, tl.minimum(low + share, inputs), rows, width, inputs,
                BLOCK_M, BLOCK_N, REST, BLOCK_K, DESCRIBED,
            )  # fmt: skip
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            rest = tl.zeros([BLOCK_M, REST if REST else 16], tl.float32)
            for turn in range(0, SPLIT_K):
                low = turn * share
                next_acc, next_rest = share_sums(
                    x_ptr, x_tiles, w_ptr, w_tiles, rest_tiles, top, first, behind,
                    low, tl.minimum(low + share, inputs), rows, width, inputs,
                    BLOCK_M, BLOCK_N, REST, BLOCK_K, DESCRIBED,
                )  # fmt: skip
                acc += next_acc
                rest += next_rest
        put(
            acc, rest if SILU else acc, bias_ptr, residual_ptr, y_ptr, part_ptr, top, first, split,
            rows, outputs, BLOCK_M, BLOCK_N, SPREAD, BIAS, RESIDUAL, SILU,
        )  # fmt: skip
        if MORE:
            put(
                rest, rest, bias_ptr, residual_ptr, y_ptr, part_ptr, top, behind, split,
                rows, outputs, BLOCK_M, MORE, SPREAD, BIAS, RESIDUAL, SILU,
            )  # fmt: skip
    release_next(PDL)


def multiply_shares(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, plan: LargePlan
) -> None:
    """``y`` = x @ W^T by ``shares_kernel``, all bf16, on Hopper; rows of 16 bytes' multiples."""
    rows, inputs = x.shape
    outputs, tile_rows = weight.shape[0], ROWS.value
    share = share_length(inputs, plan.split_k)
    second = plan.more or 16
    results = NVMMASharedLayout(min(128, 2 * second), 16, 2)
    describe = Described.from_tensor
    tiles = cdiv(rows, plan.block_m) * cdiv(outputs, plan.block_n + plan.more)
    shares_kernel[(min(tiles, processors(x.device)),)](
        describe(x, [plan.block_m, plan.block_k], STEPS),
        describe(weight, [plan.block_n, plan.block_k], STEPS),
        describe(weight, [second, plan.block_k], STEPS),
        describe(y, [tile_rows, plan.block_n], STEPS),
        describe(y, [tile_rows, second], results),
        rows, outputs, inputs, share, plan.block_n, plan.more, plan.split_k, AHEAD_GROUP,
        plan.num_stages, num_warps=plan.num_warps, maxnreg=168, launch_pdl=True,
    )  # fmt: skip


def multiply_many(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu: bool,
    y: torch.Tensor,
    plan: LargePlan,
) -> torch.Tensor | None:
    """As ``matmul.multiply_few``, for any number of rows; the shares' sums [split_k, N, out] where
    ``plan`` spreads them. ValueError for a gated product with ``plan.more``, and for one with a
    gate or a bias and ``plan.ahead``."""
    if silu and plan.more:
        raise ValueError("the second part of a gated product's tile is the other half's")
    if plan.ahead:
        if silu or bias is not None:
            raise ValueError("plans that load ahead are for products without gating and bias")
        multiply_shares(x, weight, y, plan)
        if residual is not None:
            y.add_(residual)
        return None
    rows, inputs = x.shape
    outputs, described = outputs_of(weight, silu), describable(x)
    part = None
    if plan.spread:
        bias, residual = None, None  # Whoever adds the shares adds them.
        part = x.new_empty((plan.split_k, rows, weight.shape[0]), dtype=torch.float32)
    x_tiles, w_tiles, rest_tiles = None, None, None
    if described:
        x_tiles = TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k])
        w_tiles = TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k])
        if silu or plan.more:
            part_n = plan.block_n if silu else plan.more
            rest_tiles = TensorDescriptor.from_tensor(weight, [part_n, plan.block_k])
    units = cdiv(rows, plan.block_m) * cdiv(outputs, plan.block_n + plan.more)
    units *= plan.split_k if plan.spread else 1
    tiles_kernel[(min(units, processors(x.device) * plan.per_processor),)](
        x, x_tiles, weight, w_tiles, rest_tiles, bias, residual, y, part, rows, outputs, inputs,
        plan.block_m, plan.block_n, plan.more, plan.block_k, GROUP, plan.split_k, plan.spread,
        bias is not None, residual is not None, silu, described,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl(x.device),
    )  # fmt: skip
    return part
