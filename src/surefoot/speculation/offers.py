"""What proposers have offered lately: what rounds of any size may expect of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.speculation.goodput import best_of_one
from surefoot.speculation.paces import MIN_PACE

KEPT = 512
"""Offers that are kept of a proposer."""
_LEAST, _MOST, _ROUNDS = 8, 128, 4
"""What rounds expect rests on the latest offers, so many at least and at most, of so many rounds:
those of one request change with its text."""
_USUAL = 4
"""Offers of one request that tell what it finds some rounds later. Of more, it would take longer
to see that a text repeats itself, or has ceased to; of fewer, chance would decide."""
_UNSEEN = 16
"""Offers of one request that tell, on average, what one is like at most that a better one hides. A
good one that is the latest would be taken for what there is until another is seen, long after."""
_FAIR_TRIES = 6
_NEWS = 32
"""Of one report, at most."""
_FIRST = 8
"""Made-up offers to begin with: hopeful, so that every proposer is tried."""
_FIRST_CHANCE = 0.6
_DECAY = 0.98


class Offers:
    """A proposer's latest offers: chances by request as in ``Situation``."""

    def __init__(self, width: int, stepped: bool) -> None:
        """``stepped``: whether it pays by steps, so that its offers are as long as it was told."""
        self.stepped = stepped
        self.share = 1.0
        """The part of the requests that have something on offer, lately."""
        self._width = width
        first = (_FIRST_CHANCE ** (1.0 + np.arange(width))).astype(np.float32)
        self._rows = np.tile(first, (KEPT, 1))
        self._entered = 0
        self._hits = np.full(width, _FIRST_CHANCE)
        self._trials = np.ones(width)

    @property
    def count(self) -> int:
        """Offers at hand."""
        return min(KEPT, max(_FIRST, self._entered))

    def record(self, rows: np.ndarray, steps: int) -> None:
        """Offers float32 [n, width], ``steps`` long if it pays by steps."""
        found = np.count_nonzero(rows[:, 0]) / len(rows)
        self.share += min(1.0, len(rows) / _LEAST) * (found - self.share)
        if len(rows) == 1:
            self._record_one(rows[0], steps)
            return
        if self.stepped:
            # Shorter ones were cut: their requests are about to end, or want no more.
            rows = rows[rows[:, steps - 1] > 0.0]
            if not len(rows):
                return
            self._learn(rows, steps)
            rows = self.reaching(rows, steps, self._width)
        self._rows[(self._entered + np.arange(len(rows))) % KEPT] = rows
        self._entered += len(rows)

    def _record_one(self, row: np.ndarray, steps: int) -> None:
        """``record`` of one offer, number by number. Every round of a small model waits for it, and
        a dozen operations on arrays of a few numbers would take several times as long."""
        chances: list[float] = row.tolist()
        if self.stepped:
            if chances[steps - 1] <= 0.0:
                return
            before, hits, trials = 1.0, self._hits, self._trials
            for step, chance in enumerate(chances[:steps]):
                if chance > 0.0:
                    hits[step] = hits[step] * _DECAY + chance
                    trials[step] = trials[step] * _DECAY + before
                before = chance
            further = 1.0
            for step in range(steps, self._width):
                further *= hits[step] / trials[step]
                chances[step] = before * further
        self._rows[self._entered % KEPT] = chances
        self._entered += 1

    def _learn(self, rows: np.ndarray, steps: int) -> None:
        offered = rows[:, :steps] > 0.0
        before = np.concatenate((np.ones((len(rows), 1)), rows[:, : steps - 1]), axis=1)
        fading = _DECAY ** offered.sum(axis=0)
        self._hits[:steps] = self._hits[:steps] * fading + rows[:, :steps].sum(axis=0)
        self._trials[:steps] = self._trials[:steps] * fading + (before * offered).sum(axis=0)

    def reaching(self, rows: np.ndarray, steps: int, wanted: int) -> np.ndarray:
        """``rows`` float32 [n, width] of a proposer that made ``steps`` steps as they would be had
        it made ``wanted``: cut, or continued as usual."""
        if steps == wanted or not self.stepped:
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
        rows = self._rows[(first + np.arange(_LEAST) * kept // _LEAST) % KEPT]
        self._rows[(self._entered + np.arange(_LEAST)) % KEPT] = rows
        self._entered += _LEAST

    def unseen(self, count: int) -> np.ndarray:
        """float32 [count, width]: what ``count`` offers are like that better ones hid."""
        if count > 1:
            return self.latest(count, 0)
        latest = self.latest(_UNSEEN, 0)
        return np.minimum(latest[-1:], latest.mean(axis=0, keepdims=True))

    def latest(self, count: int, steps: int) -> np.ndarray:
        """float32 [count, width]: the latest offers, again and again if there are not so many, as
        they would be ``steps`` long."""
        places = np.arange(self._entered - count, self._entered)
        kept = self.count
        rows = self._rows[places % KEPT if kept == KEPT else places % kept]
        return self.reaching(rows, self._width, steps)


class OfferMemory:
    """The latest offers of all proposers."""

    def __init__(self, width: int, drafters: frozenset[int], ahead: bool = False) -> None:
        """``drafters``: those that pay by steps. ``ahead``: rounds are decided while others are in
        flight, so that what they find on offer is not known yet."""
        self.width = width
        self.ahead = ahead
        self.drafters = drafters
        self.reports = 0
        """How many told of offers."""
        self._offers: dict[int, Offers] = {}
        self._alone: dict[int, Offers] = {}
        """Of those that do not always offer: when they were the only ones awake."""

    def of(self, proposer: int) -> Offers:
        """What is known of one."""
        known = self._offers.get(proposer)
        if known is None:
            known = self._offers[proposer] = Offers(self.width, proposer in self.drafters)
            self._alone[proposer] = Offers(self.width, False)
        return known

    def record(
        self, chances: np.ndarray, whose: np.ndarray, proposers: tuple[int, ...], steps: int
    ) -> None:
        """A report's offers, as in ``Situation``, of which drafters made theirs ``steps`` long."""
        self.reports += 1
        if len(chances) == 1:
            self._record_one(chances, int(whose[0]), proposers, steps)
            return
        known = np.flatnonzero(chances[:, 0] >= 0.0)
        if len(known) > _NEWS:
            # Every request has its turn, whatever their number is.
            turn = int(self.of(proposers[0]).count + known[0])
            known = known[(np.arange(_NEWS) * len(known) // _NEWS + turn) % len(known)]
        if not len(known):
            return
        chances, whose = chances[known], whose[known]
        for proposer in proposers:
            offers = self.of(proposer)
            rows = chances
            if len(proposers) > 1:
                own = (whose == proposer) | (chances[:, 0] == 0.0)
                if proposer in self.drafters:
                    rows = chances[own]
                elif not own.all():
                    # A better offer hides what this one has: at most as good as that.
                    usual = self._alone[proposer].unseen(len(chances))
                    rows = np.where(own[:, np.newaxis], chances, np.minimum(usual, chances))
            elif not offers.stepped:
                self._alone[proposer].record(rows, steps)
            if len(rows):
                offers.record(rows, steps)

    def _record_one(
        self, chances: np.ndarray, whose: int, proposers: tuple[int, ...], steps: int
    ) -> None:
        """``record`` of one request's offer."""
        first = float(chances[0, 0])
        if not first >= 0.0:
            return
        for proposer in proposers:
            offers, rows = self.of(proposer), chances
            if len(proposers) == 1:
                if not offers.stepped:
                    self._alone[proposer].record(rows, steps)
            elif whose != proposer and first > 0.0:
                if proposer in self.drafters:
                    continue
                rows = np.minimum(self._alone[proposer].unseen(1), chances)
            offers.record(rows, steps)

    def renew(self) -> None:
        """As of ``Offers``, of all proposers."""
        for offers in self._offers.values():
            offers.renew()

    def continued(
        self, chances: np.ndarray, whose: np.ndarray, steps: int, wanted: int
    ) -> np.ndarray:
        """Offers as of ``record`` as they would be had drafters made ``wanted`` steps."""
        for proposer in self.drafters if steps != wanted else ():
            own = whose == proposer
            if own.any():
                chances = chances.copy()
                chances[own] = self.of(proposer).reaching(chances[own], steps, wanted)
        return chances

    def latest(self, count: int, proposers: Sequence[int], steps: int) -> np.ndarray:
        """float32 [count, width]: what these offer, the better one of several, drafters ``steps``
        long."""
        rows = self.of(proposers[0]).latest(count, steps)
        for proposer in proposers[1:]:
            others = self.of(proposer).latest(count, steps)
            better = others.sum(axis=1) > rows.sum(axis=1)
            rows = np.where(better[:, np.newaxis], others, rows)
        return rows

    def usual(self, proposers: Sequence[int], steps: int) -> np.ndarray:
        """float32 [width]: chances of one request's offers, on average of the latest."""
        return self.latest(_USUAL, proposers, steps).mean(axis=0)

    def share(self, proposers: Sequence[int]) -> float:
        """The part of the requests that have something on offer of these."""
        missing = 1.0
        for proposer in proposers:
            missing *= 1.0 - self.of(proposer).share
        return 1.0 - missing

    def promise(
        self,
        requests: int,
        proposers: Sequence[int],
        steps: int,
        drafts: np.ndarray,
        seconds: np.ndarray,
        margin: float,
        lately: bool = True,
    ) -> tuple[float, float]:
        """(Tokens, seconds) of a round of so many requests, on average, if each verifies what is
        best for it. ``drafts`` and ``seconds`` as of ``RoundCosts.table``, ``margin`` as of
        ``best_drafts``. ``lately``: by the latest offers only, not by all that are kept."""
        count = max(self.of(proposer).count for proposer in proposers)
        if lately:
            count = min(count, _MOST, max(_LEAST, _ROUNDS * requests))
        together = min(requests, count)
        groups = count // together
        rows = self.latest(groups * together, proposers, steps)
        if requests == 1 and self.ahead:
            # Not each offer by itself: how many drafts have rows is decided before it is made.
            rows = rows.mean(axis=0, keepdims=True)
        if requests == 1 and len(rows) <= _LEAST:
            return _of_one(rows, drafts, seconds, margin)
        each = rows.reshape(groups, together, self.width)
        ranked = -np.sort(-rows.reshape(groups, -1), axis=1)
        share = requests / together
        gains = np.zeros((groups, ranked.shape[1] + 1))
        np.cumsum(ranked * share, axis=1, out=gains[:, 1:])
        taken = np.minimum(drafts / share, ranked.shape[1]).astype(np.int64)
        tokens = requests + gains[:, taken]
        rates = tokens / seconds
        rates[:, 0] *= margin
        best = _fairest(each, ranked, taken, rates, seconds / seconds[0])
        every = np.arange(groups)
        return float(tokens[every, best].mean()), float(seconds[best].mean())


def _of_one(
    rows: np.ndarray, drafts: np.ndarray, seconds: np.ndarray, margin: float
) -> tuple[float, float]:
    """``OfferMemory.promise`` for one request that makes the offers ``rows`` float32 [n, width], a
    few, one after the other."""
    tokens = total = 0.0
    counts, times = drafts.tolist(), seconds.tolist()
    for row in rows.tolist():
        at, gain = best_of_one(row, counts, times, 0.0, margin)
        tokens, total = tokens + 1.0 + gain, total + times[at]
    return tokens / len(rows), total / len(rows)


def _fairest(
    each: np.ndarray, ranked: np.ndarray, taken: np.ndarray, rates: np.ndarray, slower: np.ndarray
) -> np.ndarray:
    """int64 [groups]: of the ``rates`` float64 [groups, n] the best that is fair to every request,
    as ``best_drafts`` has it. ``each`` float32 [groups, requests, width] are chances and ``ranked``
    [groups, requests * width] the same, falling; ``taken`` int64 [n] of these are verified, and the
    round is ``slower`` float64 [n] times than without."""
    every = np.arange(len(each))
    best = rates.argmax(axis=1)
    for _ in range(_FAIR_TRIES if each.shape[1] > 1 else 0):
        least = ranked[every, np.maximum(taken[best] - 1, 0)]
        gained = (each * (each >= least[:, np.newaxis, np.newaxis])).sum(axis=2).min(axis=1)
        fair = (1.0 + gained) / MIN_PACE
        unfair = slower[best] > np.where(best > 0, fair, np.inf)
        if not unfair.any():
            return best
        # Whoever gains least from these drafts gains no more from fewer.
        lower = (np.arange(len(taken)) < best[:, np.newaxis]) & (slower <= fair[:, np.newaxis])
        lower[:, 0] = True
        best = np.where(unfair, np.where(lower, rates, 0.0).argmax(axis=1), best)
    if each.shape[1] > 1:
        always = np.where(slower * MIN_PACE <= 1.0, rates, 0.0).argmax(axis=1)
        best = np.where(slower[best] * MIN_PACE <= 1.0, best, always)
    return best
