"""KV for what launched rounds may write, by slot: nothing is asked of a request that has enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.engine.batch import Batch
from surefoot.kernels.upload import Uploads
from surefoot.kv.transaction import KVManager, Transaction
from surefoot.request import Request
from surefoot.speculation.decisions import Decision
from surefoot.speculation.state import SlotState

AHEAD = 256
"""Positions that are reserved at once, at most, so that not every launch has to; whoever has less
than half of that left is served along with those who lack some."""
PART = 8
"""Of the free blocks, one of so many may be reserved for that in a round."""


@dataclass(frozen=True, eq=False)
class Reach:
    """What a round may write at most."""

    rows: np.ndarray | int
    """int64 [spans]: positions of each span; a number, where there are no prompt chunks: of all.
    """
    keys: int
    """The most positions that a request has then, its earlier ones included."""


class Reservations:
    """Makes blocks available for the longest spans that can result, and has them mirrored to the
    device."""

    def __init__(self, kv: KVManager, state: SlotState, beyond: int, uploads: Uploads) -> None:
        """``beyond``: positions that a round may write behind the last a request may have. (A tree
        no deeper than that can have more nodes.) ``uploads``: are sent before a round is
        launched."""
        self.kv = kv
        self.state = state
        self.beyond = beyond
        self.uploads = uploads
        self.computed, self.reach, self.capacity, self.limit = np.zeros(
            (4, state.slots), dtype=np.int64
        )
        """int64 [slots]: positions that are final; those that rounds in flight may write beyond
        them; those that there are blocks for; and those that there can be at most."""

    def admit(self, requests: Sequence[Request]) -> None:
        """Requests enter their slots."""
        for request in requests:
            slot = request.slot
            self.reach[slot] = 0
            self.computed[slot] = request.computed
            self.limit[slot] = request.max_length + self.beyond
        self._mirror(requests)

    def _mirror(self, requests: Sequence[Request]) -> None:
        leases, size = self.kv.leases, self.kv.block_size
        pairs = [(request.slot, leases[request.request_id].blocks) for request in requests]
        for slot, blocks in pairs:
            self.capacity[slot] = len(blocks) * size
        self.state.set_blocks(pairs, self.uploads)

    def make(self, transaction: Transaction, batch: Batch, decision: Decision) -> Reach | None:
        """Reserve for a round of ``batch``; None if the pool has too little."""
        slots, chunks, only = batch.group.slots, len(batch.chunks), batch.only_slot
        each = 1 + (self.state.max_drafts if decision.drafts else 0)
        if only is not None:
            # With arrays of one number, this takes several times as long.
            most = int(self.computed[only]) + int(self.reach[only]) + each
            most = min(most, int(self.limit[only]))
            lack = most > int(self.capacity[only])
            if lack and not self._reserve(transaction, batch, np.array([most])):
                return None
            return Reach(each, most)
        rows: np.ndarray | int = each
        if chunks:
            rows = np.full(len(slots), each)
            rows[:chunks] = batch.chunks
        before = self.computed[slots] + self.reach[slots]
        needed = np.minimum(before + rows, self.limit[slots])
        lack = (needed > self.capacity[slots]).any()
        if lack and not self._reserve(transaction, batch, needed):
            return None
        return Reach(rows, int(needed.max()))

    def _reserve(self, transaction: Transaction, batch: Batch, needed: np.ndarray) -> bool:
        """Blocks for those of a batch that need more positions than they have blocks for (int64
        [spans] each); where there are plenty, for those that soon will as well, so that tables are
        written for many at once."""
        slots, size, free = batch.group.slots, self.kv.block_size, self.kv.pool.num_free
        capacity, limit = self.capacity[slots], self.limit[slots]
        ahead = min(free // (PART * len(slots)) * size, AHEAD)
        soon = np.minimum(needed + ahead // 2, limit) > capacity
        wanted = np.where(soon, np.minimum(needed + ahead, limit), needed)
        if np.maximum(0, -(-(wanted - capacity) // size)).sum() > free:
            wanted = needed
        lacking = np.flatnonzero(wanted > capacity)
        requests = [batch.group.requests[place] for place in lacking]
        positions = (wanted - self.computed[slots])[lacking].tolist()
        names = (request.request_id for request in requests)
        if not transaction.reserve(dict(zip(names, positions, strict=True))):
            return False
        self._mirror(requests)
        return True

    def mean_length(self, batch: Batch) -> float:
        """Tokens with KV of the requests of a batch, on average."""
        if batch.only_slot is not None:
            return float(self.computed[batch.only_slot])
        return float(self.computed[batch.group.slots].sum()) / batch.count

    def launched(self, batch: Batch, reach: Reach) -> None:
        """A round of ``batch`` was launched: its prompt chunks count as computed."""
        slots, rows, chunks = batch.group.slots, reach.rows, len(batch.chunks)
        if batch.only_slot is not None:
            self.reach[batch.only_slot] += rows
            return
        if not isinstance(rows, int):
            self.computed[slots[:chunks]] += rows[:chunks]
            slots, rows = slots[chunks:], rows[chunks:]
        self.reach[slots] += rows

    def landed(self, batch: Batch, slots: np.ndarray, reach: Reach, committed: np.ndarray) -> None:
        """Its report was read: the requests, which now have ``slots`` (int64 [spans]; below 0:
        those that no longer run), got so many tokens each (int [spans])."""
        rows, left = reach.rows, slots is not batch.group.slots
        if batch.only_slot is not None and not left:
            self.reach[batch.only_slot] -= rows
            self.computed[batch.only_slot] += committed[0]
            return
        if not isinstance(rows, int):
            chunks = len(batch.chunks)
            slots, rows, committed = slots[chunks:], rows[chunks:], committed[chunks:]
        if left:
            running = slots >= 0
            slots, committed = slots[running], committed[running]
            rows = rows if isinstance(rows, int) else rows[running]
        self.reach[slots] -= rows
        self.computed[slots] += committed

    def give_back(self, requests: Sequence[Request]) -> bool:
        """With nothing in flight: release what ``requests`` hold beyond what is final. False if
        there was nothing."""
        before = self.kv.pool.num_free
        for request in requests:
            self.kv.give_back(self.kv.leases[request.request_id])
        self._mirror(requests)
        return self.kv.pool.num_free > before
