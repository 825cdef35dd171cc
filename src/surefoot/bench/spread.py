"""The median of repeated measurements, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEVEL = 0.95
"""The confidence that an interval should have."""
ENOUGH = 6
"""The fewest values whose lowest and highest have it."""


@dataclass(frozen=True)
class Spread:
    """The median of ``count`` values, with a confidence interval.

    The interval lies between two of the sorted values, the k-th lowest and the k-th highest. It
    holds the median of the distribution that the values come from with the chance that at least k
    of ``count`` fair coins show heads and at least k tails, whatever that distribution is (the
    order-statistic interval of the sign test; Conover, *Practical Nonparametric Statistics*). k is
    the largest for which this ``confidence`` is at least ``LEVEL``. With fewer than ``ENOUGH``
    values no k will do; the interval then goes from the lowest to the highest, with less
    confidence: 0.75 for three values, 0 for one.
    """

    median: float
    low: float
    high: float
    confidence: float
    count: int

    @property
    def verdict(self) -> str:
        """In words, for ratios of speeds: ``faster``, ``slower``, or ``no difference`` when the
        interval, rounded to the two decimals that are printed, holds 1. With fewer than ``ENOUGH``
        values ``faster in all 3`` and the like."""
        if self.count == 1:
            return "one run"
        if round(self.low, 2) <= 1 <= round(self.high, 2):
            return "no difference"
        word = "faster" if self.low > 1 else "slower"
        return word if self.count >= ENOUGH else f"{word} in all {self.count}"

    def interval(self, form: str = ".2f") -> str:
        """``0.95–1.02``, for a table; empty for a single value."""
        return "" if self.count == 1 else f"{self.low:{form}}–{self.high:{form}}"

    def described(self) -> str:
        """What the interval is, and its numbers, for a sentence."""
        if self.count == 1:
            return f"one pair of runs; the noise shows with {ENOUGH} or more"
        if self.count < ENOUGH:
            return (
                f"{self.interval()} in {self.count} pairs of runs; "
                f"{LEVEL:.0%} confidence takes {ENOUGH}"
            )
        return f"{LEVEL:.0%} interval {self.interval()}"


def spread(values: Sequence[float]) -> Spread:
    """The median and its interval. The values must not be empty."""
    ordered, count = sorted(values), len(values)
    rank = 1
    while 2 * rank < count and _confidence(count, rank + 1) >= LEVEL:
        rank += 1
    return Spread(
        median(ordered), ordered[rank - 1], ordered[-rank], _confidence(count, rank), count
    )


def about_range(count: int) -> str:
    """What the ranges of a table of ratios, each of ``count`` turns, are."""
    if count == 1:
        return f"its range: none for a single pass; --repeats {ENOUGH} or more shows the noise"
    if count < ENOUGH:
        chance = 1 - _confidence(count, 1)
        return (
            f"its range: from the lowest to the highest of {count} turns; noise alone puts all of "
            f"them\non one side of 1 in {chance:.0%} of cases; --repeats {ENOUGH} or more gives "
            f"{LEVEL:.0%} intervals"
        )
    return f"its range: {LEVEL:.0%} interval of the median of {count} turns"


def _confidence(count: int, rank: int) -> float:
    """The chance that the median lies between the ``rank``-th lowest and highest value."""
    return max(0.0, 1 - 2 * sum(math.comb(count, i) for i in range(rank)) / 2**count)
