"""What a round costs the host: reading its report, and preparing the next launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.speculation.beliefs import SURPRISING, Beliefs

_GUESS = [2e-4, 1e-4, 1e-6, 4e-6, 2e-5]
"""Seconds for a round, for one in which anybody proposes, a request, one that drafts, and one that
ends; without any measurement."""
_UNCERTAIN = 1.0
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


class HostCosts:
    """Seconds = h0 + h1 * (anybody proposes) + h2 * requests + h3 * drafting requests + h4 * ends,
    all above 0. Proposing costs more than each one's drafts: without a part of its own, what rounds
    of one request tell of it would count 64 times with 64.

    What is learnt is the logarithm of each part: by how much all of a round's time is off, each
    part is corrected by as much as it has of it.
    """

    def __init__(self, samples: Sequence[HostSample] = ()) -> None:
        """``samples`` of different sizes tell the parts apart."""
        self._guess = _GUESS
        self._start()
        for _ in range(_PASSES if samples else 0):
            for sample in samples:
                self._learn(sample)
        self._guess = self._coefficients
        self._start()
        self._ends, self._requests = 0.0, 1.0
        """Of a round, usually."""
        self._rounds = 0
        self._known = False
        """Whether the last round that was learnt from told little."""

    def _start(self) -> None:
        self._coefficients = self._guess
        count = len(self._guess)
        covariance, drift = np.eye(count) * _UNCERTAIN**2, np.full(count, _DRIFT)
        self._beliefs = Beliefs(np.zeros(count), covariance, drift, _FIRST_NOISE)

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        return self._beliefs.noise

    def seconds(self, requests: int, drafting: float, proposing: bool) -> float:
        """Of a round with as many ends as usual."""
        whole, any_proposer, request, draft, end = self._coefficients
        drafts = any_proposer * proposing + draft * drafting
        return whole + requests * (request + end * self._ends / self._requests) + drafts

    def observe(self, sample: HostSample) -> None:
        """A round took the host so long."""
        if sample.requests < 1 or sample.seconds <= 0:
            return
        self._ends += _ENDS_WEIGHT * (sample.ends - self._ends)
        self._requests += _ENDS_WEIGHT * (sample.requests - self._requests)
        self._rounds += 1
        if not self._known or self._rounds % _EVERY == 0:
            self._known = self._learn(sample)

    def _learn(self, sample: HostSample) -> bool:
        """Returns whether such rounds were known better than one measurement tells."""
        counts = 1, int(sample.proposing), sample.requests, sample.drafting, sample.ends
        parts = [each * count for each, count in zip(self._coefficients, counts, strict=True)]
        total = sum(parts)
        off = math.log(sample.seconds / total)
        firm = self._beliefs.observe(np.array(parts) / total, off)
        changes = self._beliefs.mean.tolist()
        self._coefficients = [
            guess * math.exp(change) for guess, change in zip(self._guess, changes, strict=True)
        ]
        return firm and abs(off) < SURPRISING * self._beliefs.noise
