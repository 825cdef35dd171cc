"""Drawing tokens: temperature -> min-p, top-k, top-p -> argmax of score plus Gumbel noise.

Twin: ``sampling.sampler.sample_rows``. Four kernels, whatever the rows ask for: one surveys each
part of a row (its largest logit; with top-k or top-p that of each group of ``GROUP``), one bounds
what top-k may keep, one draws for each part or lists the candidates of top-k, and one takes the
best of the parts or of the candidates that is kept. Where nobody draws, two do. Of what the product
has told (``Maxima``) nothing is looked for again: rows that only take their likeliest token are not
read, and if no logits were changed since, one kernel takes it.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels import draws as uses
from surefoot.kernels.draws import Draws
from surefoot.kernels.triton.argmax import BLOCK, largest, parts_of, reduce_parts
from surefoot.kernels.triton.filters import (
    FORBIDDEN,
    best_candidate,
    best_of_row,
    bound,
    depth_of,
    is_limited,
    kept_of_row,
    mass_of,
    row_block,
    row_maxima,
    scores_of,
)
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.noise import gumbel, noise_words
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

CHANGED = tl.constexpr(uses.CHANGED)
GROUP = 32
"""Neighbours are in different groups, as likely tokens often are neighbours."""
GROUPS = BLOCK // GROUP
RANK = 1024
"""Of the groups' largest logits, at most so many bound the candidates from below: they are as many,
at least."""
FEW, ROOM = 64, 2048
"""Candidates that are compared at once."""


@jit
def largest_told(tile_ptr, tile_index_ptr, row, tiles, part, parts, vocab, TILES: tl.constexpr):
    """The largest logit of a part of a row's tiles and its index."""
    count = tl.cdiv(tiles, parts)
    tile = part * count + tl.arange(0, TILES)
    inside = (tl.arange(0, TILES) < count) & (tile < tiles)
    values = tl.load(tile_ptr + row * tiles + tile, mask=inside, other=float("-inf"))
    index = tl.load(tile_index_ptr + row * tiles + tile, mask=inside, other=vocab - 1)
    return largest(values, index, vocab - 1)


@jit
def survey_kernel(
    logits_ptr, stride, vocab, parts, slot_ptr, temperature_ptr, top_p_ptr, top_k_ptr,
    largest_ptr, value_ptr, index_ptr, group_ptr, found_ptr,
    use_ptr, tile_ptr, tile_index_ptr, tiles,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the part's largest logit and its index; of a row with top-k or top-p
    also the largest of each group. Of others whose logits are as the product left them, its tiles
    are asked instead, up to TILES for a part, if there are any."""
    release_next(PDL)
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature, top_p = tl.load(temperature_ptr + slot), tl.load(top_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    limited = is_limited(temperature, top_k, top_p, vocab)
    place = row * parts + part
    read = slot >= 0
    if TILES > 0:
        read = limited | (tl.load(use_ptr + slot) == CHANGED)
        if not read:
            best, index = largest_told(
                tile_ptr, tile_index_ptr, row, tiles, part, parts, vocab, TILES
            )  # fmt: skip
            tl.store(largest_ptr + place, best)
            tl.store(value_ptr + place, best)
            tl.store(index_ptr + place, index)
    if read:
        block: tl.constexpr = GROUPS * GROUP
        column = part * block + tl.arange(0, block)
        logits = tl.load(
            logits_ptr + row * stride + column, mask=column < vocab, other=float("-inf")
        )  # fmt: skip
        best, index = largest(logits, column, vocab - 1)
        tl.store(largest_ptr + place, best)
        tl.store(value_ptr + place, best)
        tl.store(index_ptr + place, index)
        if limited:
            groups = tl.max(tl.reshape(logits, [GROUP, GROUPS]), axis=0)
            tl.store(group_ptr + place * GROUPS + tl.arange(0, GROUPS), groups)
            if part == 0:
                tl.store(found_ptr + row, 0)


@jit
def bound_kernel(
    vocab, parts, slot_ptr, temperature_ptr, top_k_ptr, largest_ptr, group_ptr, bound_ptr, rank,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the depth up to which scores are candidates. Each group's largest score stands
    for one token at least, so those up to which there are k groups hold the k best."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature, top_k = tl.load(temperature_ptr + slot), tl.load(top_k_ptr + slot)
    if (temperature != 0) & (top_k < vocab):
        pivot = tl.max(row_maxima(largest_ptr, row, parts, PARTS), axis=0)
        groups = row_maxima(group_ptr, row, parts * GROUPS, PARTS * GROUPS)
        depths = depth_of(scores_of(groups, pivot, temperature))
        ones = tl.full(depths.shape, 1, tl.int32)
        tl.store(bound_ptr + row, bound(depths, ones, tl.minimum(top_k, rank)))


@jit
def draw_kernel(
    logits_ptr, stride, vocab, parts, slot_ptr, position_ptr, temperature_ptr, min_p_ptr, top_p_ptr,
    top_k_ptr, seed_ptr, choice_ptr, largest_ptr, bound_ptr, value_ptr, index_ptr, mass_ptr,
    found_ptr, candidate_ptr, score_ptr,
    BLOCK: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): of a row with top-k the candidates, in any order; of others that draw
    the best noised score that passes min-p, and its index; with top-p also the sum of all
    probabilities that do. A greedy row's best are its logits, which are known."""
    release_next(PDL)
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature = tl.load(temperature_ptr + slot)
    if temperature != 0:
        pivot = tl.max(row_maxima(largest_ptr, row, parts, PARTS), axis=0)
        column, scores = row_block(
            logits_ptr, row, stride, vocab, part * BLOCK, pivot, temperature, BLOCK
        )  # fmt: skip
        floor = tl.log(tl.load(min_p_ptr + slot))
        place = row * parts + part
        if tl.load(top_k_ptr + slot) < vocab:
            depths = depth_of(scores)
            inside = (depths <= tl.load(bound_ptr + row)) & (depths < FORBIDDEN)
            count = tl.sum(inside.to(tl.int32), axis=0)
            if count > 0:
                first = tl.atomic_add(found_ptr + row, count)
                at = first + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                fits = inside & (at < ROOM)
                tl.store(candidate_ptr + row * ROOM + at, column, mask=fits)
                tl.store(score_ptr + row * ROOM + at, scores, mask=fits)
        else:
            words = noise_words(
                tl.load(seed_ptr + slot), tl.load(choice_ptr + slot), tl.load(position_ptr + row),
                part * BLOCK, BLOCK,
            )  # fmt: skip
            kept = (column < vocab) & (scores >= floor)
            noised = tl.where(kept, scores + gumbel(words), float("-inf"))
            best, index = largest(noised, column, vocab - 1)
            tl.store(value_ptr + place, best)
            tl.store(index_ptr + place, index)
            if tl.load(top_p_ptr + slot) < 1:
                tl.store(mass_ptr + place, tl.sum(mass_of(scores, scores >= floor), axis=0))


@jit
def final_kernel(
    logits_ptr, stride, vocab, parts, slot_ptr, position_ptr, temperature_ptr, min_p_ptr, top_p_ptr,
    top_k_ptr, seed_ptr, choice_ptr, largest_ptr, bound_ptr, value_ptr, index_ptr, mass_ptr,
    found_ptr, candidate_ptr, score_ptr, group_ptr, out_ptr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, FEW: tl.constexpr, ROOM: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the token."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    temperature, top_p = tl.load(temperature_ptr + slot), tl.load(top_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    part = tl.arange(0, PARTS)
    place = row * parts + part
    values = tl.load(value_ptr + place, mask=part < parts, other=float("-inf"))
    index = tl.load(index_ptr + place, mask=part < parts, other=vocab - 1)
    _, token = largest(values, index, vocab - 1)
    if is_limited(temperature, top_k, top_p, vocab):
        seed, choice = tl.load(seed_ptr + slot), tl.load(choice_ptr + slot)
        position = tl.load(position_ptr + row)
        floor = tl.log(tl.load(min_p_ptr + slot))
        maxima = row_maxima(largest_ptr, row, parts, PARTS)
        pivot = tl.max(maxima, axis=0)
        of_parts = depth_of(scores_of(maxima, pivot, temperature))
        if top_k < vocab:
            count, reach = tl.load(found_ptr + row), tl.load(bound_ptr + row)
            complete = count < 0
            if count <= FEW:
                token, complete = best_candidate(
                    candidate_ptr, score_ptr, row, count, reach, vocab, floor, top_k, top_p, seed,
                    choice, position, ROOM, FEW,
                )  # fmt: skip
            elif count <= ROOM:
                token, complete = best_candidate(
                    candidate_ptr, score_ptr, row, count, reach, vocab, floor, top_k, top_p, seed,
                    choice, position, ROOM, ROOM,
                )  # fmt: skip
            if not complete:
                token = best_of_row(
                    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, group_ptr,
                    parts * GROUPS, floor, top_k, top_p, seed, choice, position, BLOCK,
                    PARTS * GROUPS,
                )  # fmt: skip
        else:
            mass = tl.sum(tl.load(mass_ptr + place, mask=part < parts, other=0), axis=0)
            own = tl.load(logits_ptr + row * stride + token + tl.arange(0, 1))
            depth = tl.max(depth_of(scores_of(own, pivot, temperature)), axis=0)
            token = kept_of_row(
                token, depth, mass, logits_ptr, row, stride, vocab, pivot, temperature, of_parts,
                group_ptr, parts * GROUPS, floor, top_p, seed, choice, position, BLOCK,
                PARTS * GROUPS,
            )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """``Backend.draw``: float32 logits [M, vocab] without NaN, rows contiguous."""
    (rows, vocab), device = logits.shape, logits.device
    if draws.maxima is not None and not (draws.noise or draws.changed):
        return reduce_parts(*draws.maxima, vocab)
    values, indices = parts_of(rows, vocab, device)
    parts, launch = values.shape[1], pdl(device)
    padded, groups = next_power_of_2(parts), parts * GROUPS
    maxima = torch.empty_like(values)
    of_groups = values.new_empty((rows, groups))
    masses = torch.empty(values.shape, dtype=torch.int64, device=device)
    bounds, found = torch.empty((2, rows), dtype=torch.int32, device=device)
    candidates = torch.empty((rows, ROOM), dtype=torch.int32, device=device)
    scores = values.new_empty((rows, ROOM))
    out = torch.empty(rows, dtype=torch.int64, device=device)
    row = logits, logits.stride(0), vocab, parts, draws.slots
    filters = draws.min_p, draws.top_p, draws.top_k
    drawing = draws.positions, draws.temperature, *filters, draws.seed, draws.choice
    results = maxima, bounds, values, indices, masses, found, candidates, scores
    told = (None, None, None, 0, GROUP, GROUPS, 0)
    if draws.maxima is not None:
        tiles = draws.maxima.values.shape[1]
        told = (draws.use, *draws.maxima, tiles, GROUP, GROUPS, next_power_of_2(cdiv(tiles, parts)))
    survey_kernel[(rows, parts)](
        *row, draws.temperature, draws.top_p, draws.top_k, maxima, values, indices, of_groups,
        found, *told, num_warps=4, **launch,
    )  # fmt: skip
    if draws.noise:
        bound_kernel[(rows,)](
            vocab, parts, draws.slots, draws.temperature, draws.top_k, maxima, of_groups, bounds,
            min(RANK, groups // 2), GROUPS, padded,
            num_warps=4 if padded * GROUPS <= 2048 else 8, **launch,
        )  # fmt: skip
        draw_kernel[(rows, parts)](
            *row, *drawing, *results, BLOCK, ROOM, padded, num_warps=4, **launch
        )
    final_kernel[(rows,)](
        *row, *drawing, *results, of_groups, out, BLOCK, GROUPS, FEW, ROOM, padded,
        num_warps=8, **launch,
    )  # fmt: skip
    return out
