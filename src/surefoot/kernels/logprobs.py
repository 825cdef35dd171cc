"""Logprobs of rows: of the chosen token, its rank, and the most likely tokens. The torch twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 64
"""What a row takes beside its logits is as large as these."""


@dataclass(frozen=True)
class ScoredSpans:
    """Which rows of M are scored: of each of n spans so many."""

    first: torch.Tensor
    """int64 [B]: the first row of every span of a round."""
    places: torch.Tensor
    """int64 [n]: the scored ones of them."""
    count: int
    """Rows of each. Those past the last row of all are the last row."""
    steps: torch.Tensor | None = None
    """int64 [B, count or more]: how far behind the first row each of them is; None: they follow one
    another."""

    def rows(self, total: int) -> torch.Tensor:
        """int64 [n * count], of ``total`` rows."""
        steps = torch.arange(self.count, device=self.first.device)
        if self.steps is not None:
            steps = self.steps[self.places, : self.count]
        rows = self.first[self.places].unsqueeze(1) + steps
        return rows.clamp(max=total - 1).flatten()


def row_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, width: int, spans: ScoredSpans | None = None
) -> torch.Tensor:
    """Float32 logits [M, vocab] and chosen tokens int64 [M] -> int32 [M, 2 + 2 * width], to be
    copied at once: the chosen token's logprob (its bits) and rank (1: most likely), the ``width``
    most likely tokens (at most the vocabulary) in falling order, and their logprobs (their bits).
    ``spans``: of their rows only, in their order.
    """
    if spans is not None:
        rows = spans.rows(len(logits))
        logits, tokens = logits[rows], tokens[rows]
    width = min(width, logits.shape[1])
    parts = zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_few_rows(*part, width) for part in parts])


def _few_rows(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1, keepdim=True) + 1
    top, ids = logits.topk(width, dim=-1)
    bits = [(values - normaliser).view(torch.int32) for values in (chosen, top)]
    return torch.cat((bits[0], ranks.int(), ids.int(), bits[1]), dim=1)
