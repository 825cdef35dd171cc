"""The head's loss in slices of rows: logits of the whole batch never exist at once.

Gradients are formed where the logits are, so that none has to be computed or kept a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from surefoot.kernels import losses as reference
from surefoot.kernels.losses import Objective, RowLosses
from surefoot.train.target import Target
from surefoot.train.vocabulary import places_of

SLICE = 4096
"""Rows whose logits exist at once."""


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at R positions, restricted to the draft vocabulary."""

    logprobs: torch.Tensor
    """[R, draft vocabulary]: renormalised. float16 in mixed precision, else float32."""
    likeliest: torch.Tensor
    """int64 [R]: the target's likeliest token."""
    best: torch.Tensor
    """int64 [R]: its draft id, -1 where it has none."""
    share: torch.Tensor
    """float32 [R]: the probability of the draft vocabulary."""


@torch.no_grad()
def teach(
    target: Target, before_norm: torch.Tensor, target_ids: torch.Tensor, dtype: torch.dtype
) -> Teacher:
    """From rows of ``Forward.before_norm`` [R, hidden]; ``target_ids`` int64 [draft vocabulary],
    ascending."""
    rows, whole = len(before_norm), len(target_ids) == target.config.vocab_size
    logprobs = torch.empty((rows, len(target_ids)), dtype=dtype, device=before_norm.device)
    likeliest = torch.empty(rows, dtype=torch.int64, device=before_norm.device)
    share = torch.ones(rows, device=before_norm.device)
    for start in range(0, rows, SLICE):
        part = slice(start, start + SLICE)
        logits = target.logits(before_norm[part])
        likeliest[part] = logits.argmax(-1)
        if not whole:
            total = torch.logsumexp(logits, -1)
            logits = logits.index_select(1, target_ids)
            share[part] = (torch.logsumexp(logits, -1) - total).exp()
        logprobs[part] = torch.log_softmax(logits, -1).to(dtype)
    best = likeliest if whole else places_of(likeliest, target_ids)
    return Teacher(logprobs, likeliest, best, share)


def head_logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[M, hidden] by [draft vocabulary, hidden], of one dtype -> float32 logits."""
    if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
        # Sums are float32 anyway; rounding them to bf16 would cost the likeliest tokens' margins.
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return torch.mm(hidden, head.t()).float()


def row_losses(
    logits: torch.Tensor,
    teacher: Teacher,
    places: torch.Tensor,
    labels: torch.Tensor | None,
    weights: torch.Tensor,
    objective: Objective,
    dtype: torch.dtype,
) -> RowLosses:
    """As ``kernels.losses.row_losses``, by the fastest code for the device."""
    rows = (logits, teacher.logprobs, places, labels, weights, objective, dtype)
    if logits.device.type == "cuda":
        from surefoot.kernels.triton.losses import row_losses as fused

        return fused(*rows)
    return reference.row_losses(*rows)


_SOFT = Objective(cross_entropy=1.0)


def soft_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    teacher: Teacher,
    rows: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum over rows m of weights[m] * sum over v of p[m, v] * log q[m, v]: q from
    ``hidden`` [M, hidden] and ``head`` [draft vocabulary, hidden], p the ``teacher``'s row
    ``rows[m]`` (int64 [M]). Rows whose best token is outside the draft vocabulary count nothing.

    Returns the float32 sum, and [2] without gradient: rows that count, and those among them in
    which both have the same best token."""
    return _SoftCrossEntropy.apply(hidden, head, teacher, rows, weights)  # type: ignore


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        teacher: Teacher,
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        learns, dtype = ctx.needs_input_grad, hidden.dtype
        matrix = head.to(dtype)
        total = torch.zeros((), device=hidden.device)
        counts = torch.zeros(2, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if learns[0] else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if learns[1] else None
        for start in range(0, len(rows), SLICE):
            part = slice(start, start + SLICE)
            own, best = hidden[part], teacher.best[rows[part]]
            weight = torch.where(best >= 0, weights[part], 0.0)
            found = row_losses(
                head_logits(own, matrix), teacher, rows[part], None, weight, _SOFT, dtype
            )
            total += (weight * found.losses).sum()
            counts += torch.stack(((best >= 0).sum(), (found.best == best).sum()))
            d_logits = found.d_logits
            if d_hidden is not None:
                d_hidden[part] = d_logits @ matrix
            if d_head is not None:
                d_head += (d_logits.t() @ own).float()
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(counts)
        return total, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        d_hidden, d_head = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_head is None else d_head * grad,
            None,
            None,
            None,
        )


@torch.no_grad()
def compare(
    hidden: torch.Tensor, head: torch.Tensor, teacher: Teacher, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For evaluation: each row's likeliest draft id, int64 [M], and float32 [M] how much of the
    draft's distribution and the target's (unrestricted) one is the same, sum of min(p, q)."""
    best, overlap = [], []
    matrix = head.to(hidden.dtype)
    for start in range(0, len(rows), SLICE):
        part = slice(start, start + SLICE)
        q = torch.softmax(head_logits(hidden[part], matrix), -1)
        p = teacher.logprobs[rows[part]].float().exp_() * teacher.share[rows[part]].unsqueeze(-1)
        best.append(q.argmax(-1))
        overlap.append(torch.minimum(p, q).sum(-1))
    if not best:
        return rows.new_empty(0), torch.empty(0, device=hidden.device)
    return torch.cat(best), torch.cat(overlap)
