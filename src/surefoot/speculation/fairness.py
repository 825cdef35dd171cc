"""When requests may be slowed for others' sake, so that nobody is slower than it may be."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from surefoot.speculation.paces import MIN_PACE, BySlot, Owed, Paces, Proposers, Shares

_SPARING = 0.9875
"""Of its pace without drafts, what a request is owed while all together gain less than others may
lose by ``MIN_PACE``."""
_SHORTEST, _LONGEST = 16, 256
"""Rounds in which nobody is slowed after somebody had nothing left, at least; and at most, where
nothing was gained by slowing them."""
_ENOUGH, _PLENTY = 0.75, 2.0
"""Tokens that everybody must be ahead then, at least; and at most: for more than one has at first,
crowds of short texts would wait until they end."""
_UNEXPECTED = 0.005
"""Tokens that are owed in addition, in each round without drafts and proposers: what is expected of
rounds is a little too good, since they were chosen by it."""
_UNCOUNTED = 4
"""Batches whose rounds are counted together, at most."""


class Restraint:
    """Whether nobody may be slowed: for some rounds after what is best for all together would have
    left somebody with less than it is owed, and until everybody can bear some rounds of it. Where
    all together gained nothing before that, the rounds are twice as many as the last time. Where
    with such rounds they gained less than others may lose, they lend a quarter of that only."""

    def __init__(self) -> None:
        self.holds = False
        self._rounds = 0
        """Since it began, or ended, last."""
        self._gained = 0.0
        """Tokens that each got more than without drafts, since it ended."""
        self._length = _SHORTEST
        """Rounds that it takes, at least."""
        self._rested = 0
        """Rounds that it took the last time."""
        self._enough = _ENOUGH
        """Tokens that everybody must be ahead for it to end."""
        self.pace = MIN_PACE
        """Tokens that are owed in a round without drafts and proposers."""

    def passed(self, rounds: int, gained: float, owed: Owed) -> None:
        """So many rounds were launched, in which requests are expected to get so many tokens more,
        on average, than in rounds without drafts and proposers of the same time."""
        self._rounds += rounds
        self._gained += gained
        if self.holds and self._rounds >= self._length and owed.least >= self._enough:
            self.end()

    def end(self) -> None:
        """Others may be slowed again."""
        self._rested, self.pace = self._rounds, MIN_PACE
        self.holds, self._rounds, self._gained = False, 0, 0.0

    def begin(self, enough: float = 0.0) -> None:
        """Somebody would have less than it is owed. ``enough``: tokens that everybody needs to be
        ahead for what is best to be worth beginning again."""
        self._enough = min(max(enough, _ENOUGH), _PLENTY)
        if self._gained <= 0.0:
            self._length = min(2 * self._length, _LONGEST)
        else:
            self._length = max(self._length // 4, _SHORTEST)
        if self._rested and MIN_PACE * (self._gained / (self._rounds + self._rested) + 1.0) < 1.0:
            self.pace = _SPARING
        self.holds, self._rounds = True, 0


class Fairness:
    """The floor under an engine's requests: what they are owed, and what decided rounds give."""

    def __init__(self) -> None:
        self.paces = Paces()
        self.restraint = Restraint()
        self._shares = defaultdict[Proposers, Shares](Shares)
        """By who proposes: one knows these texts better, and another one those."""
        self._present = BySlot(False)
        """By slot, whether its request was there when restraint began."""
        self._proposers: Proposers = ()
        self._gain, self._rounds = 0.0, 1.0
        """Of the last decision: who proposes; drafts of a request that are expected to be accepted,
        on average; and its time in rounds without drafts and proposers."""
        self._launched = dict[int, tuple[np.ndarray, int]]()
        """By identity of the slots, rounds of that decision for the requests in these, which are
        not counted yet: to count every one by itself takes as long as all else that a decision
        which holds takes. (Whoever is under a grammar takes part in every other round.)"""

    @property
    def _pace(self) -> float:
        """Tokens that are owed in the time of a round without drafts and proposers."""
        return self.restraint.pace + _UNEXPECTED

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """As of ``Paces``."""
        self._count()
        self._present[slots] = False
        self.paces.admit(slots, tokens)
        for shares in self._shares.values():
            shares.admit(slots)

    def owed(self, slots: np.ndarray | None, plain: float, prompts: float, rounds: int) -> Owed:
        """What requests in ``slots`` (int64 [n]; None: of whom nothing is known) are owed, so many
        ``rounds`` after the last decision. ``plain``: seconds of a round without drafts and
        proposers; ``prompts``: those that prompts add to it. Ends restraint after long enough, or
        when nobody is left who was there when it began."""
        self._count()
        if slots is None or len(slots) < 2:
            # Whoever is alone is slowed by nobody.
            return Owed(plain + prompts, prompts)
        if self.restraint.holds and not self._present[slots].any():
            # Nobody is to wait for the sake of requests that are gone.
            self.restraint.end()
        owed = Owed(plain + prompts, prompts, self.paces.ahead(slots))
        gained = 1.0 + self._gain - self._rounds
        self.restraint.passed(rounds, rounds * gained, owed)
        return owed

    def restrain(self, slots: np.ndarray | None, enough: float) -> None:
        """One of those in ``slots`` (as of ``owed``) would have less than it is owed. ``enough``
        as of ``Restraint``."""
        if slots is not None:
            self._present.fill(False)
            self._present[slots] = True
        self.restraint.begin(enough)

    def compare(self, slots: np.ndarray | None, proposers: Proposers, gains: np.ndarray) -> None:
        """Of as many drafts as were verified before, those in ``slots`` (as of ``owed``) would be
        expected to have ``gains``, float64 [n], accepted of what ``proposers`` offered."""
        if slots is not None and len(slots) > 1:
            self._count()
            self._shares[proposers].compare(slots, gains)

    def least(self, slots: np.ndarray | None, proposers: Proposers) -> float:
        """What the one of those in ``slots`` (as of ``owed``) who usually gains least by these
        proposers has of the mean of all gains."""
        if slots is None or len(slots) < 2:
            return 1.0
        return float(self._shares[proposers].of(slots).min())

    def decided(
        self, slots: np.ndarray | None, proposers: Proposers, gain: float, rounds: float
    ) -> int:
        """Rounds for requests in ``slots`` (as of ``owed``), in which these propose, are expected
        to accept ``gain`` drafts of each, on average, in the time of so many ``rounds`` without
        drafts and proposers. Returns for how many of these rounds nobody lacks anything."""
        self._count()
        self._proposers, self._gain, self._rounds = proposers, gain, rounds
        if slots is None or len(slots) < 2:
            return _LONGEST
        lost = self._pace * rounds - 1.0 - gain * self._shares[proposers].of(slots)
        if not (lost > 0.0).any():
            return _LONGEST
        return int((self.paces.ahead(slots) / np.maximum(lost, 1.0 / _LONGEST)).min())

    def launched(self, slots: np.ndarray | None) -> None:
        """Such a round is launched for requests in ``slots``."""
        if slots is None or len(slots) < 2:
            return
        known = self._launched.get(id(slots))
        if known is None and len(self._launched) >= _UNCOUNTED:
            self._count()
        self._launched[id(slots)] = slots, 1 if known is None else 1 + known[1]

    def _count(self) -> None:
        """Add up what was launched."""
        for slots, rounds in self._launched.values():
            # Who had a bad offer when it was decided has others in the rounds after that.
            tokens = rounds * (1.0 + self._gain * self._shares[self._proposers].of(slots))
            self.paces.passed(slots, tokens, rounds * self._rounds, self._pace)
        self._launched.clear()
