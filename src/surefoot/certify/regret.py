"""How much worse a token is than the best one at its position, on freshly computed logits.

Penalties and filters are worked out here once more, in float64 and by their definitions, so that
the engine's own code is not its own judge; the Gumbel noise is the definition itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.certify.noise import SCORE_FLOOR, Noise
from surefoot.request import SamplingParams
from surefoot.sampling.noise import gumbel


@dataclass(frozen=True)
class Row:
    """A position: ``output`` are the tokens generated before it, ``ends`` every stop id."""

    prompt: Sequence[int]
    output: Sequence[int]
    params: SamplingParams
    choice: int
    ends: Sequence[int]

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
    """Logits [vocab] after penalties, bias and the mask of early ends, float64."""
    params, scores = row.params, logits.double().clone()
    seen = torch.tensor(sorted({*row.prompt, *row.output}))
    if params.repetition_penalty != 1:
        old = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if row.output and (params.frequency_penalty or params.presence_penalty):
        counts = torch.bincount(torch.tensor(list(row.output)), minlength=len(scores)).double()
        scores -= params.frequency_penalty * counts
        scores -= params.presence_penalty * (counts > 0)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(row.output) < params.min_tokens:
        scores[list(row.ends)] = float("-inf")
    return scores


def admitted(scores: torch.Tensor, params: SamplingParams, shift: float = 0.0) -> torch.Tensor:
    """Which tokens min-p, top-k and top-p keep, bool [vocab], if each token in turn had its own
    adjusted logit raised by ``shift`` (lowered if negative) and all others stayed."""
    temperature = params.temperature
    moved = scores + shift
    keep = torch.isfinite(scores)
    core = keep.clone()
    if params.min_p > 0:
        border = scores.max() + temperature * torch.tensor(params.min_p).double().log()
        keep &= moved >= border
        core &= scores >= border
    limited = 0 < params.top_k < len(scores)
    if not limited and params.top_p >= 1:
        return keep
    ascending = scores.sort().values
    above = len(scores) - torch.searchsorted(ascending, moved, right=True)
    if limited:
        # A lowered token must not count itself.
        keep &= above - int(shift < 0) < params.top_k
        core &= scores >= ascending[-params.top_k]
    if params.top_p < 1:
        mass = torch.softmax((scores / temperature).masked_fill(~core, float("-inf")), dim=0)
        falling = torch.softmax((scores / temperature).masked_fill(~core, float("-inf")), dim=0)
        falling = falling.sort(descending=True).values
        total = torch.cat((mass.new_zeros(1), falling.cumsum(dim=0)))
        before = total[above] - (mass if shift < 0 else 0)
        # Raising or lowering the others by as much scales their mass.
        keep &= before * torch.tensor(-shift / temperature).exp() < params.top_p
    return keep


def probabilities(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The exact distribution that a sampled token has at this position, float64 [vocab]."""
    scores = adjusted(logits, row)
    keep = admitted(scores, row.params)
    return torch.softmax((scores / row.params.temperature).masked_fill(~keep, -torch.inf), dim=0)


def regret(logits: torch.Tensor, row: Row, token: int, bound: float) -> float:
    """Loss of score, in logits, of ``token`` against the best token. Sampled: scores with noise;
    a token that the filters would only admit with more than ``bound`` of help is infinitely bad,
    and those that as much could expel do not compete with it."""
    scores = adjusted(logits, row)
    params = row.params
    if params.greedy:
        return max(0.0, float(scores.max() - scores[token]))
    if not bool(admitted(scores, params, bound)[token]):
        return float("inf")
    position = torch.tensor([len(row.prompt) + len(row.output)])
    seed, choice = torch.tensor([params.seed]), torch.tensor([row.choice])
    drawn = gumbel(seed, choice, position, len(scores))[0].double()
    noisy = scores + params.temperature * drawn
    rivals = noisy[admitted(scores, params, -bound)]
    if len(rivals) == 0:
        return 0.0
    return max(0.0, float(rivals.max() - noisy[token]))
