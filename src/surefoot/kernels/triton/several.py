"""Several likely tokens of each row of a drafter's logits, for trees of drafts.

Twins: ``kernels.drafting.Drafting.likeliest_several``; for ``draw_several`` the sampler's scores
with noise, but that a group of ``drawn_picks`` gives one candidate, and that borders are found
roughly, as there.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.draws import Draws
from surefoot.kernels.triton.drawn_picks import PART, candidates, drawn_parts
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

LEAST = tl.constexpr(-(1 << 63))
"""Below all keys."""


@jit
def ordered_key(values, index):
    """int64 keys of float32 values, by which the larger comes first, and of equal ones the lower
    int32 index."""
    bits = values.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@jit
def index_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@jit
def value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def write_best(
    keys, total, ids_ptr, token_ptr, score_ptr, MAPPED: tl.constexpr, COUNT: tl.constexpr
):
    """The tokens of the largest keys, the largest first, and their values less ``total``."""
    for i in range(COUNT):
        best = tl.max(keys, axis=0)
        token = index_of(best)
        if MAPPED:
            token = tl.load(ids_ptr + token)
        tl.store(token_ptr + i, token)
        tl.store(score_ptr + i, value_of(best) - total)
        keys = tl.where(keys == best, LEAST, keys)


@jit
def part_several_kernel(
    logits_ptr, stride, width, key_ptr, pivot_ptr, total_ptr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keys of the largest logits of a part, the largest one, and the sum of exponentials."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits_ptr + row * stride + column, mask=column < width, other=float("-inf")
    )  # fmt: skip
    pivot = tl.max(values, axis=0)
    # A part may hold nothing but -inf.
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
    place = row * parts + part
    tl.store(pivot_ptr + place, pivot)
    tl.store(total_ptr + place, tl.sum(tl.exp(values - pivot), axis=0))
    keys = tl.where(column < width, ordered_key(values, column), LEAST)
    for i in range(COUNT):
        best = tl.max(keys, axis=0)
        tl.store(key_ptr + place * COUNT + i, best)
        keys = tl.where(keys == best, LEAST, keys)


@jit
def final_several_kernel(
    key_ptr, pivot_ptr, total_ptr, parts, ids_ptr, token_ptr, score_ptr,
    MAPPED: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, entry = tl.arange(0, PADDED), tl.arange(0, KEYS)
    place = row * parts + part
    pivots = tl.load(pivot_ptr + place, mask=part < parts, other=float("-inf"))
    totals = tl.load(total_ptr + place, mask=part < parts, other=0.0)
    pivot = tl.max(pivots, axis=0)
    total = pivot + tl.log(tl.sum(totals * tl.exp(pivots - pivot), axis=0))
    known = parts * COUNT
    keys = tl.load(key_ptr + row * known + entry, mask=entry < known, other=LEAST)
    write_best(
        keys, total, ids_ptr, token_ptr + row * COUNT, score_ptr + row * COUNT, MAPPED, COUNT
    )


def likeliest_several(
    logits: torch.Tensor, ids: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.drafting.Drafting.likeliest_several``."""
    rows, width = logits.shape
    parts = cdiv(width, PART)
    keys = torch.empty((rows, parts, count), dtype=torch.int64, device=logits.device)
    pivots, totals = (logits.new_empty((rows, parts)) for _ in range(2))
    part_several_kernel[(rows, parts)](
        logits, logits.stride(0), width, keys, pivots, totals, count, PART,
        num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    tokens, scores = _results(logits, count)
    entries = next_power_of_2(parts * count)
    final_several_kernel[(rows,)](
        keys, pivots, totals, parts, ids, tokens, scores,
        ids is not None, count, next_power_of_2(parts), entries,
        num_warps=1 if entries <= 128 else 4, **pdl(logits.device),
    )  # fmt: skip
    return tokens, scores


@jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["slot_ptr"])
def draw_several_kernel(
    place_ptr, number_ptr, pivot_ptr, total_ptr, parts, width, ids_ptr, slot_ptr,
    temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, most, token_ptr, score_ptr,
    MAPPED: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """From what ``draw_part_kernel`` leaves."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    noised, _, places, total = candidates(
        place_ptr, number_ptr, pivot_ptr, total_ptr, parts, width, row, slot,
        temperature, min_p_ptr, top_p_ptr, top_k_ptr, most, GROUPS, PADDED,
    )  # fmt: skip
    whole = tl.log(total)
    if temperature != 0:
        highest = tl.max(noised, axis=0)
        whole = highest + tl.log(tl.sum(tl.exp(noised - highest), axis=0))
    inside = tl.arange(0, PADDED * GROUPS) < parts * GROUPS
    keys = tl.where(inside, ordered_key(noised, places), LEAST)
    write_best(
        keys, whole, ids_ptr, token_ptr + row * COUNT, score_ptr + row * COUNT, MAPPED, COUNT
    )


def draw_several(
    logits: torch.Tensor, ids: torch.Tensor | None, draws: Draws, most: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.drafting.Drafting.draw_several``."""
    *found, shape = drawn_parts(logits, ids, draws)
    tokens, scores = _results(logits, count)
    draw_several_kernel[(len(logits),)](
        *found, logits.shape[1], ids, draws.slots,
        draws.temperature, draws.min_p, draws.top_p, draws.top_k, max(most, count),
        tokens, scores, MAPPED=ids is not None, COUNT=count, **shape, **pdl(logits.device),
    )  # fmt: skip
    return tokens, scores


def _results(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = len(logits), count
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    return tokens, logits.new_empty(size)
