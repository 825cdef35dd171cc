"""How much worse a token is than the best one at its position, on freshly computed logits.

Penalties and filters are worked out here once more, in float64 and by their definitions, so that
the engine's own code is not its own judge; the Gumbel noise is the definition itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.certify.noise import SCORE_FLOOR, Noise
from surefoot.request import SamplingParams
from surefoot.sampling.noise import gumbel

FEW = 512
"""So many of the best scores are sorted at first."""


@dataclass(frozen=True)
class Row:
    """A position: ``output`` are the tokens generated before it, ``ends`` every stop id."""

    prompt: Sequence[int]
    output: Sequence[int]
    params: SamplingParams
    choice: int
    ends: Sequence[int]
    allowed: torch.Tensor | None = None
    """Tokens that the request's grammar allows here, bool [vocab]."""
    bad: Sequence[Sequence[int]] = ()
    """Token sequences that the output must not have."""

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is the logits' argmax, without any arithmetic in between."""
        params = self.params
        return params.greedy and not params.penalised and not params.logit_bias


def tie_bound(noise: Noise, row: Row) -> float:
    """Largest regret, in logits, that the calibrated noise explains at this position."""
    if row.plain_greedy:
        return noise.regret_bound
    params = row.params
    scale = max(params.repetition_penalty, 1 / params.repetition_penalty)
    return scale * noise.regret_bound + SCORE_FLOOR * max(1.0, params.temperature)


def adjusted(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """Logits [vocab] after grammar, ruled out tokens, penalties, bias and the mask of early ends,
    float64."""
    params, scores = row.params, logits.double().clone()
    scores[_ruled_out(row, len(scores))] = float("-inf")
    if row.allowed is not None:
        scores[~row.allowed.to(scores.device)] = float("-inf")
    seen = torch.tensor(sorted({*row.prompt, *row.output}), device=scores.device)
    if params.repetition_penalty != 1:
        old = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if row.output and (params.frequency_penalty or params.presence_penalty):
        counts = torch.bincount(torch.tensor(list(row.output)), minlength=len(scores)).to(scores)
        scores -= params.frequency_penalty * counts
        scores -= params.presence_penalty * (counts > 0)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(row.output) < params.min_tokens:
        scores[list(row.ends)] = float("-inf")
    return scores


def _ruled_out(row: Row, vocab_size: int) -> list[int]:
    """By ``allowed_token_ids`` and ``bad_words``; of a text with a grammar, no end."""
    params, found = row.params, set[int]()
    if params.allowed_token_ids is not None:
        found = {*range(vocab_size)} - {*params.allowed_token_ids}
    for *before, last in row.bad:
        if list(row.output[len(row.output) - len(before) :]) == before:
            found.add(last)
    return sorted(found if row.allowed is None else found - {*row.ends})


class Filters:
    """Which tokens min-p, top-k and top-p keep of adjusted logits ``scores`` [vocab], float64.

    Only as much of the vocabulary is sorted as the filters can reach."""

    def __init__(self, scores: torch.Tensor, params: SamplingParams) -> None:
        self.scores = scores
        self.params = params
        self.finite = torch.isfinite(scores)
        self.min_p_border = self.best = self.mass = None
        core = self.finite
        if params.min_p > 0:
            self.min_p_border = scores.max() + params.temperature * math.log(params.min_p)
            core = core & (scores >= self.min_p_border)
        if 0 < params.top_k < len(scores):
            self.best = scores.topk(params.top_k + 1).values
            core = core & (scores >= self.best[params.top_k - 1])
        if params.top_p < 1:
            scaled = (scores / params.temperature).masked_fill(~core, float("-inf"))
            self.mass = torch.softmax(scaled, dim=0)

    def admitted(self, shift: float = 0.0) -> torch.Tensor:
        """Bool [vocab]: kept if each token in turn had its own adjusted logit raised by ``shift``
        (lowered if negative) and all others stayed."""
        keep, moved = self.finite.clone(), self.scores + shift
        if self.min_p_border is not None:
            keep &= moved >= self.min_p_border
        if self.best is not None:
            # A lowered token stands behind its old self, which must not count as a rival.
            keep &= moved >= self.best[self.params.top_k - int(shift >= 0)]
        if self.mass is not None:
            # Raising or lowering the others by as much scales their mass.
            limit = self.params.top_p * math.exp(shift / self.params.temperature)
            best, total = self._falling(limit, abs(shift))
            before = total[-1].expand(len(moved)).clone()
            near = (moved >= best[-1]).nonzero().squeeze(1)
            behind = torch.searchsorted(best.flip(0), moved[near], right=True)
            before[near] = total[len(best) - behind]
            keep &= before - (self.mass if shift < 0 else 0) < limit
        return keep

    def _falling(self, limit: float, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The best scores [m], falling, and the mass of the first 0 … m of them [m + 1]. So many
        that no token behind them comes under ``limit``, though it does not count itself."""
        assert self.mass is not None
        count, help_ = FEW, math.exp(min(700.0, shift / self.params.temperature))
        while True:
            best, ids = self.scores.topk(min(count, len(self.scores)))
            mass = self.mass[ids]
            total = torch.cat((mass.new_zeros(1), mass.cumsum(dim=0)))
            last = float(mass[-1])
            if count >= len(self.scores) or not last or float(total[-1]) - last * help_ >= limit:
                return best, total
            count *= 8


def probabilities(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The exact distribution that a sampled token has at this position, float64 [vocab]."""
    scores = adjusted(logits, row)
    keep = Filters(scores, row.params).admitted()
    return torch.softmax((scores / row.params.temperature).masked_fill(~keep, -torch.inf), dim=0)


def regret(logits: torch.Tensor, row: Row, token: int, bound: float) -> float:
    """Loss of score, in logits, of ``token`` against the best token. Sampled: scores with noise;
    a token that the filters would only admit with more than ``bound`` of help is infinitely bad,
    and those that as much could expel do not compete with it."""
    scores = adjusted(logits, row)
    params = row.params
    if params.greedy:
        return max(0.0, float(scores.max() - scores[token]))
    filters = Filters(scores, params)
    if not bool(filters.admitted(bound)[token]):
        return float("inf")
    noisy = _with_noise(scores, row)
    rivals = noisy[filters.admitted(-bound)]
    if len(rivals) == 0:
        return 0.0
    return max(0.0, float(rivals.max() - noisy[token]))


def _with_noise(scores: torch.Tensor, row: Row) -> torch.Tensor:
    where = row.params.seed, row.choice, len(row.prompt) + len(row.output)
    seed, choice, position = torch.tensor(where, device=scores.device).unsqueeze(1)
    drawn = gumbel(seed, choice, position, len(scores))[0].double()
    return scores + row.params.temperature * drawn


def runner_up(
    logits: torch.Tensor, row: Row, token: int, likeliest: bool = False
) -> tuple[int, float]:
    """The token that came second to ``token`` at this position, and how far behind (logits;
    infinite where there was no other). ``likeliest``: by the adjusted logits alone, without filters
    and noise, so that it may be likelier than the sampled token; it is less than 0 behind then."""
    scores = adjusted(logits, row)
    if not row.params.greedy and not likeliest:
        keep = Filters(scores, row.params).admitted()
        scores = _with_noise(scores, row).masked_fill(~keep, float("-inf"))
    best = scores.topk(2)
    second = int(best.indices[0]) if int(best.indices[0]) != token else int(best.indices[1])
    return second, float(scores[token] - scores[second])
