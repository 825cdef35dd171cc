"""The kernels of span attention: chunks of keys in a fixed order.

A program takes one tile of a span's rows, all query heads of one kv head with them (so that a key
is loaded once for the whole group). Keys are taken a chunk at a time, counted from the request's
first key. Each chunk has a softmax of its own, and chunks are added up in ascending order by
``join``, wherever they were computed: one program takes them all, or several take a run of them
each (flash-decoding) and leave every chunk's result to ``combine_kernel``.
"""

from __future__ import annotations

import triton.language as tl

from surefoot.kernels.triton.launch import jit
from surefoot.kernels.triton.pdl import await_inputs, prefetch, release_next


@jit
def prefetch_keys(
    kv_ptr, table_ptr, kv_head, low, high, value_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program's first keys and their values: old ones, but for the span's own."""
    element: tl.constexpr = kv_ptr.dtype.element_ty.primitive_bitwidth // 8
    index = tl.arange(0, 2 * CHUNK)
    key = tl.maximum(tl.minimum(low + index % CHUNK, high - 1), 0)
    block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    at += index // CHUNK * value_offset
    prefetch(kv_ptr + at, HEAD_DIM * element)


@jit
def trees_among(mask_ptr, firsts, counts):
    """Which spans are trees: their first rows say so."""
    return (counts > 0) & (tl.load(mask_ptr + firsts, mask=counts > 0, other=-1) != -1)


@jit
def path_length(mask):
    """Keys of a tree that a row with this ``mask`` sees."""
    return tl.sum((mask >> tl.arange(0, 64)) & 1, axis=0)


@jit
def on_path(key, start, places_ptr):
    """Where the keys of a row lie, ``key`` [N] counting along its path, whose first 64 from
    ``start`` on are at ``places_ptr`` (``paths.path_places``)."""
    step = key - start
    own = (step >= 0) & (step < 64)
    return tl.where(own, start + tl.load(places_ptr + step, mask=own, other=0), key)


@jit
def join(best, total, part, whole_best, whole_total, whole, scale):
    """A chunk's (highest score [M], sum of weights [M], values [M, N]) joins what the chunks before
    it add up to. A chunk of which a row sees nothing changes no bit of it.

    Products and sums are spelt out, so that every kernel rounds them alike.
    """
    highest = tl.maximum(whole_best, best)
    # A row may have seen no key: -inf less -inf is NaN.
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    old = tl.exp2((whole_best - pivot) * scale)
    new = tl.exp2((best - pivot) * scale)
    whole_total = tl.fma(whole_total, old, total * new)
    return highest, whole_total, tl.fma(whole, old[:, None], part * new[:, None])


@jit
def result_of(whole, total):
    return whole * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@jit(
    do_not_specialize=["spans", "splits", "parts", "tiles", "first_key"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "start_ptr", "key_index_ptr", "mask_ptr",
        "oldest_ptr", "places_ptr",
    ],
)  # fmt: skip
def attention_kernel(
    q_ptr, kv_ptr, out_ptr, part_ptr, sums_ptr, first_row_ptr, rows_ptr, slot_ptr, spans,
    tables_ptr, table_stride, start_ptr, key_index_ptr, mask_ptr, value_offset, scale,
    splits, parts, tiles, first_key, oldest_ptr, places_ptr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, SEARCH: tl.constexpr, SPANS: tl.constexpr, MASKED: tl.constexpr,
    PATHS: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    rows_per_tile: tl.constexpr = BLOCK_M // group
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if not SEARCH:
        span = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
    else:
        # Ragged spans: which of them the program's tile belongs to.
        every = tl.arange(0, SPANS)
        counts = tl.load(rows_ptr + every, mask=every < spans, other=0).to(tl.int32)
        needed = (counts + rows_per_tile - 1) // rows_per_tile
        if PATHS:
            firsts = tl.load(first_row_ptr + every, mask=counts > 0, other=0)
            needed = tl.where(trees_among(mask_ptr, firsts, counts), counts, needed)
        ends = tl.cumsum(needed, axis=0)
        span = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
        if span >= spans:
            await_inputs(PDL)
            return
        tile = tl.program_id(0) - tl.sum(tl.where(every == span, ends - needed, 0), axis=0)
    count = tl.load(rows_ptr + span)
    first_row = tl.load(first_row_ptr + span)
    height = rows_per_tile
    if PATHS and count > 0:
        height = tl.where(tl.load(mask_ptr + first_row) != -1, 1, rows_per_tile)
    if tile * height >= count:
        await_inputs(PDL)
        return

    slot = tl.load(slot_ptr + span)
    member = tl.arange(0, BLOCK_M)
    within = tile * height + member // group
    valid = (member < height * group) & (within < count)
    row = first_row + within
    head = kv_head * group + member % group
    place = row * HEADS + head
    column = tl.arange(0, WIDTH)
    in_head = column < HEAD_DIM
    last_key = tl.load(key_index_ptr + row, mask=valid, other=-1)
    length = tl.max(last_key, axis=0) + 1
    if MASKED:
        # A tree may grow over several passes, and a row may see keys after its own.
        bits = tl.load(mask_ptr + row, mask=valid, other=0)
        start = tl.load(start_ptr + slot)
        length = tl.maximum(start + count, length)
    if PATHS:
        start = tl.load(start_ptr + slot).to(tl.int32)
        own_row = first_row + tile * height
        path = tl.load(mask_ptr + own_row)
        places_ptr += own_row * 64
        if path != -1:
            length = start + path_length(path)
            last_key = tl.where(valid, length - 1, -1)
    if WINDOWED:
        oldest = tl.load(oldest_ptr + row, mask=valid, other=0)

    length = length.to(tl.int32)
    low = 0
    high = length
    if SPLIT:
        run = tl.cdiv(tl.cdiv(length, CHUNK), splits) * CHUNK
        low = split * run
        high = tl.minimum(low + run, length)
    table = tables_ptr + slot * table_stride
    key = low + tl.arange(0, CHUNK)
    there = on_path(key, start, places_ptr) if PATHS else key
    block = tl.load(table + there // BLOCK_SIZE, mask=key < high, other=0)
    if PDL and HEAD_DIM % 8 == 0:
        prefetch_keys(
            kv_ptr, table, kv_head, low, high, value_offset, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CHUNK
        )
    await_inputs(PDL)
    q = tl.load(
        q_ptr + place[:, None] * HEAD_DIM + column[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    whole_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    whole_total = tl.zeros([BLOCK_M], tl.float32)
    whole = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for first in range(low, high, CHUNK):
        known = key < high
        at = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + there % BLOCK_SIZE
        at = at * HEAD_DIM
        # A step ahead: loads whose address waits for another load are pipelined badly.
        following = key + CHUNK
        there = on_path(following, start, places_ptr) if PATHS else following
        next_block = tl.load(table + there // BLOCK_SIZE, mask=following < high, other=0)
        k = tl.load(
            kv_ptr + at[None, :] + column[:, None],
            mask=known[None, :] & in_head[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        causal = key[None, :] <= last_key[:, None]
        if MASKED:
            offset = key - start
            bit = (bits[:, None] >> tl.minimum(tl.maximum(offset, 0), 63)[None, :]) & 1
            in_tree = (offset < 0)[None, :] | ((offset < 64)[None, :] & (bit == 1))
            visible = tl.where((bits == -1)[:, None], causal, in_tree)
        else:
            visible = causal
        visible = visible & (known & (key >= first_key))[None, :]
        if WINDOWED:
            visible = visible & (key[None, :] >= oldest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        best = tl.max(scores, axis=1)
        # A row may see none of these keys.
        pivot = tl.where(best == float("-inf"), 0.0, best)
        weights = tl.exp2(tl.fma(scores, scale, (-pivot * scale)[:, None]))
        total = tl.sum(weights, axis=1)
        # Keys beyond the end may never have been written; NaN times zero is NaN.
        v = tl.load(
            kv_ptr + value_offset + at[:, None] + column[None, :],
            mask=known[:, None] & in_head[None, :],
            other=0.0,
        )
        part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        if SPLIT:
            target = place * parts + first // CHUNK
            tl.store(sums_ptr + 2 * target, best, mask=valid)
            tl.store(sums_ptr + 2 * target + 1, total, mask=valid)
            target = part_ptr + target[:, None] * HEAD_DIM + column[None, :]
            tl.store(target, part, mask=valid[:, None] & in_head[None, :])
        else:
            whole_best, whole_total, whole = join(
                best, total, part, whole_best, whole_total, whole, scale
            )
        key = following
        block = next_block

    if not SPLIT:
        target = out_ptr + place[:, None] * HEAD_DIM + column[None, :]
        result = result_of(whole, whole_total).to(out_ptr.dtype.element_ty)
        tl.store(target, result, mask=valid[:, None] & in_head[None, :])


@jit(
    do_not_specialize=["spans", "parts"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "start_ptr", "key_index_ptr", "mask_ptr"
    ],
)  # fmt: skip
def combine_kernel(
    part_ptr, sums_ptr, out_ptr, first_row_ptr, rows_ptr, slot_ptr, spans, start_ptr,
    key_index_ptr, mask_ptr, parts, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    SPANS: tl.constexpr, AT_ONCE: tl.constexpr, MASKED: tl.constexpr, PATHS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The chunks of one row and head, added up as a program that has them all does it."""
    release_next(PDL)
    row = tl.program_id(0)
    every = tl.arange(0, SPANS)
    counts = tl.load(rows_ptr + every, mask=every < spans, other=0).to(tl.int32)
    firsts = tl.load(first_row_ptr + every, mask=counts > 0, other=0).to(tl.int32)
    own = (firsts <= row) & (row < firsts + counts)
    count = tl.sum(tl.where(own, counts, 0), axis=0)
    await_inputs(PDL)
    if count == 0:
        return  # Padding.
    length = tl.load(key_index_ptr + row) + 1
    if MASKED or PATHS:
        slots = tl.load(slot_ptr + every, mask=counts > 0, other=0)
        start = tl.load(start_ptr + tl.sum(tl.where(own, slots, 0), axis=0))
    if MASKED:
        length = tl.maximum(length, start + count)
    if PATHS:
        path = tl.load(mask_ptr + row)
        if path != -1:
            length = start + path_length(path)
    chunks = tl.cdiv(length.to(tl.int32), CHUNK)
    one = tl.arange(0, 1)
    place = (row.to(tl.int64) * HEADS + tl.program_id(1)) + one
    column = tl.arange(0, WIDTH)[None, :]
    whole_best = tl.full([1], float("-inf"), tl.float32)
    whole_total = tl.zeros([1], tl.float32)
    whole = tl.zeros([1, WIDTH], tl.float32)
    for base in range(0, chunks, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            there = base + step + one < chunks
            at = place * parts + base + step
            best = tl.load(sums_ptr + 2 * at, mask=there, other=float("-inf"))
            total = tl.load(sums_ptr + 2 * at + 1, mask=there, other=0.0)
            part = tl.load(
                part_ptr + at[:, None] * HEAD_DIM + column,
                mask=there[:, None] & (column < HEAD_DIM),
                other=0.0,
            )
            whole_best, whole_total, whole = join(
                best, total, part, whole_best, whole_total, whole, scale
            )
    target = out_ptr + place[:, None] * HEAD_DIM + column
    result = result_of(whole, whole_total).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=column < HEAD_DIM)
