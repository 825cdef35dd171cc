"""Reference span attention: gathers each row's keys through its block table, any device."""

from __future__ import annotations

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.reference import key_visibility

ROWS_PER_TILE = 32


def write_kv(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: FlatBatch) -> None:
    """Store keys and values [N, kv_heads, head_dim] of the batch's rows in ``kv``
    [2, blocks, block_size, kv_heads, head_dim]. Padding rows go to block 0, which is never read."""
    block_size = kv.shape[2]
    padding = batch.row_slot < 0
    blocks = batch.block_tables[batch.row_slot.clamp(min=0), batch.key_index // block_size].long()
    slots = torch.where(padding, 0, blocks * block_size + batch.key_index % block_size)
    flat = kv.flatten(1, 2)
    flat[0].index_copy_(0, slots, keys.to(kv.dtype))
    flat[1].index_copy_(0, slots, values.to(kv.dtype))


def span_attention(
    q: torch.Tensor, kv: torch.Tensor, batch: FlatBatch, shape: AttentionShape
) -> torch.Tensor:
    """q [N, heads, head_dim], kv as in ``write_kv`` -> [N, heads, head_dim] in q's dtype.

    Scores and softmax in float32.
    """
    block_size = kv.shape[2]
    pages = (batch.max_keys + block_size - 1) // block_size
    visible = key_visibility(batch, pages * block_size)
    tables = batch.block_tables[:, :pages].long()
    group = shape.heads // shape.kv_heads
    out = torch.empty_like(q)
    for first in range(0, q.shape[0], ROWS_PER_TILE):
        rows = slice(first, min(first + ROWS_PER_TILE, q.shape[0]))
        pages_of_row = tables[batch.row_slot[rows].clamp(min=0)]
        keys = kv[0][pages_of_row].flatten(1, 2).float()
        values = kv[1][pages_of_row].flatten(1, 2).float()
        grouped = q[rows].float().unflatten(1, (shape.kv_heads, group))
        scores = torch.einsum("nkgd,nskd->nkgs", grouped, keys) * shape.scale
        scores = scores.masked_fill(~visible[rows, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        # Unwritten pages may hold NaN; a weight of zero would not hide it.
        values = values.masked_fill(~visible[rows, :, None, None], 0)
        out[rows] = torch.einsum("nkgs,nskd->nkgd", weights, values).flatten(1, 2).to(q.dtype)
    return out
