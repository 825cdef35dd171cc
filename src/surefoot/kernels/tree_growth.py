"""Growing trees of drafts (EAGLE-2 and EAGLE-3) between a network's passes.

B requests grow a tree each. In every pass their frontiers of K nodes run together, and level 0 is
what follows the live row. (Li et al., 2024, 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.draws import Draws


@dataclass(frozen=True)
class GrownTree:
    """Everything that was proposed, [B, n] each, in the order of proposal."""

    tokens: torch.Tensor
    """int64."""
    scores: torch.Tensor
    """float32: log-probability of the path from the root."""
    parents: torch.Tensor
    """int64: index of the parent, -1 for the root."""


@dataclass(frozen=True)
class Frontier:
    """The nodes that the next pass runs: K for each of B requests, the best first."""

    tokens: torch.Tensor
    """int64 [B * K]."""
    positions: torch.Tensor
    """int64 [B * K]: for RoPE."""
    keys: torch.Tensor
    """int64 [B * K]: key indices."""
    slots: torch.Tensor
    """int64 [B * K]: as ``FlatBatch.row_slot``."""
    seen: torch.Tensor
    """int64 [B * K]: masks over the tree's keys, the nodes' own included."""
    features: torch.Tensor
    """[B * K, hidden]: those of their parents."""
    scores: torch.Tensor
    """float32 [B, K]: as in ``GrownTree``."""
    nodes: torch.Tensor
    """int64 [B, K]: their places in the ``GrownTree``."""


@dataclass(frozen=True)
class BestNodes:
    """The best nodes, best first, [B, n] each. Parents come before their children."""

    tokens: torch.Tensor
    """int64."""
    parents: torch.Tensor
    """int64: index of the parent among these, -1 for the root."""
    chance: torch.Tensor
    """float32: a node's probability given its parent; 0 for what the filters rule out."""
    scores: torch.Tensor
    """float32: as in ``GrownTree``."""
    order: torch.Tensor
    """int64: places in the ``GrownTree``."""
    lengths: torch.Tensor
    """int64 [B]: nodes with a chance, which are the first."""


def empty_tree(batch: int, top_k: int, levels: int, device: torch.device) -> GrownTree:
    """Room for what so many levels propose."""
    size = batch, tree_size(top_k, levels)
    tokens, parents = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
    return GrownTree(tokens, torch.empty(size, device=device), parents)


def tree_size(top_k: int, levels: int) -> int:
    """Nodes that so many levels propose; also where the next one's begin."""
    return top_k + (levels - 1) * top_k * top_k if levels else 0


class TreeGrowth:
    """What grows trees, of ``Drafting``: in torch."""

    def likeliest_several(
        self, logits: torch.Tensor, ids: torch.Tensor | None, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of float32 logits [R, n] each row's ``count`` largest, the largest first: their columns,
        or what ``ids`` int64 [n] call them, int64 [R, count], and their log-probabilities, float32
        [R, count]."""
        best, columns = logits.log_softmax(dim=-1).topk(count, dim=-1)
        return columns if ids is None else ids[columns], best

    def draw_several(
        self, logits: torch.Tensor, ids: torch.Tensor | None, draws: Draws, most: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As ``likeliest_several``, by the noised scores of tokens over the target's ``ids``, and
        log-probabilities given the noise: a share of the exponentials of the noised scores of the
        ``most`` likeliest tokens. Borders of filters, and these, may be found roughly: what is
        drafted is verified. None where the device has no kernel for it."""
        return None

    def branch(
        self,
        tree: GrownTree,
        level: int,
        offers: tuple[torch.Tensor, torch.Tensor],
        before: Frontier | None,
        features: torch.Tensor,
        live: FlatBatch,
    ) -> Frontier:
        """Enter in ``tree`` what a level's nodes offer, and choose the frontier that the next pass
        runs: the best of all that a request's nodes offer. ``offers``: tokens int64 [B * n, K] and
        log-probabilities float32 [B * n, K] of the nodes of ``before``, or of the live rows at
        level 0, where it is None; ``features`` [B * n, hidden]: what they are to their successors;
        ``live``: the rows that the trees grow behind, one for each of B requests. Of the last level
        the frontier is nobody's."""
        tokens, chances = offers
        batch, top_k = len(tree.tokens), tokens.shape[1]
        index = torch.arange(top_k, device=tokens.device)
        if before is None:
            above, scores = tokens.new_full((batch, 1), -1), chances.new_zeros((batch, 1))
        else:
            above, scores = before.nodes, before.scores
        paths = (scores.unsqueeze(2) + chances.view(batch, -1, top_k)).flatten(1)
        ids, first = tokens.view(batch, -1), tree_size(top_k, level)
        columns = slice(first, first + ids.shape[1])
        tree.tokens[:, columns], tree.scores[:, columns] = ids, paths
        tree.parents[:, columns] = above.repeat_interleave(top_k, dim=1)
        scores, best = paths.topk(top_k, dim=1)
        parent = best // top_k
        own = (torch.ones_like(index) << (level * top_k + index)).expand(batch, top_k)
        seen = own if before is None else own | before.seen.view(batch, -1).gather(1, parent)
        keys = live.key_index.unsqueeze(1) + 1 + level * top_k + index
        owner = torch.arange(batch, device=tokens.device).unsqueeze(1)
        return Frontier(
            tokens=ids.gather(1, best).flatten(),
            positions=(live.positions + level + 1).repeat_interleave(top_k),
            keys=keys.flatten(),
            slots=live.row_slot.repeat_interleave(top_k),
            seen=seen.flatten(),
            features=features.view(batch, -1, features.shape[1])[owner, parent].flatten(0, 1),
            scores=scores,
            nodes=first + best,
        )

    def best_nodes(self, tree: GrownTree, count: int) -> BestNodes:
        """The ``count`` best nodes of each tree, or all. Scores never rise from parent to child,
        and of equal ones the earlier comes first: every ancestor of a kept node is kept, before
        it."""
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
        tokens = tree.tokens.gather(1, order)
        return BestNodes(tokens, parents, chance, scores, order, (chance > 0).sum(dim=1))
