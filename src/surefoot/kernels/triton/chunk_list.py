"""The work of ``chunk_attention``: lists of items that are made on the device.

A forward makes one list for all layers. A tile (up to 64 queries of one kv head) is one item with
all its keys, or several with a run of chunks each where whole tiles would leave multiprocessors
idle. A tree's nodes share the chunks before the tree, and each has the rest to itself. How many
keys a request has is read on the device: one recorded launch serves all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.chunk_kernel import BLOCKS, ENTRY, NODE, SPLIT
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2, processors
from surefoot.kernels.triton.paths import path_places
from surefoot.kernels.triton.pdl import await_inputs, pdl
from surefoot.kernels.triton.prompt_attention import BLOCK_N, CHUNK_KEYS
from surefoot.kernels.triton.span_kernel import path_length, trees_among
from surefoot.kernels.triton.spans import span_table

QUERY_ROWS = 64
"""Queries of a tile: rows times heads, which are padded to a power of two."""
PER_PROCESSOR = {64: 2, 128: 1}
"""Programs that a multiprocessor's memory holds, by head_dim."""
TOGETHER = 4
"""Queries whose partial results one program adds up."""
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
    keys and the one past its last, the index of the span's first key, the row's place within its
    tile's partial results, and the first of the blocks of its path, which has the keys from the
    block of the span's first on (-1: no node of a tree); from ``BLOCKS`` on, the blocks of its
    first step's pages (of a path b: -1 - b)."""
    nodes: torch.Tensor
    """int32 [1 + n, NODE], of trees' nodes: first their number; then of each its flat row, its
    slot, the index of its span's first key and that of its own last. Node i's path has the blocks
    from i times ``path_blocks`` on."""
    split: torch.Tensor
    """int32 [n, SPLIT], of the tiles that are split, a few rows each: first flat row, rows (0: no
    such entry), first partial result, their number, and the first row within its tile."""
    part_rows: int
    """Queries of a partial result."""
    parts: int
    """Partial results that there is room for; 0: nothing is split."""
    path_blocks: int
    """Blocks of a path; 0: there are no trees."""
    places: torch.Tensor | None
    """Of trees' rows, as ``path_places`` has them."""


@jit
def of(values, own):
    """That one of ``values`` [n] which is ``own``."""
    return tl.sum(tl.where(own, values, 0), axis=0)


@jit
def runs_of(chunks, cut, work, room, programs, LARGE_SHARE: tl.constexpr):
    """How many chunks of a tile an item has, by span: a program's fair share of the ``work``, in
    chunks. Of half of it if the tile has several and each is many chunks, so that programs get long
    items and short ones. Runs are longer if the partial results of the tiles ``cut`` [spans] have
    no ``room``."""
    fair = work.to(tl.float32) / programs
    share = tl.where((fair > LARGE_SHARE) & (chunks > 3.0 * fair), 0.5 * fair, fair)
    run = tl.maximum(chunks, 1)
    parts = room + 1
    while parts > room:
        cuts = (chunks.to(tl.float32) / tl.maximum(share, 0.5) + 0.25).to(tl.int32)
        cuts = tl.maximum(tl.minimum(cuts, chunks), 1)
        run = tl.maximum((chunks + cuts - 1) // cuts, 1)
        parts = tl.sum(tl.where(run < chunks, cut * chunks, 0), axis=0)
        share = 2.0 * share
    return run


@jit
def store_item(
    entry, row, count, key, slot, end, part, low, high, start, within, path, last, tables_ptr,
    table_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """An entry as ``ChunkWork.items`` has it. ``last``: index past the last key that is seen."""
    tl.store(entry, row)
    tl.store(entry + 1, count)
    tl.store(entry + 2, key)
    tl.store(entry + 3, slot)
    tl.store(entry + 4, end)
    tl.store(entry + 5, part)
    tl.store(entry + 6, low)
    tl.store(entry + 7, tl.maximum(high, low + 1))
    tl.store(entry + 8, start)
    tl.store(entry + 9, within)
    tl.store(entry + 10, path)
    # So that programs need not look their first pages up.
    PAGE: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PAGES: tl.constexpr = BLOCK_N // PAGE
    step = tl.arange(0, PAGES)
    page = tl.minimum(low * PAGES + step, (last - 1) // PAGE) * PAGE // BLOCK_SIZE
    block = tl.load(tables_ptr + slot * table_stride + page)
    beyond = page - start // BLOCK_SIZE
    block = tl.where((path >= 0) & (beyond >= 0), -1 - path - beyond, block)
    tl.store(entry + BLOCKS + step, block)


@jit(
    do_not_specialize=["table_stride", "spans", "programs", "units", "capacity", "splits"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "key_index_ptr", "mask_ptr", "start_ptr"
    ],
)  # fmt: skip
def chunk_list_kernel(
    first_row_ptr, rows_ptr, slot_ptr, key_index_ptr, mask_ptr, start_ptr, items_ptr, split_ptr,
    nodes_ptr, tables_ptr, table_stride, spans, programs, units, capacity, splits,
    ROWS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPANS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LARGE_SHARE: tl.constexpr,
    CHAINS: tl.constexpr, TREES: tl.constexpr, PATH: tl.constexpr,
    BOTH_WAYS: tl.constexpr, ENTRY: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    NODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program an item, and one for ``FEW`` rows of a tile that is split or one node of a tree;
    each works out its own place. ``PATH``: blocks of a path."""
    # Kernels behind this one may read the list before they wait: they start when it is there.
    await_inputs(PDL)
    number = tl.program_id(0)
    every = tl.arange(0, SPANS)
    counts = tl.load(rows_ptr + every, mask=every < spans, other=0).to(tl.int32)
    firsts = tl.load(first_row_ptr + every, mask=counts > 0, other=0).to(tl.int32)
    starts = tl.load(key_index_ptr + firsts, mask=counts > 0, other=0).to(tl.int32)
    nodes = tl.zeros_like(counts)
    if TREES:
        tree = trees_among(mask_ptr, firsts, counts)
        if not CHAINS:
            counts = tl.where(tree, counts, 0)
        nodes = tl.where(tree, counts, 0)
        slots = tl.load(slot_ptr + every, mask=tree, other=0)
        starts = tl.where(tree, tl.load(start_ptr + slots, mask=tree, other=0).to(tl.int32), starts)
    needed = (counts + ROWS - 1) // ROWS
    # All chunks of a tile; of those, the ones that it is an item or several for.
    whole = tl.where(counts > 0, (starts + counts + CHUNK - 1) // CHUNK, 0)
    chunks = whole
    shared = tl.zeros_like(counts)
    if TREES:
        # Nodes share what lies before the tree, as far as there is room for partial results.
        shared = tl.where(tree, starts // CHUNK, 0)
        fits = tl.cumsum(tl.where(shared > 0, needed * whole, 0), axis=0) <= capacity
        shared = tl.where(fits, shared, 0)
        chunks = tl.where(tree, shared, whole)
    parts = tl.where(shared > 0, needed * whole, 0)
    work = tl.sum(needed * chunks + nodes * (whole - shared), axis=0) * units
    cut = tl.where(nodes == 0, needed, 0)
    run = runs_of(chunks, cut, work, capacity - tl.sum(parts, axis=0), programs, LARGE_SHARE)
    split = (run < chunks) & (nodes == 0)
    each = (chunks + run - 1) // run
    items = needed * each + nodes
    parts = tl.where(split, needed * chunks, parts)
    first_parts = tl.cumsum(parts, axis=0) - parts
    # Items come in the order of what they have to do, nodes beside the others of their span.
    length = tl.where((nodes > 0) & (shared == 0), whole, run)
    if number == 0:
        tl.store(items_ptr, tl.sum(items, axis=0))
        tl.store(nodes_ptr, tl.sum(nodes, axis=0))

    ends = tl.cumsum(items, axis=0)
    span = tl.sum((ends <= number).to(tl.int32), axis=0)
    if span < spans:
        own = every == span
        within = number - of(ends - items, own)
        own_run, own_length, own_each = of(run, own), of(length, own), of(each, own)
        before = (length > own_length) | ((length == own_length) & (every < span))
        entry = items_ptr + ENTRY + (tl.sum(tl.where(before, items, 0), axis=0) + within) * ENTRY
        first, start, first_part = of(firsts, own), of(starts, own), of(first_parts, own)
        end = start + of(counts, own)
        slot = tl.load(slot_ptr + span).to(tl.int32)
        tile = within // tl.maximum(own_each, 1)
        chunk = within % tl.maximum(own_each, 1) * own_run
        row = first + tile * ROWS
        key = start + tile * ROWS
        count = tl.minimum(ROWS, end - key)
        if BOTH_WAYS:
            key = end - 1
        last = tl.minimum(key + count, end)
        steps = (last + BLOCK_N - 1) // BLOCK_N
        place = 0
        path = -1
        partial = own_each > 1
        own_nodes = of(nodes, own)
        if TREES and own_nodes > 0:
            own_shared = of(shared, own)
            partial = own_shared > 0
            # All rows of a tile see all keys before the tree.
            key = start
            last = start
            steps = own_shared * (CHUNK // BLOCK_N)
            node = within - of(needed * each, own)
            if node >= 0:
                row = first + node
                tile = node // ROWS
                place = node % ROWS
                count = 1
                chunk = own_shared
                own_run = of(whole, own)
                last = start + path_length(tl.load(mask_ptr + row)).to(tl.int32)
                key = last - 1
                steps = (last + BLOCK_N - 1) // BLOCK_N
                # Nothing is to be cleared behind the last key: paths end in zeros.
                end = steps * BLOCK_N
                own_node = of(tl.cumsum(nodes, axis=0) - nodes, own) + node
                path = own_node * PATH
                entry_of_node = nodes_ptr + NODE + own_node * NODE
                tl.store(entry_of_node, row)
                tl.store(entry_of_node + 1, slot)
                tl.store(entry_of_node + 2, start)
                tl.store(entry_of_node + 3, key)
        low = chunk * (CHUNK // BLOCK_N)
        high = tl.minimum(low + own_run * (CHUNK // BLOCK_N), steps)
        part = tl.where(partial, first_part + tile * of(whole, own) + chunk, -1)
        # A tile's last run may begin behind all that its rows see: it gives nothing.
        part = tl.where(low < steps, part, -2)
        store_item(
            entry, row, count, key, slot, end, part, low, high, start, place, path, last,
            tables_ptr, table_stride, BLOCK_SIZE, BLOCK_N, BLOCKS,
        )  # fmt: skip

    if number < splits:
        pieces = tl.where(split, (counts + FEW - 1) // FEW, tl.where(shared > 0, nodes, 0))
        piece_ends = tl.cumsum(pieces, axis=0)
        own = every == tl.sum((piece_ends <= number).to(tl.int32), axis=0)
        first, start, rows = of(firsts, own), of(starts, own), of(counts, own)
        few = tl.where(of(nodes, own) > 0, 1, FEW)
        row = (number - of(piece_ends - pieces, own)) * few
        tile = row // ROWS
        last = start + tl.minimum((tile + 1) * ROWS, rows)
        if BOTH_WAYS:
            last = start + rows
        if TREES and of(nodes, own) > 0:
            last = start + path_length(tl.load(mask_ptr + first + row)).to(tl.int32)
        entry = split_ptr + number * SPLIT
        tl.store(entry, first + row)
        tl.store(entry + 1, tl.maximum(tl.minimum(rows - row, few), 0))
        tl.store(entry + 2, of(first_parts + tile * whole, own))
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


def list_chunks(
    batch: FlatBatch, shape: AttentionShape, block_size: int, only_trees: bool = False
) -> ChunkWork:
    """The work of all spans, or of trees alone; ``block_size``: keys of a block of the KV pool."""
    spans = span_table(batch)
    entries, rows = spans.rows.shape[0], batch.row_slot.shape[0]
    pack, used = packed_heads(shape)
    per_tile, units = QUERY_ROWS // pack, shape.heads // used
    nodes = min(rows, entries * batch.tree_rows) if batch.has_paths else 0
    # No partition of the rows into spans has more.
    tiles = min(rows, (rows + entries * (per_tile - 1)) // per_tile)
    longest = min(spans.max_rows, batch.tree_rows) if only_trees else spans.max_rows
    tiles = min(tiles, entries * cdiv(longest, per_tile))
    part_rows = min(QUERY_ROWS, next_power_of_2(min(spans.max_rows, rows) * pack))
    programs, most = programs_of(batch.key_index.device, shape), cdiv(batch.max_keys, CHUNK_KEYS)
    few = rows_together(pack)
    parts = cuts = splits = 0
    # Nothing is split below 7/4 of a program's share, which is two chunks of every tile or more
    # where texts are long enough for this to matter.
    if 4 * most * programs >= 14 * tiles * units or (nodes and most > 1):
        room = PART_BYTES // (units * part_rows * shape.head_dim * 4)
        parts = min(MOST_PARTS, room, tiles * most)
        # Runs are no shorter than 7/8 of half a share, and tiles no shorter than two of them.
        cuts = cdiv(16 * programs, 7 * units)
        # A program adds up few rows, so that none but those that there are get one.
        most_split = min(tiles, cdiv(8 * programs, 7 * units)) * cdiv(part_rows, few * pack)
        splits = min(most_split, (rows + entries * (few - 1)) // few) + nodes
    items = spans.rows.new_empty((1 + tiles + cuts + nodes, ENTRY.value), dtype=torch.int32)
    listed_nodes = spans.rows.new_empty((1 + nodes, NODE.value), dtype=torch.int32)
    listed = spans.rows.new_empty((splits, SPLIT.value), dtype=torch.int32)
    path = cdiv(block_size - 1 + min(batch.tree_rows, rows), block_size)
    chunk_list_kernel[(max(tiles + cuts + nodes, splits),)](
        spans.first_row, spans.rows, spans.slot, batch.key_index, batch.mask, batch.span_start,
        items, listed, listed_nodes, batch.block_tables, batch.block_tables.stride(0), entries,
        programs, units, parts, splits, per_tile, few, CHUNK_KEYS, BLOCK_N,
        next_power_of_2(entries, 32), block_size, LARGE_SHARE, not only_trees, batch.has_paths,
        path, batch.both_ways, ENTRY.value, BLOCKS.value, SPLIT.value, NODE.value,
        num_warps=1, **pdl(batch.key_index.device),
    )  # fmt: skip
    places = path_places(batch.mask) if batch.has_paths else None
    return ChunkWork(items, listed_nodes, listed, part_rows, parts, path if nodes else 0, places)
