"""Which recorded sizes a round may have, and how many drafts each has room for."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.measured_times import RecordedSize

_NONE = np.zeros(0, dtype=np.int64)


class Layout(NamedTuple):
    """The sizes of so many spans that do something, by their room for drafts, rising."""

    rows: np.ndarray
    """int64 [n]: rows that sample, or 0 for sizes that verify no drafts."""
    each: np.ndarray
    """int64 [n]: rows that each request takes of these for itself: 1, or 0 for such sizes."""
    places: np.ndarray
    """int64 [n]: which sizes these are."""

    def room(self, requests: int) -> np.ndarray:
        """int64 [n]: drafts of so many requests that there is room for, from 0 on."""
        return self.rows - requests * self.each


class Layouts:
    """Recorded sizes by their spans and by what they propose."""

    def __init__(self, sizes: Sequence[RecordedSize]) -> None:
        self.sizes = sizes
        self._rows = np.array([size.rows for size in sizes], dtype=np.int64)
        self._samples = np.array([size.samples for size in sizes], dtype=np.int64)
        self._ladder = sorted({size.spans for size in sizes})
        places = defaultdict[tuple[int, Action], list[int]](list)
        for place, size in enumerate(sizes):
            places[size.spans, size.action].append(place)
        self._groups = {key: np.array(value) for key, value in places.items()}
        self._offered: Collection[RecordedSize] | None = None
        self._actions = self._actions_there()
        self._layouts: dict[tuple[int, Action], Layout] = {}

    def offer(self, sizes: Collection[RecordedSize] | None) -> None:
        """As ``RecordedCosts.offer``."""
        self._offered = sizes
        self._actions = self._actions_there()
        self._layouts.clear()

    def _actions_there(self) -> dict[int, tuple[Action, ...]]:
        """By spans: the actions of which the round without drafts is on offer."""
        found: dict[int, set[Action]] = {spans: {NOTHING} for spans in self._ladder}
        for size in self.sizes:
            plain = size.samples == size.spans
            if self._offered is None or (plain and size in self._offered):
                found[size.spans].add(size.action)
        return {
            spans: tuple(sorted(actions, key=lambda action: (len(action[0]), action)))
            for spans, actions in found.items()
        }

    def actions(self, requests: int) -> Sequence[Action]:
        """As ``RoundCosts.actions``."""
        return self._actions[self.spans_for(requests)]

    def spans_for(self, requests: int) -> int:
        """The fewest spans that hold so many requests; the most there are, where none do."""
        place = bisect.bisect_left(self._ladder, max(1, requests))
        return self._ladder[min(place, len(self._ladder) - 1)]

    def of(self, requests: int, action: Action) -> Layout:
        """The sizes for so many requests; none, where no size holds them."""
        spans = self.spans_for(requests)
        key = spans if requests <= spans else 0, action
        known = self._layouts.get(key)
        if known is None:
            known = self._layouts[key] = self._lay_out(*key)
        return known

    def _lay_out(self, spans: int, action: Action) -> Layout:
        # Not for every number of requests by itself: all of them come by while a crowd leaves.
        there = self._groups.get((spans, action), _NONE)
        if self._offered is not None:
            offered = [place for place in there if self.sizes[place] in self._offered]
            there = np.array(offered, dtype=np.int64) if offered else there
        rows, each = self._rows[there], (self._samples[there] > spans).astype(np.int64)
        holding = np.minimum(rows, self._samples[there]) * each
        order = np.lexsort((there, rows, holding))
        holding, each, places = holding[order], each[order], there[order]
        if len(each) and each[0]:
            # A round without drafts runs in the smallest.
            holding, each = np.insert(holding, 0, 0), np.insert(each, 0, 0)
            places = np.insert(places, 0, places[0])
        return Layout(holding, each, places)
