"""What a proposer of trees has offered lately: what trees of fewer or more levels would hold."""

from __future__ import annotations

import numpy as np

from surefoot.speculation.offers import DECAY, Offers


def levels_of(parents: np.ndarray) -> np.ndarray:
    """int64 [n, K]: how many drafts in a row each draft of n trees ends, from 1 on. ``parents``
    [n, K] as in ``Drafts``."""
    found = []
    for row in parents.tolist():
        levels: list[int] = []
        for parent in row:
            # Beyond an offer there may be anything.
            levels.append(levels[parent] + 1 if 0 <= parent < len(levels) else 1)
        found.append(levels)
    return np.array(found, dtype=np.int64).reshape(parents.shape)


class TreeOffers(Offers):
    """A proposer's latest trees: chances by request as in ``Situation``. Its steps are levels. A
    tree of fewer levels is what a deeper one has on these. Of a deeper one each branch goes on by
    two drafts a level, which together are as likely as what usually follows a branch, and one of
    them has as large a part as the likeliest first draft has among those."""

    def __init__(self, width: int, levels: int, nodes: int) -> None:
        """So many ``levels`` and ``nodes`` at most."""
        super().__init__(width, levels)
        self._nodes = nodes
        kept = len(self._rows)
        self._levels = np.tile(1 + np.arange(width), (kept, 1))
        """int64 [kept, width]: of each of the kept drafts."""
        self._steps = np.full(kept, levels)
        """int64 [kept]: how many levels each of the kept trees was made with."""
        self._as_of = dict[int, tuple[np.ndarray, int]]()
        """By levels, for which somebody asked: the kept trees float32 [kept, width] as they would
        be with so many, and how many trees there had been when these were worked out."""

    def record(self, rows: np.ndarray, steps: int, parents: np.ndarray | None = None) -> None:
        """As ``Offers`` has it; of chains no ``parents`` need be given."""
        self._note_share(rows)
        steps, levels = min(steps, self.longest), self._levels_of(rows, parents)
        # Smaller ones were cut: their requests are about to end, or want no more.
        offered = rows > 0.0
        deep = np.where(offered, levels, 0).max(axis=1) >= steps
        whole = deep | (np.count_nonzero(offered, axis=1) >= self._nodes)
        rows, levels = rows[whole], levels[whole]
        if not len(rows):
            return
        self._learn_levels(rows, levels, steps)
        places = self._next_places(len(rows))
        self._rows[places], self._levels[places], self._steps[places] = rows, levels, steps
        self._entered += len(rows)

    def _levels_of(self, rows: np.ndarray, parents: np.ndarray | None) -> np.ndarray:
        if parents is None:
            return np.tile(1 + np.arange(rows.shape[1]), (len(rows), 1))
        return levels_of(parents)

    def _learn_levels(self, rows: np.ndarray, levels: np.ndarray, steps: int) -> None:
        gains = np.bincount(levels.ravel(), weights=rows.ravel(), minlength=1 + steps)
        gains[0] = len(rows)
        fading = DECAY ** len(rows)
        self._hits[:steps] = self._hits[:steps] * fading + gains[1 : 1 + steps]
        self._trials[:steps] = self._trials[:steps] * fading + gains[:steps]

    def _going_on(
        self, rows: np.ndarray, levels: np.ndarray, steps: int, wanted: int
    ) -> np.ndarray:
        """Trees of ``steps`` levels as they would be with ``wanted``, which are more: the likeliest
        drafts first."""
        everything, width = [rows], rows.shape[1]
        ends, first = np.where(levels == steps, rows, 0.0), np.where(levels == 1, rows, 0.0)
        likeliest = first.max(axis=1, keepdims=True) / np.maximum(
            first.sum(axis=1, keepdims=True), 1e-9
        )
        for level in range(steps, wanted):
            ends = ends * (self._hits[level] / self._trials[level])
            ends = np.concatenate((ends * likeliest, ends * (1.0 - likeliest)), axis=1)
            ends = -np.sort(-ends, axis=1)[:, :width]
            everything.append(ends)
        rows = -np.sort(-np.concatenate(everything, axis=1), axis=1)[:, :width]
        # A tree has no more drafts than that, however deep it is.
        rows[:, self._nodes :] = 0.0
        return rows.astype(np.float32)

    def reaching(
        self, rows: np.ndarray, steps: int, wanted: int, parents: np.ndarray | None = None
    ) -> np.ndarray:
        steps, wanted = min(steps, self.longest), min(wanted, self.longest)
        if steps == wanted:
            return rows
        return self._with_levels(rows, self._levels_of(rows, parents), steps, wanted)

    def _with_levels(
        self, rows: np.ndarray, levels: np.ndarray, steps: int, wanted: int
    ) -> np.ndarray:
        if wanted > steps:
            return self._going_on(rows, levels, steps, wanted)
        # What is on the first levels, the likeliest drafts first.
        return -np.sort(np.where(levels <= wanted, -rows, 0.0), axis=1)

    def _repeat(self, places: np.ndarray) -> None:
        new = self._next_places(len(places))
        self._levels[new], self._steps[new] = self._levels[places], self._steps[places]
        super()._repeat(places)

    def latest(self, count: int, steps: int) -> np.ndarray:
        return self._with(min(steps, self.longest))[self._latest_places(count)]

    def _with(self, levels: int) -> np.ndarray:
        """float32 [kept, width]: the kept trees as they would be with so many ``levels``. Those
        that came since somebody asked are worked out now."""
        kept = len(self._rows)
        known, before = self._as_of.get(levels) or (np.empty_like(self._rows), self._entered - kept)
        if before < self._entered:
            places = np.arange(max(before, self._entered - kept), self._entered) % kept
            made = self._steps[places]
            for steps in set(made.tolist()):
                own = places[made == steps]
                rows = self._rows[own]
                if steps != levels:
                    rows = self._with_levels(rows, self._levels[own], steps, levels)
                known[own] = rows
            self._as_of[levels] = known, self._entered
        return known
