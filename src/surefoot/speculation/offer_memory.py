"""What is remembered of all proposers' offers, and what rounds of any size may expect of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from surefoot.speculation.goodput import best_of_one
from surefoot.speculation.offers import LEAST, Offers
from surefoot.speculation.paces import MIN_PACE
from surefoot.speculation.tree_offers import TreeOffers

_MOST, _ROUNDS = 128, 4
"""What rounds expect rests on the latest offers, so many at most (and ``LEAST``), of so many
rounds: those of one request change with its text."""
_USUAL = 4
"""Offers of one request that tell what it finds some rounds later. Of more, it would take longer
to see that a text repeats itself, or has ceased to; of fewer, chance would decide."""
_FEW, _NEWS, _NEWS_OF_TREES = 8, 32, 8
"""Offers of one report that are all remembered; those that are at most, and of trees: what these
would hold on more or fewer levels takes the host long, of 32 as long as all else of a decision."""
_APART, _TREES_APART = 2, 4
"""Of more requests, one report of so many is remembered: the next one would tell little else. Where
only trials have anybody propose, all that is expected of trees rests on the last one's: others are
of long ago, and eight of two rounds would tell too little."""


class OfferMemory:
    """The latest offers of all proposers."""

    def __init__(
        self,
        width: int,
        drafters: Mapping[int, int] | None = None,
        ahead: bool = False,
        trees: Mapping[int, int] | None = None,
    ) -> None:
        """``drafters``: most steps of those that pay by steps; ``trees``: most nodes of those of
        them that offer trees, whose steps are levels. ``ahead``: rounds are decided while others
        are in flight, so that what they find on offer is not known yet."""
        self.width = width
        self._longest, self._trees = dict(drafters or {}), dict(trees or {})
        self.ahead = ahead
        self.drafters = frozenset(self._longest)
        self.reports = 0
        """How many told of offers."""
        self._offers: dict[int, Offers] = {}
        self._alone: dict[int, Offers] = {}
        """Of those that do not always offer: when they were the only ones awake."""

    def of(self, proposer: int) -> Offers:
        """What is known of one."""
        known = self._offers.get(proposer)
        if known is None:
            longest = self._longest.get(proposer, 0)
            if (nodes := self._trees.get(proposer)) is not None:
                known = TreeOffers(self.width, longest, nodes)
            else:
                known = Offers(self.width, longest)
            self._offers[proposer] = known
            self._alone[proposer] = Offers(self.width)
        return known

    def record(
        self,
        chances: np.ndarray,
        whose: np.ndarray,
        proposers: tuple[int, ...],
        steps: int,
        parents: np.ndarray | None = None,
        found: bool = False,
    ) -> None:
        """A report's offers, as in ``Situation``, of which drafters made theirs ``steps`` long.
        ``found``: by a trial, while nobody usually proposes."""
        self.reports += 1
        if len(chances) == 1:
            self._record_one(chances, int(whose[0]), proposers, steps, parents)
            return
        known = np.flatnonzero(chances[:, 0] >= 0.0)
        if parents is None:
            most, apart = _NEWS, _APART
        else:
            most, apart = (_MOST, 1) if found else (_NEWS_OF_TREES, _TREES_APART)
        turn, other = divmod(self.reports, apart)
        if len(known) > _FEW and other:
            return
        if len(known) > most:
            # Every request has its turn, whatever their number is.
            known = known[(np.arange(most) * len(known) // most + turn) % len(known)]
        if not len(known):
            return
        chances, whose = chances[known], whose[known]
        parents = None if parents is None else parents[known]
        for proposer in proposers:
            offers, rows, own_parents = self.of(proposer), chances, parents
            if len(proposers) > 1:
                own = (whose == proposer) | (chances[:, 0] == 0.0)
                if proposer in self.drafters:
                    rows, own_parents = chances[own], None if parents is None else parents[own]
                elif not own.all():
                    # A better offer hides what this one has: at most as good as that.
                    usual = self._alone[proposer].unseen(len(chances))
                    rows = np.where(own[:, np.newaxis], chances, np.minimum(usual, chances))
            elif not offers.longest:
                self._alone[proposer].record(rows, steps)
            if len(rows):
                offers.record(rows, steps, own_parents)

    def _record_one(
        self,
        chances: np.ndarray,
        whose: int,
        proposers: tuple[int, ...],
        steps: int,
        parents: np.ndarray | None,
    ) -> None:
        """``record`` of one request's offer."""
        first = float(chances[0, 0])
        if not first >= 0.0:
            return
        for proposer in proposers:
            offers, rows = self.of(proposer), chances
            if len(proposers) == 1:
                if not offers.longest:
                    self._alone[proposer].record(rows, steps)
            elif whose != proposer and first > 0.0:
                if proposer in self.drafters:
                    continue
                rows = np.minimum(self._alone[proposer].unseen(1), chances)
            offers.record(rows, steps, parents)

    def renew(self) -> None:
        """As of ``Offers``, of all proposers."""
        for offers in self._offers.values():
            offers.renew()

    def continued(
        self,
        chances: np.ndarray,
        whose: np.ndarray,
        steps: int,
        wanted: int,
        parents: np.ndarray | None = None,
    ) -> np.ndarray:
        """Offers as of ``record`` as they would be had drafters made ``wanted`` steps."""
        for proposer in self.drafters if steps != wanted else ():
            own = whose == proposer
            if own.any():
                chances, own_parents = chances.copy(), None if parents is None else parents[own]
                offers = self.of(proposer)
                chances[own] = offers.reaching(chances[own], steps, wanted, own_parents)
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
        least: float = 1.0,
    ) -> tuple[float, float]:
        """(Tokens, seconds) of a round of so many requests, on average, if each verifies what is
        best for it. ``drafts`` and ``seconds`` as of ``RoundCosts.table``, ``margin`` as of
        ``best_drafts``. ``lately``: by the latest offers only, not by all that are kept. ``least``:
        the part of the mean gain that whoever usually gains least has of it; rounds are so long at
        most that this is fair to it. (One bad offer is no reason against them: there are others in
        the rounds after that.)"""
        count = max(self.of(proposer).count for proposer in proposers)
        if lately:
            count = min(count, _MOST, max(LEAST, _ROUNDS * requests))
        together = min(requests, count)
        groups = count // together
        rows = self.latest(groups * together, proposers, steps)
        if requests == 1 and self.ahead:
            # Not each offer by itself: how many drafts have rows is decided before it is made.
            rows = rows.mean(axis=0, keepdims=True)
        if requests == 1 and len(rows) <= LEAST:
            return _of_one(rows, drafts, seconds, margin)
        ranked = -np.sort(-rows.reshape(groups, -1), axis=1)
        share = requests / together
        gains = np.zeros((groups, ranked.shape[1] + 1))
        np.cumsum(ranked * share, axis=1, out=gains[:, 1:])
        taken = np.minimum(drafts / share, ranked.shape[1]).astype(np.int64)
        tokens = requests + gains[:, taken]
        rates = tokens / seconds
        rates[:, 0] *= margin
        if requests > 1:
            owed = MIN_PACE * seconds[1:] / seconds[0]
            rates[:, 1:][owed > 1.0 + least * gains[:, taken[1:]] / requests] = 0.0
        best = rates.argmax(axis=1)
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
