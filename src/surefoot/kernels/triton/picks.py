"""Drafts from a drafter's logits: the likeliest, or drawn with the target's noise.

Twins: ``kernels.drafting.Drafting.likeliest`` and the sampler over the target's vocabulary.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.draws import Draws
from surefoot.kernels.triton.argmax import BLOCK as ARGMAX_PART
from surefoot.kernels.triton.argmax import largest, partial_argmax_kernel, parts_of
from surefoot.kernels.triton.filters import depth_of, find_limits, scores_of
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.noise import gumbel, noise_words_at
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

PART = 2048
"""Logits that a program compares."""


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
    """``kernels.drafting.Drafting.likeliest``."""
    rows, width = logits.shape
    size = rows, cdiv(width, PART)
    values, totals = logits.new_empty(size), logits.new_empty(size)
    index = torch.empty(size, dtype=torch.int32, device=logits.device)
    partial_likeliest_kernel[size](
        logits, logits.stride(0), width, values, index, totals, PART,
        num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    likeliest_of_parts(values, index, totals, width, ids, tokens, chances)


def likeliest_of_parts(
    values: torch.Tensor,
    index: torch.Tensor,
    totals: torch.Tensor,
    width: int,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> None:
    """``likeliest`` of rows of ``width`` logits, from the largest of each part of them, its index
    and the sum of the part's exponentials less the largest, [B, parts] each."""
    parts = values.shape[1]
    final_likeliest_kernel[(len(values),)](
        values, index, totals, parts, width, ids, tokens, tokens.stride(0),
        chances, chances.stride(0), ids is not None, next_power_of_2(parts),
        num_warps=1 if parts <= 128 else 4, **pdl(values.device),
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


def draw(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    draws: Draws,
    history: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> bool:
    """``kernels.drafting.Drafting.draw``."""
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
