"""Rounds as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from surefoot.engine.capture import capture
from surefoot.engine.graphs import Report, RoundGraphs
from surefoot.sampling.params import Features
from surefoot.speculation.replay import DRAWN, ReplayRound, Size

SPARE = 1 << 30
"""Bytes of the device's memory that rounds recorded in idle moments leave alone."""


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
        self.score_reports: list[torch.Tensor] = []
        """Likewise, made when first needed."""
        self.next_report = 0

    def launch(self, size: Size) -> Report:
        """Replay the round."""
        self.graph(size).replay()
        turn = self.next_report
        self.next_report = (turn + 1) % len(self.reports)
        report, scores = self.reports[turn], self._scores(self.replay.scores, size)
        report[: size.spans].copy_(self.replay.report[: size.spans], non_blocking=True)
        if scores is not None:
            scores = self._copy_scores(scores, turn)
        event = torch.cuda.Event()
        event.record()
        return Report(report, scores, event.synchronize)

    def _copy_scores(self, scores: torch.Tensor, turn: int) -> torch.Tensor:
        if not self.score_reports:
            size = self.replay.scores.numel()
            self.score_reports = [
                torch.zeros(size, dtype=torch.int32).pin_memory() for _ in self.reports
            ]
        # Dense on both sides: one copy, not one for every row.
        target = self.score_reports[turn][: scores.numel()].view(scores.shape)
        return target.copy_(scores.contiguous(), non_blocking=True)

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
            self.graphs[size] = self.capture(size)
        return self.graphs[size]

    def capture(self, size: Size) -> torch.cuda.CUDAGraph:
        """Record a round as it is now."""
        started = time.perf_counter()
        seated = self.replay.slots.clone()
        self.replay.slots.fill_(self.replay.idle_slot)
        graph, _ = capture(partial(self.replay, size), self.pool, self.stream)
        self.replay.slots.copy_(seated)
        self.capture_seconds += time.perf_counter() - started
        return graph

    def measure(self, blocks: int) -> None:
        """Record greedy rounds of every size with all proposers, each once, and time them at a few
        contexts. Those that look for no drafts are recorded, too."""
        self._time_all(blocks, lambda size, prepare: self.time(self.graph(size), prepare))
        for spans in self.spans:
            self.graph(self.plain(spans, Features(), ()))

    def prepare(self) -> bool:
        """As the base class: of drawn text, which ``measure`` leaves out for a quicker start."""
        if not self.times:
            return False
        sizes = (
            size
            for spans in self.spans
            for size in (*self.looking(spans, DRAWN), self.plain(spans, DRAWN, ()))
        )
        missing = next((size for size in sizes if size not in self.graphs), None)
        if missing is None or self.spare_memory() < SPARE:
            return False
        self.graph(missing)
        return True

    def spare_memory(self) -> int:
        """Bytes that nobody holds on the device."""
        return torch.cuda.mem_get_info(self.device)[0]

    def time(self, graph: torch.cuda.CUDAGraph, prepare: Callable[[], None]) -> float:
        """Seconds of a recorded round, the least of a few; ``prepare`` comes before each."""
        times = []
        for _ in range(4):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return min(times)
