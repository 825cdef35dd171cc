"""The book-keeping around a round in plain torch, on any device: the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from surefoot.kernels.rounds import (
    RoundLayout,
    RoundSpans,
    RoundVerdict,
    judge_and_advance,
    lay_out_spans,
)
from surefoot.speculation.books import LEAST, BookKeeping
from surefoot.speculation.estimator import lineage, rivals_of
from surefoot.speculation.proposer import Drafts

if TYPE_CHECKING:
    from surefoot.speculation.size import Size


class TorchBooks(BookKeeping):
    """``BookKeeping`` as sequences of tensor operations."""

    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        state, offers = self.state, self.offers
        missing = state.length[slots] - state.computed[slots]
        known = torch.minimum(quota, missing) * state.alive[slots]
        samples = ((known == missing) & (known > 0)).long()
        if not size.verifies:
            return RoundSpans(slots, known, torch.zeros_like(known), samples)
        room = torch.minimum(size.rows - known.sum(), size.samples - samples.sum())
        alone = (known == 1) & (missing == 1)
        drafts = fill_rows(offers.chances[slots] * alone.unsqueeze(1), room)
        self.write_drafts(slots, offers.tokens[slots])
        return RoundSpans(slots, known, drafts, samples)

    def lay_out(self, spans: RoundSpans, size: Size, max_keys: int) -> RoundLayout:
        state = self.state
        return lay_out_spans(
            spans, state.history, state.computed, state.block_tables,
            size.rows, size.samples, max_keys, size.longest_span(state.max_drafts),
        )  # fmt: skip

    def write_drafts(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        state = self.state
        columns = state.length[slots].unsqueeze(1)
        columns = columns + torch.arange(tokens.shape[1], device=state.device)
        state.history[slots.unsqueeze(1), columns] = tokens

    def judge(
        self, spans: RoundSpans, first_sample: torch.Tensor, sampled: torch.Tensor
    ) -> RoundVerdict:
        state = self.state
        return judge_and_advance(
            spans, first_sample, sampled, state.history, state.length, state.computed,
            state.limit, state.params.stop_ids, state.max_drafts,
        )  # fmt: skip

    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        controller = self.controller
        estimator = controller.estimators[index]
        estimator.learn(slots)
        if drafts is None:
            # Assigning to an index would copy the number from the host, which cannot be recorded.
            controller.lengths[index].index_fill_(0, slots, 0)
            return
        drafts = self._verifiable(index, slots, drafts)
        controller.tokens[index, slots] = drafts.tokens
        controller.lengths[index, slots] = drafts.lengths
        controller.confidence[index, slots] = drafts.confidence
        if controller.parents is not None and drafts.parents is not None:
            controller.parents[index, slots] = drafts.parents
        estimator.watch(slots, drafts)

    def _verifiable(self, index: int, slots: torch.Tensor, drafts: Drafts) -> Drafts:
        """The part of proposer ``index``'s offers that can be verified: drafts up to the first that
        is no token, or stands further behind the text than the request can still get."""
        state, width = self.state, self.state.max_drafts
        drafts = _padded(drafts, width)
        depths = torch.arange(1, width + 1, device=slots.device)
        if (parents := drafts.parents) is not None:
            parents = torch.minimum(parents, depths - 2).clamp(min=-1)
            depths = lineage(parents)[1]
        room = (state.limit[slots] - state.length[slots] - 1).unsqueeze(1)
        valid = (drafts.tokens >= 0) & (drafts.tokens < state.vocab_size) & (depths <= room)
        lengths = torch.minimum(drafts.lengths, valid.long().cumprod(dim=1).sum(dim=1))
        lengths = torch.minimum(lengths, self.controller.draft_limit[slots]).clamp(min=0)
        lengths = torch.where(self.controller.allowed[index, slots], lengths, 0)
        tokens = drafts.tokens.clamp(0, state.vocab_size - 1)
        return Drafts(tokens, lengths, drafts.confidence, parents)

    def choose_and_report(
        self, slots: torch.Tensor, drafts: torch.Tensor, verdict: RoundVerdict, proposing: bool
    ) -> None:
        state, offers = self.state, self.offers
        whose = offers.proposer[slots]
        if proposing:
            self._choose(verdict.going)
        elif state.max_drafts:
            # Offers of earlier rounds do not follow these tokens.
            self.controller.lengths.index_fill_(1, slots, 0)
            offers.clear(slots)
        # Unused entries share a slot: what they write must not depend on who is last.
        ended = state.alive[slots] * (verdict.ends != 0)
        state.alive.index_put_((slots,), -ended, accumulate=True)
        goes = verdict.going != state.padding_slot
        offered = torch.where(goes, offers.lengths[slots], 0)
        columns = [verdict.counts, verdict.accepted, verdict.ends, drafts, whose, offered]
        columns.append(offers.proposer[slots])
        numbers = torch.cat((torch.stack(columns, dim=1), verdict.tokens), dim=1).int()
        chances = offers.chances[slots] * goes.unsqueeze(1)
        parts = [numbers, chances.view(torch.int32), offers.tokens[slots].int()]
        if offers.parents is not None:
            parts.append(offers.parents[slots].int())
        torch.cat(parts, dim=1, out=self.report[: len(slots)])

    def _choose(self, slots: torch.Tensor) -> None:
        """Keep the most promising offer of each of ``slots`` [B]."""
        offers, controller = self.offers, self.controller
        rivals = rivals_of(controller.tokens[:, slots, 0], controller.lengths[:, slots])
        chances = torch.stack(
            [self._compared(index, slots, beside) for index, beside in enumerate(rivals)]
        )
        whose = chances.sum(dim=2).argmax(dim=0)
        chosen = whose, slots
        lengths = controller.lengths[chosen]
        offered = torch.arange(self.state.max_drafts, device=slots.device) < lengths.unsqueeze(1)
        best = chances[whose, torch.arange(len(slots), device=slots.device)]
        offers.tokens[slots] = controller.tokens[chosen]
        if offers.parents is not None and controller.parents is not None:
            offers.parents[slots] = controller.parents[chosen]
        offers.chances[slots] = torch.where(offered, best.clamp(min=LEAST), 0.0)
        offers.lengths[slots] = lengths
        offers.proposer[slots] = whose

    def _compared(self, index: int, slots: torch.Tensor, rivals: torch.Tensor) -> torch.Tensor:
        """Chances [B, K] of proposer ``index``'s offers, beside which there are ``rivals`` [B]."""
        estimator = self.controller.estimators[index]
        estimator.compare(slots, rivals)
        return estimator.chances(slots, self._offer_of(index, slots), rivals)

    def _offer_of(self, index: int, slots: torch.Tensor) -> Drafts:
        controller = self.controller
        parents = controller.parents if controller.trees[index] else None
        return Drafts(
            controller.tokens[index, slots],
            controller.lengths[index, slots],
            controller.confidence[index, slots],
            None if parents is None else parents[index, slots],
        )


def fill_rows(chances: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The ``room`` most likely drafts (a tensor without dimensions), by request: int64 [B].

    ``chances`` float32 [B, K] never rise along a row; drafts without a chance are left out."""
    flat = chances.flatten()
    order = flat.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(len(order), device=order.device))
    return ((rank < room) & (flat > 0)).view(chances.shape).sum(dim=1)


def _padded(drafts: Drafts, width: int) -> Drafts:
    """Offers in ``width`` columns; drafts that were not offered are no tokens."""
    missing = (0, max(0, width - drafts.tokens.shape[1]))
    parents = drafts.parents
    return replace(
        drafts,
        tokens=pad(drafts.tokens[:, :width], missing, value=-1),
        confidence=pad(drafts.confidence[:, :width], missing),
        parents=None if parents is None else pad(parents[:, :width], missing, value=-1),
    )
