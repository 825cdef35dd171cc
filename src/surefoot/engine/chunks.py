"""How many rows of prompts run in a round in which others wait for their next token."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from surefoot.speculation.decisions import NOTHING, RoundCosts

SHORT_ROUNDS = 3.0
"""Where few rows of prompts are to be run, a recorded round with some of them takes so many plain
ones, without drafts: 64 requests lose nothing by it, and the longest gaps between tokens are half
as long as where prompts run whole. Shorter ones keep prompts waiting, and texts with drafts, which
end sooner, wait for their places (docs/log.md)."""
FEW = 2
"""Few are those that would fill this part of a round."""
PATIENCE = 4
"""Rounds in which these are run at the latest, if no others come."""
LONGEST_STALL, STALLED_ROUNDS = 0.25, 4.0
"""Where there are many, a recorded round may take so many seconds, or so many plain ones, where
these take longer: requests that wait for their first token are more than those that wait for their
next one, and prompts are read fastest in long chunks."""
CALLED_STALL = 0.04
"""Seconds that a prompt chunk may add to a round that is called with just its rows: there little
is lost by short ones."""
NEARLY = 0.9
"""Where rounds are called with just their rows, the shortest chunk is taken that reads prompts at
this part of the longest one's pace, since all others wait for it: a CPU is busy with 64 rows, where
a GPU needs thousands."""
CHUNKS = tuple(16 * 2 ** (step // 4) * (4 + step % 4) // 4 for step in range(45))
"""Rows of the longest prompt chunks that are considered: 16 at least, for a prompt must end."""
KEPT = 64
"""How often limits are asked for before they are worked out anew."""
_CONTEXT = 1024.0
"""Tokens of each text that limits are worked out for."""


class ChunkLimits:
    """None: an engine that does not know what rounds take runs prompts as far as a round has
    rows."""

    rows_per_key = 0.0
    """What a token before it makes a prompt's row take longer, in rows; 0: it was not measured."""

    def longest(self, decoding: int) -> int:
        """The most rows of prompts beside so many requests that decode, at a prompt's beginning."""
        return 1 << 40

    def short(self, decoding: int, pending: int) -> int:
        """The same where ``pending`` rows of prompts are to be run in all."""
        return self.longest(decoding)


class TimedLimits(ChunkLimits):
    """By what rounds are believed to take."""

    def __init__(
        self,
        costs: Callable[[], RoundCosts],
        recorded: bool,
        most_rows: int,
        rows_per_key: float = 0.0,
    ) -> None:
        """``costs`` now. ``recorded``: whether rounds are recorded. ``most_rows`` of a round."""
        self.costs = costs
        self.recorded = recorded
        self.most_rows = most_rows
        self.rows_per_key = rows_per_key
        self._longest: dict[int, int] = {}
        self._fitting: dict[int, int] = {}
        """What was worked out of late, by requests that decode, and how often it was asked for
        since."""
        self._asked = 0

    def longest(self, decoding: int) -> int:
        """As of ``ChunkLimits``."""
        # It looks up a dozen costs, which change slowly.
        self._asked += 1
        if self._asked > KEPT:
            self._asked = 0
            self._longest.clear()
            self._fitting.clear()
        if decoding not in self._longest:
            self._longest[decoding] = self._bearable(decoding)
        return self._longest[decoding]

    def short(self, decoding: int, pending: int) -> int:
        """As of ``ChunkLimits``."""
        longest = self.longest(decoding)
        if not self._are_few(pending):
            return longest
        fitting = self._fitting.get(decoding)
        if fitting is None:
            limit = SHORT_ROUNDS * self._seconds(decoding, 0)
            fitting = self._fitting[decoding] = self._within(decoding, limit)[-1]
        return min(longest, max(fitting, -(-pending // PATIENCE)))

    def _are_few(self, pending: int) -> bool:
        """Whether nobody waits long for so many rows of prompts, though chunks are short."""
        return self.recorded and pending * FEW <= self.most_rows

    def _bearable(self, decoding: int) -> int:
        plain = self._seconds(decoding, 0)
        most = max(LONGEST_STALL, STALLED_ROUNDS * plain) if self.recorded else CALLED_STALL + plain
        fits = self._within(decoding, most)
        if self.recorded:
            return fits[-1]
        paces = {rows: rows / self._seconds(decoding, rows) for rows in fits}
        return next(rows for rows in fits if paces[rows] >= NEARLY * paces[fits[-1]])

    def _within(self, decoding: int, limit: float) -> Sequence[int]:
        """Of ``CHUNKS``, those with which a round takes ``limit`` seconds at most."""
        fits = bisect.bisect_right(CHUNKS, limit, key=lambda rows: self._seconds(decoding, rows))
        return CHUNKS[: max(1, fits)]

    def _seconds(self, decoding: int, rows: int) -> float:
        """What a round without drafts takes with so many rows of prompts."""
        return float(self.costs().table(decoding, rows, NOTHING, 0, _CONTEXT)[1][0])
