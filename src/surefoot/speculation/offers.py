"""What proposers have offered lately: what rounds of any size may expect of them."""

from __future__ import annotations

import numpy as np

from surefoot.speculation.goodput import MIN_PACE

KEPT = 128
"""Requests' offers that are kept."""
_NEWS = 32
"""Of one report, at most."""
_FIRST = 8
"""Made-up offers to begin with: hopeful, so that every proposer is tried."""
_FIRST_CHANCE = 0.6
_DECAY = 0.98


class Offers:
    """The latest offers of some set of proposers: chances by request, float32 [at most ``KEPT``,
    width], as in ``Situation``."""

    def __init__(self, width: int, drafters: frozenset[int]) -> None:
        """``drafters``: those of the proposers that pay by steps."""
        self._drafters = np.array(sorted(drafters))
        self._steps = np.arange(width)
        self._rows = np.zeros((KEPT, width), dtype=np.float32)
        self._rows[:_FIRST] = _FIRST_CHANCE ** (1 + self._steps)
        self._stepped = np.full(KEPT, bool(drafters))
        """Whether an offer's length is what its proposer was told."""
        self._entered = self._drawn = 0
        self._hits = np.full(width, _FIRST_CHANCE)
        self._trials = np.ones(width)

    @property
    def count(self) -> int:
        """Offers at hand."""
        return min(KEPT, max(_FIRST, self._entered))

    @property
    def share(self) -> float:
        """The part of the requests that have something on offer."""
        return float(np.count_nonzero(self._rows[: self.count, 0])) / self.count

    def enter(self, chances: np.ndarray, whose: np.ndarray, steps: int) -> None:
        """A report's offers, as in ``Situation``; those of drafters went ``steps`` far."""
        known = np.flatnonzero(chances[:, 0] >= 0.0)
        if not len(known):
            return
        if len(known) > _NEWS:
            # Every request has its turn, whatever their number is.
            known = known[(np.arange(_NEWS) * len(known) // _NEWS + self._entered) % len(known)]
        rows, stepped = chances[known], np.isin(whose[known], self._drafters)
        if stepped.any():
            self._learn(rows[stepped], steps)
        places = (self._entered + np.arange(len(rows))) % KEPT
        self._rows[places] = self.reaching(rows, stepped, steps, len(self._steps))
        self._stepped[places] = stepped
        self._entered += len(rows)

    def _learn(self, rows: np.ndarray, steps: int) -> None:
        offered = rows[:, :steps] > 0.0
        before = np.concatenate((np.ones((len(rows), 1)), rows[:, : steps - 1]), axis=1)
        fading = _DECAY ** offered.sum(axis=0)
        self._hits[:steps] = self._hits[:steps] * fading + rows[:, :steps].sum(axis=0)
        self._trials[:steps] = self._trials[:steps] * fading + (before * offered).sum(axis=0)

    def reaching(
        self, rows: np.ndarray, stepped: np.ndarray, steps: int, wanted: int
    ) -> np.ndarray:
        """Offers float32 [B, K] of which drafters made theirs (``stepped`` bool [B]) ``steps`` far,
        as they would be had drafters made ``wanted`` steps: cut, or continued as usual."""
        if not stepped.any() or steps == wanted:
            return rows
        rows = rows.copy()
        if wanted < steps:
            rows[:, wanted:] *= ~stepped[:, np.newaxis]
            return rows
        further = np.cumprod(self._hits[steps:wanted] / self._trials[steps:wanted])
        last = (rows[:, steps - 1] if steps else 1.0) * stepped
        rows[:, steps:wanted] = np.maximum(rows[:, steps:wanted], np.multiply.outer(last, further))
        return rows

    def continued(
        self, chances: np.ndarray, whose: np.ndarray, steps: int, wanted: int
    ) -> np.ndarray:
        """``reaching`` for offers as of ``enter``."""
        if steps == wanted or not len(self._drafters):
            return chances
        return self.reaching(chances, np.isin(whose, self._drafters), steps, wanted)

    def draw(self, requests: int, steps: int) -> np.ndarray:
        """Offers float32 [requests, width] such as have been seen, one after the other."""
        places = (self._drawn + np.arange(requests)) % self.count
        self._drawn = (self._drawn + requests) % self.count
        stepped = self._stepped[places]
        return self.reaching(self._rows[places], stepped, len(self._steps), steps)

    def promise(
        self, requests: int, steps: int, drafts: np.ndarray, seconds: np.ndarray, margin: float
    ) -> tuple[float, float]:
        """(Tokens, seconds) of a round of so many requests, on average, if each verifies what is
        best for it. ``drafts`` and ``seconds`` as of ``RoundCosts.table``, ``margin`` as of
        ``best_count``."""
        count, width = self.count, len(self._steps)
        rows = self._rows[:count]
        rows = self.reaching(rows, self._stepped[:count], width, steps)
        together = min(requests, count)
        groups = count // together
        rows = rows[: groups * together].reshape(groups, together * width)
        ranked = -np.sort(-rows, axis=1)
        gains = np.zeros((groups, ranked.shape[1] + 1))
        share = requests / together
        np.cumsum(ranked * share, axis=1, out=gains[:, 1:])
        taken = np.minimum(drafts / share, ranked.shape[1]).astype(np.int64)
        tokens = requests + gains[:, taken]
        rates = tokens / seconds
        rates[:, 0] *= margin
        best = rates.argmax(axis=1)
        every = np.arange(groups)
        slow = seconds[best] * MIN_PACE > seconds[0]
        if requests > 1 and slow.any():
            # As ``best_count`` has it, but nothing is tried between the best and what is always
            # fair.
            least = ranked[every, np.maximum(taken[best] - 1, 0)]
            each = rows.reshape(groups, together, width)
            gained = (each * (each >= least[:, np.newaxis, np.newaxis])).sum(axis=2).min(axis=1)
            unfair = slow & (1.0 + gained < MIN_PACE * seconds[best] / seconds[0])
            fair = np.where(seconds * MIN_PACE <= seconds[0], rates, 0.0).argmax(axis=1)
            best = np.where(unfair, fair, best)
        return float(tokens[every, best].mean()), float(seconds[best].mean())
