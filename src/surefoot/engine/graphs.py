"""Recorded rounds by size: which there are, what they cost, how they are launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from surefoot.engine.costs import Sizing, TimesByContext
from surefoot.engine.rehearsal import contexts_to_time, rehearsal
from surefoot.sampling.params import Features
from surefoot.speculation.replay import ReplayRound, Size

MIDDLING = 1024
"""Tokens of the texts that costs are for until somebody says how long they are."""
_STEPS = 4
"""Costs follow the length of texts in so many steps from one length to its double."""


@dataclass(frozen=True)
class Report:
    """What a launched round will have told the host."""

    rows: torch.Tensor
    """int32 [spans, columns]: ``ReplayRound.columns``."""
    scores: torch.Tensor | None
    """int32 [spans, n, columns], ``logprobs.pack``'s, where the round's size asks for logprobs."""
    landed: Callable[[], None]
    """Waits until all is there; raises what the device raises."""


class RoundGraphs:
    """Round sizes are padded to few: spans to powers of two, rows to steps that widen with the
    drafts a span. Without a GPU the same rounds run as they are called."""

    def __init__(self, replay: ReplayRound, spans: int) -> None:
        self.replay = replay
        self.spans = _powers(spans)
        self.width = replay.state.max_drafts
        self.longest = min(self.width, max(replay.drafters.values(), default=0))
        """Most steps that a drafter drafts; 0 where there is none."""
        self.costs: dict[Sizing, float] = {}
        """Seconds by (spans, rows, steps), measured; of texts as long as ``attend`` was told."""
        self.times = TimesByContext()
        """What ``costs`` follow the length of texts by; where it is empty, they do not."""
        self._step: int | None = None
        self._variants: dict[int, list[tuple[int, int | None]]] = {}
        self._tables_by: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def plain(self, requests: int, kind: Features, proposers: tuple[int, ...]) -> Size:
        """The smallest round that holds so many requests, without drafts and drafting."""
        spans = next(spans for spans in self.spans if spans >= requests)
        steps = 0 if any(index in self.replay.drafters for index in proposers) else None
        return Size(spans, spans, kind, proposers, steps)

    def depths(self, spans: int) -> list[int]:
        """How far drafters may draft in rounds of so many spans, rising: as far as some number of
        rows holds it all, or as far as they can. Trees are not cut short: their nodes are no steps.
        """
        if any(self.replay.controller.trees):
            return [self.longest]
        whole = (rows // spans - 1 for rows in self.rows(spans) if rows % spans == 0)
        return sorted({steps for steps in whole if 0 < steps < self.longest} | {self.longest})

    def variants(self, spans: int) -> list[tuple[int, int | None]]:
        """(rows, steps) of the rounds that are recorded. Drafters draft as far as they can
        whatever the rows; less far only where the rows hold just that, for every request."""
        known = self._variants.get(spans)
        if known is None:
            known = self._variants[spans] = self._work_out_variants(spans)
        return known

    def _work_out_variants(self, spans: int) -> list[tuple[int, int | None]]:
        rows = self.rows(spans)
        if not self.longest:
            return [(count, None) for count in rows]
        others = len(self.replay.controller.names) > len(self.replay.drafters)
        found: set[tuple[int, int | None]] = {
            (count, 0) for count in (rows if others else (spans,))
        }
        found |= {(count, self.longest) for count in rows}
        found |= {(spans * (1 + steps), steps) for steps in self.depths(spans)}
        return sorted(found, key=lambda variant: (variant[0], variant[1] or 0))

    def rows_for(self, spans: int, steps: int | None) -> list[int]:
        """The recorded numbers of rows with so many steps."""
        steps = self.as_measured(steps)
        return [rows for rows, own in self.variants(spans) if own == steps]

    def as_measured(self, steps: int | None) -> int | None:
        """Rounds in which drafters have no part are not measured apart: they take as long as those
        in which drafters sleep, or a little less."""
        return 0 if steps is None and self.longest else steps

    def seconds(self, size: Size) -> float:
        """What a round takes as measured; 0 if it was not."""
        return self.costs.get((size.spans, size.rows, self.as_measured(size.steps)), 0.0)

    def rows(self, spans: int) -> list[int]:
        """The numbers of rows that rounds of so many spans come in."""
        most = spans * (1 + self.width)
        steps = [spans * i // 4 for i in (4, 5, 6, 8, 10, 12, 16, 20, 36)]
        steps += [spans * (1 + i) for i in (16, 31, 63)]
        return sorted({rows for rows in steps if rows < most} | {spans, most})

    def attend(self, context: float) -> None:
        """Make ``costs`` those of texts of so many tokens, as nearly as steps of a quarter octave
        go: what was worked out from costs is worked out anew after each."""
        place = _STEPS * math.log2(max(context, 1.0))
        # A length that wavers between two steps keeps the one it has.
        if not self.times or (self._step is not None and abs(place - self._step) <= 0.75):
            return
        self._step = round(place)
        self.costs.update(self.times.at(2 ** (self._step / _STEPS)))
        self._tables_by.clear()

    def holding(self, base: Size, rows: int) -> Size:
        """The cheapest round of ``base``'s spans and steps that holds so many rows, or as many as
        there are; a larger one may cost less, and its spare rows go to less likely drafts."""
        spans, steps = base.spans, self.as_measured(base.steps)
        recorded = self.rows_for(spans, steps) or self.rows(spans)
        enough = [r for r in recorded if r >= rows] or recorded[-1:]
        return replace(
            base, rows=min(enough, key=lambda r: self.costs.get((spans, r, steps), float(r)))
        )

    def rows_with(self, base: Size, requests: int, drafts: int) -> int:
        """The rows that so many requests need: a round of one row a span verifies no draft, even
        where some of its spans are empty."""
        return max(requests + drafts, base.spans + (drafts > 0))

    def table(self, base: Size, requests: int) -> torch.Tensor:
        """float32 [n + 1]: seconds of a round of so many requests with 0 .. n drafts, at the steps
        of ``base``."""
        steps = self.as_measured(base.steps)
        key = base.spans, requests, steps
        known = self._tables_by.get(key)
        if known is not None:
            return known
        padded = self.rows_for(base.spans, steps)
        costs = [self.costs.get((base.spans, rows, steps), 1.0) for rows in padded]
        for at in reversed(range(len(costs) - 1)):
            costs[at] = min(costs[at], costs[at + 1])
        most = min(padded[-1] - base.spans, requests * self.width)
        # As ``rows_with`` has it. Among hundreds of requests one ends in nearly every round.
        rows = (requests + torch.arange(most + 1)).clamp(min=base.spans + 1)
        rows[0] = base.spans
        at = torch.searchsorted(torch.tensor(padded), rows)
        known = self._tables_by[key] = torch.tensor(costs)[at]
        return known

    def launch(self, size: Size) -> Report:
        """Run a round."""
        self.replay(size)
        scores = self._scores(self.replay.scores, size)
        return Report(
            self.replay.report.clone(), None if scores is None else scores.clone(), _nothing
        )

    @staticmethod
    def _scores(scores: torch.Tensor, size: Size) -> torch.Tensor | None:
        """The part of ``scores`` that a round of ``size`` writes."""
        if size.logprobs is None:
            return None
        return scores[: size.spans, :, : 2 + 2 * size.logprobs]

    def prepare(self) -> bool:
        """Record one more round that may be needed, while nobody waits; False: none is left."""
        return False

    def forget(self) -> None:
        """Record every round anew: what it does has changed."""

    def sizes(self, base: Size) -> list[Size]:
        """Every recorded round of ``base``'s spans, kind and proposers."""
        if not base.proposers:
            return [base]
        return [replace(base, rows=r, steps=steps) for r, steps in self.variants(base.spans)]

    def measure(self, blocks: int) -> None:
        """Fill ``costs``; ``blocks``: those of the KV pool. Here: guesses of a device on which rows
        are nearly free, whatever the context."""
        self.times.clear()
        self._tables_by.clear()
        for spans in self.spans:
            for rows, steps in self.variants(spans):
                self.costs[spans, rows, steps] = 1.0 + 0.001 * rows + 0.05 * (steps or 0)

    def looking(self, spans: int, kind: Features) -> list[Size]:
        """Every recorded round of so many spans with all proposers."""
        proposers = tuple(range(len(self.replay.controller.names))) if self.width else ()
        return self.sizes(self.plain(spans, kind, proposers))

    def _time_all(self, blocks: int, timed: Callable[[Size, Callable[[], None]], float]) -> None:
        """Fill ``times``, and ``costs`` by them, with what ``timed`` says of every greedy round
        with all proposers, every draft verified. It gets the round's size, and what it has to call
        before each run. The engine must be idle; it is as before afterwards."""
        replay = self.replay
        self.times.clear()
        for spans in self.spans:
            for context in contexts_to_time(replay, blocks, spans):
                with rehearsal(replay, blocks, context) as seat:
                    for size in self.looking(spans, Features()):
                        seconds = timed(size, partial(seat, spans))
                        self.times.enter((spans, size.rows, size.steps), context, seconds)
        self._step = None
        self.attend(MIDDLING)


def _nothing() -> None:
    pass


def _powers(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return sizes
