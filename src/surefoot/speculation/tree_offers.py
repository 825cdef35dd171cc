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
        self._levels = np.tile(1 + np.arange(width), (len(self._rows), 1))
        """int64 [kept, width]: of each of the kept drafts."""

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
        rows, levels = self._going_on(rows, levels, steps, self.longest)
        places = self._next_places(len(rows))
        self._rows[places], self._levels[places] = rows, levels
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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Trees of ``steps`` levels, as they would be with ``wanted``: the likeliest drafts first,
        and their levels."""
        if wanted == steps:
            return rows, levels
        more, depths = [rows], [levels]
        ends, width = np.where(levels == steps, rows, 0.0), rows.shape[1]
        first = np.where(levels == 1, rows, 0.0)
        likeliest = first.max(axis=1, keepdims=True) / np.maximum(
            first.sum(axis=1, keepdims=True), 1e-9
        )
        for level in range(steps, wanted):
            ends = ends * (self._hits[level] / self._trials[level])
            ends = np.concatenate((ends * likeliest, ends * (1.0 - likeliest)), axis=1)
            ends = -np.sort(-ends, axis=1)[:, :width]
            more.append(ends)
            depths.append(np.full_like(levels, level + 1))
        everything, of_these = np.concatenate(more, axis=1), np.concatenate(depths, axis=1)
        best = np.argsort(-everything, axis=1, kind="stable")[:, : rows.shape[1]]
        rows = np.take_along_axis(everything, best, axis=1)
        # A tree has no more drafts than that, however deep it is.
        rows[:, self._nodes :] = 0.0
        return rows.astype(np.float32), np.take_along_axis(of_these, best, axis=1)

    def reaching(
        self, rows: np.ndarray, steps: int, wanted: int, parents: np.ndarray | None = None
    ) -> np.ndarray:
        steps, wanted = min(steps, self.longest), min(wanted, self.longest)
        if steps == wanted:
            return rows
        levels = self._levels_of(rows, parents)
        if wanted > steps:
            return self._going_on(rows, levels, steps, wanted)[0]
        return _on_levels(rows, levels, wanted)

    def _repeat(self, places: np.ndarray) -> None:
        self._levels[self._next_places(len(places))] = self._levels[places]
        super()._repeat(places)

    def latest(self, count: int, steps: int) -> np.ndarray:
        places = self._latest_places(count)
        if steps >= self.longest:
            return self._rows[places]
        return _on_levels(self._rows[places], self._levels[places], steps)


def _on_levels(rows: np.ndarray, levels: np.ndarray, most: int) -> np.ndarray:
    """What of ``rows`` [n, K] is on the first levels, the likeliest drafts first."""
    return -np.sort(np.where(levels <= most, -rows, 0.0), axis=1)
