"""The dynamic tree of EAGLE-2 and EAGLE-3: grow the most promising branches, keep the best nodes.

Level 1 are the likeliest successors of the live row. In each pass the frontier runs together; every
frontier node proposes its likeliest successors, and the best of all these, by the log-probability
of their whole path, are the next frontier. Of everything proposed the best nodes are offered.
(Li et al., 2024, 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.speculation.drafting.network import Network

Successors = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits [B * n, draft vocabulary] of n nodes a request, how many drafts deep these are) ->
(tokens, log-probabilities), [B * n, top_k] each, the likeliest first."""
Observer = Callable[[FlatBatch, torch.Tensor], None]


@dataclass(frozen=True)
class GrownTree:
    """Everything that was proposed, [B, n] each, in the order of proposal.

    ``scores``: log-probability of the path from the root; ``parents``: index of the parent, -1
    for the root."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True)
class BestNodes:
    """The best nodes, best first, [B, n] each. ``chance``: a node's probability given its parent;
    ``order``: its index in the ``GrownTree``. Parents come before their children."""

    tokens: torch.Tensor
    parents: torch.Tensor
    chance: torch.Tensor
    scores: torch.Tensor
    order: torch.Tensor


def grow(
    network: Network,
    kv: Sequence[Any],
    live: FlatBatch,
    features: torch.Tensor,
    successors: Successors,
    passes: int,
    observe: Observer | None = None,
) -> GrownTree:
    """Grow a tree behind each of B live rows: one row each, which writes its key; the tree's keys
    follow it, level by level. ``features`` [B, hidden] of the positions before the live rows;
    ``passes``: levels after the first. ``observe`` hears of every pass."""
    hidden = network.step(features, live, kv)
    tokens, scores = successors(network.logits(hidden), 0)
    batch, top_k = tokens.shape
    index = torch.arange(top_k, device=tokens.device)
    nodes = [(tokens, scores, torch.full_like(tokens, -1))]
    flat = index.expand(batch, top_k)
    owner = torch.arange(batch, device=tokens.device).unsqueeze(1)
    inputs = network.fed_back(hidden).unsqueeze(1).expand(-1, top_k, -1).contiguous()
    seen = torch.zeros_like(tokens)
    for level in range(passes):
        seen = seen | torch.ones_like(index) << (level * top_k + index)
        rows = _frontier(live, tokens, seen, level)
        hidden = network.step(inputs.flatten(0, 1), rows, kv)
        if observe is not None:
            observe(rows, hidden)
        ids, chances = successors(network.logits(hidden), level + 1)
        paths = (scores.unsqueeze(2) + chances.view(batch, top_k, -1)).flatten(1)
        ids = ids.view(batch, -1)
        nodes.append((ids, paths, flat.repeat_interleave(top_k, dim=1)))
        first = top_k + level * top_k * top_k
        scores, best = paths.topk(top_k, dim=1)
        tokens, flat, parent = ids.gather(1, best), first + best, best // top_k
        inputs = network.fed_back(hidden).view(batch, top_k, -1)[owner, parent]
        seen = seen.gather(1, parent)
    return GrownTree(*(torch.cat(parts, dim=1) for parts in zip(*nodes, strict=True)))


def _frontier(live: FlatBatch, tokens: torch.Tensor, seen: torch.Tensor, level: int) -> FlatBatch:
    """The rows of a pass over the frontier ``tokens`` [B, top_k]; ``seen``: masks over the tree's
    keys, the nodes' own included."""
    batch, top_k = tokens.shape
    index = torch.arange(top_k, device=tokens.device)
    keys = (live.key_index + 1 + level * top_k).unsqueeze(1) + index
    first = torch.arange(batch, device=tokens.device) * top_k
    spans = SpanTable(first, torch.full_like(first, top_k), live.row_slot, top_k)
    return replace(
        live,
        tokens=tokens.flatten(),
        positions=(live.positions + level + 1).repeat_interleave(top_k),
        key_index=keys.flatten(),
        row_slot=live.row_slot.repeat_interleave(top_k),
        mask=seen.flatten(),
        spans=spans,
    )


def best_nodes(tree: GrownTree, count: int) -> BestNodes:
    """The ``count`` best nodes of each tree. Scores never rise from parent to child, and of equal
    ones the earlier comes first: every ancestor of a kept node is kept, before it."""
    scores, order = tree.scores.sort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    scores, order = scores[:, :count], order[:, :count]
    above = tree.parents.gather(1, order)
    parents = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
    path = torch.where(above < 0, 0.0, tree.scores.gather(1, above.clamp(min=0)))
    # A node that the filters rule out has no chance, whatever its parent has.
    chance = torch.where(scores.isfinite(), (scores - path).exp(), 0.0)
    return BestNodes(tree.tokens.gather(1, order), parents, chance, scores, order)
