"""The book-keeping around a round, on small tensors: who gets rows, what is accepted and learnt.

``BookKeeping`` is the interface. ``torch_books`` is the reference, for any device; ``native_books``
(C) and ``triton_books`` do the same where each tensor operation would cost too much. The backend
names the one that goes with it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from surefoot.kernels.backend import Backend
from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict
from surefoot.kernels.upload import Uploads
from surefoot.speculation import trees
from surefoot.speculation.controller import Controller
from surefoot.speculation.proposer import Commits, Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import NodeRows, Paths, Trees, chain_parents

if TYPE_CHECKING:
    from surefoot.speculation.size import Size

LEAST = 1e-6
"""The chance of what is offered, at least: rows that nobody else wants are for it."""
Propose = Callable[[int, torch.Tensor], Drafts]
"""(index of a proposer, slots int64 [B]) -> its offers."""
_IMPLEMENTATIONS = {
    "torch": "surefoot.speculation.torch_books:TorchBooks",
    "native": "surefoot.speculation.native_books:NativeBooks",
    "triton": "surefoot.speculation.triton_books:TritonBooks",
}
"""By ``Backend.book_keeping``."""


class Offers:
    """By slot, the offer that the next round may verify: ``tokens`` int64 and ``chances`` float32
    [slots, K] (of a draft and all before it; 0 beyond the offer), ``lengths`` and ``proposer``
    int64 [slots], and ``parents`` int64 [slots, K] where some proposer offers trees."""

    def __init__(self, state: SlotState, trees: bool) -> None:
        width, device = state.max_drafts, state.device
        self.tokens = torch.zeros((state.slots, width), dtype=torch.int64, device=device)
        self.chances = torch.zeros((state.slots, width), device=device)
        (self.lengths,) = state.zeroed(1)
        self.proposer = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.parents: torch.Tensor | None = None
        if trees:
            self.parents = chain_parents(state.slots, width, device)

    def forget(self, slots: np.ndarray, uploads: Uploads) -> None:
        """Have ``uploads`` say that other requests enter ``slots`` int64 [B], which are ``zeroed``
        already."""
        uploads.clear(self.chances, slots, 0)

    def clear(self, slots: torch.Tensor) -> None:
        """Nothing is on offer for ``slots`` int64 [B]."""
        self.lengths.index_fill_(0, slots, 0)
        self.chances.index_fill_(0, slots, 0.0)


class ReportColumns:
    """Columns of a round's report, int32 [spans, count], for K drafts at most: tokens committed,
    drafts accepted, how the text ended, drafts verified, whose they were, drafts on offer for the
    next round, whose these are, then the tokens [K + 1], and of the offer the chances (float32
    bits) [K], the tokens [K] and, where some proposer offers trees, the parents [K]."""

    COUNT, ACCEPTED, END, VERIFIED, WHOSE, OFFERED, OFFERER, FIRST_TOKEN = range(8)

    def __init__(self, max_drafts: int, trees: bool) -> None:
        self.trees = trees
        self.chances = self.FIRST_TOKEN + max_drafts + 1
        self.offer = self.chances + max_drafts
        self.parents = self.offer + max_drafts
        self.count = self.parents + (max_drafts if trees else 0)

    def read_offer(self, row: list[int]) -> tuple[int, list[int], list[int] | None]:
        """(Whose it is, tokens, parents) of a row's offer; no parents for a chain."""
        length = row[self.OFFERED]
        parents = row[self.parents : self.parents + length] if self.trees else None
        return row[self.OFFERER], row[self.offer : self.offer + length], parents


class BookKeeping(ABC):
    """Splits a round's rows over the offers, lays them out, accepts, judges earlier offers by new
    tokens, takes new ones in, and reports. ``slots`` int64 [B] are a round's; entries without a
    request stand on the idle slot, and change nothing."""

    def __init__(
        self, backend: Backend, state: SlotState, controller: Controller, spans: int
    ) -> None:
        """``spans``: the most of a round."""
        self.backend = backend
        self.state = state
        self.controller = controller
        self.offers = Offers(state, controller.parents is not None)
        self.columns = ReportColumns(state.max_drafts, controller.parents is not None)
        shape = spans, self.columns.count
        self.report = torch.zeros(shape, dtype=torch.int32, device=state.device)

    @abstractmethod
    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        """The spans of a round. Known rows: what a slot's text lacks KV for, up to its ``quota``
        (int64 [B]); the rest of the rows goes to the likeliest drafts of requests that have
        nothing but their current token to run. Drafts stand behind the committed tokens then."""

    @abstractmethod
    def lay_out(self, spans: RoundSpans, size: Size, max_keys: int) -> RoundLayout:
        """The flat batch of the spans, drafts in a line; texts hold at most ``max_keys`` tokens
        after the round. Rows beyond the spans are padding, sampled rows beyond them repeat others.
        """

    @abstractmethod
    def write_drafts(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put drafts [B, K] behind the committed tokens of ``slots``; columns beyond those that are
        verified are never read."""

    @abstractmethod
    def judge(
        self, spans: RoundSpans, first_sample: torch.Tensor, sampled: torch.Tensor
    ) -> RoundVerdict:
        """Accept the drafts that equal what their rows sampled, int64 [M], of which each span's
        begin at ``first_sample`` int64 [B]; cut at ends, commit."""

    @abstractmethod
    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        """Judge what is in view of proposer ``index``'s offers by the tokens of ``slots``, and
        enter its ``drafts`` for the next round, cut to what can be verified: valid ids, the
        request's own limit, and at most one draft less than the tokens still allowed. None: it
        offers nothing, and its last offers no longer fit."""

    @abstractmethod
    def choose_and_report(
        self, slots: torch.Tensor, drafts: torch.Tensor, verdict: RoundVerdict, proposing: bool
    ) -> None:
        """Keep the most promising offer of each request that goes on, or none of ``slots`` where
        nobody was ``proposing``; mark who ended; write the report. ``drafts`` int64 [B]: those
        verified."""

    def cut(self, cuts: torch.Tensor) -> None:
        """What is on offer for some slots was cut, by a grammar: no more of it is verified, nor
        judged. ``cuts`` int64 [3, n]: the slots, whose offers these are, and their lengths now."""
        (slots, proposers, lengths), offers = cuts, self.offers
        inside = torch.arange(offers.chances.shape[1], device=cuts.device) < lengths.unsqueeze(1)
        offers.lengths[slots] = lengths
        offers.chances[slots] = torch.where(inside, offers.chances[slots], 0.0)
        records, length = self.controller.records, self.state.length[slots]
        if not (count := len(records.watched_length)):
            return
        # What the host's proposers offer is in view on the host.
        at = proposers.clamp(max=count - 1), slots
        watched = records.watched_length[at]
        last = (records.watched_start[at] == length) & (proposers < count)
        records.watched_length[at] = torch.where(last, torch.minimum(watched, lengths), watched)

    def finish(
        self,
        slots: torch.Tensor,
        size: Size,
        drafts: torch.Tensor,
        verdict: RoundVerdict,
        propose: Propose,
    ) -> None:
        """Judge earlier offers by the new tokens, take the offers for the next round, and report.
        Where somebody proposes, the offers of the others are judged, too."""
        if size.proposers:
            for index in range(len(self.controller.names)):
                offers = None
                # A round that was sized, or recorded, before a proposer was switched off names it.
                if index in size.proposers and index in self.controller.active:
                    offers = propose(index, verdict.going)
                self.learn(index, verdict.going, offers)
        self.choose_and_report(slots, drafts, verdict, bool(size.proposers))

    def within(self, drafts: Drafts, room: torch.Tensor) -> Drafts:
        """The leading drafts that stand at most ``room`` int64 [B] positions behind the committed
        text."""
        parents = drafts.parents
        if parents is None:
            return replace(drafts, lengths=torch.minimum(drafts.lengths, room.clamp(min=0)))
        order = torch.arange(parents.shape[1], device=room.device)
        parents = torch.minimum(parents, order - 1).clamp(min=-1)
        inside = self.ancestors(parents)[1][:, 1:] <= room.unsqueeze(1)
        fitting = inside.long().cumprod(dim=1).sum(dim=1)
        return replace(drafts, lengths=torch.minimum(drafts.lengths, fitting))

    # --- trees: as ``speculation.trees`` has them ---------------------------------------------

    def ancestors(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``trees.ancestors``."""
        return trees.ancestors(parents)

    def offered_trees(self, slots: torch.Tensor) -> Trees:
        """What is on offer for ``slots`` int64 [B], where some proposer offers trees."""
        assert self.offers.parents is not None
        parents = self.offers.parents[slots]
        return Trees(self.offers.tokens[slots], parents, *self.ancestors(parents))

    def node_rows(self, layout: RoundLayout, offered: Trees, drafts: torch.Tensor) -> NodeRows:
        """``trees.node_rows``."""
        return trees.node_rows(layout, offered, drafts)

    def walk(
        self,
        offered: Trees,
        sampled: torch.Tensor,
        first_sample: torch.Tensor,
        drafts: torch.Tensor,
    ) -> tuple[Paths, torch.Tensor]:
        """``trees.walk``."""
        return trees.walk(offered, sampled, first_sample, drafts)

    def follow_paths(
        self, commits: Commits, layout: RoundLayout, rows: NodeRows, offered: Trees, paths: Paths
    ) -> Commits:
        """``trees.follow_paths``."""
        return trees.follow_paths(commits, layout, rows, offered, paths)


def book_keeping(
    backend: Backend, state: SlotState, controller: Controller, spans: int
) -> BookKeeping:
    """The implementation that ``backend`` names."""
    module, _, name = _IMPLEMENTATIONS[backend.book_keeping].partition(":")
    return getattr(importlib.import_module(module), name)(backend, state, controller, spans)
