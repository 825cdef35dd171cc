"""Drawing from what top-k and top-p keep of a row, without sorting it.

Scores are at most 0, so their bits without the sign order them from the best, 0, to the worst: a
score's *depth*. A filter keeps depths up to the smallest one at which a sum over all shallower or
equal scores (of ones for top-k, of probabilities for top-p) reaches a target.

Top-k's is looked for among a row's candidates: the scores above a bound that it cannot lie below.
Where there are too many of them (nearly all tokens are equally likely, or k is large), the row is
gone through as often as it takes. For top-p alone no border is looked for: the best noised token of
all is drawn unless those that are better without noise make up p, which takes only the parts of the
row in which there are any; else the best noised one of these, and so on.

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
def row_maxima(largest_ptr, row, parts, PARTS: tl.constexpr):
    """The largest logit of each part of a row, or of each group."""
    part = tl.arange(0, PARTS)
    return tl.load(largest_ptr + row * parts + part, mask=part < parts, other=float("-inf"))


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
def bound(depths, weights, wanted):
    """A depth, rounded up, up to which ``weights`` sum up to ``wanted``; two bits at a time."""
    found = 0
    for step in range(8):
        shift = 29 - 2 * step
        # Shallower ones come out negative, deeper ones than this stretch at 4 or more.
        digits = (depths - found) >> shift
        digit = (tl.sum(tl.where(digits <= 0, weights, 0), axis=0) < wanted).to(tl.int32)
        digit += (tl.sum(tl.where(digits <= 1, weights, 0), axis=0) < wanted).to(tl.int32)
        digit += (tl.sum(tl.where(digits <= 2, weights, 0), axis=0) < wanted).to(tl.int32)
        found += digit << shift
    return found + BOUND_REST


@jit
def row_block(logits_ptr, row, stride, vocab, first, pivot, temperature, BLOCK: tl.constexpr):
    """(Columns, scores) of a block of a row's logits, -inf beyond the vocabulary."""
    column = first + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row * stride + column, mask=column < vocab, other=float("-inf")
    )  # fmt: skip
    return column, scores_of(logits, pivot, temperature)


@jit
def next_part(depths, after, limit):
    """The first part behind ``after`` whose best score, by its depth in ``depths`` [PARTS], lies
    down to ``limit``; ``EVERYTHING`` if none."""
    part = tl.arange(0, depths.shape[0])
    return tl.min(tl.where((part > after) & (depths <= limit), part, EVERYTHING), axis=0)


@jit
def row_mass(
    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, limit, BLOCK: tl.constexpr
):  # fmt: skip
    """The probabilities of a row's scores from ``floor`` on upwards, down to depth ``limit``;
    ``of_parts``: the depth of the best one of each ``BLOCK``."""
    total = tl.zeros([], tl.int64)
    part = next_part(of_parts, -1, limit)
    while part < EVERYTHING:
        _, scores = row_block(
            logits_ptr, row, stride, vocab, part * BLOCK, pivot, temperature, BLOCK
        )  # fmt: skip
        kept = (scores >= floor) & (depth_of(scores) <= limit)
        total += tl.sum(mass_of(scores, kept), axis=0)
        part = next_part(of_parts, part, limit)
    return total


@jit
def row_best(
    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, limit, seed, choice,
    position, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the best noised score among those from ``floor`` on upwards, down to depth
    ``limit``, and its depth. ``of_parts`` as of ``row_mass``."""
    best, token = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32)
    # Of a row of NaN, where none is found, whoever goes on from here ends.
    depth = tl.zeros([], tl.int32)
    part = next_part(of_parts, -1, limit)
    while part < EVERYTHING:
        column, scores = row_block(
            logits_ptr, row, stride, vocab, part * BLOCK, pivot, temperature, BLOCK
        )  # fmt: skip
        words = noise_words(seed, choice, position, part * BLOCK, BLOCK)
        depths = depth_of(scores)
        kept = (depths <= limit) & (scores >= floor)
        noised = tl.where(kept, scores + gumbel(words), float("-inf"))
        value, index = largest(noised, column, vocab - 1)
        if value > best:
            best, token = value, index
            depth = tl.max(tl.where(column == index, depths, 0), axis=0)
        part = next_part(of_parts, part, limit)
    return token, depth


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
def limit_of(depths, scores, inside, floor, top_k, top_p, SIZE: tl.constexpr):
    """The depth down to which top-k and top-p keep the scores ``inside``."""
    limit = border(depths, inside.to(tl.int32), top_k, SIZE)
    if top_p < 1:
        masses = mass_of(scores, inside & (scores >= floor) & (depths <= limit))
        wanted = share_of(tl.sum(masses, axis=0), top_p)
        limit = tl.minimum(limit, border(depths, masses, wanted, SIZE))
    return limit


@jit
def best_candidate(
    candidate_ptr, score_ptr, row, count, reach, vocab, floor, top_k, top_p, seed, choice,
    position, ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """(The token drawn among the first ``count`` candidates, all that there are down to ``reach``;
    whether they hold all that top-k keeps)."""
    index = tl.arange(0, SIZE)
    inside = index < count
    column = tl.load(candidate_ptr + row * ROOM + index, mask=inside, other=0)
    scores = tl.load(score_ptr + row * ROOM + index, mask=inside, other=float("-inf"))
    depths = depth_of(scores)
    limit = limit_of(depths, scores, inside, floor, top_k, top_p, SIZE)
    words = noise_words_at(seed, choice, position, column.to(tl.int64))
    kept = inside & (scores >= floor) & (depths <= limit)
    noised = tl.where(kept, scores + gumbel(words), float("-inf"))
    _, token = largest(noised, column, vocab - 1)
    return token, (reach >= FORBIDDEN) | (count >= top_k)


@jit
def kept_of_row(
    token, depth, mass, logits_ptr, row, stride, vocab, pivot, temperature, of_parts, group_ptr,
    groups, floor, top_p, seed, choice, position, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The token drawn, if ``token`` at ``depth`` is the best noised one of all that pass the other
    filters, whose probabilities sum up to ``mass``: this one, unless so many better ones are kept
    that it is not; else the best of those that are better than it, and so on. At ``group_ptr`` is
    the largest logit of each of a row's ``groups``, at most ``GROUPS``."""
    if (top_p < 1) & (next_part(of_parts, -1, depth - 1) < EVERYTHING):
        wanted = share_of(mass, top_p)
        # Each group's largest stands for one token at least.
        scores = scores_of(row_maxima(group_ptr, row, groups, GROUPS), pivot, temperature)
        depths, masses = depth_of(scores), mass_of(scores, scores >= floor)
        better = tl.sum(tl.where(depths < depth, masses, 0), axis=0)
        if better < wanted:
            better = row_mass(
                logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, depth - 1,
                BLOCK,
            )  # fmt: skip
        if better >= wanted:
            limit = bound(depths, masses, wanted)
            while better >= wanted:
                # One that is not kept rules out all that are no better.
                limit = tl.minimum(limit, depth - 1)
                token, depth = row_best(
                    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, limit,
                    seed, choice, position, BLOCK,
                )  # fmt: skip
                better = row_mass(
                    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, depth - 1,
                    BLOCK,
                )  # fmt: skip
    return token


@jit
def best_of_row(
    logits_ptr, row, stride, vocab, pivot, temperature, of_parts, group_ptr, groups, floor, top_k,
    top_p, seed, choice, position, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The token drawn of a row with top-k, however many are kept; more as of ``kept_of_row``."""
    # No lower than all that are forbidden, if there is no other limit.
    limit = row_rank(logits_ptr, row, stride, vocab, pivot, temperature, top_k, BLOCK)
    limit = tl.minimum(limit, FORBIDDEN - 1)
    mass = row_mass(
        logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, limit, BLOCK
    )  # fmt: skip
    token, depth = row_best(
        logits_ptr, row, stride, vocab, pivot, temperature, of_parts, floor, limit, seed, choice,
        position, BLOCK,
    )  # fmt: skip
    return kept_of_row(
        token, depth, mass, logits_ptr, row, stride, vocab, pivot, temperature, of_parts, group_ptr,
        groups, floor, top_p, seed, choice, position, BLOCK, GROUPS,
    )  # fmt: skip
