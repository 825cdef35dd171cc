"""What a round costs the host: reading its report, and preparing the next launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from surefoot.speculation.beliefs import SURPRISING, Beliefs

HICCUP = 0.001
"""Seconds that the host takes longer for some rounds than for most. Where it has less to spare, one
more is in flight."""
_GUESS = [2e-4, 1e-4, 1e-6, 4e-6, 2e-5, 3e-4, 5e-5]
"""Seconds for a round, for one in which anybody proposes, a request, one that drafts, one that
ends, for that the next round computes prompts at all, and for each of them; without any
measurement."""
_UNCERTAIN = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 4.0]
"""Standard deviation of each part, in guesses. What prompts take depends on their length, and on
what else their arrival brings with it: mostly for however many, or what is seen of one or two would
make a hundred that come together a hundred times as dear."""
_FAR, _IN_A_ROW = 3.0, 24
"""So many rounds, one after the other, that took so many times as long as believed, or were as much
shorter: the machine is another one now, and all parts are changed alike."""
_DRIFT = 1e-5
_FIRST_NOISE = 0.2
_PASSES = 20
_EVERY = 5
"""Rounds from one that is learnt from to the next, where they tell little: prime, so that rounds
which alternate all have their turn."""
_ENDS_WEIGHT = 0.005
"""Of a round, in what is usual: texts that began together end together, and hundreds of rounds pass
until the next ones do."""


@dataclass(frozen=True)
class HostSample:
    """What the host did between two reports, and what it was for."""

    requests: int
    drafting: int
    """Requests with drafts verified, or some on offer."""
    ends: int
    seconds: float
    proposing: bool
    """Whether somebody was to propose: the planner then has more to weigh, found or not."""
    prompts: int = 0
    """Of which the launched round computes some."""


class HostCosts:
    """Seconds = h0 + h1 * (anybody proposes) + h2 * requests + h3 * drafting requests + h4 * ends +
    h5 * (any prompts) + h6 * prompts, all above 0. Proposing costs more than each one's drafts:
    without a part of its own, what rounds of one request tell of it would count 64 times with 64.

    What is learnt is how many times its guess each part is: a round's time is a sum of these. (Of
    their logarithms it is none: where rounds without proposers turned out to take a quarter, those
    with some would have been believed to take a hundred times as long, so that the sum stayed.)
    """

    def __init__(self, samples: Sequence[HostSample] = ()) -> None:
        """``samples`` of different sizes tell the parts apart."""
        self._guess = _GUESS
        if samples:
            off = median(sample.seconds / _sum(_GUESS, _counts(sample)) for sample in samples)
            self._guess = [guess * off for guess in _GUESS]
        self._start()
        for _ in range(_PASSES if samples else 0):
            for sample in samples:
                self._learn(sample)
        self._guess = self._coefficients
        self._start()
        self._ends, self._requests = 0.0, 1.0
        """Of a round, usually."""
        self._rounds = 0
        self._before, self._offs = self._coefficients, list[float]()
        """Of late rounds in a row that were far off on the same side: the parts before them, and
        how many times as long as by these each took."""
        self._known = False
        """Whether the last round that was learnt from told little."""

    def _start(self) -> None:
        self._coefficients = self._guess
        count = len(self._guess)
        covariance, drift = np.diag(np.square(_UNCERTAIN)), np.full(count, _DRIFT)
        mean = np.zeros(count)
        self._beliefs = Beliefs(mean, covariance, drift, _FIRST_NOISE, parts=slice(None))

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        return self._beliefs.noise

    def seconds(self, requests: int, drafting: float, proposing: bool, prompts: int = 0) -> float:
        """Of a round with as many ends as usual."""
        whole, any_proposer, request, draft, end, any_prompt, prompt = self._coefficients
        drafts = any_proposer * proposing + draft * drafting
        ends = end * self._ends / self._requests
        arrived = any_prompt + prompt * prompts if prompts else 0.0
        return whole + requests * (request + ends) + drafts + arrived

    def observe(self, sample: HostSample) -> None:
        """A round took the host so long."""
        if sample.requests < 1 or sample.seconds <= 0:
            return
        self._ends += _ENDS_WEIGHT * (sample.ends - self._ends)
        self._requests += _ENDS_WEIGHT * (sample.requests - self._requests)
        self._rounds += 1
        # A crowd of prompts is not another machine.
        if not sample.prompts and self._follow_machine(sample):
            return
        if not self._known or self._rounds % _EVERY == 0:
            self._known = self._learn(sample)

    def _follow_machine(self, sample: HostSample) -> bool:
        """Change all parts alike if all late rounds were far off; returns whether they were."""
        if not self._offs:
            self._before = self._coefficients
        off = sample.seconds / _sum(self._before, _counts(sample))
        in_a_row = self._offs and (off > 1.0) == (self._offs[0] > 1.0)
        self._offs = [*(self._offs if in_a_row else []), off] if _ratio(off) > _FAR else []
        if len(self._offs) < _IN_A_ROW:
            return False
        # What was learnt from them meanwhile changed some parts, and not others.
        nearest = min(self._offs, key=_ratio)
        self._guess = [each * nearest for each in self._before]
        self._known, self._offs = False, []
        self._start()
        return True

    def _learn(self, sample: HostSample) -> bool:
        """Returns whether such rounds were known better than one measurement tells."""
        counts, beliefs = _counts(sample), self._beliefs
        total = _sum(self._coefficients, counts)
        # Of the longer one: a pause as long as a hundred rounds is no more than one as long as ten.
        off = (sample.seconds - total) / max(sample.seconds, total)
        pairs = zip(self._guess, counts, strict=True)
        firm = beliefs.observe(np.array([guess * count for guess, count in pairs]) / total, off)
        changes = zip(self._guess, beliefs.mean.tolist(), strict=True)
        self._coefficients = [guess * (1.0 + change) for guess, change in changes]
        return firm and abs(off) < SURPRISING * beliefs.noise


def _ratio(off: float) -> float:
    """``off`` or its inverse, from 1 on."""
    return max(off, 1.0 / off)


def _counts(sample: HostSample) -> tuple[int, ...]:
    prompts = sample.prompts
    proposing, arrived = int(sample.proposing), int(prompts > 0)
    return 1, proposing, sample.requests, sample.drafting, sample.ends, arrived, prompts


def _sum(parts: Sequence[float], counts: Sequence[int]) -> float:
    return sum(part * count for part, count in zip(parts, counts, strict=True))
