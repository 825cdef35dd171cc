"""What drawing tokens adds to a round that takes the likeliest, measured at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from surefoot.engine.timing import made_up_requests, time_round
from surefoot.kernels.draws import READ
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import LIKELIEST, SamplingCost
from surefoot.speculation.round import Round
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size

KINDS = DRAWN, ADJUSTED
"""The kinds of sampling that are told apart from the likeliest tokens."""
REPEATS = 2
FILTERS = 1.0, 20, 0.95, READ
"""Temperature, top-k and top-p of rounds that are timed, and what becomes of their logits."""


@contextmanager
def drawing_requests(round_: Round) -> Iterator[None]:
    """Made-up requests draw their tokens meanwhile, with filters that are usual: of top-p alone,
    made-up texts would keep far more tokens than real ones."""
    params = round_.state.params
    tables = params.temperature, params.top_k, params.top_p, params.use
    kept = [table.clone() for table in tables]
    for table, value in zip(tables, FILTERS, strict=True):
        table.fill_(value)
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.copy_(before)


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
    with made_up_requests(round_, blocks, 1) as set_batch, drawing_requests(round_):

        def timed(rows: int, kind: SamplingStages) -> float:
            size = Size(1, rows, rows, kind, (), 0, verifies=rows > 1)
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
