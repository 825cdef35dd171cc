"""The time of a round by its number of rows: measured at start-up, corrected by every round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# How far one observation moves the whole curve (the machine as such got slower or faster, texts
# got longer), and its own neighbourhood on top of that.
_DRIFT = 0.05
_LOCAL = 0.15
_LARGEST_STEP = 2.0


class CostModel:
    """Seconds per round at a few row counts (knots), straight lines between them.

    Predictions never fall with the number of rows: a round with more rows is not cheaper.
    """

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
        self.rows = np.array(knots, dtype=np.float64)
        self._raw = np.array(times, dtype=np.float64)
        self._all_rows = np.arange(max_rows + 1)
        self._values = self._interpolate()

    def predict(self, rows: int) -> float:
        """Seconds of a round of ``rows`` rows."""
        return float(self._values[min(rows, self.max_rows)])

    def observe(self, rows: int, seconds: float) -> None:
        """Enter a round that took ``seconds``. Single outliers move the curve little."""
        ratio = seconds / self.predict(rows)
        ratio = min(max(ratio, 1 / _LARGEST_STEP), _LARGEST_STEP)
        near = np.zeros(len(self.rows))
        right = int(np.searchsorted(self.rows, min(rows, self.max_rows)))
        if self.rows[right] == rows or right == 0:
            near[right] = 1.0
        else:
            share = (rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
            near[right - 1], near[right] = 1 - share, share
        self._raw *= ratio ** (_DRIFT + _LOCAL * near)
        self._values = self._interpolate()
        self.observations += 1

    def table(self) -> torch.Tensor:
        """float32 [max_rows + 1]: predicted seconds by rows; entry 0 repeats entry 1."""
        return torch.from_numpy(self._values).float()

    def _interpolate(self) -> np.ndarray:
        return np.interp(self._all_rows, self.rows, np.maximum.accumulate(self._raw))
