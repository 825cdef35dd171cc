"""Committed rows that the drafters have not read yet.

Catching up reads a drafter's projections for however few rows. Where a round may look at tensors on
the host, the rows of late rounds are kept as long as nobody drafts, and drafters catch up on all of
them at once: when one is to draft, when there is no room for more, and before a slot or a block
changes hands. Nobody reads a drafter's keys in between, so what it drafts is the same to the bit.
"""

from __future__ import annotations

import itertools
from collections import Counter

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
        self._tokens, self._keys = torch.zeros((2, room), dtype=torch.int64, device=state.device)
        self._owners: list[int] = []
        """The slot of each row that is kept now."""
        self._features: torch.Tensor | None = None
        """[room, captured * hidden], made when the first rows come."""

    @property
    def rows(self) -> int:
        """Kept now."""
        return len(self._owners)

    def keep(self, commits: Commits) -> bool:
        """Keep the settled rows of chains. False, and nothing done, where there is no room."""
        if not self.room:
            return False
        counts = commits.counts.tolist()
        if self.rows + sum(counts) > self.room:
            return False
        features, batch = commits.features, commits.batch
        if self._features is None:
            self._features = features.new_empty((self.room, features.shape[1]))
        spans = zip(counts, commits.rows.tolist(), commits.slots.tolist(), strict=True)
        for count, first, slot in spans:
            if count:
                rows, here = slice(first, first + count), slice(self.rows, self.rows + count)
                self._features[here] = features[rows]
                self._tokens[here] = batch.tokens[rows]
                self._keys[here] = batch.key_index[rows]
                self._owners += [slot] * count
        return True

    def take(self) -> Commits | None:
        """All that was kept, as if one round had settled it; None where that is nothing. Valid
        until rows are kept again."""
        owners, features, state = self._owners, self._features, self.state
        self._owners = []
        if not owners or features is None:
            return None
        rows = slice(len(owners))
        tokens, keys, features = self._tokens[rows], self._keys[rows], features[rows]
        spans = Counter(owners)
        if len(spans) > 1:
            order = sorted(range(len(owners)), key=owners.__getitem__)
            owners = sorted(owners)
            tokens, keys, features = tokens[order], keys[order], features[order]
        counts = [spans[slot] for slot in sorted(spans)]
        first = [0, *itertools.accumulate(counts[:-1])]
        table = torch.tensor((sorted(spans), counts, first), device=state.device)
        batch = FlatBatch(
            tokens=tokens,
            positions=keys,
            key_index=keys,
            row_slot=torch.tensor(owners, device=state.device),
            block_tables=state.block_tables,
            span_start=state.computed,
            max_keys=state.history.shape[1],
        )
        slots, settled, begins = table
        return Commits(slots, keys[begins], settled, begins, batch, features)

    def clear(self) -> None:
        """Forget what was kept: it belongs to nobody any more."""
        self._owners = []
