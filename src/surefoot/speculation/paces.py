"""Who may be slowed: requests that were as fast as without drafts so far, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_PACE = 0.95
"""No request's pace falls below this share of its pace without drafts in that batch."""
_FIRST = 2.0
"""Tokens that a request may fall behind before it has got any."""
_MOST = 16.0
"""Tokens ahead that count: who was fast for long is not slow for long."""
_REST, _LONGEST_REST = 16, 256
"""Rounds until those who had nothing left may be slowed again, at least, and at most, where nothing
was gained by it."""
_ENOUGH = 0.75
"""Tokens that they must be ahead then."""


class Paces:
    """How far each request is ahead of the pace that it is owed, by slot.

    A round without drafts and proposers gives each request one token; so it is owed ``MIN_PACE``
    tokens in the time of such a round. What it gets beyond that may be taken from it later: by
    rounds that give others more, by trials, by a drafter from which it gains little.
    """

    def __init__(self) -> None:
        self._ahead = np.full(0, _FIRST)

    def admit(self, slots: np.ndarray) -> None:
        """Requests enter ``slots``, int64 [n]."""
        self._reach(slots)
        self._ahead[slots] = _FIRST

    def ahead(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: tokens that each may fall behind now; 0: none."""
        self._reach(slots)
        return np.maximum(self._ahead[slots], 0.0)

    def passed(self, slots: np.ndarray, tokens: np.ndarray | float, rounds: float) -> None:
        """A round was launched that is expected to give the requests ``tokens`` (of each, or of
        all alike) in the time of so many rounds without drafts and proposers."""
        self._reach(slots)
        self._ahead[slots] = np.minimum(self._ahead[slots] + tokens - MIN_PACE * rounds, _MOST)

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

    def fair(self, seconds: float, gains: np.ndarray) -> bool:
        """Whether nobody lacks anything after a round of so many seconds that is expected to accept
        ``gains`` (float64 [requests]) drafts of each."""
        least = (gains if self.ahead is None else gains + self.ahead).min()
        return bool(1.0 + least >= MIN_PACE * seconds / self.plain - 1e-9)

    @property
    def least(self) -> float:
        """Tokens that everybody may fall behind."""
        return 0.0 if self.ahead is None else float(self.ahead.min(initial=_MOST))


class Turns:
    """Whose turn it is: of what is best for all together, or, because some would lack something, of
    what slows nobody. Where the former gained nothing, each of its turns is longer in coming than
    the one before."""

    def __init__(self) -> None:
        self.resting = False
        """Whether nobody may be slowed."""
        self._rounds = 0
        """Since the last change."""
        self._gained = 0.0
        """Tokens that each got more than without drafts, since all had their turn."""
        self._rest = _REST
        """Rounds until the next change."""

    def passed(self, rounds: int, gained: float, owed: Owed) -> None:
        """So many rounds were launched, in which requests are expected to get so many tokens more,
        on average, than in rounds without drafts and proposers of the same time."""
        self._rounds += rounds
        self._gained += gained
        if self.resting and self._rounds >= self._rest and owed.least >= _ENOUGH:
            self.resting, self._rounds, self._gained = False, 0, 0.0

    def rest(self) -> None:
        """Somebody would lack something."""
        if self._gained <= 0.0:
            self._rest = min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest = max(self._rest // 4, _REST)
        self.resting, self._rounds = True, 0


class Fairness:
    """The floor under an engine's requests: what they are owed, and what decided rounds give."""

    def __init__(self) -> None:
        self.paces = Paces()
        self.turns = Turns()
        self._gains, self._rounds = np.zeros(1), 1.0
        """Of the last decision: float64 [requests], drafts that are expected to be accepted; and
        its time in rounds without drafts and proposers."""

    def owed(self, slots: np.ndarray | None, plain: float, prompts: float, rounds: int) -> Owed:
        """What requests in ``slots`` (int64 [n]; None: of whom nothing is known) are owed, so many
        ``rounds`` after the last decision. ``plain``: seconds of a round without drafts and
        proposers; ``prompts``: those that prompts add to it. A rest that was long enough ends."""
        ahead = None if slots is None else self.paces.ahead(slots)
        owed = Owed(plain + prompts, prompts, ahead)
        gained = 1.0 + float(self._gains.mean()) - self._rounds
        self.turns.passed(rounds, rounds * gained, owed)
        return owed

    def decided(self, gains: np.ndarray, rounds: float) -> None:
        """Rounds are expected to accept ``gains`` (float64 [n]) drafts of each, in the time of so
        many ``rounds`` without drafts and proposers."""
        self._gains, self._rounds = gains, rounds

    def launched(self, slots: np.ndarray | None) -> None:
        """Such a round is launched for requests in ``slots``."""
        if slots is None or len(slots) < 2:
            return
        gains: np.ndarray | float = self._gains
        if len(self._gains) != len(slots):
            # A decision that holds, and one request more or less than it was made for.
            gains = float(self._gains.mean())
        self.paces.passed(slots, 1.0 + gains, self._rounds)
