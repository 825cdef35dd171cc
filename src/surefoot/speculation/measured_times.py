"""What recorded rounds took when they were timed at the start, by size and length of texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from surefoot.speculation.beliefs import in_line
from surefoot.speculation.decisions import NOTHING, Action


class RecordedSize(NamedTuple):
    """What tells the times of recorded rounds apart."""

    spans: int
    """Most requests."""
    rows: int
    """Of the forward pass, prompts included."""
    samples: int
    """Rows that sample: one for each span, and those for drafts. No draft is verified where there
    are no more than ``spans``."""
    action: Action


class MeasuredTimes:
    """Seconds of sizes, where each is in line with those that it can be compared with."""

    def __init__(
        self,
        sizes: Sequence[RecordedSize],
        times: Mapping[RecordedSize, Sequence[tuple[int, float]]],
    ) -> None:
        """``times`` as of ``RecordedCosts``, for each of ``sizes``."""
        contexts = sorted({context for curve in times.values() for context, _ in curve})
        self._contexts = np.array(contexts, dtype=np.float64)
        self.seconds = np.empty((len(sizes), len(contexts)))
        """float64 [sizes, contexts]."""
        for place, size in enumerate(sizes):
            known, measured = (np.array(each) for each in zip(*times[size], strict=True))
            for column, context in enumerate(contexts):
                self.seconds[place, column] = at_context(known, measured[np.newaxis], context)[0]
        self._lines = _lines(sizes)
        self._lines_of = defaultdict[int, set[int]](set)
        """By place, which of these it is in."""
        for line, (places, _) in enumerate(self._lines):
            for place in places.tolist():
                self._lines_of[place].add(line)
            self._put_in_line(line)
        plain = (place for place, size in enumerate(sizes) if size.action == NOTHING)
        self._plain = next(plain, 0)
        """One for plain rounds."""

    def at(self, context: float) -> np.ndarray:
        """float64 [sizes]: seconds with texts of so many tokens."""
        return at_context(self._contexts, self.seconds, context)

    def put_in_line(self, place: int) -> bool:
        """Those that this size is compared with, and plain rounds: one at least of them was
        changed, perhaps. Returns whether it was so."""
        before = self.seconds.copy()
        for line in self._lines_of[place] | self._lines_of[self._plain]:
            self._put_in_line(line)
        return not np.allclose(before, self.seconds)

    def _put_in_line(self, line: int) -> None:
        places, rows = self._lines[line]
        for column in range(self.seconds.shape[1]):
            self.seconds[places, column] = in_line(rows, self.seconds[places, column].tolist())


def _lines(sizes: Sequence[RecordedSize]) -> list[tuple[np.ndarray, list[int]]]:
    """Sizes that are compared with each other, and their rows, which rise: (places int64 [n],
    rows), n at least 3."""
    groups = defaultdict[tuple[int, Action], list[int]](list)
    for place, size in enumerate(sizes):
        groups[size.spans, size.action].append(place)
    # One size alone, as rounds without proposers come in: beside those of other spans.
    plain = [places[0] for (_, action), places in groups.items() if action == NOTHING]
    found = []
    for group in (*groups.values(), plain):
        places = sorted(group, key=lambda place: sizes[place].rows)
        rows = [sizes[place].rows for place in places]
        if len(set(rows)) == len(rows) > 2:
            found.append((np.array(places), rows))
    return found


def at_context(contexts: np.ndarray, seconds: np.ndarray, context: float) -> np.ndarray:
    """float64 [n]: seconds at ``context`` by those at ``contexts`` [m], rising: ``seconds`` [n, m];
    on the line through the neighbours. Beyond the ends the line of the nearest two goes on if it
    rises; if it falls, which is noise, the end's value holds. Towards 0 a time falls no faster than
    its context, so that it stays above 0."""
    if len(contexts) == 1:
        return seconds[:, 0].astype(np.float64)
    at = min(max(int(np.searchsorted(contexts, context)), 1), len(contexts) - 1)
    left, right = float(contexts[at - 1]), float(contexts[at])
    low, high = seconds[:, at - 1], seconds[:, at]
    slope = (high - low) / (right - left)
    if context < left:
        return np.maximum(low - np.maximum(slope, 0.0) * (left - context), low * context / left)
    if context > right:
        return high + np.maximum(slope, 0.0) * (context - right)
    return low + slope * (context - left)
