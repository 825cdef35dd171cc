"""How likely a proposer's draft is right, learnt from the texts themselves.

Sampling is a pure function of the text, so the text that follows an offer tells whether each of
its drafts would have been accepted, verified or not. Every slot keeps one offer of each proposer
in view until the text has contradicted or confirmed it all, then enters the outcome and takes the
next. Acceptance is thus known for requests that never draft, at no cost.

A request's own record is short, so it is weighed against that of all requests, by how much
requests differ: where a trial says nothing about the request's other trials, they are alike, and
the common rate holds for each (empirical Bayes, beta-binomial). Otherwise the least likely of many
requests would always look bad by chance, and hold back the drafts of the whole batch.

A chain is the tree whose parents count up: a draft is tried once the text has gone its parent's
way, and is a hit if the text goes on with it.

What other proposers offer at the same place tells, too: where two begin alike, both are likelier
right than each usually is, and where they differ, one of them is wrong. So chances are learnt apart
for offers without rivals, with one that agrees, and with others. Otherwise the better of two offers
would be worth less than it promises, and might be worse than what either proposer offers alone.
"""

from __future__ import annotations

import numpy as np
import torch

from surefoot.kernels.upload import Uploads
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState
from surefoot.speculation.trees import ancestors, chain_parents

BINS = 8
"""Confidence is sorted into this many bins of equal width; each learns on its own."""
RIVALS = 3
"""What else is on offer, of other proposers: nothing, an offer that begins with the same token, or
only such as do not. Each has bins of its own."""
SLOT_DECAY = 0.92
GLOBAL_DECAY = 0.998
SLOT_PRIOR = 3.0
"""Weight of what all requests taught against what this one did, in trials, until it is known how
much requests differ; then it is within ``PRIOR_RANGE``."""
PRIOR_RANGE = 0.5, 64.0
_FIRST_PRIOR = 4.0
_FIRST_WEIGHT = 50.0


class OfferRecords:
    """What is in view of the offers of P proposers, and what was learnt from them.

    ``hits`` and ``trials`` float32 [P, slots, bins, K], by bin and depth: ``BINS`` bins, or as many
    for each of ``RIVALS`` where P > 1. ``seen`` float32 [P, 4, bins, K], of all requests: trials,
    hits, and the sum and the weight of how a request's trials agree with its earlier ones. In view:
    ``watched`` and ``watched_bins`` int64 [P, slots, K], ``watched_length`` and ``watched_start``
    int64 [P, slots], and ``watched_parents`` int64 [P, slots, K] where some proposer offers trees.
    """

    def __init__(self, state: SlotState, proposers: int, trees: bool) -> None:
        slots, width, device = state.slots, state.max_drafts, state.device
        rivals = RIVALS if proposers > 1 else 1
        self._counts = torch.zeros((2, proposers, slots, rivals * BINS, width), device=device)
        self.hits, self.trials = self._counts
        rates = ((torch.arange(BINS, device=device) + 0.5) / BINS).repeat(rivals)
        rates = rates.unsqueeze(1).expand(-1, width)
        first = torch.stack(
            (
                torch.full_like(rates, _FIRST_PRIOR),
                rates * _FIRST_PRIOR,
                rates * (1 - rates) / (SLOT_PRIOR + 1) * _FIRST_WEIGHT,
                torch.full_like(rates, _FIRST_WEIGHT),
            )
        )
        self.seen = first.repeat(proposers, 1, 1, 1)
        shape = (proposers, slots, width)
        self.watched = torch.zeros(shape, dtype=torch.int64, device=device)
        self.watched_bins = torch.zeros_like(self.watched)
        self.watched_length = state.zeroed(proposers)
        self.watched_start = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self.watched_parents: torch.Tensor | None = None
        if trees:
            self.watched_parents = chain_parents(proposers * slots, width, device).view(shape)

    def forget(self, slots: np.ndarray, uploads: Uploads) -> None:
        """Have ``uploads`` forget what was learnt from the requests that had ``slots``, int64 [B].
        Nothing of theirs is in view any more when others have entered."""
        # A thousand numbers of each request: to send where they are takes longer than an operation.
        uploads.add(self._clear, slots)

    def _clear(self, slots: torch.Tensor) -> None:
        self._counts.index_fill_(2, slots, 0.0)


class AcceptanceEstimator:
    """Chance that a draft is accepted given that the drafts before it were, for one proposer, by
    slot, confidence bin and depth. Its operations are the reference in torch."""

    def __init__(
        self, state: SlotState, records: OfferRecords | None = None, index: int = 0
    ) -> None:
        """Of proposer ``index`` in ``records``; None: of the only one, which offers chains."""
        self.state = state
        self.records = records = records or OfferRecords(state, 1, False)
        self.hits, self.trials = records.hits[index], records.trials[index]
        self.seen = records.seen[index]
        self.all_trials, self.all_hits, self.all_agreement, self.all_weight = self.seen
        self.watched, self.watched_bins = records.watched[index], records.watched_bins[index]
        self.watched_length = records.watched_length[index]
        self.watched_start = records.watched_start[index]
        parents = records.watched_parents
        self.watched_parents = None if parents is None else parents[index]
        width, device = state.max_drafts, state.device
        self._index = torch.arange(width, device=device)
        self._chain = lineage(chain_parents(1, width, device))

    def prior_weight(self) -> torch.Tensor:
        """float32 [bins, K]: how many of a request's own trials the common rate outweighs.

        Trials of one request have the covariance that rates have between requests; of a beta
        distribution with mean m and weight w that is m (1 - m) / (w + 1)."""
        mean = self.all_hits / self.all_trials
        covariance = (self.all_agreement / self.all_weight).clamp(min=1e-6)
        return (mean * (1 - mean) / covariance - 1).clamp(*PRIOR_RANGE)

    def watch(self, slots: torch.Tensor, drafts: Drafts) -> None:
        """Take offers in view for those of ``slots`` [B] that watch none."""
        take = (self.watched_length[slots] == 0) & (drafts.lengths > 0)
        start, bins = self.state.length[slots], confidence_bins(drafts.confidence)
        for kept, new in (
            (self.watched, drafts.tokens),
            (self.watched_bins, bins),
            (self.watched_parents, drafts.parents),
        ):
            if kept is not None and new is not None:
                kept[slots] = torch.where(take.unsqueeze(1), new, kept[slots])
        for kept, new in ((self.watched_length, drafts.lengths), (self.watched_start, start)):
            kept[slots] = torch.where(take, new, kept[slots])

    def compare(self, slots: torch.Tensor, rivals: torch.Tensor) -> None:
        """What else, int64 [B], of ``RIVALS``, is on offer beside the last offers of ``slots``."""
        last = self.watched_start[slots] == self.state.length[slots]
        bins = self.watched_bins[slots]
        compared = bins % BINS + BINS * rivals.unsqueeze(1)
        self.watched_bins[slots] = torch.where(last.unsqueeze(1), compared, bins)

    def learn(self, slots: torch.Tensor) -> None:
        """Judge the watched offers of ``slots`` [B] by their committed tokens."""
        state, index = self.state, self._index
        start, length = self.watched_start[slots], self.watched_length[slots]
        parents = self.watched_parents
        masks, depths = self._chain if parents is None else lineage(parents[slots])
        known = (state.length[slots] - start).unsqueeze(1)
        offered = index < length.unsqueeze(1)
        columns = (start.unsqueeze(1) + depths - 1).clamp(max=state.history.shape[1] - 1)
        text = state.history[slots.unsqueeze(1), columns]
        there = offered & (depths <= known)
        right = (text == self.watched[slots]) & there
        own = torch.ones_like(index) << index
        bits = (right.long() * own).sum(dim=1, keepdim=True)
        reached = torch.where(((masks & ~bits) == 0) & offered, depths, 0).amax(1, keepdim=True)
        deepest = torch.where(offered, depths, 0).amax(dim=1, keepdim=True)
        settled = (length.unsqueeze(1) > 0) & ((known > reached) | (reached >= deepest))
        tried = ((masks & ~own & ~bits) == 0) & there & settled
        self._enter(slots, depths, tried, tried & right)
        self.watched_length[slots] = torch.where(settled.squeeze(1), 0, length)

    def _enter(
        self, slots: torch.Tensor, depths: torch.Tensor, tried: torch.Tensor, hit: torch.Tensor
    ) -> None:
        width = self.state.max_drafts
        cells = self.watched_bins[slots] * width + depths - 1
        shape = len(slots), *self.all_trials.shape
        empty = torch.zeros(shape, device=slots.device).flatten(1)
        # Drafts of one offer that share a cell are no earlier trials of each other.
        trials = empty.scatter_add(1, cells, tried.float()).view(shape)
        hits = empty.scatter_add(1, cells, hit.float()).view(shape)
        own_trials, mean = self.trials[slots], self.all_hits / self.all_trials
        agreement = (hits - trials * mean) * (self.hits[slots] - own_trials * mean)
        new = torch.stack((trials, hits, agreement, trials * own_trials)).sum(dim=1)
        decay = SLOT_DECAY**trials
        self.trials[slots] = own_trials * decay + trials
        self.hits[slots] = self.hits[slots] * decay + hits
        # In place: a recorded round reads and writes these very tensors.
        self.seen.mul_(GLOBAL_DECAY ** new[0]).add_(new)

    def chances(
        self, slots: torch.Tensor, drafts: Drafts, rivals: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [B, K]: chance that each offered draft and all before it on its path are
        accepted, or less: along a row it never rises, so that the best drafts of all rows are
        leading ones. 0 beyond an offer's length. ``rivals`` as of ``compare``; None: there are
        none."""
        masks, depths = self._chain if drafts.parents is None else lineage(drafts.parents)
        width = self.state.max_drafts
        bins = confidence_bins(drafts.confidence)
        if rivals is not None:
            bins = bins + BINS * rivals.unsqueeze(1)
        cells = bins * width + depths - 1
        prior, weight = self.all_hits / self.all_trials, self.prior_weight()
        rates = (self.hits[slots] + weight * prior) / (self.trials[slots] + weight)
        rate = rates.flatten(1).gather(1, cells)
        offered = self._index < drafts.lengths.unsqueeze(1)
        if drafts.parents is None:
            return (rate * offered).cumprod(dim=1)
        member = ((masks.unsqueeze(2) >> self._index) & 1).float()
        path = torch.einsum("bij,bj->bi", member, rate.clamp(min=1e-9).log()).exp()
        return torch.where(offered, path, 0.0).cummin(dim=1).values


def lineage(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of parents int64 [B, K]: masks, of which bit i says that draft i is the draft itself or an
    ancestor, and depths from 1, int64 [B, K] each."""
    masks, depths = ancestors(parents)
    return masks[:, 1:] >> 1, depths[:, 1:]


def rivals_of(firsts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [P, B], of ``RIVALS``: what the other proposers offer beside each offer, of which
    ``firsts`` [P, B] are the first tokens and ``lengths`` [P, B] the drafts."""
    offered = lengths > 0
    others = ~torch.eye(len(firsts), dtype=torch.bool, device=firsts.device).unsqueeze(2)
    others = others & offered.unsqueeze(0)
    agreed = (others & (firsts.unsqueeze(0) == firsts.unsqueeze(1))).any(dim=1)
    return torch.where(agreed, 1, torch.where(others.any(dim=1), 2, 0))


def confidence_bins(confidence: torch.Tensor) -> torch.Tensor:
    """float32 in 0..1 -> int64 bin."""
    return (confidence * BINS).long().clamp(0, BINS - 1)
