"""Attention over short spans on Hopper GPUs, balanced by chunks of keys: lists of work, launches.

A forward makes one list for all layers. A tile (up to 64 queries of one kv head) is one item with
all its keys, or several with a run of chunks each where whole tiles would leave multiprocessors
idle. How many keys a request has is read on the device: one recorded launch serves all lengths.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.attention import LOG2_E, trees_attended
from surefoot.kernels.triton.chunk_kernel import (
    BLOCKS,
    ENTRY,
    SPLIT,
    chunk_kernel,
    combine_chunks_kernel,
)
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2, processors
from surefoot.kernels.triton.pdl import await_inputs, pdl
from surefoot.kernels.triton.prompt_attention import (
    BLOCK_N,
    CHUNK_KEYS,
    PAGES,
    QUERIES,
    STAGES,
    chains,
)
from surefoot.kernels.triton.spans import span_table

QUERY_ROWS = 64
"""Queries of a tile: rows times heads, which are padded to a power of two."""
PER_PROCESSOR = {64: 2, 128: 1}
"""Programs that a multiprocessor's memory holds, by head_dim."""
REGISTERS = {64: 128, 128: 144}
"""Of a thread, at most: so many that none is spilt, and as few as these programs leave."""
TOGETHER = 4
"""Queries whose partial results one program adds up."""
FEW_PARTS, MANY_PARTS = 4, 16
"""Partial results of a query that are asked for at a time."""
COMBINE_REGISTERS = 128
"""Of a thread that adds them up. Where none is said, ptxas takes few, and has each wait for the one
before."""
MOST_PARTS = 2048
PART_BYTES = 64 << 20
"""Partial results that there is room for, at most."""
LARGE_SHARE = 4
"""Chunks of a program from which on long tiles are cut into runs of half of them."""


@dataclass(frozen=True)
class ChunkWork:
    """What all layers of a forward share."""

    items: torch.Tensor
    """int32 [1 + n, ENTRY], with room for all: first their number; then of each, the longest first:
    flat row, rows, index of the last key that the first row sees (others see one more each, as far
    as the span goes), slot, index past the span's last key, which partial result it begins with
    (-1: none, it has all keys; -2: none, its rows see none of them), its first step of ``BLOCK_N``
    keys and the one past its last, and the index of the span's first key; from ``BLOCKS`` on, the
    blocks of its first step's pages."""
    split: torch.Tensor
    """int32 [n, SPLIT], of the tiles that are split, a few rows each: first flat row, rows (0: no
    such entry), first partial result, their number, and the first row within its tile."""
    part_rows: int
    """Queries of a partial result."""
    parts: int
    """Partial results that there is room for; 0: nothing is split."""


@jit(
    do_not_specialize=["table_stride", "spans", "programs", "units", "capacity", "splits"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "key_index_ptr", "mask_ptr"
    ],
)  # fmt: skip
def chunk_list_kernel(
    first_row_ptr, rows_ptr, slot_ptr, key_index_ptr, mask_ptr, items_ptr, split_ptr, tables_ptr,
    table_stride, spans, programs, units, capacity, splits,
    ROWS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LARGE_SHARE: tl.constexpr, MASKED: tl.constexpr,
    BOTH_WAYS: tl.constexpr, ENTRY: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program an item, and one for ``FEW`` rows of a tile that is split; each works out its own
    place."""
    # Kernels behind this one may read the list before they wait: they start when it is there.
    await_inputs(PDL)
    number = tl.program_id(0)
    every = tl.arange(0, SPANS)
    firsts, counts = chains(first_row_ptr, rows_ptr, mask_ptr, every, spans, MASKED)
    starts = tl.load(key_index_ptr + firsts, mask=counts > 0, other=0).to(tl.int32)
    needed = (counts + ROWS - 1) // ROWS
    chunks = tl.where(counts > 0, (starts + counts + CHUNK - 1) // CHUNK, 0)
    # A tile is cut into runs of a program's fair share. Of half of it if the tile has several and
    # each is many chunks, so that programs get long items and short ones. Runs are longer if there
    # is no room for so many partial results.
    fair = (tl.sum(needed * chunks, axis=0) * units).to(tl.float32) / programs
    share = tl.where((fair > LARGE_SHARE) & (chunks > 3.0 * fair), 0.5 * fair, fair)
    run = tl.maximum(chunks, 1)
    parts = capacity + 1
    while parts > capacity:
        cuts = (chunks.to(tl.float32) / tl.maximum(share, 0.5) + 0.25).to(tl.int32)
        cuts = tl.maximum(tl.minimum(cuts, chunks), 1)
        run = tl.maximum((chunks + cuts - 1) // cuts, 1)
        parts = tl.sum(tl.where(run < chunks, needed * chunks, 0), axis=0)
        share = 2.0 * share
    split = run < chunks
    each = (chunks + run - 1) // run
    items = needed * each
    parts = tl.where(split, needed * chunks, 0)
    first_parts = tl.cumsum(parts, axis=0) - parts
    if number == 0:
        tl.store(items_ptr, tl.sum(items, axis=0))

    ends = tl.cumsum(items, axis=0)
    span = tl.sum((ends <= number).to(tl.int32), axis=0)
    if span < spans:
        own = every == span
        within = number - tl.sum(tl.where(own, ends - items, 0), axis=0)
        own_run = tl.sum(tl.where(own, run, 0), axis=0)
        before = (run > own_run) | ((run == own_run) & (every < span))
        place = tl.sum(tl.where(before, items, 0), axis=0) + within
        own_each = tl.sum(tl.where(own, each, 0), axis=0)
        tile = within // own_each
        chunk = within % own_each * own_run
        end = tl.sum(tl.where(own, starts + counts, 0), axis=0)
        start = tl.sum(tl.where(own, starts, 0), axis=0)
        key = start + tile * ROWS
        count = tl.minimum(ROWS, end - key)
        if BOTH_WAYS:
            key = end - 1
        last = tl.minimum(key + count, end)
        steps = (last + BLOCK_N - 1) // BLOCK_N
        low = chunk * (CHUNK // BLOCK_N)
        high = tl.minimum(low + own_run * (CHUNK // BLOCK_N), steps)
        part = tl.sum(tl.where(own, first_parts + tile * chunks, 0), axis=0) + chunk
        part = tl.where(own_each > 1, part, -1)
        # A tile's last run may begin behind all that its rows see: it gives nothing.
        part = tl.where(low < steps, part, -2)
        entry = items_ptr + ENTRY + place * ENTRY
        tl.store(entry, tl.sum(tl.where(own, firsts, 0), axis=0) + tile * ROWS)
        tl.store(entry + 1, count)
        tl.store(entry + 2, key)
        slot = tl.load(slot_ptr + span).to(tl.int32)
        tl.store(entry + 3, slot)
        tl.store(entry + 4, end)
        tl.store(entry + 5, part)
        tl.store(entry + 6, low)
        tl.store(entry + 7, tl.maximum(high, low + 1))
        tl.store(entry + 8, start)
        # So that programs need not look their first pages up.
        PAGE: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
        PAGES: tl.constexpr = BLOCK_N // PAGE
        step = tl.arange(0, PAGES)
        page = tl.minimum(low * PAGES + step, (last - 1) // PAGE)
        block = tl.load(tables_ptr + slot * table_stride + page * PAGE // BLOCK_SIZE)
        tl.store(entry + BLOCKS + step, block)

    if number < splits:
        pieces = tl.where(split, (counts + FEW - 1) // FEW, 0)
        piece_ends = tl.cumsum(pieces, axis=0)
        own = every == tl.sum((piece_ends <= number).to(tl.int32), axis=0)
        row = (number - tl.sum(tl.where(own, piece_ends - pieces, 0), axis=0)) * FEW
        span_rows = tl.sum(tl.where(own, counts, 0), axis=0)
        tile = row // ROWS
        entry = split_ptr + number * SPLIT
        tl.store(entry, tl.sum(tl.where(own, firsts, 0), axis=0) + row)
        tl.store(entry + 1, tl.maximum(tl.minimum(span_rows - row, FEW), 0))
        tl.store(entry + 2, tl.sum(tl.where(own, first_parts + tile * chunks, 0), axis=0))
        last = tl.sum(tl.where(own, starts, 0), axis=0) + tl.minimum((tile + 1) * ROWS, span_rows)
        if BOTH_WAYS:
            last = tl.sum(tl.where(own, starts + counts, 0), axis=0)
        tl.store(entry + 3, (last + CHUNK - 1) // CHUNK)
        tl.store(entry + 4, row % ROWS)


def packed_heads(shape: AttentionShape) -> tuple[int, int]:
    """Heads that a tile has room for, and those of them that there are: all of a kv head, padded to
    a power of two, or one where there are too many."""
    group = shape.heads // shape.kv_heads
    return (next_power_of_2(group), group) if group <= QUERY_ROWS else (1, 1)


def rows_together(pack: int) -> int:
    """Rows whose partial results one program adds up."""
    return max(1, TOGETHER // pack)


def programs_of(device: torch.device, shape: AttentionShape) -> int:
    """Programs of ``chunk_kernel`` that run at once."""
    return processors(device) * PER_PROCESSOR[shape.head_dim]


def list_chunks(batch: FlatBatch, shape: AttentionShape, block_size: int) -> ChunkWork:
    """The work of all spans but trees; ``block_size``: keys of a block of the KV pool."""
    spans = span_table(batch)
    entries, rows = spans.rows.shape[0], batch.row_slot.shape[0]
    pack, used = packed_heads(shape)
    per_tile, units = QUERY_ROWS // pack, shape.heads // used
    # No partition of the rows into spans has more.
    tiles = min(rows, (rows + entries * (per_tile - 1)) // per_tile)
    tiles = min(tiles, entries * cdiv(spans.max_rows, per_tile))
    part_rows = min(QUERY_ROWS, next_power_of_2(min(spans.max_rows, rows) * pack))
    programs, most = programs_of(batch.key_index.device, shape), cdiv(batch.max_keys, CHUNK_KEYS)
    few = rows_together(pack)
    parts = cuts = splits = 0
    # Nothing is split below 7/4 of a program's share, which is two chunks of every tile or more
    # where texts are long enough for this to matter.
    if 4 * most * programs >= 14 * tiles * units:
        room = PART_BYTES // (units * part_rows * shape.head_dim * 4)
        parts = min(MOST_PARTS, room, tiles * most)
        # Runs are no shorter than 7/8 of half a share, and tiles no shorter than two of them.
        cuts = cdiv(16 * programs, 7 * units)
        # A program adds up few rows, so that none but those that there are get one.
        most_split = min(tiles, cdiv(8 * programs, 7 * units)) * cdiv(part_rows, few * pack)
        splits = min(most_split, (rows + entries * (few - 1)) // few)
    items = spans.rows.new_empty((1 + tiles + cuts, ENTRY.value), dtype=torch.int32)
    listed = spans.rows.new_empty((splits, SPLIT.value), dtype=torch.int32)
    chunk_list_kernel[(max(tiles + cuts, splits),)](
        spans.first_row, spans.rows, spans.slot, batch.key_index, batch.mask, items, listed,
        batch.block_tables, batch.block_tables.stride(0), entries, programs, units, parts, splits,
        per_tile, few, CHUNK_KEYS, BLOCK_N, next_power_of_2(entries, 32), block_size, LARGE_SHARE,
        batch.mask is not None and not batch.both_ways, batch.both_ways, ENTRY.value, BLOCKS.value,
        SPLIT.value, num_warps=1, **pdl(batch.key_index.device),
    )  # fmt: skip
    return ChunkWork(items, listed, part_rows, parts)


def chunk_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    work: ChunkWork,
) -> torch.Tensor:
    """``attention.span_attention`` on a Hopper GPU, for what ``fits``: q [N, heads, head_dim] bf16
    -> [N, heads, head_dim], unspecified for padding rows. ``work`` as ``list_chunks`` has it.

    The bits of a row are those that ``prompt_attention`` gives it. Trees are left to
    ``span_attention``.
    """
    out = trees_attended(q, kv, batch, shape)
    (pack, used), width, block_size = packed_heads(shape), shape.head_dim, kv.shape[3]
    units = shape.heads // used
    keys = kv.view(-1, width)
    size = (max(1, work.parts), units, work.part_rows)
    part = q.new_empty((*size, width), dtype=torch.float32)
    sums = q.new_empty((*size, 2), dtype=torch.float32)
    programs = min(programs_of(q.device, shape), (work.items.shape[0] - 1) * units)
    chunk_kernel[(programs,)](
        TensorDescriptor.from_tensor(q, [QUERY_ROWS // pack, pack, width], QUERIES),
        TensorDescriptor.from_tensor(keys, [min(block_size, BLOCK_N), width], PAGES),
        out, part, sums, work.items, batch.block_tables, batch.block_tables.stride(0),
        keys.shape[0] // 2, shape.scale * LOG2_E, batch.first_key, work.part_rows,
        shape.heads, shape.kv_heads, pack, used, width, block_size, BLOCK_N,
        CHUNK_KEYS // BLOCK_N, STAGES, num_warps=4, maxnreg=REGISTERS[width], launch_pdl=True,
    )  # fmt: skip
    if work.parts:
        together = min(TOGETHER, work.part_rows)
        pieces = max(1, pack // together)
        combine_chunks_kernel[(len(work.split) * pieces, units)](
            part, sums, work.split, out, shape.scale * LOG2_E,
            shape.heads, pack, used, width, work.part_rows, together, FEW_PARTS, MANY_PARTS,
            num_warps=together, maxnreg=COMBINE_REGISTERS, launch_pdl=True,
        )  # fmt: skip
    return out
