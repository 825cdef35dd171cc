"""Who may be slowed: requests that were as fast as without drafts so far, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Proposers = tuple[int, ...]

MIN_PACE = 0.95
"""No request's pace falls below this share of its pace without drafts in that batch."""
_FIRST, _FIRST_PART = 6.0, 1 / 32
"""Tokens that a request may fall behind before it has got any, at most, and as a part of those that
it may get: how a text goes on is not known by its beginning, and where one that begins hesitantly
stopped the drafts of all, all would end later, and it too (docs/log.md)."""
_MOST = 32.0
"""Tokens ahead that count: who was fast for long is not slow for long."""
_LACKING = 1.0
"""Tokens that a request lacks at most: what was tried while beliefs were wrong may be believed to
have taken ten times as long as it did."""
_SHARE_CASES = 32
"""Decisions that tell what each request usually has of all gains, about: of fewer, those that
seemed to gain enough would be slowed for longer than they can bear."""


class BySlot:
    """A number for each slot."""

    def __init__(self, new: float) -> None:
        """``new``: what is there of slots that nothing was said of."""
        self._new = new
        self._values = np.full(0, new)
        self._reached: np.ndarray | None = None
        """Slots that it is known to have: to look for the largest takes as long as what is asked of
        them, and a decision asks a dozen times of the same."""

    def __getitem__(self, slots: np.ndarray) -> np.ndarray:
        """[n]: of ``slots``, int64 [n]."""
        self._reach(slots)
        return self._values[slots]

    def __setitem__(self, slots: np.ndarray, values: np.ndarray | float) -> None:
        self._reach(slots)
        self._values[slots] = values

    def fill(self, value: float) -> None:
        """Give all slots the same."""
        self._values.fill(value)

    def _reach(self, slots: np.ndarray) -> None:
        if slots is not self._reached:
            more = int(slots.max(initial=-1)) + 1 - len(self._values)
            if more > 0:
                self._values = np.append(self._values, np.full(more, self._new))
            self._reached = slots


class Shares:
    """What each request usually gains, of the mean of all in its rounds, by slot."""

    def __init__(self) -> None:
        self._shares = BySlot(1.0)
        self._cases = BySlot(1.0)
        """That tell so: first a made-up one."""

    def admit(self, slots: np.ndarray) -> None:
        """Nothing is known of those who enter ``slots``, int64 [n]."""
        self._shares[slots] = self._cases[slots] = 1.0

    def compare(self, slots: np.ndarray, gains: np.ndarray) -> None:
        """Learn from one more case what each has of all ``gains``, float64 [n]."""
        if (mean := float(gains.mean())) > 0.0:
            shares, cases = self._shares[slots], self._cases[slots] + 1.0
            self._shares[slots] = shares + (gains / mean - shares) / cases
            self._cases[slots] = np.minimum(cases, _SHARE_CASES)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: of those in ``slots``, int64 [n]."""
        return self._shares[slots]


class Paces:
    """How far each request is ahead of the pace that it is owed, by slot.

    A round without drafts and proposers gives each request one token; so it is owed ``MIN_PACE``
    tokens in the time of such a round. What it gets beyond that may be taken from it later: by
    rounds that give others more, by trials, by a drafter from which it gains little.
    """

    def __init__(self) -> None:
        self._ahead = BySlot(_FIRST)

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Requests enter ``slots``, int64 [n], that may get so many ``tokens``, int64 [n]."""
        self._ahead[slots] = np.minimum(_FIRST, _FIRST_PART * tokens)

    def ahead(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: tokens that each may fall behind now; 0: none."""
        return np.maximum(self._ahead[slots], 0.0)

    def passed(
        self, slots: np.ndarray, tokens: np.ndarray | float, rounds: float, pace: float = MIN_PACE
    ) -> None:
        """A round was launched that is expected to give the requests ``tokens`` (of each, or of
        all alike) in the time of so many rounds without drafts and proposers, in which they are
        owed ``pace`` tokens each."""
        ahead = self._ahead[slots] + tokens - pace * rounds
        self._ahead[slots] = np.clip(ahead, -_LACKING, _MOST)


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
