"""Span attention over the paged KV pool of ``rope_kv``.

A program takes one tile of a span's rows, all query heads of one kv head with them (so that a key
is loaded once for the whole group), and one of ``splits`` shares of the keys (flash-decoding). A
second kernel adds the shares up. How long a share is follows from the span's length on the device.
Long spans on Hopper are ``prompt_attention``'s.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl

from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton.launch import (
    DEFAULT_SHARED_MEMORY,
    jit,
    next_power_of_2,
    processors,
    shared_memory,
)
from surefoot.kernels.triton.pdl import await_inputs, pdl, prefetch, release_next
from surefoot.kernels.triton.spans import span_table

LOG2_E = 1 / math.log(2)
MAX_SPLITS = 64
NO_LIMIT = 2**31 - 1
LIGHT_SPLITS = 24
"""Of small heads, whose shares are soon read: adding up more costs more than they save."""


@jit
def prefetch_keys(
    kv_ptr, table_ptr, kv_head, low, high, value_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first BLOCK_N keys of a share and their values: old ones, but for the span's own."""
    element: tl.constexpr = kv_ptr.dtype.element_ty.primitive_bitwidth // 8
    index = tl.arange(0, 2 * BLOCK_N)
    key = tl.maximum(tl.minimum(low + index % BLOCK_N, high - 1), 0)
    block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
    at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    at += index // BLOCK_N * value_offset
    prefetch(kv_ptr + at, HEAD_DIM * element)


@jit(
    do_not_specialize=["spans", "splits", "tiles", "first_key", "longest"],
    do_not_specialize_on_alignment=[
        "first_row_ptr", "rows_ptr", "slot_ptr", "start_ptr", "key_index_ptr", "mask_ptr"
    ],
)  # fmt: skip
def attention_kernel(
    q_ptr, kv_ptr, out_ptr, part_ptr, lse_ptr, first_row_ptr, rows_ptr, slot_ptr, spans,
    tables_ptr, table_stride, start_ptr, key_index_ptr, mask_ptr, value_offset, scale,
    splits, tiles, first_key, longest,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, SEARCH: tl.constexpr, SPANS: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
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
        counts = tl.where(counts <= longest, counts, 0)
        needed = (counts + rows_per_tile - 1) // rows_per_tile
        ends = tl.cumsum(needed, axis=0)
        span = tl.sum((ends <= tl.program_id(0)).to(tl.int32), axis=0)
        if span >= spans:
            await_inputs(PDL)
            return
        tile = tl.program_id(0) - tl.sum(tl.where(every == span, ends - needed, 0), axis=0)
    count = tl.load(rows_ptr + span)
    if (tile * rows_per_tile >= count) | (count > longest):
        await_inputs(PDL)
        return

    slot = tl.load(slot_ptr + span)
    member = tl.arange(0, BLOCK_M)
    within = tile * rows_per_tile + member // group
    valid = (member < rows_per_tile * group) & (within < count)
    row = tl.load(first_row_ptr + span) + within
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

    length = length.to(tl.int32)
    low = 0
    high = length
    if SPLIT:
        share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
        low = split * share
        high = tl.minimum(low + share, length)
    table = tables_ptr + slot * table_stride
    key = low + tl.arange(0, BLOCK_N)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < high, other=0)
    if PDL and HEAD_DIM % 8 == 0:
        prefetch_keys(
            kv_ptr, table, kv_head, low, high, value_offset,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    await_inputs(PDL)
    q = tl.load(
        q_ptr + place[:, None] * HEAD_DIM + column[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for _ in range(low, high, BLOCK_N):
        known = key < high
        at = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        at = at * HEAD_DIM
        # A step ahead: loads whose address waits for another load are pipelined badly.
        following = key + BLOCK_N
        next_block = tl.load(table + following // BLOCK_SIZE, mask=following < high, other=0)
        k = tl.load(
            kv_ptr + at[None, :] + column[:, None],
            mask=known[None, :] & in_head[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            offset = key - start
            bit = (bits[:, None] >> tl.minimum(tl.maximum(offset, 0), 63)[None, :]) & 1
            in_tree = (offset < 0)[None, :] | ((offset < 64)[None, :] & (bit == 1))
            causal = key[None, :] <= last_key[:, None]
            visible = tl.where((bits == -1)[:, None], causal, in_tree)
        else:
            visible = key[None, :] <= last_key[:, None]
        visible = visible & (known & (key >= first_key))[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row may see none of these keys: -inf less -inf is NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(best - pivot)
        # Keys beyond the end may never have been written; NaN times zero is NaN.
        v = tl.load(
            kv_ptr + value_offset + at[:, None] + column[None, :],
            mask=known[:, None] & in_head[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
        key = following
        block = next_block

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    whole = valid[:, None] & in_head[None, :]
    if not SPLIT:
        target = out_ptr + place[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=whole)
    else:
        part = place * splits + split
        tl.store(lse_ptr + part, best + tl.log2(total), mask=valid)
        tl.store(part_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=whole)


@jit(do_not_specialize=["splits"])
def combine_kernel(
    part_ptr, lse_ptr, out_ptr, splits,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED)
    column = tl.arange(0, WIDTH)
    lse = tl.load(lse_ptr + place * splits + split, mask=split < splits, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    part = tl.load(
        part_ptr + (place * splits + split)[:, None] * HEAD_DIM + column[None, :],
        mask=(split < splits)[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    target = out_ptr + place * HEAD_DIM + column
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of a launch. ``tiles``: tiles of every span, or 0 where programs search theirs."""

    block_m: int
    block_n: int
    splits: int
    tiles: int
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
) -> AttentionPlan:
    """Sizes for ``rows`` rows in ``spans`` spans of at most ``max_rows``, over at most
    ``max_keys`` keys, on ``sms`` multiprocessors with ``shared`` bytes of memory a program.

    Keys are split only until there is a program for each multiprocessor (two of small heads), so
    that a large batch pays nothing for it. A program alone on its multiprocessor keeps more keys in
    flight.
    """
    group = shape.heads // shape.kv_heads
    narrow = shape.head_dim <= 128
    roomy = shared >= 160_000
    # Several programs fit a multiprocessor then, and wait for memory rather than keep it busy.
    light = shape.head_dim <= 64 and itemsize == 2 and roomy
    largest = min(max_rows, rows) * group
    if light and largest <= 64:
        # Few drafts: most spans are shorter than the longest, which may take two tiles.
        largest = min(largest, -(-rows // spans) * group)
    block_m = next_power_of_2(max(group, min(largest, 128 if narrow else 64)), 16)
    per_tile = block_m // group
    tiles = -(-min(max_rows, rows) // per_tile)
    # No partition of the rows into spans has more tiles than this.
    ragged = min(rows, (rows + spans * (per_tile - 1)) // per_tile)
    direct = tiles == 1 or spans * tiles <= ragged
    programs = spans * tiles if direct else ragged
    unsplit = max(1, min(ragged, programs)) * shape.kv_heads
    wanted = min(sms // unsplit, MAX_SPLITS)
    block_n, stages = (64 if narrow else 32), 2
    # All borders are where measurements changed sides on an H100 or H200 (docs/log.md).
    if light:
        wanted = min(2 * sms // unsplit, LIGHT_SPLITS)
        stages = 4 if unsplit <= 3 * sms else 3
    elif narrow and itemsize == 2 and (roomy or block_m <= 64):
        if roomy and block_m == 16 and unsplit >= 3 * sms:
            block_n = 32
        elif roomy and block_m < 64 and wanted < 8 and unsplit < 6 * sms:
            block_n = 128
        stages = 3 if block_n < 128 or unsplit <= sms else 2
        if roomy and block_m == 16 and wanted >= 8 and rows > spans:
            stages = 4  # One row alone gains nothing by it.
    splits = max(1, min(wanted, -(-max_keys // block_n)))
    return AttentionPlan(
        block_m=block_m,
        block_n=block_n,
        splits=splits,
        tiles=tiles if direct else 0,
        programs=programs,
        num_warps=8 if block_m >= 128 else 4,
        num_stages=stages,
    )


def span_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    plan: AttentionPlan | None = None,
    longest: int = NO_LIMIT,
) -> torch.Tensor:
    """q [N, heads, head_dim] bf16 or fp32, contiguous; kv [2, blocks, kv_heads, block_size,
    head_dim] of the same dtype -> [N, heads, head_dim], unspecified for padding rows and for
    spans of more than ``longest`` rows.

    Scores and softmax are fp32; in bf16 the weights are rounded before they meet the values.
    Rows of one span are neighbours, in the order of their keys. ``head_dim`` up to 256.
    """
    spans = span_table(batch)
    rows, entries = q.shape[0], spans.rows.shape[0]
    if plan is None:
        plan = plan_attention(
            rows,
            entries,
            min(spans.max_rows, longest),
            batch.max_keys,
            shape,
            processors(q.device),
            q.dtype.itemsize,
            shared_memory(q.device),
        )
    out = torch.empty_like(q)
    part, lse = None, None
    if plan.splits > 1:
        size = (rows, shape.heads, plan.splits)
        part = q.new_empty((*size, shape.head_dim), dtype=torch.float32)
        lse = q.new_empty(size, dtype=torch.float32)
    width = next_power_of_2(shape.head_dim, 16)
    _launch(q, kv, out, part, lse, spans, batch, shape, plan, width, longest)
    if plan.splits > 1:
        combine_kernel[(rows * shape.heads,)](
            part, lse, out, plan.splits,
            shape.head_dim, width, next_power_of_2(plan.splits),
            num_warps=2, **pdl(q.device),
        )  # fmt: skip
    return out


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    part: torch.Tensor | None,
    lse: torch.Tensor | None,
    spans: SpanTable,
    batch: FlatBatch,
    shape: AttentionShape,
    plan: AttentionPlan,
    width: int,
    longest: int,
) -> None:
    entries = spans.rows.shape[0]
    attention_kernel[(plan.programs, shape.kv_heads, plan.splits)](
        q, kv, out, part, lse, spans.first_row, spans.rows, spans.slot, entries,
        batch.block_tables, batch.block_tables.stride(0), batch.span_start, batch.key_index,
        batch.mask, kv.stride(0), shape.scale * LOG2_E, plan.splits, plan.tiles, batch.first_key,
        longest,
        shape.heads, shape.kv_heads, shape.head_dim, kv.shape[3], width,
        plan.block_m, plan.block_n, plan.splits > 1, not plan.tiles,
        1 if plan.tiles else next_power_of_2(entries),
        batch.mask is not None,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **pdl(q.device),
    )  # fmt: skip
