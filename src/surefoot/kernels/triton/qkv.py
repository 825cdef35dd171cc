"""The qkv product of few rows with rotation and KV write as its epilogue: ``matmul`` and
``rope_kv`` in one kernel, to the same bits. A program computes one head of all rows, so that the
pairs that RoPE turns stay inside it. Heads with norms go the other way: their sum of squares would
be added up in another order here than in ``rope_kv``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from surefoot.kernels.backend import AttentionShape, FlatBatch, RopeTable
from surefoot.kernels.triton.launch import jit, shared_memory
from surefoot.kernels.triton.matmul import describable, prefetch_weights, tile
from surefoot.kernels.triton.matmul_plan import (
    MAX_ROWS,
    PREFETCH,
    MatmulPlan,
    row_tiles,
    rows_bucket,
)
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.products import TritonLinear
from surefoot.kernels.triton.rope_kv import rope_and_write, rotate

Norms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the queries' and keys' RMSNorms."""


@jit
def whereabouts(
    row, rows, position_ptr, key_index_ptr, row_slot_ptr, tables_ptr, table_stride,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Of each row: whether it is somebody's, its position, its key's index and block."""
    slot = tl.load(row_slot_ptr + row, mask=row < rows, other=-1)
    valid = slot >= 0
    position = tl.load(position_ptr + row, mask=valid, other=0)
    key = tl.load(key_index_ptr + row, mask=valid, other=0)
    page = tables_ptr + slot * table_stride + key // BLOCK_SIZE
    return valid, position, key, tl.load(page, mask=valid, other=0).to(tl.int64)


@jit
def finish_head(
    acc, head, row, valid, position, key, block,
    bias_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, value_offset,
    dtype: tl.constexpr, HEIGHT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and rotation of a head's product [HEAD_DIM, HEIGHT], to the queries or the KV."""
    half: tl.constexpr = HEAD_DIM // 2
    is_value = head >= HEADS + KV_HEADS
    column = tl.arange(0, HEAD_DIM)
    if BIAS:
        acc += tl.load(bias_ptr + head * HEAD_DIM + column).to(tl.float32)[:, None]
    acc = acc.to(dtype).to(tl.float32)
    low, high = tl.split(tl.permute(tl.reshape(acc, [2, half, HEIGHT]), (1, 2, 0)))
    pair = tl.arange(0, half)[:, None]
    rotary = position[None, :] * half + pair
    rotated_low, rotated_high = rotate(
        low, high, tl.load(cos_ptr + rotary), tl.load(sin_ptr + rotary)
    )
    rotated_low = tl.where(is_value, low, rotated_low).to(dtype)
    rotated_high = tl.where(is_value, high, rotated_high).to(dtype)

    inside = (pair >= 0) & valid[None, :]
    if head < HEADS:
        query = q_ptr + (row[None, :] * HEADS + head) * HEAD_DIM + pair
        tl.store(query, rotated_low, mask=inside)
        tl.store(query + half, rotated_high, mask=inside)
    else:
        kv_head = (head - HEADS) % KV_HEADS
        place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE)[None, :] * HEAD_DIM
        place += tl.where(is_value, value_offset, 0) + pair
        tl.store(kv_ptr + place, rotated_low, mask=inside)
        tl.store(kv_ptr + place + half, rotated_high, mask=inside)


@jit(do_not_specialize=["rows", "ahead"])
def qkv_kernel(
    x_ptr, x_tiles, more_tiles, w_ptr, w_tiles, bias_ptr, cos_ptr, sin_ptr,
    q_ptr, kv_ptr, position_ptr, key_index_ptr, row_slot_ptr, tables_ptr, table_stride,
    value_offset, rows, inputs, ahead,
    BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outputs: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    rest: tl.constexpr = MORE if MORE else 16
    head = tl.program_id(0)
    first = head * HEAD_DIM
    if PDL and DESCRIBED and ahead > 0:
        prefetch_weights(w_ptr, first, 0, inputs, outputs, inputs, ahead, HEAD_DIM, False)
    # The batch is older than the kernel ahead: a norm behind a product, or one that lets this one
    # in as late as a product does (see ``pdl``).
    row = tl.arange(0, BLOCK_M)
    valid, position, key, block = whereabouts(
        row, rows, position_ptr, key_index_ptr, row_slot_ptr, tables_ptr, table_stride, BLOCK_SIZE
    )
    below = BLOCK_M + tl.arange(0, rest)
    more_valid, more_position, more_key, more_block = whereabouts(
        below, rows if MORE else 0, position_ptr, key_index_ptr, row_slot_ptr, tables_ptr,
        table_stride, BLOCK_SIZE,
    )  # fmt: skip
    await_inputs(PDL)

    acc = tl.zeros([HEAD_DIM, BLOCK_M], tl.float32)
    more_acc = tl.zeros([HEAD_DIM, rest], tl.float32)
    for base in range(0, inputs, BLOCK_K):
        x = tile(x_ptr, x_tiles, 0, base, rows, inputs, inputs, BLOCK_M, BLOCK_K, DESCRIBED)
        w = tile(w_ptr, w_tiles, first, base, outputs, inputs, inputs, HEAD_DIM, BLOCK_K, DESCRIBED)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if MORE:
            more = tile(
                x_ptr, more_tiles, BLOCK_M, base, rows, inputs, inputs, MORE, BLOCK_K, DESCRIBED
            )
            more_acc = tl.dot(w, tl.trans(more), more_acc, input_precision="ieee")
    release_next(PDL)
    finish_head(
        acc, head, row, valid, position, key, block,
        bias_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, value_offset,
        dtype, BLOCK_M, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BIAS,
    )  # fmt: skip
    if MORE:
        finish_head(
            more_acc, head, below, more_valid, more_position, more_key, more_block,
            bias_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, value_offset,
            dtype, MORE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BIAS,
        )  # fmt: skip


def fused(shape: AttentionShape, dtype: torch.dtype, normed: bool) -> bool:
    """Whether ``project_qkv`` is the faster way for few rows. It works for all heads of a power of
    two; but blocks of 128 outputs stream weights a little worse than narrower ones, which is what
    the saved launch gained (docs/log.md)."""
    return not normed and shape.head_dim == 64 and dtype == torch.bfloat16


def queries(
    linear: TritonLinear,
    x: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    rope: RopeTable,
    norms: Norms | None,
    eps: float,
) -> torch.Tensor:
    """``rope_and_write`` of ``x`` [N, in] times ``linear``; see there. A row's results are the same
    bits for any N."""
    if not fused(shape, x.dtype, norms is not None):
        return rope_and_write(linear(x), kv, batch, shape, rope, norms, eps)
    if x.shape[0] <= MAX_ROWS:
        return project_qkv(x, linear.weight, linear.bias, kv, batch, shape, rope)
    return rope_and_write(linear.product(x, split_k=1), kv, batch, shape, rope)


def plan_qkv(rows: int, inputs: int, head_dim: int, itemsize: int, shared: int) -> MatmulPlan:
    """One program to a multiprocessor, and what its memory holds in flight."""
    bucket = rows_bucket(rows)
    block_k = 128 if bucket <= 96 else 64
    stage = (head_dim + bucket) * block_k * itemsize
    return MatmulPlan(
        head_dim,
        block_k,
        num_warps=max(4, head_dim // 16),
        num_stages=max(2, min(8, (shared - 8_000) // stage)),
        prefetch=min(inputs, PREFETCH) // 16 * 16,
    )


def project_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    rope: RopeTable,
    plan: MatmulPlan | None = None,
) -> torch.Tensor:
    """``rope_and_write`` of ``x`` [N, in] (N <= 128) times ``weight``
    [(heads + 2 * kv_heads) * head_dim, in] plus ``bias``, summed as one share; see there. The
    product is rounded to x's dtype before it is turned."""
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"a product of {rows} rows")
    plan = plan or plan_qkv(rows, inputs, shape.head_dim, x.dtype.itemsize, shared_memory(x.device))
    q = x.new_empty((rows, shape.heads, shape.head_dim))
    block_m, more = row_tiles(rows)
    described = describable(x)
    x_tiles, more_tiles, w_tiles = None, None, None
    if described:
        x_tiles = TensorDescriptor.from_tensor(x, [block_m, plan.block_k])
        if more:
            more_tiles = TensorDescriptor.from_tensor(x, [more, plan.block_k])
        w_tiles = TensorDescriptor.from_tensor(weight, [shape.head_dim, plan.block_k])
    qkv_kernel[(shape.heads + 2 * shape.kv_heads,)](
        x, x_tiles, more_tiles, weight, w_tiles, bias, rope.cos, rope.sin, q, kv,
        batch.positions, batch.key_index, batch.row_slot,
        batch.block_tables, batch.block_tables.stride(0), kv.stride(0), rows, inputs, plan.prefetch,
        block_m, more, plan.block_k, shape.heads, shape.kv_heads, shape.head_dim, kv.shape[3],
        bias is not None, described,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl(x.device),
    )  # fmt: skip
    return q
