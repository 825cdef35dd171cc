"""Logprobs as users see them: the target's own, before grammar masks, penalties, bias and
filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.request import MAX_LOGPROBS, TokenLogprobs

WIDTHS = (0, 5, 20, MAX_LOGPROBS)
"""Most likely tokens of a row that recorded rounds report: one of these numbers."""


def width_for(wanted: int) -> int:
    """The least of ``WIDTHS`` that serves so many."""
    return next(width for width in WIDTHS if width >= wanted)


def unpack(packed: torch.Tensor, tokens: Sequence[int], width: int) -> list[TokenLogprobs]:
    """The first rows of ``kernels.logprobs.row_logprobs``'s on the host, which chose ``tokens``,
    cut to a width."""
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
