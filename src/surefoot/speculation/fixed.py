"""Every draft is verified: for measurements and tests."""

from __future__ import annotations

import numpy as np

from surefoot.speculation.accounts import Accounts
from surefoot.speculation.decisions import Decision, Landed, Situation
from surefoot.speculation.exploring import Budget


class FixedPlanner:
    """Has every proposer draft as far as it can, and every offered draft verified, as far as the
    requests' own limits go. Stands in for a ``Planner``."""

    def __init__(self, width: int, exact: bool) -> None:
        """``width``: most drafts of a request. ``exact``: what is on offer is known when a round is
        launched; else every request gets the rows that it may need."""
        self.width = width
        self.exact = exact
        self.accounts = Accounts(Budget())
        self.decided = False
        """As a ``Planner`` has it: this takes no time."""

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Nobody's pace is looked after."""

    def decide(self, situation: Situation) -> Decision:
        """What to launch now."""
        drafts = situation.requests * min(situation.draft_limit, self.width)
        offers = [situation.hosted]
        if situation.proposers and self.exact:
            offers.append(situation.chances)
        if self.exact or not situation.proposers:
            offered = (int((each > 0.0).sum()) for each in offers if each is not None)
            drafts = min(drafts, sum(offered))
        return Decision(drafts, situation.proposers, min(situation.draft_limit, self.width))

    def needs_offers(self, decision: Decision) -> bool:
        """Whether the next situation is to have what such a round left on offer."""
        return self.exact

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        """Nothing is learnt."""
