"""EAGLE-3 in the round: a one-layer network that continues the target's own hidden states.

After every round it *catches up*: each position whose target KV was written gets its entry in the
drafter's KV, keys and values only. A block also keeps the feature of its last position, with which
whoever continues it begins. To *propose*, the live row (the current token, with the feature before
it) runs first, and every draft after it starts from the hidden state of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from surefoot.errors import SurefootError
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.speculation.drafting import dummy
from surefoot.speculation.drafting.proposer import NetworkOptions, NetworkProposer
from surefoot.speculation.drafting.tree import grow
from surefoot.speculation.proposer import Commits, Drafts, Needs
from surefoot.speculation.proposers.eagle3.checkpoint import (
    checkpoint_facts,
    dummy_checkpoint,
    open_checkpoint,
)
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter

MOST_TREE_KEYS = 63
"""Bits of a row's mask for the keys of a growing tree."""
TREE_DEPTH = 6


@dataclass(frozen=True)
class Eagle3Options(NetworkOptions):
    """``top_k``: 1 drafts a chain, more a tree of ``draft_tokens`` nodes in which so many branches
    grow, up to ``depth`` tokens long (None: 6). The rest as ``NetworkOptions``."""

    proposer: ClassVar[str] = "eagle3"
    top_k: int = 1
    depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("top_k", "depth")
        if self.top_k == 1 and self.depth is not None:
            raise SurefootError("eagle3.depth", "is draft_tokens for a chain", "drop it")
        if self.top_k * (self.tree_depth - 1) > MOST_TREE_KEYS:
            raise SurefootError(
                "eagle3.depth",
                f"{self.tree_depth} levels of {self.top_k} branches are more than masks hold",
                f"keep top_k * (depth - 1) within {MOST_TREE_KEYS}",
            )

    @property
    def trees(self) -> bool:
        return self.top_k > 1

    @property
    def tree_depth(self) -> int:
        return self.depth or TREE_DEPTH


class Eagle3Proposer(NetworkProposer):
    name = "eagle3"
    Options = Eagle3Options
    options: Eagle3Options
    network: Eagle3Drafter

    def build(self, target: Decoder) -> Eagle3Drafter:
        path, backend = str(self.options.path), target.backend
        if path == dummy.NAME:
            checkpoint = dummy_checkpoint(target.config, backend.device, backend.dtype)
        else:
            checkpoint = open_checkpoint(path)
        network = Eagle3Drafter(checkpoint, target)
        one = torch.zeros(1, dtype=torch.int64, device=self.state.device)
        kind = backend.embed(target.table, one)
        self.before = kind.new_zeros((self.state.slots, network.config.layer.hidden_size))
        """[slots, hidden]: the feature of the position before the current token."""
        return network

    @property
    def longest(self) -> int:
        if not self.options.trees:
            return self.most
        return min(self.options.tree_depth, self.state.max_drafts)

    @property
    def scratch_keys(self) -> int:
        """Those of the live row, and of every level but the last."""
        return 1 + self.options.top_k * (self.longest - 1)

    def needs(self) -> Needs:
        needs, size = super().needs(), self.before[0].nbytes
        return replace(
            needs,
            kv_bytes_per_token=needs.kv_bytes_per_token + -(-size // self.state.block_size),
            fixed_bytes=needs.fixed_bytes + self.before.nbytes,
            trees=self.options.trees,
        )

    def allocate(self, blocks: int) -> None:
        super().allocate(blocks)
        self.last_of_block = self.before.new_zeros((blocks, self.before.shape[1]))
        """[blocks, hidden]: the feature of each block's last position."""

    def admit(self, slots: torch.Tensor, found: Sequence[int]) -> None:
        if not any(found):
            # Position 0 has no feature before it.
            return
        state = self.state
        pages = (state.computed[slots] - 1).clamp(min=0) // state.block_size
        self.before[slots] = self.last_of_block[state.block_tables[slots, pages].long()]

    def catch_up(self, commits: Commits) -> None:
        batch, network = commits.batch, self.network
        features = network.fuse(commits.features)
        before, positions, row_slot = network.drafting.shift_features(
            features, self.before, self.last_of_block,
            commits.slots, commits.rows, commits.counts, batch, self.state.block_size,
            network.last_position, commits.served, commits.before, commits.last,
        )  # fmt: skip
        batch = replace(batch, positions=positions, row_slot=row_slot, first_key=1)
        network.write_keys(before, batch, self.pools.kv)

    def features_before(self) -> torch.Tensor:
        return self.before

    def propose(self, slots: torch.Tensor) -> Drafts:
        return self._propose_trees(slots) if self.options.trees else super().propose(slots)

    def _propose_trees(self, slots: torch.Tensor) -> Drafts:
        depth, pools = self.depth, self.pools
        live = pools.live_rows(slots, self.before, depth, self.wanted.max_keys)
        assert live.features is not None

        def successors(logits: torch.Tensor, deep: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.picker.pick_several(slots, live.keys[1 + deep], logits, self.options.top_k)

        # Positions of a tree are counted from the live row's.
        rows = pools.rows(live, 0)
        highest = max(self.network.last_position - depth, 0)
        rows = replace(rows, positions=rows.positions.clamp(max=highest))
        tree = grow(self.network, pools.kv, rows, live.features, successors, depth - 1)
        nodes = self.network.drafting.best_nodes(tree, self.most)
        return Drafts(nodes.tokens, nodes.lengths, nodes.chance, nodes.parents)

    @classmethod
    def inspect(cls, path: str, target: ModelConfig | None) -> dict[str, Any] | None:
        return checkpoint_facts(path, target)
