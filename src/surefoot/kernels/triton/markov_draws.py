"""Drawn drafts of which each depends on the one before it: two kernels a draft.

Twins: ``kernels.drafting.Drafting.add_looked_up``, then ``Backend.adjust`` and ``Drafting.draw``,
step by step. Launched as ``pdl`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments, Draws
from surefoot.kernels.triton.changes import changed, changes_of
from surefoot.kernels.triton.drawn_picks import (
    GROUP,
    draw_of_parts,
    leave_candidates,
    room_for_parts,
)
from surefoot.kernels.triton.launch import cdiv, jit
from surefoot.kernels.triton.markov import MOST_ROWS, shape_of, sums_of_tile
from surefoot.kernels.triton.noise import gumbel, words_of_columns
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

if TYPE_CHECKING:
    from surefoot.kernels.triton.products import TritonLinear

ROWS = 16
"""Of a program that draws: their candidates take as much room as the product."""
MOST_DRAWN = 16384
"""Columns, at most, of a step that draws: each part of them leaves candidates."""
NOISE_BLOCK = 1024
"""Variates of a program."""


@jit(
    do_not_specialize=["requests"],
    do_not_specialize_on_alignment=["logits_ptr", "current_ptr", "slot_ptr", "noise_ptr"],
)
def markov_draw_kernel(
    logits_ptr, width, current_ptr, requests, before_ptr, after_ptr, slot_ptr, temperature_ptr,
    noise_ptr, kind_ptr, count_ptr, shift_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    place_ptr, number_ptr, pivot_ptr, total_ptr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``markov_kernel``, then as ``changes.changed``; of these logits is left what
    ``drawn_picks.draw_part_kernel`` leaves, with noise that was made before."""
    release_next(PDL)
    part, parts = tl.program_id(0), tl.num_programs(0)
    row, inside, column, logits = sums_of_tile(
        logits_ptr, width, current_ptr, requests, before_ptr, after_ptr,
        RANK, PADDED, ROWS, COLUMNS, PDL,
    )  # fmt: skip
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    logits = changed(
        logits, row, inside, column, width, slot, kind_ptr, count_ptr, shift_ptr,
        repetition_ptr, presence_ptr, frequency_ptr,
    )  # fmt: skip
    temperature = tl.load(temperature_ptr + slot, mask=inside, other=0.0)
    pivot = tl.max(logits, axis=1)
    # A part may hold nothing but -inf.
    below = logits - tl.where(pivot == float("-inf"), 0.0, pivot)[:, None]
    scores = below / tl.where(temperature == 0, 1.0, temperature)[:, None]
    place = row.to(tl.int64) * parts + part
    tl.store(pivot_ptr + place, pivot, mask=inside)
    tl.store(total_ptr + place, tl.sum(tl.exp(scores), axis=1), mask=inside)
    noise = tl.load(
        noise_ptr + row.to(tl.int64)[:, None] * width + column[None, :],
        mask=(temperature > 0)[:, None] & (column < width)[None, :], other=0.0,
    )  # fmt: skip
    leave_candidates(
        scores + noise, scores, column, width, row, inside, part, parts, requests, place_ptr,
        number_ptr, COLUMNS // GROUP, GROUP,
    )  # fmt: skip


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
    _, requests, width = logits.shape
    if requests > MOST_ROWS or width > MOST_DRAWN:
        return False
    device = logits.device
    if chances is None:
        chances = torch.empty(tokens.shape, device=device)
    shape = shape_of(requests, width, before.shape[1], ROWS)
    columns = shape.constants[3]
    group = min(GROUP, columns)
    changes = changes_of(adjustments, width)
    found = room_for_parts(requests, shape.parts, columns // group, device)
    noise = noise_of(draws, positions, ids, logits)
    for step, row in enumerate(logits):
        markov_draw_kernel[shape[:2]](
            row, width, current, requests, before, after.weight, draws.slots, draws.temperature,
            noise[step], *changes, *found[:4], *shape.constants, group,
            num_warps=4, **pdl(device),
        )  # fmt: skip
        current = tokens[step]
        draw_of_parts(
            found, width, ids, draws, positions[step], history, current, chances[step], changes
        )
    return True
