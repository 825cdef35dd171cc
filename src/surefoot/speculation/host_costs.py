"""What a round costs the host: reading its report, and preparing the next launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from surefoot.speculation.beliefs import LEAST_PART, SURPRISING, Beliefs, Familiar

HICCUP = 0.001
"""Seconds that the host takes longer for some rounds than for most. Where it has less to spare, one
more is in flight."""
_GUESS = [2e-4, 1e-4, 1e-6, 2e-6, 2e-5, 3e-4, 5e-5, 5e-4]
"""Seconds for a round, for one in which anybody proposes, a request, one that drafts, one that
ends, for that the next round computes prompts at all, for each of them, and for a decision that
somebody proposes which is made anew; without any measurement."""
_ANY_PROPOSER, _DRAFT, _DECIDING = 1, 3, 7
"""Which of these are for proposing."""
_UNCERTAIN = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 4.0, 2.0]
"""Standard deviation of each part, in guesses. What prompts take depends on their length, and on
what else their arrival brings with it: mostly for however many, or what is seen of one or two would
make a hundred that come together a hundred times as dear."""
_FAR, _IN_A_ROW = 3.0, 24
"""So many rounds, one after the other, that took so many times as long as believed, or were as much
shorter: the machine is another one now, and all parts are changed alike."""
_SELDOM, _CHEAPER = 0.1, 2.0
"""Where this part of the late rounds or less had somebody propose, two in a row that took so many
times less than believed tell that it costs less: nothing makes a round shorter than it has to be.
Where it is more, the rounds as they come tell better: some of them decide, and some do not."""
_PROPOSING_WEIGHT = 0.03
"""Of a round, in the part of late ones in which somebody proposed."""
_DRIFTS = [3e-4, 1e-3, 3e-4, 3e-4, 1e-3, 1e-3, 1e-3, 1e-3]
"""Variances, in guesses, by which the parts may change from one round to the next. What a part is
seen to be depends on what else rounds do, more than on the machine: whoever believes it firmly is
wrong for thousands of rounds."""
_FIRST_NOISE = 0.2
_PASSES = 20
_ENDS_WEIGHT = 0.005
"""Of a round, in what is usual: texts that began together end together, and hundreds of rounds pass
until the next ones do."""


class HostSample(NamedTuple):
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
    decided: bool = False
    """Whether it was decided anew that somebody proposes: a crowd's decisions hold for some rounds,
    and what each takes is seen in one of them."""


class HostCosts:
    """Seconds = h0 + h1 * (anybody proposes) + h2 * requests + h3 * drafting requests + h4 * ends +
    h5 * (any prompts) + h6 * prompts + h7 * (decided anew), all above 0. Proposing costs more than
    each one's drafts: without a part of its own, what rounds of one request tell of it would count
    64 times with 64. So do decisions: those that are seldom made, of trials, are all made anew, and
    without a part of its own what they take would be expected of every round with drafts.

    What is learnt is how many times its guess each part is: a round's time is a sum of these. (Of
    their logarithms it is none: where rounds without proposers turned out to take a quarter, those
    with some would have been believed to take a hundred times as long, so that the sum stayed.)
    """

    def __init__(self, samples: Sequence[HostSample] = ()) -> None:
        """``samples`` of different sizes tell the parts apart."""
        self._machine = 1.0
        """How many times as long as by ``_GUESS`` the host takes, about."""
        self._offs = list[float]()
        """Of late rounds in a row that were far off on the same side: how many times as long as
        believed before them each took."""
        self._cheaper = 0.0
        """How many times as dear as believed proposing was, in the last late round with somebody
        proposing, if that took much less than believed; else 0."""
        if samples:
            self._machine = median(
                sample.seconds / _sum(_GUESS, _counts(sample)) for sample in samples
            )
        self._begin_again([guess * self._machine for guess in _GUESS])
        for _ in range(_PASSES if samples else 0):
            for sample in samples:
                self._learn(sample)
        self._begin_again(self._coefficients)
        self._before = self._coefficients
        """The parts before the first of ``_offs``."""
        self._ends, self._requests = 0.0, 1.0
        """Of a round, usually."""
        self._familiar = Familiar()
        self._proposing = 0.0
        """The part of late rounds in which somebody proposed."""

    def _begin_again(self, parts: list[float]) -> None:
        """Believe in these, and in none firmly: of one that is next to nothing, too, it is as
        uncertain as without any measurement what it takes."""
        self._coefficients, self._offs, self._cheaper = parts, [], 0.0
        pairs = zip(parts, _GUESS, strict=True)
        self._guess = [max(part, self._machine * guess) for part, guess in pairs]
        mean = np.array(parts) / self._guess - 1.0
        covariance, drifts = np.diag(np.square(_UNCERTAIN)), np.array(_DRIFTS)
        self._beliefs = Beliefs(mean, covariance, drifts, _FIRST_NOISE, parts=slice(None))

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        return self._beliefs.noise

    def seconds(
        self,
        requests: int,
        drafting: float,
        proposing: bool,
        prompts: int = 0,
        decided: float = 0.0,
    ) -> float:
        """Of a round with as many ends as usual; ``decided``: of such rounds, the part whose
        decisions are made anew."""
        whole, any_proposer, request, draft, end, any_prompt, prompt, deciding = self._coefficients
        drafts = any_proposer * proposing + draft * drafting + deciding * decided
        ends = end * self._ends / self._requests
        arrived = any_prompt + prompt * prompts if prompts else 0.0
        return whole + requests * (request + ends) + drafts + arrived

    def spread(self, seconds: float, decided: float) -> float:
        """Standard deviation of rounds that take so many ``seconds`` on average, of which a part is
        ``decided`` anew."""
        deciding = self._coefficients[_DECIDING]
        return math.hypot(self.noise * seconds, deciding * math.sqrt(decided * (1.0 - decided)))

    def observe(self, sample: HostSample) -> None:
        """A round took the host so long."""
        if sample.requests < 1 or sample.seconds <= 0:
            return
        self._ends += _ENDS_WEIGHT * (sample.ends - self._ends)
        self._requests += _ENDS_WEIGHT * (sample.requests - self._requests)
        # A crowd of prompts is not another machine.
        if not sample.prompts and (self._follow_machine(sample) or self._follow_proposing(sample)):
            return
        # What is seldom tried would be learnt too late if it had to wait for its turn.
        size, told = sample.requests.bit_length(), (sample.prompts > 0, sample.ends > 0)
        kind = sample.proposing, sample.decided, *told, size
        if not self._familiar.passes(kind):
            self._familiar.learnt(kind, self._learn(sample))

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
        self._machine *= nearest
        self._begin_again([each * nearest for each in self._before])
        return True

    def _follow_proposing(self, sample: HostSample) -> bool:
        """Change what proposing takes if that is far too much; returns whether it was. While it
        seems too dear it is tried now and then only, too seldom to learn of it bit by bit."""
        self._proposing += _PROPOSING_WEIGHT * (sample.proposing - self._proposing)
        if self._proposing > _SELDOM:
            self._cheaper = 0.0
        if not sample.proposing or self._proposing > _SELDOM:
            return False
        parts = self._coefficients
        proposing = parts[_ANY_PROPOSER] + parts[_DRAFT] * sample.drafting
        proposing += parts[_DECIDING] * sample.decided
        total = _sum(parts, _counts(sample))
        before, self._cheaper = self._cheaper, 0.0
        if _CHEAPER * sample.seconds > total:
            return False
        found = 1.0 - (total - sample.seconds) / proposing
        self._cheaper = max(found, LEAST_PART)
        if not before:
            return False
        off = max(before, self._cheaper)
        parts = list(parts)
        parts[_ANY_PROPOSER] *= off
        parts[_DRAFT] *= off
        parts[_DECIDING] *= off
        self._begin_again(parts)
        return True

    def _learn(self, sample: HostSample) -> bool:
        """Returns whether such rounds were known better than one measurement tells."""
        counts, beliefs = _counts(sample), self._beliefs
        total = _sum(self._coefficients, counts)
        # The average counts where rounds wait for the host; but a pause as long as a hundred rounds
        # is no more than one as long as three.
        off = min(sample.seconds / total, _FAR) - 1.0
        pairs = zip(self._guess, counts, strict=True)
        firm = beliefs.observe(np.array([guess * count for guess, count in pairs]) / total, off)
        changes = zip(self._guess, beliefs.mean.tolist(), strict=True)
        self._coefficients = [guess * (1.0 + change) for guess, change in changes]
        return firm and abs(off) < SURPRISING * beliefs.noise


def _ratio(off: float) -> float:
    """``off`` or its inverse, from 1 on."""
    return max(off, 1.0 / off)


def _counts(sample: HostSample) -> tuple[int, ...]:
    s, arrived = sample, int(sample.prompts > 0)
    proposing, decided = int(s.proposing), int(s.decided)
    return 1, proposing, s.requests, s.drafting, s.ends, arrived, s.prompts, decided


def _sum(parts: Sequence[float], counts: Sequence[int]) -> float:
    return sum(part * count for part, count in zip(parts, counts, strict=True))
