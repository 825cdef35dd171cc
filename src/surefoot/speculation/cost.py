"""The time of a round by its number of rows: measured at start-up, corrected by every round."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

# How far one observation moves the whole curve (the machine as such got slower or faster, texts
# got longer), and its own neighbourhood on top of that.
_DRIFT = 0.05
_LOCAL = 0.15
_LARGEST_STEP = 2.0
# A busy machine's slow rounds say nothing about what a further row costs: one that fell on a few
# row counts only must not make their neighbours look free.
_LARGEST_LOCAL_STEP = 1.1


class CostModel:
    """Seconds per round at a few row counts (knots), straight lines between them.

    Predictions never fall with the number of rows: a round with more rows is not cheaper.
    """

    # Plain lists: every round observes, and a handful of numbers is quicker without arrays.

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], max_rows: int) -> None:
        if list(rows) != sorted(set(rows)) or rows[0] != 1 or len(rows) != len(seconds):
            raise ValueError("rows must rise from 1, one time each")
        self.max_rows = max_rows
        self.observations = 0
        knots, times = list(rows), list(seconds)
        if knots[-1] < max_rows:
            slope = 0.0 if len(knots) < 2 else (times[-1] - times[-2]) / (knots[-1] - knots[-2])
            times.append(times[-1] + max(slope, 0.0) * (max_rows - knots[-1]))
            knots.append(max_rows)
        self.rows = knots
        self._raw = times

    def predict(self, rows: int) -> float:
        """Seconds of a round of ``rows`` rows."""
        right, share = self._place(rows)
        curve = list(accumulate(self._raw, max))
        return curve[right] if share == 1 else curve[right - 1] * (1 - share) + curve[right] * share

    def rows_within(self, seconds: float) -> int:
        """The most rows whose round is predicted to take no longer; at least 1."""
        curve = list(accumulate(self._raw, max))
        right = bisect_right(curve, seconds)
        if right == len(curve):
            return self.max_rows
        if right == 0:
            return 1
        left, share = right - 1, (seconds - curve[right - 1]) / (curve[right] - curve[right - 1])
        return int(self.rows[left] + share * (self.rows[right] - self.rows[left]))

    def observe(self, rows: int, seconds: float) -> None:
        """Enter a round that took ``seconds``. Single outliers move the curve little."""
        ratio = seconds / self.predict(rows)
        ratio = min(max(ratio, 1 / _LARGEST_STEP), _LARGEST_STEP)
        right, share = self._place(rows)
        drift = ratio**_DRIFT
        self._raw = [value * drift for value in self._raw]
        ratio = min(max(ratio, 1 / _LARGEST_LOCAL_STEP), _LARGEST_LOCAL_STEP)
        self._raw[right] *= ratio ** (_LOCAL * share)
        if share < 1:
            self._raw[right - 1] *= ratio ** (_LOCAL * (1 - share))
        self.observations += 1

    def _place(self, rows: int) -> tuple[int, float]:
        """The knot at or after ``rows``, and its share of what happens there; the knot before has
        the rest."""
        rows = max(min(rows, self.max_rows), 1)
        right = bisect_left(self.rows, rows)
        if self.rows[right] == rows:
            return right, 1.0
        left = self.rows[right - 1]
        return right, (rows - left) / (self.rows[right] - left)

    def table(self, first: int, more: int) -> torch.Tensor:
        """float32 [up to more + 1]: predicted seconds of ``first`` rows, and of up to ``more``
        rows further, as far as the model reaches."""
        wanted = np.arange(first, min(first + more, self.max_rows) + 1)
        values = np.interp(wanted, self.rows, list(accumulate(self._raw, max)))
        return torch.from_numpy(values).float()
