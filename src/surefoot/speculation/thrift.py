"""Whether a drafter earns what drafting costs, and how far it should draft: host side.

``Controller.split`` decides what is *verified*; by then a drafter has already spent its time. So
its accepted drafts are held against that time, over a window of rounds: a draft is worth what
plain decoding would have taken for its token. A drafter that does not earn its keep sleeps (it
goes on catching up, which is cheap), and is woken for a window again after spells that double in
length: what it can waste is a small, known share of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 12
"""Rounds with drafts on offer, on which a verdict rests."""
FIRST_SLEEP, LONGEST_SLEEP = 96, 1536
"""Rounds."""
EXPLORE_EVERY = 24
"""Once in so many rounds the longest draft is made, so that its chance stays known."""
_DECAY = 0.98
_PRIOR = 2.0
_FIRST_CHANCE = 0.6


class Thrift:
    """One drafter's record. Times in seconds."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.sleeping = 0
        """Rounds left to sleep."""
        self.naps = 0
        self._next_sleep = FIRST_SLEEP
        self._hits = [0.0] * longest
        self._trials = [0.0] * longest
        self._step_seconds: float | None = None
        self._rounds_since_exploring = 0
        self._clear()

    def _clear(self) -> None:
        self._rounds, self._earned, self._spent = 0, 0.0, 0.0

    @property
    def awake(self) -> bool:
        return self.sleeping == 0

    def rest(self) -> None:
        """A round passed in which it slept."""
        self.sleeping = max(0, self.sleeping - 1)

    def drafted(self, seconds: float, steps: int) -> None:
        """It drafted ``steps`` tokens for every request, in so much time."""
        per_step = seconds / max(1, steps)
        before = self._step_seconds
        # The first times hold what happens once; single outliers are cut.
        if before is not None:
            per_step = 0.9 * before + 0.1 * min(per_step, 3 * before)
        self._step_seconds = per_step
        self._spent += seconds

    def verified(
        self, outcomes: Sequence[tuple[int, int]], token_seconds: float, extra_seconds: float
    ) -> None:
        """A round verified its drafts: (drafts, accepted) of each request. ``token_seconds``: what
        a token costs in plain decoding of this batch; ``extra_seconds``: what the round took
        longer for these drafts."""
        for drafts, accepted in outcomes:
            for depth in range(min(drafts, accepted + 1, self.longest)):
                self._trials[depth] = self._trials[depth] * _DECAY + 1
                self._hits[depth] = self._hits[depth] * _DECAY + (depth < accepted)
        self._earned += token_seconds * sum(accepted for _, accepted in outcomes)
        self._spent += extra_seconds
        self._rounds += 1
        if self._rounds < WINDOW:
            return
        if self._earned < self._spent:
            self.sleeping, self._next_sleep = (
                self._next_sleep,
                min(2 * self._next_sleep, LONGEST_SLEEP),
            )
            self.naps += 1
        else:
            self._next_sleep = FIRST_SLEEP
        self._clear()

    def chance(self, depth: int) -> float:
        """That draft ``depth`` (from 0) is accepted, given those before it."""
        before = _FIRST_CHANCE if depth == 0 else self.chance(depth - 1)
        return (self._hits[depth] + _PRIOR * before) / (self._trials[depth] + _PRIOR)

    def steps(self, plain_seconds: float, row_seconds: float) -> int:
        """How many tokens to draft: each step must promise more than it costs. ``plain_seconds``:
        a plain round of the batch; ``row_seconds``: one more row for each of its requests."""
        self._rounds_since_exploring += 1
        if self._step_seconds is None or self._rounds_since_exploring >= EXPLORE_EVERY:
            self._rounds_since_exploring = 0
            return self.longest
        reached = 1.0
        for depth in range(self.longest):
            reached *= self.chance(depth)
            if reached * plain_seconds < self._step_seconds + row_seconds:
                return max(1, depth)
        return self.longest
