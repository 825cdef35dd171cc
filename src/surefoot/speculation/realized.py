"""What drafts that were expected to be accepted turned out to be."""

from __future__ import annotations

_TRUSTED, _REMEMBERED, _ROUNDS = 8.0, 64.0, 4.0
"""Drafts that were expected to be accepted: so many count as if they all had been, and of so many
it is remembered how many were, or of so many rounds of a crowd."""
_LEAST, _MOST = 0.1, 1.25
_FADES = 2.0 ** (-1.0 / 1024.0)
"""Of what is remembered, in a round that verifies none: texts change, and where nothing is verified
nothing is learnt."""


class Realized:
    """How many of the drafts that were expected to be accepted were. Chances are right on average,
    but drafts are verified where they look best, by offers of a round or two ago: where these
    come and go, some are not there any more, and others were chosen because of their noise."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0

    @property
    def part(self) -> float:
        """Above 1, too: if good luck did not count, and bad luck did, all would be believed less
        than it turns out to be. Never so little that nothing is tried any more."""
        part = (_TRUSTED + self._accepted) / (_TRUSTED + self._expected)
        return min(max(part, _LEAST), _MOST)

    def landed(self, expected: float, accepted: float) -> None:
        """A round should have accepted so many drafts, by their chances."""
        most = max(_REMEMBERED, _ROUNDS * expected)
        kept = min(1.0, (most - expected) / max(self._expected, 1e-9))
        self._expected = self._expected * kept + expected
        self._accepted = self._accepted * kept + accepted

    def fade(self) -> None:
        """A round verified no drafts."""
        self._expected *= _FADES
        self._accepted *= _FADES
