"""How long rounds take, measured on an idle engine with made-up requests, without a trace left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from surefoot.sampling.params import SamplingStages
from surefoot.speculation.round import Round
from surefoot.speculation.size import Size

CONTEXTS = (128, 1024, 4096, 16384)
"""Tokens of the texts of rounds that are timed."""
KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""Rows of rounds that are timed where rounds are called."""
REPEATS = 3
TIMED_ROWS = 2048
"""Rows of rounds with prompts, up to which it is timed what else there is to such a round."""
CHUNK_ROWS = 16
"""Of the prompt chunks that are timed far from a prompt's beginning."""


class SetBatch(Protocol):
    """Called before every round: so many requests, of which the first runs ``chunk`` rows of a
    prompt after ``before`` tokens, unless that is 0."""

    def __call__(self, requests: int, chunk: int, before: int = 0) -> None: ...


def contexts_to_time(round_: Round, blocks: int, requests: int) -> list[int]:
    """The contexts to time so many requests at, rising: ``CONTEXTS`` as far as texts go and a KV
    pool of ``blocks`` holds keys of each request's own; longer texts of all of them would find no
    room either. One lies at least twice as far as the one before: over less, the line through their
    times would be noise. The shortest is always there, however small the pool."""
    state = round_.state
    own = (blocks - 1) // max(1, min(requests, state.padding_slot)) * state.block_size
    most = max(1, min(_farthest(round_), own - state.max_drafts - 1))
    found = [min(CONTEXTS[0], most)]
    for context in CONTEXTS[1:]:
        if min(context, most) >= 2 * found[-1]:
            found.append(min(context, most))
    return found


@contextmanager
def made_up_requests(round_: Round, blocks: int, context: int) -> Iterator[SetBatch]:
    """Yields ``set_batch``: requests then decode behind ``context`` tokens (three quarters of the
    longest text, if that is less) with full offers of drafts; the first may run a prompt chunk.
    ``blocks``: those of the KV pool, block 0 (nobody's) included; a request's are its own as far as
    they suffice, for keys that all share stay in a cache and cost nothing to read.

    What rounds write is put back at the end, in the same tensors, for recorded rounds hold these:
    slots, offers, and whatever the controller learnt. KV is not: nobody finds these blocks."""
    books, controller = round_.books, round_.controller
    parts = (round_.state, round_, books, books.offers, controller, *controller.estimators)
    kept = [
        (part, name, value, value.clone())
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]
    context = max(1, min(context, _farthest(round_)))
    _give_blocks(round_, blocks, context)
    _write_texts(round_)
    try:
        yield partial(_set_batch, round_, context)
    finally:
        round_.keeping_up.backlog.clear()
        for part, name, value, before in kept:
            value.copy_(before)
            setattr(part, name, value)


def _longest(round_: Round) -> int:
    """Positions that a request may have: there are no rotations beyond."""
    return round_.state.history.shape[1] - round_.state.max_drafts - 1


def _farthest(round_: Round) -> int:
    """The longest context that is timed: drafts fit behind it."""
    return _longest(round_) * 3 // 4


def _give_blocks(round_: Round, blocks: int, context: int) -> None:
    state = round_.state
    width = -(-(context + state.max_drafts + 1) // state.block_size)
    requests = state.padding_slot
    ids = torch.arange(requests * width, device=state.device) % max(1, blocks - 1)
    state.block_tables[:requests, :width] = 1 + ids.view(requests, width).int()


def _write_texts(round_: Round) -> None:
    """Any tokens: equal rows would take less power, and so less time, than those of real texts."""
    history = round_.state.history
    generator = torch.Generator(history.device).manual_seed(0)
    history.random_(0, round_.state.vocab_size, generator=generator)


def _set_batch(round_: Round, context: int, requests: int, chunk: int, before: int = 0) -> None:
    state, offers = round_.state, round_.books.offers
    busy = slice(0, min(requests, state.padding_slot))
    round_.slots.fill_(state.padding_slot)
    round_.slots[busy] = torch.arange(busy.stop, device=state.device)
    round_.quota.fill_(1)
    state.alive.zero_()
    state.alive[busy] = 1
    state.length[busy] = context
    state.computed[busy] = context - 1
    state.limit[busy] = _longest(round_)
    offers.lengths[busy] = state.max_drafts
    offers.tokens[busy] = state.history[busy, : state.max_drafts]
    if offers.parents is not None:
        # Two branches: with one, they would take no longer than chains.
        offers.parents[busy] = torch.arange(-2, state.max_drafts - 2, device=state.device).clamp(-1)
    # Later drafts are less likely, so that rows go to all requests alike.
    steps = torch.arange(1, state.max_drafts + 1, device=state.device)
    offers.chances[busy] = 0.5**steps * (context + steps <= _longest(round_))
    if chunk:
        # In the first slot; the prompt's keys lie wherever there are blocks.
        width = -(-(before + chunk) // state.block_size)
        known = state.block_tables.shape[1]
        state.block_tables[0, :width] = 1 + torch.arange(min(width, known), device=state.device) % (
            max(1, int(state.block_tables.max()))
        )
        round_.quota[0] = chunk
        state.length[0] = min(before + chunk + 1, _longest(round_))
        state.computed[0] = before
        offers.chances[0] = 0


def time_called(
    round_: Round, blocks: int, most_rows: int, seconds: float
) -> tuple[list[int], list[float]]:
    """(Rows, seconds) of rounds called with just the rows that they need, nobody proposing: the
    fastest of a few each, within ``seconds`` in all. Larger numbers of rows are left out when time
    runs out; rounds correct what is concluded from these."""
    state = round_.state
    room = min((blocks - 1) * state.block_size, _longest(round_)) - 1
    started = time.perf_counter()
    knots: list[int] = []
    times: list[float] = []
    with made_up_requests(round_, blocks, 1) as set_batch:
        for rows in [rows for rows in KNOTS if rows <= min(most_rows, room)]:
            spent = time.perf_counter() - started
            if len(times) >= 2 and spent + (REPEATS + 1) * times[-1] > seconds:
                break
            knots.append(rows)
            # The very first round is the slowest.
            repeats = REPEATS + (not times)
            times.append(min(_time_called(round_, set_batch, rows) for _ in range(repeats)))
    return knots, times


def _time_called(round_: Round, set_batch: SetBatch, rows: int) -> float:
    """Seconds of a round of one request and its drafts; of a prompt chunk, where that is more."""
    state = round_.state
    drafts = min(rows - 1, state.max_drafts)
    chunk = rows if rows > 1 + state.max_drafts else 0
    set_batch(1, chunk)
    samples = 1 if chunk else rows
    size = Size(1, rows, samples, SamplingStages(), (), 0, verifies=drafts > 0 and not chunk)
    return time_round(round_, size, rows + 1)


def time_round(round_: Round, size: Size, keys: int) -> float:
    """Seconds of a round that is called now."""
    begun = time.perf_counter()
    round_(size, keys)
    if round_.state.device.type == "cuda":
        torch.cuda.synchronize(round_.state.device)
    return time.perf_counter() - begun


def time_keys(round_: Round, blocks: int, seconds: float) -> float:
    """Seconds that a row of a prompt chunk takes longer for each token before it: least times of a
    few rounds, one of each at least and for ``seconds`` in all. 0 where no text is long enough to
    tell."""
    room = min(_farthest(round_), (blocks - 1) * round_.state.block_size)
    before = min(CONTEXTS[1], room) - CHUNK_ROWS
    if before < CONTEXTS[0]:
        return 0.0
    best = {0: math.inf, before: math.inf}
    started = time.perf_counter()
    size = Size(1, CHUNK_ROWS, 1, SamplingStages(), (), 0)
    with made_up_requests(round_, blocks, before + CHUNK_ROWS) as set_batch:
        for _ in range(1 + REPEATS):
            for place in best:
                set_batch(1, CHUNK_ROWS, place)
                taken = time_round(round_, size, place + CHUNK_ROWS + 1)
                best[place] = min(best[place], taken)
            if time.perf_counter() - started > seconds:
                break
    return max(0.0, best[before] - best[0]) / (before * CHUNK_ROWS)


def time_keeping_up(
    round_: Round, blocks: int, size: Size, timed: Callable[[Size, Callable[[], None]], float]
) -> None:
    """Have ``round_`` know what drafters take to keep up with a row: by how much longer rounds with
    a prompt take then, least times of a few of each. ``size``: of such a round, in which nobody
    proposes. ``timed`` gives the seconds of one, and prepares it by its second argument."""
    if not round_.drafters:
        return
    chunk = min(size.rows, _farthest(round_))
    seconds = {True: math.inf, False: math.inf}
    with made_up_requests(round_, blocks, 1) as set_batch:
        for _ in range(REPEATS):
            for keeps in seconds:
                taken = timed(replace(size, catches_up=keeps), partial(set_batch, 1, chunk))
                seconds[keeps] = min(seconds[keeps], taken)
    round_.keeping_up.row_seconds.observe(chunk, max(0.0, seconds[True] - seconds[False]))


@dataclass(frozen=True)
class ProposingTimes:
    """Seconds of a proposer's offers, with the catch-up on a round where drafters put it off while
    nobody drafts."""

    shortest: float
    """One draft, for one request."""
    one: float
    """As many as it drafts, for one request."""
    few: float
    """Likewise, for ``requests``."""
    requests: int


def time_proposing(round_: Round, blocks: int, seconds: float) -> dict[int, ProposingTimes]:
    """By proposer, the fastest of a few each, within ``seconds`` in all."""
    found = {}
    started = time.perf_counter()
    most = min(4, round_.state.padding_slot)
    with made_up_requests(round_, blocks, 64) as set_batch:
        for index in range(len(round_.proposers)):
            spent: dict[tuple[int, int], float] = {}
            for requests, steps in ((1, 1), (1, round_.longest), (most, round_.longest)):
                size = Size(requests, requests, requests, SamplingStages(), (index,), steps)
                best = float("inf")
                for _ in range(REPEATS):
                    set_batch(requests, 0)
                    best = min(best, _time_proposing(round_, index, size))
                    if time.perf_counter() - started > seconds:
                        break
                spent[requests, steps] = best
            times = spent[1, 1], spent[1, round_.longest], spent[most, round_.longest]
            found[index] = ProposingTimes(*times, most)
    return found


def _time_proposing(round_: Round, index: int, size: Size) -> float:
    keys = min(128, _longest(round_))
    if index in round_.drafters and round_.keeping_up.backlog.room:
        # Leaves what there is to catch up on.
        round_(replace(size, proposers=(), steps=0), keys)
    begun = time.perf_counter()
    round_.keeping_up.catch_up()
    round_.propose(index, round_.slots[: size.spans], size, keys)
    if round_.state.device.type == "cuda":
        torch.cuda.synchronize(round_.state.device)
    return time.perf_counter() - begun
