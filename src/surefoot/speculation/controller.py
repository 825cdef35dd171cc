"""Which drafts are worth verifying: the law that speculation is never slower.

Proposers offer; each round ``split`` chooses how many drafts of each request to verify, so that
expected committed tokens per second of the whole batch are highest and no request's expected pace
falls under ``MIN_PACE`` of its plain pace in that batch. Everything is decided per request: one
with repetitive text keeps its drafts while its neighbour with prose gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.cpu.build import load_native
from surefoot.request import SpeculationParams
from surefoot.speculation.cost import CostModel
from surefoot.speculation.estimator import AcceptanceEstimator
from surefoot.speculation.native import split_rows_native
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.tree_estimator import TreeEstimator
from surefoot.speculation.trees import ancestors, chain_parents

MIN_PACE = 0.95
MIN_GAIN = 1.02
"""Verifying must promise this much over plain decoding: estimates of cost are noisy."""
PROBE_EVERY = 128
PROBE_OPTIMISM = 0.8


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

    def of(self, index: torch.Tensor) -> Choice:
        """The choices of some of the slots, in the order of ``index`` int64 [n]."""
        return Choice(
            self.proposer[index],
            self.tokens[index],
            self.lengths[index],
            self.chances[index],
            None if self.parents is None else self.parents[index],
        )


def split_rows(
    chances: torch.Tensor,
    table: torch.Tensor,
    min_gain: float = MIN_GAIN,
    min_pace: float = MIN_PACE,
) -> torch.Tensor:
    """How many drafts of each request to verify, int64 [B].

    ``chances`` float32 [B, K] as in ``Choice``; ``table`` float32 [n + 1]: seconds of the round
    without drafts and with up to n. Drafts are taken by falling chance; since it never rises
    along a row, what is taken is a prefix of each offer. Of the n best drafts, n is the one with
    the highest (B + sum of chances) / seconds.
    """
    library = load_native() if chances.device.type == "cpu" else None
    if library is None:
        return split_rows_reference(chances, table.to(chances.device), min_gain, min_pace)
    return split_rows_native(library, chances, table, min_gain, min_pace)


def split_rows_reference(
    chances: torch.Tensor,
    table: torch.Tensor,
    min_gain: float = MIN_GAIN,
    min_pace: float = MIN_PACE,
) -> torch.Tensor:
    """``split_rows`` in plain torch, on any device."""
    batch, width = chances.shape
    limit = min(batch * width, table.shape[0] - 1)
    order = chances.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    best = chances.flatten()[order][:limit]
    seconds = table[: limit + 1]
    slowdown = seconds / seconds[0]
    rate = (batch + torch.nn.functional.pad(best.cumsum(dim=0), (1, 0))) / slowdown
    fair = (1 + _poorest(chances, rank.view(batch, width))[: limit + 1]) >= min_pace * slowdown
    worth = (rate >= min_gain * batch) & fair
    worth[1:] &= best > 0
    rate = torch.where(worth, rate, 0.0)
    # Entry 0, no drafts, always stands: plain decoding.
    rate[0] = batch
    count = rate.argmax()
    return (rank < count).view(batch, width).sum(dim=1)


def _poorest(chances: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """What the request that gains least gains from the n best drafts, float32 [B * K + 1] by n.
    ``rank`` int64 [B, K]: how many drafts are better."""
    batch, width = chances.shape
    # A request has the gain of its first j drafts until draft j is taken. For any n, the gains it
    # will have later are larger, so the least of all whose end lies beyond n is the one wanted.
    gains = torch.nn.functional.pad(chances.cumsum(dim=1), (1, 0))
    ends = torch.nn.functional.pad(rank, (0, 1), value=batch * width)
    least = torch.full((batch * width + 1,), float("inf"), device=chances.device)
    least.scatter_reduce_(0, ends.flatten(), gains.flatten(), "amin")
    return least.flip(0).cummin(dim=0).values.flip(0)


def fill_rows(chances: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The ``room`` most likely drafts (a tensor without dimensions), by request: int64 [B].

    ``chances`` float32 [B, K] as in ``Choice``; drafts without a chance are left out."""
    flat = chances.flatten()
    order = flat.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(len(order), device=order.device))
    return ((rank < room) & (flat > 0)).view(chances.shape).sum(dim=1)


class Controller:
    """Keeps every proposer's offers and estimates; sizes each round."""

    def __init__(
        self,
        state: SlotState,
        proposers: Sequence[str],
        cost: CostModel,
        policy: str = "auto",
        trees: Sequence[bool] = (),
    ) -> None:
        """``trees``: which of the proposers offer trees."""
        self.state = state
        self.names = tuple(proposers)
        self.cost = cost
        self.policy = policy
        self.trees = tuple(trees) or (False,) * len(self.names)
        self.estimators = [
            TreeEstimator(state) if tree else AcceptanceEstimator(state) for tree in self.trees
        ]
        self.idle_rounds = 0
        self.probes = 0
        self.draft_seconds: dict[int, float] = {}
        """What the last round's drafting took, by proposer, as the host saw it."""
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

    def admit(self, slots: Sequence[int], choices: Sequence[SpeculationParams]) -> None:
        """Requests, new or resumed, entered these slots with these choices of speculation."""
        most = self.state.max_drafts
        limits = [most if c.max_draft_tokens is None else c.max_draft_tokens for c in choices]
        index = torch.tensor(slots, device=self.state.device)
        self.draft_limit[index] = torch.tensor(limits, device=self.state.device).clamp(max=most)
        self.lengths[:, index] = 0
        allowed = [[choice.allows(name) for choice in choices] for name in self.names]
        if allowed:
            self.allowed[:, index] = torch.tensor(allowed, device=self.state.device)
        for estimator in self.estimators:
            estimator.admit(index)

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
        self.lengths[index, slots] = 0

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

    def cut(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep of the offers for ``slots`` [B] only ``lengths`` [proposers, B] drafts: a grammar
        forbids what follows."""
        lengths = torch.minimum(self.lengths[:, slots], lengths)
        self.lengths[:, slots] = lengths
        for estimator, kept in zip(self.estimators, lengths, strict=True):
            estimator.shorten(slots, kept)

    def learn(self, slots: torch.Tensor) -> None:
        """Judge watched offers by the tokens that a round committed to ``slots``."""
        for estimator in self.estimators:
            estimator.learn(slots)

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

    def split(self, choice: Choice, base_rows: int) -> torch.Tensor:
        """Drafts of each request to verify in this round, int64 [B]."""
        if self.policy == "fixed":
            return choice.lengths
        return split_rows(choice.chances, self.cost.table(base_rows, choice.chances.numel()))

    def probe(self, choice: Choice, base_rows: int) -> torch.Tensor | None:
        """Once in ``PROBE_EVERY`` rounds whose offers were all turned down: what would be
        verified if verifying cost less than believed, so that a wrong belief about cost is found
        out. None otherwise. The host calls this after a ``split`` that came out empty."""
        self.idle_rounds += 1
        if self.policy == "fixed" or self.idle_rounds < PROBE_EVERY:
            return None
        self.idle_rounds = 0
        table = self.cost.table(base_rows, choice.chances.numel())
        cheaper = table[0] + PROBE_OPTIMISM * (table - table[0])
        counts = split_rows(choice.chances, cheaper, min_pace=0.0)
        self.probes += 1
        return counts
