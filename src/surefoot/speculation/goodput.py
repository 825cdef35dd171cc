"""How many of the drafts on offer a round should verify."""

from __future__ import annotations

import numpy as np

MIN_PACE = 0.95
"""No request's expected pace falls below this share of its pace without drafts in that batch."""


def best_count(
    chances: np.ndarray,
    drafts: np.ndarray,
    seconds: np.ndarray,
    apart: float = 0.0,
    margin: float = 1.0,
    min_pace: float = MIN_PACE,
    lasting: np.ndarray | None = None,
) -> int:
    """Which of ``drafts`` promises the most committed tokens a second, as an index;
    0 if nothing promises ``margin`` times what no drafts do.

    ``chances`` float32 [B, K] as in ``Situation``, B at least 1; ``drafts`` int64 [n], rising from
    0, and ``seconds`` float64 [n] as of ``RoundCosts.table``; the likeliest drafts are taken.
    ``apart``: seconds of these that are spent on something else than tokens, prompts for instance.
    No request's pace, ``(1 + its accepted drafts) / seconds``, falls below ``min_pace`` times its
    pace without drafts. ``lasting`` bool [B]: the requests for which that holds, None: all; who is
    about to end is not slowed for long.
    """
    batch = len(chances)
    if batch == 1:
        return _best_of_one(chances[0].tolist(), drafts.tolist(), seconds.tolist(), apart, margin)
    held = chances if lasting is None else chances[lasting]
    ranked = np.sort(chances, axis=None)[::-1]
    offered = int(np.count_nonzero(ranked > 0.0))
    if not offered:
        return 0
    gains = np.zeros(offered + 1)
    np.cumsum(ranked[:offered], out=gains[1:])
    enough = int(np.searchsorted(drafts, offered)) + 1
    drafts, seconds = drafts[:enough], seconds[:enough]
    taken = np.minimum(drafts, offered)
    plain = float(seconds[0])
    rates = (batch + gains[taken]) / (seconds - apart)
    rates[0] *= margin
    if len(held):
        # More than all of its drafts nobody gains.
        poorest = float(held.sum(axis=1).min()) + 1e-6
        rates[1:][seconds[1:] * min_pace > plain * (1.0 + poorest)] = 0.0
    while best := int(rates.argmax()):
        floor = min_pace * float(seconds[best]) / plain - 1.0
        if floor <= 0.0 or not len(held):
            return best
        gained = _poorest(chances, ranked, int(taken[best]), lasting)
        if gained >= floor:
            return best
        # Whoever gains least from these drafts gains no more from fewer.
        rates[1:best][seconds[1:best] * min_pace > plain * (1.0 + gained)] = 0.0
        rates[best] = 0.0
    return 0


def _best_of_one(
    chances: list[float], drafts: list[int], seconds: list[float], apart: float, margin: float
) -> int:
    """``best_count`` for one request, which no other's drafts slow. Every round of a small model
    waits for it, and array operations would take several times as long as these few sums."""
    ranked = sorted((chance for chance in chances if chance > 0.0), reverse=True)
    best, rate, gain, taken = 0, margin * (1.0 / (seconds[0] - apart)), 0.0, 0
    for at in range(1, len(drafts)):
        if taken == len(ranked):
            break
        for chance in ranked[taken : drafts[at]]:
            gain += chance
        taken = min(drafts[at], len(ranked))
        if (found := (1.0 + gain) / (seconds[at] - apart)) > rate:
            best, rate = at, found
    return best


def nearest_count(
    chances: np.ndarray,
    drafts: np.ndarray,
    seconds: np.ndarray,
    apart: float = 0.0,
    lasting: np.ndarray | None = None,
) -> int:
    """Which of ``drafts`` but none, as an index, lacks least for ``best_count`` to take it: by how
    much its round would have to be quicker. Arguments as there, with something on offer."""
    batch = len(chances)
    ranked = np.sort(chances, axis=None)[::-1]
    offered = int(np.count_nonzero(ranked > 0.0))
    gains = np.cumsum(ranked[:offered], dtype=np.float64)
    plain, best, nearest = float(seconds[0]), 0, 0.0
    for at, count in enumerate(np.minimum(drafts, offered).tolist()):
        if not count:
            continue
        fair = plain / MIN_PACE
        if count >= batch:
            fair *= 1.0 + _poorest(chances, ranked, count, lasting)
        worth = apart + (plain - apart) * (1.0 + gains[count - 1] / batch)
        near = min(fair, worth) / float(seconds[at])
        if near > nearest:
            best, nearest = at, near
        if count == offered:
            break
    return best


def _poorest(
    chances: np.ndarray, ranked: np.ndarray, count: int, lasting: np.ndarray | None
) -> float:
    """What the request that gains least gains from the ``count`` likeliest drafts, of those that
    are ``lasting``; infinite if none is."""
    last = ranked[count - 1]
    verified = chances > last
    equal = np.flatnonzero(chances == last)[: count - int(verified.sum())]
    verified.reshape(-1)[equal] = True
    gains = (chances * verified).sum(axis=1)
    return float((gains if lasting is None else gains[lasting]).min(initial=np.inf))
