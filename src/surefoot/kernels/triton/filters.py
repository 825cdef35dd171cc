"""The borders of top-k and top-p, without sorting.

Scores are at most 0, so their bits without the sign order them from the best, 0, to the worst: a
score's *depth*. A filter keeps depths up to the smallest one at which a sum over all shallower
or equal scores (of ones for top-k, of probabilities for top-p) reaches a target. That depth is
found four bits at a time: each of eight passes sums for 15 candidates, every processor a part of
the row. Sums are made in one order always, so the border of a row depends on nothing else.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.tables import DrawTables

EVERYTHING = tl.constexpr(0x7FFFFFFF)
SHIFTS = (28, 24, 20, 16, 12, 8, 4, 0)
PROGRAMS = 1024
"""Of a pass, about."""


@jit
def depth_of(scores):
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scores_of(
    logits_ptr, largest_ptr, parts, temperature, row, column, vocab, PARTS: tl.constexpr
):  # fmt: skip
    """(logit - the row's largest) / temperature, -inf beyond the vocabulary."""
    part = tl.arange(0, PARTS)
    every = tl.load(largest_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    logits = tl.load(
        logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf")
    ).to(tl.float32)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    return tl.div_rn(logits - tl.max(every, axis=0), tl.zeros_like(logits) + divisor)


@jit
def digit_of(sums_ptr, row, parts, target, PARTS: tl.constexpr):
    """How many of a pass's first 15 sums stay below ``target``: the next four bits."""
    part, step = tl.arange(0, PARTS), tl.arange(0, 16)
    place = (row * parts + part[:, None]) * 16 + step[None, :]
    sums = tl.sum(tl.load(sums_ptr + place, mask=(part < parts)[:, None], other=0.0), axis=0)
    return tl.sum(((sums < target) & (step < 15)).to(tl.int32), axis=0)


@jit
def target_of(wanted_ptr, slot, first_sums_ptr, row, parts, MASS: tl.constexpr,
              PARTS: tl.constexpr):  # fmt: skip
    """What the sums must reach: k, or p times the mass of all scores (the last sum of the first
    pass)."""
    wanted = tl.load(wanted_ptr + slot).to(tl.float32)
    if MASS:
        part = tl.arange(0, PARTS)
        place = (row * parts + part) * 16 + 15
        wanted *= tl.sum(tl.load(first_sums_ptr + place, mask=part < parts, other=0.0), axis=0)
    return wanted


@jit
def is_limited(wanted_ptr, slot, vocab, MASS: tl.constexpr):
    wanted = tl.load(wanted_ptr + slot)
    return wanted < (1.0 if MASS else vocab)


@jit(do_not_specialize=["rows", "shift"])
def narrow_kernel(
    logits_ptr, largest_ptr, vocab, slot_ptr, temperature_ptr, min_p_ptr, wanted_ptr, limit_ptr,
    sums_ptr, depth_ptr, rows, parts, shift,
    FIRST: tl.constexpr, MASS: tl.constexpr, CAPPED: tl.constexpr, MIN_P: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One pass: settle the four bits of the pass before, sum for the next. Program (rows, part):
    those of its rows that have a border, one after the other."""
    release_next(PDL)
    await_inputs(PDL)
    index = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    inside = index < rows
    slots = tl.maximum(tl.load(slot_ptr + index, mask=inside, other=0), 0)
    limited = inside & (tl.load(temperature_ptr + slots) != 0)
    limited = limited & is_limited(wanted_ptr, slots, vocab, MASS)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    step = (28 - shift) // 4
    stage = (tl.zeros([], tl.int64) + rows) * parts * 16
    following = tl.min(tl.where(limited, index, rows), axis=0)
    while following < rows:
        row = following.to(tl.int64)
        following = tl.min(tl.where(limited & (index > following), index, rows), axis=0)
        slot = tl.maximum(tl.load(slot_ptr + row), 0)
        temperature = tl.load(temperature_ptr + slot)
        if FIRST:
            depth = 0
        else:
            target = target_of(wanted_ptr, slot, sums_ptr, row, parts, MASS, PARTS)
            digit = digit_of(sums_ptr + (step - 1) * stage, row, parts, target, PARTS)
            depth = tl.load(depth_ptr + (step - 1) * rows + row) + (digit << (shift + 4))
        if part == 0:
            tl.store(depth_ptr + step * rows + row, depth)
        scores = scores_of(logits_ptr, largest_ptr, parts, temperature, row, column, vocab, PARTS)
        depths = depth_of(scores)
        if MASS:
            weight = tl.exp(scores)
            if CAPPED:
                weight = tl.where(depths <= tl.load(limit_ptr + row), weight, 0.0)
            if MIN_P:
                weight = tl.where(scores >= tl.log(tl.load(min_p_ptr + slot)), weight, 0.0)
        else:
            weight = tl.where(column < vocab, 1.0, 0.0)
        # Shallower scores come out negative, deeper ones than this stretch at 16 or more.
        candidate = (depths - depth) >> shift
        place = sums_ptr + step * stage + (row * parts + part) * 16
        for bits in tl.static_range(16):  # pyright: ignore[reportGeneralTypeIssues]
            tl.store(place + bits, tl.sum(tl.where(candidate <= bits, weight, 0.0), axis=0))


@jit(do_not_specialize=["rows"])
def limit_kernel(
    slot_ptr, temperature_ptr, wanted_ptr, limit_ptr, sums_ptr, depth_ptr, vocab, rows, parts,
    STEPS: tl.constexpr, MASS: tl.constexpr, CAPPED: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Settle the last four bits; ``limit`` becomes the deepest depth that is kept."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    limit = EVERYTHING
    if CAPPED:
        limit = tl.load(limit_ptr + row)
    if (tl.load(temperature_ptr + slot) != 0) & (is_limited(wanted_ptr, slot, vocab, MASS) != 0):
        stage = (tl.zeros([], tl.int64) + rows) * (STEPS - 1)
        target = target_of(wanted_ptr, slot, sums_ptr, row, parts, MASS, PARTS)
        digit = digit_of(sums_ptr + stage * parts * 16, row, parts, target, PARTS)
        limit = tl.minimum(limit, tl.load(depth_ptr + stage + row) + digit)
    tl.store(limit_ptr + row, limit)


def find_limits(
    logits: torch.Tensor,
    largest: torch.Tensor,
    slots: torch.Tensor,
    params: DrawTables,
    top_k: bool,
    top_p: bool,
    min_p: bool,
    block: int,
) -> torch.Tensor | None:
    """The deepest depth that top-k, then top-p keep, int32 [M], or None without either.

    ``logits`` [M, vocab] contiguous; ``largest`` float32 [M, parts]: maxima of ``block``
    neighbouring logits; ``slots`` int64 [M]. With ``min_p``, top-p's probabilities are those of
    the tokens that pass it.
    """
    if not (top_k or top_p):
        return None
    (rows, vocab), parts = logits.shape, largest.shape[1]
    limit = torch.empty(rows, dtype=torch.int32, device=logits.device)
    sums = largest.new_empty((len(SHIFTS), rows, parts, 16))
    depth = torch.empty((len(SHIFTS), rows), dtype=torch.int32, device=logits.device)
    padded = next_power_of_2(parts)
    # Where no row has a border, programs have nothing to do but begin and end.
    group = next_power_of_2(cdiv(rows * parts, PROGRAMS))
    capped, launch = False, pdl(logits.device)
    filters = [(params.top_k, False)] * top_k + [(params.top_p, True)] * top_p
    for wanted, mass in filters:
        for shift in SHIFTS:
            narrow_kernel[(cdiv(rows, group), parts)](
                logits, largest, vocab, slots, params.temperature, params.min_p, wanted, limit,
                sums, depth, rows, parts, shift,
                shift == SHIFTS[0], mass, capped, min_p, group, block, padded,
                num_warps=4, **launch,
            )  # fmt: skip
        limit_kernel[(rows,)](
            slots, params.temperature, wanted, limit, sums, depth, vocab, rows, parts,
            len(SHIFTS), mass, capped, padded, num_warps=1, **launch,
        )  # fmt: skip
        capped = True
    return limit
