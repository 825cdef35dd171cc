"""Numbers that are believed, and how firmly: corrected by every measurement."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

FARTHEST = 3.0
"""A measurement counts as if it lay at most so many standard deviations off: outliers move beliefs
little."""
SURPRISING = 2.0
"""Standard deviations from which on a measurement of what is known well tells something."""
DRIFTS_EVERY = 4
"""Measurements after which beliefs have become so many times less certain than after one."""
LEAST_PART = 0.02
"""Of its first guess, that a part of a sum is at least: none takes less than nothing."""
_CONTRADICTED = 2.0
_DOUBT = 4.0
_NOISE_WEIGHT = 0.02
_ROUNDING = 1e-9
_LARGEST_STEP = 0.5
_PASSED = 4
"""Measurements of a kind that are passed over after one that told little."""
_MOST_KINDS = 1024


class Beliefs:
    """Several numbers with a covariance, known by noisy sums of them (a Kalman filter).

    Measurements that lie far off on the same side, one after the other, are no outliers: the
    covariance grows with each, and so do the steps of the corrections.
    """

    def __init__(
        self,
        mean: np.ndarray,
        covariance: np.ndarray,
        drift: np.ndarray,
        noise: float,
        parts: slice = slice(0),
        least_noise: float = 0.002,
    ) -> None:
        """``mean`` and ``drift`` float64 [n], ``covariance`` float64 [n, n]. ``drift``: by how much
        each number may change from one measurement to the next, as a variance; unmeasured, it
        becomes no less certain than ``covariance`` has it. ``noise``: standard deviation of a
        measurement, at first guess; what is learnt of it is never below ``least_noise``.
        ``parts``: which of the numbers say by how many times its first guess a part of a sum is
        larger than that."""
        self.mean = np.array(mean, dtype=np.float64)
        self.covariance = np.array(covariance, dtype=np.float64)
        self._most = np.diag(covariance).copy()
        self._drift = np.asarray(drift, dtype=np.float64)
        self._places = np.arange(len(self.mean))[parts]
        self._parts = self.mean[parts]
        self._variance, self._least_variance = noise**2, least_noise**2
        self._side = 0
        self._since_drift = DRIFTS_EVERY
        """Measurements."""

    @property
    def noise(self) -> float:
        """Standard deviation of a measurement."""
        return self._variance**0.5

    @property
    def contradicted(self) -> bool:
        """Whether the last measurements lay far off, on the same side."""
        return abs(self._side) >= 2

    def observe(self, weights: np.ndarray, off: float) -> bool:
        """The sum of the numbers, each times its ``weights`` (float64 [n]), was measured ``off``
        larger than believed. Returns whether it was known better than a measurement tells."""
        # Few array operations: this runs between rounds, behind a forward that has emptied the
        # processor's caches.
        if self._since_drift >= DRIFTS_EVERY:
            self._drift_on(self._since_drift)
            self._since_drift = 0
        self._since_drift += 1
        spread = self._spread(weights, off)
        own = max(0.0, float(weights @ spread))
        firm = own < self._variance
        far = off / math.sqrt(own + self._variance)
        self._count_contradictions(far)
        if self.contradicted:
            self._doubt_more()
            spread = self._spread(weights, off)
            own = max(0.0, float(weights @ spread))
        elif firm:
            # Only where the belief is firm does a surprise tell of noise.
            self._variance *= 1 + _NOISE_WEIGHT * (min(far * far, FARTHEST**2) - 1)
            self._variance = max(self._variance, self._least_variance)
        total = own + self._variance
        most = FARTHEST * math.sqrt(total)
        gain = min(max(off, -most), most) / total
        # Sums of parts are linear in their logarithms only nearby: no large steps at once.
        largest = abs(gain) * float(np.abs(spread).max())
        part = min(1.0, _LARGEST_STEP / max(largest, 1e-30))
        self.mean += (part * gain) * spread
        self._bound_parts()
        # Symmetric to the last bit: doubt would multiply what is not.
        spread *= math.sqrt(part / total)
        self.covariance -= np.multiply.outer(spread, spread)
        return firm and not self.contradicted

    def _spread(self, weights: np.ndarray, off: float) -> np.ndarray:
        """float64 [n]: how each number varies with the sum that was measured ``off``. A part that
        is as small as it can be, and would have to be smaller, does not: the others explain it."""
        spread = self.covariance @ weights
        least = (self._parts <= LEAST_PART - 1.0) & (spread[self._places] * off < 0.0)
        if least.any():
            known = self._places[least]
            own = self.covariance[known, known]
            self.covariance[known] = 0.0
            self.covariance[:, known] = 0.0
            spread = self.covariance @ weights
            self.covariance[known, known] = own
        return spread

    def scale_parts(self, factor: float) -> None:
        """All parts are so many times what they were believed to be."""
        self._parts[:] = (1.0 + self._parts) * factor - 1.0
        self._bound_parts()

    def _bound_parts(self) -> None:
        if len(self._parts):
            np.maximum(self._parts, LEAST_PART - 1.0, out=self._parts)

    def pass_over(self) -> None:
        """There was a measurement that is not looked at."""
        self._since_drift += 1

    def _drift_on(self, measurements: int) -> None:
        """The numbers may have changed since so many."""
        doubt = self.covariance.reshape(-1)[:: len(self.mean) + 1]
        # At least so much that rounding leaves no variance below 0.
        doubt += np.where(doubt < self._most, measurements * self._drift, _ROUNDING)

    def _count_contradictions(self, far: float) -> None:
        side = 0 if abs(far) < _CONTRADICTED else (1 if far > 0 else -1)
        self._side = self._side + side if side * self._side >= 0 and side else side

    def _doubt_more(self) -> None:
        self.covariance *= _DOUBT
        doubt = np.diag(self.covariance)
        cut = np.sqrt(np.minimum(1.0, _DOUBT * self._most / np.maximum(doubt, 1e-30)))
        self.covariance *= np.multiply.outer(cut, cut)


class Familiar:
    """Measurements that are passed over: of those alike, where the last one that was learnt from
    told little, four in five."""

    def __init__(self) -> None:
        self._left: dict[Hashable, int] = {}

    def passes(self, kind: Hashable) -> bool:
        """Whether this one is, which is then counted."""
        left = self._left.get(kind, 0)
        if left:
            self._left[kind] = left - 1
        return left > 0

    def learnt(self, kind: Hashable, told_little: bool) -> None:
        """One was learnt from. If it told much, none is passed over: what was known of the others
        may have changed with it."""
        if not told_little or len(self._left) >= _MOST_KINDS:
            self._left.clear()
        if told_little:
            self._left[kind] = _PASSED


def in_line(sizes: Sequence[float], seconds: Sequence[float], most: float = 1.5) -> np.ndarray:
    """float64 [n]: ``seconds`` by rising ``sizes``; those out of line replaced by what lies between
    the others. Of two sizes the larger takes no less time, and no more time per unit of size, give
    or take ``most`` times; out of line is who disagrees with most others, one after the other."""
    size = np.log(np.asarray(sizes, dtype=np.float64))
    value = np.log(np.asarray(seconds, dtype=np.float64))
    slack, growth = np.log(most), value[np.newaxis] - value[:, np.newaxis]
    larger = size[np.newaxis] - size[:, np.newaxis]
    wrong = (larger > 0) & ((growth < -slack) | (growth > larger + slack))
    wrong |= wrong.T
    kept = np.ones(len(size), dtype=bool)
    while (disagree := (wrong & kept).sum(axis=1) * kept).any():
        kept[disagree.argmax()] = False
    return np.exp(np.where(kept, value, np.interp(size, size[kept], value[kept])))
