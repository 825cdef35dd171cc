"""Rounds whose drafts are trees: from parents to masks, positions, histories and KV moves.

A span's row 0 is the current token (the root), row j + 1 its draft j; parents come first. Keys lie
in the order of the rows, RoPE positions count depth. Once the round knows which path was accepted,
the path's keys move together behind the root, and the span looks as if a chain had been verified.
All of it is tensor operations; a chain is the tree whose parents count up. Some have a twin of one
kernel in ``kernels.triton.trees``; ``speculation.books.BookKeeping`` says which of the two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from surefoot.kernels.rounds import RoundLayout
    from surefoot.speculation.proposer import Commits
    from surefoot.speculation.state import SlotState

CAUSAL = -1
"""Mask of a row that sees all keys up to its own (``FlatBatch.mask``)."""


@dataclass(frozen=True)
class Trees:
    """Drafts of B spans as trees."""

    tokens: torch.Tensor
    """int64 [B, K]."""
    parents: torch.Tensor
    """int64 [B, K]: draft index, -1 for the root."""
    masks: torch.Tensor
    """int64 [B, K + 1]: bit i of row j: row i is row j or an ancestor of it."""
    depths: torch.Tensor
    """int64 [B, K + 1]: 0 for the root."""


@dataclass(frozen=True)
class Paths:
    """What was accepted of B trees: ``lengths`` int64 [B] drafts; ``rows`` int64 [B, K + 1]: the
    span's row at each depth of the accepted path, 0 beyond it."""

    lengths: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class NodeRows:
    """Where each of N flat rows belongs."""

    owner: torch.Tensor
    """int64 [N]: its span."""
    offset: torch.Tensor
    """int64 [N]: its row of the span."""
    depth: torch.Tensor
    """int64 [N]: positions behind the span's first; the offset where nothing branches."""
    positions: torch.Tensor
    """int64 [N]: for RoPE."""
    masks: torch.Tensor
    """int64 [N]: as in ``FlatBatch.mask``."""
    nodes: torch.Tensor
    """int64 [B]: drafts of each span; spans without any are rows in a line."""


def chain_parents(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """The parents of ``batch`` chains: -1, 0, 1 ...; int64 [batch, width]."""
    return (torch.arange(width, device=device) - 1).repeat(batch, 1)


def ancestors(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks and depths, int64 [B, K + 1] each as in ``Trees``, of parents int64 [B, K]."""
    up = torch.cat((torch.zeros_like(parents[:, :1]), parents + 1), dim=1)
    width = up.shape[1]
    bits = torch.arange(width, device=parents.device)
    masks = (torch.ones_like(bits) << bits).expand_as(up)
    # Everyone's parent is asked, then the grandparent's grandparent, and so on: the jumps double.
    for _ in range((width - 1).bit_length()):
        masks = masks | masks.gather(1, up)
        up = up.gather(1, up)
    return masks, ((masks.unsqueeze(2) >> bits) & 1).sum(dim=2) - 1


def node_rows(layout: RoundLayout, trees: Trees, drafts: torch.Tensor) -> NodeRows:
    """Where a layout's rows belong; spans of which no ``drafts`` int64 [B] are verified (prompt
    chunks among them), or whose drafts are a chain, are rows in a line. Rows of padding repeat the
    last."""
    batch, first = layout.batch, layout.first_row
    used = (batch.row_slot >= 0).sum()
    index = torch.arange(batch.tokens.shape[0], device=first.device)
    index = torch.minimum(index, used - 1).clamp(min=0)
    owner = (torch.searchsorted(first, index, right=True) - 1).clamp(min=0)
    offset = index - first[owner]
    inside = owner, offset.clamp(max=trees.masks.shape[1] - 1)
    last = trees.masks.gather(1, drafts.clamp(max=trees.masks.shape[1] - 1).unsqueeze(1)).squeeze(1)
    # As many ancestors as there are rows before it: nothing branches.
    in_tree = (last != (2 << drafts) - 1)[owner]
    depth = torch.where(in_tree, trees.depths[inside], offset)
    masks = torch.where(in_tree, trees.masks[inside], CAUSAL)
    positions = batch.positions - offset + depth
    return NodeRows(owner, offset, depth, positions, masks, drafts)


def lay_out_trees(layout: RoundLayout, rows: NodeRows, trees: Trees) -> RoundLayout:
    """A layout of chains with its drafts arranged as trees: positions, masks, and the positions of
    what is sampled. Rows of prefill chunks stay causal."""
    nodes = trees.masks.shape[1]
    batch = replace(layout.batch, positions=rows.positions, mask=rows.masks, tree_rows=nodes)
    sampled = rows.positions[layout.sample_index] + 1
    return replace(layout, batch=batch, sample_positions=sampled)


def path_histories(
    state: SlotState, layout: RoundLayout, rows: NodeRows, trees: Trees, max_history: int
) -> torch.Tensor:
    """The text before each sampled row, drafts on its own path included: int64 [M, max_history +
    1]. Columns from the row's position on mean nothing."""
    owner, offset = rows.owner[layout.sample_index], rows.offset[layout.sample_index]
    inside = owner, offset.clamp(max=trees.masks.shape[1] - 1)
    histories = torch.nn.functional.pad(
        state.history[layout.sample_slots, :max_history], (0, 1), value=0
    )
    nodes = torch.arange(1, trees.masks.shape[1], device=owner.device)
    on_path = (trees.masks[inside].unsqueeze(1) >> nodes) & 1
    columns = state.length[layout.sample_slots].unsqueeze(1) + trees.depths[owner][:, 1:] - 1
    columns = torch.where(on_path == 1, columns, max_history).clamp(max=max_history)
    return histories.scatter_(1, columns, trees.tokens[owner])


def walk(
    trees: Trees, sampled: torch.Tensor, first_sample: torch.Tensor, drafts: torch.Tensor
) -> tuple[Paths, torch.Tensor]:
    """What was accepted, and the tokens along it: int64 [B, K + 1], valid up to the target's own
    behind the path. ``sampled`` int64 [M], of which each span's begin at ``first_sample`` [B];
    ``drafts`` int64 [B]: drafts verified."""
    steps = torch.arange(trees.masks.shape[1], device=sampled.device)
    index = (first_sample.unsqueeze(1) + steps).clamp(max=len(sampled) - 1)
    by_row = sampled[index]
    paths = accept_paths(trees, by_row, drafts)
    return paths, by_row.gather(1, paths.rows)


def accept_paths(trees: Trees, sampled: torch.Tensor, drafts: torch.Tensor) -> Paths:
    """Walk from the root to the child that equals what its parent's row sampled.

    ``sampled`` int64 [B, K + 1]: by row of the span; ``drafts`` int64 [B]: drafts verified. Among
    equal siblings, which no proposer should offer, the first counts.
    """
    width = trees.tokens.shape[1]
    index = torch.arange(width + 1, device=drafts.device)
    right = sampled.gather(1, trees.parents + 1) == trees.tokens
    right = right & (index[:width] < drafts.unsqueeze(1))
    bits = (right.long() << index[1:]).sum(dim=1, keepdim=True) | 1
    reached = (trees.masks & ~bits) == 0
    last = torch.where(reached, trees.depths, -1).argmax(dim=1, keepdim=True)
    on_path = (trees.masks.gather(1, last) >> index) & 1
    rows = torch.zeros((len(drafts), width + 2), dtype=torch.int64, device=drafts.device)
    columns = torch.where(on_path == 1, trees.depths, width + 1)
    rows.scatter_(1, columns, index.expand_as(columns))
    return Paths(trees.depths.gather(1, last).squeeze(1), rows[:, : width + 1])


def follow_paths(
    commits: Commits, layout: RoundLayout, rows: NodeRows, trees: Trees, paths: Paths
) -> Commits:
    """A round's commits as proposers see them: the rows of the accepted paths under the keys that
    they have now, all other drafts as padding, and which row comes before each."""
    owner, offset, depth = rows.owner, rows.offset, rows.depth
    batch = commits.batch
    in_tree = rows.nodes[owner] > 0
    deepest = paths.rows.shape[1] - 1
    on_path = paths.rows[owner, depth.clamp(max=deepest)] == offset
    on_path = on_path & (depth <= paths.lengths[owner])
    batch = replace(
        batch,
        key_index=batch.key_index - offset + depth,
        row_slot=torch.where(on_path | ~in_tree, batch.row_slot, -1),
        mask=None,
    )
    parents = trees.parents[owner, offset.clamp(1, deepest) - 1]
    parents = torch.where(in_tree, parents, offset - 2)
    before = torch.where(offset > 0, layout.first_row[owner] + parents + 1, -1)
    tail = (commits.counts - 1).clamp(min=0)
    end = paths.rows.gather(1, tail.clamp(max=deepest).unsqueeze(1)).squeeze(1)
    end = torch.where(rows.nodes > 0, end, tail)
    return commits._replace(batch=batch, before=before, last=commits.rows + end)
