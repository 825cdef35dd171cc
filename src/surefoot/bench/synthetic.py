"""Synthetic acceptance: drafts that are right at given rates, whatever the model.

For measurements of speed on random weights. A request's text is made up: each token is a function
of the request's seed and the token's position. Every token that the target samples is replaced by
it, and every draft that a proposer offers by this token or by another one, as a coin falls that is
a function of seed and position, too. So the text is the same in every kind of round, whoever is in
the batch and however many drafts are verified, and everything that handles drafts runs as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.speculation import registry
from surefoot.speculation.proposer import Drafts, Needs, Proposer
from surefoot.speculation.round import Round
from surefoot.speculation.state import SlotState

NAME = "synthetic"
ALWAYS = 1 << 31
"""A threshold that every coin is below."""


class SyntheticProposer(Proposer):
    """Offers so many drafts for every request; ``accept_at`` says which tokens they are."""

    name = NAME

    @dataclass(frozen=True)
    class Options:
        draft_tokens: int = 4

    options: Options

    def needs(self) -> Needs:
        return Needs(longest_draft=self.options.draft_tokens)

    def propose(self, slots: torch.Tensor) -> Drafts:
        width = min(self.options.draft_tokens, self.state.max_drafts)
        tokens = torch.zeros((len(slots), width), dtype=torch.int64, device=slots.device)
        lengths = torch.full_like(slots, width)
        return Drafts(tokens, lengths, torch.full(tokens.shape, 0.5, device=slots.device))


def accept_at(rates: Sequence[float]) -> Callable[[Round], None]:
    """What makes a new engine (its ``prepare``) accept drafts 1, 2, … at these rates: the shares of
    all rounds that verify so many in which they are right. Requests with one seed get one text."""

    def prepare(round_: Round) -> None:
        """The only place that knows where a round samples and where drafts come from."""
        state = round_.state
        always = torch.full((1,), ALWAYS, device=state.device)
        thresholds = conditional_thresholds(rates, state)

        def replace_sampled(
            spans: RoundSpans, layout: RoundLayout, sampled: torch.Tensor
        ) -> torch.Tensor:
            slots, positions = layout.sample_slots, layout.sample_positions
            if not len(slots):
                return sampled
            return tokens_at(state, slots, positions, always).flatten()

        def rewrite(propose: Callable[[torch.Tensor], Drafts]) -> Callable[[torch.Tensor], Drafts]:
            def propose_so(slots: torch.Tensor) -> Drafts:
                drafts = propose(slots)
                own = thresholds[: drafts.tokens.shape[1]]
                return replace(drafts, tokens=tokens_at(state, slots, state.length[slots], own))

            return propose_so

        round_.replace_sampled = replace_sampled
        for proposer in round_.proposers:
            if proposer.needs().trees:
                raise SurefootError(
                    "synthetic_acceptance", "has rates for chains, not trees", "use top_k=1"
                )
            setattr(proposer, "propose", rewrite(proposer.propose))  # noqa: B010

    return prepare


def conditional_thresholds(rates: Sequence[float], state: SlotState) -> torch.Tensor:
    """int64 [any draft's place]: a draft is right, after others that were, if its coin is below."""
    places = max(state.max_drafts, len(rates), 64)
    conditional, before = torch.zeros(places, dtype=torch.float64), 1.0
    for place, rate in enumerate(rates):
        conditional[place] = rate / before if before > 0 else 0.0
        before = rate
    return (conditional * ALWAYS).long().to(state.device)


def tokens_at(
    state: SlotState, slots: torch.Tensor, first: torch.Tensor, thresholds: torch.Tensor
) -> torch.Tensor:
    """int64 [B], [B], [K] -> [B, K]: for positions ``first`` and on of ``slots``, the text's own
    token where the position's coin is below the threshold, another one where not."""
    if state.device.type == "cuda":
        from surefoot.kernels.triton.acceptance import tokens_at as kernel

        return kernel(slots, first, state.params.seed, thresholds, state.vocab_size)
    positions = first.unsqueeze(1) + torch.arange(len(thresholds))
    seeds = state.params.seed[slots].unsqueeze(1)
    token = _hash(seeds, positions, 1) % state.vocab_size
    wrong = _hash(seeds, positions, 2) >= thresholds
    return (token + wrong) % state.vocab_size


def _hash(seeds: torch.Tensor, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Pseudo-random int64 in 0 .. 2**31 - 1."""
    x = (seeds * 7919 + positions * 104729 + salt * 1299709) & 0x7FFFFFFF
    for factor in (73244475, 73244475):
        x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 16)


def register() -> None:
    """Make the proposer known, once."""
    if NAME not in registry.names():
        registry.register(SyntheticProposer)
