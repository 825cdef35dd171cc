"""Which kernel computes a batch's attention; their twin is ``torch_paged.span_attention``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from surefoot.kernels.backend import (
    AttentionShape,
    FlatBatch,
    LayerWeights,
    OutputRows,
    RopeTable,
)
from surefoot.kernels.triton.attention import span_attention
from surefoot.kernels.triton.chunk_attention import chunk_attention
from surefoot.kernels.triton.chunk_list import (
    QUERY_ROWS,
    ChunkWork,
    list_chunks,
    packed_heads,
)
from surefoot.kernels.triton.launch import hopper, processors
from surefoot.kernels.triton.paths import path_places
from surefoot.kernels.triton.prompt_attention import (
    TILE,
    fits,
    heads_per_tile,
    list_tiles,
    prompt_attention,
)
from surefoot.kernels.triton.qkv import queries


class TileWork(NamedTuple):
    """What ``prompt_attention`` computes, and the trees beside it."""

    tiles: torch.Tensor
    trees: ChunkWork | None


Work = TileWork | ChunkWork | torch.Tensor | None
"""A tensor: ``path_places``."""

LONG_SPAN = 64
"""Shorter spans, or as long, are mostly chains and single tokens."""
CHUNKS_COST = 2
"""How many times as long ``chunk_attention`` takes for as many places of queries, where texts are
long."""


def worth_tiles(rows: int, spans: int, max_rows: int, shape: AttentionShape, sms: int) -> bool:
    """Whether ``rows`` rows in up to ``spans`` spans of up to ``max_rows`` are better off with
    ``prompt_attention`` than with ``chunk_attention``, on ``sms`` multiprocessors. There, keys are
    split among programs when few rows would leave most of them idle, and heads that are no power of
    two share a tile, in which a row by itself leaves fewer places of queries empty."""
    if max_rows <= LONG_SPAN or 2 * rows * shape.heads < sms * TILE:
        return False
    pack, used = packed_heads(shape)
    more = max(0, rows - spans)
    # Every span has a tile that is not full.
    tiles = spans * TILE * shape.heads // heads_per_tile(shape) + more * shape.heads
    chunks = (spans * QUERY_ROWS + more * pack) * shape.heads // used
    return tiles <= CHUNKS_COST * chunks


def work_of(batch: FlatBatch, shape: AttentionShape, kv: torch.Tensor) -> Work:
    """What all layers of a forward share: a list of tiles where there are prompts, of chunks for
    trees, shorter spans and blocks in both directions; where neither kernel takes such heads, the
    places of trees' keys, if there are trees. None where nothing is shared.

    Tiles and chunks give a row the same bits, so the load may decide between them; which shapes
    they take it must not.
    """
    if not hopper(kv.device) or not fits(shape, kv):
        return path_places(batch.mask) if batch.has_paths else None
    if batch.all_masked:
        return list_chunks(batch, shape, kv.shape[3]) if batch.both_ways else None
    rows = batch.row_slot.shape[0]
    spans, longest = batch.block_tables.shape[0], rows
    if batch.spans is not None:
        spans, longest = batch.spans.rows.shape[0], batch.spans.max_rows
    if worth_tiles(rows, spans, longest, shape, processors(kv.device)):
        trees = None
        if batch.has_paths:
            trees = list_chunks(batch, shape, kv.shape[3], only_trees=True)
        return TileWork(list_tiles(batch, shape), trees)
    return list_chunks(batch, shape, kv.shape[3])


def attend(
    q: torch.Tensor, kv: torch.Tensor, batch: FlatBatch, shape: AttentionShape, work: Work
) -> torch.Tensor:
    """Attention of q [N, heads, head_dim] over the paged keys and values ``kv``, of the same
    shape. ``work`` as ``work_of`` has it."""
    if work is None or isinstance(work, torch.Tensor):
        return span_attention(q, kv, batch, shape, places=work)
    if isinstance(work, ChunkWork):
        return chunk_attention(q, kv, batch, shape, work)
    out = None
    if work.trees is not None:
        out = chunk_attention(q, kv, batch, shape, work.trees)
    return prompt_attention(q, kv, batch, shape, work.tiles, out)


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
