"""Drafts of which each depends on the one before it: two kernels a draft, whoever draws and
whatever changes logits.

Twins: ``kernels.drafting.Drafting.markov``; with draws ``add_looked_up``, then ``Backend.adjust``
and ``Drafting.draw``, step by step. Launched as ``pdl`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments, Draws
from surefoot.kernels.triton.argmax import largest
from surefoot.kernels.triton.changes import PENALISED, changes_of
from surefoot.kernels.triton.drawn_picks import halved
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.markov import MOST_PARTS, MOST_ROWS, markov_kernel, shape_of
from surefoot.kernels.triton.noise import gumbel, words_of_columns
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.penalties import COUNTED
from surefoot.kernels.triton.picks import room_for_largest

if TYPE_CHECKING:
    from surefoot.kernels.triton.products import TritonLinear

MOST_DRAWN = 16384
"""Columns, at most, of a step that draws."""
NOISE_BLOCK = 1024
"""Variates of a program."""


@jit
def best_kept(
    noised, scores, places, likely_noised, likely, likely_places, width, total, min_p, top_p, top_k
):  # fmt: skip
    """(The place of the best noised score that the filters keep, its score) of a row that draws, of
    each part of which is known the best noised one and the likeliest one. Scores are at most 0,
    the sum of all exponentials is ``total``. Borders are found among the likeliest ones."""
    masses = tl.exp(likely)
    floor = tl.log(min_p)
    if top_k < width:
        floor = tl.maximum(floor, halved(likely, tl.full(likely.shape, 1.0, tl.float32), top_k))
    mass = total
    if (min_p > 0) | (top_k < width):
        mass = tl.sum(tl.where(likely >= floor, masses, 0.0), axis=0)
        noised = tl.where(scores >= floor, noised, float("-inf"))
        likely_noised = tl.where(likely >= floor, likely_noised, float("-inf"))
    wanted = tl.where(top_p < 1, top_p * mass, float("inf"))
    # One that better ones leave no room for rules out all that are no better. The best of all has
    # none above it.
    better, score, found = wanted, wanted, tl.max(places, axis=0)
    while better >= wanted:
        best = tl.max(tl.maximum(noised, likely_noised), axis=0)
        place = tl.where(noised == best, places, width - 1)
        place = tl.minimum(place, tl.where(likely_noised == best, likely_places, width - 1))
        found = tl.min(place, axis=0)
        own = tl.where(places == found, scores, float("-inf"))
        own = tl.maximum(own, tl.where(likely_places == found, likely, float("-inf")))
        score = tl.max(own, axis=0)
        # Of a row of NaN, where none is found, this ends.
        better = tl.where(best > float("-inf"), tl.sum(tl.where(likely > score, masses, 0.0)), 0.0)
        noised = tl.where(scores > score, noised, float("-inf"))
        likely_noised = tl.where(likely > score, likely_noised, float("-inf"))
    return found, score


@jit(
    do_not_specialize=["token_stride", "chance_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr", "token_ptr", "chance_ptr"],
)
def markov_pick_kernel(
    value_ptr, index_ptr, total_ptr, place_ptr, number_ptr, parts, width, ids_ptr, slot_ptr,
    temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, kind_ptr, count_ptr, position_ptr,
    history_ptr, history_stride, token_ptr, token_stride, chance_ptr, chance_stride,
    PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the token, from what ``markov_kernel`` has left. It is entered in the history,
    if there is one, and counted for the next one's penalties."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < parts
    place = row * parts + part
    values = tl.load(value_ptr + place, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + place, mask=inside, other=width - 1)
    totals = tl.load(total_ptr + place, mask=inside, other=0.0)
    best, found = largest(values, index, width - 1)
    score = 0.0
    lower = values - tl.where(best == float("-inf"), 0.0, best)
    if history_ptr is not None:
        slot = tl.load(slot_ptr + row)
    if number_ptr is not None:
        temperature = tl.load(temperature_ptr + slot)
        lower = lower / tl.where(temperature > 0, temperature, 1.0)
    total = tl.sum(totals * tl.exp(lower), axis=0)
    if number_ptr is not None:
        every = tl.num_programs(0).to(tl.int64) * parts
        if temperature > 0:
            inside &= lower > float("-inf")
            noised = tl.load(number_ptr + place, mask=inside, other=float("-inf"))
            scores = tl.load(number_ptr + every + place, mask=inside, other=float("-inf"))
            likely = tl.load(number_ptr + 2 * every + place, mask=inside, other=float("-inf"))
            places = tl.load(place_ptr + place, mask=inside, other=width - 1)
            found, score = best_kept(
                noised + lower, scores + lower, places, likely + lower, lower, index, width, total,
                tl.load(min_p_ptr + slot), tl.load(top_p_ptr + slot), tl.load(top_k_ptr + slot),
            )  # fmt: skip
    token = found.to(tl.int64)
    if ids_ptr is not None:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row * token_stride, token)
    tl.store(chance_ptr + row * chance_stride, tl.exp(score) / total)
    if history_ptr is not None:
        tl.store(history_ptr + slot * history_stride + tl.load(position_ptr + row), token)
    if kind_ptr is not None:
        penalised = tl.load(kind_ptr + row) & PENALISED != 0
        count_ptr += row * width + found
        count = tl.load(count_ptr, mask=penalised, other=0)
        tl.store(count_ptr, count + COUNTED, mask=penalised)


@jit
def noise_kernel(
    noise_ptr, width, requests, ids_ptr, slot_ptr, position_ptr, temperature_ptr, seed_ptr,
    choice_ptr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of a step, part): what ``noise_of`` says, but for greedy rows."""
    release_next(PDL)
    await_inputs(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row % requests)
    if tl.load(temperature_ptr + slot) != 0:
        seed, choice = tl.load(seed_ptr + slot), tl.load(choice_ptr + slot)
        position = tl.load(position_ptr + row)
        column = part * BLOCK + tl.arange(0, BLOCK)
        words = words_of_columns(
            seed, choice, position, ids_ptr, column, width, part * BLOCK, MAPPED, BLOCK
        )  # fmt: skip
        tl.store(noise_ptr + row * width + column, gumbel(words), mask=column < width)


def noise_of(
    draws: Draws, positions: torch.Tensor, ids: torch.Tensor | None, logits: torch.Tensor
) -> torch.Tensor:
    """Noise of ``logits`` [n, B, m] at ``positions`` int64 [n, B], float32, as ``draw`` has it.
    Made for all steps at once, so that none of them waits for it."""
    noise = torch.empty_like(logits)
    steps, requests, width = logits.shape
    noise_kernel[(steps * requests, cdiv(width, NOISE_BLOCK))](
        noise, width, requests, ids, draws.slots, positions, draws.temperature, draws.seed,
        draws.choice, ids is not None, NOISE_BLOCK, num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    return noise


def walk(
    logits: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    current: torch.Tensor,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor | None,
    drawn: tuple[Draws, Adjustments, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """``Drafting.markov`` with a table ``before`` [vocabulary, rank] and ``after`` [m, rank]; where
    tokens are ``drawn``, how they are, their positions, and the history."""
    (_, requests, width), device = logits.shape, logits.device
    shape = shape_of(requests, width, before.shape[1])
    padded = next_power_of_2(shape.parts)
    if chances is None:
        chances = torch.empty(tokens.shape, device=device)
    left: list[torch.Tensor | None] = [
        *room_for_largest(requests, shape.parts, device), None, None
    ]  # fmt: skip
    slots = temperature = noise = positions = history = None
    filters, changes = (None,) * 3, (None,) * 6
    if drawn is not None:
        draws, adjustments, positions, history = drawn
        slots = draws.slots
        if adjustments.adjusts:
            changes = changes_of(adjustments, width)
        if draws.noise:
            noise, temperature = noise_of(draws, positions, ids, logits), draws.temperature
            filters = draws.min_p, draws.top_p, draws.top_k
            room = requests, shape.parts
            left[3] = torch.empty(room, dtype=torch.int32, device=device)
            left[4] = torch.empty((3, *room), device=device)
    for step, row in enumerate(logits):
        markov_kernel[shape[:2]](
            row, width, current, requests, before, after, None, *left, slots, temperature,
            None if noise is None else noise[step], *changes, *shape.constants,
            num_warps=shape.num_warps, **pdl(device),
        )  # fmt: skip
        current, chance = tokens[step], chances[step]
        markov_pick_kernel[(requests,)](
            *left, shape.parts, width, ids, slots, temperature, *filters, *changes[:2],
            None if positions is None else positions[step],
            history, 0 if history is None else history.stride(0),
            current, current.stride(0), chance, chance.stride(0), padded,
            num_warps=1 if padded <= MOST_PARTS else 4, **pdl(device),
        )  # fmt: skip


def draw_markov(
    logits: torch.Tensor,
    before: torch.Tensor,
    after: TritonLinear,
    current: torch.Tensor,
    ids: torch.Tensor | None,
    draws: Draws,
    adjustments: Adjustments,
    positions: torch.Tensor,
    history: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor | None,
) -> bool:
    """``Drafting.draw_markov`` with a table ``before`` [vocabulary, rank]. Of more requests or
    tokens, several kernels a step are as fast or faster."""
    if len(current) > MOST_ROWS or logits.shape[2] > MOST_DRAWN:
        return False
    drawn = draws, adjustments, positions, history
    walk(logits, before, after.weight, current, ids, tokens, chances, drawn)
    return True
