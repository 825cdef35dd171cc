"""Counter-based noise: Philox4x32-10 (Salmon et al., 2011) turned into standard Gumbel variates.

The variate of a token depends on (seed, choice, position, token id) and on nothing else, so a
row's sample is the same whoever evaluates it, in whatever batch, however early.
Key: the 64-bit seed. Counter: (token id div 4, position, choice, 0); the four words of an output
serve four neighbouring token ids. Compiled twins make the same words of it; their variates may
differ from these by roundings of the logarithms, 4e-6 at most.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2**64, which keeps both of its 32-bit halves intact.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, vocab_size].

    ``seeds``, ``choices`` and ``positions`` are int64 [rows]; a position is that of the token
    being sampled, counted from the start of the prompt.
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    zero = torch.zeros_like(quads)
    rows = [tensor.unsqueeze(1) for tensor in (positions, choices, seeds)]
    words = philox(
        (quads, rows[0] & _MASK, rows[1] & _MASK, zero), (rows[2] & _MASK, (rows[2] >> 32) & _MASK)
    )
    return _variates(
        torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab_size]
    )


def gumbel_at(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The noise of some tokens only: ``ids`` int64 [rows, n] -> float32 [rows, n], equal to the
    columns ``ids`` of ``gumbel``."""
    rows = [tensor.unsqueeze(1) for tensor in (positions, choices, seeds)]
    words = philox(
        (ids // 4, rows[0] & _MASK, rows[1] & _MASK, torch.zeros_like(ids)),
        (rows[2] & _MASK, (rows[2] >> 32) & _MASK),
    )
    stacked = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    return _variates(stacked.gather(2, (ids % 4).unsqueeze(2)).squeeze(2))


def _variates(bits: torch.Tensor) -> torch.Tensor:
    """32-bit words as standard Gumbel variates."""
    # v is uniform in (0, 1), finest near 0, where large noise comes from; it stays below 1 after
    # rounding to float32, so that the smallest noise is finite too.
    v = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))
