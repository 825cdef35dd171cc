"""Acceptance: a draft is accepted iff it equals the token that its row sampled."""

from __future__ import annotations

import torch


def accept_chain(
    sampled: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """How many leading drafts of each chain are accepted, int64 [B].

    ``sampled`` int64 [B, K + 1]: entry j is what the row of draft j (0: the current token)
    sampled; ``drafts`` int64 [B, K]; ``lengths`` int64 [B]: drafts verified. The committed tokens
    are ``sampled[:, : accepted + 1]``.
    """
    width = drafts.shape[1]
    index = torch.arange(width, device=drafts.device)
    equal = (sampled[:, :width] == drafts) & (index < lengths.unsqueeze(1))
    return equal.long().cumprod(dim=1).sum(dim=1)


def cut_at_end(
    committed: torch.Tensor,
    counts: torch.Tensor,
    room: torch.Tensor,
    stop_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut committed tokens at the first stop id (kept) and at the token limit.

    ``committed`` int64 [B, K + 1], of which ``counts`` [B] are valid; ``room`` int64 [B]: tokens
    left before the limit; ``stop_ids`` int64 [B, n], padded with -1.
    Returns (counts after the cut, end code: 0 runs on, 1 stopped by an id, 2 by the limit).
    """
    index = torch.arange(committed.shape[1], device=committed.device)
    ends = (committed.unsqueeze(2) == stop_ids.unsqueeze(1)).any(dim=2)
    ends = ends & (index < counts.unsqueeze(1))
    before_end = (ends.long().cumsum(dim=1) == 0).sum(dim=1)
    # Who has nothing committed may be beyond its limit: nobody's slot is.
    kept = torch.minimum(torch.minimum(counts, before_end + 1), room).clamp(min=0)
    stopped = ends.gather(1, (kept - 1).clamp(min=0).unsqueeze(1)).squeeze(1) & (kept > 0)
    limited = (kept >= room) & (counts > 0)
    code = torch.where(stopped, 1, torch.where(limited, 2, 0))
    return kept, code
