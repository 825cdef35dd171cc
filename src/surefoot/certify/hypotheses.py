"""What is tested of a cell's draws: that they follow the exact distribution, and depend on nothing
that they must not depend on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from surefoot.certify import statistics


@dataclass(frozen=True)
class Test:
    """One hypothesis, with the p-value of its chi-square test."""

    name: str
    p_value: float
    samples: int
    freedom: int


@dataclass
class Draws:
    """Of one cell, one way: uniform numbers by (seed index, choice, position), and how often each
    token came first beside its exact chance."""

    uniforms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    firsts: Counter[int] = field(default_factory=Counter)
    first_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    chances: torch.Tensor | None = None


def tests_of(name: str, draws: dict[str, Draws], positions: int) -> list[Test]:
    """The hypotheses about a cell's draws, "on" and "off", of ``positions`` positions each."""
    found: list[Test] = []

    def enter(what: str, samples: int, result: tuple[float, int]) -> None:
        if result[1] > 0:
            found.append(Test(f"{name}: {what}", result[0], samples, result[1]))

    for way, draw in draws.items():
        values = draw.uniforms
        assert draw.chances is not None
        chances = draw.chances.tolist()
        counts = [draw.firsts[token] for token in range(len(chances))]
        result = statistics.goodness_of_fit(counts, chances)
        enter(f"first tokens against the exact chances, {way}", sum(counts), result)
        for at in range(positions):
            here = [value for (_, _, position), value in values.items() if position == at]
            enter(f"token {at} follows its distribution, {way}", len(here), _uniform(here))
        everything = list(values.values())
        enter(f"all tokens follow their distribution, {way}", len(everything), _uniform(everything))
        steps = {"positions": (0, 0, 1), "seeds": (1, 0, 0), "choices": (0, 1, 0)}
        for (what, step), first in itertools.product(steps.items(), (0, 1)):
            pairs = _pairs(values, step, first)
            result = statistics.independent(pairs) if pairs else (1.0, 0)
            words = f"neighbouring {what} are independent, from {('even', 'odd')[first]} ones"
            enter(f"{words}, {way}", len(pairs), result)
    # Equal seeds give equal texts, so each side brings other seeds.
    on = Counter(t for (seed, _), t in draws["on"].first_tokens.items() if seed % 2)
    off = Counter(t for (seed, _), t in draws["off"].first_tokens.items() if not seed % 2)
    tokens = sorted({*on, *off})
    result = statistics.same_distribution([on[t] for t in tokens], [off[t] for t in tokens])
    enter("first tokens, on against off", sum(on.values()), result)
    left, right = _histogram(draws["on"].uniforms, 1), _histogram(draws["off"].uniforms, 0)
    result = statistics.same_distribution(left, right)
    enter("all tokens, on against off", int(sum(left)), result)
    return found


def _uniform(values: Sequence[float]) -> tuple[float, int]:
    return statistics.uniform(values) if values else (1.0, 0)


def _pairs(
    values: dict[tuple[int, int, int], float], step: tuple[int, int, int], first: int
) -> list[tuple[float, float]]:
    """Neighbours along ``step``, the first of each pair even (``first`` 0) or odd (1): a defect may
    tie every other pair only."""
    pairs = []
    for (seed, choice, position), value in values.items():
        # Disjoint pairs, so that the pairs are independent of each other.
        if any(
            s and key % 2 != first for key, s in zip((seed, choice, position), step, strict=True)
        ):
            continue
        other = values.get((seed + step[0], choice + step[1], position + step[2]))
        if other is not None:
            pairs.append((value, other))
    return pairs


def _histogram(
    values: dict[tuple[int, int, int], float], parity: int, bins: int = 8
) -> list[float]:
    """Of the numbers whose seed is even (0) or odd (1)."""
    counts = [0.0] * bins
    for (seed, _, _), value in values.items():
        if seed % 2 == parity:
            counts[min(bins - 1, int(value * bins))] += 1
    return counts
