"""Who may be slowed: requests that were as fast as without drafts so far, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_PACE = 0.95
"""No request's pace falls below this share of its pace without drafts in that batch."""
_LEAST_LENT, _LATELY = 0.25, 1 / 512
"""Where all together gain less than others may lose by that, they may lose so much less, but this
part of it at least, from which it is learnt what it gains. And the weight of a round in that."""
_FIRST, _FIRST_PART = 6.0, 1 / 32
"""Tokens that a request may fall behind before it has got any, at most, and as a part of those that
it may get: how a text goes on is not known by its beginning, and where one that begins hesitantly
stopped the drafts of all, all would end later, and it too (docs/log.md)."""
_MOST = 32.0
"""Tokens ahead that count: who was fast for long is not slow for long."""
_SHORTEST, _LONGEST = 16, 256
"""Rounds in which nobody is slowed after somebody had nothing left, at least; and at most, where
nothing was gained by slowing them."""
_ENOUGH = 0.75
"""Tokens that they must be ahead then."""
_UNEXPECTED = 1.005
"""How many times as long rounds take as is believed of them: they were chosen by it, and so it is a
little too good."""


class Paces:
    """How far each request is ahead of the pace that it is owed, by slot.

    A round without drafts and proposers gives each request one token; so it is owed ``MIN_PACE``
    tokens in the time of such a round. What it got beyond that may be taken from it later: by
    rounds that give others more, by trials, by a drafter from which it gains little.
    """

    def __init__(self) -> None:
        self._ahead = np.full(0, _FIRST)

    def admit(self, slots: np.ndarray, tokens: np.ndarray, lent: float = 1.0) -> None:
        """Requests enter ``slots``, int64 [n], that may get so many ``tokens``, int64 [n]. They
        lend the part ``lent`` of what they may."""
        self._reach(slots)
        self._ahead[slots] = lent * np.minimum(_FIRST, _FIRST_PART * tokens)

    def ahead(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: tokens that each may fall behind now; 0: none."""
        self._reach(slots)
        return np.maximum(self._ahead[slots], 0.0)

    def passed(
        self, slots: np.ndarray, tokens: np.ndarray, rounds: float, pace: float = MIN_PACE
    ) -> None:
        """Rounds gave the requests so many ``tokens`` [n], in the time of so many ``rounds``
        without drafts and proposers, in each of which they are owed ``pace``. Who got none took no
        part in them, and is owed nothing."""
        self._reach(slots)
        ahead = self._ahead[slots]
        after = np.minimum(ahead + tokens - pace * rounds, _MOST)
        self._ahead[slots] = np.where(tokens > 0, after, ahead)

    def _reach(self, slots: np.ndarray) -> None:
        most = int(slots.max(initial=-1)) + 1
        if most > len(self._ahead):
            self._ahead = np.append(self._ahead, np.full(most - len(self._ahead), _FIRST))


@dataclass(frozen=True, eq=False)
class Owed:
    """What requests are owed in a round."""

    plain: float
    """Seconds of a round without drafts and proposers, prompts included."""
    prompts: float = 0.0
    """Seconds that prompts take of these."""
    ahead: np.ndarray | None = None
    """As of ``Paces``; None: nobody may fall behind."""
    pace: float = MIN_PACE
    """Tokens in the time of such a round."""

    def fair(self, seconds: float, gains: np.ndarray) -> bool:
        """Whether nobody lacks anything after a round of so many seconds that is expected to accept
        ``gains`` (float64 [requests]) drafts of each."""
        least = (gains if self.ahead is None else gains + self.ahead).min()
        return bool(1.0 + least >= self.pace * seconds / self.plain - 1e-9)

    @property
    def least(self) -> float:
        """Tokens that everybody may fall behind."""
        return 0.0 if self.ahead is None else float(self.ahead.min(initial=_MOST))


class Restraint:
    """Whether nobody may be slowed: for some rounds after what is best for all together would have
    left somebody with less than it is owed. Where all together gained nothing before that, the
    rounds are twice as many as the last time. And how much may be taken from somebody for others to
    gain by it: no larger a part of what the floor allows than these gains are of that."""

    def __init__(self) -> None:
        self.holds = False
        self._rounds = 0
        """Since it began, or ended, last."""
        self._gained = 0.0
        """Tokens that each got more than without drafts, since it ended."""
        self._length = _SHORTEST
        """Rounds that it takes, at least."""
        self._worth = 1.0
        """Tokens that each got more than without drafts, for each that could be lent, lately."""

    @property
    def lent(self) -> float:
        """The part of what requests may lend that they lend."""
        return min(max(self._worth, _LEAST_LENT), 1.0)

    @property
    def pace(self) -> float:
        """Tokens that are owed in a round without drafts and proposers."""
        return 1.0 - (1.0 - MIN_PACE) * self.lent

    def passed(self, rounds: int, gained: float, owed: Owed) -> None:
        """So many rounds were launched, in which requests got so many tokens more, on average, than
        in rounds without drafts and proposers of the same time."""
        self._rounds += rounds
        self._gained += gained
        weight = min(1.0, rounds * _LATELY)
        self._worth += weight * (gained / (rounds * (1.0 - self.pace)) - self._worth)
        if self.holds and self._rounds >= self._length and owed.least >= _ENOUGH:
            self.holds, self._rounds, self._gained = False, 0, 0.0

    def begin(self) -> None:
        """Somebody would have less than it is owed."""
        if self._gained <= 0.0:
            self._length = min(2 * self._length, _LONGEST)
        else:
            self._length = max(self._length // 4, _SHORTEST)
        self.holds, self._rounds = True, 0


class Fairness:
    """The floor under an engine's requests: what they are owed, and what landed rounds gave."""

    def __init__(self) -> None:
        self.paces = Paces()
        self.restraint = Restraint()
        self._slots: np.ndarray | None = None
        self._tokens = np.zeros(0)
        self._rounds = 0.0
        """What requests in these slots got, and in how many rounds' time, which is not counted yet:
        to count each round by itself takes as long as all else of a decision that holds."""
        self._gained = 0.0
        """Tokens that each got more than without drafts, on average, since it was asked last."""

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """As of ``Paces``."""
        self._count()
        self.paces.admit(slots, tokens, self.restraint.lent)

    def owed(self, slots: np.ndarray | None, plain: float, prompts: float, rounds: int) -> Owed:
        """What requests in ``slots`` (int64 [n]; None: of whom nothing is known) are owed, so many
        ``rounds`` after the last decision. ``plain``: seconds of a round without drafts and
        proposers; ``prompts``: those that prompts add to it. Ends restraint after long enough."""
        self._count()
        gained, self._gained = self._gained, 0.0
        if slots is None or len(slots) < 2:
            # Whoever is alone is slowed by nobody.
            return Owed(plain + prompts, prompts)
        pace, ahead = self.restraint.pace, self.paces.ahead(slots)
        owed = Owed(plain + prompts, prompts, ahead, pace)
        self.restraint.passed(rounds, gained, owed)
        return owed

    def bearable(self, slots: np.ndarray | None, gains: np.ndarray, rounds: float) -> int:
        """For how many rounds nobody in ``slots`` (as of ``owed``) lacks anything, if each accepts
        ``gains`` (float64 [n]) drafts of them and takes as long as so many ``rounds`` without
        drafts and proposers."""
        if slots is None or len(slots) < 2:
            return _LONGEST
        lost = self.restraint.pace * _UNEXPECTED * rounds - 1.0 - gains
        if not (lost > 0.0).any():
            return _LONGEST
        return int((self.paces.ahead(slots) / np.maximum(lost, 1.0 / _LONGEST)).min())

    def landed(self, slots: np.ndarray | None, tokens: np.ndarray | None, rounds: float) -> None:
        """A round gave the requests in ``slots`` (as of ``owed``) so many ``tokens``, [n]; 0: who
        no longer runs. It took as long as so many ``rounds`` without drafts and proposers."""
        if slots is None or tokens is None or len(slots) < 2:
            return
        if slots is not self._slots:
            self._count()
            self._slots, self._tokens = slots, np.zeros(len(slots))
        self._tokens += tokens
        self._rounds += rounds

    def _count(self) -> None:
        """Add up what landed."""
        slots, tokens, rounds = self._slots, self._tokens, _UNEXPECTED * self._rounds
        if slots is None:
            return
        self._slots, self._rounds = None, 0.0
        self._gained += float(tokens.mean()) - rounds
        self.paces.passed(slots, tokens, rounds, self.restraint.pace)
