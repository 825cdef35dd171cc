"""Committed rows that the drafters have not read yet.

Catching up reads a drafter's projections for however few rows. Where a round may look at tensors on
the host, the rows of late rounds are kept as long as nobody drafts, and drafters catch up on all of
them at once: when one is to draft, when there is no room for more, and before a slot or a block
changes hands. Nobody reads a drafter's keys in between, so what it drafts is the same to the bit.
"""

from __future__ import annotations

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.speculation.proposer import Commits
from surefoot.speculation.state import SlotState


class Backlog:
    """Keeps the settled rows of several rounds, in order."""

    def __init__(self, state: SlotState, room: int) -> None:
        """``room``: rows, at most; with 0, nothing is ever kept, or read on the host."""
        self.state = state
        self.room = room
        self.rows = 0
        """Kept now."""
        self._batch = torch.zeros((3, room), dtype=torch.int64, device=state.device)
        self._tokens, self._keys, self._slots = self._batch
        self._features: torch.Tensor | None = None
        """[room, captured * hidden], made when the first rows come."""

    def keep(self, commits: Commits) -> bool:
        """Keep the settled rows of chains. False, and nothing done, where there is no room."""
        if not self.room:
            return False
        counts = commits.counts.tolist()
        end = self.rows + sum(counts)
        if end > self.room:
            return False
        features, batch = commits.features, commits.batch
        if self._features is None:
            self._features = features.new_empty((self.room, features.shape[1]))
        at = self.rows
        spans = zip(counts, commits.rows.tolist(), commits.slots.tolist(), strict=True)
        for count, first, slot in spans:
            if count:
                rows, here = slice(first, first + count), slice(at, at + count)
                self._features[here] = features[rows]
                self._tokens[here] = batch.tokens[rows]
                self._keys[here] = batch.key_index[rows]
                self._slots[here] = slot
                at += count
        self.rows = end
        return True

    def take(self) -> Commits | None:
        """All that was kept, as if one round had settled it; None where that is nothing. Valid
        until rows are kept again."""
        count, features = self.rows, self._features
        self.rows = 0
        if not count or features is None:
            return None
        tokens, keys, owner = self._batch[:, :count]
        features = features[:count]
        if (owner != owner[0]).any():
            owner, order = owner.sort(stable=True)
            tokens, keys, features = tokens[order], keys[order], features[order]
        slots, counts = owner.unique_consecutive(return_counts=True)
        first = counts.cumsum(0) - counts
        state = self.state
        batch = FlatBatch(
            tokens=tokens,
            positions=keys,
            key_index=keys,
            row_slot=owner,
            block_tables=state.block_tables,
            span_start=state.computed,
            max_keys=state.history.shape[1],
        )
        return Commits(slots, keys[first], counts, first, batch, features)

    def clear(self) -> None:
        """Forget what was kept: it belongs to nobody any more."""
        self.rows = 0
