"""How many of the drafts on offer a round should verify."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from surefoot.speculation.paces import MIN_PACE


class Chosen(NamedTuple):
    """How many drafts to verify."""

    at: int
    """Which of the numbers to choose from, as an index."""
    gains: np.ndarray
    """float64 [B]: drafts of each request that are expected to be accepted."""


def best_drafts(
    chances: np.ndarray,
    drafts: np.ndarray,
    seconds: np.ndarray,
    apart: float = 0.0,
    plain: float | None = None,
    ahead: np.ndarray | None = None,
    margin: float = 1.0,
) -> Chosen:
    """Which of ``drafts`` promises the most committed tokens a second; the first, 0, if nothing
    promises ``margin`` times what no drafts do.

    ``chances`` float32 [B, K] as in ``Situation``, B at least 1; ``drafts`` int64 [n], rising from
    0, and ``seconds`` float64 [n] as of ``RoundCosts.table``; the likeliest drafts are taken.
    ``apart``: seconds of these that are spent on something else than tokens, prompts for instance.
    ``plain``: seconds of a round without drafts and proposers, None: of the first; in as long, each
    request is owed ``MIN_PACE`` tokens. Nobody falls further behind than it was ``ahead`` (float64
    [B], None: nobody was).
    """
    batch = len(chances)
    if batch == 1:
        one = chances[0].tolist()
        at, gain = best_of_one(one, drafts.tolist(), seconds.tolist(), apart, margin)
        return Chosen(at, np.full(1, gain))
    ranked = np.sort(chances, axis=None)[::-1]
    offered = int(np.count_nonzero(ranked > 0.0))
    if not offered:
        return Chosen(0, np.zeros(batch))
    gains = np.zeros(offered + 1)
    np.cumsum(ranked[:offered], out=gains[1:])
    enough = int(np.searchsorted(drafts, offered)) + 1
    drafts, seconds = drafts[:enough], seconds[:enough]
    taken = np.minimum(drafts, offered)
    owed = MIN_PACE * seconds / (float(seconds[0]) if plain is None else plain)
    rates = (batch + gains[taken]) / (seconds - apart)
    rates[0] *= margin
    # More than all of its drafts nobody gains.
    fair = 1.0 + _least(chances.sum(axis=1), ahead) + 1e-6
    rates[1:][owed[1:] > fair] = 0.0
    while best := int(rates.argmax()):
        each = gains_of(chances, int(taken[best]), ranked)
        fair = 1.0 + _least(each, ahead)
        if owed[best] <= fair:
            return Chosen(best, each)
        # Whoever gets least from these drafts gets no more from fewer.
        rates[1:best][owed[1:best] > fair] = 0.0
        rates[best] = 0.0
    return Chosen(0, np.zeros(batch))


def gains_of(chances: np.ndarray, count: int, ranked: np.ndarray | None = None) -> np.ndarray:
    """float64 [B]: what each request gains from the ``count`` likeliest drafts, of equal ones the
    first. ``ranked``: all chances, falling, if they are at hand."""
    if not count:
        return np.zeros(len(chances))
    flat = chances.reshape(-1)
    last = ranked[count - 1] if ranked is not None else np.partition(flat, -count)[-count]
    taken = flat > last
    taken[np.flatnonzero(flat == last)[: count - int(taken.sum())]] = True
    return (flat * taken).reshape(chances.shape).sum(axis=1, dtype=np.float64)


def _least(gains: np.ndarray, ahead: np.ndarray | None) -> float:
    """What who has least gains, with what it was ahead."""
    return float((gains if ahead is None else gains + ahead).min())


def best_of_one(
    chances: list[float], drafts: list[int], seconds: list[float], apart: float, margin: float
) -> tuple[int, float]:
    """``best_drafts`` for one request, which no other's drafts slow: the index, and the drafts that
    are expected to be accepted. Every round of a small model waits for it, and array operations
    would take several times as long as these few sums."""
    ranked = sorted([chance for chance in chances if chance > 0.0], reverse=True)
    best, rate, gain, taken = 0, margin * (1.0 / (seconds[0] - apart)), 0.0, 0
    gained, most = 0.0, len(ranked)
    for at in range(1, len(drafts)):
        if taken >= most:
            break
        before, taken = taken, drafts[at]
        for chance in ranked[before:taken]:
            gain += chance
        if (found := (1.0 + gain) / (seconds[at] - apart)) > rate:
            best, rate, gained = at, found, gain
    return best, gained


def nearest_count(
    chances: np.ndarray,
    drafts: np.ndarray,
    seconds: np.ndarray,
    apart: float = 0.0,
    plain: float | None = None,
    ahead: np.ndarray | None = None,
) -> int:
    """Which of ``drafts`` but none, as an index, lacks least for ``best_drafts`` to take it: by how
    much its round would have to be quicker. Arguments as there, with something on offer."""
    batch = len(chances)
    ranked = np.sort(chances, axis=None)[::-1]
    offered = int(np.count_nonzero(ranked > 0.0))
    gains = np.cumsum(ranked[:offered], dtype=np.float64)
    first = float(seconds[0])
    owing = (first if plain is None else plain) / MIN_PACE
    best, nearest = 0, 0.0
    for at, count in enumerate(np.minimum(drafts, offered).tolist()):
        if not count:
            continue
        fair = owing * (1.0 + _least(gains_of(chances, count, ranked), ahead))
        worth = apart + (first - apart) * (1.0 + gains[count - 1] / batch)
        near = min(fair, worth) / float(seconds[at])
        if near > nearest:
            best, nearest = at, near
        if count == offered:
            break
    return best
