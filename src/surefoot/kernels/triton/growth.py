"""Growing trees of drafts between a network's passes: a program for each request.

Twins: ``kernels.tree_growth.TreeGrowth``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.tree_growth import BestNodes, Frontier, GrownTree, tree_size
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.several import LEAST, index_of, ordered_key, value_of

TILE = 16
"""Nodes that all others are compared with at a time."""


@jit(
    do_not_specialize=["level", "first", "size"],
    do_not_specialize_on_alignment=["live_key_ptr", "live_position_ptr", "live_slot_ptr"],
)
def branch_kernel(
    offer_ptr, chance_ptr, feature_ptr, width, live_key_ptr, live_position_ptr, live_slot_ptr,
    old_score_ptr, old_node_ptr, old_seen_ptr, tree_token_ptr, tree_score_ptr, tree_parent_ptr,
    size, level, first, token_ptr, position_ptr, key_ptr, slot_ptr, seen_ptr, out_ptr,
    score_ptr, node_ptr,
    ROOT: tl.constexpr, TOP_K: tl.constexpr, NODES: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    tree = tl.program_id(0).to(tl.int64)
    offer = tl.arange(0, PADDED)
    inside = offer < NODES * TOP_K
    above = offer // TOP_K
    token = tl.load(offer_ptr + tree * NODES * TOP_K + offer, mask=inside, other=0)
    path = tl.load(
        chance_ptr + tree * NODES * TOP_K + offer, mask=inside, other=float("-inf")
    )  # fmt: skip
    parent = tl.full([PADDED], -1, tl.int64)
    if not ROOT:
        path += tl.load(old_score_ptr + tree * TOP_K + above, mask=inside, other=0.0)
        parent = tl.load(old_node_ptr + tree * TOP_K + above, mask=inside, other=-1)
    column = tree * size + first + offer
    tl.store(tree_token_ptr + column, token, mask=inside)
    tl.store(tree_score_ptr + column, path, mask=inside)
    tl.store(tree_parent_ptr + column, parent, mask=inside)
    keys = tl.where(inside, ordered_key(path, offer), LEAST)
    live_key, live_slot = tl.load(live_key_ptr + tree), tl.load(live_slot_ptr + tree)
    position = tl.load(live_position_ptr + tree) + level + 1
    place = tl.arange(0, BLOCK)
    for i in range(TOP_K):
        best = tl.max(keys, axis=0)
        chosen = index_of(best)
        node = tree * TOP_K + i
        tl.store(token_ptr + node, tl.load(offer_ptr + tree * NODES * TOP_K + chosen))
        tl.store(score_ptr + node, value_of(best))
        tl.store(node_ptr + node, first + chosen)
        tl.store(position_ptr + node, position)
        tl.store(key_ptr + node, live_key + 1 + level * TOP_K + i)
        tl.store(slot_ptr + node, live_slot)
        seen = tl.full([], 1, tl.int64) << (level * TOP_K + i)
        if not ROOT:
            seen |= tl.load(old_seen_ptr + tree * TOP_K + chosen // TOP_K)
        tl.store(seen_ptr + node, seen)
        source = feature_ptr + (tree * NODES + chosen // TOP_K) * width
        x = tl.load(source + place, mask=place < width)
        tl.store(out_ptr + node * width + place, x, mask=place < width)
        keys = tl.where(keys == best, LEAST, keys)


def branch(
    tree: GrownTree,
    level: int,
    offers: tuple[torch.Tensor, torch.Tensor],
    before: Frontier | None,
    features: torch.Tensor,
    live: FlatBatch,
) -> Frontier:
    """``TreeGrowth.branch``."""
    tokens, chances = (each.contiguous() for each in offers)
    features = features.contiguous()
    (batch, size), (rows, top_k) = tree.tokens.shape, tokens.shape
    nodes, width = rows // batch, features.shape[1]
    out = Frontier(
        *(tokens.new_empty(batch * top_k) for _ in range(5)),
        features.new_empty((batch * top_k, width)),
        chances.new_empty((batch, top_k)),
        tokens.new_empty((batch, top_k)),
    )
    old = out if before is None else before
    block = next_power_of_2(width)
    branch_kernel[(batch,)](
        tokens, chances, features, width, live.key_index, live.positions, live.row_slot,
        old.scores, old.nodes, old.seen, tree.tokens, tree.scores, tree.parents,
        size, level, tree_size(top_k, level), out.tokens, out.positions, out.keys, out.slots,
        out.seen, out.features, out.scores, out.nodes,
        before is None, top_k, nodes, next_power_of_2(nodes * top_k), block,
        num_warps=min(8, max(1, block // 256)), **pdl(tokens.device),
    )  # fmt: skip
    return out


@jit
def best_nodes_kernel(
    tree_token_ptr, tree_score_ptr, tree_parent_ptr, size, count, place_ptr,
    token_ptr, parent_ptr, chance_ptr, score_ptr, order_ptr, length_ptr,
    PADDED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PADDED)
    inside = node < size
    begin = tree * size
    score = tl.load(tree_score_ptr + begin + node, mask=inside, other=float("-inf"))
    place = tl.zeros([PADDED], tl.int32)
    for base in range(0, size, TILE):
        other = base + tl.arange(0, TILE)
        known = other < size
        against = tl.load(tree_score_ptr + begin + other, mask=known, other=float("-inf"))
        higher = against[None, :] > score[:, None]
        earlier = (against[None, :] == score[:, None]) & (other[None, :] < node[:, None])
        place += tl.sum(((higher | earlier) & known[None, :]).to(tl.int32), axis=1)
    tl.store(place_ptr + begin + node, place, mask=inside)
    # Other threads' nodes are looked up.
    tl.debug_barrier()
    kept = inside & (place < count)
    above = tl.load(tree_parent_ptr + begin + node, mask=kept, other=-1)
    inner = kept & (above >= 0)
    parent = tl.load(place_ptr + begin + above, mask=inner, other=-1)
    path = tl.load(tree_score_ptr + begin + above, mask=inner, other=0.0)
    finite = score > float("-inf")
    chance = tl.where(finite, tl.exp(score - tl.where(finite, path, 0.0)), 0.0)
    out = tree * count + place
    token = tl.load(tree_token_ptr + begin + node, mask=kept, other=0)
    tl.store(token_ptr + out, token, mask=kept)
    tl.store(parent_ptr + out, parent.to(tl.int64), mask=kept)
    tl.store(chance_ptr + out, chance, mask=kept)
    tl.store(score_ptr + out, score, mask=kept)
    tl.store(order_ptr + out, node.to(tl.int64), mask=kept)
    tl.store(length_ptr + tree, tl.sum((kept & (chance > 0)).to(tl.int64), axis=0))


def best_nodes(tree: GrownTree, count: int) -> BestNodes:
    """``TreeGrowth.best_nodes``."""
    batch, size = tree.tokens.shape
    count, tokens = min(count, size), tree.tokens
    places = torch.empty((batch, size), dtype=torch.int32, device=tokens.device)
    out = BestNodes(
        tokens.new_empty((batch, count)),
        tokens.new_empty((batch, count)),
        tree.scores.new_empty((batch, count)),
        tree.scores.new_empty((batch, count)),
        tokens.new_empty((batch, count)),
        tokens.new_empty(batch),
    )
    best_nodes_kernel[(batch,)](
        tokens, tree.scores, tree.parents, size, count, places,
        out.tokens, out.parents, out.chance, out.scores, out.order, out.lengths,
        next_power_of_2(size), TILE, num_warps=4, **pdl(tokens.device),
    )  # fmt: skip
    return out
