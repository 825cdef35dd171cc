"""The loss of block rows, in slices: to the text's own tokens and to the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from surefoot.kernels.losses import Objective
from surefoot.train import loss as common
from surefoot.train.loss import Teacher, head_logits, row_losses


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
    """int64 [R]: the text's tokens, by their draft ids."""


def block_loss(
    rows: BlockRows,
    head: torch.Tensor,
    after: torch.Tensor | None,
    teacher: Teacher,
    weights: torch.Tensor,
    objective: Objective,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over rows of weight * the ``objective`` with q = softmax(head hidden + after before):
    ``head`` [draft vocabulary, hidden], frozen; ``after`` float32 [draft vocabulary, rank];
    ``weights`` float32 [R].

    Returns the float32 sum; without gradients sum over v of min(p, q), float32 [R]; and [2]: the
    rows, and those among them whose likeliest token is the target's."""
    return _BlockLoss.apply(  # type: ignore[return-value]
        rows.hidden, rows.before, after, head, rows, teacher, weights, objective
    )


def biased(hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Rows [M, hidden] with what the Markov head reads beside them, [M, hidden + rank]; or a head's
    matrix with that of the Markov head. Their product is the biased logits."""
    return hidden if before is None else torch.cat((hidden, before.to(hidden.dtype)), dim=1)


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
        objective: Objective,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width, matrix = hidden.shape[1], biased(head, after)
        inputs = biased(hidden, before)
        total, counts = (torch.zeros(size, device=hidden.device) for size in ((), (2,)))
        overlap = torch.empty(len(weights), device=hidden.device)
        d_inputs = torch.empty_like(inputs)
        d_after = None if after is None else torch.zeros_like(after)
        labels = rows.labels if objective.label else None
        for start in range(0, len(weights), common.SLICE):
            part = slice(start, start + common.SLICE)
            weight, places = weights[part], rows.places[part]
            found = row_losses(
                head_logits(inputs[part], matrix), teacher, places,
                None if labels is None else labels[part], weight, objective, hidden.dtype,
            )  # fmt: skip
            agreed = (found.best == teacher.best[places]).sum()
            counts += torch.stack((agreed.new_tensor(len(places)), agreed))
            total += (weight * found.losses).sum()
            overlap[part] = found.overlap
            d_inputs[part] = found.d_logits @ matrix
            if d_after is not None:
                d_after += (found.d_logits.t() @ inputs[part, width:]).float()
        d_hidden = d_inputs[:, :width]
        d_before = None if before is None else d_inputs[:, width:]
        ctx.save_for_backward(d_hidden, d_before, d_after)
        ctx.mark_non_differentiable(overlap, counts)
        return total, overlap, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Any:  # type: ignore[override]
        found = ctx.saved_tensors
        scaled = [None if x is None else x * grad.to(x.dtype) for x in found]
        return (*scaled, None, None, None, None, None)
