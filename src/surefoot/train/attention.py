"""Attention of training-time test: causal over the features' keys, then each row's own steps.

At step k, row i sees the keys 0 .. i that were made of features, and the k keys that its own
earlier steps made; never those of another row's steps. So it is exactly the chain that inference
would draft after slot i. The causal part is a flash kernel; its log-sum-exp lets the few scores of
the row's own steps join the softmax afterwards. The flash kernel's backward takes output and
log-sum-exp of the *whole* softmax: its gradients are then those of the whole, too.
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.train.corpus import Batch

aten = torch.ops.aten
FAR = 1e4
"""A log-sum-exp that makes probabilities of padding vanish."""


def chain_attention(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    batch: Batch,
    scale: float,
) -> torch.Tensor:
    """q [N, heads, head_dim]; ``keys[0]``, ``values[0]`` [N, kv_heads, head_dim]: of the features;
    ``keys[j]``: of step j, for each row its own -> [N, heads, head_dim]."""
    return _ChainAttention.apply(q, batch, scale, *keys, *values)  # type: ignore[return-value]


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, batch: Batch, scale: float, *pairs: torch.Tensor
    ) -> torch.Tensor:
        steps = len(pairs) // 2
        keys, values = pairs[:steps], pairs[steps:]
        group = q.shape[1] // keys[0].shape[1]
        out, lse = causal(q, repeat(keys[0], group), repeat(values[0], group), batch, scale)
        if steps > 1:
            scores = _own_scores(q, keys[1:], group, scale)
            whole = torch.logsumexp(torch.cat((lse.unsqueeze(-1), scores), dim=-1), dim=-1)
            merged = out.float() * (lse - whole).exp().unsqueeze(-1)
            for index, value in enumerate(values[1:]):
                share = (scores[..., index] - whole).exp().unsqueeze(-1)
                merged += share * repeat(value, group).float()
            out, lse = merged.to(q.dtype), whole
        ctx.save_for_backward(q, out, lse, *pairs)
        ctx.batch, ctx.scale = batch, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, out, lse, *pairs = ctx.saved_tensors
        scale, steps = ctx.scale, len(pairs) // 2
        keys, values = pairs[:steps], pairs[steps:]
        group = q.shape[1] // keys[0].shape[1]
        grad = grad.to(q.dtype).contiguous()
        dq, dk, dv = causal_backward(
            grad, q, repeat(keys[0], group), repeat(values[0], group), out, lse, ctx.batch, scale
        )
        d_keys, d_values = [_gather(dk, group)], [_gather(dv, group)]
        if steps > 1:
            scores = _own_scores(q, keys[1:], group, scale)
            wide, dq = grad.float(), dq.float()
            along = (wide * out.float()).sum(-1)
            for index, (key, value) in enumerate(zip(keys[1:], values[1:], strict=True)):
                share = (scores[..., index] - lse).exp()
                d_share = (wide * repeat(value, group).float()).sum(-1)
                d_score = (share * (d_share - along) * scale).unsqueeze(-1)
                dq += d_score * repeat(key, group).float()
                d_keys.append(_gather((d_score * q.float()).to(key.dtype), group))
                d_values.append(_gather((share.unsqueeze(-1) * wide).to(value.dtype), group))
            dq = dq.to(q.dtype)
        return dq, None, None, *d_keys, *d_values


def repeat(x: torch.Tensor, group: int, dim: int = 1) -> torch.Tensor:
    """One for each query head: [N, kv_heads, d] -> [N, heads, d]."""
    return x if group == 1 else x.repeat_interleave(group, dim=dim)


def _gather(x: torch.Tensor, group: int) -> torch.Tensor:
    """The gradient of ``repeat``."""
    return x if group == 1 else x.unflatten(1, (-1, group)).float().sum(2).to(x.dtype)


def _own_scores(
    q: torch.Tensor, keys: tuple[torch.Tensor, ...] | list[torch.Tensor], group: int, scale: float
) -> torch.Tensor:
    """float32 [N, heads, steps]."""
    wide = q.float()
    scores = [(wide * repeat(key, group).float()).sum(-1) * scale for key in keys]
    return torch.stack(scores, dim=-1)


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each document, [N, heads, d] -> the same and its log-sum-exp
    float32 [N, heads]."""
    if q.device.type == "cuda":
        offsets, longest = batch.offsets, batch.longest
        out, lse, *_ = aten._flash_attention_forward(
            q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, longest, longest,
            0.0, True, False, scale=scale,
        )  # fmt: skip
        return out, lse.t()
    padded = [_pad(x, batch) for x in (q, k, v)]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *padded, 0.0, True, attn_mask=None, scale=scale
    )
    place = batch.documents, batch.positions
    return out.transpose(1, 2)[place], lse.transpose(1, 2)[place].float()


def causal_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    batch: Batch,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.device.type == "cuda":
        offsets, longest = batch.offsets, batch.longest
        # Without dropout the generator's state is not read.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return aten._flash_attention_backward(
            grad, q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous(),
            lse.t().contiguous(), offsets, offsets, longest, longest, 0.0, True, state,
            torch.empty(0, device=q.device), scale=scale,
        )  # fmt: skip
    padded = [_pad(x, batch) for x in (grad, q, k, v, out)]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *padded, _pad(lse, batch, FAR), 0.0, True, attn_mask=None, scale=scale
    )
    place = batch.documents, batch.positions
    dq, dk, dv = (x.transpose(1, 2)[place] for x in found)
    return dq, dk, dv


def _pad(x: torch.Tensor, batch: Batch, fill: float = 0.0) -> torch.Tensor:
    """[N, heads, ...] -> [D, heads, longest, ...]: a document in each row of the batch."""
    rows = x.new_full((len(batch.starts) - 1, batch.longest, *x.shape[1:]), fill)
    rows[batch.documents, batch.positions] = x
    return rows.transpose(1, 2)
