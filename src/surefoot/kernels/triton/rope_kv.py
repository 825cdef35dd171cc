"""From the packed qkv projection to rotated queries and the paged KV pool, in one pass.

The pool of a layer is ``[2, blocks, kv_heads, block_size, head_dim]``, keys first. A program of the
attention reads one kv head: with heads outside the block, the ``block_size`` keys that it takes
from a block are one contiguous run (4 KiB for 16 keys of 128 in bf16), so that reads are whole
DRAM bursts without TMA. Writing a row touches ``2 * kv_heads`` pieces of ``head_dim``, each whole
sectors as well.
Twin: ``TorchBackend.layer``'s norm, rope and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton.language as tl

from surefoot.kernels.backend import AttentionShape, FlatBatch, RopeTable
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next


@jit
def rotate(low, high, cos, sin):
    """A pair of halves of heads, fp32, turned. What is rounded on the way is said here, not left to
    the compiler of each kernel."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@jit
def rope_kv_kernel(
    qkv_ptr, row_stride, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, pool_stride,
    position_ptr, last_position, key_index_ptr, row_slot_ptr, served_ptr,
    tables_ptr, table_stride, value_offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, SERVED: tl.constexpr, TILE: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, heads, layer)."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(row_slot_ptr + row)
    if SERVED:
        serves = tl.load(served_ptr + slot, mask=slot >= 0, other=0).to(tl.int32)
        slot = tl.where(serves != 0, slot, -1)
    half: tl.constexpr = HEAD_DIM // 2
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, HALF)
    inside = (head < total)[:, None] & (column < half)[None, :]
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]

    # Everything but the product's result is older than the product (see ``pdl``).
    known = (column < half)[None, :]
    position = tl.load(position_ptr + row, mask=slot >= 0, other=0)
    position = tl.minimum(position, last_position)
    rotary = position * half + column[None, :]
    cos = tl.load(cos_ptr + rotary, mask=known, other=1.0)
    sin = tl.load(sin_ptr + rotary, mask=known, other=0.0)
    key = tl.load(key_index_ptr + row, mask=slot >= 0, other=0)
    page = tables_ptr + slot * table_stride + key // BLOCK_SIZE
    block = tl.load(page, mask=slot >= 0, other=0).to(tl.int64)
    if NORM:
        k_norm_ptr += layer * HEAD_DIM
        low_q = tl.load(q_norm_ptr + column[None, :], mask=known, other=0.0).to(tl.float32)
        low_k = tl.load(k_norm_ptr + column[None, :], mask=known, other=0.0).to(tl.float32)
        high_q = tl.load(q_norm_ptr + half + column[None, :], mask=known, other=0.0)
        high_k = tl.load(k_norm_ptr + half + column[None, :], mask=known, other=0.0)
        high_q, high_k = high_q.to(tl.float32), high_k.to(tl.float32)
    await_inputs(PDL)
    if slot < 0:
        return

    source = (
        qkv_ptr
        + row * row_stride
        + layer * total * HEAD_DIM
        + head[:, None] * HEAD_DIM
        + column[None, :]
    )
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        normed_first = (first * scale * tl.where(is_query, low_q, low_k)).to(dtype)
        normed_second = (second * scale * tl.where(is_query, high_q, high_k)).to(dtype)
        first = tl.where(is_value, first, normed_first.to(tl.float32))
        second = tl.where(is_value, second, normed_second.to(tl.float32))

    rotated_first, rotated_second = rotate(first, second, cos, sin)
    rotated_first = tl.where(is_value, first, rotated_first).to(dtype)
    rotated_second = tl.where(is_value, second, rotated_second).to(dtype)

    queries = q_ptr + row * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(queries, rotated_first, mask=inside & is_query)
    tl.store(queries + half, rotated_second, mask=inside & is_query)

    kv_head = tl.where(is_value, head[:, None] - HEADS - KV_HEADS, head[:, None] - HEADS)
    place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    place = place + tl.where(is_value, value_offset, 0) + layer * pool_stride + column[None, :]
    tl.store(kv_ptr + place, rotated_first, mask=inside & ~is_query)
    tl.store(kv_ptr + place + half, rotated_second, mask=inside & ~is_query)


def rope_and_write(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    rope: RopeTable,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm (where ``norms`` holds the q and k weights [head_dim]) and rotate queries and keys,
    write keys and values of the batch's rows to ``kv``, and return the queries.

    ``qkv`` [N, (heads + 2 * kv_heads) * head_dim] bf16 or fp32, whose rows may be strided; ``kv``
    as above, of the same dtype. Returns [N, heads, head_dim]; padding rows write nothing, and their
    queries are unspecified.
    """
    q = qkv.new_empty((len(qkv), shape.heads, shape.head_dim))
    last = rope.cos.shape[0] - 1
    _launch(qkv, [kv], batch, batch.positions, last, shape, rope, norms, eps, None, q)
    return q


def write_context(
    projected: torch.Tensor,
    pools: Sequence[torch.Tensor],
    batch: FlatBatch,
    last_position: int,
    shape: AttentionShape,
    rope: RopeTable,
    k_norms: torch.Tensor | None,
    eps: float,
    served: torch.Tensor | None,
) -> None:
    """``rope_and_write`` of keys and values alone, for several layers at once: ``projected`` [N,
    layers * 2 * kv_heads * head_dim], keys before values, layer by layer; ``pools`` as
    ``allocate_kv`` gave them; ``k_norms`` [layers, head_dim]. Of the rows of slots that are
    ``served`` (bool [slots]; None: all), turned by their key indices, by ``last_position`` at most.
    """
    norms = None if k_norms is None else (k_norms, k_norms)
    shape = replace(shape, heads=0)
    nothing = projected.new_empty(0)
    _launch(
        projected, pools, batch, batch.key_index, last_position, shape, rope, norms, eps, served,
        nothing,
    )  # fmt: skip


def _launch(
    qkv: torch.Tensor,
    pools: Sequence[torch.Tensor],
    batch: FlatBatch,
    positions: torch.Tensor,
    last_position: int,
    shape: AttentionShape,
    rope: RopeTable,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    served: torch.Tensor | None,
    q: torch.Tensor,
) -> None:
    total, kv = shape.heads + 2 * shape.kv_heads, pools[0]
    tile = min(16, next_power_of_2(total))
    q_norm, k_norm = norms if norms is not None else (None, None)
    apart = 0 if len(pools) == 1 else (pools[1].data_ptr() - kv.data_ptr()) // kv.itemsize
    rope_kv_kernel[(len(qkv), cdiv(total, tile), len(pools))](
        qkv, qkv.stride(0), q_norm, k_norm, rope.cos, rope.sin, q, kv, apart,
        positions, last_position, batch.key_index, batch.row_slot, served,
        batch.block_tables, batch.block_tables.stride(0), kv.stride(0), eps,
        shape.heads, shape.kv_heads, shape.head_dim, kv.shape[3],
        norms is not None, served is not None, tile, next_power_of_2(shape.head_dim // 2),
        # Fewer heads to a warp would add up their squares in another order.
        num_warps=max(1, tile // 4), **pdl(qkv.device),
    )  # fmt: skip
