"""Drafts of which each depends on the one before it: two kernels a draft.

Twins: ``kernels.drafting.Drafting.markov`` and ``add_looked_up``. Launched as ``pdl`` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.picks import likeliest_of_parts

MOST_ROWS = 64
"""Requests of a program, at most."""
MOST_RANK = 128
"""Of more requests than that. A product by itself reads wider weights faster then."""
TILE = 16384
"""Weights of a program, at most."""


@jit
def sums_of_tile(
    logits_ptr, width, current_ptr, requests, before_ptr, after_ptr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of program (columns, rows): its rows, which of them are requests, its columns, and the logits
    there plus what the tokens before say, -inf outside."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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
    logits = tl.load(
        logits_ptr + row.to(tl.int64)[:, None] * width + column[None, :],
        mask=inside[:, None] & (column < width)[None, :], other=float("-inf"),
    )  # fmt: skip
    logits += tl.dot(before, tl.trans(after), input_precision="ieee")
    return row, inside, column, logits


@jit(
    do_not_specialize=["requests"],
    do_not_specialize_on_alignment=["logits_ptr", "current_ptr"],
)
def markov_kernel(
    logits_ptr, width, current_ptr, requests, before_ptr, after_ptr,
    sum_ptr, value_ptr, index_ptr, total_ptr,
    SUMS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows): what the tokens before say is added to logits. Of these sums the
    largest is left, its column, and the sum of all exponentials less the largest; or, with
    ``SUMS``, all of them."""
    release_next(PDL)
    part, parts = tl.program_id(0), tl.num_programs(0)
    row, inside, column, logits = sums_of_tile(
        logits_ptr, width, current_ptr, requests, before_ptr, after_ptr,
        RANK, PADDED, ROWS, COLUMNS, PDL,
    )  # fmt: skip
    if SUMS:
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(sum_ptr + place, logits, mask=inside[:, None] & (column < width)[None, :])
    else:
        best = tl.max(logits, axis=1)
        found = tl.min(tl.where(logits == best[:, None], column[None, :], width - 1), axis=1)
        # A part may hold nothing but -inf; its sum then counts nothing.
        pivot = tl.where(best == float("-inf"), 0.0, best)
        total = tl.sum(tl.exp(logits - pivot[:, None]), axis=1)
        place = row.to(tl.int64) * parts + part
        tl.store(value_ptr + place, best, mask=inside)
        tl.store(index_ptr + place, found, mask=inside)
        tl.store(total_ptr + place, total, mask=inside)


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


def shape_of(requests: int, width: int, rank: int, most_rows: int = MOST_ROWS) -> Shape:
    """Of logits [requests, width]."""
    padded = next_power_of_2(rank, 16)
    columns = max(16, min(128, TILE // padded))
    rows = min(most_rows, next_power_of_2(requests, 16))
    return Shape(cdiv(width, columns), cdiv(requests, rows), (rank, padded, rows, columns))


def add_looked_up(
    logits: torch.Tensor, after: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """``Drafting.add_looked_up`` with ``after`` [m, rank] and a table ``before`` [vocabulary,
    rank]."""
    (requests, width), sums = logits.shape, torch.empty_like(logits)
    shape = shape_of(requests, width, before.shape[1])
    markov_kernel[shape[:2]](
        logits, width, tokens, requests, before, after, sums, None, None, None,
        True, *shape.constants, num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    return sums


def walk(
    logits: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    current: torch.Tensor,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> None:
    """``Drafting.markov`` with a table ``before`` [vocabulary, rank] and ``after`` [m, rank]."""
    _, requests, width = logits.shape
    shape = shape_of(requests, width, before.shape[1])
    values, totals = (logits.new_empty((requests, shape.parts)) for _ in range(2))
    index = torch.empty((requests, shape.parts), dtype=torch.int32, device=logits.device)
    for step, row in enumerate(logits):
        markov_kernel[shape[:2]](
            row, width, current, requests, before, after,
            None, values, index, totals,
            False, *shape.constants, num_warps=4, **pdl(logits.device),
        )  # fmt: skip
        current = tokens[step]
        likeliest_of_parts(values, index, totals, width, ids, current, chances[step])
