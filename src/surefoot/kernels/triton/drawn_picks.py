"""Drafts drawn from a drafter's logits with the target's noise.

Twin: the sampler over the target's vocabulary, but for the borders of top-k and top-p, which take
two more kernels a draft to find: here they are those of the likeliest token of each ``GROUP``.
A draft that is drawn in another's place costs a row at most; what the text is, the target says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from surefoot.kernels.draws import Draws
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.noise import gumbel, words_of_columns
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

PART, GROUP = 2048, 32
"""Logits that a program reads, and those of a group, of which it leaves two: the likeliest, and the
one with the best noised score. Neighbours are in different groups, as likely tokens often are
neighbours."""
FARTHEST = tl.constexpr(32.0)
HALVINGS = tl.constexpr(16)
"""Borders are looked for among scores so far below the best, by so many halvings: to 0.0005."""


@jit
def leave_candidates(
    noised, scores, column, width, row, part, parts, place_ptr, number_ptr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of part ``part`` of a row: the numbers (noised score, score) of the best noised one and of
    the likeliest one of each group, and the places of both."""
    noised = tl.reshape(noised, [GROUP, GROUPS])
    scores = tl.reshape(scores, [GROUP, GROUPS])
    columns = tl.reshape(column, [GROUP, GROUPS])
    best, likeliest = tl.max(noised, axis=0), tl.max(scores, axis=0)
    of_best = tl.min(tl.where(noised == best[None, :], columns, width - 1), axis=0)
    of_likeliest = tl.min(tl.where(scores == likeliest[None, :], columns, width - 1), axis=0)
    drawn, likely = columns == of_best[None, :], columns == of_likeliest[None, :]
    place = (row * parts + part) * GROUPS + tl.arange(0, GROUPS)
    every = tl.num_programs(0).to(tl.int64) * parts * GROUPS
    tl.store(place_ptr + place, of_best)
    tl.store(place_ptr + every + place, of_likeliest)
    tl.store(number_ptr + place, best)
    score = tl.max(tl.where(drawn, scores, float("-inf")), axis=0)
    tl.store(number_ptr + every + place, score)
    score = tl.max(tl.where(likely, noised, float("-inf")), axis=0)
    tl.store(number_ptr + 2 * every + place, score)
    tl.store(number_ptr + 3 * every + place, likeliest)


@jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def draw_part_kernel(
    logits_ptr, stride, width, ids_ptr, slot_ptr, position_ptr, temperature_ptr, seed_ptr,
    choice_ptr, place_ptr, number_ptr, pivot_ptr, total_ptr,
    MAPPED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores are (logit - the part's largest) / temperature; a greedy row has no noise."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    block: tl.constexpr = GROUPS * GROUP
    column = part * block + tl.arange(0, block)
    logits = tl.load(logits_ptr + row * stride + column, mask=column < width, other=float("-inf"))
    pivot = tl.max(logits, axis=0)
    # A part may hold nothing but -inf.
    below = logits - tl.where(pivot == float("-inf"), 0.0, pivot)
    scores = below / tl.where(temperature == 0, 1.0, temperature)
    tl.store(pivot_ptr + row * parts + part, pivot)
    tl.store(total_ptr + row * parts + part, tl.sum(tl.exp(scores), axis=0))
    noised = scores
    if temperature != 0:
        seed, choice = tl.load(seed_ptr + slot), tl.load(choice_ptr + slot)
        position = tl.load(position_ptr + row)
        words = words_of_columns(
            seed, choice, position, ids_ptr, column, width, part * block, MAPPED, block
        )  # fmt: skip
        noised = scores + gumbel(words)
    leave_candidates(
        noised, scores, column, width, row, part, parts, place_ptr, number_ptr, GROUPS, GROUP
    )


@jit
def halved(scores, weights, wanted):
    """The largest score, about, from which on upwards the ``weights`` sum up to what is wanted."""
    low, high = -FARTHEST, 0.0
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(scores >= middle, weights, 0.0), axis=0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@jit
def candidates(
    place_ptr, number_ptr, pivot_ptr, total_ptr, parts, width, row, slot,
    temperature, min_p_ptr, top_p_ptr, top_k_ptr, most,
    GROUPS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What ``draw_part_kernel`` left of a row, as far as it passes the filters of a slot that draws
    and is among the ``most`` likeliest, about: by group, the noised scores (-inf where none does),
    the scores, and their places in the row; and the sum of all exponentials."""
    divisor = tl.where(temperature == 0, 1.0, temperature)
    group = tl.arange(0, PADDED * GROUPS)
    inside = group < parts * GROUPS
    every = (tl.zeros([], tl.int64) + tl.num_programs(0)) * parts * GROUPS
    place = row * parts * GROUPS + group
    part = tl.arange(0, PADDED)
    pivots = tl.load(pivot_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    totals = tl.load(total_ptr + row * parts + part, mask=part < parts, other=0.0)
    pivot = tl.max(pivots, axis=0)
    total = tl.sum(totals * tl.exp((pivots - pivot) / divisor), axis=0)
    lower = tl.load(
        pivot_ptr + row * parts + group // GROUPS, mask=inside, other=float("-inf")
    )  # fmt: skip
    lower = (lower - pivot) / divisor
    noised = tl.load(number_ptr + place, mask=inside, other=float("-inf")) + lower
    scores = tl.load(number_ptr + every + place, mask=inside, other=float("-inf")) + lower
    likely_noised = tl.load(number_ptr + 2 * every + place, mask=inside, other=float("-inf"))
    likely_noised += lower
    likely = tl.load(number_ptr + 3 * every + place, mask=inside, other=float("-inf")) + lower
    places = tl.load(place_ptr + place, mask=inside, other=width - 1)
    border = -FARTHEST
    if temperature != 0:
        min_p, top_p = tl.load(min_p_ptr + slot), tl.load(top_p_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        kept = total
        if min_p > 0:
            border = tl.maximum(border, tl.log(min_p))
        wanted = tl.minimum(top_k, most)
        if wanted < width:
            ones = tl.full(likely.shape, 1.0, tl.float32)
            border = tl.maximum(border, halved(likely, ones, wanted))
        if (min_p > 0) | (top_k < most):
            kept = tl.sum(tl.where(likely >= border, tl.exp(likely), 0.0), axis=0)
        if top_p < 1:
            border = tl.maximum(border, halved(likely, tl.exp(likely), top_p * kept))
        # Where the best noised one is not kept, the likeliest one may be.
        drops = scores < border
        likely_places = tl.load(place_ptr + every + place, mask=inside, other=width - 1)
        places = tl.where(drops, likely_places, places)
        noised = tl.where(drops, tl.where(likely >= border, likely_noised, float("-inf")), noised)
        scores = tl.where(drops, likely, scores)
    return noised, scores, places, total


@jit(
    do_not_specialize=["token_stride", "chance_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr", "token_ptr", "chance_ptr"],
)
def draw_final_kernel(
    place_ptr, number_ptr, pivot_ptr, total_ptr, parts, width, ids_ptr, slot_ptr, position_ptr,
    temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, history_ptr, history_stride,
    token_ptr, token_stride, chance_ptr, chance_stride,
    MAPPED: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    noised, scores, places, total = candidates(
        place_ptr, number_ptr, pivot_ptr, total_ptr, parts, width, row, slot,
        tl.load(temperature_ptr + slot), min_p_ptr, top_p_ptr, top_k_ptr, width, GROUPS, PADDED,
    )  # fmt: skip
    best = tl.max(noised, axis=0)
    found = tl.min(tl.where(noised == best, places, width - 1), axis=0)
    score = tl.max(tl.where((noised == best) & (places == found), scores, float("-inf")), axis=0)
    token = found.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row * token_stride, token)
    tl.store(chance_ptr + row * chance_stride, tl.exp(score) / total)
    tl.store(history_ptr + slot * history_stride + tl.load(position_ptr + row), token)


class DrawnParts(NamedTuple):
    """What ``draw_part_kernel`` leaves of rows of logits, as ``candidates`` reads it."""

    places: torch.Tensor
    numbers: torch.Tensor
    pivots: torch.Tensor
    totals: torch.Tensor
    parts: int
    """Of a row."""
    shape: dict[str, int]
    """Constants of the kernel that reads it, its number of warps among them."""


def drawn_parts(logits: torch.Tensor, ids: torch.Tensor | None, draws: Draws) -> DrawnParts:
    """Float32 logits [R, n] of the tokens ``ids`` int64 [n] (None: all), with the draws' noise."""
    (rows, width), groups, device = logits.shape, PART // GROUP, logits.device
    parts = cdiv(width, PART)
    pivots, totals = (torch.empty((rows, parts), device=device) for _ in range(2))
    numbers = torch.empty((4, rows, parts * groups), device=device)
    places = torch.empty((2, rows, parts * groups), dtype=torch.int32, device=device)
    padded = next_power_of_2(parts)
    # A warp by itself adds up without waiting for others.
    shape = {
        "GROUPS": groups,
        "PADDED": padded,
        "num_warps": min(8, max(1, padded * groups // 512)),
    }
    found = DrawnParts(places, numbers, pivots, totals, parts, shape)
    draw_part_kernel[(rows, parts)](
        logits, logits.stride(0), width, ids, draws.slots, draws.positions, draws.temperature,
        draws.seed, draws.choice, *found[:4],
        ids is not None, groups, GROUP, num_warps=4, **pdl(device),
    )  # fmt: skip
    return found


def draw(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    draws: Draws,
    history: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> bool:
    """``kernels.drafting.Drafting.draw``."""
    *found, shape = drawn_parts(logits, ids, draws)
    draw_final_kernel[(len(logits),)](
        *found, logits.shape[1], ids, draws.slots, draws.positions,
        draws.temperature, draws.min_p, draws.top_p, draws.top_k, history, history.stride(0),
        tokens, tokens.stride(0), chances, chances.stride(0),
        MAPPED=ids is not None, **shape, **pdl(tokens.device),
    )  # fmt: skip
    return True
