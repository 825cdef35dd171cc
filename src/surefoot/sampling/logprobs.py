"""Logprobs as users see them: the target's own, before grammar masks, penalties, bias and
filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowLogprobs:
    """Per row: the chosen token's logprob [M] and rank [M] (1 = most likely), and the ``width``
    most likely tokens [M, width] with their logprobs [M, width]."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def row_logprobs(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> RowLogprobs:
    """float32 logits [M, vocab] and chosen tokens int64 [M]."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(min(width, logits.shape[1]), dim=-1)
    return RowLogprobs(
        (chosen - normaliser).squeeze(1), ranks, top.indices, top.values - normaliser
    )
