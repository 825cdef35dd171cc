"""Search for the latest tokens earlier in the text, over all slots at once: the torch twin."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Matches(NamedTuple):
    """What a lookup found for B texts."""

    tokens: torch.Tensor
    """int64 [B, drafts]: what follows, meaningless where nothing was found."""
    lengths: torch.Tensor
    """int64 [B]: ``drafts``, or 0 where nothing was found."""
    confidence: torch.Tensor
    """float32 [B, drafts]: of each text the size of its match as a part of one more than the
    largest, all along the row."""


def ngram_lookup(
    history: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    min_ngram: int,
    max_ngram: int,
    window: int,
    drafts: int,
) -> Matches:
    """What followed the longest earlier occurrence of each text's last tokens.

    ``history`` int64 [slots, width] and ``length`` int64 [slots] hold the texts, ``slots`` int64
    [B] says which. Only the last ``window`` tokens are searched, for matches of ``min_ngram`` to
    ``max_ngram`` tokens. The latest of equally long ones wins; a continuation that reaches the end
    of the text goes on periodically.
    """
    window = min(window, history.shape[1])
    columns = torch.arange(window, device=slots.device)
    # The window is aligned to the end of the text: its last column is the current token.
    position = length[slots].unsqueeze(1) - window + columns
    text = history[slots.unsqueeze(1), position.clamp(min=0)]
    # matched[e] = length of the common suffix of text[..e] and the whole text, up to max_ngram.
    alive = torch.ones_like(text, dtype=torch.bool)
    matched = torch.zeros_like(text)
    for back in range(min(max_ngram, window - 1)):
        same = torch.zeros_like(alive)
        same[:, back:] = text[:, : window - back] == text[:, window - 1 - back].unsqueeze(1)
        alive = alive & same & (position >= back)
        matched = matched + alive
    matched[:, -1] = 0
    best = (matched * window + columns).argmax(dim=1, keepdim=True)
    size = matched.gather(1, best).squeeze(1)
    period = window - 1 - best
    offset = torch.arange(drafts, device=slots.device) % period.clamp(min=1)
    tokens = text.gather(1, (best + 1 + offset).clamp(max=window - 1))
    size = torch.where(size >= min_ngram, size, 0)
    confidence = (size / (max_ngram + 1)).unsqueeze(1).expand(tokens.shape)
    return Matches(tokens, torch.where(size > 0, drafts, 0), confidence)
