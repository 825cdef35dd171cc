"""Logprobs as users see them: the target's own, before grammar masks, penalties, bias and
filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.request import MAX_LOGPROBS, TokenLogprobs

WIDTHS = (0, 5, 20, MAX_LOGPROBS)
"""Most likely tokens of a row that recorded rounds report: one of these numbers."""
ROWS_AT_ONCE = 64
"""What a row takes beside its logits is as large as these."""
PARTS = 16
"""Of a vocabulary: on a GPU torch sorts few long rows whole, but not many short ones."""


@dataclass(frozen=True)
class RowLogprobs:
    """Per row: the chosen token's logprob [M] and rank [M] (1 = most likely), and the ``width``
    most likely tokens [M, width] with their logprobs [M, width]."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def width_for(wanted: int) -> int:
    """The least of ``WIDTHS`` that serves so many."""
    return next(width for width in WIDTHS if width >= wanted)


def row_logprobs(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> RowLogprobs:
    """float32 logits [M, vocab] and chosen tokens int64 [M]."""
    width = min(width, logits.shape[1])
    parts = [
        _few_rows(*part, width)
        for part in zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
    ]
    return RowLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _few_rows(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    top, ids = _largest(logits, width)
    return (chosen - normaliser).squeeze(1), ranks, ids, top - normaliser


def _largest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest of each row in falling order, and where they are."""
    if not width:
        return logits[:, :0], logits[:, :0].long()
    size, uneven = divmod(logits.shape[1], PARTS)
    if uneven or size < width:
        return logits.topk(width, dim=-1)
    values, within = logits.unflatten(1, (PARTS, size)).topk(width, dim=-1)
    ids = within + torch.arange(0, logits.shape[1], size, device=logits.device).unsqueeze(1)
    best = values.flatten(1).topk(width, dim=-1)
    return best.values, ids.flatten(1).gather(1, best.indices)


def pack(scores: RowLogprobs) -> torch.Tensor:
    """int32 [M, 2 + 2 * width], to be copied at once: logprob (its bits), rank, the most likely
    tokens, their logprobs (their bits)."""
    chosen, ranks = (column.unsqueeze(1) for column in (scores.chosen, scores.ranks.int()))
    bits = chosen.view(torch.int32), ranks, scores.top_ids.int(), scores.top.view(torch.int32)
    return torch.cat(bits, dim=1)


def unpack(packed: torch.Tensor, tokens: Sequence[int], width: int) -> list[TokenLogprobs]:
    """The first rows of ``pack``'s on the host, which chose ``tokens``, cut to a width."""
    numbers = packed[: len(tokens)].numpy()
    floats, most = numbers.view("float32"), (numbers.shape[1] - 2) // 2
    columns = (
        floats[:, 0].tolist(),
        numbers[:, 1].tolist(),
        numbers[:, 2 : 2 + min(width, most)].tolist(),
        floats[:, 2 + most : 2 + most + width].tolist(),
    )
    return [
        TokenLogprobs(token, chosen, rank, tuple(zip(ids, top, strict=True)))
        for token, chosen, rank, ids, top in zip(tokens, *columns, strict=True)
    ]
