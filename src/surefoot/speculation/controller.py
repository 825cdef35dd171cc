"""What proposers offer to each request, and how likely each draft is right.

Proposers offer; the best offer of each request, with the chance that each of its drafts is
accepted, is what a round may verify. Everything is decided per request: one with repetitive text
keeps its drafts while its neighbour with prose gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.upload import upload
from surefoot.request import SpeculationParams
from surefoot.speculation.estimator import AcceptanceEstimator
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.tree_estimator import TreeEstimator
from surefoot.speculation.trees import ancestors, chain_parents


@dataclass(frozen=True)
class Choice:
    """The offers a round may verify, for B slots: whose, the drafts, and each one's chance."""

    proposer: torch.Tensor
    """int64 [B]: index of the proposer."""
    tokens: torch.Tensor
    """int64 [B, K]."""
    lengths: torch.Tensor
    """int64 [B]."""
    chances: torch.Tensor
    """float32 [B, K]: that a draft and all before it are accepted; never rises along a row."""
    parents: torch.Tensor | None = None
    """int64 [B, K] where some offer may be a tree (see ``Drafts``)."""


def fill_rows(chances: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The ``room`` most likely drafts (a tensor without dimensions), by request: int64 [B].

    ``chances`` float32 [B, K] as in ``Choice``; drafts without a chance are left out."""
    flat = chances.flatten()
    order = flat.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(len(order), device=order.device))
    return ((rank < room) & (flat > 0)).view(chances.shape).sum(dim=1)


class Controller:
    """Keeps every proposer's offers, and what is learnt of their chances."""

    def __init__(
        self, state: SlotState, proposers: Sequence[str], trees: Sequence[bool] = ()
    ) -> None:
        """``trees``: which of the proposers offer trees."""
        self.state = state
        self.names = tuple(proposers)
        self.trees = tuple(trees) or (False,) * len(self.names)
        self.estimators = [
            TreeEstimator(state) if tree else AcceptanceEstimator(state) for tree in self.trees
        ]
        count, slots, width = len(self.names), state.slots, state.max_drafts
        device = state.device
        self.tokens = torch.zeros((count, slots, width), dtype=torch.int64, device=device)
        self.lengths = torch.zeros((count, slots), dtype=torch.int64, device=device)
        self.confidence = torch.zeros((count, slots, width), device=device)
        self.parents: torch.Tensor | None = None
        if any(self.trees):
            self.parents = chain_parents(count * slots, width, device).reshape(count, slots, width)
            self.parents = self.parents.clone()
        self.allowed = torch.zeros((count, slots), dtype=torch.bool, device=device)
        self.draft_limit = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slots: torch.Tensor, choices: Sequence[SpeculationParams]) -> None:
        """Requests, new or resumed, entered ``slots`` int64 [B] with these choices of
        speculation."""
        most, device = self.state.max_drafts, self.state.device
        limits = [most if c.max_draft_tokens is None else c.max_draft_tokens for c in choices]
        self.draft_limit[slots] = upload([min(limit, most) for limit in limits], device)
        if self.names:
            self.lengths.index_fill_(1, slots, 0)
            allowed = [[c.allows(name) for c in choices] for name in self.names]
            self.allowed[:, slots] = upload(allowed, device)
        for estimator in self.estimators:
            estimator.admit(slots)

    def offer(self, index: int, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        """Enter proposer ``index``'s offers for the next round, cut to what can be verified: valid
        ids, the request's own limit, and at most one draft less than the tokens still allowed.
        Returns the offers' lengths after that, int64 [B]."""
        drafts = self.sanitise(index, slots, drafts)
        self.tokens[index, slots] = drafts.tokens
        self.lengths[index, slots] = drafts.lengths
        self.confidence[index, slots] = drafts.confidence
        if self.parents is not None and drafts.parents is not None:
            self.parents[index, slots] = drafts.parents
        self.estimators[index].watch(slots, drafts)
        return drafts.lengths

    def withdraw(self, index: int, slots: torch.Tensor) -> None:
        """Proposer ``index`` offers nothing for the next round; its last offers no longer fit."""
        # Assigning to an index would copy the number from the host, which cannot be recorded.
        self.lengths[index].index_fill_(0, slots, 0)

    def sanitise(self, index: int, slots: torch.Tensor, drafts: Drafts) -> Drafts:
        """The part of proposer ``index``'s offers that can be verified."""
        if (drafts.parents is not None) != self.trees[index]:
            kind = "a chain" if drafts.parents is None else "a tree"
            raise SurefootError(
                "proposers", f"{self.names[index]!r} offers {kind}", "its needs() say otherwise"
            )
        if drafts.parents is not None:
            return self._sanitise_tree(index, slots, drafts, drafts.parents)
        state, width = self.state, self.state.max_drafts
        if state.native is not None:
            return Drafts(
                *state.native.sanitise(
                    slots,
                    drafts.tokens,
                    drafts.lengths,
                    drafts.confidence,
                    state.vocab_size,
                    self.allowed[index],
                    self.draft_limit,
                )
            )
        tokens, confidence = drafts.tokens[:, :width], drafts.confidence[:, :width]
        if tokens.shape[1] < width:
            missing = (0, width - tokens.shape[1])
            tokens = torch.nn.functional.pad(tokens, missing, value=-1)
            confidence = torch.nn.functional.pad(confidence, missing)
        valid = (tokens >= 0) & (tokens < state.vocab_size)
        run = valid.long().cumprod(dim=1).sum(dim=1)
        room = state.limit[slots] - state.length[slots] - 1
        lengths = torch.minimum(torch.minimum(drafts.lengths, run), room)
        lengths = torch.minimum(lengths, self.draft_limit[slots]).clamp(min=0)
        lengths = torch.where(self.allowed[index, slots], lengths, 0)
        return Drafts(tokens.clamp(0, state.vocab_size - 1), lengths, confidence)

    def _sanitise_tree(
        self, index: int, slots: torch.Tensor, drafts: Drafts, parents: torch.Tensor
    ) -> Drafts:
        """Nodes up to the first that is no token, or deeper than the request can still get."""
        state, width = self.state, self.state.max_drafts
        tokens, confidence = drafts.tokens[:, :width], drafts.confidence[:, :width]
        parents = parents[:, :width]
        if tokens.shape[1] < width:
            missing = (0, width - tokens.shape[1])
            tokens = torch.nn.functional.pad(tokens, missing, value=-1)
            confidence = torch.nn.functional.pad(confidence, missing)
            parents = torch.nn.functional.pad(parents, missing, value=-1)
        order = torch.arange(width, device=state.device)
        parents = torch.minimum(parents, order - 1).clamp(min=-1)
        room = (state.limit[slots] - state.length[slots] - 1).unsqueeze(1)
        valid = (tokens >= 0) & (tokens < state.vocab_size)
        valid = valid & (ancestors(parents)[1][:, 1:] <= room)
        lengths = torch.minimum(drafts.lengths, valid.long().cumprod(dim=1).sum(dim=1))
        lengths = torch.minimum(lengths, self.draft_limit[slots]).clamp(min=0)
        lengths = torch.where(self.allowed[index, slots], lengths, 0)
        return Drafts(tokens.clamp(0, state.vocab_size - 1), lengths, confidence, parents)

    def learn(self, slots: torch.Tensor, proposers: Sequence[int]) -> None:
        """Judge the watched offers of ``proposers`` by the tokens that a round committed to
        ``slots``. Those of the others are kept in view until they propose again."""
        for index in proposers:
            self.estimators[index].learn(slots)

    def choose(self, slots: torch.Tensor) -> Choice:
        """The most promising offer of each of ``slots`` [B]."""
        if len(self.names) == 1:
            offers = self._offers(0, slots)
            chances = self.estimators[0].chances(slots, offers)
            proposer = torch.zeros_like(slots)
            return Choice(proposer, offers.tokens, offers.lengths, chances, offers.parents)
        chances = torch.stack(
            [
                estimator.chances(slots, self._offers(index, slots))
                for index, estimator in enumerate(self.estimators)
            ]
        )
        proposer = chances.sum(dim=2).argmax(dim=0)
        chosen = proposer, slots
        batch = torch.arange(len(slots), device=slots.device)
        return Choice(
            proposer,
            self.tokens[chosen],
            self.lengths[chosen],
            chances[proposer, batch],
            None if self.parents is None else self.parents[chosen],
        )

    def _offers(self, index: int, slots: torch.Tensor) -> Drafts:
        parents = self.parents if self.trees[index] else None
        return Drafts(
            self.tokens[index, slots],
            self.lengths[index, slots],
            self.confidence[index, slots],
            None if parents is None else parents[index, slots],
        )
