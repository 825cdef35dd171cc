"""Attention of blocks over what comes before them, and within."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.train.attention import FAR, causal, causal_backward, repeat
from surefoot.train.corpus import Batch


def block_attention(
    q: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    anchors: torch.Tensor,
    batch: Batch,
    scale: float,
) -> torch.Tensor:
    """Attention of M blocks of B rows: q [M, B, heads, head_dim]. Block m sees of its document the
    keys and values ``context`` [N, kv_heads, head_dim] of the tokens *before* token ``anchors[m]``
    (int64 [M], rising, none a document's first), and ``own`` [M, B, kv_heads, head_dim], all of
    its rows and no other block's -> [M, B, heads, head_dim]."""
    return _BlockAttention.apply(q, *context, *own, anchors, batch, scale)  # type: ignore


class _BlockAttention(torch.autograd.Function):
    """The context's part is causal attention, too: row b of every block is one query behind the
    token before its anchor, in as many heads as a block has rows. Tokens that are no anchors get
    queries of zeros, whose results nobody reads."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        anchors: torch.Tensor,
        batch: Batch,
        scale: float,
    ) -> torch.Tensor:
        rows, group = q.shape[1], q.shape[2] // k.shape[1]
        place = anchors - 1
        wide_k, wide_v = (_per_row(x, rows, group) for x in (k, v))
        queries = _spread(q.flatten(1, 2), place, batch)
        out, lse = causal(queries, wide_k, wide_v, batch, scale)
        out, lse = out[place].view_as(q), lse[place].view(q.shape[:3])
        scores = _block_scores(q, own_k, group, scale)
        whole = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
        merged = out.float() * (lse - whole).exp().unsqueeze(-1)
        shares = (scores - whole.unsqueeze(-1)).exp()
        merged += torch.einsum("mbhc,mchd->mbhd", shares, repeat(own_v, group, 2).float())
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, whole, place)
        ctx.batch, ctx.scale = batch, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, own_k, own_v, out, whole, place = ctx.saved_tensors
        batch, scale = ctx.batch, ctx.scale
        rows, group = q.shape[1], q.shape[2] // k.shape[1]
        grad = grad.to(q.dtype)
        dq, dk, dv = causal_backward(
            _spread(grad.flatten(1, 2), place, batch),
            _spread(q.flatten(1, 2), place, batch),
            _per_row(k, rows, group),
            _per_row(v, rows, group),
            _spread(out.flatten(1, 2), place, batch),
            _spread(whole.flatten(1), place, batch, FAR),
            batch,
            scale,
        )
        wide = grad.float()
        shares = (_block_scores(q, own_k, group, scale) - whole.unsqueeze(-1)).exp()
        along = (wide * out.float()).sum(-1, keepdim=True)
        d_shares = torch.einsum("mbhd,mchd->mbhc", wide, repeat(own_v, group, 2).float())
        d_scores = shares * (d_shares - along) * scale
        own_q = torch.einsum("mbhc,mchd->mbhd", d_scores, repeat(own_k, group, 2).float())
        d_own_k = torch.einsum("mbhc,mbhd->mchd", d_scores, q.float())
        d_own_v = torch.einsum("mbhc,mbhd->mchd", shares, wide)
        return (
            (dq[place].view_as(q).float() + own_q).to(q.dtype),
            *(_of_rows(x, rows, group) for x in (dk, dv)),
            *(x.unflatten(2, (-1, group)).sum(3).to(k.dtype) for x in (d_own_k, d_own_v)),
            None,
            None,
            None,
        )


def _spread(x: torch.Tensor, place: torch.Tensor, batch: Batch, fill: float = 0.0) -> torch.Tensor:
    """Rows [M, ...] at ``place`` among all tokens, [N, ...]."""
    every = x.new_full((len(batch), *x.shape[1:]), fill)
    every[place] = x
    return every


def _per_row(x: torch.Tensor, rows: int, group: int) -> torch.Tensor:
    """For every row and query head: [N, kv_heads, d] -> [N, rows * heads, d]."""
    return repeat(x, group).repeat(1, rows, 1)


def _of_rows(x: torch.Tensor, rows: int, group: int) -> torch.Tensor:
    """The gradient of ``_per_row``."""
    return x.unflatten(1, (rows, -1, group)).float().sum((1, 3)).to(x.dtype)


def _block_scores(q: torch.Tensor, own_k: torch.Tensor, group: int, scale: float) -> torch.Tensor:
    """float32 [M, B, heads, B]: within the blocks."""
    return scale * torch.einsum("mbhd,mchd->mbhc", q.float(), repeat(own_k, group, 2).float())
