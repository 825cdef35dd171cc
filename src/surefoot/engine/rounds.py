"""Rounds as an engine launches them: how large they are, and where their reports go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from surefoot.engine.batch import Batch
from surefoot.engine.reports import PinnedReport, Report
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import Decision
from surefoot.speculation.recorded_costs import RecordedCosts
from surefoot.speculation.round import Round
from surefoot.speculation.scoring import PromptReads, PromptScores
from surefoot.speculation.size import Size

BLOCK_DEPTHS = 2, 3, 5, 7
"""How far drafters that draft blocks may draft, besides all the way: rows that matrix instructions
multiply at once (64) are filled by seven drafts of eight requests, five of 32 and so on
(docs/log.md)."""
MANY_BLOCK_ROWS = 64
"""Rows from which on the time of a block's pass depends on their number."""
CROWD = 32
"""Requests of which only the likeliest drafts are verified, where so many decode."""
TREE_LEVELS, TREE_LEVELS_OF_CROWD = (2, 4, 8), (1, 2)
"""Of the trees that drafters may grow, besides as many as they can. A level takes one request some
6 % of a plain round and 512 requests 11 % (docs/log.md): more to choose from would bring little,
and each is to be recorded."""
PROMPT_SPANS = (16, 64, 160)
"""Spans that rounds with prompts are padded to, besides an engine's most. The last is for a
crowd of 128 and who joins it: of SmolLM2, padding it to 512 requests takes half as long again."""
PROMPT_DRAFTS = 8
"""Drafts of a request, on average, that rounds with prompts have room for."""
PROMPT_DRAFTED = 1024
"""Drafts that drafters make beside prompts, over all requests, at most (or as few for each request
as there is a depth for): a crowd verifies one or two of each request's, and each takes as long to
make."""
PROMPT_VERIFIED = 512
"""Drafts that can be verified beside prompts, over all requests, or one of each: rows to sample are
padded to so many, and for a crowd of 512 eight each took a tenth of such a round."""
FEW_SCORED = 4
"""Requests with logprobs that recorded rounds have room for, unless there are more."""


class Rounds:
    """Calls each round with just the rows that it needs."""

    recorded = False

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.device = round_.state.device
        self.width = round_.state.max_drafts
        self.apart_seconds = 0.0
        """Of the last launch: the round itself, where it is called, or recording it. The rest is
        the host's work for every round."""
        self._copies: list[PinnedReport] = []
        self._on_gpu = self.device.type == "cuda"
        if self._on_gpu:
            reader = torch.cuda.Stream(self.device)
            self._copies = [PinnedReport(round_, reader) for _ in range(4)]
        self._turn = 0
        self._copied: torch.cuda.Event | None = None
        """When the last report has been copied."""
        self._stream: torch.cuda.Stream | None = None
        """What the last round runs on: to ask anew for each event would take the host longer than
        to launch the round."""

    @cached_property
    def _rows(self) -> np.ndarray:
        """The report of the last round, where the host need not wait for it."""
        return self.round.books.report.numpy()

    def size(self, batch: Batch, decision: Decision, context: float) -> Size:
        """The size of a round of ``batch``, whose texts have ``context`` tokens each."""
        drafts = min(decision.drafts, batch.decoding * self.width)
        return Size(
            spans=batch.count,
            rows=batch.rows + drafts,
            samples=batch.samples + drafts,
            kind=batch.group.kind,
            proposers=decision.proposers,
            steps=decision.steps,
            verifies=drafts > 0,
            catches_up=self.catches_up(batch),
            logprobs=batch.group.logprobs,
            scored=len(batch.group.scored),
            masked=batch.group.masked,
        )

    def catches_up(self, batch: Batch) -> bool:
        """Whether drafters have to, if there are any."""
        drafters = self.round.drafters
        return not drafters or not drafters.keys().isdisjoint(batch.group.proposers)

    def launch(self, size: Size, keys: int, reads: PromptReads | None = None) -> Report:
        """Run a round, or have a GPU run it behind those before. Arguments as ``Round``'s."""
        # What is recorded now is not to be timed.
        self.ready(size)
        begun = time.perf_counter()
        if not self._on_gpu:
            prompt_scores = self.run(size, keys, reads)
            self.apart_seconds = time.perf_counter() - begun
            seconds = self.apart_seconds - self.round.keeping_up.late_seconds
            scores = self.round.scores.part(size)
            return Report(
                self._rows[: size.spans].copy(),
                None if scores is None else scores.clone(),
                prompt_scores,
                _nothing,
                lambda: seconds,
            )
        self._turn = (self._turn + 1) % len(self._copies)
        copy = self._copies[self._turn]
        # Of a number it is not asked which device is meant.
        self._stream = stream = torch.cuda.current_stream(copy.reader.device_index)
        copy.begun.record(stream)
        prompt_scores = self.run(size, keys, reads)
        copy.ended.record(stream)
        self.apart_seconds = time.perf_counter() - begun
        self._copied = copy.copied
        return copy.take(size, prompt_scores, stream)

    def run(self, size: Size, keys: int, reads: PromptReads | None) -> PromptScores:
        """The round itself."""
        self.await_reader()
        return self.round(size, keys, reads)

    def await_reader(self) -> None:
        """Before a report is written, have a GPU wait until the one before has been copied."""
        if self._copied is not None and self._stream is not None:
            self._stream.wait_event(self._copied)

    def ready(self, size: Size) -> None:
        """A round of this size is about to run."""

    def prepare(self) -> bool:
        """Record one more round that may be needed, while nobody waits; False: none is left."""
        return False

    def forget(self) -> None:
        """What rounds do has changed: record them anew."""


def _nothing() -> None:
    pass


class PaddedRounds(Rounds):
    """Rounds of few sizes, so that they can be recorded. Spans are padded to steps, rows to steps
    that widen with the drafts a span, and with the rows of prompts. Here they are called."""

    recorded = True

    def __init__(self, round_: Round, most_rows: int, weighed: bool) -> None:
        """``most_rows``: known rows of a round. ``weighed``: drafts have to pay, and beside prompts
        a crowd has as many made, and verified, as usually do; else all that it can."""
        super().__init__(round_)
        self.weighed = weighed
        self.spans = span_counts(len(round_.slots))
        self.prompt_spans = sorted({min(n, self.spans[-1]) for n in (*PROMPT_SPANS, 1 << 30)})
        """Spans of rounds with prompts."""
        most = len(round_.slots)
        self.prompt_rows = prompt_row_counts(most_rows + self.most_samples(most) - most)
        self.longest = min(self.width, max(round_.drafters.values(), default=0))
        """Most steps that a drafter drafts; 0 where there is none."""
        self.costs: Mapping[SamplingStages, RecordedCosts] = {}
        """By kind of sampling: of rounds without prompts a larger one may cost less."""

    def size(self, batch: Batch, decision: Decision, context: float) -> Size:
        drafts = min(decision.drafts, batch.decoding * self.width)
        if batch.prompt_rows:
            return self._with_prompts(batch, decision, drafts)
        spans = next(spans for spans in self.spans if spans >= batch.count)
        if not drafts:
            return self.base(spans, spans, batch, decision, False)
        costs = self.costs.get(batch.kind)
        found = costs and costs.size_for(batch.count, decision.action, drafts, context)
        if found is not None and found.spans == spans:
            rows = found.rows
        else:
            # A round of one row a span verifies no draft, even where some of its spans are empty.
            wanted, there = max(batch.count + drafts, spans + 1), self.rows(spans)
            rows = next((rows for rows in there if rows >= wanted), there[-1])
        return self.base(spans, rows, batch, decision, True)

    def base(self, spans: int, rows: int, batch: Batch, decision: Decision, verifies: bool) -> Size:
        """A round of so many spans and rows, all of which sample."""
        return Size(
            spans=spans,
            rows=rows,
            samples=rows,
            kind=batch.kind,
            proposers=decision.proposers,
            steps=min(decision.steps, self.longest),
            verifies=verifies,
            catches_up=self.catches_up(batch),
            logprobs=batch.group.logprobs,
            scored=next(
                n for n in (0, min(FEW_SCORED, spans), spans) if n >= len(batch.group.scored)
            ),
            masked=batch.group.masked,
        )

    def _with_prompts(self, batch: Batch, decision: Decision, drafts: int) -> Size:
        spans = next(spans for spans in self.prompt_spans if spans >= batch.count)
        most = self.most_samples(spans) - batch.samples
        drafts = min(drafts, most) if decision.proposers else 0
        known = batch.rows + drafts
        # Larger than the rows that are sampled: what tells that there are prompts.
        least = max(known, spans + 1, batch.samples + drafts + 1)
        rows = next((count for count in self.prompt_rows if count >= least), least)
        samples = self.prompt_samples(spans, rows, drafts > 0)
        # Where KV is reserved for no drafts, none may be verified.
        base = self.base(spans, spans, batch, decision, drafts > 0)
        if not any(index in self.round.drafters for index in decision.proposers):
            return replace(base, rows=rows, samples=samples)
        everything = tuple(range(len(self.round.proposers)))
        steps = self.prompt_depth(spans)
        return replace(base, rows=rows, samples=samples, proposers=everything, steps=steps)

    def prompt_depth(self, spans: int) -> int:
        """How far drafters draft in rounds of so many spans that hold prompts: these come in many
        sizes, and for each of them there is one depth."""
        depths = self.depths(spans)
        if not self.weighed:
            return depths[-1]
        few = (depth for depth in depths if depth * spans <= PROMPT_DRAFTED)
        return max(few, default=depths[0])

    def prompt_samples(self, spans: int, rows: int, verifies: bool) -> int:
        """Sampled rows of a round with prompts that has so many rows: without drafts, or with as
        many as it has room for, and as pay there."""
        return min(self.most_samples(spans), rows - 1) if verifies else spans

    def most_samples(self, spans: int) -> int:
        """Rows that rounds of so many spans sample at most beside prompts, drafts included."""
        drafts = spans * min(self.width, PROMPT_DRAFTS)
        return spans + (min(drafts, max(spans, PROMPT_VERIFIED)) if self.weighed else drafts)

    def rows(self, spans: int) -> list[int]:
        """Rows of rounds of so many spans without prompts."""
        most = spans * (1 + self.width)
        steps = [spans * i // 4 for i in (4, 5, 6, 8, 10, 12, 16, 20, 36)]
        steps += [spans * (1 + i) for i in (16, 31, 63)]
        steps += [spans * (1 + depth) for depth in self.block_depths(spans)]
        return sorted({rows for rows in steps if rows < most} | {spans, most})

    def block_depths(self, spans: int) -> tuple[int, ...]:
        """How far drafters may draft, besides all the way, where all of them draft blocks. Their
        weights are read for however few rows: nothing is gained in rounds of few spans."""
        whole, trees = self.round.whole, self.round.trees
        blocks = whole and whole.issuperset(self.round.drafters) and not trees
        return BLOCK_DEPTHS if blocks and spans * self.longest > MANY_BLOCK_ROWS else ()

    def depths(self, spans: int) -> list[int]:
        """How far drafters may draft in rounds of so many spans, rising: as far as some number of
        rows holds it all, or as far as they can; so many levels where there are trees."""
        if self.round.trees:
            levels = TREE_LEVELS if spans < CROWD else TREE_LEVELS_OF_CROWD
            return sorted({n for n in levels if n < self.longest} | {self.longest})
        whole = set(self.block_depths(spans))
        if not self.round.whole.issuperset(self.round.drafters):
            whole = {rows // spans - 1 for rows in self.rows(spans) if rows % spans == 0}
        return sorted({steps for steps in whole if 0 < steps < self.longest} | {self.longest})


def span_counts(most: int) -> list[int]:
    """Numbers of spans that rounds are padded to."""
    counts = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 129, 16), *range(160, 257, 32)]
    while counts[-1] < most:
        counts.append(counts[-1] + (64 if counts[-1] < 512 else 256))
    return [count for count in counts if count < most] + [most]


def prompt_row_counts(most: int) -> list[int]:
    """Numbers of rows that rounds with prompts are padded to."""
    counts = [16, 32, 64]
    for end, step in ((512, 64), (2048, 128), (4096, 256), (8192, 512), (1 << 30, 1024)):
        while counts[-1] < min(end, most):
            counts.append(counts[-1] + step)
    return [count for count in counts if count < most] + [most]
