"""What the time of a recorded round is believed to depend on, and how firmly, at first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.speculation.beliefs import Beliefs
from surefoot.speculation.measured_times import RecordedSize

OCTAVES = 15
"""Of rows, 1 to 16,384."""
_SCALE, _SHAPE, _ACTION = 1.0, 0.05, 0.3
"""How far from the first measurements logarithms of times may be, as standard deviations: all of
them together, some numbers of rows against others, and rounds with proposers against others."""
_RANGE = 2.0
_DRIFTS = 3e-4, 1e-7, 1e-7
"""Variances by which these may change from round to round. A chip's clock changes within tens of
rounds, for all sizes together. Put down to a few, that would spoil beliefs about the others."""
_FIRST_NOISE, _LEAST_NOISE = 0.02, 0.01


def features_of(sizes: Sequence[RecordedSize]) -> np.ndarray:
    """float64 [sizes, 1 + octaves + 2]: which beliefs a size's time is the sum of."""
    features = np.zeros((len(sizes), 1 + OCTAVES + 2))
    features[:, 0] = 1.0
    for place, size in enumerate(sizes):
        octave = min(np.log2(size.rows), OCTAVES - 1.0)
        low = min(int(octave), OCTAVES - 2)
        features[place, 1 + low] = 1.0 - (octave - low)
        features[place, 2 + low] = octave - low
        features[place, 1 + OCTAVES] = bool(size.action[0])
        features[place, 2 + OCTAVES] = size.action[1] > 0
    return features


def first_beliefs() -> Beliefs:
    """Of these features, before any round has run."""
    count = 1 + OCTAVES + 2
    covariance = np.zeros((count, count))
    apart = np.abs(np.subtract.outer(np.arange(OCTAVES), np.arange(OCTAVES))) / _RANGE
    covariance[0, 0] = _SCALE**2
    covariance[1 : 1 + OCTAVES, 1 : 1 + OCTAVES] = _SHAPE**2 * np.exp(-0.5 * apart**2)
    covariance[1 + OCTAVES :, 1 + OCTAVES :] = _ACTION**2 * np.eye(2)
    drift = np.repeat(_DRIFTS, (1, OCTAVES, 2))
    return Beliefs(np.zeros(count), covariance, drift, _FIRST_NOISE, least_noise=_LEAST_NOISE)
