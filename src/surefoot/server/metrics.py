"""What a server did, in plain numbers: cheap to count, exported by ``exposition``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.server.messages import News, Ready, Totals

if TYPE_CHECKING:
    from surefoot.server.generation import Choice, Generation

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FIRST_TOKEN_BOUNDS = (*FIRST_TOKEN, 20, 40, 80, 160, 640)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 5)
REQUEST_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 960)
QUEUE_BOUNDS = (0.001, 0.01, 0.05, *REQUEST_BOUNDS)
LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SMOOTHING = 0.1


class Histogram:
    """Counts of observations by upper bound (inclusive), and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class DraftCounts:
    """Of one proposer: requests' rounds with drafts of its, and tokens by position in the draft."""

    rounds: int = 0
    offered: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, verified: int, accepted: int) -> None:
        """A request's round verified so many of its drafts."""
        self.rounds += 1
        _count_positions(self.verified, verified, verified)
        # Of as many positions: none accepted is a number, too.
        _count_positions(self.accepted, accepted, verified)

    def count_offer(self, drafts: int) -> None:
        """So many were on the table for a request's next round."""
        _count_positions(self.offered, drafts, drafts)


def _count_positions(counts: list[int], positions: int, width: int) -> None:
    """One more at each of the first ``positions`` of ``counts``, which gets ``width`` entries."""
    counts += [0] * (width - len(counts))
    for position in range(positions):
        counts[position] += 1


class Metrics:
    """Counters of requests and tokens; times are seconds as the front sees them."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.totals = Totals()
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort"), 0))
        self.rejected = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token = Histogram(TOKEN_BOUNDS)
        """Gaps between rounds that brought tokens, divided evenly over those tokens."""
        self.queue_time = Histogram(QUEUE_BOUNDS)
        """Until the engine let a text in."""
        self.request_rounds = 0
        """A request's rounds that brought tokens, with drafts or without."""
        self.statuses: Counter[tuple[str, str, str]] = Counter()
        """HTTP answers by method, path, status."""
        self.mean_token = Histogram(TOKEN_BOUNDS)
        """Per text: the mean time of a token after the first."""
        self.request_time = Histogram(REQUEST_BOUNDS)
        self.prompt_lengths = Histogram(LENGTH_BOUNDS)
        self.generation_lengths = Histogram(LENGTH_BOUNDS)
        self.drafts = {name: DraftCounts() for name in ready.proposers}
        self.switched_off: set[str] = set()
        """Proposers that failed."""
        self._typical = 1.0

    def typical_seconds(self) -> float:
        """How long texts took of late."""
        return self._typical

    def count_arrival(self, generation: Generation) -> None:
        """A request that the engine accepted."""
        for prompt in generation.prompts:
            self.prompt_tokens += len(prompt)
            self.prompt_lengths.observe(len(prompt))

    def count_news(self, choice: Choice, news: News, kept: int, now: float) -> None:
        """A choice got ``news``; ``kept`` of its tokens count, as a stop string may end the text
        before the others."""
        self.generation_tokens += kept
        self.request_rounds += bool(news.tokens)
        if news.offered:
            self.drafts[self.ready.proposers[news.offerer]].count_offer(news.offered)
        if news.hosted:
            self.drafts[self.ready.proposers[news.host]].count_offer(news.hosted)
        if choice.first_at is None:
            choice.first_at = now
            self.queue_time.observe(news.queued)
            self.first_token.observe(now - choice.generation.arrived)
        elif kept:
            self.inter_token.observe((now - choice.last_at) / kept, kept)
        choice.last_at = now
        if news.verified:
            self.drafts[self.ready.proposers[news.proposer]].count(news.verified, news.accepted)

    def count_end(self, choice: Choice) -> None:
        """A choice is over, for whatever reason."""
        reason = choice.request.finish_reason
        assert reason is not None
        self.finished[reason.value] += 1
        if choice.first_at is None:
            return
        tokens = choice.stream.kept
        seconds = time.perf_counter() - choice.generation.arrived
        self.generation_lengths.observe(tokens)
        self.request_time.observe(seconds)
        if tokens > 1:
            self.mean_token.observe((choice.last_at - choice.first_at) / (tokens - 1))
        self._typical += _SMOOTHING * (seconds - self._typical)
