"""The tests that the distribution section uses: chi-square, false discovery rate, power."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MIN_EXPECTED = 5.0


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(X >= statistic) for a chi-square variable."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(counts: Sequence[float], chances: Sequence[float]) -> tuple[float, int]:
    """(p-value, degrees of freedom) of counts against a known distribution; classes expected
    less than five times are thrown together."""
    total = sum(counts)
    observed, expected = _pooled(counts, [chance * total for chance in chances])
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return chi_square_tail(statistic, len(observed) - 1), len(observed) - 1


def same_distribution(left: Sequence[float], right: Sequence[float]) -> tuple[float, int]:
    """(p-value, degrees of freedom) that two vectors of counts come from one distribution."""
    sizes = sum(left), sum(right)
    share = sizes[0] / sum(sizes)
    both = [a + b for a, b in zip(left, right, strict=True)]
    smaller = [count * min(share, 1 - share) for count in both]
    groups = _groups(smaller)
    statistic = 0.0
    for group in groups:
        together = sum(both[i] for i in group)
        for counts, part in ((left, share), (right, 1 - share)):
            expected = together * part
            statistic += (sum(counts[i] for i in group) - expected) ** 2 / expected
    return chi_square_tail(statistic, len(groups) - 1), len(groups) - 1


def independent(pairs: Sequence[tuple[float, float]], bins: int = 4) -> tuple[float, int]:
    """(p-value, degrees of freedom) that two uniform variables on [0, 1) are independent: all
    cells of a ``bins`` by ``bins`` grid are equally likely."""
    counts = [0] * bins * bins
    for left, right in pairs:
        counts[_bin(left, bins) * bins + _bin(right, bins)] += 1
    # Margins are known to be uniform, so the grid as a whole is.
    return goodness_of_fit(counts, [1 / bins**2] * bins**2)


def uniform(values: Sequence[float], bins: int = 8) -> tuple[float, int]:
    """(p-value, degrees of freedom) that values are uniform on [0, 1)."""
    counts = [0] * bins
    for value in values:
        counts[_bin(value, bins)] += 1
    return goodness_of_fit(counts, [1 / bins] * bins)


def _bin(value: float, bins: int) -> int:
    return min(bins - 1, int(value * bins))


def _groups(expected: Sequence[float]) -> list[list[int]]:
    """Classes by falling expectation, the rare ones thrown together; empty classes are dropped."""
    order = sorted((i for i, e in enumerate(expected) if e > 0), key=lambda i: -expected[i])
    groups: list[list[int]] = []
    mass = 0.0
    for index in order:
        if not groups or mass >= MIN_EXPECTED:
            groups.append([])
            mass = 0.0
        groups[-1].append(index)
        mass += expected[index]
    if len(groups) > 1 and mass < MIN_EXPECTED:
        last = groups.pop()
        groups[-1] += last
    return groups


def _pooled(counts: Sequence[float], expected: Sequence[float]) -> tuple[list[float], list[float]]:
    groups = _groups(expected)
    observed = [sum(counts[i] for i in group) for group in groups]
    return observed, [sum(expected[i] for i in group) for group in groups]


def benjamini_hochberg(p_values: Sequence[float], q: float) -> list[bool]:
    """Which hypotheses are rejected at false discovery rate ``q`` (Benjamini and Hochberg,
    1995)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    last = 0
    for rank, index in enumerate(order, 1):
        if p_values[index] <= q * rank / len(p_values):
            last = rank
    rejected = set(order[:last])
    return [index in rejected for index in range(len(p_values))]


def smallest_shift(samples: int, freedom: int, alpha: float, power: float = 0.9) -> float:
    """Smallest total-variation distance that a chi-square test of ``samples`` would have seen
    with chance ``power`` at level ``alpha``, for a shift spread evenly over its classes.

    The noncentral chi-square is taken as normal around its mean freedom + lambda.
    """
    if freedom < 1 or samples < 1:
        return 1.0
    critical = _quantile(alpha, freedom)
    z = 1.2816 if power == 0.9 else math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * power - 1)))
    noncentral = 0.0
    while freedom + noncentral - z * math.sqrt(2 * (freedom + 2 * noncentral)) < critical:
        noncentral += 0.25
    # Cohen's w = sqrt(lambda / n); an even shift of w moves w / 2 of the mass.
    return min(1.0, math.sqrt(noncentral / samples) / 2)


def _quantile(alpha: float, freedom: int) -> float:
    low, high = 0.0, 10.0 * freedom + 200.0
    for _ in range(80):
        middle = (low + high) / 2
        if chi_square_tail(middle, freedom) > alpha:
            low = middle
        else:
            high = middle
    return high
