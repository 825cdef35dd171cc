"""Records the rounds of an engine on a GPU when it starts, and measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.timing import contexts_to_time, made_up_requests
from surefoot.sampling.params import Features
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.size import DRAWN, GREEDY, Size

_RECENT = 0.05


def actions_of(rounds: RecordedRounds, spans: int) -> list[Action]:
    """What rounds of so many spans may propose with: nothing first, everything last."""
    round_ = rounds.round
    drafters = tuple(round_.drafters)
    lookups = tuple(i for i in range(len(round_.proposers)) if i not in round_.drafters)
    found: list[Action] = [NOTHING]
    if lookups:
        found.append((lookups, 0))
    for depth in rounds.depths(spans) if drafters else ():
        found += [(drafters, depth)] if lookups else []
        found.append((tuple(sorted((*lookups, *drafters))), depth))
    return found


def decoding_sizes(
    rounds: RecordedRounds, spans: int, kind: Features, action: Action
) -> list[Size]:
    """Rounds of so many spans that propose so, by rows; the first verifies no drafts."""
    base = Size(spans, spans, spans, kind, *action)
    if not rounds.round.proposers:
        return [base]
    return [
        replace(base, rows=rows, samples=rows, verifies=rows > spans) for rows in rounds.rows(spans)
    ]


def prompt_sizes(
    rounds: RecordedRounds, spans: int, kind: Features, action: Action, verifies: bool
) -> list[Size]:
    """Rounds with prompts, of so many spans."""
    counts = rounds.prompt_samples(spans)
    samples = counts[-1] if verifies else counts[0]
    base = Size(spans, spans, samples, kind, *action, verifies=verifies)
    return [replace(base, rows=rows) for rows in rounds.prompt_rows if rows > samples]


class RecordedCosts:
    """Seconds of recorded rounds: measured at the start by spans, rows and context, and who
    proposes; one factor for all follows what rounds take."""

    def __init__(self, rounds: RecordedRounds) -> None:
        self.rounds = rounds
        self.noise = 0.02
        self.scale = 1.0
        self.seconds: dict[tuple[int, int], list[tuple[int, float]]] = {}
        """By spans and rows, (context, seconds) of rounds in which all propose."""
        self.saved: dict[tuple[int, Action], float] = {}
        """By spans and action, what is saved against all proposing."""
        self.prompts: list[tuple[int, float]] = []
        """(Rows, seconds) of rounds with prompts."""
        self._actions: dict[int, list[Action]] = {}

    def spans(self, requests: int) -> int:
        return next(spans for spans in self.rounds.spans if spans >= requests)

    def actions(self, requests: int) -> Sequence[Action]:
        """As ``RoundCosts`` has it."""
        spans = self.spans(requests)
        if spans not in self._actions:
            self._actions[spans] = actions_of(self.rounds, spans)
        return self._actions[spans]

    def at(self, spans: int, rows: int, context: float) -> float:
        points = self.seconds.get((spans, rows))
        if not points:
            return 1.0
        contexts, values = zip(*points, strict=True)
        if context > contexts[-1] and len(points) > 1:
            slope = (values[-1] - values[-2]) / (contexts[-1] - contexts[-2])
            return values[-1] + max(0.0, slope) * (context - contexts[-1])
        return float(np.interp(context, contexts, values))

    def table(
        self, requests: int, prompt_rows: int, action: Action, most: int, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``RoundCosts`` has it."""
        spans = self.spans(max(requests, 1))
        saved = self.saved.get((spans, action), 0.0)
        if prompt_rows:
            drafts = np.unique(np.array([0, most // 2, most]))
            rows, seconds = zip(*self.prompts, strict=True)
            found = np.interp(requests + prompt_rows + drafts, rows, seconds)
            return drafts, self.scale * np.maximum(found - saved, 1e-6)
        sizes = [rows for (own, rows) in self.seconds if own == spans and rows > spans]
        stairs = [(0, self.at(spans, spans, context))]
        stairs += [(rows - requests, self.at(spans, rows, context)) for rows in sorted(sizes)]
        kept: list[tuple[int, float]] = []
        for drafts, seconds in reversed(stairs):
            if not kept or seconds < kept[-1][1]:
                kept.append((drafts, seconds))
            if drafts == 0 and kept[-1][0] != 0:
                kept.append((0, seconds))
        kept.reverse()
        reach = next((i for i, (drafts, _) in enumerate(kept) if drafts >= most), len(kept) - 1)
        kept = kept[: reach + 1]
        numbers = np.array([drafts for drafts, _ in kept])
        values = np.array([seconds for _, seconds in kept])
        return numbers, self.scale * np.maximum(values - saved, 1e-6)

    def size_seconds(self, size: Size) -> float:
        """Believed seconds of a size, for choosing among neighbours."""
        return self.at(size.spans, size.rows, 1024.0)

    def observe(
        self,
        requests: int,
        prompt_rows: int,
        action: Action,
        drafts: int,
        context: float,
        seconds: float,
    ) -> None:
        """As ``RoundCosts`` has it."""
        numbers, values = self.table(requests, prompt_rows, action, drafts, context)
        believed = float(values[min(int(np.searchsorted(numbers, drafts)), len(values) - 1)])
        ratio = min(max(seconds / believed, 0.5), 2.0)
        self.scale *= ratio**_RECENT


def measure_recorded(rounds: RecordedRounds, blocks: int) -> RecordedCosts:
    """Record the greedy rounds and time them. The rest is recorded in idle moments."""
    round_, costs = rounds.round, RecordedCosts(rounds)
    rounds.cost = costs.size_seconds
    for spans in rounds.spans:
        actions = actions_of(rounds, spans)
        sizes = decoding_sizes(rounds, spans, GREEDY, actions[-1])
        for context in contexts_to_time(round_, blocks, spans):
            with made_up_requests(round_, blocks, context) as seat:
                for size in sizes:
                    seconds = rounds.time(size, lambda: seat(spans, 0), 2)
                    costs.seconds.setdefault((spans, size.rows), []).append((context, seconds))
        with made_up_requests(round_, blocks, 128) as seat:
            for action in actions[:-1]:
                size = replace(sizes[0], proposers=action[0], steps=action[1])
                saved = costs.at(spans, spans, 128) - rounds.time(size, lambda: seat(spans, 0), 2)
                costs.saved[spans, action] = max(0.0, saved)
        for action in actions[:-1]:
            rounds.wanted += decoding_sizes(rounds, spans, GREEDY, action)
        rounds.wanted += decoding_sizes(rounds, spans, DRAWN, actions[-1])
    spans = rounds.prompt_spans[-1]
    everything = actions_of(rounds, spans)[-1]
    with made_up_requests(round_, blocks, 128) as seat:
        for own in rounds.prompt_spans:
            for verifies in (False, True) if round_.proposers else (False,):
                for size in prompt_sizes(rounds, own, GREEDY, everything, verifies):
                    rounds.graph(size)
                    if own == spans and not verifies:
                        chunk = min(size.rows, round_.state.history.shape[1] * 3 // 4)
                        seconds = rounds.time(size, lambda: seat(1, chunk), 1)  # noqa: B023
                        costs.prompts.append((size.rows, seconds))
            plain = prompt_sizes(rounds, own, GREEDY, NOTHING, False)
            rounds.wanted += plain
    return costs
