"""What a round costs where rounds come in recorded sizes, timed at the start."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from surefoot.speculation.beliefs import SURPRISING
from surefoot.speculation.costs import ExactCosts
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.measured_times import MeasuredTimes, RecordedSize
from surefoot.speculation.size_features import OCTAVES, features_of, first_beliefs
from surefoot.speculation.size_layouts import Layouts

_STEPS = 4
"""Costs follow the length of texts in so many steps from one length to its double."""
_OWN_WEIGHT = 0.1
"""Weight of a round in what is its size's own; it doubles while rounds of a size contradict what is
believed of it, one after the other."""
_DOUBLINGS = 3
_UNLIKELY = 3.0
"""Standard deviations that noise does not explain."""
_FORGOTTEN = 250.0
"""Rounds after which sizes that seemed dearer than others, and were not run since, no longer do,
more or less: they are tried again."""
_REVIEW = 64
"""Rounds between two looks at what is no longer true, or never was."""


class PromptRounds(NamedTuple):
    """Rounds with prompts that have room for as many requests."""

    costs: ExactCosts
    """Also of those that no size holds."""
    actions: Sequence[Action] = (NOTHING,)
    """What they may propose with."""
    samples: int = 1 << 30
    """Most rows that they sample, drafts included."""


class RecordedCosts:
    """Seconds by recorded size and length of texts; a round takes the cheapest size that holds it.
    Rounds with prompts are told apart by what they are padded to, and by their rows.

    ``seconds = scale * measured(size, context) * shape(rows) * own(size)``. What rounds correct is
    the scale, the shape (rows nearby move together, and so do rounds with proposers), and a little
    of each size by itself. A size that is believed too dear is bounded by larger ones, which serve
    in its place; before, measurements out of line with their neighbours' are set right.
    """

    def __init__(
        self,
        times: Mapping[RecordedSize, Sequence[tuple[int, float]]],
        prompts: Mapping[int, PromptRounds] | None = None,
    ) -> None:
        """``times``: (tokens of every text, seconds), rising, one or more for every size of rounds
        without prompts. ``prompts``: rounds with prompts, by the most requests that they have room
        for."""
        self._prompts = {
            spans: kind._replace(actions=sorted(kind.actions, key=lambda one: (len(one[0]), one)))
            for spans, kind in sorted((prompts or {}).items())
        }
        self.sizes = sorted(times, key=lambda size: (size.spans, size.action, size.samples, size))
        self._places = {size: place for place, size in enumerate(self.sizes)}
        self._layouts = Layouts(self.sizes)
        self.measured = MeasuredTimes(self.sizes, times)
        self._features = features_of(self.sizes)
        shape = self._features[:, 1 : 1 + OCTAVES]
        self._octaves = [np.flatnonzero(weights) for weights in shape]
        self.beliefs = first_beliefs()
        self._own = np.zeros(len(self.sizes))
        """Logarithms, by size."""
        self._side = np.zeros(len(self.sizes), dtype=np.int64)
        """How often in a row a size's rounds took much longer (or, below 0, shorter)."""
        self._seen = np.zeros(len(self.sizes))
        """The count of rounds when it was last run."""
        self._ran = np.zeros(OCTAVES, dtype=bool)
        """Since the last review: in these octaves of rows."""
        self._rounds = self._reviewed = 0
        """All of them, and those before the last review."""
        self._step: int | None = None
        self._base = self.measured.seconds[:, 0]
        self._believed: dict[tuple[int, Action], tuple[np.ndarray, np.ndarray]] = {}
        """By spans and action, until something is learnt."""
        self._chosen: dict[tuple[int, Action, int], RecordedSize] = {}
        """By spans, action and the first size of ``Layouts.of`` that would do, for some rounds."""

    def offer(self, sizes: Collection[RecordedSize] | None) -> None:
        """Rounds are to be of these sizes from now on, where there is one that does what is wanted;
        None: of any."""
        self._layouts.offer(sizes)
        self._believed.clear()
        self._chosen.clear()

    # --- asking -------------------------------------------------------------------------------

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        return self.beliefs.noise

    def actions(self, requests: int) -> Sequence[Action]:
        """As ``RoundCosts`` has it."""
        return self._layouts.actions(requests)

    def with_prompts(self, requests: int, action: Action) -> Action:
        """As ``RoundCosts`` has it: with the same proposers, or more if need be."""
        wanted = set(action[0])
        there = self._beside_prompts(requests).actions
        return next(each for each in there if wanted.issubset(each[0]))

    def with_drafts(self, requests: int, action: Action) -> Action:
        """As ``RoundCosts`` has it: with the same proposers, or more if need be."""
        wanted = set(action[0])
        for each in (action, *self.actions(requests)):
            room = self._layouts.of(requests, each).room(requests)
            if wanted.issubset(each[0]) and len(room) and room[-1]:
                return each
        return action

    def table(
        self, requests: int, prompt_rows: int, action: Action, most: int, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``RoundCosts`` has it; the drafts are those that fill each size."""
        layout = self._layouts.of(requests, action)
        if prompt_rows or not len(layout.places):
            there = self._beside_prompts(requests)
            # Beside prompts there is room for drafts only where somebody proposes.
            most = max(0, min(most, there.samples - requests)) if action[0] else 0
            return there.costs.table(requests, prompt_rows, action, most, context)
        room = layout.room(requests)
        seconds = self._seconds_of(requests, action, context)[1]
        last = int(room.searchsorted(most)) + 1
        return np.minimum(room[:last], most), seconds[:last]

    def size_for(
        self, requests: int, action: Action, drafts: int, context: float
    ) -> RecordedSize | None:
        """The cheapest size for such a round without prompts; a larger one may cost less. Drafts
        for which no size has room stay away: a decision may have been made for a few requests more,
        who had larger ones. None: none holds the requests, or any drafts."""
        layout = self._layouts.of(requests, action)
        if not len(layout.places):
            return None
        room = layout.room(requests)
        if drafts and not room[-1]:
            return None
        self._follow_texts(context)
        first = int(room.searchsorted(min(drafts, int(room[-1]))))
        key = self._layouts.spans_for(requests), action, first
        chosen = self._chosen.get(key)
        if chosen is None:
            seconds = self._seconds_of(requests, action, context)[0]
            place = layout.places[first + int(seconds[first:].argmin())]
            chosen = self._chosen[key] = self.sizes[place]
        return chosen

    def _seconds_of(
        self, requests: int, action: Action, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(float64 [n], float64 [n]): what is believed of the sizes of ``Layouts.of``, and of the
        cheapest of each and those that are larger."""
        self._follow_texts(context)
        key = self._layouts.spans_for(requests), action
        known = self._believed.get(key)
        if known is None:
            layout = self._layouts.of(requests, action)
            off = self._own_now(layout.places) + self._features[layout.places] @ self.beliefs.mean
            seconds = self._base[layout.places] * np.exp(off)
            least = np.minimum.accumulate(seconds[::-1])[::-1]
            known = self._believed[key] = seconds, least
        return known

    def _beside_prompts(self, requests: int) -> PromptRounds:
        """Rounds with prompts that have room for so many requests, or for most."""
        if not self._prompts:
            raise ValueError("no recorded round holds so many rows")
        fitting = (spans for spans in self._prompts if spans >= requests)
        return self._prompts[next(fitting, max(self._prompts))]

    def _own_now(self, places: np.ndarray) -> np.ndarray:
        own = self._own[places]
        fading = np.exp((self._seen[places] - self._rounds) / _FORGOTTEN)
        return np.where(own > 0.0, own * fading, own)

    def _follow_texts(self, context: float) -> None:
        """Have times follow the length of texts, as nearly as steps of a quarter octave go; a
        length that wavers between two steps keeps the one it has."""
        place = _STEPS * math.log2(max(context, 1.0))
        if self._step is None or abs(place - self._step) > 0.75:
            self._step = round(place)
            self._set_base()

    def _set_base(self) -> None:
        context = 2.0 ** ((self._step or 0) / _STEPS)
        self._base = self.measured.at(context)
        self._believed.clear()
        self._chosen.clear()

    # --- learning -----------------------------------------------------------------------------

    def observe(
        self,
        requests: int,
        prompt_rows: int,
        action: Action,
        drafts: int,
        context: float,
        seconds: float,
    ) -> bool:
        """As ``RoundCosts`` has it."""
        if requests + prompt_rows < 1 or seconds <= 0:
            return False
        size = None if prompt_rows else self.size_for(requests, action, drafts, context)
        if size is None:
            exact = self._beside_prompts(requests).costs
            return exact.observe(requests, prompt_rows, action, drafts, context, seconds)
        place = self._places[size]
        self._rounds += 1
        self._believed.clear()
        features, own = self._features[place], float(self._own[place])
        fading = math.exp((self._seen[place] - self._rounds) / _FORGOTTEN) if own > 0.0 else 1.0
        believed = float(features @ self.beliefs.mean) + own * fading
        off = math.log(seconds / self._base[place]) - believed
        # What was forgotten of it is true again as far as the round took longer for it.
        again = min(max(off, 0.0), own - own * fading)
        self._own[place], off = own * fading + again, off - again
        firm = self.beliefs.observe(features, off)
        self._seen[place] = self._rounds
        self._ran[self._octaves[place]] = True
        if self._rounds - self._reviewed >= _REVIEW:
            self._review(place)
        if not firm:
            return False
        little = abs(off) < SURPRISING * self.noise
        # What others do not explain is the size's own.
        limit = _UNLIKELY * self.noise
        side = 0 if abs(off) < limit else (1 if off > 0 else -1)
        before = int(self._side[place])
        self._side[place] = side = before + side if side and before * side >= 0 else side
        if abs(side) < 2:
            off = min(max(off, -limit), limit)
        self._own[place] += (
            min(1.0, _OWN_WEIGHT * 2 ** min(max(abs(side) - 1, 0), _DOUBLINGS)) * off
        )
        return little

    def pass_over(self) -> None:
        """As ``RoundCosts`` has it."""
        self._rounds += 1
        self.beliefs.pass_over()

    def _review(self, place: int) -> None:
        """Whatever spoils an entry that was in line at the start does not last: look at those that
        this one, which was just run, is compared with, and at plain rounds. What made other numbers
        of rows dearer, or cheaper, against what was measured, than it made this one is forgotten by
        and by."""
        if self.measured.put_in_line(place):
            # What rounds taught was how much longer they took than wrong times.
            self.beliefs = first_beliefs()
            self._own[:] = 0.0
        self._set_base()
        scale, shape = self.beliefs.mean[0], self.beliefs.mean[1 : 1 + OCTAVES]
        here = float(scale + self._features[place, 1 : 1 + OCTAVES] @ shape)
        beyond = scale + shape - np.clip(scale + shape, min(0.0, here), max(0.0, here))
        rounds = self._rounds - self._reviewed
        shape -= np.where(self._ran, 0.0, beyond * min(1.0, rounds / _FORGOTTEN))
        self._ran[:] = False
        self._reviewed = self._rounds
