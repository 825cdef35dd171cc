"""How likely a node of a drafted tree is right: ``estimator`` for trees.

A node is tried once the text has gone its parent's way; it is a hit if the text goes on with it.
Chances are kept by confidence (the node's, given its parent) and depth.
"""

from __future__ import annotations

import math

import torch

from surefoot.speculation.estimator import (
    BINS,
    GLOBAL_DECAY,
    SLOT_DECAY,
    SLOT_PRIOR,
    AcceptanceEstimator,
    confidence_bins,
)
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import ancestors, compiled


class TreeEstimator(AcceptanceEstimator):
    """As its base, for offers with ``parents``."""

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        self._native = None
        width = state.max_drafts
        self.watched_masks = torch.zeros(
            (state.slots, width), dtype=torch.int64, device=state.device
        )
        """Bit i: draft i is the node itself or an ancestor."""
        self.watched_depths = torch.ones_like(self.watched_masks)

    def watch(self, slots: torch.Tensor, drafts: Drafts) -> None:
        assert drafts.parents is not None
        masks, depths = ancestors(drafts.parents)
        take = ((self.watched_length[slots] == 0) & (drafts.lengths > 0)).unsqueeze(1)
        for kept, new in (
            (self.watched_masks, (masks[:, 1:] >> 1)),
            (self.watched_depths, depths[:, 1:]),
        ):
            kept[slots] = torch.where(take, new, kept[slots])
        self.watch_reference(slots, drafts)

    def learn(self, slots: torch.Tensor) -> None:
        if (kernels := compiled(slots)) is None:
            self.learn_reference(slots)
            return
        watched = (
            self.watched, self.watched_bins, self.watched_length, self.watched_start,
            self.watched_masks, self.watched_depths,
        )  # fmt: skip
        history, length = self.state.history, self.state.length
        tables = self.hits, self.trials, math.log2(SLOT_DECAY)
        self._spread(*kernels.learn(slots, history, length, watched, *tables))

    def learn_reference(self, slots: torch.Tensor) -> None:
        """``learn`` in plain torch, on any device."""
        state, index = self.state, self._index
        start, length = self.watched_start[slots], self.watched_length[slots]
        masks, depths = self.watched_masks[slots], self.watched_depths[slots]
        known = (state.length[slots] - start).unsqueeze(1)
        offered = index < length.unsqueeze(1)
        columns = (start.unsqueeze(1) + depths - 1).clamp(max=state.history.shape[1] - 1)
        text = state.history[slots.unsqueeze(1), columns]
        right = (text == self.watched[slots]) & (depths <= known) & offered
        bits = (right.long() << index).sum(dim=1, keepdim=True)
        on_path = (masks & ~bits) == 0
        reached = torch.where(on_path & offered, depths, 0).amax(dim=1, keepdim=True)
        deepest = torch.where(offered, depths, 0).amax(dim=1, keepdim=True)
        settled = (length.unsqueeze(1) > 0) & ((known > reached) | (reached >= deepest))
        own = torch.ones_like(index) << index
        tried = ((masks & ~own & ~bits) == 0) & (depths <= known) & offered & settled
        self._enter(slots, depths, tried, tried & right)
        self.watched_length[slots] = torch.where(settled.squeeze(1), 0, length)

    def _enter(
        self, slots: torch.Tensor, depths: torch.Tensor, tried: torch.Tensor, hit: torch.Tensor
    ) -> None:
        width = self.state.max_drafts
        cells = self.watched_bins[slots] * width + depths - 1
        shape = (len(slots), BINS * width)
        empty = torch.zeros(shape, device=slots.device)
        trials = empty.scatter_add(1, cells, tried.float()).view(-1, BINS, width)
        hits = empty.scatter_add(1, cells, hit.float()).view(-1, BINS, width)
        decay = SLOT_DECAY**trials
        self.trials[slots] = self.trials[slots] * decay + trials
        self.hits[slots] = self.hits[slots] * decay + hits
        self._spread(hits.sum(dim=0), trials.sum(dim=0))

    def _spread(self, new_hits: torch.Tensor, new_trials: torch.Tensor) -> None:
        """What all requests together have taught, float32 [BINS, K] each."""
        forget = GLOBAL_DECAY**new_trials
        # In place: a recorded round reads and writes these very tensors.
        self.all_trials.mul_(forget).add_(new_trials)
        self.all_hits.mul_(forget).add_(new_hits)

    def chances(self, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        """float32 [B, K]: that each node and its ancestors are accepted, or less: along a row it
        never rises, so that the best drafts of all rows are leading ones."""
        assert drafts.parents is not None
        masks, depths = ancestors(drafts.parents)
        width = self.state.max_drafts
        cells = confidence_bins(drafts.confidence) * width + depths[:, 1:] - 1
        prior = (self.all_hits / self.all_trials).unsqueeze(0)
        weight = SLOT_PRIOR
        rates = (self.hits[slots] + weight * prior) / (self.trials[slots] + weight)
        rate = rates.flatten(1).gather(1, cells)
        member = ((masks[:, 1:, None] >> (self._index + 1)) & 1).float()
        path = torch.einsum("bij,bj->bi", member, rate.clamp(min=1e-9).log()).exp()
        offered = self._index < drafts.lengths.unsqueeze(1)
        return torch.where(offered, path, 0.0).cummin(dim=1).values
