"""What proposers have offered lately: what rounds of any size may expect of them."""

from __future__ import annotations

import numpy as np

KEPT = 512
"""Offers that are kept of a proposer."""
LEAST = 8
"""The latest offers that tell what those of one request are like, at least."""
_UNSEEN = 16
"""Offers of one request that tell, on average, what one is like at most that a better one hides. A
good one that is the latest would be taken for what there is until another is seen, long after."""
_FIRST = 8
"""Made-up offers to begin with: hopeful, so that every proposer is tried."""
FIRST_CHANCE = 0.6
DECAY = 0.98


class Offers:
    """A proposer's latest offers: chances by request as in ``Situation``."""

    def __init__(self, width: int, longest: int = 0) -> None:
        """``longest``: most steps of one that pays by steps, so that its offers are as long as it
        was told; 0: it does not."""
        self.longest = longest
        self.share = 1.0
        """The part of the requests that have something on offer, lately."""
        self._width = width
        first = (FIRST_CHANCE ** (1.0 + np.arange(width))).astype(np.float32)
        self._rows = np.tile(first, (KEPT, 1))
        if longest:
            self._rows[:, longest:] = 0.0
        self._entered = 0
        self._hits = np.full(width, FIRST_CHANCE)
        self._trials = np.ones(width)
        self._hidden, self._hidden_as_of = self._rows[:0], -1
        """``unseen`` of one offer, and how many had been entered when it was worked out."""

    @property
    def count(self) -> int:
        """Offers at hand."""
        return min(KEPT, max(_FIRST, self._entered))

    def record(self, rows: np.ndarray, steps: int, parents: np.ndarray | None = None) -> None:
        """Offers float32 [n, width], ``steps`` long if it pays by steps. ``parents`` as in
        ``Situation``: chains need none."""
        if len(rows) == 1:
            self._record_one(rows[0].tolist(), steps)
            return
        self._note_share(rows)
        if self.longest:
            steps = min(steps, self.longest)
            # Shorter ones were cut: their requests are about to end, or want no more.
            rows = rows[rows[:, steps - 1] > 0.0]
            if not len(rows):
                return
            self._learn(rows, steps)
            rows = self.reaching(rows, steps, self.longest)
        self._rows[self._next_places(len(rows))] = rows
        self._entered += len(rows)

    def _note_share(self, rows: np.ndarray) -> None:
        found = np.count_nonzero(rows[:, 0]) / len(rows)
        self.share += min(1.0, len(rows) / LEAST) * (found - self.share)

    def _next_places(self, count: int) -> np.ndarray:
        return (self._entered + np.arange(count)) % KEPT

    def _record_one(self, chances: list[float], steps: int) -> None:
        """``record`` of one offer, number by number. Every round of a small model waits for it, and
        a dozen operations on arrays of a few numbers would take several times as long."""
        self.share += ((chances[0] != 0.0) - self.share) / LEAST
        if self.longest:
            steps = min(steps, self.longest)
            if chances[steps - 1] <= 0.0:
                return
            before, hits, trials = 1.0, self._hits.tolist(), self._trials.tolist()
            for step, chance in enumerate(chances[:steps]):
                if chance > 0.0:
                    hits[step] = hits[step] * DECAY + chance
                    trials[step] = trials[step] * DECAY + before
                before = chance
            further = 1.0
            for step in range(steps, self.longest):
                further *= hits[step] / trials[step]
                chances[step] = before * further
            self._hits[:], self._trials[:] = hits, trials
        self._rows[self._entered % KEPT] = chances
        self._entered += 1

    def _learn(self, rows: np.ndarray, steps: int) -> None:
        offered = rows[:, :steps] > 0.0
        before = np.concatenate((np.ones((len(rows), 1)), rows[:, : steps - 1]), axis=1)
        fading = DECAY ** offered.sum(axis=0)
        self._hits[:steps] = self._hits[:steps] * fading + rows[:, :steps].sum(axis=0)
        self._trials[:steps] = self._trials[:steps] * fading + (before * offered).sum(axis=0)

    def reaching(
        self, rows: np.ndarray, steps: int, wanted: int, parents: np.ndarray | None = None
    ) -> np.ndarray:
        """``rows`` float32 [n, width] of a proposer that made ``steps`` steps as they would be had
        it made ``wanted``: cut, or continued as usual. ``parents`` as of ``record``."""
        steps, wanted = min(steps, self.longest), min(wanted, self.longest)
        if steps == wanted:
            return rows
        rows = rows.copy()
        rows[:, wanted:] = 0.0
        if wanted > steps:
            further = np.cumprod(self._hits[steps:wanted] / self._trials[steps:wanted])
            rows[:, steps:wanted] = np.multiply.outer(rows[:, steps - 1], further)
        return rows

    def renew(self) -> None:
        """Another request is the only one now: of its offers nothing more is known than of those
        of all before it."""
        kept, first = self.count, max(0, self._entered - self.count)
        self._repeat((first + np.arange(LEAST) * kept // LEAST) % KEPT)
        self._entered += LEAST

    def _repeat(self, places: np.ndarray) -> None:
        """Have the offers at these places be the latest."""
        self._rows[self._next_places(len(places))] = self._rows[places]

    def unseen(self, count: int) -> np.ndarray:
        """float32 [count, width]: what ``count`` offers are like that better ones hid."""
        if count > 1:
            return self.latest(count, 0)
        if self._hidden_as_of != self._entered:
            latest = self.latest(_UNSEEN, 0)
            self._hidden = np.minimum(latest[-1:], latest.mean(axis=0, keepdims=True))
            self._hidden_as_of = self._entered
        return self._hidden

    def latest(self, count: int, steps: int) -> np.ndarray:
        """float32 [count, width]: the latest offers, again and again if there are not so many, as
        they would be ``steps`` long."""
        return self.reaching(self._rows[self._latest_places(count)], self.longest, steps)

    def _latest_places(self, count: int) -> np.ndarray:
        places = np.arange(self._entered - count, self._entered)
        return places % min(KEPT, self.count)
