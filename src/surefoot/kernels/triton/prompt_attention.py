"""Attention over long spans, prompts above all, on Hopper GPUs: lists of tiles, and launches.

A forward makes one list of its spans' tiles, which all layers share. ``prompt_kernel`` says how a
tile is computed, ``prompt_softmax`` in which order.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.attention import LOG2_E
from surefoot.kernels.triton.launch import jit, next_power_of_2, processors
from surefoot.kernels.triton.prompt_kernel import prompt_kernel
from surefoot.kernels.triton.span_kernel import trees_among
from surefoot.kernels.triton.spans import span_table

TILE = 128
"""Queries of a tile: rows times heads."""
BLOCK_N = 128
"""Keys of a step: the running softmax sees so many at a time."""
CHUNK_KEYS = 256
"""Keys whose values are summed by themselves before they join the others."""
STAGES = 2
QUERIES, PAGES = NVMMASharedLayout(128, 16, 3), NVMMASharedLayout(128, 16, 2)
SMALLEST_BLOCK = 8
"""Keys of a block of KV that are loaded together, at least."""


def rows_per_tile(shape: AttentionShape) -> int:
    """A tile has all heads of a kv head if their number divides it, else one head."""
    return TILE // heads_per_tile(shape)


def heads_per_tile(shape: AttentionShape) -> int:
    # Of a group of three, packed as four, a quarter of the products would be in vain.
    group = shape.heads // shape.kv_heads
    return group if group & (group - 1) == 0 and group <= TILE // 2 else 1


def fits(shape: AttentionShape, kv: torch.Tensor) -> bool:
    """Whether this kernel and ``chunk_attention``'s take such heads and blocks. What they take is
    theirs at any load, for ``attention.span_attention`` does not give the same bits."""
    block_size = kv.shape[3]
    blocks = block_size >= SMALLEST_BLOCK and block_size & (block_size - 1) == 0
    return blocks and takes_heads(shape, kv.dtype)


def takes_heads(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """The part of ``fits`` that is the model's."""
    return dtype == torch.bfloat16 and shape.head_dim in (64, 128)


@jit
def chains(first_row_ptr, rows_ptr, mask_ptr, every, spans, MASKED: tl.constexpr):
    """Of spans: their first rows and numbers of rows, with no rows of those that are trees."""
    counts = tl.load(rows_ptr + every, mask=every < spans, other=0).to(tl.int32)
    firsts = tl.load(first_row_ptr + every, mask=counts > 0, other=0).to(tl.int32)
    if MASKED:
        counts = tl.where(trees_among(mask_ptr, firsts, counts), 0, counts)
    return firsts, counts


@jit(
    do_not_specialize=["spans"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "key_index_ptr", "mask_ptr"
    ],
)  # fmt: skip
def tile_list_kernel(
    first_row_ptr, rows_ptr, slot_ptr, key_index_ptr, mask_ptr, tiles_ptr, spans,
    ROWS: tl.constexpr, SPANS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program a tile, which works out its own place in the list: most keys first."""
    every = tl.arange(0, SPANS)
    firsts, counts = chains(first_row_ptr, rows_ptr, mask_ptr, every, spans, MASKED)
    starts = tl.load(key_index_ptr + firsts, mask=counts > 0, other=0).to(tl.int32)
    needed = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(needed, axis=0)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr, tl.sum(needed, axis=0))
    span = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
    if span >= spans:
        return
    own = every == span
    tile = tl.program_id(0) - tl.sum(tl.where(own, ends - needed, 0), axis=0)
    within = tile * ROWS
    end = tl.sum(tl.where(own, starts + counts, 0), axis=0)
    key = tl.sum(tl.where(own, starts, 0), axis=0) + within
    length = tl.minimum(key + ROWS, end)
    # How many tiles have more keys: but for a span's last, number t ends at starts + (t + 1) ROWS.
    seen = tl.maximum(length - starts, 0)
    shorter = tl.minimum(seen // ROWS, tl.maximum(needed - 1, 0))
    shorter += ((needed > 0) & (counts <= seen)).to(tl.int32)
    # As many keys, in a span before: of a span's tiles one at most.
    equal = (seen % ROWS == 0) & (seen // ROWS < needed) | (seen == counts)
    equal = equal & (seen > 0) & (needed > 0) & (every < span)
    entry = tiles_ptr + 8 + tl.sum(needed - shorter + equal.to(tl.int32), axis=0) * 8
    tl.store(entry, tl.sum(tl.where(own, firsts, 0), axis=0) + within)
    tl.store(entry + 1, length - key)
    tl.store(entry + 2, key)
    tl.store(entry + 3, tl.load(slot_ptr + span).to(tl.int32))
    tl.store(entry + 4, end)


def list_tiles(batch: FlatBatch, shape: AttentionShape) -> torch.Tensor:
    """The tiles of all spans but trees, int32 [1 + n, 8] with room for all.

    First their number; then of each, those that see most keys first: flat row and number of rows,
    index of the first row's key, slot, and index past the span's last key.
    """
    spans = span_table(batch)
    entries, rows = spans.rows.shape[0], batch.row_slot.shape[0]
    per_tile = rows_per_tile(shape)
    # No partition of the rows into spans has more.
    tiles = min(rows, (rows + entries * (per_tile - 1)) // per_tile)
    listed = spans.rows.new_empty((1 + tiles, 8), dtype=torch.int32)
    tile_list_kernel[(tiles,)](
        spans.first_row, spans.rows, spans.slot, batch.key_index, batch.mask, listed, entries,
        per_tile, next_power_of_2(entries, 128), batch.mask is not None, num_warps=1,
    )  # fmt: skip
    return listed


def prompt_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    tiles: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attention.span_attention`` on a Hopper GPU, for what ``fits``: q [N, heads, head_dim] bf16
    -> [N, heads, head_dim], unspecified for padding rows; in ``out``, if given, of which trees'
    rows are left alone. ``tiles`` as ``list_tiles`` has them.

    The bits of a row depend on its own keys alone: neither on how its prompt was cut, nor on its
    company.
    """
    out = torch.empty_like(q) if out is None else out
    pack, width, block_size = heads_per_tile(shape), shape.head_dim, kv.shape[3]
    keys = kv.view(-1, width)
    programs = min(processors(q.device), (tiles.shape[0] - 1) * shape.heads // pack)
    prompt_kernel[(programs,)](
        TensorDescriptor.from_tensor(q, [TILE // 2 // pack, pack, width], QUERIES),
        TensorDescriptor.from_tensor(keys, [min(block_size, BLOCK_N), width], PAGES),
        out, tiles, batch.block_tables, batch.block_tables.stride(0), keys.shape[0] // 2,
        shape.scale * LOG2_E, batch.first_key,
        shape.heads, shape.kv_heads, pack, width, block_size, BLOCK_N, CHUNK_KEYS // BLOCK_N,
        STAGES, num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return out
