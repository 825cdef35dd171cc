"""Who may be slowed: requests that were as fast as without drafts so far, and by how much."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

Proposers = tuple[int, ...]

MIN_PACE, _SPARING = 0.95, 0.9875
"""No request's pace falls below this share of its pace without drafts in that batch; nor below the
second while all together gain less than others may lose by the first."""
_FIRST, _FIRST_PART = 6.0, 1 / 32
"""Tokens that a request may fall behind before it has got any, at most, and as a part of those that
it may get: how a text goes on is not known by its beginning, and where one that begins hesitantly
stopped the drafts of all, all would end later, and it too (docs/log.md)."""
_MOST = 32.0
"""Tokens ahead that count: who was fast for long is not slow for long."""
_SHORTEST, _LONGEST = 16, 256
"""Rounds in which nobody is slowed after somebody had nothing left, at least; and at most, where
nothing was gained by slowing them."""
_ENOUGH, _PLENTY = 0.75, 2.0
"""Tokens that everybody must be ahead then, at least; and at most: for more than one has at first,
crowds of short texts would wait until they end."""
_SHARE_CASES = 32
"""Decisions that tell what each request usually has of all gains, about: of fewer, those that
seemed to gain enough would be slowed for longer than they can bear."""
_UNEXPECTED = 0.005
"""Tokens that are owed in addition, in each round without drafts and proposers: what is expected of
rounds is a little too good, since they were chosen by it."""


def _reaching(values: np.ndarray, slots: np.ndarray, new: float) -> np.ndarray:
    """``values`` by slot, with ``new`` ones behind for those of ``slots`` (int64 [n]) it lacks."""
    more = int(slots.max(initial=-1)) + 1 - len(values)
    return np.append(values, np.full(more, new)) if more > 0 else values


class Shares:
    """What each request usually gains, of the mean of all in its rounds, by slot."""

    def __init__(self) -> None:
        self._shares = np.ones(0)
        self._cases = np.ones(0)
        """That tell so: first a made-up one."""
        self._reached: np.ndarray | None = None
        """Slots that it is known to have: to look for the largest takes as long as what is asked of
        them, and a decision asks a dozen times of the same."""

    def admit(self, slots: np.ndarray) -> None:
        """Nothing is known of those who enter ``slots``, int64 [n]."""
        self._reach(slots)
        self._shares[slots] = self._cases[slots] = 1.0

    def compare(self, slots: np.ndarray, gains: np.ndarray) -> None:
        """Learn from one more case what each has of all ``gains``, float64 [n]."""
        self._reach(slots)
        if (mean := float(gains.mean())) > 0.0:
            shares, cases = self._shares[slots], self._cases[slots] + 1.0
            self._shares[slots] = shares + (gains / mean - shares) / cases
            self._cases[slots] = np.minimum(cases, _SHARE_CASES)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: of those in ``slots``, int64 [n]."""
        self._reach(slots)
        return self._shares[slots]

    def _reach(self, slots: np.ndarray) -> None:
        if slots is not self._reached:
            self._shares = _reaching(self._shares, slots, 1.0)
            self._cases = _reaching(self._cases, slots, 1.0)
            self._reached = slots


class Paces:
    """How far each request is ahead of the pace that it is owed, by slot.

    A round without drafts and proposers gives each request one token; so it is owed ``MIN_PACE``
    tokens in the time of such a round. What it gets beyond that may be taken from it later: by
    rounds that give others more, by trials, by a drafter from which it gains little.
    """

    def __init__(self) -> None:
        self._ahead = np.full(0, _FIRST)
        self._reached: np.ndarray | None = None
        """As of ``Shares``."""

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Requests enter ``slots``, int64 [n], that may get so many ``tokens``, int64 [n]."""
        self._reach(slots)
        self._ahead[slots] = np.minimum(_FIRST, _FIRST_PART * tokens)

    def ahead(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: tokens that each may fall behind now; 0: none."""
        self._reach(slots)
        return np.maximum(self._ahead[slots], 0.0)

    def passed(
        self, slots: np.ndarray, tokens: np.ndarray | float, rounds: float, pace: float = MIN_PACE
    ) -> None:
        """A round was launched that is expected to give the requests ``tokens`` (of each, or of
        all alike) in the time of so many rounds without drafts and proposers, in which they are
        owed ``pace`` tokens each."""
        self._reach(slots)
        self._ahead[slots] = np.minimum(self._ahead[slots] + tokens - pace * rounds, _MOST)

    def _reach(self, slots: np.ndarray) -> None:
        if slots is not self._reached:
            self._ahead = _reaching(self._ahead, slots, _FIRST)
            self._reached = slots


@dataclass(frozen=True, eq=False)
class Owed:
    """What requests are owed in a round."""

    plain: float
    """Seconds of a round without drafts and proposers, prompts included."""
    prompts: float = 0.0
    """Seconds that prompts take of these."""
    ahead: np.ndarray | None = None
    """As of ``Paces``; None: nobody may fall behind."""

    def fair(self, seconds: float, gains: np.ndarray) -> bool:
        """Whether nobody lacks anything after a round of so many seconds that is expected to accept
        ``gains`` (float64 [requests]) drafts of each."""
        least = (gains if self.ahead is None else gains + self.ahead).min()
        return bool(1.0 + least >= MIN_PACE * seconds / self.plain - 1e-9)

    @property
    def least(self) -> float:
        """Tokens that everybody may fall behind."""
        return 0.0 if self.ahead is None else float(self.ahead.min(initial=_MOST))


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
        self._restrained = np.zeros(0, dtype=bool)
        """By slot, who is there since restraint began."""
        self._proposers: Proposers = ()
        self._gain, self._rounds = 0.0, 1.0
        """Of the last decision: who proposes; drafts of a request that are expected to be accepted,
        on average; and its time in rounds without drafts and proposers."""
        self._slots: np.ndarray | None = None
        self._launched = 0
        """Rounds of that decision for the requests in these slots, which are not counted yet: to
        count every one by itself takes as long as all else that a decision which holds takes."""

    @property
    def _pace(self) -> float:
        """Tokens that are owed in the time of a round without drafts and proposers."""
        return self.restraint.pace + _UNEXPECTED

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """As of ``Paces``."""
        self._count()
        self._restrained = _reaching(self._restrained, slots, False)
        self._restrained[slots] = False
        self.paces.admit(slots, tokens)
        for shares in self._shares.values():
            shares.admit(slots)

    def owed(self, slots: np.ndarray | None, plain: float, prompts: float, rounds: int) -> Owed:
        """What requests in ``slots`` (int64 [n]; None: of whom nothing is known) are owed, so many
        ``rounds`` after the last decision. ``plain``: seconds of a round without drafts and
        proposers; ``prompts``: those that prompts add to it. Ends restraint after long enough."""
        self._count()
        if slots is None or len(slots) < 2:
            # Whoever is alone is slowed by nobody.
            return Owed(plain + prompts, prompts)
        if self.restraint.holds:
            self._restrained = _reaching(self._restrained, slots, False)
            if not self._restrained[slots].any():
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
            self._restrained = _reaching(self._restrained, slots, False)
            self._restrained[:] = False
            self._restrained[slots] = True
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
        if slots is not self._slots:
            self._count()
            self._slots = slots
        self._launched += 1

    def _count(self) -> None:
        """Add up what was launched."""
        slots, rounds = self._slots, self._launched
        if slots is None or not rounds:
            return
        self._launched = 0
        # Who had a bad offer when it was decided has others in the rounds after that.
        tokens = rounds * (1.0 + self._gain * self._shares[self._proposers].of(slots))
        self.paces.passed(slots, tokens, rounds * self._rounds, self._pace)
