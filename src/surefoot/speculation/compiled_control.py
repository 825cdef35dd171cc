"""The book-keeping around a round in a few kernels of the backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.speculation.books import LEAST, OfferBooks, Propose
from surefoot.speculation.controller import Controller
from surefoot.speculation.estimator import BINS, GLOBAL_DECAY, PRIOR_RANGE, SLOT_DECAY

if TYPE_CHECKING:
    from surefoot.speculation.proposer import Drafts
    from surefoot.speculation.size import Size
    from surefoot.speculation.state import SlotState


class CompiledControl(OfferBooks):
    """``OfferBooks`` by ``kernels.triton.control``: the same decisions in three kernels."""

    def __init__(self, state: SlotState, controller: Controller, spans: int, kernels: Any) -> None:
        """``kernels``: the module."""
        super().__init__(state, controller, spans)
        self.kernels = control = kernels
        count, width, device = len(controller.names), state.max_drafts, state.device
        shape = (count, state.slots, BINS, width)
        self.hits = torch.zeros(shape, device=device)
        self.trials = torch.zeros(shape, device=device)
        self.seen = torch.zeros((4, count, BINS, width), device=device)
        self.news = torch.zeros_like(self.seen)
        self.learners = []
        for index, estimator in enumerate(controller.estimators):
            estimator.live_in(self.hits[index], self.trials[index], self.seen[:, index])
            self.learners.append(
                control.Learner(
                    estimator.watched,
                    estimator.watched_bins,
                    estimator.watched_length,
                    estimator.watched_start,
                    estimator.hits,
                    estimator.trials,
                    self.seen[0, index],
                    self.news[0, index],
                    self.news[0].numel(),
                    controller.allowed[index],
                    controller.tokens[index],
                    controller.lengths[index],
                    controller.confidence[index],
                )
            )

    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        """As the base class; and enter what the round before taught."""
        return self.kernels.split(
            slots,
            quota,
            self.state,
            self.offers.chances,
            self.offers.tokens,
            size.rows,
            size.samples,
            self.seen,
            self.news,
            math.log2(GLOBAL_DECAY),
            size.verifies,
        )

    def finish(
        self,
        slots: torch.Tensor,
        size: Size,
        drafts: torch.Tensor,
        verdict: RoundVerdict,
        propose: Propose,
    ) -> None:
        controller, offers = self.controller, self.offers
        for index in size.proposers:
            self._take(index, verdict.going, propose(index, verdict.going))
        self.kernels.keep(
            slots,
            self.state.idle_slot,
            (controller.tokens, controller.lengths, controller.confidence),
            self.hits,
            self.trials,
            self.seen,
            self.news,
            math.log2(GLOBAL_DECAY),
            PRIOR_RANGE,
            LEAST,
            (offers.tokens, offers.chances, offers.lengths, offers.proposer),
            self.report,
            verdict,
            drafts,
            self.state.alive,
            size.proposers,
        )

    def _take(self, index: int, slots: torch.Tensor, offers: Drafts) -> None:
        controller, state = self.controller, self.state
        self.kernels.learn(
            self.learners[index],
            slots,
            state.idle_slot,
            state.history,
            state.length,
            state.limit,
            state.vocab_size,
            controller.draft_limit,
            (offers.tokens, offers.lengths, offers.confidence),
            SLOT_DECAY,
        )
