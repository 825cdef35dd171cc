"""What may be verified next: the best offer of every slot, and the book-keeping around a round.

``OfferBooks`` is the reference in torch, for any device; ``compiled_control`` does the same in a
few kernels on an NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.speculation.controller import Controller, fill_rows
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import chain_parents

if TYPE_CHECKING:
    from surefoot.speculation.round import Size

LEAST = 1e-6
"""The chance of what is offered, at least: rows that nobody else wants are for it."""
Propose = Callable[[int, torch.Tensor], Drafts]
"""(index of a proposer, slots int64 [B]) -> its offers."""


class Offers:
    """By slot, the offer that the next round may verify: ``tokens`` int64 and ``chances`` float32
    [slots, K] (of a draft and all before it; 0 beyond the offer), ``lengths`` and ``proposer``
    int64 [slots], and ``parents`` int64 [slots, K] where some proposer offers trees."""

    def __init__(self, state: SlotState, trees: bool) -> None:
        width, device = state.max_drafts, state.device
        self.tokens = torch.zeros((state.slots, width), dtype=torch.int64, device=device)
        self.chances = torch.zeros((state.slots, width), device=device)
        self.lengths = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.proposer = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.parents: torch.Tensor | None = None
        if trees:
            self.parents = chain_parents(state.slots, width, device).clone()

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


class OfferBooks:
    """Splits a round's rows over the offers, judges earlier offers by new tokens, takes new ones
    in, and reports."""

    def __init__(self, state: SlotState, controller: Controller, spans: int) -> None:
        """``spans``: the most of a round."""
        self.state = state
        self.controller = controller
        self.offers = Offers(state, controller.parents is not None)
        self.columns = ReportColumns(state.max_drafts, self.offers.parents is not None)
        shape = spans, self.columns.count
        self.report = torch.zeros(shape, dtype=torch.int32, device=state.device)

    def admit(self, slots: Sequence[int]) -> None:
        """Requests, new or resumed, entered these slots."""
        self.offers.clear(torch.tensor(slots, device=self.state.device))

    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        """The spans of a round. Known rows: what a slot's text lacks KV for, up to its ``quota``
        (int64 [B]); the rest of the rows goes to the likeliest drafts of requests that have
        nothing but their current token to run. Drafts stand behind the committed tokens then."""
        state, offers = self.state, self.offers
        if state.native is not None:
            return state.native.split(slots, quota, size.rows, size.samples, offers, size.verifies)
        missing = state.length[slots] - state.computed[slots]
        known = torch.minimum(quota, missing) * state.alive[slots]
        samples = ((known == missing) & (known > 0)).long()
        if not size.verifies:
            return RoundSpans(slots, known, torch.zeros_like(known), samples)
        room = torch.minimum(size.rows - known.sum(), size.samples - samples.sum())
        alone = (known == 1) & (missing == 1)
        drafts = fill_rows(offers.chances[slots] * alone.unsqueeze(1), room)
        self.write(slots, offers.tokens[slots])
        return RoundSpans(slots, known, drafts, samples)

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put drafts [B, K] behind the committed tokens of ``slots`` [B]; columns beyond those
        that are verified are never read."""
        state = self.state
        if state.native is not None:
            state.native.write_drafts(slots, tokens)
            return
        columns = state.length[slots].unsqueeze(1)
        columns = columns + torch.arange(tokens.shape[1], device=state.device)
        state.history[slots.unsqueeze(1), columns] = tokens

    def finish(
        self,
        slots: torch.Tensor,
        size: Size,
        drafts: torch.Tensor,
        verdict: RoundVerdict,
        propose: Propose,
    ) -> None:
        """Judge earlier offers of ``slots`` [B] by the new tokens, take the offers for the next
        round, and report. ``drafts`` int64 [B]: those verified."""
        state, controller, offers = self.state, self.controller, self.offers
        whose, going = offers.proposer[slots], verdict.going
        if size.proposers:
            controller.learn(going)
            for index in range(len(controller.names)):
                if index in size.proposers:
                    controller.offer(index, going, propose(index, going))
                else:
                    controller.withdraw(index, going)
            self._keep(going)
        elif state.max_drafts and controller.names:
            # Offers of earlier rounds do not follow these tokens.
            controller.lengths.index_fill_(1, slots, 0)
            offers.clear(slots)
        self._report(slots, drafts, whose, verdict)

    def _keep(self, slots: torch.Tensor) -> None:
        offers, choice = self.offers, self.controller.choose(slots)
        offers.tokens[slots] = choice.tokens
        if offers.parents is not None and choice.parents is not None:
            offers.parents[slots] = choice.parents
        steps = torch.arange(self.state.max_drafts, device=slots.device)
        offered = steps < choice.lengths.unsqueeze(1)
        offers.chances[slots] = torch.where(offered, choice.chances.clamp(min=LEAST), 0.0)
        offers.lengths[slots] = choice.lengths
        offers.proposer[slots] = choice.proposer

    def _report(
        self, slots: torch.Tensor, drafts: torch.Tensor, whose: torch.Tensor, verdict: RoundVerdict
    ) -> None:
        offers, state = self.offers, self.state
        if state.native is not None:
            state.native.report(slots, drafts, whose, verdict, offers, self.report)
            return
        # Unused entries share a slot: what they write must not depend on who is last.
        ended = state.alive[slots] * (verdict.ends != 0)
        state.alive.index_put_((slots,), -ended, accumulate=True)
        goes = verdict.going != self.state.idle_slot
        offered = torch.where(goes, offers.lengths[slots], 0)
        columns = [verdict.counts, verdict.accepted, verdict.ends, drafts, whose, offered]
        columns.append(offers.proposer[slots])
        numbers = torch.cat((torch.stack(columns, dim=1), verdict.tokens), dim=1).int()
        chances = offers.chances[slots] * goes.unsqueeze(1)
        parts = [numbers, chances.view(torch.int32), offers.tokens[slots].int()]
        if offers.parents is not None:
            parts.append(offers.parents[slots].int())
        torch.cat(parts, dim=1, out=self.report[: len(slots)])
