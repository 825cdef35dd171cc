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
from surefoot.speculation.proposers.eagle3.picking import pick
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class Eagle3Options:
    """``path``: folder or hub name of the checkpoint. ``draft_tokens``: longest draft.
    ``coupled``: at temperature > 0 draft with the target's own noise; otherwise the likeliest
    token is drafted, which agrees with a sampled target less often."""

    path: str | Path | None = None
    draft_tokens: int = 5
    coupled: bool = True

    def __post_init__(self) -> None:
        if not self.path:
            raise SurefootError(OPTION, "is missing", "name the drafter's folder")
        if not isinstance(self.draft_tokens, int) or self.draft_tokens < 1:
            raise SurefootError("eagle3.draft_tokens", f"{self.draft_tokens!r} is below 1")
        if not isinstance(self.coupled, bool):
            raise SurefootError("eagle3.coupled", f"{self.coupled!r} is neither true nor false")


class Eagle3Proposer(Proposer):
    name = "eagle3"
    Options = Eagle3Options
    options: Eagle3Options
    drafter: Eagle3Drafter

    def __init__(self, options: Eagle3Options, state: SlotState) -> None:
        super().__init__(options, state)
        self.longest = min(options.draft_tokens, state.max_drafts)
        self.scratch_blocks = -(-self.longest // state.block_size)
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
        )

    def allocate(self, blocks: int) -> None:
        state, drafter = self.state, self.drafter
        self.blocks = blocks
        total = blocks + state.slots * self.scratch_blocks
        [self.kv] = drafter.backend.allocate_kv(1, total, state.block_size, drafter.shape)
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
        begins = torch.ones_like(batch.row_slot, dtype=torch.bool)
        begins[1:] = batch.row_slot[1:] != batch.row_slot[:-1]
        shifted = torch.cat((features[:1], features[:-1]))
        before = torch.where(begins.unsqueeze(1), self.before[owner], shifted)
        entries = replace(batch, positions=self._rotary(batch.key_index), first_key=1)
        self.drafter.write_keys(before, entries, self.kv)
        self._keep_last_of_blocks(batch, owner, features)
        self._keep_live(commits, features)

    def _keep_live(self, commits: Commits, features: torch.Tensor) -> None:
        """The feature of each slot's last settled position. Entries that settled nothing may share
        their slot with one that did."""
        live = torch.where(commits.counts > 0, commits.rows + commits.counts - 1, -1)
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

    def _rotary(self, keys: torch.Tensor) -> torch.Tensor:
        """Positions of entries: the feature's. Beyond the drafter's context nothing is offered,
        and any position does."""
        return (keys - 1).clamp(0, self.drafter.rope.cos.shape[0] - 1)

    def expect(self, outlook: Outlook) -> None:
        self.outlook = outlook

    def propose(self, slots: torch.Tensor) -> Drafts:
        state, drafter = self.state, self.drafter
        steps = min(self.longest, self.outlook.longest or self.longest)
        current = state.length[slots] - 1
        tables = self._scratch_tables(slots, current)
        row = torch.arange(len(slots), device=slots.device)
        spans = SpanTable(row, torch.ones_like(row), row, max_rows=1)
        features, token = self.before[slots], state.history[slots, current]
        tokens, confidence = [], []
        for step in range(steps):
            keys = current + step
            batch = FlatBatch(
                tokens=token,
                positions=self._rotary(keys),
                key_index=keys,
                row_slot=row,
                block_tables=tables,
                span_start=current,
                max_keys=tables.shape[1] * state.block_size,
                first_key=1,
                spans=spans,
            )
            hidden = drafter.step(features, batch, self.kv)
            token, chance = self._pick(slots, keys + 1, drafter.logits(hidden))
            tokens.append(token)
            confidence.append(chance)
            features = drafter.fed_back(hidden)
        lengths = (drafter.max_positions - current).clamp(0, steps)
        return Drafts(torch.stack(tokens, dim=1), lengths, torch.stack(confidence, dim=1))

    def _scratch_tables(self, slots: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """Block tables int32 [B, pages] for drafting behind ``current`` [B]: the request's own
        blocks as far as they hold settled positions, then the slot's scratch blocks."""
        state = self.state
        tables = state.block_tables[slots]
        if self.outlook.max_keys:
            pages = -(-(self.outlook.max_keys + self.longest) // state.block_size)
            tables = tables[:, :pages]
        page = torch.arange(tables.shape[1], device=slots.device)
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
