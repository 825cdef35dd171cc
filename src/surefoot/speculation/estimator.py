"""How likely a proposer's draft is right, learnt from the texts themselves.

Sampling is a pure function of the text, so the text that follows an offer tells whether each of
its drafts would have been accepted, verified or not. Every slot keeps one offer of each proposer
in view until the text has contradicted or confirmed it all, then enters the outcome and takes the
next. Acceptance is thus known for requests that never draft, at no cost.

A request's own record is short, so it is weighed against that of all requests, by how much
requests differ: where a trial says nothing about the request's other trials, they are alike, and
the common rate holds for each (empirical Bayes, beta-binomial). Otherwise the least likely of many
requests would always look bad by chance, and hold back the drafts of the whole batch.
"""

from __future__ import annotations

import torch

from surefoot.kernels.cpu.build import load_native
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

BINS = 8
"""Confidence is sorted into this many bins of equal width; each learns on its own."""
SLOT_DECAY = 0.92
GLOBAL_DECAY = 0.998
SLOT_PRIOR = 3.0
"""Weight of what all requests taught against what this one did, in trials, until it is known how
much requests differ; then it is within ``PRIOR_RANGE``."""
PRIOR_RANGE = 0.5, 64.0
_FIRST_PRIOR = 4.0
_FIRST_WEIGHT = 50.0


class AcceptanceEstimator:
    """Chance that draft j is accepted given that the drafts before it were, for one proposer, by
    slot, confidence bin and position."""

    def __init__(self, state: SlotState) -> None:
        self.state = state
        width, device = state.max_drafts, state.device
        self.hits = torch.zeros((state.slots, BINS, width), device=device)
        self.trials = torch.zeros_like(self.hits)
        rates = (((torch.arange(BINS, device=device) + 0.5) / BINS).unsqueeze(1)).expand(-1, width)
        self._see(
            torch.stack(
                (
                    torch.full_like(rates, _FIRST_PRIOR),
                    rates * _FIRST_PRIOR,
                    rates * (1 - rates) / (SLOT_PRIOR + 1) * _FIRST_WEIGHT,
                    torch.full_like(rates, _FIRST_WEIGHT),
                )
            )
        )
        self.watched = torch.zeros((state.slots, width), dtype=torch.int64, device=device)
        self.watched_bins = torch.zeros_like(self.watched)
        self.watched_length = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self.watched_start = torch.zeros(state.slots, dtype=torch.int64, device=device)
        self._index = torch.arange(width, device=device)
        self._native = load_native() if device.type == "cpu" and width else None

    def _see(self, seen: torch.Tensor) -> None:
        """``seen`` float32 [4, BINS, K], of all requests: trials, hits, and the sum and the weight
        of how a request's trials agree with its earlier ones."""
        self.seen = seen
        self.all_trials, self.all_hits, self.all_agreement, self.all_weight = seen

    def live_in(self, hits: torch.Tensor, trials: torch.Tensor, seen: torch.Tensor) -> None:
        """Move what was learnt into parts of larger tables: ``hits`` and ``trials`` float32
        [slots, BINS, K], ``seen`` float32 [4, BINS, K]."""
        self.hits = hits.copy_(self.hits)
        self.trials = trials.copy_(self.trials)
        self._see(seen.copy_(self.seen))

    def prior_weight(self) -> torch.Tensor:
        """float32 [BINS, K]: how many of a request's own trials the common rate outweighs.

        Trials of one request have the covariance that rates have between requests; of a beta
        distribution with mean m and weight w that is m (1 - m) / (w + 1)."""
        mean = self.all_hits / self.all_trials
        covariance = (self.all_agreement / self.all_weight).clamp(min=1e-6)
        return (mean * (1 - mean) / covariance - 1).clamp(*PRIOR_RANGE)

    def admit(self, slots: torch.Tensor) -> None:
        """Forget the requests that had ``slots``, int64 [B]."""
        for table in (self.hits, self.trials, self.watched_length):
            table.index_fill_(0, slots, 0)

    def watch(self, slots: torch.Tensor, drafts: Drafts) -> None:
        """Take offers in view for those of ``slots`` [B] that watch none."""
        if self._native is None:
            self.watch_reference(slots, drafts)
            return
        tokens, lengths = drafts.tokens.contiguous(), drafts.lengths.contiguous()
        confidence = drafts.confidence.contiguous()
        self._native.sf_watch(
            self.state.length.data_ptr(),
            slots.data_ptr(),
            len(slots),
            tokens.data_ptr(),
            lengths.data_ptr(),
            confidence.data_ptr(),
            len(self._index),
            BINS,
            self.watched.data_ptr(),
            self.watched_bins.data_ptr(),
            self.watched_length.data_ptr(),
            self.watched_start.data_ptr(),
        )

    def watch_reference(self, slots: torch.Tensor, drafts: Drafts) -> None:
        """``watch`` in plain torch, on any device."""
        take = (self.watched_length[slots] == 0) & (drafts.lengths > 0)
        wide = take.unsqueeze(1)
        self.watched[slots] = torch.where(wide, drafts.tokens, self.watched[slots])
        bins = confidence_bins(drafts.confidence)
        self.watched_bins[slots] = torch.where(wide, bins, self.watched_bins[slots])
        self.watched_length[slots] = torch.where(take, drafts.lengths, self.watched_length[slots])
        start = self.state.length[slots]
        self.watched_start[slots] = torch.where(take, start, self.watched_start[slots])

    def shorten(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """The last offers of ``slots`` [B] were cut to ``lengths`` [B]: watch no more of them."""
        watched = self.watched_length[slots]
        last = self.watched_start[slots] == self.state.length[slots]
        self.watched_length[slots] = torch.where(last, torch.minimum(watched, lengths), watched)

    def learn(self, slots: torch.Tensor) -> None:
        """Judge the watched offers of ``slots`` [B] by their committed tokens."""
        if self._native is None:
            self.learn_reference(slots)
            return
        history = self.state.history
        self._native.sf_learn(
            history.data_ptr(),
            history.shape[1],
            self.state.length.data_ptr(),
            slots.data_ptr(),
            len(slots),
            self.watched.data_ptr(),
            self.watched_bins.data_ptr(),
            self.watched_length.data_ptr(),
            self.watched_start.data_ptr(),
            len(self._index),
            BINS,
            self.hits.data_ptr(),
            self.trials.data_ptr(),
            self.seen.data_ptr(),
            SLOT_DECAY,
            GLOBAL_DECAY,
        )

    def learn_reference(self, slots: torch.Tensor) -> None:
        """``learn`` in plain torch, on any device."""
        state, index = self.state, self._index
        start, length = self.watched_start[slots], self.watched_length[slots]
        known = torch.minimum(state.length[slots] - start, length)
        columns = (start.unsqueeze(1) + index).clamp(max=state.history.shape[1] - 1)
        text = state.history[slots.unsqueeze(1), columns]
        right = (text == self.watched[slots]) & (index < known.unsqueeze(1))
        run = right.long().cumprod(dim=1).sum(dim=1)
        settled = (length > 0) & ((run < known) | (known >= length))
        tried = (index <= run.unsqueeze(1)) & (index < known.unsqueeze(1)) & settled.unsqueeze(1)
        hit = tried & (index < run.unsqueeze(1))
        bins = self.watched_bins[slots].unsqueeze(1)
        in_bin = torch.arange(BINS, device=slots.device).view(1, BINS, 1) == bins
        tried_in = (in_bin & tried.unsqueeze(1)).float()
        hit_in = (in_bin & hit.unsqueeze(1)).float()
        own_trials, mean = self.trials[slots], self.all_hits / self.all_trials
        agreement = tried_in * (hit_in - mean) * (self.hits[slots] - own_trials * mean)
        decay = 1 - (1 - SLOT_DECAY) * tried_in
        new = torch.stack((tried_in, hit_in, agreement, tried_in * own_trials)).sum(dim=1)
        self.trials[slots] = self.trials[slots] * decay + tried_in
        self.hits[slots] = self.hits[slots] * decay + hit_in
        # In place: a recorded round reads and writes these very tensors.
        self.seen.mul_(GLOBAL_DECAY ** new[0]).add_(new)
        self.watched_length[slots] = torch.where(settled, 0, length)

    def chances(self, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        """float32 [B, K]: chance that each offered draft and all before it are accepted, 0 beyond
        an offer's length."""
        if self._native is None:
            return self.chances_reference(slots, drafts)
        lengths, confidence = drafts.lengths.contiguous(), drafts.confidence.contiguous()
        out = torch.empty(confidence.shape)
        self._native.sf_chances(
            slots.data_ptr(),
            len(slots),
            lengths.data_ptr(),
            confidence.data_ptr(),
            len(self._index),
            BINS,
            self.hits.data_ptr(),
            self.trials.data_ptr(),
            self.seen.data_ptr(),
            *PRIOR_RANGE,
            out.data_ptr(),
        )
        return out

    def chances_reference(self, slots: torch.Tensor, drafts: Drafts) -> torch.Tensor:
        """``chances`` in plain torch, on any device."""
        bins = confidence_bins(drafts.confidence).unsqueeze(1)
        prior = (self.all_hits / self.all_trials).unsqueeze(0)
        weight = self.prior_weight()
        rates = (self.hits[slots] + weight * prior) / (self.trials[slots] + weight)
        rate = rates.gather(1, bins).squeeze(1)
        offered = self._index < drafts.lengths.unsqueeze(1)
        return (rate * offered).cumprod(dim=1)


def confidence_bins(confidence: torch.Tensor) -> torch.Tensor:
    """float32 in 0..1 -> int64 bin."""
    return (confidence * BINS).long().clamp(0, BINS - 1)
