"""What the token before it says of a draft. Twin: ``kernels.drafting.Drafting.add_looked_up``.
Launched as ``pdl`` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from surefoot.kernels.triton.changes import changed
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

MOST_ROWS = 64
"""Requests of a program, at most."""
MOST_RANK = 128
"""Of more requests than that. A product by itself reads wider weights faster then."""
TILE = 16384
"""Weights of a program, at most."""
MOST_PARTS = 128
"""Parts of a row, at most, that one warp reads faster than several."""


@jit(
    do_not_specialize=["requests"],
    do_not_specialize_on_alignment=["logits_ptr", "current_ptr", "slot_ptr", "noise_ptr"],
)
def markov_kernel(
    logits_ptr, width, current_ptr, requests, before_ptr, after_ptr, sum_ptr,
    value_ptr, index_ptr, total_ptr, place_ptr, number_ptr, slot_ptr, temperature_ptr, noise_ptr,
    kind_ptr, count_ptr, shift_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows): what the tokens before say is added to logits, and what
    ``changes.changed`` says, if anything does. If there is a ``sum_ptr``, these sums are left; else
    the largest of each row of the part, its column, and the sum of all exponentials less the
    largest. Where there is noise, exponentials are by temperature, and of rows that draw is left,
    too, where the part's best noised score is, and three numbers: this score, it without noise, and
    the likeliest one's with noise. Scores are (sum - the part's largest) / temperature."""
    release_next(PDL)
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, PADDED)
    there = (column < width)[:, None] & (rank < RANK)[None, :]
    place = column.to(tl.int64)[:, None] * RANK + rank[None, :]
    # Weights are there before the token is.
    after = tl.load(after_ptr + place, mask=there, other=0.0)
    await_inputs(PDL)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < requests
    current = tl.load(current_ptr + row, mask=inside, other=0)
    before = tl.load(
        before_ptr + current[:, None] * RANK + rank[None, :],
        mask=inside[:, None] & (rank < RANK)[None, :], other=0.0,
    )  # fmt: skip
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    there = inside[:, None] & (column < width)[None, :]
    logits = tl.load(logits_ptr + at, mask=there, other=float("-inf"))
    if noise_ptr is not None:
        # Of greedy rows it may be anything.
        noise = tl.load(noise_ptr + at, mask=there, other=0.0)
    logits += tl.dot(before, tl.trans(after), input_precision="ieee")
    if sum_ptr is not None:
        tl.store(sum_ptr + at, logits, mask=there)
    else:
        if kind_ptr is not None:
            logits = changed(
                logits, row, inside, column, width, tl.load(slot_ptr + row, mask=inside, other=0),
                kind_ptr, count_ptr, shift_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            )  # fmt: skip
        best = tl.max(logits, axis=1)
        found = tl.min(tl.where(logits == best[:, None], column[None, :], width - 1), axis=1)
        # A part may hold nothing but -inf; its sum then counts nothing.
        scores = logits - tl.where(best == float("-inf"), 0.0, best)[:, None]
        place = row.to(tl.int64) * parts + part
        if noise_ptr is not None:
            slot = tl.load(slot_ptr + row, mask=inside, other=0)
            temperature = tl.load(temperature_ptr + slot, mask=inside, other=0.0)
            draws = inside & (temperature > 0)
            scores = scores / tl.where(draws, temperature, 1.0)[:, None]
            noised = scores + tl.where(draws[:, None], noise, 0.0)
            top = tl.max(noised, axis=1)
            at_top = tl.min(tl.where(noised == top[:, None], column[None, :], width - 1), axis=1)
            here = column[None, :] == at_top[:, None]
            score = tl.max(tl.where(here, scores, float("-inf")), axis=1)
            here = column[None, :] == found[:, None]
            likely = tl.max(tl.where(here, noised, float("-inf")), axis=1)
            every = (tl.zeros([], tl.int64) + requests) * parts
            tl.store(place_ptr + place, at_top, mask=draws)
            tl.store(number_ptr + place, top, mask=draws)
            tl.store(number_ptr + every + place, score, mask=draws)
            tl.store(number_ptr + 2 * every + place, likely, mask=draws)
        tl.store(value_ptr + place, best, mask=inside)
        tl.store(index_ptr + place, found, mask=inside)
        tl.store(total_ptr + place, tl.sum(tl.exp(scores), axis=1), mask=inside)


def takes(requests: int, after: torch.Tensor) -> bool:
    """Whether one kernel is faster than several for such a step."""
    return requests <= MOST_ROWS or after.shape[1] <= MOST_RANK


class Shape(NamedTuple):
    """How a step's work is divided."""

    parts: int
    """Of the columns."""
    blocks: int
    """Of the requests."""
    constants: tuple[int, int, int, int]
    """``RANK`` and what follows."""
    num_warps: int
    """Of a program."""


def shape_of(requests: int, width: int, rank: int) -> Shape:
    """Of logits [requests, width]. Few requests keep few processors busy: their parts are as small
    as ``MOST_PARTS`` allows."""
    few = requests <= MOST_ROWS
    small = few and width <= 64 * MOST_PARTS
    padded = next_power_of_2(rank, 16)
    columns = max(16, min(64 if small else 128, TILE // padded))
    rows = 16 if few else MOST_ROWS
    constants = rank, padded, rows, columns
    return Shape(cdiv(width, columns), cdiv(requests, rows), constants, 2 if small else 4)


def add_looked_up(
    logits: torch.Tensor, after: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """``Drafting.add_looked_up`` with ``after`` [m, rank] and a table ``before`` [vocabulary,
    rank]."""
    (requests, width), sums = logits.shape, torch.empty_like(logits)
    shape = shape_of(requests, width, before.shape[1])
    markov_kernel[shape[:2]](
        logits, width, tokens, requests, before, after, sums, *(None,) * 14,
        *shape.constants, num_warps=shape.num_warps, **pdl(logits.device),
    )  # fmt: skip
    return sums
