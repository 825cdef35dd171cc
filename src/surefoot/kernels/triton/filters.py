"""Drawing from what top-k and top-p keep of a row, without sorting it.

Scores are at most 0, so their bits without the sign order them from the best, 0, to the worst: a
score's *depth*. A filter keeps depths up to the smallest one at which a sum over all shallower or
equal scores (of ones for top-k, of probabilities for top-p) reaches a target. That depth is looked
for among a row's candidates: the scores above a bound that the border cannot lie below. Where there
are too many of them (nearly all tokens are equally likely, or k is large), the row is gone through
as often as it takes.

Probabilities are whole numbers of ``UNIT``: sums are the same in any order, so a row's border
depends on nothing else.
"""

from __future__ import annotations

import triton.language as tl

from surefoot.kernels.triton.argmax import largest
from surefoot.kernels.triton.launch import jit
from surefoot.kernels.triton.noise import gumbel, noise_words, noise_words_at

EVERYTHING = tl.constexpr(0x7FFFFFFF)
FORBIDDEN = tl.constexpr(0x7F800000)
"""The depth of a score of -inf."""
UNIT = tl.constexpr(2.0**-40)
"""Of the likeliest token's probability."""
BOUND_REST = tl.constexpr(2**15 - 1)
"""Bits of a bound that are not looked for, as they would tell few candidates apart."""


@jit
def is_limited(temperature, top_k, top_p, vocab):
    """Whether a row draws, and top-k or top-p may keep less than all."""
    return (temperature != 0) & ((top_k < vocab) | (top_p < 1))


@jit
def row_pivot(largest_ptr, row, parts, PARTS: tl.constexpr):
    """A row's largest logit, from those of its parts."""
    part = tl.arange(0, PARTS)
    pivots = tl.load(largest_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    return tl.max(pivots, axis=0)


@jit
def depth_of(scores):
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scores_of(logits, pivot, temperature):
    """(logit - the row's largest) / temperature."""
    divisor = tl.where(temperature == 0, 1.0, temperature)
    return tl.div_rn(logits - pivot, tl.zeros_like(logits) + divisor)


@jit
def mass_of(scores, kept):
    """exp(score) in ``UNIT``, int64; 0 unless kept."""
    return tl.where(kept, (tl.exp(scores) * (1.0 / UNIT)).to(tl.int64), 0)


@jit
def border(depths, weights, target, SIZE: tl.constexpr):
    """The smallest depth up to which ``weights`` [SIZE] sum up to ``target``; ``EVERYTHING`` if
    none."""
    if SIZE <= 64:
        within = depths[None, :] <= depths[:, None]
        sums = tl.sum(tl.where(within, weights[None, :], 0), axis=1)
        found = tl.min(tl.where(sums >= target, depths, EVERYTHING), axis=0)
    else:
        found = 0
        for step in range(31):
            below = 1 << (30 - step)
            enough = tl.sum(tl.where(depths <= found + (below - 1), weights, 0), axis=0) >= target
            found = tl.where(enough, found, found + below)
    return found


@jit
def bound(depths, rank, scores, wanted):
    """A depth, rounded up, up to which there are ``rank`` of them or their probabilities sum up to
    ``wanted``; two bits at a time."""
    masses = tl.exp(scores)
    found = 0
    for step in range(8):
        shift = 29 - 2 * step
        # Shallower ones come out negative, deeper ones than this stretch at 4 or more.
        digits = (depths - found) >> shift
        digit = is_short(digits <= 0, masses, rank, wanted)
        digit += is_short(digits <= 1, masses, rank, wanted)
        digit += is_short(digits <= 2, masses, rank, wanted)
        found += digit << shift
    return found + BOUND_REST


@jit
def is_short(within, masses, rank, wanted):
    """1 unless those ``within`` are enough."""
    count = tl.sum(within.to(tl.int32), axis=0)
    mass = tl.sum(tl.where(within, masses, 0.0), axis=0)
    return ((count < rank) & (mass < wanted)).to(tl.int32)


@jit
def row_block(logits_ptr, row, stride, vocab, first, pivot, temperature, BLOCK: tl.constexpr):
    """(Columns, scores) of a block of a row's logits, -inf beyond the vocabulary."""
    column = first + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row * stride + column, mask=column < vocab, other=float("-inf")
    )  # fmt: skip
    return column, scores_of(logits, pivot, temperature)


@jit
def row_mass(logits_ptr, row, stride, vocab, pivot, temperature, floor, limit, BLOCK: tl.constexpr):
    """The probabilities of a row's scores from ``floor`` on upwards, down to depth ``limit``."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        _, scores = row_block(
            logits_ptr, row, stride, vocab, first, pivot, temperature, BLOCK
        )  # fmt: skip
        total += mass_of(scores, (scores >= floor) & (depth_of(scores) <= limit))
    return tl.sum(total, axis=0)


@jit
def row_rank(logits_ptr, row, stride, vocab, pivot, temperature, top_k, BLOCK: tl.constexpr):
    """The depth of a row's score number ``top_k``, two bits at a time."""
    found = 0
    for step in range(16):
        shift = 30 - 2 * step
        first_count = tl.zeros([BLOCK], tl.int32)
        second_count, third_count = first_count, first_count
        for first in range(0, vocab, BLOCK):
            column, scores = row_block(
                logits_ptr, row, stride, vocab, first, pivot, temperature, BLOCK
            )  # fmt: skip
            # Shallower scores come out negative, deeper ones than this stretch at 4 or more.
            digits = tl.where(column < vocab, (depth_of(scores) - found) >> shift, 4)
            first_count += (digits <= 0).to(tl.int32)
            second_count += (digits <= 1).to(tl.int32)
            third_count += (digits <= 2).to(tl.int32)
        digit = (tl.sum(first_count, axis=0) < top_k).to(tl.int32)
        digit += (tl.sum(second_count, axis=0) < top_k).to(tl.int32)
        digit += (tl.sum(third_count, axis=0) < top_k).to(tl.int32)
        found += digit << shift
    return found


@jit
def share_of(mass, top_p):
    """``top_p`` of a sum of probabilities; never nothing, so that the best token is kept."""
    return tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@jit
def limit_of(
    depths, scores, inside, count, reach, floor, vocab, top_k, top_p, mass, SIZE: tl.constexpr
):  # fmt: skip
    """(The depth down to which top-k and top-p keep the ``count`` scores ``inside``, which are all
    down to ``reach``; whether these are enough to tell). ``mass``: the sum of all probabilities,
    for top-p without top-k."""
    limit = EVERYTHING
    enough = reach >= FORBIDDEN
    if top_k < vocab:
        limit = border(depths, inside.to(tl.int32), top_k, SIZE)
        enough = enough | (count >= top_k)
    if top_p < 1:
        masses = mass_of(scores, inside & (scores >= floor) & (depths <= limit))
        total = tl.sum(masses, axis=0)
        if top_k >= vocab:
            enough = enough | (total >= share_of(mass, top_p))
        else:
            mass = total
        limit = tl.minimum(limit, border(depths, masses, share_of(mass, top_p), SIZE))
    return limit, enough


@jit
def best_candidate(
    candidate_ptr, score_ptr, row, count, reach, vocab, floor, top_k, top_p, mass, seed, choice,
    position, ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """(The token drawn among the first ``count`` candidates, whether they hold all that is kept).
    ``reach`` and ``mass`` as of ``limit_of``."""
    index = tl.arange(0, SIZE)
    inside = index < count
    column = tl.load(candidate_ptr + row * ROOM + index, mask=inside, other=0)
    scores = tl.load(score_ptr + row * ROOM + index, mask=inside, other=float("-inf"))
    depths = depth_of(scores)
    limit, enough = limit_of(
        depths, scores, inside, count, reach, floor, vocab, top_k, top_p, mass, SIZE
    )  # fmt: skip
    words = noise_words_at(seed, choice, position, column.to(tl.int64))
    kept = inside & (scores >= floor) & (depths <= limit)
    noised = tl.where(kept, scores + gumbel(words), float("-inf"))
    _, token = largest(noised, column, vocab - 1)
    return token, enough


@jit
def best_of_row(
    logits_ptr, row, stride, vocab, pivot, temperature, floor, top_k, top_p, mass, seed, choice,
    position, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token drawn among all, however many are kept: the best of all, if so many better ones are
    kept that it is too; else the best of those that are better than that, and so on."""
    limit = EVERYTHING
    if top_k < vocab:
        limit = row_rank(
            logits_ptr, row, stride, vocab, pivot, temperature, top_k, BLOCK
        )  # fmt: skip
        mass = row_mass(logits_ptr, row, stride, vocab, pivot, temperature, floor, limit, BLOCK)
    wanted = share_of(mass, top_p)
    # Below the depth of all that are forbidden, if there is no other limit.
    above = tl.minimum(limit, FORBIDDEN - 1) + 1
    token = tl.zeros([], tl.int32)
    while above > 0:
        best, token = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32)
        depth = FORBIDDEN
        for first in range(0, vocab, BLOCK):
            column, scores = row_block(
                logits_ptr, row, stride, vocab, first, pivot, temperature, BLOCK
            )  # fmt: skip
            words = noise_words(seed, choice, position, first, BLOCK)
            depths = depth_of(scores)
            kept = (depths < above) & (scores >= floor)
            noised = tl.where(kept, scores + gumbel(words), float("-inf"))
            value, index = largest(noised, column, vocab - 1)
            if value > best:
                best, token = value, index
                depth = tl.max(tl.where(column == index, depths, 0), axis=0)
        better = row_mass(
            logits_ptr, row, stride, vocab, pivot, temperature, floor, depth - 1, BLOCK
        )  # fmt: skip
        # One that is not kept rules out all that are no better.
        above = tl.where((top_p < 1) & (better >= wanted), depth, 0)
    return token
