"""EAGLE-3 in the round: a one-layer network that continues the target's own hidden states.

After every round it *catches up*: each position whose target KV was written gets its entry in the
drafter's KV, keys and values only. Entries live under the target's block ids, so that a prefix hit
serves both; a block also keeps the feature of its last position, with which whoever continues it
begins. To *propose*, the live row (the current token, with the feature before it) runs first, and
every draft after it starts from the hidden state of the one before. What that writes is scratch:
it goes to the request's own unfinished block or to blocks of the drafter's alone, and the next
catch-up knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import SurefootError
from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.kernels.drafting import LiveRows, Scratch
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.sampling.params import Features
from surefoot.speculation.proposer import Commits, Drafts, Needs, Outlook, Proposer
from surefoot.speculation.proposers.eagle3 import dummy
from surefoot.speculation.proposers.eagle3.checkpoint import OPTION, open_checkpoint
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.speculation.proposers.eagle3.facts import checkpoint_facts
from surefoot.speculation.proposers.eagle3.picking import pick, pick_several
from surefoot.speculation.proposers.eagle3.tree import best_nodes, grow
from surefoot.speculation.state import SlotState

MOST_TREE_KEYS = 63
"""Bits of a row's mask for the keys of a growing tree."""


@dataclass(frozen=True)
class Eagle3Options:
    """``path``: folder or hub name of the checkpoint, or ``dummy`` for random weights.
    ``draft_tokens``: most drafts offered. ``top_k``: 1 drafts a chain, more a tree in which so many
    branches grow, up to ``depth`` tokens long (None: ``draft_tokens`` for a chain, 6 for a tree).
    ``coupled``: at temperature > 0 draft with the target's own noise; otherwise the likeliest
    tokens are drafted, which agree with a sampled target less often."""

    path: str | Path | None = None
    draft_tokens: int = 5
    coupled: bool = True
    top_k: int = 1
    depth: int | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise SurefootError(OPTION, "is missing", "name the drafter's folder")
        for name in ("draft_tokens", "top_k", "depth"):
            value = getattr(self, name)
            if value is None and name == "depth":
                object.__setattr__(self, name, 6 if self.top_k > 1 else self.draft_tokens)
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SurefootError(f"eagle3.{name}", f"{value!r} is below 1")
        if self.top_k == 1 and self.depth != self.draft_tokens:
            raise SurefootError("eagle3.depth", "is draft_tokens for a chain", "drop it")
        if self.top_k * ((self.depth or 1) - 1) > MOST_TREE_KEYS:
            raise SurefootError(
                "eagle3.depth",
                f"{self.depth} levels of {self.top_k} branches are more than masks hold",
                f"keep top_k * (depth - 1) within {MOST_TREE_KEYS}",
            )
        if not isinstance(self.coupled, bool):
            raise SurefootError("eagle3.coupled", f"{self.coupled!r} is neither true nor false")


class Eagle3Proposer(Proposer):
    name = "eagle3"
    Options = Eagle3Options
    options: Eagle3Options
    drafter: Eagle3Drafter

    def __init__(self, options: Eagle3Options, state: SlotState) -> None:
        super().__init__(options, state)
        self.longest = min(options.depth or options.draft_tokens, state.max_drafts)
        self.scratch_keys = 1 + options.top_k * (self.longest - 1)
        """Keys that drafting writes: the live row's, and those of every level but the last."""
        self.scratch_blocks = -(-self.scratch_keys // state.block_size)
        """Blocks of its own that each slot has for drafts."""
        self.outlook = Outlook()

    def load(self, target: Decoder) -> None:
        path, backend = str(self.options.path), target.backend
        if path == dummy.NAME:
            checkpoint = dummy.dummy_checkpoint(target.config, backend.device, backend.dtype)
        else:
            checkpoint = open_checkpoint(path)
        self.drafter = Eagle3Drafter(checkpoint, target)
        config, state = self.drafter.config.layer, self.state
        one = torch.zeros(1, dtype=torch.int64, device=state.device)
        kind = target.backend.embed(target.table, one)
        self.before = kind.new_zeros((state.slots, config.hidden_size))
        """[slots, hidden]: the feature of the position before the current token."""
        self.each = torch.arange(state.slots, device=state.device)
        self.ones = torch.ones_like(self.each)

    def needs(self) -> Needs:
        drafter, state = self.drafter, self.state
        per_block = drafter.backend.kv_bytes_per_block(state.block_size, drafter.shape)
        last = self.before.shape[1] * self.before.itemsize
        scratch = state.slots * self.scratch_blocks * per_block
        return Needs(
            longest_draft=self.longest,
            captured_layers=drafter.captured_layers,
            kv_bytes_per_token=-(-(per_block + last) // state.block_size),
            fixed_bytes=drafter.weight_bytes + self.before.nbytes + scratch,
            context_limit=drafter.max_positions,
            trees=self.options.top_k > 1,
        )

    def allocate(self, blocks: int) -> None:
        state, drafter = self.state, self.drafter
        self.blocks = blocks
        total = blocks + state.slots * self.scratch_blocks
        try:
            [self.kv] = drafter.backend.allocate_kv(1, total, state.block_size, drafter.shape)
        except ValueError as error:
            raise SurefootError(
                OPTION, f"the {drafter.backend.name} backend cannot run it: {error}"
            ) from error
        self.last_of_block = self.before.new_zeros((blocks, self.before.shape[1]))
        """[blocks, hidden]: the feature of each block's last position."""

    def admit(self, slot: int) -> None:
        state = self.state
        page = (state.computed[slot] - 1).clamp(min=0) // state.block_size
        block = state.block_tables[slot].gather(0, page.unsqueeze(0)).long()
        # Without a prefix hit nobody reads it: position 0 has no feature before it.
        self.before[slot] = self.last_of_block[block].squeeze(0)

    def catch_up(self, commits: Commits) -> None:
        batch, drafter = commits.batch, self.drafter
        features = drafter.fuse(commits.features)
        before, positions = drafter.backend.shift_features(
            features, self.before, self.last_of_block,
            commits.slots, commits.rows, commits.counts, batch,
            self.state.block_size, drafter.last_position, commits.before, commits.last,
        )  # fmt: skip
        drafter.write_keys(before, replace(batch, positions=positions, first_key=1), self.kv)

    def expect(self, outlook: Outlook) -> None:
        self.outlook = outlook

    def propose(self, slots: torch.Tensor) -> Drafts:
        depth = min(self.longest, self.outlook.longest or self.longest)
        live = self._live_rows(slots, depth)
        if self.options.top_k > 1:
            return self._propose_trees(slots, live, depth)
        drafter, count = self.drafter, len(slots)
        features, tokens = live.features, live.tokens
        offered = tokens.new_empty((count, depth))
        confidence = torch.empty(offered.shape, device=slots.device)
        for step in range(depth):
            rows = self._rows(live, step)
            hidden, logits = drafter.draft(tokens, features, rows, self.kv)
            tokens = offered[:, step]
            self._pick(slots, live.keys[step + 1], logits, (tokens, confidence[:, step]))
            features = drafter.fed_back(hidden)
        return Drafts(offered, live.lengths, confidence)

    def _propose_trees(self, slots: torch.Tensor, rows: LiveRows, depth: int) -> Drafts:
        drafter, options = self.drafter, self.options
        live, current = self._rows(rows, 0), rows.keys[0]
        features = self.outlook.features if options.coupled else Features()

        def successors(logits: torch.Tensor, deep: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = logits.shape[0] // len(slots)
            owner = slots.repeat_interleave(nodes)
            places = (current + 1 + deep).repeat_interleave(nodes)
            return pick_several(drafter, self.state, owner, places, logits, features, options.top_k)

        # Positions of a tree are counted from the live row's; near the end of the table they stop.
        last = drafter.last_position - depth
        live = replace(live, positions=live.positions.clamp(max=max(last, 0)))
        tree = grow(drafter, self.kv, live, rows.features, successors, depth - 1)
        nodes = best_nodes(tree, min(options.draft_tokens, self.state.max_drafts))
        lengths = (nodes.chance > 0).sum(dim=1)
        fits = current + depth <= drafter.max_positions
        return Drafts(nodes.tokens, torch.where(fits, lengths, 0), nodes.chance, nodes.parents)

    def _live_rows(self, slots: torch.Tensor, depth: int) -> LiveRows:
        """The current tokens of ``slots`` [B], over keys that end in scratch."""
        state, drafter = self.state, self.drafter
        most = (self.outlook.max_keys or state.history.shape[1]) + self.scratch_keys
        size = state.block_size
        scratch = Scratch(self.blocks, self.scratch_blocks, size, -(-most // size))
        return drafter.backend.live_rows(
            slots, self.before, state.history, state.length, state.block_tables, scratch,
            depth, drafter.last_position, drafter.max_positions,
        )  # fmt: skip

    def _rows(self, live: LiveRows, step: int) -> FlatBatch:
        """One row a request: the live row itself, or the draft so many steps after it."""
        row, one = self.each[: len(live.tokens)], self.ones[: len(live.tokens)]
        return FlatBatch(
            tokens=live.tokens,
            positions=live.positions[step],
            key_index=live.keys[step],
            row_slot=row,
            block_tables=live.tables,
            span_start=live.keys[1],
            max_keys=live.tables.shape[1] * self.state.block_size,
            first_key=1,
            spans=SpanTable(row, one, row, max_rows=1),
        )

    def _pick(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        logits: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        features = self.outlook.features if self.options.coupled else Features()
        pick(self.drafter, self.state, slots, positions, logits, features, out)

    @classmethod
    def inspect(cls, path: str, target: ModelConfig | None) -> dict[str, Any] | None:
        return checkpoint_facts(path, target)
