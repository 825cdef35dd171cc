"""The loss of block rows, in slices: to the text's own tokens and to the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from surefoot.train import loss as common
from surefoot.train.loss import Teacher, head_logits


@dataclass(frozen=True)
class BlockRows:
    """R rows of blocks to be judged."""

    hidden: torch.Tensor
    """[R, hidden]: what the head reads."""
    before: torch.Tensor | None
    """[R, rank]: the Markov head's rows of the tokens before; None without such a head."""
    places: torch.Tensor
    """int64 [R]: the teacher's rows."""
    labels: torch.Tensor
    """int64 [R]: the text's tokens."""


def block_loss(
    rows: BlockRows,
    head: torch.Tensor,
    after: torch.Tensor | None,
    teacher: Teacher,
    weights: torch.Tensor,
    objective: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over rows of weight * (a * -log q[label] + b * sum over v of abs(q[v] - p[v])), with
    (a, b) the ``objective`` and q = softmax(head hidden + after before): ``head`` [vocab, hidden],
    frozen; ``after`` float32 [vocab, rank]; ``weights`` float32 [R].

    Returns the float32 sum; without gradients sum over v of min(p, q), float32 [R]; and [2]: the
    rows, and those among them whose likeliest token is the target's."""
    return _BlockLoss.apply(  # type: ignore[return-value]
        rows.hidden, rows.before, after, head, rows, teacher, weights, objective
    )


def biased_logits(
    hidden: torch.Tensor,
    before: torch.Tensor | None,
    head: torch.Tensor,
    after: torch.Tensor | None,
) -> torch.Tensor:
    """float32 [M, vocab]."""
    logits = head_logits(hidden, head)
    return logits if before is None or after is None else logits + head_logits(before, after)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
        head: torch.Tensor,
        rows: BlockRows,
        teacher: Teacher,
        weights: torch.Tensor,
        objective: tuple[float, float],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        to_label, to_teacher = objective
        matrix = None if after is None else after.to(hidden.dtype)
        total, counts = (torch.zeros(size, device=hidden.device) for size in ((), (2,)))
        overlap = torch.empty(len(weights), device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_before = None if before is None else torch.empty_like(before)
        d_after = None if after is None else torch.zeros_like(after)
        for start in range(0, len(weights), common.SLICE):
            part = slice(start, start + common.SLICE)
            own = None if before is None else before[part]
            weight, places = weights[part].unsqueeze(-1), rows.places[part]
            label = rows.labels[part].unsqueeze(-1)
            q = torch.log_softmax(biased_logits(hidden[part], own, head, matrix), -1)
            agreed = (q.argmax(-1) == teacher.best[places]).sum()
            counts += torch.stack((agreed.new_tensor(len(places)), agreed))
            total -= to_label * (weight * q.gather(1, label)).sum()
            q = q.exp_()
            apart = q - teacher.logprobs[places].float().exp_()
            distance = apart.abs().sum(-1, keepdim=True)
            overlap[part] = 1 - distance.squeeze(-1) / 2
            total += to_teacher * (weight * distance).sum()
            # The gradient of the distance: q * (s - sum of q * s), s the sign of q - p.
            sign = apart.sign_()
            sign -= (q * sign).sum(-1, keepdim=True)
            d_logits = q * sign.mul_(to_teacher).add_(to_label)
            d_logits.scatter_add_(1, label, torch.full_like(weight, -to_label))
            d_logits = d_logits.mul_(weight).to(hidden.dtype)
            d_hidden[part] = d_logits @ head
            if d_before is not None and d_after is not None and matrix is not None:
                d_before[part] = d_logits @ matrix
                d_after += (d_logits.t() @ own).float()  # type: ignore[operator]
        ctx.save_for_backward(d_hidden, d_before, d_after)
        ctx.mark_non_differentiable(overlap, counts)
        return total, overlap, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Any:  # type: ignore[override]
        found = ctx.saved_tensors
        scaled = [None if x is None else x * grad.to(x.dtype) for x in found]
        return (*scaled, None, None, None, None, None)
