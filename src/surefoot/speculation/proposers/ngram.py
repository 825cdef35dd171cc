"""Prompt lookup: offer what followed the latest earlier occurrence of the text's last tokens.

The longest matching suffix wins, from ``max_ngram`` down to ``min_ngram`` tokens, and among equals
the latest. Where the continuation reaches the end of the text it goes on periodically, so a loop
is offered at full length. (Prompt lookup decoding, Saxena, 2023; LLMA, Yang et al., 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.errors import SurefootError
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class NgramOptions:
    """``window`` bounds how many of the latest tokens are searched, and so the cost."""

    min_ngram: int = 2
    max_ngram: int = 5
    window: int = 2048

    def __post_init__(self) -> None:
        for name, low in (("min_ngram", 1), ("max_ngram", self.min_ngram), ("window", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise SurefootError(f"ngram.{name}", f"{value!r} is below {low}")


class NgramProposer(Proposer):
    name = "ngram"
    Options = NgramOptions
    options: NgramOptions

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts)

    def propose(self, slots: torch.Tensor) -> Drafts:
        options = self.options
        return lookup(
            self.state,
            slots,
            options.min_ngram,
            options.max_ngram,
            min(options.window, self.state.history.shape[1]),
        )


def lookup(
    state: SlotState, slots: torch.Tensor, min_ngram: int, max_ngram: int, window: int
) -> Drafts:
    """The offer of every slot, as tensor operations over [B, window] tokens."""
    length = state.length[slots].unsqueeze(1)
    columns = torch.arange(window, device=slots.device)
    # The window is aligned to the end of the text: its last column is the current token.
    position = length - window + columns
    text = state.history[slots].gather(1, position.clamp(min=0))
    text = torch.where(position >= 0, text, -1)
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
    size = matched.gather(1, best)
    found = (size >= min_ngram).squeeze(1)
    drafts = state.max_drafts
    period = window - 1 - best
    offset = torch.arange(drafts, device=slots.device) % period.clamp(min=1)
    tokens = text.gather(1, (best + 1 + offset).clamp(max=window - 1))
    confidence = (size / (max_ngram + 1)).float().expand(-1, drafts)
    return Drafts(tokens, torch.where(found, drafts, 0), confidence)
