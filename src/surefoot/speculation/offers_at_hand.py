"""The drafts that a round finds on offer, as far as the host knows them."""

from __future__ import annotations

import numpy as np

from surefoot.speculation.decisions import NOTHING, Action, Situation
from surefoot.speculation.offer_memory import OfferMemory


class OffersAtHand:
    """Chances of the offers in the last report, completed by those that are remembered."""

    def __init__(self, memory: OfferMemory) -> None:
        self.memory = memory
        self._reported = NOTHING
        """The action of the last round that landed."""
        self._found = False
        """As of ``landed``."""
        self._unread = False
        self.own = False
        """Whether the chances found last are those of each request's own offers."""

    def landed(self, action: Action, found: bool) -> None:
        """The next situation has the report of a round with this action. ``found``: as of
        ``OfferMemory.record``."""
        self._reported, self._found, self._unread = action, found, True

    def read(self, situation: Situation) -> Action | None:
        """Remember the offers of a report that landed since this was called last. Returns the
        action that a trial of several requests has told of."""
        chances, whose = situation.chances, situation.whose
        if not self._unread or chances is None or whose is None:
            return None
        self._unread = False
        proposers, steps = self._reported
        if not proposers:
            return None
        steps = min(steps, max(1, situation.draft_limit))
        self.memory.record(chances, whose, proposers, steps, situation.parents, self._found)
        return self._reported if self._found and len(chances) > 1 else None

    def chances(self, situation: Situation, last: Action) -> np.ndarray | None:
        """float32 [requests, K]: chances of the drafts that this round finds on offer, after one
        with the action ``last``, those of the host among them; None where there are none."""
        self.own = False
        hosted, proposed = situation.hosted, self._proposed(situation, last)
        if hosted is None:
            return proposed
        if proposed is None:
            return np.nan_to_num(hosted)
        return np.where(np.isnan(hosted), proposed, hosted)

    def _proposed(self, situation: Situation, last: Action) -> np.ndarray | None:
        proposers, steps = last
        if not proposers or not situation.requests:
            return None
        if self.memory.ahead and situation.requests == 1:
            # Rounds in flight take what was reported. A crowd's offers are about as many in the
            # next round; one request's come and go.
            return self.memory.usual(proposers, steps)[np.newaxis]
        reported, reported_steps = self._reported
        if situation.chances is None or situation.whose is None or reported != proposers:
            return self.memory.latest(situation.requests, proposers, steps)
        self.own = True
        chances = situation.chances
        unknown = np.isnan(chances[:, 0])
        chances = self.memory.continued(
            chances, situation.whose, reported_steps, steps, situation.parents
        )
        if unknown.any():
            chances = chances.copy()
            chances[unknown] = self.memory.latest(int(unknown.sum()), proposers, steps)
        return chances
