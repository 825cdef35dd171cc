"""Rounds recorded as CUDA graphs.

Each in two: the target's forward pass, which takes most of the time to record and is the same
whatever is then sampled and whoever proposes, and what follows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from surefoot.engine.batch import Batch
from surefoot.engine.capture import capture
from surefoot.engine.reports import Report
from surefoot.engine.rounds import PaddedRounds
from surefoot.engine.stand_ins import stand_in
from surefoot.speculation.decisions import Decision
from surefoot.speculation.recorded_costs import RecordedSize
from surefoot.speculation.round import Round, TargetRows
from surefoot.speculation.scoring import PromptReads, PromptScores
from surefoot.speculation.size import Size

RECORDING_SHARE = 0.02
"""Of the time, for recording in the middle of serving: everybody waits for it."""
IN_PLACE, PADDING = 256, 8
"""A round with masks, with logprobs, or without drafters that catch up takes a few percent longer
where another runs in its place: so often, until that has cost as much as recording it. Each
``PADDING`` rows more that the other one has count like once more."""
SPARE = 1 << 30
"""Bytes of the device's memory that rounds recorded in idle moments leave alone."""
SMALL = 1 << 19
"""Bytes of a tensor between a round's two graphs that are there for each round by itself: a copy
would take longer. Larger ones share their memory."""


class Target(NamedTuple):
    """The first part of a round."""

    graph: torch.cuda.CUDAGraph
    rows: TargetRows
    """What it leaves in memory."""


class Recording(NamedTuple):
    """A recorded round."""

    target: torch.cuda.CUDAGraph
    rest: torch.cuda.CUDAGraph

    def replay(self, between: Callable[[], None] | None = None) -> None:
        self.target.replay()
        if between is not None:
            between()
        self.rest.replay()


class RecordedRounds(PaddedRounds):
    """Records each size on first use, in one memory pool."""

    def __init__(self, round_: Round, most_rows: int, weighed: bool) -> None:
        super().__init__(round_, most_rows, weighed)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[Size, Recording] = {}
        self._targets: dict[Size, Target] = {}
        """By ``Size.target``."""
        self._shared: dict[str, torch.Tensor] = {}
        """Large tensors between the two graphs of a round, by name: before another round writes
        there, nobody reads them any more."""
        self.capture_seconds = 0.0
        self.wanted: list[Size] = []
        """Recorded in idle moments, in this order."""
        self._stand_ins: dict[Size, Size | None] = {}
        """Found among a thousand rounds: to be looked for once, not at every launch."""
        self._tables: tuple[tuple[int, int], ...] | None = None
        """Where the tables of stop tokens and biases were, and how wide, when rounds were
        recorded."""
        self._asked: set[Size] = set()
        self._in_place: dict[Size, float] = {}
        """What it has cost by now that others ran in their place, as ``IN_PLACE`` counts."""
        self._next: Size | None = None
        """What the next ``run`` replays; ``ready`` says so."""
        self._offered: tuple[bool, int] | None = None
        """Whether planners may choose any round, and how many there were, when they were told."""
        self._serving_since: float | None = None
        """When a round was first missing."""
        self._held_up = 0.0
        """Seconds of recording since then, in the middle of serving."""

    def size(self, batch: Batch, decision: Decision, context: float) -> Size:
        size = super().size(batch, decision, context)
        if size.catches_up or size in self.graphs:
            return size
        # Recording takes longer than drafters that catch up for nobody, which is right, too.
        self._ask_for(size, len(self.wanted))
        return replace(size, catches_up=True)

    def _ask_for(self, size: Size, place: int) -> None:
        """Have a round recorded in an idle moment, at such a ``place`` among others."""
        if size not in self._asked:
            self._asked.add(size)
            self.wanted.insert(place, size)

    def run(self, size: Size, keys: int, reads: PromptReads | None) -> PromptScores:
        if size.prompt_logprobs is not None:
            return super().run(size, keys, reads)
        self.graphs[self._next or size].replay(self.await_reader)
        return PromptScores([], [])

    def ready(self, size: Size) -> None:
        if size.prompt_logprobs is None:
            self._next = self.available(size)

    def available(self, size: Size) -> Size:
        """The recorded round that runs now where ``size`` is wanted. Recording holds up everybody:
        where another round will do, it gets a small share of the time only."""
        self._check_tables()
        if size in self.graphs:
            return size
        if size not in self._stand_ins:
            self._stand_ins[size] = stand_in(size, self.graphs)
        other = self._stand_ins[size]
        now = time.perf_counter()
        self._serving_since = self._serving_since or now
        if other is not None and not (self._has_paid(size, other) and self._may_record()):
            self._ask_for(size, 0)
            return other
        self.graph(size)
        self._held_up += time.perf_counter() - now
        return size

    def _has_paid(self, size: Size, other: Size) -> bool:
        """Whether ``other``, which runs once more in the place of ``size``, has cost as much by now
        as recording that. Of rounds that planners tell apart, they want to know the time."""
        if _is_usual(size):
            return True
        cost = 1.0 + max(0, other.rows - size.rows) / PADDING
        self._in_place[size] = self._in_place.get(size, 0.0) + cost
        return self._in_place[size] >= IN_PLACE

    def _may_record(self) -> bool:
        """Whether one more round may be recorded in the middle of serving."""
        serving = time.perf_counter() - (self._serving_since or math.inf)
        return self._held_up <= RECORDING_SHARE * max(0.0, serving)

    def offer(self) -> None:
        """Have planners choose among recorded rounds, or among all where one more may be recorded.
        What runs in place of another verifies other drafts than was planned, and teaches nobody
        what either takes."""
        now = self._may_record(), len(self.graphs)
        if now == self._offered:
            return
        self._offered = now
        for kind, costs in self.costs.items():
            there = (size for size in self.graphs if size.kind == kind and _is_usual(size))
            costs.offer(None if now[0] else {_costing(size) for size in there})

    def launch(self, size: Size, keys: int, reads: PromptReads | None = None) -> Report:
        before = self._held_up
        report = super().launch(size, keys, reads)
        self.apart_seconds = self._held_up - before
        self.offer()
        if size.prompt_logprobs is not None or self._next == size:
            return report
        # What another round took tells nothing of this one.
        return report._replace(seconds=_unknown)

    def forget(self) -> None:
        self._drop(lambda size: True)
        self._targets.clear()
        # A pool that no graph uses any more is gone.
        self.pool = torch.cuda.graph_pool_handle()

    def _drop(self, reads: Callable[[Size], bool]) -> None:
        """Record those that ``reads`` says anew, in idle moments or when they are needed, but not
        the target's part of them."""
        torch.cuda.synchronize()
        gone = [size for size in self.graphs if reads(size)]
        for size in gone:
            del self.graphs[size]
        self.wanted = [*gone, *self.wanted]
        self._asked.update(gone)
        self._stand_ins.clear()
        self._serving_since, self._held_up = None, 0.0

    def graph(self, size: Size) -> Recording:
        """The recorded round of a size, recorded now if need be."""
        self._check_tables()
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
            self._stand_ins.clear()
            self._in_place.pop(size, None)
        return self.graphs[size]

    def _check_tables(self) -> None:
        params = self.round.state.params
        # The width, too: a table may be widened twice, and come to lie where it lay.
        tables = tuple(
            (table.data_ptr(), table.shape[1]) for table in (params.stop_ids, params.bias_ids)
        )
        if tables == self._tables:
            return
        # A wider request moved a table: what was recorded reads the old one.
        before, self._tables = self._tables, tables
        if before is not None:
            stops = tables[0] != before[0]
            self._drop(lambda size: stops or size.kind.bias)

    def capture(self, size: Size) -> Recording:
        """Record a round as it is now."""
        started = time.perf_counter()
        slots = self.round.slots
        slots_before = slots.clone()
        slots.fill_(self.round.state.padding_slot)
        target = self._targets.get(size.target)
        if target is None:
            run = partial(self._run_target, size.target)
            target = self._targets[size.target] = Target(*capture(run, self.pool, self.stream))
        # What follows is called once before it is recorded, and reads what this leaves.
        target.graph.replay()
        go_on = partial(self.round.go_on, size, target.rows, self._most_keys)
        rest, _ = capture(go_on, self.pool, self.stream)
        slots.copy_(slots_before)
        self.capture_seconds += time.perf_counter() - started
        return Recording(target.graph, rest)

    @property
    def _most_keys(self) -> int:
        return self.round.state.history.shape[1]

    def _run_target(self, size: Size) -> TargetRows:
        rows = self.round.run_target(size, self._most_keys)
        sampled = len(self.round.slots) * (1 + self.width)
        return rows._replace(
            hidden=self._left("hidden", rows.hidden, sampled),
            features=self._left("features", rows.features, max(sampled, self.prompt_rows[-1])),
        )

    def _left(self, name: str, made: torch.Tensor, most: int) -> torch.Tensor:
        """``made`` where it stays until the rest of the round has read it. ``most``: rows of such a
        tensor, in any round."""
        if made.nbytes <= SMALL:
            return made
        if name not in self._shared:
            # Not in a graph's memory: the round is called before it is recorded.
            self._shared[name] = made.new_empty((most, made.shape[1]))
        return self._shared[name][: len(made)].copy_(made)

    def prepare(self) -> bool:
        while self.wanted and self.wanted[0] in self.graphs:
            del self.wanted[0]
        if not self.wanted or torch.cuda.mem_get_info(self.device)[0] < SPARE:
            return False
        self.graph(self.wanted.pop(0))
        return True

    def time(self, size: Size, prepare: Callable[[], None], repeats: int = 4) -> float:
        """Seconds of a recorded round, the least of a few; ``prepare`` comes before each."""
        graph, times = self.graph(size), []
        for _ in range(repeats):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)


def _is_usual(size: Size) -> bool:
    """Whether planners tell the time of such a round apart from others."""
    return size == replace(size, catches_up=True, logprobs=None, scored=0, masked=False)


def _costing(size: Size) -> RecordedSize:
    return RecordedSize(size.spans, size.rows, size.samples, (size.proposers, size.steps or 0))


def _unknown() -> None:
    """Seconds of a round that was not measured."""
