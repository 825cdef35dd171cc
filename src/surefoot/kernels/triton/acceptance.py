"""Synthetic acceptance in one kernel, so that a measured round is not longer for it.
Twin: ``bench.synthetic.SyntheticAcceptance``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import cdiv, jit

TILE = 64


@jit
def hashed(slots, positions, SALT: tl.constexpr):
    """Pseudo-random int64 in 0 .. 2**31 - 1."""
    x = (slots * 7919 + positions * 104729 + SALT * 1299709) & 0x7FFFFFFF
    for _ in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        x = ((x ^ (x >> 15)) * 73244475) & 0x7FFFFFFF
    return x ^ (x >> 16)


@jit(do_not_specialize=["rows"])
def replace_kernel(
    slot_ptr, position_ptr, sampled_ptr, rows, length_ptr, rate_ptr, token_ptr, offered_ptr,
    width, vocab, out_ptr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < rows
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    sampled = tl.load(sampled_ptr + row, mask=inside, other=0)
    place = position - tl.load(length_ptr + slot, mask=inside, other=0)
    place = tl.minimum(tl.maximum(place, 0), width)
    last = tl.minimum(place, width - 1)
    offered = tl.load(token_ptr + slot * width + last, mask=inside, other=0)
    known = place < tl.load(offered_ptr + slot, mask=inside, other=0)
    draft = tl.where(known, offered, hashed(slot, position, 1) % vocab)
    coin = hashed(slot, position, 2).to(tl.float32) * (1 / 2147483648)
    right = coin < tl.load(rate_ptr + slot * (width + 1) + place, mask=inside, other=0.0)
    wrong = (draft + 1 + sampled % 7) % vocab
    tl.store(out_ptr + row, tl.where(right, draft, wrong), mask=inside)


def replace_sampled(
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    length: torch.Tensor,
    rates: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Int64 [M] each: rows' ``slots``, ``positions`` and ``sampled`` tokens. By slot: ``length``
    int64 [slots], ``rates`` float32 [slots, K + 1] of a draft given those before it, the offers
    ``tokens`` int64 [slots, K] and ``lengths`` int64 [slots]. Returns the tokens instead, int64
    [M]."""
    out, rows = torch.empty_like(sampled), sampled.shape[0]
    replace_kernel[(cdiv(rows, TILE),)](
        slots, positions, sampled, rows, length, rates, tokens, lengths,
        tokens.shape[1], vocab_size, out, TILE, num_warps=2,
    )  # fmt: skip
    return out
