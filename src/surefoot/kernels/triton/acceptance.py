"""Synthetic acceptance in one kernel, so that a measured round is not longer for it.
Twin: ``bench.synthetic.tokens_at``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit

TILE = 64


@jit
def hashed(seeds, positions, SALT: tl.constexpr):
    """Pseudo-random int64 in 0 .. 2**31 - 1."""
    x = (seeds * 7919 + positions * 104729 + SALT * 1299709) & 0x7FFFFFFF
    for _ in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        x = ((x ^ (x >> 15)) * 73244475) & 0x7FFFFFFF
    return x ^ (x >> 16)


@jit(do_not_specialize=["count", "width"])
def synthetic_tokens_kernel(
    slot_ptr, first_ptr, seed_ptr, threshold_ptr, count, width, vocab, out_ptr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    row, place = at // width, at % width
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    position = tl.load(first_ptr + row, mask=inside, other=0) + place
    seed = tl.load(seed_ptr + slot, mask=inside, other=0)
    token = hashed(seed, position, 1) % vocab
    threshold = tl.load(threshold_ptr + place, mask=inside, other=0)
    wrong = hashed(seed, position, 2) >= threshold
    tl.store(out_ptr + at, tl.where(wrong, (token + 1) % vocab, token), mask=inside)


def tokens_at(
    slots: torch.Tensor,
    first: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """For B ``slots`` int64 [B], the tokens int64 [B, K] at positions ``first`` int64 [B] and on:
    the one that hangs on the seed (int64 [slots]) and the position, or, where another such number
    is not below ``thresholds`` int64 [K], the one after it in the vocabulary."""
    width = len(thresholds)
    out = torch.empty((len(slots), width), dtype=torch.int64, device=slots.device)
    synthetic_tokens_kernel[(cdiv(out.numel(), TILE),)](
        slots, first, seeds, thresholds, out.numel(), width, vocab_size, out, TILE, num_warps=2,
    )  # fmt: skip
    return out
