"""Records the rounds of an engine on a GPU when it starts, and measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.rounds import CROWD
from surefoot.engine.sampling_times import drawing_requests, sampling_costs
from surefoot.engine.timing import TIMED_ROWS, contexts_to_time, made_up_requests, time_keeping_up
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, SamplingCost
from surefoot.speculation.recorded_costs import PromptRounds, RecordedCosts, RecordedSize
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size

SHALLOW = 2
"""Nearly all drafts of a crowd that are verified are the first or second of their request: the best
256 drafts of 512 texts give 1.44 tokens a round, drawn at 0.8 1.34, whether two or seven were made
for each."""
TREE_ROWS, TREE_ROWS_OF_CROWD, DEEP_ROWS_OF_CROWD = (2, 3, 5, 9, 17), (1.25, 1.5, 2, 3), (2, 3, 5)
"""Rows of each request where drafts are trees of fewer levels than they may have, and of a crowd's
where they have all: their best drafts are worth verifying in any number."""
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
    every request, and of a crowd's first drafts any part. Where drafts are trees, a few numbers of
    rows; where nobody proposes, none for drafts, unless nobody ever does on the device."""
    base = Size(spans, spans, spans, kind, *action)
    proposers, steps = action
    if not proposers and rounds.round.proposers:
        return [base]
    counts = rounds.rows(spans)
    rows = [n for n in counts if n == spans or _recorded(rounds, spans, steps, n / spans)]
    return [replace(base, rows=each, samples=each, verifies=each > spans) for each in rows]


def _recorded(rounds: RecordedRounds, spans: int, steps: int, each: float) -> bool:
    """Whether rounds with ``each`` rows a request are, where drafters make so many steps."""
    deep, crowd = steps == rounds.longest, spans >= CROWD
    if not steps or (deep and not (rounds.round.trees and crowd and rounds.weighed)):
        return True
    if not rounds.round.trees:
        return each == 1 + steps or (crowd and steps <= SHALLOW and each < 1 + steps)
    if not crowd:
        return each in TREE_ROWS
    return each in (DEEP_ROWS_OF_CROWD if deep else TREE_ROWS_OF_CROWD)


def prompt_actions(rounds: RecordedRounds, spans: int) -> list[Action]:
    """What rounds with prompts, of so many spans, propose with, of ``actions_of``: all drafters or
    none, and these to one depth."""
    round_ = rounds.round
    everything = tuple(range(len(round_.proposers)))
    lookups = tuple(index for index in everything if index not in round_.drafters)
    chosen = {(): 0, lookups: 0, everything: rounds.prompt_depth(spans)}
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
        for action in prompt_actions(rounds, spans)
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
    chunks = prompt_sizes(rounds, rounds.prompt_spans[0], GREEDY, NOTHING)
    if timed := [size for size in chunks if size.rows <= TIMED_ROWS]:
        time_keeping_up(rounds.round, blocks, timed[-1], rounds.time)

    def beside(*sampling: SamplingCost) -> dict[int, PromptRounds]:
        return {
            spans: PromptRounds(
                ExactCosts(*each, *sampling),
                prompt_actions(rounds, spans),
                rounds.most_samples(spans),
            )
            for spans, each in prompts.items()
        }

    costs = {GREEDY: RecordedCosts(times, beside())}
    for kind, cost in _time_sampling(rounds, blocks).items():
        slower = {
            size: [(context, seconds + cost.of(size.samples)) for context, seconds in curve]
            for size, curve in times.items()
        }
        costs[kind] = RecordedCosts(slower, beside(cost))
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
) -> dict[int, tuple[Sequence[int], Sequence[float], dict[int, Proposing]]]:
    """Record rounds with prompts, and time those in which nobody proposes, by what they are padded
    to and by rows. ``times``: of rounds without prompts, which tell what proposing takes. Returns
    what ``ExactCosts`` takes, by the spans of such rounds."""
    curves: dict[int, dict[int, float]] = {}
    with made_up_requests(rounds.round, blocks, 128) as set_batch:
        for spans in reversed(rounds.prompt_spans):
            for action in prompt_actions(rounds, spans):
                for size in prompt_sizes(rounds, spans, GREEDY, action):
                    rounds.graph(size)
            plain = prompt_sizes(rounds, spans, GREEDY, NOTHING)
            # The longest ones take seconds, and what the spans are padded to hardly matters.
            timed = [size for size in plain if not curves or size.rows <= TIMED_ROWS]
            curve = {size.rows: _time_chunk(rounds, set_batch, size) for size in timed}
            if not curve:
                # There is no room for prompts beside so many requests.
                size = decoding_sizes(rounds, spans, GREEDY, NOTHING)[0]
                curve = {size.rows: rounds.time(size, partial(set_batch, spans, 0), 2)}
            last, most = max(curve), next(iter(curves.values()), curve)
            more = curve[last] - most[last] if last in most else 0.0
            curves[spans] = curve | {n: most[n] + more for n in most if n > last}
    found: dict[int, tuple[Sequence[int], Sequence[float], dict[int, Proposing]]] = {}
    for spans, curve in curves.items():
        # Fewer rows are padded to those of the smallest round.
        known = {1: next(iter(curve.values()))} | curve
        found[spans] = list(known), list(known.values()), _proposing(rounds, spans, times)
    return found


def _proposing(
    rounds: RecordedRounds, spans: int, times: Mapping[RecordedSize, Curve]
) -> dict[int, Proposing]:
    """What proposing adds to rounds of so many spans, by ``times`` of rounds without prompts."""
    round_ = rounds.round
    lookups = tuple(i for i in range(len(round_.proposers)) if i not in round_.drafters)
    everything = prompt_actions(rounds, spans)[-1]

    def seconds(action: Action) -> float:
        return times[RecordedSize(spans, spans, spans, action)][0][1]

    nobody, everybody = seconds(NOTHING), seconds(everything)
    looking = seconds((lookups, 0)) - nobody if lookups else 0.0
    drafting = everybody - nobody - looking
    found = {index: Proposing(max(looking / len(lookups), 1e-6)) for index in lookups}
    for index, longest in round_.drafters.items():
        step = drafting / len(round_.drafters) / max(1, min(longest, everything[1]))
        found[index] = Proposing(max(step, 1e-6), longest=longest)
    return found


def _time_chunk(rounds: RecordedRounds, set_batch: Callable[[int, int], None], size: Size) -> float:
    chunk = min(size.rows, rounds.round.state.history.shape[1] * 3 // 4)
    return rounds.time(size, partial(set_batch, 1, chunk), 1)
