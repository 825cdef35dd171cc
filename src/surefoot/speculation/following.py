"""Decisions about one request's drafts while who proposes holds."""

from __future__ import annotations

import numpy as np

from surefoot.speculation.decisions import Decision, Expectation, Situation
from surefoot.speculation.goodput import best_of_one
from surefoot.speculation.weighing import Weighing


class Following:
    """Where one request's offers are known in time, the number of drafts that are verified follows
    them, and nothing else is decided anew."""

    def __init__(self) -> None:
        self._drafts, self._seconds = [0], [0.0]
        """Numbers of drafts, and the seconds of rounds that verify them."""

    def begin(
        self, weighing: Weighing, situation: Situation, decided: Decision, width: int
    ) -> bool:
        """Whether the decision that was just made may be followed so; ``width``: most drafts."""
        s = situation
        if weighing.overlap or weighing.undecided or not decided.proposers:
            return False
        if s.requests != 1 or s.prompt_rows or s.hosted is not None:
            return False
        drafts, seconds = weighing.table(s, decided.action, width)
        self._drafts, self._seconds = drafts.tolist(), seconds.tolist()
        return True

    def next(self, held: Decision, chances: np.ndarray | None, margin: float) -> Decision:
        """What was decided, with as many drafts as what is on offer now is worth; ``chances``
        float32 [1, K] of that, None: nothing; ``margin`` as of ``best_drafts``."""
        before, seconds = held.expected, self._seconds
        at, gain, offered = 0, 0.0, 0
        if chances is not None:
            offered = int(np.count_nonzero(chances))
            at, gain = best_of_one(chances[0].tolist(), self._drafts, seconds, 0.0, margin)
        took, plain = seconds[at], before.plain_seconds
        expected = Expectation(took, took, plain, 0.0, None, before.trials, 1.0 + gain)
        return Decision(min(self._drafts[at], offered), *held.action, False, expected)
