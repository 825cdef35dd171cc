"""Pairwise designs: few combinations in which every two options meet with every two of their
values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

TRIES = 12
"""Candidates of which each row is the best."""
Pair = tuple[str, int, str, int]
"""Two options' names, in order, each with the index of a value."""


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Rows, each with one value of every factor, so that any value of any factor stands beside any
    value of any other in some row. Other rows for other seeds."""
    random, names = Random(seed), sorted(factors)
    open_pairs = set(_every_pair(factors))
    rows: list[dict[str, Any]] = []
    while open_pairs:
        # Each candidate begins with a pair that is still missing, so that every row brings one.
        best: dict[str, int] = {}
        most = 0
        for _ in range(TRIES):
            candidate = _candidate(factors, names, open_pairs, random)
            met = len(_pairs_of(candidate) & open_pairs)
            if met > most:
                best, most = candidate, met
        open_pairs -= _pairs_of(best)
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


def _candidate(
    factors: Mapping[str, Sequence[Any]], names: Sequence[str], missing: set[Pair], random: Random
) -> dict[str, int]:
    left, at, right, to = random.choice(sorted(missing))
    chosen = {left: at, right: to}
    for name in random.sample(names, len(names)):
        if name in chosen:
            continue
        levels = random.sample(range(len(factors[name])), len(factors[name]))
        chosen[name] = max(
            levels,
            key=lambda level: sum(_pair(name, level, *item) in missing for item in chosen.items()),
        )
    return chosen


def _pair(name: str, level: int, other: str, beside: int) -> Pair:
    return (name, level, other, beside) if name < other else (other, beside, name, level)


def _pairs_of(row: Mapping[str, int]) -> set[Pair]:
    return {_pair(*a, *b) for a, b in itertools.combinations(row.items(), 2)}


def _every_pair(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [
        (a, i, b, j)
        for a, b in itertools.combinations(sorted(factors), 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    ]


def count_pairs(factors: Mapping[str, Sequence[Any]]) -> int:
    """How many pairs of values there are."""
    return len(_every_pair(factors))
