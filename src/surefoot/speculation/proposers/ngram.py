"""Prompt lookup: offer what followed the latest earlier occurrence of the text's last tokens.

The longest matching suffix wins, from ``max_ngram`` down to ``min_ngram`` tokens, and among equals
the latest. Where the continuation reaches the end of the text it goes on periodically, so a loop
is offered at full length. (Prompt lookup decoding, Saxena, 2023; LLMA, Yang et al., 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.errors import SurefootError
from surefoot.models.decoder import Decoder
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class NgramOptions:
    """``draft_tokens``: how many are offered (None: the engine's ``max_draft_tokens``, or 8).
    ``window`` bounds how many of the latest tokens are searched, and so the cost."""

    draft_tokens: int | None = None
    min_ngram: int = 2
    max_ngram: int = 5
    window: int = 2048

    def __post_init__(self) -> None:
        for name, low in (("min_ngram", 1), ("max_ngram", self.min_ngram), ("window", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise SurefootError(f"ngram.{name}", f"{value!r} is below {low}")
        drafts = self.draft_tokens
        if drafts is not None and not (isinstance(drafts, int) and drafts >= 1):
            raise SurefootError("ngram.draft_tokens", f"{drafts!r} is below 1")


class NgramProposer(Proposer):
    name = "ngram"
    Options = NgramOptions
    options: NgramOptions

    def __init__(self, options: NgramOptions, state: SlotState) -> None:
        super().__init__(options, state)
        self.longest = min(options.draft_tokens or state.max_drafts, state.max_drafts)

    def load(self, target: Decoder) -> None:
        self.drafting = target.backend.drafting

    def needs(self) -> Needs:
        return Needs(longest_draft=self.longest)

    def propose(self, slots: torch.Tensor) -> Drafts:
        state, options = self.state, self.options
        matches = self.drafting.ngram_lookup(
            state.history,
            state.length,
            slots,
            options.min_ngram,
            options.max_ngram,
            options.window,
            self.longest,
        )
        return Drafts(*matches)
