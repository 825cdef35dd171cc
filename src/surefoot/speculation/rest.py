"""When looking for drafts is itself a waste: host side of recorded rounds.

A lookup costs little, but not nothing: one or two percent of a small model's round. Where round
after round verifies no draft, because none is likely enough or another row costs too much, rounds
without lookups take turns with a few that look. What is learnt from offers goes on in those.
Drafters with a network have ``Pace``.
"""

from __future__ import annotations

PATIENCE = 64
"""Rounds in a row without a draft before the first rest."""
RESTED = 16
"""Rounds that do not look: as late at most is it seen that a text begins to repeat itself."""
LOOKS = 6
"""Rounds that look before the next rest: offers are two rounds old when they are weighed."""


class Rest:
    """Asked before every launch, told after it."""

    def __init__(self) -> None:
        self.left = 0
        """Rounds of this rest that are still to come."""
        self._without = 0

    def meet(self) -> None:
        """Other requests are decoding now: theirs is worth a look."""
        self.left = 0
        self._without = min(self._without, PATIENCE - LOOKS)

    @property
    def resting(self) -> bool:
        """Whether the round that is launched now does not look."""
        return self.left > 0

    def launched(self, drafts: int) -> None:
        """A round that verifies so many drafts was launched; one that rested verifies none."""
        if self.left:
            self.left -= 1
            return
        self._without = 0 if drafts else self._without + 1
        if self._without >= PATIENCE:
            self.left, self._without = RESTED, PATIENCE - LOOKS
