"""Which kernel computes a batch's attention; their twin is ``torch_paged.span_attention``."""

from __future__ import annotations

import torch

from surefoot.kernels.backend import (
    AttentionShape,
    FlatBatch,
    LayerWeights,
    OutputRows,
    RopeTable,
)
from surefoot.kernels.triton.attention import span_attention
from surefoot.kernels.triton.chunk_attention import ChunkWork, chunk_attention, chunk_work_of
from surefoot.kernels.triton.prompt_attention import prompt_attention, tiles_of
from surefoot.kernels.triton.qkv import queries

Work = torch.Tensor | ChunkWork | None


def work_of(batch: FlatBatch, shape: AttentionShape, kv: torch.Tensor) -> Work:
    """What all layers of a forward share: a list of tiles where there are prompts, of chunks for
    shorter spans and for blocks in both directions, None where neither kernel takes such heads, or
    all rows have other masks.

    Tiles and chunks give a row the same bits, so the load may decide between them; which shapes
    they take it must not.
    """
    if batch.all_masked:
        return chunk_work_of(batch, shape, kv) if batch.both_ways else None
    tiles = tiles_of(batch, shape, kv)
    return chunk_work_of(batch, shape, kv) if tiles is None else tiles


def attend(
    q: torch.Tensor, kv: torch.Tensor, batch: FlatBatch, shape: AttentionShape, work: Work
) -> torch.Tensor:
    """Attention of q [N, heads, head_dim] over the paged keys and values ``kv``, of the same
    shape. ``work`` as ``work_of`` has it, or None if all spans are trees."""
    if work is None:
        return span_attention(q, kv, batch, shape)
    if isinstance(work, ChunkWork):
        return chunk_attention(q, kv, batch, shape, work)
    return prompt_attention(q, kv, batch, shape, work)


def attend_inputs(
    weights: LayerWeights,
    inputs: torch.Tensor,
    batch: FlatBatch,
    kv: torch.Tensor,
    rope: RopeTable,
    work: Work,
    outputs: OutputRows | None = None,
) -> torch.Tensor:
    """A layer's attention short of its output projection: ``inputs`` [N, any width] in the weights'
    dtype -> [N, heads * head_dim], or [M, …] of the rows ``outputs``, whose the ``work`` is then.
    Writes the rows' keys and values."""
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = (weights.q_norm, weights.k_norm)
    q = queries(weights.qkv, inputs, kv, batch, weights.shape, rope, norms, weights.eps)
    if outputs is not None:
        q, batch = q[outputs.index], outputs.batch
    if not len(q):
        return q.flatten(1)
    return attend(q, kv, batch, weights.shape, work).flatten(1)
