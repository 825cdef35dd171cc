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
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.sampling.params import Features
from surefoot.speculation.proposer import Commits, Drafts, Needs, Outlook, Proposer
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
    """``path``: folder or hub name of the checkpoint. ``draft_tokens``: most drafts offered.
    ``top_k``: 1 drafts a chain, more a tree in which so many branches grow, up to ``depth`` tokens
    long (None: ``draft_tokens`` for a chain, 6 for a tree). ``coupled``: at temperature > 0 draft
    with the target's own noise; otherwise the likeliest tokens are drafted, which agree with a
    sampled target less often."""

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
        self.drafter = Eagle3Drafter(open_checkpoint(str(self.options.path)), target)
        config, state = self.drafter.config.layer, self.state
        one = torch.zeros(1, dtype=torch.int64, device=state.device)
        kind = target.backend.embed(target.table, one)
        self.before = kind.new_zeros((state.slots, config.hidden_size))
        """[slots, hidden]: the feature of the position before the current token."""

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
        batch = commits.batch
        features = self.drafter.fuse(commits.features)
        owner = batch.row_slot.clamp(min=0)
        if commits.before is None:
            begins = torch.ones_like(batch.row_slot, dtype=torch.bool)
            begins[1:] = batch.row_slot[1:] != batch.row_slot[:-1]
            above = torch.cat((features[:1], features[:-1]))
        else:
            begins, above = commits.before < 0, features[commits.before.clamp(min=0)]
        before = torch.where(begins.unsqueeze(1), self.before[owner], above)
        entries = replace(batch, positions=self.drafter.rotary(batch.key_index), first_key=1)
        self.drafter.write_keys(before, entries, self.kv)
        self._keep_last_of_blocks(batch, owner, features)
        self._keep_live(commits, features)

    def _keep_live(self, commits: Commits, features: torch.Tensor) -> None:
        """The feature of each slot's last settled position. Entries that settled nothing may share
        their slot with one that did."""
        last = commits.rows + commits.counts - 1 if commits.last is None else commits.last
        live = torch.where(commits.counts > 0, last, -1)
        row = torch.full_like(self.state.length, -1)
        row.scatter_reduce_(0, commits.slots, live, "amax")
        kept = (row < 0).unsqueeze(1)
        self.before.copy_(torch.where(kept, self.before, features[row.clamp(min=0)]))

    def _keep_last_of_blocks(
        self, batch: FlatBatch, owner: torch.Tensor, features: torch.Tensor
    ) -> None:
        """A rejected draft's feature may land here too; by the time that its block is full, and
        can be found by others, the position has been run again."""
        size = self.state.block_size
        blocks = batch.block_tables[owner, batch.key_index // size].long()
        ends = (batch.key_index % size == size - 1) & (batch.row_slot >= 0)
        # Block 0 belongs to nobody.
        self.last_of_block.index_copy_(0, torch.where(ends, blocks, 0), features)

    def expect(self, outlook: Outlook) -> None:
        self.outlook = outlook

    def propose(self, slots: torch.Tensor) -> Drafts:
        depth = min(self.longest, self.outlook.longest or self.longest)
        live = self._live_rows(slots)
        if self.options.top_k > 1:
            return self._propose_trees(slots, live, depth)
        drafter = self.drafter
        features, tokens, confidence = self.before[slots], [], []
        for step in range(depth):
            keys = live.key_index + min(step, 1)
            live = replace(live, key_index=keys, positions=drafter.rotary(keys))
            hidden = drafter.step(features, live, self.kv)
            token, chance = self._pick(slots, keys + 1, drafter.logits(hidden))
            tokens.append(token)
            confidence.append(chance)
            features = drafter.fed_back(hidden)
            live = replace(live, tokens=token)
        lengths = (drafter.max_positions - self.state.length[slots] + 1).clamp(0, depth)
        return Drafts(torch.stack(tokens, dim=1), lengths, torch.stack(confidence, dim=1))

    def _propose_trees(self, slots: torch.Tensor, live: FlatBatch, depth: int) -> Drafts:
        drafter, options = self.drafter, self.options
        current = live.key_index
        features = self.outlook.features if options.coupled else Features()

        def successors(logits: torch.Tensor, deep: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = logits.shape[0] // len(slots)
            owner = slots.repeat_interleave(nodes)
            places = (current + 1 + deep).repeat_interleave(nodes)
            return pick_several(drafter, self.state, owner, places, logits, features, options.top_k)

        # Positions of a tree are counted from the live row's; near the end of the table they stop.
        last = drafter.rope.cos.shape[0] - depth - 1
        live = replace(live, positions=live.positions.clamp(max=max(last, 0)))
        tree = grow(drafter, self.kv, live, self.before[slots], successors, depth - 1)
        nodes = best_nodes(tree, min(options.draft_tokens, self.state.max_drafts))
        lengths = (nodes.chance > 0).sum(dim=1)
        fits = current + depth <= drafter.max_positions
        return Drafts(nodes.tokens, torch.where(fits, lengths, 0), nodes.chance, nodes.parents)

    def _live_rows(self, slots: torch.Tensor) -> FlatBatch:
        """The current tokens of ``slots`` [B], one row each, over keys that end in scratch."""
        # The slot that nobody has is one token long: at key 0 it would see nothing at all.
        state, current = self.state, (self.state.length[slots] - 1).clamp(min=1)
        row = torch.arange(len(slots), device=slots.device)
        tables = self._scratch_tables(slots, current)
        return FlatBatch(
            tokens=state.history[slots, current],
            positions=self.drafter.rotary(current),
            key_index=current,
            row_slot=row,
            block_tables=tables,
            span_start=current + 1,
            max_keys=tables.shape[1] * state.block_size,
            first_key=1,
            spans=SpanTable(row, torch.ones_like(row), row, max_rows=1),
        )

    def _scratch_tables(self, slots: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """Block tables int32 [B, pages] for drafting behind ``current`` [B]: the request's own
        blocks as far as they hold settled positions, then the slot's scratch blocks."""
        state = self.state
        width = state.block_tables.shape[1]
        most = self.outlook.max_keys or state.history.shape[1]
        page = torch.arange(-(-(most + self.scratch_keys) // state.block_size), device=slots.device)
        tables = state.block_tables[slots][:, page.clamp(max=width - 1)]
        beyond = page - (current - 1).unsqueeze(1) // state.block_size - 1
        scratch = self.blocks + slots.unsqueeze(1) * self.scratch_blocks
        scratch = scratch + beyond.clamp(0, self.scratch_blocks - 1)
        return torch.where(beyond < 0, tables, scratch.to(torch.int32))

    def _pick(
        self, slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.outlook.features if self.options.coupled else Features()
        return pick(self.drafter, self.state, slots, positions, logits, features)

    @classmethod
    def inspect(cls, path: str, target: ModelConfig | None) -> dict[str, Any] | None:
        return checkpoint_facts(path, target)
