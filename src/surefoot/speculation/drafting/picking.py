"""A drafter's tokens, as the target would sample them from the drafter's distribution.

Penalties, bias, temperature and filters are the request's, and so is the noise: keyed by seed,
position and the *target's* token id, it favours in both distributions the same tokens, so that
draft and target tend to agree at any temperature (Gumbel coupling).
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.sampling.noise import gumbel_at
from surefoot.sampling.params import SamplingStages
from surefoot.sampling.sampler import (
    SampleRows,
    adjust,
    adjustments_of,
    draws_of,
    filtered_scores,
    sample_rows,
)
from surefoot.speculation.drafting.network import Network
from surefoot.speculation.size import GREEDY
from surefoot.speculation.state import SlotState

CANDIDATES = 64


class Picker:
    """Takes tokens from the logits of one network. ``coupled``: as said above; otherwise the
    likeliest tokens, whatever the request's parameters."""

    def __init__(self, network: Network, state: SlotState, coupled: bool) -> None:
        self.backend = network.backend
        self.ids = network.target_ids
        self.columns: torch.Tensor | None = None
        """int32 [vocab_size]: the drafter's id of each token, -1 of those that it lacks."""
        if self.ids is not None:
            own = torch.arange(len(self.ids), dtype=torch.int32, device=self.ids.device)
            self.columns = own.new_full((state.vocab_size,), -1)
            self.columns[self.ids] = own
        self.state = state
        self.coupled = coupled
        self.stages = GREEDY

    @property
    def chained(self) -> bool:
        """Whether a token depends on the drafts before it, beyond its logits."""
        return self.stages.penalties

    def serve(self, stages: SamplingStages) -> None:
        """Be ready for requests of which some need these sampling stages."""
        self.stages = stages if self.coupled else GREEDY

    def pick(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """float32 logits [B, draft vocabulary], which may be changed -> ``out``: tokens int64 [B],
        by the target's ids, and the chance that the drafter gives them, float32 [B]; both may be
        strided.

        ``positions`` int64 [B]: where the tokens stand. Drafts are entered in ``state.history``,
        where the next one's penalties see them; the likeliest of all are not, which nobody asks.
        """
        backend, ids, state, stages = self.backend, self.ids, self.state, self.stages
        if stages == GREEDY:
            backend.drafting.likeliest(logits, ids, *out)
            return
        rows = SampleRows(slots, positions, state.history, state.history.shape[1])
        if stages.adjusts:
            logits, ids = self._adjusted(logits, rows)
        if stages.noise:
            draws = draws_of(rows, state.params)
            if backend.drafting.draw(logits, ids, draws, state.history, *out):
                return
        scores = logits if ids is None else self._by_target(logits)
        tokens = sample_rows(scores, rows, state.params, stages.without_adjusting, backend)
        state.history[slots, positions] = tokens
        temperature = state.params.temperature[slots].unsqueeze(1)
        temperature = torch.where(temperature > 0, temperature, 1.0)
        chosen = scores.gather(1, tokens.unsqueeze(1))
        out[0].copy_(tokens)
        out[1].copy_(_chance(logits / temperature, chosen / temperature))

    def pick_markov(
        self,
        slots: torch.Tensor,
        current: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
        head: tuple[Any, Any],
        out: tuple[torch.Tensor, torch.Tensor | None],
    ) -> bool:
        """``pick`` from float32 logits [n, B, draft vocabulary], one row of each of ``slots`` after
        another at ``positions`` int64 [n, B], of which each gains what ``head`` says of the token
        before it, as ``Drafting.markov`` has it; the first rows follow ``current`` int64 [B].
        ``out``: [n, B] each, and None for chances that nobody asks for. False, and nothing done,
        where the device has no kernel for it."""
        drafting, state, stages = self.backend.drafting, self.state, self.stages
        if stages == GREEDY:
            drafting.markov(logits, *head, current, self.ids, *out)
            return True
        rows = SampleRows(slots, positions[0], state.history, state.history.shape[1])
        changes = adjustments_of(rows, state.params, stages, self.columns)
        return drafting.draw_markov(
            logits, *head, current, self.ids, draws_of(rows, state.params, stages.noise), changes,
            positions, state.history, *out,
        )  # fmt: skip

    def pick_several(
        self, slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``count`` best candidates of each row, the best first: (tokens, log-probabilities),
        [R, count] each. Rows [R, draft vocabulary], which may be changed, are as many for each of
        ``slots`` int64 [B], whose tokens are to stand at ``positions`` int64 [B]. Under noise those
        of the highest noised scores, and their log-probabilities given the noise. Penalties see the
        committed text, not the drafts."""
        drafting, ids, state, stages = self.backend.drafting, self.ids, self.state, self.stages
        if stages == GREEDY:
            return drafting.likeliest_several(logits, ids, count)
        each = len(logits) // len(slots)
        slots, positions = slots.repeat_interleave(each), positions.repeat_interleave(each)
        params = state.params
        if stages.adjusts:
            rows = SampleRows(slots, state.length[slots], state.history, state.history.shape[1])
            logits, ids = self._adjusted(logits, rows)
        if not stages.noise:
            best, tokens = logits.log_softmax(dim=-1).topk(count, dim=-1)
            return (tokens if ids is None else ids[tokens]), best
        rows = SampleRows(slots, positions, state.history, state.history.shape[1])
        drawn = drafting.draw_several(logits, ids, draws_of(rows, params), CANDIDATES, count)
        if drawn is not None:
            return drawn
        greedy = (params.temperature[slots] == 0).unsqueeze(1)
        drawn = filtered_scores(logits, slots, params, stages)
        scores = torch.where(greedy, logits, drawn)
        # Far down, no noise lifts a candidate above all others.
        likely, tokens = scores.topk(min(max(CANDIDATES, count), scores.shape[1]), dim=-1)
        tokens = tokens if ids is None else ids[tokens]
        noise = gumbel_at(params.seed[slots], params.choice[slots], positions, tokens)
        noised = torch.where(greedy, likely, likely + noise)
        total = torch.where(greedy, scores.logsumexp(-1, True), noised.logsumexp(-1, True))
        best, columns = (noised - total).topk(count, dim=-1)
        return tokens.gather(1, columns), best

    def _adjusted(
        self, logits: torch.Tensor, rows: SampleRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[M, draft vocabulary] with the penalties and biases of ``rows``, in place, and the ids of
        its tokens; where there is no kernel for that, [M, vocab_size] and None."""
        params, stages, backend = self.state.params, self.stages, self.backend
        if self.columns is not None and logits.is_contiguous():
            changes = adjustments_of(rows, params, stages, self.columns)
            if backend.adjust(logits, changes):
                return logits, self.ids
        wide = self._by_target(logits)
        return adjust(wide, rows, params, stages, backend, in_place=True), None

    def _by_target(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, draft vocabulary] -> [B, vocab_size], -inf for tokens that the drafter lacks."""
        if self.ids is None:
            return logits
        scores = logits.new_full((len(logits), self.state.vocab_size), float("-inf"))
        scores[:, self.ids] = logits
        return scores


def _chance(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp().squeeze(1)
