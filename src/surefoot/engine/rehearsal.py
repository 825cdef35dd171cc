"""Rounds of made-up requests, to time them on an idle engine without a trace of it left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from surefoot.speculation.replay import ReplayRound

CONTEXTS = (128, 1024, 4096, 16384)
"""Tokens of the texts of rounds that are timed."""


def contexts_to_time(replay: ReplayRound, blocks: int, requests: int) -> list[int]:
    """The contexts to rehearse so many requests at, rising: ``CONTEXTS`` as far as a rehearsal goes
    and a KV pool of ``blocks`` holds keys of each request's own; longer texts of all of them would
    find no room either. One lies at least twice as far as the one before: over less, the line
    through their times would be noise. The shortest is always there, however small the pool."""
    state = replay.state
    own = (blocks - 1) // max(1, min(requests, replay.idle_slot)) * state.block_size
    most = max(1, min(_farthest(replay), own - state.max_drafts - 1))
    found = [min(CONTEXTS[0], most)]
    for context in CONTEXTS[1:]:
        if min(context, most) >= 2 * found[-1]:
            found.append(min(context, most))
    return found


@contextmanager
def rehearsal(replay: ReplayRound, blocks: int, context: int) -> Iterator[Callable[[int], None]]:
    """Yields ``seat(requests)``, to be called before every round: so many requests then decode
    behind ``context`` tokens (three quarters of the longest text, if that is less), with full
    offers of drafts. ``blocks``: those of the KV pool, block 0 (nobody's) included; a request's are
    its own as far as they suffice, for keys that all share stay in a cache and cost nothing to
    read.

    What rounds write is put back at the end, in the same tensors, for graphs have recorded these:
    slots, offers, and whatever the controller learnt. KV is not: nobody finds these blocks."""
    state = replay.state
    parts = (state, replay, replay.compiled, replay.controller, *replay.controller.estimators)
    kept = [
        (part, name, value, value.clone())
        for part in parts
        if part is not None
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]
    context = max(1, min(context, _farthest(replay)))
    _give_blocks(replay, blocks, context)
    try:
        yield lambda requests: _seat(replay, requests, context)
    finally:
        for part, name, value, before in kept:
            value.copy_(before)
            setattr(part, name, value)


def _longest(replay: ReplayRound) -> int:
    """Positions that a request may have: there are no rotations beyond."""
    return replay.state.history.shape[1] - replay.state.max_drafts - 1


def _farthest(replay: ReplayRound) -> int:
    """The longest context that a rehearsal goes to: drafts fit behind it."""
    return _longest(replay) * 3 // 4


def _give_blocks(replay: ReplayRound, blocks: int, context: int) -> None:
    state = replay.state
    width = -(-(context + state.max_drafts + 1) // state.block_size)
    requests = replay.idle_slot
    ids = torch.arange(requests * width, device=state.device) % max(1, blocks - 1)
    state.block_tables[:requests, :width] = 1 + ids.view(requests, width).int()


def _seat(replay: ReplayRound, requests: int, context: int) -> None:
    state, busy = replay.state, slice(0, min(requests, replay.idle_slot))
    replay.slots.fill_(replay.idle_slot)
    replay.slots[busy] = torch.arange(busy.stop, device=state.device)
    replay.alive.zero_()
    replay.alive[busy] = 1
    state.length[busy] = context
    state.computed[busy] = context - 1
    state.limit[busy] = _longest(replay)
    replay.lengths[busy] = state.max_drafts
    replay.tokens[busy] = 0
    # Later drafts are less likely, so that rows go to all requests alike.
    steps = torch.arange(1, state.max_drafts + 1, device=state.device)
    replay.chances[busy] = 0.5**steps * (context + steps <= _longest(replay))
