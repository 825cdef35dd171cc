"""What rounds cost by the length of their texts: timed at a few lengths, straight lines between."""

from __future__ import annotations

from collections.abc import Sequence

Sizing = tuple[int, int, int | None]
"""(Spans, rows, steps) of a round."""


class TimesByContext:
    """Seconds of rounds at the contexts (tokens of every text) that they were timed at. Attention
    reads all keys, so that between two of these the time is nearly a straight line."""

    def __init__(self) -> None:
        self._curves: dict[Sizing, list[tuple[int, float]]] = {}
        """(Context, seconds), rising by context."""

    def __bool__(self) -> bool:
        return bool(self._curves)

    def clear(self) -> None:
        self._curves.clear()

    def enter(self, sizing: Sizing, context: int, seconds: float) -> None:
        """A round of texts of ``context`` tokens (at least 1) took so long."""
        curve = self._curves.setdefault(sizing, [])
        curve[:] = sorted([point for point in curve if point[0] != context] + [(context, seconds)])

    def at(self, context: float) -> dict[Sizing, float]:
        """Seconds of all rounds that were timed, for texts of ``context`` tokens (at least 1)."""
        return {sizing: interpolate(curve, context) for sizing, curve in self._curves.items()}


def interpolate(points: Sequence[tuple[int, float]], context: float) -> float:
    """Seconds at ``context`` by (context, seconds) ``points``, rising and one or more: on the line
    through the neighbours. Beyond the ends the line of the nearest two goes on if it rises; if it
    falls, which is noise, the end's value holds. Towards 0 a time falls no faster than its context,
    so that it stays above 0."""
    if len(points) == 1:
        return points[0][1]
    at = 1
    while at < len(points) - 1 and points[at][0] < context:
        at += 1
    (left, low), (right, high) = points[at - 1], points[at]
    slope = (high - low) / (right - left)
    if context < left:
        return max(low - max(slope, 0.0) * (left - context), low * context / left)
    if context > right:
        return high + max(slope, 0.0) * (context - right)
    return low + slope * (context - left)
