"""What the last report read says of the drafts on offer, by slot: the planner weighs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.engine.batch import Batch
from surefoot.engine.reports import Report
from surefoot.speculation.books import ReportColumns


class ReportedOffers:
    """Chances of the drafts on offer, and whose these are."""

    def __init__(self, slots: int, width: int, columns: ReportColumns) -> None:
        self.width = width
        self.columns = columns
        self._chances = np.full((slots, width), np.nan, dtype=np.float32)
        self._chance_bits = self._chances.view(np.int32)
        self._whose = np.zeros(slots, dtype=np.int64)
        self._parents = np.zeros((slots, width if columns.trees else 0), dtype=np.int32)
        self._hosted = np.full((slots, width), np.nan, dtype=np.float32)

    def clear(self, slot: int) -> None:
        """Nothing is known of a slot."""
        self._chances[slot] = np.nan
        self._hosted[slot] = np.nan

    def gain(self, slot: int, length: int) -> float:
        """Tokens that the first ``length`` drafts on offer promise; 0 where nothing is known."""
        return float(np.nan_to_num(self._chances[slot, :length]).sum())

    def host(self, slot: int, chances: Sequence[float] | None) -> None:
        """The host has drafts with these ``chances`` on offer, which have replaced what the report
        told of, so that who made that gained nothing; None: it has none."""
        self._hosted[slot] = np.nan
        if chances is not None:
            self._hosted[slot] = self._chances[slot] = 0.0
            self._hosted[slot, : len(chances)] = chances

    def cut(self, slot: int, length: int) -> None:
        """Of its offer, only so many drafts are left."""
        self._chances[slot, length:] = 0.0

    def note(self, report: Report, slots: np.ndarray) -> np.ndarray:
        """A report was read, whose requests now have ``slots`` int64 [spans] (below 0: none).
        Returns which of them it tells of, bool [spans]."""
        width, columns = self.width, self.columns
        if len(slots) == 1:
            # A dozen operations on arrays of one number take longer than all that follows.
            row, slot = report.rows[0], int(slots[0])
            known = slot >= 0 and bool(row[columns.COUNT] > 0)
            if known:
                self._chance_bits[slot] = row[columns.chances : columns.chances + width]
                self._whose[slot] = row[columns.OFFERER]
                if columns.trees:
                    self._parents[slot] = row[columns.parents : columns.parents + width]
            return np.array((known,))
        rows = report.rows[: len(slots)]
        # Who is no longer running has no slot; who samples nothing has no offer.
        known = (slots >= 0) & (rows[:, columns.COUNT] > 0)
        if not known.all():
            slots, rows = slots[known], rows[known]
        chances = rows[:, columns.chances : columns.chances + width]
        self._chance_bits[slots] = chances
        self._whose[slots] = rows[:, columns.OFFERER]
        if columns.trees:
            self._parents[slots] = rows[:, columns.parents : columns.parents + width]
        return known

    def hosted(self, batch: Batch) -> np.ndarray | None:
        """As ``Situation`` has it."""
        if not self.width or not batch.group.masked or not batch.decoding:
            return None
        slots = batch.group.slots[len(batch.chunks) :]
        hosted = self._hosted[slots]
        if np.isnan(hosted[:, 0]).all():
            return None
        unknown = np.full((batch.ending, self.width), np.nan, dtype=np.float32)
        return np.concatenate((hosted, unknown))

    def of(
        self, batch: Batch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | tuple[None, None, None]:
        """(Chances float32 [samples, K], whose int64 [samples], parents int32 [samples, K]) as
        ``Situation`` has them; of requests at the end of their prompt nothing is known."""
        slots = batch.group.slots[len(batch.chunks) :]
        if not self.width or not len(slots):
            return None, None, None
        chances, whose = self._chances[slots], self._whose[slots]
        parents = self._parents[slots] if self.columns.trees else None
        if batch.ending:
            unknown = np.full((batch.ending, self.width), np.nan, dtype=np.float32)
            chances = np.concatenate((chances, unknown))
            whose = np.concatenate((whose, np.zeros(batch.ending, dtype=np.int64)))
            if parents is not None:
                parents = np.concatenate((parents, np.zeros(unknown.shape, dtype=np.int32)))
        return chances, whose, parents
