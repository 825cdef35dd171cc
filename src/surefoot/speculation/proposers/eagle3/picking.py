"""The drafter's token, as the target would sample it from the drafter's distribution.

Penalties, bias, temperature and filters are the request's, and so is the noise: keyed by seed,
position and the *target's* token id, it favours in both distributions the same tokens, so that
draft and target tend to agree at any temperature (Gumbel coupling).
"""

from __future__ import annotations

import torch

from surefoot.sampling.noise import gumbel_at
from surefoot.sampling.params import Features
from surefoot.sampling.sampler import (
    SampleRows,
    adjust,
    draws_of,
    filtered_scores,
    sample_rows,
)
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.speculation.state import SlotState

CANDIDATES = 64


def pick(
    drafter: Eagle3Drafter,
    state: SlotState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    features: Features,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """float32 logits [B, draft vocabulary] -> ``out``: tokens int64 [B], by the target's ids, and
    the chance that the drafter gives them, float32 [B]; both may be strided.

    ``positions`` int64 [B]: where the tokens stand. ``features``: what any request needs; none
    takes the likeliest token of all. Drafts are entered in ``state.history``, where the next one's
    penalties see them.
    """
    backend, ids = drafter.backend, drafter.target_ids
    if features == Features():
        backend.likeliest(logits, ids, *out)
        return
    rows = SampleRows(slots, positions, state.history, state.history.shape[1])
    adjusted = features.penalties or features.bias or features.min_tokens
    if features.noise and not adjusted:
        draws = draws_of(rows, state.params)
        if backend.draw_drafts(logits, ids, draws, state.history, *out):
            return
    scores = logits
    if ids is not None:
        scores = logits.new_full((len(slots), state.vocab_size), float("-inf"))
        scores[:, ids] = logits
    tokens = sample_rows(scores, rows, state.params, features, backend)
    state.history[slots, positions] = tokens
    temperature = state.params.temperature[slots].unsqueeze(1)
    temperature = torch.where(temperature > 0, temperature, 1.0)
    chosen = scores.gather(1, tokens.unsqueeze(1))
    out[0].copy_(tokens)
    out[1].copy_(_chance(logits / temperature, chosen / temperature))


def pick_several(
    drafter: Eagle3Drafter,
    state: SlotState,
    slots: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    features: Features,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best candidates of each row, the best first: (tokens, log-probabilities),
    [R, count] each. Under noise those of the highest noised scores, and their log-probabilities
    given the noise. Penalties see the committed text, not the drafts."""
    ids = drafter.target_ids
    if features == Features():
        best, columns = logits.log_softmax(dim=-1).topk(count, dim=-1)
        return columns if ids is None else ids[columns], best
    scores = logits
    if ids is not None:
        scores = logits.new_full((len(slots), state.vocab_size), float("-inf"))
        scores[:, ids] = logits
    params = state.params
    before = state.length[slots]
    rows = SampleRows(slots, before, state.history, state.history.shape[1])
    scores = adjust(scores, rows, params, features)
    if not features.noise:
        best, tokens = scores.log_softmax(dim=-1).topk(count, dim=-1)
        return tokens, best
    greedy = (params.temperature[slots] == 0).unsqueeze(1)
    drawn = filtered_scores(scores, slots, params, features)
    scores = torch.where(greedy, scores, drawn)
    # Far down, no noise lifts a candidate above all others.
    likely, tokens = scores.topk(min(max(CANDIDATES, count), scores.shape[1]), dim=-1)
    noise = gumbel_at(params.seed[slots], params.choice[slots], positions, tokens)
    noised = torch.where(greedy, likely, likely + noise)
    total = torch.where(greedy, scores.logsumexp(-1, True), noised.logsumexp(-1, True))
    best, columns = (noised - total).topk(count, dim=-1)
    return tokens.gather(1, columns), best


def _chance(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp().squeeze(1)
