"""How many drafts a round verifies, by the chances of those at hand and what it proposes with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surefoot.speculation.decisions import NOTHING, Action, Situation
from surefoot.speculation.goodput import best_drafts, gains_of, nearest_count
from surefoot.speculation.paces import Owed
from surefoot.speculation.weighing import Weighing

_BEYOND = 1.5
"""How many times longer rounds may be than they would be, to learn about more drafts."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a round verifies."""

    drafts: int
    seconds: float
    gains: np.ndarray
    """float64 [requests, or 1 where there are none]: drafts that are expected to be accepted."""


@dataclass(frozen=True, eq=False)
class Case:
    """What a decision is made from."""

    situation: Situation
    actions: tuple[Action, ...]
    """What requests allow."""
    chances: np.ndarray | None
    """float32 [requests, K]: of the drafts that are on offer; None: there are none."""
    owed: Owed
    plain: float
    """Seconds of a round without drafts, proposers and prompts."""

    def verify(self, weighing: Weighing, action: Action, beyond: int | None = None) -> Plan:
        """What to verify in a round that then proposes so. ``beyond``: more than so many drafts,
        which are believed best."""
        situation, chances, owed = self.situation, self.chances, self.owed
        offered = 0 if chances is None else int(np.count_nonzero(chances))
        nothing = np.zeros(max(1, situation.requests))
        if not offered and action == NOTHING:
            return Plan(0, owed.plain, nothing)
        drafts, seconds = weighing.table(situation, action, offered)
        if chances is None or not offered:
            return Plan(0, float(seconds[0]), nothing)
        fair = owed.prompts, owed.plain, owed.ahead
        if beyond is None:
            at, gains = best_drafts(chances, drafts, seconds, *fair, margin=weighing.margin)
            return Plan(min(int(drafts[at]), offered), float(seconds[at]), gains)
        if beyond == 0:
            at = nearest_count(chances, drafts, seconds, *fair)
        else:
            at = int(np.searchsorted(drafts, beyond))
            most = int(np.searchsorted(seconds, _BEYOND * seconds[at], side="right")) - 1
            at = min(max(most, at + 1), len(drafts) - 1)
        count = min(int(drafts[at]), offered)
        return Plan(count, float(seconds[at]), gains_of(chances, count))
