"""Committed rows that the drafters have not read yet.

Catching up reads a drafter's projections for however few rows. Where a round may look at tensors on
the host, the rows of late rounds are kept as long as nobody drafts, and drafters catch up on all of
them at once: when one is to draft, when there is no room for more, and before a slot or a block
changes hands. Nobody reads a drafter's keys in between, so what it drafts is the same to the bit.
"""

from __future__ import annotations

import numpy as np
import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.drafting import Drafting
from surefoot.speculation.proposer import Commits
from surefoot.speculation.state import SlotState

MANY = 24
"""Rows of one round, a prompt's or those of many requests, from which on waiting saves nothing: the
projections are read for many at once anyhow."""


class Backlog:
    """Keeps the settled rows of several rounds, in order."""

    def __init__(self, state: SlotState, drafting: Drafting, room: int) -> None:
        """``room``: rows, at most; with 0, nothing is ever kept, or read on the host."""
        self.state = state
        self.drafting = drafting
        self.room = room
        self.rows = 0
        """Kept now."""
        self._table = torch.zeros((3, room), dtype=torch.int64, device=state.device)
        """Tokens, key indices and slots."""
        self._features: torch.Tensor | None = None
        """float32 [room, captured * hidden], made when the first rows come."""

    def keep(self, commits: Commits) -> bool:
        """Keep the settled rows of chains. False, and nothing done, where there is no room, or no
        use."""
        if not self.room:
            return False
        if self._features is None:
            self._features = torch.empty(self.room, commits.features.shape[1])
        settled = commits.rows, commits.counts
        rows = self.drafting.keep_rows(
            commits.features, commits.batch, commits.slots, settled,
            self._features, self._table, self.rows, MANY - 1,
        )  # fmt: skip
        self.rows = max(rows, self.rows)
        return rows >= 0

    def take(self) -> Commits | None:
        """All that was kept, as if one round had settled it; None where that is nothing. Valid
        until rows are kept again."""
        count, state, features = self.rows, self.state, self._features
        self.rows = 0
        if not count or features is None:
            return None
        tokens, keys, owners = self._table[:, :count]
        features = features[:count]
        slots, begins, counts = np.unique(owners.numpy(), return_index=True, return_counts=True)
        if len(slots) > 1:
            order = owners.argsort(stable=True)
            tokens, keys, owners, features = (x[order] for x in (tokens, keys, owners, features))
            begins = np.cumsum(counts) - counts
        table = torch.from_numpy(np.stack((slots, counts, begins)))
        batch = FlatBatch(
            tokens=tokens,
            positions=keys,
            key_index=keys,
            row_slot=owners,
            block_tables=state.block_tables,
            span_start=state.computed,
            max_keys=state.history.shape[1],
        )
        spans, settled, first = table
        return Commits(spans, settled, first, batch, features)

    def clear(self) -> None:
        """Forget what was kept: it belongs to nobody any more."""
        self.rows = 0
