"""Span attention over the paged KV pool of ``rope_kv``, in an order that the shapes alone decide.

``span_kernel`` says how; tiles and chunks have one size per type and shape. So a row's bits are a
function of its own queries and keys: neither other rows, nor how a prompt was cut, nor the number
of idle multiprocessors changes one.

A tree's node has the bits of the chain that leads to it, but for a drafter's own trees.
On Hopper, ``prompt_attention`` and ``chunk_attention`` compute most shapes.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.launch import (
    DEFAULT_SHARED_MEMORY,
    cdiv,
    next_power_of_2,
    processors,
    shared_memory,
)
from surefoot.kernels.triton.paths import path_places
from surefoot.kernels.triton.pdl import pdl
from surefoot.kernels.triton.span_kernel import attention_kernel, combine_kernel
from surefoot.kernels.triton.spans import span_table

LOG2_E = 1 / math.log(2)
MOST_CHUNK_KEYS = 128
CHUNK_BYTES = {2: 32 << 10, 4: 16 << 10}
"""Of a chunk's keys, or of its values, by bytes of an element: one of each fits any GPU's shared
memory, and in float32 no register is spilt."""
PART_BYTES = 64 << 20
"""Partial results that there is room for, at most."""
AT_ONCE = 8
"""Chunks whose partial results are on their way together."""


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of a launch. A row's bits depend on ``block_m``, ``chunk`` and ``num_warps``, which are
    the same for all launches of a type and shape, and on nothing else."""

    block_m: int
    """Queries of a tile: rows times heads."""
    chunk: int
    """Keys of a chunk."""
    splits: int
    """Programs that share a tile's keys."""
    tiles: int
    """Tiles of every span, or 0 where programs search theirs."""
    programs: int
    num_warps: int
    num_stages: int


def plan_attention(
    rows: int,
    spans: int,
    max_rows: int,
    max_keys: int,
    shape: AttentionShape,
    sms: int,
    itemsize: int = 2,
    shared: int = DEFAULT_SHARED_MEMORY,
    paths: bool = False,
) -> AttentionPlan:
    """Sizes for ``rows`` rows in ``spans`` spans of at most ``max_rows``, over at most
    ``max_keys`` keys, on ``sms`` multiprocessors with ``shared`` bytes of memory a program.
    ``paths``: there may be trees among them, of which a tile has one row.

    Keys are split only until there is a program for each multiprocessor (two of small heads), so
    that a large batch pays nothing for it, and only if there is room for partial results.
    """
    group = shape.heads // shape.kv_heads
    width = next_power_of_2(shape.head_dim, 16)
    chunk = min(MOST_CHUNK_KEYS, CHUNK_BYTES[itemsize] // (width * itemsize))
    # Tensor cores do 32 rows in the time of 16; without them, twice the rows is twice the work.
    block_m = next_power_of_2(group, 32 if itemsize == 2 else 16)
    per_tile = block_m // group
    tiles = cdiv(min(max_rows, rows), per_tile)
    # No partition of the rows into spans has more tiles than this.
    ragged = min(rows, (rows + spans * (per_tile - 1)) // per_tile)
    if paths:
        ragged = rows
    direct = not paths and (tiles == 1 or spans * tiles <= ragged)
    programs = spans * tiles if direct else ragged
    most = cdiv(max_keys, chunk)
    splits = (2 if shape.head_dim <= 64 else 1) * sms
    splits = splits // (max(1, min(ragged, programs)) * shape.kv_heads)
    if rows * shape.heads * most * shape.head_dim * 4 > PART_BYTES:
        splits = 1
    return AttentionPlan(
        block_m=block_m,
        chunk=chunk,
        splits=max(1, min(splits, most)),
        tiles=tiles if direct else 0,
        programs=programs,
        num_warps=4 if itemsize == 2 else 8,
        num_stages=3 if shared >= 160_000 else 2,
    )


def span_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    plan: AttentionPlan | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [N, heads, head_dim] bf16 or fp32, contiguous; kv [2, blocks, kv_heads, block_size,
    head_dim] of the same dtype -> [N, heads, head_dim], unspecified for padding rows. ``places`` as
    ``path_places`` has them of the batch's masks, if they are at hand.

    Scores and softmax are fp32; in bf16 the weights are rounded before they meet the values.
    Rows of one span are neighbours, in the order of their keys. ``head_dim`` up to 256.
    """
    spans = span_table(batch)
    rows, entries = q.shape[0], spans.rows.shape[0]
    masked, paths = batch.all_masked, batch.has_paths
    if plan is None:
        plan = plan_attention(
            rows,
            entries,
            spans.max_rows,
            batch.max_keys,
            shape,
            processors(q.device),
            q.dtype.itemsize,
            shared_memory(q.device),
            paths,
        )
    out, part, sums = torch.empty_like(q), None, None
    parts, split = cdiv(batch.max_keys, plan.chunk), plan.splits > 1
    if split:
        size = (rows, shape.heads, parts)
        part = q.new_empty((*size, shape.head_dim), dtype=torch.float32)
        sums = q.new_empty((*size, 2), dtype=torch.float32)
    width, scale = next_power_of_2(shape.head_dim, 16), shape.scale * LOG2_E
    searched = next_power_of_2(entries)
    if paths and places is None:
        places = path_places(batch.mask)
    attention_kernel[(plan.programs, shape.kv_heads, plan.splits)](
        q, kv, out, part, sums, spans.first_row, spans.rows, spans.slot, entries,
        batch.block_tables, batch.block_tables.stride(0), batch.span_start, batch.key_index,
        batch.mask, kv.stride(0), scale, plan.splits, parts, plan.tiles, batch.first_key,
        batch.oldest, places, shape.heads, shape.kv_heads, shape.head_dim, kv.shape[3], width,
        plan.block_m, plan.chunk, split, not plan.tiles, 1 if plan.tiles else searched,
        masked, paths, batch.oldest is not None,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl(q.device),
    )  # fmt: skip
    if split:
        combine_kernel[(rows, shape.heads)](
            part, sums, out, spans.first_row, spans.rows, spans.slot, entries, batch.span_start,
            batch.key_index, batch.mask, parts, scale,
            shape.heads, shape.head_dim, width, plan.chunk, searched, AT_ONCE, masked, paths,
            num_warps=1, **pdl(q.device),
        )  # fmt: skip
    return out
