"""Records the rounds of an engine on a GPU when it starts, and measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.sampling_times import drawing_requests, sampling_costs
from surefoot.engine.timing import contexts_to_time, made_up_requests
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, SamplingCost
from surefoot.speculation.recorded_costs import RecordedCosts, RecordedSize
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size

Curve = list[tuple[int, float]]
"""(Tokens of every text, seconds), rising."""


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
    rounds: RecordedRounds, spans: int, kind: SamplingStages, action: Action
) -> list[Size]:
    """Rounds of so many spans that propose so, by rows; the first verifies no drafts. With drafters
    at full depth or asleep, any number of rows; with another depth just as many as hold that for
    every request; where nobody proposes, none for drafts, unless nobody ever does on the device."""
    base = Size(spans, spans, spans, kind, *action)
    proposers, steps = action
    if not proposers and rounds.round.proposers:
        return [base]
    rows = rounds.rows(spans)
    if 0 < steps < rounds.longest:
        rows = [count for count in rows if count in (spans, spans * (1 + steps))]
    return [replace(base, rows=each, samples=each, verifies=each > spans) for each in rows]


def prompt_actions(rounds: RecordedRounds) -> list[Action]:
    """What rounds with prompts propose with, of ``actions_of``: all drafters or none, and these as
    far as they can."""
    round_ = rounds.round
    everything = tuple(range(len(round_.proposers)))
    lookups = tuple(index for index in everything if index not in round_.drafters)
    chosen = {(): 0, lookups: 0, everything: rounds.longest}
    return list(chosen.items())


def prompt_sizes(
    rounds: RecordedRounds, spans: int, kind: SamplingStages, action: Action
) -> list[Size]:
    """Rounds with prompts, of so many spans: without drafts, and where somebody proposes with as
    many as there is room for."""
    return [
        Size(
            spans, rows, rounds.prompt_samples(spans, rows, drafts), kind, *action, verifies=drafts
        )
        for drafts in ((False, True) if action[0] else (False,))
        for rows in rounds.prompt_rows
        if rows > spans
    ]


def usual_sizes(rounds: RecordedRounds, kind: SamplingStages) -> list[Size]:
    """Rounds that planners choose among, for one kind of sampling."""
    decoding = (
        decoding_sizes(rounds, spans, kind, action)
        for spans in rounds.spans
        for action in actions_of(rounds, spans)
    )
    prompts = (
        prompt_sizes(rounds, spans, kind, action)
        for spans in rounds.prompt_spans
        for action in prompt_actions(rounds)
    )
    return [size for sizes in (*decoding, *prompts) for size in sizes]


def _without_drafters(rounds: RecordedRounds, size: Size) -> list[Size]:
    """The same round for requests that no drafter serves, if there are drafters."""
    drafters = rounds.round.drafters
    able = drafters and not any(index in drafters for index in size.proposers)
    return [replace(size, catches_up=False)] if able else []


def measure_recorded(rounds: RecordedRounds, blocks: int) -> dict[SamplingStages, RecordedCosts]:
    """Record the greedy rounds and time them, and record those for drawn text. Those with penalties
    and biases are recorded in idle moments. Returns costs by kind of sampling."""
    times: dict[RecordedSize, Curve] = {}
    for spans in rounds.spans:
        _time_decoding(rounds, blocks, spans, times)
    prompts = _time_prompts(rounds, blocks, times)
    proposing = prompt_actions(rounds)
    costs = {GREEDY: RecordedCosts(times, ExactCosts(*prompts), proposing)}
    for kind, cost in _time_sampling(rounds, blocks).items():
        slower = {
            size: [(context, seconds + cost.of(size.samples)) for context, seconds in curve]
            for size, curve in times.items()
        }
        costs[kind] = RecordedCosts(slower, ExactCosts(*prompts, cost), proposing)
    rounds.costs = costs
    for size in (*usual_sizes(rounds, GREEDY), *usual_sizes(rounds, DRAWN)):
        for each in (size, *_without_drafters(rounds, size)):
            rounds.graph(each)
    rounds.wanted += usual_sizes(rounds, ADJUSTED)
    return costs


def _time_sampling(rounds: RecordedRounds, blocks: int) -> dict[SamplingStages, SamplingCost]:
    """By kind, from plain rounds of the fewest and of most requests."""
    round_ = rounds.round
    context = contexts_to_time(round_, blocks, rounds.spans[-1])[0]
    with made_up_requests(round_, blocks, context) as set_batch, drawing_requests(round_):

        def timed(spans: int, kind: SamplingStages) -> float:
            size = Size(spans, spans, spans, kind, *NOTHING)
            return rounds.time(size, partial(set_batch, spans, 0), 2)

        plain = {spans: timed(spans, GREEDY) for spans in {rounds.spans[0], rounds.spans[-1]}}
        return sampling_costs(timed, plain)


def _time_decoding(
    rounds: RecordedRounds, blocks: int, spans: int, times: dict[RecordedSize, Curve]
) -> None:
    """Record rounds of so many spans and time them, by size and context: those in which everybody
    proposes behind texts of all lengths, others behind the shortest and the longest."""
    round_, actions = rounds.round, actions_of(rounds, spans)
    contexts = contexts_to_time(round_, blocks, spans)
    for context in contexts:
        with made_up_requests(round_, blocks, context) as set_batch:
            at_an_end = context in (contexts[0], contexts[-1])
            for action in actions if at_an_end else actions[-1:]:
                for size in decoding_sizes(rounds, spans, GREEDY, action):
                    seconds = rounds.time(size, partial(set_batch, spans, 0), 2)
                    known = RecordedSize(spans, size.rows, size.rows, action)
                    times.setdefault(known, []).append((context, seconds))


def _time_prompts(
    rounds: RecordedRounds, blocks: int, times: Mapping[RecordedSize, Curve]
) -> tuple[Sequence[int], Sequence[float], dict[int, Proposing]]:
    """Record rounds with prompts, and time those in which nobody proposes by rows. ``times``: of
    rounds without prompts; what proposing takes is seen in those of most spans. Returns what
    ``ExactCosts`` takes."""
    round_, most = rounds.round, rounds.prompt_spans[-1]
    plain: Curve = []
    with made_up_requests(round_, blocks, 128) as set_batch:
        size = decoding_sizes(rounds, rounds.spans[0], GREEDY, NOTHING)[0]
        plain.append((1, rounds.time(size, partial(set_batch, 1, 0), 2)))
        for spans in rounds.prompt_spans:
            for action in prompt_actions(rounds):
                for size in prompt_sizes(rounds, spans, GREEDY, action):
                    rounds.graph(size)
                    if spans == most and action == NOTHING:
                        plain.append((size.rows, _time_chunk(rounds, set_batch, size)))
    rows, seconds = zip(*plain, strict=True)
    spans = rounds.spans[-1]
    nobody, everybody = (
        times[RecordedSize(spans, spans, spans, action)][0][1]
        for action in (NOTHING, actions_of(rounds, spans)[-1])
    )
    all_of_them = everybody - nobody
    proposing = {
        index: Proposing(
            max(all_of_them / len(round_.proposers) / max(1, round_.drafters.get(index, 1)), 1e-6),
            longest=round_.drafters.get(index, 0),
        )
        for index in range(len(round_.proposers))
    }
    return rows, seconds, proposing


def _time_chunk(rounds: RecordedRounds, set_batch: Callable[[int, int], None], size: Size) -> float:
    chunk = min(size.rows, rounds.round.state.history.shape[1] * 3 // 4)
    return rounds.time(size, partial(set_batch, 1, chunk), 1)
