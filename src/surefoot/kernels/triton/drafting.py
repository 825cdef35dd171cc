"""What a drafter does beside its network's products, one small kernel each.

Twins: ``kernels.drafting``. Those of greedy drafts are launched as ``pdl`` says; what they write of
batches is read behind a product or ``entry_inputs_kernel``, when it is complete.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels import drafting as reference
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.drafting import EntryWeights, LiveRows, Scratch
from surefoot.kernels.draws import Draws
from surefoot.kernels.triton.argmax import BLOCK as ARGMAX_PART
from surefoot.kernels.triton.argmax import largest, partial_argmax_kernel, parts_of
from surefoot.kernels.triton.filters import depth_of, find_limits, scores_of
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.noise import gumbel, noise_words_at
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

PART = 2048
"""Logits that a program compares."""
PAGES = 256
"""Entries of a block table that a program writes at a time."""


@jit
def entry_inputs_kernel(
    token_ptr, token_stride, table_ptr, embedding_norm_ptr, feature_ptr, hidden_norm_ptr,
    out_ptr, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, half): the embedding, then the feature. Lets the next kernel in as a product
    does: ``qkv_kernel`` may follow, which reads the batch before it waits."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if half == 0:
        weight = tl.load(embedding_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        await_inputs(PDL)
        release_next(PDL)
        token = tl.load(token_ptr + row * token_stride).to(tl.int64)
        x = tl.load(table_ptr + token * width + column, mask=inside, other=0.0)
    else:
        weight = tl.load(hidden_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        await_inputs(PDL)
        release_next(PDL)
        x = tl.load(feature_ptr + row * width + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    place = out_ptr + (row * 2 + half) * width + column
    tl.store(place, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def entry_inputs(
    weights: EntryWeights, tokens: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """``kernels.drafting.entry_inputs``; ``tokens`` may be strided."""
    rows, width = features.shape
    features = features.contiguous()
    out = features.new_empty((rows, 2 * width))
    block = next_power_of_2(width)
    entry_inputs_kernel[(rows, 2)](
        tokens, tokens.stride(0), weights.table, weights.embedding_norm, features,
        weights.hidden_norm, out, width, weights.eps, block,
        num_warps=min(8, max(1, block // 256)), **pdl(features.device),
    )  # fmt: skip
    return out


@jit(do_not_specialize=["spans"])
def shift_kernel(
    feature_ptr, before_ptr, last_of_block_ptr, width, row_slot_ptr, key_ptr,
    tables_ptr, table_stride, row_ptr, count_ptr, spans, shifted_ptr, position_ptr, last_position,
    BLOCK_SIZE: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; the first of a span replaces ``before`` when it has read it."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot_ptr + row)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < width
    previous = tl.load(row_slot_ptr + row - 1, mask=row > 0, other=-1)
    key = tl.load(key_ptr + row)
    tl.store(position_ptr + row, tl.minimum(tl.maximum(key - 1, 0), last_position))
    if previous == slot:
        x = tl.load(feature_ptr + (row - 1) * width + column, mask=inside)
        tl.store(shifted_ptr + row * width + column, x, mask=inside)
    else:
        x = tl.load(before_ptr + slot * width + column, mask=inside)
        tl.store(shifted_ptr + row * width + column, x, mask=inside)
        entry = tl.arange(0, SPANS)
        first = tl.load(row_ptr + entry, mask=entry < spans, other=-1)
        count = tl.load(count_ptr + entry, mask=entry < spans, other=0)
        live = tl.max(tl.where((first == row) & (count > 0), first + count - 1, -1), axis=0)
        if live >= 0:
            x = tl.load(feature_ptr + live * width + column, mask=inside)
            tl.store(before_ptr + slot * width + column, x, mask=inside)
    if key % BLOCK_SIZE == BLOCK_SIZE - 1:
        block = tl.load(tables_ptr + slot * table_stride + key // BLOCK_SIZE).to(tl.int64)
        x = tl.load(feature_ptr + row * width + column, mask=inside)
        tl.store(last_of_block_ptr + block * width + column, x, mask=inside)


def shift_features(
    features: torch.Tensor,
    before: torch.Tensor,
    last_of_block: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    batch: FlatBatch,
    block_size: int,
    last_position: int,
    above: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.drafting.shift_features``; for a tree by its twin."""
    if above is not None or last is not None:
        return reference.shift_features(
            features, before, last_of_block, slots, rows, counts, batch, block_size,
            last_position, above, last,
        )  # fmt: skip
    count, width = features.shape
    features = features.contiguous()
    shifted, positions = torch.empty_like(features), torch.empty_like(batch.key_index)
    block = next_power_of_2(width)
    shift_kernel[(count,)](
        features, before, last_of_block, width, batch.row_slot, batch.key_index,
        batch.block_tables, batch.block_tables.stride(0), rows, counts, rows.shape[0],
        shifted, positions, last_position,
        block_size, next_power_of_2(rows.shape[0]), block,
        num_warps=min(8, max(1, block // 512)), **pdl(features.device),
    )  # fmt: skip
    return shifted, positions


@jit(
    do_not_specialize=["first_block", "scratch_blocks", "context", "steps", "requests", "pages"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def live_rows_kernel(
    slots_ptr, requests, before_ptr, width, history_ptr, history_stride, length_ptr,
    tables_ptr, table_stride, table_width, first_block, scratch_blocks, steps, last_position,
    context, token_ptr, feature_ptr, key_ptr, position_ptr, out_tables_ptr, out_stride, pages,
    lengths_ptr,
    BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    current = tl.maximum(length - 1, 1)
    tl.store(token_ptr + row, tl.load(history_ptr + slot * history_stride + current))
    fits = tl.minimum(tl.maximum(context - length + 1, 0), steps)
    tl.store(lengths_ptr + row, fits)
    step = tl.arange(0, STEPS)
    key = current + step
    position = tl.minimum(tl.maximum(key - 1, 0), last_position)
    tl.store(key_ptr + step * requests + row, key, mask=step <= steps)
    tl.store(position_ptr + step * requests + row, position, mask=step <= steps)
    for base in range(0, pages, PAGES):
        page = base + tl.arange(0, PAGES)
        beyond = page - ((current - 1) // BLOCK_SIZE + 1)
        own = tl.load(
            tables_ptr + slot * table_stride + tl.minimum(page, table_width - 1),
            mask=page < pages, other=0,
        )  # fmt: skip
        scratch = first_block + slot * scratch_blocks
        scratch = scratch + tl.minimum(tl.maximum(beyond, 0), scratch_blocks - 1)
        chosen = tl.where(beyond < 0, own, scratch.to(tl.int32))
        tl.store(out_tables_ptr + row * out_stride + page, chosen, mask=page < pages)
    column = tl.arange(0, BLOCK)
    x = tl.load(before_ptr + slot * width + column, mask=column < width)
    tl.store(feature_ptr + row * width + column, x, mask=column < width)


def live_rows(
    slots: torch.Tensor,
    before: torch.Tensor,
    history: torch.Tensor,
    length: torch.Tensor,
    block_tables: torch.Tensor,
    scratch: Scratch,
    steps: int,
    last_position: int,
    context: int,
) -> LiveRows:
    """``kernels.drafting.live_rows``."""
    count, width = slots.shape[0], before.shape[1]
    # Attention is compiled for rows of tables that lie 64 bytes apart or a multiple of it.
    tables = block_tables.new_empty((count, cdiv(scratch.pages, 16) * 16))
    live = LiveRows(
        tokens=slots.new_empty(count),
        features=before.new_empty((count, width)),
        keys=slots.new_empty((steps + 1, count)),
        positions=slots.new_empty((steps + 1, count)),
        tables=tables[:, : scratch.pages],
        lengths=slots.new_empty(count),
    )
    live_rows_kernel[(count,)](
        slots, count, before, width, history, history.stride(0), length,
        block_tables, block_tables.stride(0), block_tables.shape[1], scratch.first, scratch.blocks,
        steps, last_position, context, live.tokens, live.features, live.keys, live.positions,
        tables, tables.stride(0), scratch.pages, live.lengths,
        scratch.block_size, next_power_of_2(steps + 1), PAGES, next_power_of_2(width),
        num_warps=4, **pdl(slots.device),
    )  # fmt: skip
    return live


@jit
def partial_likeliest_kernel(
    logits_ptr, stride, width, value_ptr, index_ptr, total_ptr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits_ptr + row * stride + column, mask=column < width, other=float("-inf")
    )  # fmt: skip
    best, index = largest(values, column, width - 1)
    # A part may hold nothing but -inf; its sum then counts nothing.
    pivot = tl.where(best == float("-inf"), 0.0, best)
    place = row * tl.num_programs(1) + part
    tl.store(value_ptr + place, best)
    tl.store(index_ptr + place, index)
    tl.store(total_ptr + place, tl.sum(tl.exp(values - pivot), axis=0))


@jit(
    do_not_specialize=["token_stride", "chance_stride"],
    do_not_specialize_on_alignment=["token_ptr", "chance_ptr"],
)
def final_likeliest_kernel(
    value_ptr, index_ptr, total_ptr, parts, width, ids_ptr,
    token_ptr, token_stride, chance_ptr, chance_stride,
    MAPPED: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < parts
    values = tl.load(value_ptr + row * parts + part, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=inside, other=width - 1)
    totals = tl.load(total_ptr + row * parts + part, mask=inside, other=0.0)
    best, found = largest(values, index, width - 1)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(totals * tl.exp(values - pivot), axis=0)
    token = found.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row * token_stride, token)
    tl.store(chance_ptr + row * chance_stride, tl.exp(best - pivot) / total)


def likeliest(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> None:
    """``kernels.drafting.likeliest``."""
    rows, width = logits.shape
    size = rows, cdiv(width, PART)
    values, totals = logits.new_empty(size), logits.new_empty(size)
    index = torch.empty(size, dtype=torch.int32, device=logits.device)
    partial_likeliest_kernel[size](
        logits, logits.stride(0), width, values, index, totals, PART,
        num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    final_likeliest_kernel[(rows,)](
        values, index, totals, size[1], width, ids, tokens, tokens.stride(0),
        chances, chances.stride(0), ids is not None, next_power_of_2(size[1]),
        num_warps=1, **pdl(logits.device),
    )  # fmt: skip


@jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def draw_part_kernel(
    logits_ptr, largest_ptr, width, parts, ids_ptr, slot_ptr, position_ptr, temperature_ptr,
    min_p_ptr, limit_ptr, seed_ptr, choice_ptr, value_ptr, index_ptr, total_ptr,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``sampling.draw_kernel`` with the noise of the target's ids, and each part's share of the
    probabilities' sum. A greedy row's scores are its logits."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scores = scores_of(logits_ptr, largest_ptr, parts, temperature, row, column, width, PARTS)
    place = row * parts + part
    tl.store(total_ptr + place, tl.sum(tl.exp(scores), axis=0))
    if temperature == 0:
        values = scores
    else:
        kept = inside & (scores >= tl.log(tl.load(min_p_ptr + slot)))
        kept = kept & (depth_of(scores) <= tl.load(limit_ptr + row))
        token = column.to(tl.int64)
        if MAPPED:
            token = tl.load(ids_ptr + column, mask=inside, other=0)
        words = noise_words_at(
            tl.load(seed_ptr + slot), tl.load(choice_ptr + slot), tl.load(position_ptr + row), token
        )  # fmt: skip
        values = tl.where(kept, scores + gumbel(words), float("-inf"))
    best, index = largest(values, column, width - 1)
    tl.store(value_ptr + place, best)
    tl.store(index_ptr + place, index)


@jit(
    do_not_specialize=["token_stride", "chance_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr", "token_ptr", "chance_ptr"],
)
def draw_final_kernel(
    value_ptr, index_ptr, total_ptr, largest_ptr, logits_ptr, parts, width, ids_ptr, slot_ptr,
    position_ptr, temperature_ptr, history_ptr, history_stride,
    token_ptr, token_stride, chance_ptr, chance_stride,
    MAPPED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < parts
    values = tl.load(value_ptr + row * parts + part, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=inside, other=width - 1)
    total = tl.sum(tl.load(total_ptr + row * parts + part, mask=inside, other=0.0), axis=0)
    _, found = largest(values, index, width - 1)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    score = scores_of(logits_ptr, largest_ptr, parts, temperature, row, found, width, PADDED)
    token = found.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row * token_stride, token)
    tl.store(chance_ptr + row * chance_stride, tl.exp(score) / total)
    tl.store(history_ptr + slot * history_stride + tl.load(position_ptr + row), token)


def draw_drafts(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    draws: Draws,
    history: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> bool:
    """``Backend.draw_drafts``."""
    rows, width = logits.shape
    maxima, index = parts_of(rows, width, logits.device)
    parts = maxima.shape[1]
    partial_argmax_kernel[(rows, parts)](
        logits, logits.stride(0), width, maxima, index, ARGMAX_PART, num_warps=4
    )
    limit = find_limits(logits, maxima, draws.slots, draws, True, True, True, ARGMAX_PART)
    values, totals = torch.empty_like(maxima), torch.empty_like(maxima)
    padded = next_power_of_2(parts)
    draw_part_kernel[(rows, parts)](
        logits, maxima, width, parts, ids, draws.slots, draws.positions, draws.temperature,
        draws.min_p, limit, draws.seed, draws.choice, values, index, totals,
        ids is not None, ARGMAX_PART, padded, num_warps=4,
    )  # fmt: skip
    draw_final_kernel[(rows,)](
        values, index, totals, maxima, logits, parts, width, ids, draws.slots, draws.positions,
        draws.temperature, history, history.stride(0), tokens, tokens.stride(0),
        chances, chances.stride(0), ids is not None, padded, num_warps=1,
    )  # fmt: skip
    return True
