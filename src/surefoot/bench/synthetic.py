"""Synthetic acceptance: drafts that are right at given rates, whatever the model.

For measurements of speed on random weights. What the target samples is replaced by the draft or by
another token, so that draft j is accepted with the unconditional rate of its place. The drafts are
those of any proposer of chains, which does all its work, or of one here, which has none. The texts
mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.speculation import registry
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.round import Round
from surefoot.speculation.state import SlotState

NAME = "synthetic"


def _hash(slots: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Pseudo-random int64 in 0 .. 2**31 - 1."""
    x = (slots * 7919 + positions * 104729 + salt * 1299709) & 0x7FFFFFFF
    for factor in (73244475, 73244475):
        x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 16)


class SyntheticProposer(Proposer):
    """Offers the same random tokens for a position whenever it is asked."""

    name = NAME

    @dataclass(frozen=True)
    class Options:
        length: int = 4

    options: Options

    def needs(self) -> Needs:
        return Needs(longest_draft=self.options.length)

    def propose(self, slots: torch.Tensor) -> Drafts:
        width = min(self.options.length, self.state.max_drafts)
        steps = torch.arange(width, device=slots.device)
        positions = self.state.length[slots].unsqueeze(1) + steps
        tokens = draft_at(slots.unsqueeze(1), positions, self.state)
        lengths = torch.full_like(slots, width)
        return Drafts(tokens, lengths, torch.full(tokens.shape, 0.5, device=slots.device))


def draft_at(slots: torch.Tensor, positions: torch.Tensor, state: SlotState) -> torch.Tensor:
    return _hash(slots, positions, 1) % state.vocab_size


class SyntheticAcceptance:
    """Replaces sampled tokens by the drafts on offer, whoever made them (chains), or by others:
    ``rates[slot]`` are the unconditional rates of drafts 1, 2, …"""

    def __init__(self, round_: Round, rates: Sequence[Sequence[float]]) -> None:
        self.state = state = round_.state
        self.offers = round_.books.offers
        width = state.max_drafts
        table = torch.zeros((state.slots, width + 1))
        for slot in range(state.slots):
            own = rates[slot % len(rates)]
            before = 1.0
            for place, rate in enumerate(own[:width]):
                table[slot, place] = rate / before if before > 0 else 0.0
                before = rate
        self.conditional = table.to(state.device)

    def __call__(
        self, spans: RoundSpans, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        """int64 [M] -> int64 [M]."""
        slots, positions = layout.sample_slots, layout.sample_positions
        tokens, lengths = self.offers.tokens, self.offers.lengths
        if not len(slots):
            return sampled
        if self.state.device.type == "cuda":
            from surefoot.kernels.triton.acceptance import replace_sampled

            return replace_sampled(
                slots, positions, sampled, self.state.length, self.conditional,
                tokens, lengths, self.state.vocab_size,
            )  # fmt: skip
        place = (positions - self.state.length[slots]).clamp(0, self.state.max_drafts)
        offered = tokens[slots, place.clamp(max=self.state.max_drafts - 1)]
        other = draft_at(slots, positions, self.state)
        draft = torch.where(place < lengths[slots], offered, other)
        coin = _hash(slots, positions, 2).float() / 2**31
        right = coin < self.conditional[slots, place]
        return torch.where(right, draft, (draft + 1 + sampled % 7) % self.state.vocab_size)


def accept(round_: Round, rates: Sequence[float]) -> SyntheticAcceptance:
    """What makes an engine accept drafts at these unconditional rates, for greedy requests: its
    ``replace_sampled``."""
    return SyntheticAcceptance(round_, [rates])


def register() -> None:
    if NAME not in registry.names():
        registry.register(SyntheticProposer)
