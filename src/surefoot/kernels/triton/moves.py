"""Keys and values of one request moved within the paged pool of ``rope_kv``: what a tree's
accepted path needs. Twin: ``TorchBackend.move_keys``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2

COLUMNS = 32
"""Of a head, moved by one program."""


@jit
def move_kernel(
    kv_ptr, tables_ptr, table_stride, source_ptr, target_ptr, moves, value_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MOVES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Programs: requests, the heads of keys and values, and columns. Of one warp each, for Triton
    3.6 does not compile this for several and more than 16 moves."""
    request, part = tl.program_id(0), tl.program_id(1)
    move = tl.arange(0, MOVES)
    source = tl.load(source_ptr + request * moves + move, mask=move < moves, other=0)
    target = tl.load(target_ptr + request * moves + move, mask=move < moves, other=0)
    moved = source != target
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return
    table = tables_ptr + request * table_stride
    base = kv_ptr + part // KV_HEADS * value_offset
    head = part % KV_HEADS
    block = tl.load(table + source // BLOCK_SIZE, mask=moved, other=0).to(tl.int64)
    origin = ((block * KV_HEADS + head) * BLOCK_SIZE + source % BLOCK_SIZE) * HEAD_DIM
    block = tl.load(table + target // BLOCK_SIZE, mask=moved, other=0).to(tl.int64)
    place = ((block * KV_HEADS + head) * BLOCK_SIZE + target % BLOCK_SIZE) * HEAD_DIM
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = moved[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(base + origin[:, None] + column[None, :], mask=inside, other=0.0)
    # A place may be both a source and a target: everything is read before anything is written.
    tl.debug_barrier()
    tl.store(base + place[:, None] + column[None, :], values, mask=inside)


def move_keys(
    kv: torch.Tensor, tables: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    """``kv`` [2, blocks, kv_heads, block_size, head_dim]; ``tables`` int32 [B, blocks]; ``source``
    and ``target`` int64 [B, n]: key indices. Equal ones are left alone."""
    kv_heads, block_size, head_dim = kv.shape[2:]
    source, target = source.contiguous(), target.contiguous()
    batch, moves = source.shape
    width = min(COLUMNS, next_power_of_2(head_dim))
    move_kernel[(batch, 2 * kv_heads, cdiv(head_dim, width))](
        kv, tables, tables.stride(0), source, target, moves, kv.stride(0),
        kv_heads, head_dim, block_size, next_power_of_2(moves), width,
        num_warps=1,
    )  # fmt: skip
