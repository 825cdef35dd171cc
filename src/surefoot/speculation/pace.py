"""How far drafters draft in recorded rounds, and whether at all: host side.

``Controller.split`` decides what is *verified*; by then a drafter has already spent its time. Here
the tokens a second that each depth promises, with the measured time of its rounds, drafting
included, are held against each other and against plain decoding. A drafter that cannot win sleeps
(it goes on catching up, which is cheap) and is tried again after spells that double in length: what
it can waste is a small, known share of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from surefoot.speculation.controller import MIN_PACE, split_rows
from surefoot.speculation.thrift import EXPLORE_EVERY, FIRST_SLEEP, LONGEST_SLEEP

TRIAL_ROUNDS = range(4, 13)
"""Rounds at full depth, everything verified, before a drafter is judged: the more, the fewer
requests there are, until ``TRIAL_OFFERS`` were seen."""
TRIAL_OFFERS = 48
DECIDE_EVERY = 4
LOSSES = 4
"""Decisions against drafting, one after the other, until a drafter sleeps that would pay if none
had to keep its plain pace: one request with bad luck can hold up all others for a while."""
SWITCH = 1.01
"""Another depth must promise this much more than the one that is running."""
_NEWS = 0.1
"""Weight of a report against all before it."""
_FIRST_CHANCE = 0.6
Table = Callable[[int], torch.Tensor]
"""Seconds of a round that drafts so many steps, float32 [n + 1]: with 0 .. n drafts verified."""


class Pace:
    """The depth of the drafters of an engine; all of them draft equally far."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.steps = longest
        """What is drafted now, trials and explorations apart."""
        self.sleeping = 0
        """Rounds left to sleep."""
        self.naps = 0
        self.chances = [_FIRST_CHANCE] * longest
        """Of the draft at each depth, given those before it."""
        self._next_sleep = FIRST_SLEEP
        self._rounds = 0
        self._reports = [0] * longest
        self._wake()

    def _wake(self) -> None:
        self.steps = self.longest
        self._tried_rounds = self._tried_offers = self._losses = 0
        self._judged = False

    @property
    def on_trial(self) -> bool:
        """Whether everything that is offered should be verified."""
        tried = self._tried_rounds
        enough = tried >= TRIAL_ROUNDS.start and self._tried_offers >= TRIAL_OFFERS
        return self.sleeping == 0 and tried < TRIAL_ROUNDS.stop - 1 and not enough

    def meet(self) -> None:
        """Other requests are decoding now: what was found of those before may not hold."""
        self.sleeping = min(self.sleeping, FIRST_SLEEP)
        self._judged = False

    def saw(self, chances: torch.Tensor, steps: int) -> None:
        """A report's offers: float32 [B, K], each draft's chance that it and all before it are
        accepted, of which a drafter made ``steps``."""
        offered = chances[:, :steps] > 0
        count = int(offered[:, :1].sum())
        if not count:
            return
        for depth in range(steps):
            own = chances[offered[:, depth], : depth + 1]
            if not len(own):
                break
            before = float(own[:, depth - 1].sum()) if depth else len(own)
            self._reports[depth] += 1
            weight = max(_NEWS, 1 / self._reports[depth])
            self.chances[depth] += weight * (
                float(own[:, depth].sum()) / before - self.chances[depth]
            )
        self._tried_rounds += 1
        self._tried_offers += count

    def expected(self, chances: torch.Tensor, steps: int) -> torch.Tensor:
        """float32 [B, steps]: those of a report, cut or continued to so many steps."""
        known = chances[:, :steps].clone()
        for depth in range(steps):
            before = known[:, depth - 1] if depth else torch.ones(len(known))
            guess = before * self.chances[depth]
            known[:, depth] = torch.where(known[:, depth] > 0, known[:, depth], guess)
        return known

    def next(
        self, chances: torch.Tensor | None, plain: float, table: Table, depths: Sequence[int]
    ) -> int:
        """How far the round that is launched now shall draft. ``chances`` of the last report;
        ``plain``: seconds of the round if the drafters slept; ``table`` of its other sizes, by one
        of ``depths``, which rise and end with the longest."""
        self._rounds += 1
        if self.sleeping:
            self.sleeping -= 1
            if self.sleeping:
                return 0
            self._wake()
        if self.on_trial:
            return self.longest
        if chances is not None and (not self._judged or self._rounds % DECIDE_EVERY == 0):
            self._judged = True
            self._decide(chances, plain, table, depths)
        if self.sleeping:
            return 0
        return self.longest if self._rounds % EXPLORE_EVERY == 0 else self.steps

    def _decide(
        self, chances: torch.Tensor, plain: float, table: Table, depths: Sequence[int]
    ) -> None:
        tables = {steps: table(steps).clone() for steps in depths}
        for seconds in tables.values():
            seconds[0] = plain
        rates = self._rates(chances, tables, MIN_PACE)
        self._losses = 0 if rates else self._losses + 1
        if not rates:
            if self._losses >= LOSSES or not self._rates(chances, tables, 0.0):
                self.sleeping = self._next_sleep
                self._next_sleep = min(2 * self._next_sleep, LONGEST_SLEEP)
                self.naps += 1
            return
        self._next_sleep = FIRST_SLEEP
        best = max(rates, key=lambda steps: rates[steps])
        if rates[best] > SWITCH * rates.get(self.steps, 0.0):
            self.steps = best

    def _rates(
        self, chances: torch.Tensor, tables: Mapping[int, torch.Tensor], pace: float
    ) -> dict[int, float]:
        """Tokens a second by steps, of those at which drafting pays."""
        rates = {}
        for steps, seconds in tables.items():
            known = self.expected(chances, steps)
            counts = split_rows(known, seconds, min_pace=pace)
            if counts.any():
                verified = torch.arange(steps) < counts.unsqueeze(1)
                tokens = len(known) + float((known * verified).sum())
                rates[steps] = tokens / float(seconds[int(counts.sum())])
        return rates
