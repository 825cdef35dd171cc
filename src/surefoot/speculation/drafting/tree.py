"""The dynamic tree of EAGLE-2 and EAGLE-3: grow the most promising branches, keep the best nodes.

Level 1 are the likeliest successors of the live row. In each pass the frontier runs together; every
frontier node proposes its likeliest successors, and the best of all these, by the log-probability
of their whole path, are the next frontier. Of everything proposed the best nodes are offered.
(Li et al., 2024, 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.kernels.tree_growth import Frontier, GrownTree, empty_tree
from surefoot.speculation.drafting.network import Network

Successors = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits [B * n, draft vocabulary] of n nodes a request, how many drafts deep these are) ->
(tokens, log-probabilities), [B * n, top_k] each, the likeliest first."""
Observer = Callable[[FlatBatch, torch.Tensor], None]


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
    drafting = network.drafting
    hidden = network.step(features, live, kv)
    offers = successors(network.logits(hidden), 0)
    batch, top_k = offers[0].shape
    tree = empty_tree(batch, top_k, 1 + passes, offers[0].device)
    first = torch.arange(batch, device=offers[0].device) * top_k
    spans = SpanTable(first, torch.full_like(first, top_k), live.row_slot, top_k)
    frontier = None
    for level in range(passes):
        frontier = drafting.branch(tree, level, offers, frontier, network.fed_back(hidden), live)
        rows = _rows_of(frontier, live, spans)
        hidden = network.step(frontier.features, rows, kv)
        if observe is not None:
            observe(rows, hidden)
        offers = successors(network.logits(hidden), level + 1)
    drafting.branch(tree, passes, offers, frontier, hidden, live)
    return tree


def _rows_of(frontier: Frontier, live: FlatBatch, spans: SpanTable) -> FlatBatch:
    """The rows of a pass over the frontier."""
    return replace(
        live,
        tokens=frontier.tokens,
        positions=frontier.positions,
        key_index=frontier.keys,
        row_slot=frontier.slots,
        mask=frontier.seen,
        all_masked=True,
        spans=spans,
    )
