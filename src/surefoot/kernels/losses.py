"""The loss of a drafter's head and its gradient, row by row. Its Triton twin reads the logits from
memory once and forms the gradient where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Objective:
    """Weights of what a row's loss adds up: with q the drafter's distribution and p the target's,
    ``label`` times -log q[label], ``distance`` times sum of abs(q - p), ``cross_entropy`` times
    -sum of p * log q."""

    label: float = 0.0
    distance: float = 0.0
    cross_entropy: float = 0.0


@dataclass(frozen=True)
class RowLosses:
    """Of M rows; V is the size of the vocabulary."""

    losses: torch.Tensor
    """float32 [M], not weighted."""
    overlap: torch.Tensor
    """float32 [M]: sum of min(p, q)."""
    best: torch.Tensor
    """int64 [M]: the likeliest of q, the lowest id among equals."""
    d_logits: torch.Tensor
    """[M, V] in the dtype asked for: the gradient of the sum of weights * losses."""


def row_losses(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    places: torch.Tensor,
    labels: torch.Tensor | None,
    weights: torch.Tensor,
    objective: Objective,
    dtype: torch.dtype,
) -> RowLosses:
    """``logits`` float32 [M, V] of q; ``teacher`` [R, V]: log p, of which row m reads row
    ``places[m]`` (int64 [M]); ``labels`` int64 [M], None with an objective without them;
    ``weights`` float32 [M]."""
    log_q = torch.log_softmax(logits, -1)
    p = teacher[places].float().exp_()
    q = log_q.exp()
    apart = q - p
    distance = apart.abs().sum(-1)
    losses = objective.distance * distance
    slope = objective.cross_entropy * apart
    if objective.cross_entropy:
        losses -= objective.cross_entropy * (p * log_q).sum(-1)
    if objective.distance:
        # The gradient of the distance: q * (s - sum of q * s), s the sign of q - p.
        sign = apart.sign_()
        slope += objective.distance * q * (sign - (q * sign).sum(-1, keepdim=True))
    if labels is not None:
        label = labels.unsqueeze(-1)
        losses -= objective.label * log_q.gather(1, label).squeeze(-1)
        slope += objective.label * q
        slope.scatter_add_(1, label, torch.full_like(label, -objective.label, dtype=slope.dtype))
    d_logits = slope.mul_(weights.unsqueeze(-1)).to(dtype)
    return RowLosses(losses, 1 - distance / 2, logits.argmax(-1), d_logits)
