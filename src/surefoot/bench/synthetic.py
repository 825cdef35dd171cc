"""Synthetic acceptance: drafts that are right at given rates, whatever the model.

For measurements of speed on random weights. What the target samples is replaced by the draft or by
another token, so that draft j is accepted with the unconditional rate of its place. The drafts are
those of any proposer of chains, which does all its work, or of one here, which has none. The texts
mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.speculation import registry
from surefoot.speculation.layout import RoundPlan
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.replay import ReplayRound
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
        draft_tokens: int = 4

    options: Options

    def needs(self) -> Needs:
        return Needs(longest_draft=self.options.draft_tokens)

    def propose(self, slots: torch.Tensor) -> Drafts:
        width = min(self.options.draft_tokens, self.state.max_drafts)
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

    def __init__(self, replay: ReplayRound, rates: Sequence[Sequence[float]]) -> None:
        state = replay.state
        self.state = state
        width = state.max_drafts
        table = torch.zeros((state.slots, width + 1))
        for slot in range(state.slots):
            own = rates[slot % len(rates)]
            before = 1.0
            for place, rate in enumerate(own[:width]):
                table[slot, place] = rate / before if before > 0 else 0.0
                before = rate
        self.conditional = table.to(state.device)
        controller = replay.controller
        alone = len(controller.names) == 1
        # One proposer's offers are known to rounds that the host plans, too.
        self.tokens = controller.tokens[0] if alone else replay.tokens
        self.lengths = controller.lengths[0] if alone else replay.lengths

    def __call__(
        self, spans: RoundSpans | None, layout: RoundLayout, sampled: torch.Tensor
    ) -> torch.Tensor:
        """int64 [M] -> int64 [M]."""
        slots, positions = layout.sample_slots, layout.sample_positions
        if self.state.device.type == "cuda":
            from surefoot.kernels.triton.acceptance import replace_sampled

            return replace_sampled(
                slots, positions, sampled, self.state.length, self.conditional,
                self.tokens, self.lengths, self.state.vocab_size,
            )  # fmt: skip
        place = (positions - self.state.length[slots]).clamp(0, self.state.max_drafts)
        offered = self.tokens[slots, place.clamp(max=self.state.max_drafts - 1)]
        other = draft_at(slots, positions, self.state)
        draft = torch.where(place < self.lengths[slots], offered, other)
        coin = _hash(slots, positions, 2).float() / 2**31
        right = coin < self.conditional[slots, place]
        return torch.where(right, draft, (draft + 1 + sampled % 7) % self.state.vocab_size)


def accept(replay: ReplayRound, rates: Sequence[float]) -> SyntheticAcceptance:
    """What makes a new engine accept drafts at these unconditional rates, for greedy requests: its
    ``override``."""
    acceptance, round_ = SyntheticAcceptance(replay, [rates]), replay.round
    sample = round_.sample

    def sample_so(plan: RoundPlan, layout: RoundLayout, *rest: Any) -> Any:
        sampled, logprobs = sample(plan, layout, *rest)
        if plan.sampled_rows:
            sampled = acceptance(None, layout, sampled)
        return sampled, logprobs

    # While some prompts are not finished the host plans; nobody should learn from noise then.
    setattr(round_, "sample", sample_so)  # noqa: B010
    return acceptance


def register() -> None:
    if NAME not in registry.names():
        registry.register(SyntheticProposer)
