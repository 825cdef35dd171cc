"""What a round costs on the device where rounds are called with exactly the rows they need."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.speculation.beliefs import SURPRISING, Beliefs, in_line
from surefoot.speculation.decisions import LIKELIEST, Action, SamplingCost

MOST_CHOICES = 48
"""Numbers of drafts that are weighed, at most: beyond, steps widen."""
_SCALE, _SHAPE, _OWN, _PROPOSING = 2.0, 0.3, 0.03, 1.0
"""How far from the first measurements logarithms of times may be, as standard deviations: all of
them together, some numbers of rows against others, and one against its neighbours; and how many
times its guess a proposer's time may be more or less."""
_RANGE = 2.0
"""Octaves of rows over which one number of rows tells of another."""
_DRIFTS = 1e-4, 1e-6, 1e-5
"""Variances by which these may change from round to round."""
_FIRST_NOISE = 0.05
_FORGOTTEN = 250.0
"""Rounds after which numbers of rows that seemed dearer than others, and were not run since, no
longer do, more or less: they are tried again."""
_REVIEW = 16
"""Rounds between two looks for numbers of rows that are out of line."""


@dataclass(frozen=True)
class Proposing:
    """What a proposer adds to a round, at first guess: every round corrects it."""

    seconds: float
    """For a call, or for a step of one that pays by steps."""
    request_seconds: float = 0.0
    """For each request, likewise."""
    longest: int = 0
    """Most steps of one that pays by steps; 0: it pays once, however long its drafts."""
    call_seconds: float = 0.0
    """For a call of one that pays by steps, besides these: catching up, for one."""


class ExactCosts:
    """Seconds by rows, straight lines between a few numbers of rows; and by who proposes.

    ``seconds = scale * (measured(rows) * shape(rows) + proposing + sampling)``. What rounds
    correct is the scale (the machine as such is slower now), the shape (numbers of rows nearby move
    together, so that those that are never run do not stay wrong) and each proposer's part. The
    length of texts is not told apart: it changes slowly, and the scale follows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        proposing: Mapping[int, Proposing] | None = None,
        sampling: SamplingCost = LIKELIEST,
    ) -> None:
        """``seconds`` of rounds of so many ``rows``, which rise from 1, without proposing and with
        the likeliest tokens taken; ``sampling``: what it adds to do otherwise."""
        if list(rows) != sorted(set(rows)) or not rows or rows[0] != 1 or len(rows) != len(seconds):
            raise ValueError("rows must rise from 1, one time each")
        self.proposing = dict(sorted((proposing or {}).items()))
        self.sampling = sampling
        self._rows = np.asarray(rows, dtype=np.float64)
        self._places = list(rows)
        self._dense = sum(at == place for at, place in enumerate(rows, 1))
        """The numbers of rows up to this were all measured."""
        self._measured = in_line(rows, seconds)
        self._in_line = np.empty(0)
        """They, when they were found to be so."""
        self._actions = self._all_actions()
        self._proposing_at = {index: at for at, index in enumerate(self.proposing, 1 + len(rows))}
        self.beliefs = self._first_beliefs()
        self._knots: np.ndarray | None = None
        self._rounds = self._reviewed = 0
        """All of them, and those before the last review."""
        self._ran = np.zeros(len(self._rows), dtype=bool)
        """Since the last review: at about these numbers of rows."""
        self._last = 0
        """The one that the last round was nearest to."""

    def _first_beliefs(self) -> Beliefs:
        octaves, own = np.log2(self._rows), len(self.proposing)
        apart = np.abs(np.subtract.outer(octaves, octaves)) / _RANGE
        count = 1 + len(octaves)
        covariance = np.zeros((count + own, count + own))
        covariance[0, 0] = _SCALE**2
        covariance[1:count, 1:count] = _SHAPE**2 * np.exp(-0.5 * apart**2)
        covariance[1:count, 1:count] += _OWN**2 * np.eye(len(octaves))
        covariance[count:, count:] = _PROPOSING**2 * np.eye(own)
        drift = np.repeat(_DRIFTS, (1, len(octaves), own))
        mean = np.zeros(count + own)
        return Beliefs(mean, covariance, drift, _FIRST_NOISE, parts=slice(count, None))

    def _all_actions(self) -> tuple[Action, ...]:
        found: list[Action] = []
        for count in range(len(self.proposing) + 1):
            for chosen in itertools.combinations(self.proposing, count):
                paying = [
                    self.proposing[index] for index in chosen if self.proposing[index].longest
                ]
                longest = max((each.longest for each in paying), default=0)
                found += [(chosen, depth) for depth in range(1, longest + 1) or (0,)]
        return tuple(found)

    @property
    def noise(self) -> float:
        """Relative deviation of a round's time from what is believed."""
        return self.beliefs.noise

    def actions(self, requests: int) -> Sequence[Action]:
        """As ``RoundCosts`` has it."""
        return self._actions

    def with_prompts(self, requests: int, action: Action) -> Action:
        """As ``RoundCosts`` has it."""
        return action

    def with_drafts(self, requests: int, action: Action) -> Action:
        """As ``RoundCosts`` has it."""
        return action

    def table(
        self, requests: int, prompt_rows: int, action: Action, most: int, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``RoundCosts`` has it."""
        drafts = _choices(most)
        scale = math.exp(self.beliefs.mean[0])
        proposing = sum(self._parts(requests, action).values())
        rows = requests + prompt_rows
        if not most:
            beside = proposing + self.sampling.of(requests)
            return drafts, np.array([scale * (self._forward_of(rows)[0] + beside)])
        seconds = self._forward(rows + drafts) + self.sampling.of(requests)
        seconds += self.sampling.row_seconds * drafts
        # More rows may be believed cheaper by noise; nobody runs more rows than needed for that.
        seconds = np.maximum(seconds, seconds[0])
        return drafts, scale * (seconds + proposing)

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
        rows = requests + prompt_rows + drafts
        if rows < 1 or seconds <= 0:
            return False
        forward, at, share = self._forward_of(rows)
        parts = self._parts(requests, action)
        total = forward + sum(parts.values()) + self.sampling.of(requests + drafts)
        weights = np.zeros(len(self.beliefs.mean))
        weights[0] = 1.0
        if share < 1.0:
            weights[at] = (1 - share) * forward / total
            self._ran[at - 1] = True
        weights[1 + at] = share * forward / total
        self._ran[at] = True
        for index in parts:
            weights[self._proposing_at[index]] = self._guess(index, requests, action[1]) / total
        off = math.log(seconds / total) - float(self.beliefs.mean[0])
        firm = self.beliefs.observe(weights, off)
        self._last = at if share >= 0.5 else at - 1
        self._rounds += 1
        self._knots = None
        return firm and abs(off) < SURPRISING * self.noise

    def pass_over(self) -> None:
        """As ``RoundCosts`` has it."""
        self._rounds += 1
        self.beliefs.pass_over()

    def forget_curve(self) -> None:
        """Beliefs were changed from outside."""
        self._knots = None

    def _curve(self) -> np.ndarray:
        """float64 [n]: seconds at the measured numbers of rows, but for the scale."""
        if self._knots is None:
            shape = self.beliefs.mean[1 : 1 + len(self._rows)]
            if self._rounds - self._reviewed >= _REVIEW:
                self._review(shape)
            self._knots = self._measured * np.exp(shape)
        return self._knots

    def _forward(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of rounds of so many rows, rising, but for the scale and proposing."""
        knots, values = self._rows, self._curve()
        if rows[-1] <= self._dense:
            return values[rows - 1]
        seconds = np.interp(rows, knots, values)
        if len(knots) > 1 and rows[-1] > knots[-1]:
            slope = max(0.0, (values[-1] - values[-2]) / (knots[-1] - knots[-2]))
            seconds = seconds + slope * np.maximum(0.0, rows - knots[-1])
        return seconds

    def _forward_of(self, rows: int) -> tuple[float, int, float]:
        """As ``_forward``, of one number of rows; with the place of the next measured number
        and how much of the way to it from the one before lies behind ``rows``."""
        knots, values = self._places, self._curve()
        last = len(knots) - 1
        if rows > knots[last]:
            return float(self._forward(np.array([rows]))[0]), last, 1.0
        at = bisect.bisect_left(knots, rows)
        if rows == knots[at] or not at:
            return float(values[at]), at, 1.0
        low, high = float(values[at - 1]), float(values[at])
        share = (rows - knots[at - 1]) / (knots[at] - knots[at - 1])
        return low + share * (high - low), at, share

    def _review(self, shape: np.ndarray) -> None:
        # Whatever spoils an entry that was in line at the start does not last. To look for it
        # takes longer than all else.
        if not np.array_equal(self._measured, self._in_line):
            before = self._measured
            self._measured = in_line(self._rows.tolist(), before.tolist())
            if np.allclose(before, self._measured):
                self._in_line = self._measured.copy()
        shape[:] = _without_outliers(shape)
        # What made others dearer, against what was measured, than those that were just run.
        scale, rounds = self.beliefs.mean[0], self._rounds - self._reviewed
        dearer = np.maximum(scale + shape - max(0.0, scale + shape[self._last]), 0.0)
        shape -= np.where(self._ran, 0.0, dearer * min(1.0, rounds / _FORGOTTEN))
        self._ran[:] = False
        self._reviewed = self._rounds
        self._level(shape)

    def _level(self, shape: np.ndarray) -> None:
        """What all numbers of rows have in common is the scale. No measurement tells the two apart,
        and while a machine is busy now and then they part more and more: what proposers take, which
        is known by so many times their guess, would be believed to grow with the scale."""
        common = float(shape.mean())
        shape -= common
        self.beliefs.mean[0] += common
        self.beliefs.scale_parts(math.exp(-common))

    def _parts(self, requests: int, action: Action) -> dict[int, float]:
        """Seconds that each proposer takes, but for the scale."""
        chosen, steps = action
        mean = self.beliefs.mean
        return {
            index: self._guess(index, requests, steps)
            * (1.0 + float(mean[self._proposing_at[index]]))
            for index in (chosen if requests else ())
        }

    def _guess(self, index: int, requests: int, steps: int) -> float:
        """The same of one proposer, at first guess."""
        own = self.proposing[index]
        times = min(steps, own.longest) if own.longest else 1
        return own.call_seconds + times * (own.seconds + own.request_seconds * requests)


@functools.cache
def _choices(most: int) -> np.ndarray:
    """int64 [n]: the numbers of drafts that are weighed, of ``most``."""
    if most < MOST_CHOICES:
        return np.arange(most + 1)
    return np.unique(np.geomspace(1, most + 1, MOST_CHOICES).astype(np.int64)) - 1


def _without_outliers(shape: np.ndarray, most: float = 0.5) -> np.ndarray:
    """``shape`` float64 [n], entries that lie far from both neighbours replaced by the middle one
    of the three."""
    if len(shape) < 3:
        return shape
    three = np.stack((np.roll(shape, 1), shape, np.roll(shape, -1)))
    three[0, 0], three[2, -1] = shape[2], shape[-3]
    middle = np.sort(three, axis=0)[1]
    return np.where(np.abs(shape - middle) > most, middle, shape)
