"""What drawing tokens adds to a round that takes the likeliest, measured at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from surefoot.engine.timing import made_up_requests, time_round
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import LIKELIEST, SamplingCost
from surefoot.speculation.round import Round
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, UNFILTERED, Size

KINDS = UNFILTERED, DRAWN, ADJUSTED
"""The kinds of sampling that are told apart from the likeliest tokens."""
REPEATS = 2


@contextmanager
def drawing_requests(round_: Round) -> Iterator[Callable[[SamplingStages], None]]:
    """Made-up requests draw their tokens meanwhile: as one of ``KINDS`` says, with a filter or
    without, from when that is called with it."""
    params = round_.state.params
    kept = params.temperature.clone(), params.top_p.clone()

    def draw(kind: SamplingStages) -> None:
        params.temperature.fill_(1.0)
        params.top_p.fill_(0.95 if kind.top_p else 1.0)

    try:
        yield draw
    finally:
        params.temperature.copy_(kept[0])
        params.top_p.copy_(kept[1])


def sampling_costs(
    timed: Callable[[int, SamplingStages], float], plain: Mapping[int, float]
) -> dict[SamplingStages, SamplingCost]:
    """By kind, from rounds of two numbers of sampled rows: ``timed`` gives the seconds of one with
    some kind of sampling, ``plain`` those of each if the likeliest tokens are taken."""
    few, many = min(plain), max(plain)
    costs = {}
    for kind in KINDS:
        least, most = (max(0.0, timed(rows, kind) - plain[rows]) for rows in (few, many))
        row = max(0.0, most - least) / max(1, many - few)
        costs[kind] = SamplingCost(max(0.0, least - few * row), row)
    return costs


def time_sampling_called(
    round_: Round, blocks: int, seconds: float
) -> dict[SamplingStages, SamplingCost]:
    """Of rounds that are called, by kind; nothing where that would take more than ``seconds``."""
    state = round_.state
    room = min((blocks - 1) * state.block_size, state.history.shape[1] - state.max_drafts) - 1
    many = max(1, min(1 + state.max_drafts, room))
    with made_up_requests(round_, blocks, 1) as set_batch, drawing_requests(round_) as draw:

        def timed(rows: int, kind: SamplingStages) -> float:
            size = Size(1, rows, rows, kind, (), 0, verifies=rows > 1)
            draw(kind)
            found = []
            for _ in range(REPEATS):
                set_batch(1, 0)
                found.append(time_round(round_, size, rows + 1))
            return min(found)

        begun = time.perf_counter()
        plain = {rows: timed(rows, GREEDY) for rows in {1, many}}
        if (1 + len(KINDS)) * (time.perf_counter() - begun) > seconds:
            return dict.fromkeys(KINDS, LIKELIEST)
        return sampling_costs(timed, plain)
