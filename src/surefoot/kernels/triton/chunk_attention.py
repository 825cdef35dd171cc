"""Attention over short spans on Hopper GPUs, balanced by chunks of keys: lists of work, launches.

A forward makes one list for all layers. A tile (up to 64 queries of one kv head) is one item with
all its keys, or an item for each chunk where whole tiles would leave multiprocessors idle: how many
keys each request has is read on the device, so one recorded launch serves all of them.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.attention import LOG2_E
from surefoot.kernels.triton.chunk_kernel import chunk_kernel, combine_chunks_kernel
from surefoot.kernels.triton.launch import cdiv, hopper, jit, next_power_of_2, processors
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.prompt_attention import (
    BLOCK_N,
    CHUNK_KEYS,
    PAGES,
    QUERIES,
    STAGES,
    heads_per_tile,
)
from surefoot.kernels.triton.spans import span_table

QUERY_ROWS = 64
"""Queries of a tile: rows times heads."""
MOST_PARTS = 2048
PART_BYTES = 64 << 20
"""Partial results that there is room for, at most."""
CROWDED = 4
"""With so many tiles for each program nothing is gained by splitting their keys."""
_DOUBLINGS = 12


@dataclass(frozen=True)
class ChunkWork:
    """What all layers of a forward share."""

    items: torch.Tensor
    """int32 [1 + n, 8], with room for all: first their number; then of each, the longest first:
    flat row, rows, index of the first row's key, slot, index past the span's last key, which
    partial result it gives (-1: none, it has all keys), and its first step of ``BLOCK_N`` keys and
    the one past its last."""
    tiles: torch.Tensor
    """int32 [tiles, 4]: flat row, rows, first partial result and their number (0: none)."""
    part_rows: int
    """Queries of a partial result."""
    parts: int
    """Partial results that there is room for; 0: nothing is split."""


@jit(
    do_not_specialize=["spans", "programs", "units", "capacity", "tiles"],
    do_not_specialize_on_alignment=["first_row_ptr", "rows_ptr", "slot_ptr", "key_index_ptr"],
)
def chunk_list_kernel(
    first_row_ptr, rows_ptr, slot_ptr, key_index_ptr, items_ptr, tiles_ptr, spans, programs, units,
    capacity, tiles,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, SPANS: tl.constexpr,
    DOUBLINGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program an item, and one a tile; each works out its own place."""
    release_next(PDL)
    await_inputs(PDL)
    number = tl.program_id(0)
    every = tl.arange(0, SPANS)
    counts = tl.load(rows_ptr + every, mask=every < spans, other=0).to(tl.int32)
    firsts = tl.load(first_row_ptr + every, mask=counts > 0, other=0).to(tl.int32)
    starts = tl.load(key_index_ptr + firsts, mask=counts > 0, other=0).to(tl.int32)
    needed = (counts + ROWS - 1) // ROWS
    chunks = tl.where(counts > 0, (starts + counts + CHUNK - 1) // CHUNK, 0)
    # Tiles of more chunks than a program's fair share are split, as far as there is room for it.
    share = tl.maximum((tl.sum(needed * chunks, axis=0) * units + programs - 1) // programs, 1)
    most = share << DOUBLINGS
    for back in tl.static_range(DOUBLINGS):
        tried = share << (DOUBLINGS - 1 - back)
        parts = tl.sum(tl.where(chunks > tried, needed * chunks, 0), axis=0)
        most = tl.where(parts <= capacity, tried, most)
    split = chunks > most
    each = tl.where(split, chunks, 1)
    items = needed * each
    length = tl.where(split, 1, chunks)
    parts = tl.where(split, items, 0)
    first_parts = tl.cumsum(parts, axis=0) - parts
    if number == 0:
        tl.store(items_ptr, tl.sum(items, axis=0))

    ends = tl.cumsum(items, axis=0)
    span = tl.sum((ends <= number).to(tl.int32), axis=0)
    if span < spans:
        own = every == span
        within = number - tl.sum(tl.where(own, ends - items, 0), axis=0)
        own_length = tl.sum(tl.where(own, length, 0), axis=0)
        before = (length > own_length) | ((length == own_length) & (every < span))
        place = tl.sum(tl.where(before, items, 0), axis=0) + within
        own_each = tl.sum(tl.where(own, each, 0), axis=0)
        is_split = tl.sum(tl.where(own & split, 1, 0), axis=0) > 0
        row = within // own_each * ROWS
        end = tl.sum(tl.where(own, starts + counts, 0), axis=0)
        key = tl.sum(tl.where(own, starts, 0), axis=0) + row
        last = tl.minimum(key + ROWS, end)
        steps = (last + BLOCK_N - 1) // BLOCK_N
        low = tl.where(is_split, within % own_each * (CHUNK // BLOCK_N), 0)
        high = tl.where(is_split, tl.minimum(low + CHUNK // BLOCK_N, steps), steps)
        part = tl.sum(tl.where(own, first_parts, 0), axis=0) + within
        entry = items_ptr + 8 + place * 8
        tl.store(entry, tl.sum(tl.where(own, firsts, 0), axis=0) + row)
        tl.store(entry + 1, last - key)
        tl.store(entry + 2, key)
        tl.store(entry + 3, tl.load(slot_ptr + span).to(tl.int32))
        tl.store(entry + 4, end)
        tl.store(entry + 5, tl.where(is_split, part, -1))
        tl.store(entry + 6, low)
        # A tile's last chunk may begin behind all that its rows see: nothing is added then.
        tl.store(entry + 7, tl.maximum(high, low + 1))

    if number < tiles:
        tile_ends = tl.cumsum(needed, axis=0)
        span = tl.sum((tile_ends <= number).to(tl.int32), axis=0)
        own = every == span
        tile = number - tl.sum(tl.where(own, tile_ends - needed, 0), axis=0)
        row = tl.sum(tl.where(own, firsts, 0), axis=0) + tile * ROWS
        count = tl.sum(tl.where(own, counts, 0), axis=0) - tile * ROWS
        parts_each = tl.sum(tl.where(own & split, chunks, 0), axis=0)
        part = tl.sum(tl.where(own, first_parts, 0), axis=0) + tile * parts_each
        entry = tiles_ptr + number * 4
        tl.store(entry, row)
        tl.store(entry + 1, tl.minimum(count, ROWS))
        tl.store(entry + 2, part)
        tl.store(entry + 3, parts_each)


def fits_chunks(shape: AttentionShape, dtype: torch.dtype, block_size: int) -> bool:
    """Whether the kernel takes such heads and blocks."""
    fits = dtype == torch.bfloat16 and shape.head_dim in (64, 128)
    fits = fits and block_size >= 8 and block_size & (block_size - 1) == 0
    return fits and heads_per_tile(shape) == shape.heads // shape.kv_heads


def chunk_work_of(batch: FlatBatch, shape: AttentionShape, kv: torch.Tensor) -> ChunkWork | None:
    """What ``chunk_attention`` needs to know of a batch; None where only
    ``attention.span_attention`` can do it."""
    fits = fits_chunks(shape, kv.dtype, kv.shape[3]) and batch.mask is None
    return list_chunks(batch, shape) if fits and hopper(kv.device) else None


def list_chunks(batch: FlatBatch, shape: AttentionShape) -> ChunkWork:
    """The work of a batch without masks."""
    spans = span_table(batch)
    entries, rows = spans.rows.shape[0], batch.row_slot.shape[0]
    pack = heads_per_tile(shape)
    per_tile, units = QUERY_ROWS // pack, shape.heads // pack
    # No partition of the rows into spans has more.
    tiles = min(rows, (rows + entries * (per_tile - 1)) // per_tile)
    part_rows = min(QUERY_ROWS, next_power_of_2(min(spans.max_rows, rows) * pack))
    programs = processors(batch.key_index.device)
    parts = 0
    if batch.max_keys > CHUNK_KEYS and tiles * units < CROWDED * programs:
        room = PART_BYTES // (units * part_rows * shape.head_dim * 4)
        parts = min(MOST_PARTS, room, tiles * cdiv(batch.max_keys, CHUNK_KEYS))
    items = spans.rows.new_empty((1 + tiles + parts, 8), dtype=torch.int32)
    listed = spans.rows.new_empty((tiles, 4), dtype=torch.int32)
    chunk_list_kernel[(tiles + parts,)](
        spans.first_row, spans.rows, spans.slot, batch.key_index, items, listed, entries,
        programs, units, parts, tiles,
        per_tile, CHUNK_KEYS, BLOCK_N, next_power_of_2(entries, 32), _DOUBLINGS,
        num_warps=1, **pdl(batch.key_index.device),
    )  # fmt: skip
    return ChunkWork(items, listed, part_rows, parts)


def chunk_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    work: ChunkWork,
) -> torch.Tensor:
    """``attention.span_attention`` where ``chunk_work_of`` has found work: q [N, heads, head_dim]
    bf16 -> [N, heads, head_dim], unspecified for padding rows.

    The bits of a row are those that ``prompt_attention`` gives it.
    """
    out = torch.empty_like(q)
    pack, width, block_size = heads_per_tile(shape), shape.head_dim, kv.shape[3]
    units = shape.heads // pack
    keys = kv.view(-1, width)
    size = (max(1, work.parts), units, work.part_rows)
    part = q.new_empty((*size, width), dtype=torch.float32)
    sums = q.new_empty((*size, 2), dtype=torch.float32)
    programs = min(processors(q.device), (work.items.shape[0] - 1) * units)
    chunk_kernel[(programs,)](
        TensorDescriptor.from_tensor(q, [QUERY_ROWS // pack, pack, width], QUERIES),
        TensorDescriptor.from_tensor(keys, [min(block_size, BLOCK_N), width], PAGES),
        out, part, sums, work.items, batch.block_tables, batch.block_tables.stride(0),
        keys.shape[0] // 2, shape.scale * LOG2_E, batch.first_key, work.part_rows,
        shape.heads, shape.kv_heads, pack, width, block_size, BLOCK_N, CHUNK_KEYS // BLOCK_N,
        STAGES, num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    if work.parts:
        members = work.part_rows
        combine_chunks_kernel[(len(work.tiles), units)](
            part, sums, work.tiles, out, shape.scale * LOG2_E,
            shape.heads, pack, width, members, max(1, min(8, 32 // members)),
            num_warps=max(1, min(8, members // 4)), **pdl(q.device),
        )  # fmt: skip
    return out
