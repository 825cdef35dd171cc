"""Gumbel noise as device functions: the words of ``sampling.noise``, bit for bit, and the same
variates up to the last bits of a logarithm."""

from __future__ import annotations

import triton.language as tl

from surefoot.kernels.triton.launch import jit


@jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on uint32 tiles: four words."""
    for _ in tl.static_range(10):  # pyright: ignore[reportGeneralTypeIssues]
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@jit
def words_of_quads(seed, choice, position, quads):
    """Four words uint32 for each of the uint32 tile ``quads`` (token // 4)."""
    zero = quads * 0
    return philox(
        quads,
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )


@jit
def noise_words(seed, choice, position, first, BLOCK: tl.constexpr):
    """Words uint32 [BLOCK] of the tokens from ``first`` (a multiple of 4) on. Seed, choice and
    position are int64 scalars."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = words_of_quads(seed, choice, position, quads)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@jit
def noise_words_at(seed, choice, position, tokens):
    """Words uint32 of the int64 tile ``tokens``; the rest as above."""
    quads = (tokens // 4).to(tl.uint32)
    w0, w1, w2, w3 = words_of_quads(seed, choice, position, quads)
    place = tokens % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@jit
def words_of_columns(
    seed, choice, position, ids_ptr, column, width, first, MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Words uint32 [BLOCK] of columns int32 [BLOCK] of a drafter's logits, from ``first`` on; there
    are ``width``. With ``MAPPED``, ``ids_ptr`` has their tokens. The rest as of ``noise_words``."""
    if MAPPED:
        token = tl.load(ids_ptr + column, mask=column < width, other=0)
        return noise_words_at(seed, choice, position, token)
    return noise_words(seed, choice, position, first, BLOCK)


@jit
def gumbel(words):
    """Standard Gumbel variates, fp32, from uint32 words."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 2.0**-24)
    # log1p(-v) = log(u) * -v / (u - 1) with u = 1 - v rounded: the errors cancel.
    u = 1.0 - v
    exact = u == 1.0
    log1p = tl.where(exact, -v, tl.log(u) * -v / tl.where(exact, 1.0, u - 1.0))
    return -tl.log(-log1p)
