"""A recorded round's book-keeping in a few kernels of the backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from surefoot.kernels.rounds import RoundVerdict
from surefoot.speculation.estimator import BINS, GLOBAL_DECAY, PRIOR_RANGE, SLOT_DECAY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from surefoot.speculation.proposer import Drafts
    from surefoot.speculation.replay import ReplayRound, Size

LEAST = 1e-6
"""The chance of what is offered, at least."""


class CompiledControl:
    """The book-keeping of a ``ReplayRound`` by ``kernels.triton.control``: the same decisions in
    three kernels."""

    def __init__(self, replay: ReplayRound, control: Any) -> None:
        self.replay = replay
        self.kernels = control
        controller, state = replay.controller, replay.state
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

    def split(self, slots: torch.Tensor, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """``ReplayRound._split_torch``, and enter what the round before taught."""
        replay = self.replay
        return self.kernels.split(
            slots,
            replay.idle_slot,
            replay.alive,
            replay.chances,
            replay.tokens,
            replay.state.history,
            replay.state.length,
            size.rows,
            self.seen,
            self.news,
            math.log2(GLOBAL_DECAY),
            size.verifies and bool(size.proposers),
        )

    def finish(
        self, slots: torch.Tensor, size: Size, drafts: torch.Tensor, verdict: RoundVerdict
    ) -> None:
        """``ReplayRound._finish_torch``."""
        replay, controller = self.replay, self.replay.controller
        for index in size.proposers:
            self._take(index, slots, replay.propose(index, slots, size))
        self.kernels.keep(
            slots,
            replay.idle_slot,
            (controller.tokens, controller.lengths, controller.confidence),
            self.hits,
            self.trials,
            self.seen,
            self.news,
            math.log2(GLOBAL_DECAY),
            PRIOR_RANGE,
            LEAST,
            (replay.tokens, replay.chances, replay.lengths, replay.proposer),
            replay.report,
            verdict,
            drafts,
            replay.alive,
            bool(size.proposers),
        )

    def take_in(self, slots: torch.Tensor, offers: Mapping[int, Drafts]) -> torch.Tensor:
        """For rounds that the host plans, in place of ``Controller.learn`` and ``offer``: judge
        earlier offers by the new tokens of ``slots`` [B], and take the next ones in, by proposer.
        Returns how many drafts are on offer, int64 [B]."""
        offered = torch.zeros_like(slots)
        self._enter_news()
        for index, drafts in offers.items():
            self._take(index, slots, drafts)
            offered += self.replay.controller.lengths[index, slots]
        self._enter_news()
        return offered

    def _enter_news(self) -> None:
        """What a recorded round's ``split`` does first; the host may choose before there is one."""
        self.seen.mul_(torch.exp2(self.news[:1] * math.log2(GLOBAL_DECAY))).add_(self.news)
        self.news.zero_()

    def _take(self, index: int, slots: torch.Tensor, offers: Drafts) -> None:
        controller, state = self.replay.controller, self.replay.state
        self.kernels.learn(
            self.learners[index],
            slots,
            self.replay.idle_slot,
            state.history,
            state.length,
            state.limit,
            state.vocab_size,
            controller.draft_limit,
            (offers.tokens, offers.lengths, offers.confidence),
            SLOT_DECAY,
        )
