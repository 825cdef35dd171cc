"""Recorded rounds by size: which there are, what they cost, how they are launched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from surefoot.engine.rehearsal import rehearsal
from surefoot.sampling.params import Features
from surefoot.speculation.replay import ReplayRound, Size


class RoundGraphs:
    """Round sizes are padded to few: spans to powers of two, rows to steps that widen with the
    drafts a span. Without a GPU the same rounds run as they are called."""

    def __init__(self, replay: ReplayRound, spans: int) -> None:
        self.replay = replay
        self.spans = _powers(spans)
        self.width = replay.state.max_drafts
        self.costs: dict[tuple[int, int], float] = {}
        """Seconds by (spans, rows), measured."""
        self._tables_by: dict[tuple[int, int], torch.Tensor] = {}

    def plain(self, requests: int, kind: Features, proposers: tuple[int, ...]) -> Size:
        """The smallest round that holds so many requests without drafts."""
        spans = next(spans for spans in self.spans if spans >= requests)
        return Size(spans, spans, kind, proposers)

    def rows(self, spans: int) -> list[int]:
        """The numbers of rows that rounds of so many spans come in."""
        most = spans * (1 + self.width)
        steps = [spans * i // 4 for i in (4, 5, 6, 8, 12, 16, 20, 36)]
        steps += [spans * (1 + i) for i in (16, 31, 63)]
        return sorted({rows for rows in steps if rows < most} | {spans, most})

    def holding(self, base: Size, rows: int) -> Size:
        """The cheapest round of ``base``'s spans that holds so many rows; a larger one may cost
        less, and its spare rows go to less likely drafts."""
        enough = [r for r in self.rows(base.spans) if r >= rows]
        return replace(base, rows=min(enough, key=lambda r: self.costs.get((base.spans, r), r)))

    def table(self, base: Size, requests: int) -> torch.Tensor:
        """float32 [n + 1]: seconds of a round of so many requests with 0 .. n drafts."""
        known = self._tables_by.get((base.spans, requests))
        if known is not None:
            return known
        padded = self.rows(base.spans)
        costs = [self.costs.get((base.spans, rows), 1.0) for rows in padded]
        for at in reversed(range(len(costs) - 1)):
            costs[at] = min(costs[at], costs[at + 1])
        table, at = [], 0
        for rows in range(requests, requests * (1 + self.width) + 1):
            while padded[at] < rows:
                at += 1
            table.append(costs[at])
        known = self._tables_by[base.spans, requests] = torch.tensor(table)
        return known

    def launch(self, size: Size) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run a round; its report [spans, columns], and what waits for it."""
        self.replay(size)
        return self.replay.report.clone(), _nothing

    def forget(self) -> None:
        """Record every round anew: what it does has changed."""

    def measure(self, blocks: int) -> None:
        """Fill ``costs``; ``blocks``: those of the KV pool. Here: guesses of a device on which rows
        are nearly free."""
        for spans in self.spans:
            for rows in self.rows(spans):
                self.costs[spans, rows] = 1.0 + 0.001 * rows


def _nothing() -> None:
    pass


def _powers(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return sizes


class CudaRoundGraphs(RoundGraphs):
    """Records each size on first use, in one memory pool; ``measure`` uses the greedy ones."""

    def __init__(self, replay: ReplayRound, spans: int) -> None:
        super().__init__(replay, spans)
        self.device = replay.state.device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self.capture_seconds = 0.0
        self._tables: list[tuple[int, int]] = []
        shape = tuple(replay.report.shape)
        self.reports = [torch.zeros(shape, dtype=torch.int32).pin_memory() for _ in range(4)]
        self.next_report = 0

    def launch(self, size: Size) -> tuple[torch.Tensor, Callable[[], None]]:
        """Replay the round; raises what the device raises when the report is waited for."""
        graph = self.graph(size)
        graph.replay()
        report = self.reports[self.next_report]
        self.next_report = (self.next_report + 1) % len(self.reports)
        report[: size.spans].copy_(self.replay.report[: size.spans], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return report, event.synchronize

    def forget(self) -> None:
        torch.cuda.synchronize()
        self.graphs.clear()

    def graph(self, size: Size) -> torch.cuda.CUDAGraph:
        """The recorded round of a size, recorded now if need be."""
        params = self.replay.state.params
        # The width, too: a table may be widened twice, and come to lie where it lay.
        tables = [
            (table.data_ptr(), table.shape[1]) for table in (params.stop_ids, params.bias_ids)
        ]
        if tables != self._tables:
            # A wider request moved these tables: what was recorded reads the old ones.
            self.forget()
            self._tables = tables
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        return self.graphs[size]

    def _capture(self, size: Size) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        seated = self.replay.slots.clone()
        self.replay.slots.fill_(self.replay.idle_slot)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.replay(size)  # compiles kernels, allocates what is kept
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self.replay(size)
        torch.cuda.synchronize()
        self.replay.slots.copy_(seated)
        self.capture_seconds += time.perf_counter() - started
        return graph

    def measure(self, blocks: int) -> None:
        """Record greedy rounds of every size with all proposers, and time them at a middling
        context, every draft verified. The engine must be idle; it is as before afterwards."""
        replay = self.replay
        proposers = tuple(range(len(replay.controller.names))) if self.width else ()
        with rehearsal(replay, blocks, context=1024) as seat:
            for spans in self.spans:
                for rows in self.rows(spans):
                    graph = self.graph(Size(spans, rows, Features(), proposers))
                    times = []
                    for _ in range(4):
                        seat(spans)
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        begin.record()
                        graph.replay()
                        end.record()
                        end.synchronize()
                        times.append(begin.elapsed_time(end) / 1000)
                    self.costs[spans, rows] = min(times)
