"""Logprobs and grammar masks over a vocabulary, in parts that keep many processors busy.

Twins: ``kernels.logprobs.row_logprobs``, ``kernels.draws.mask_tokens``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.draws import TokenMasks
from surefoot.kernels.logprobs import ScoredSpans
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

BLOCK = 4096


@jit
def take_largest(values, index, none):
    """(Largest of ``values``, its index, the values without it); of equals the lowest index."""
    best = tl.max(values, axis=0)
    at = tl.min(tl.where(values == best, index, none), axis=0)
    return best, at, tl.where(index == at, float("-inf"), values)


@jit
def scored_row(
    item, first_ptr, place_ptr, step_ptr, stride, count, rows,
    SPANS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The row of a scored item: as ``ScoredSpans`` has it with ``SPANS``, else the item itself."""
    if SPANS:
        place, step = tl.load(place_ptr + item // count), item % count
        if STEPS:
            step = tl.load(step_ptr + place * stride + step)
        item = tl.minimum(tl.load(first_ptr + place) + step, rows - 1)
    return item


@jit
def part_scores_kernel(
    logits_ptr, tokens_ptr, sums_ptr, value_ptr, index_ptr, vocab, parts,
    first_ptr, place_ptr, step_ptr, stride, count, rows,
    SPANS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of a part of a scored row: its maximum, the sum of exponentials against it, how many are
    larger than the chosen token's logit, and its ``WIDTH`` largest."""
    release_next(PDL)
    await_inputs(PDL)
    item = tl.program_id(0).to(tl.int64)
    row = scored_row(item, first_ptr, place_ptr, step_ptr, stride, count, rows, SPANS, STEPS)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    chosen = tl.load(logits_ptr + row * vocab + tl.load(tokens_ptr + row))
    most = tl.max(values, axis=0)
    pivot = tl.where(most == float("-inf"), 0.0, most)
    place = sums_ptr + (item * parts + part) * 3
    tl.store(place, most)
    tl.store(place + 1, tl.sum(tl.exp(values - pivot), axis=0))
    tl.store(place + 2, tl.sum((values > chosen).to(tl.float32), axis=0))
    for rank in range(WIDTH):
        best, at, values = take_largest(values, column, vocab)
        entry = (item * parts + part) * WIDTH + rank
        tl.store(value_ptr + entry, best)
        tl.store(index_ptr + entry, at)


@jit
def row_scores_kernel(
    logits_ptr, tokens_ptr, sums_ptr, value_ptr, index_ptr, vocab, parts,
    first_ptr, place_ptr, step_ptr, stride, count, rows, out_ptr,
    SPANS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The parts of a scored row together."""
    release_next(PDL)
    await_inputs(PDL)
    item = tl.program_id(0).to(tl.int64)
    row = scored_row(item, first_ptr, place_ptr, step_ptr, stride, count, rows, SPANS, STEPS)
    part = tl.arange(0, PARTS)
    place = sums_ptr + (item * parts + part) * 3
    inside = part < parts
    most = tl.load(place, mask=inside, other=float("-inf"))
    sums = tl.load(place + 1, mask=inside, other=0.0)
    larger = tl.load(place + 2, mask=inside, other=0.0)
    highest = tl.max(most, axis=0)
    normaliser = tl.log(tl.sum(sums * tl.exp(most - highest), axis=0)) + highest
    chosen = tl.load(logits_ptr + row * vocab + tl.load(tokens_ptr + row))
    out = out_ptr + item * (2 + 2 * WIDTH)
    tl.store(out, (chosen - normaliser).to(tl.int32, bitcast=True))
    tl.store(out + 1, tl.sum(larger, axis=0).to(tl.int32) + 1)
    candidate = tl.arange(0, CANDIDATES)
    entry = item * parts * WIDTH + candidate
    given = candidate < parts * WIDTH
    values = tl.load(value_ptr + entry, mask=given, other=float("-inf"))
    index = tl.load(index_ptr + entry, mask=given, other=vocab)
    for rank in range(WIDTH):
        best, at, values = take_largest(values, index, vocab)
        tl.store(out + 2 + rank, at)
        tl.store(out + 2 + WIDTH + rank, (best - normaliser).to(tl.int32, bitcast=True))


def row_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, width: int, spans: ScoredSpans | None = None
) -> torch.Tensor:
    """As ``kernels.logprobs.row_logprobs``; logits contiguous."""
    (rows, vocab), device = logits.shape, logits.device
    scored, which = rows, (None, None, None, 0, 1, rows)
    if spans is not None:
        steps, count = spans.steps, spans.count
        scored = len(spans.places) * count
        stride = 0 if steps is None else steps.stride(0)
        which = spans.first, spans.places, steps, stride, count, rows
    width, parts = min(width, vocab), cdiv(vocab, BLOCK)
    sums = torch.empty((scored, parts, 3), dtype=torch.float32, device=device)
    values = torch.empty((scored, parts, width), dtype=torch.float32, device=device)
    index = torch.empty((scored, parts, width), dtype=torch.int32, device=device)
    out = torch.empty((scored, 2 + 2 * width), dtype=torch.int32, device=device)
    launch, kinds = pdl(device), (spans is not None, which[2] is not None)
    arguments = logits, tokens, sums, values, index, vocab, parts, *which
    part_scores_kernel[(scored, parts)](
        *arguments, *kinds, width, BLOCK, num_warps=8, enable_fp_fusion=False, **launch
    )
    row_scores_kernel[(scored,)](
        *arguments, out, *kinds, width, next_power_of_2(parts),
        next_power_of_2(parts * max(width, 1)), num_warps=4, enable_fp_fusion=False, **launch,
    )  # fmt: skip
    return out


@jit
def mask_kernel(
    logits_ptr, vocab, bits_ptr, words, entries, slot_ptr, first_ptr, spans, masked_ptr,
    BLOCK: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part)."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    if tl.load(masked_ptr + slot) > 0:
        span = tl.arange(0, SPANS)
        first = tl.load(first_ptr + span, mask=span < spans, other=0)
        place = row - tl.max(tl.where(first <= row, first, 0), axis=0)
        mask = slot * entries + tl.minimum(place, entries - 1)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        word = tl.load(bits_ptr + mask * words + column // 32, mask=inside, other=-1)
        forbidden = (word >> (column % 32)) & 1 == 0
        minus = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits_ptr + row * vocab + column, minus, mask=inside & forbidden)


def mask_tokens(logits: torch.Tensor, masks: TokenMasks) -> None:
    """As ``kernels.draws.mask_tokens``."""
    (rows, vocab), spans = logits.shape, len(masks.first)
    mask_kernel[(rows, cdiv(vocab, BLOCK))](
        logits, vocab, masks.bits, masks.bits.shape[1], masks.entries, masks.slots, masks.first,
        spans, masks.masked, BLOCK, next_power_of_2(spans), num_warps=8, **pdl(logits.device),
    )  # fmt: skip
