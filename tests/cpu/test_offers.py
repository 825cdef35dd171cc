"""What rounds may expect of proposers, by what these offered lately."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.speculation.offers import OfferMemory

LOOKUP, DRAFTER = 0, 1
WIDTH = 3


def memory_of(rows: list[list[float]], proposer: int, times: int = 30) -> OfferMemory:
    """That has seen ``rows``, one for each request, again and again."""
    memory = OfferMemory(WIDTH, frozenset({DRAFTER}))
    chances = np.array(rows, dtype=np.float32)
    for _ in range(times):
        memory.record(chances, np.full(len(rows), proposer), (proposer,), WIDTH)
    return memory


def test_a_promise_is_fair_to_who_has_nothing_on_offer() -> None:
    """Three drafts would bring more, and slow the neighbour by more than a twentieth."""
    drafts = np.arange(2 * WIDTH + 1)
    seconds = 1.0 + 0.03 * drafts
    for neighbour, best in (([0.0, 0.0, 0.0], 1), ([0.99, 0.98, 0.97], 6)):
        rows = [[0.99, 0.98, 0.97], neighbour]
        memory = memory_of(rows, LOOKUP)
        tokens, took = memory.promise(2, (LOOKUP,), 0, drafts, seconds, 1.0)
        ranked = sorted([*rows[0], *rows[1]], reverse=True)
        assert tokens == pytest.approx(2 + sum(ranked[:best]))
        assert took == pytest.approx(1.0 + 0.03 * best)


def test_drafters_offers_are_seen_as_long_as_they_would_be() -> None:
    """Cut where they would draft less far; continued as usual where further."""
    usual = [0.8, 0.4, 0.1]
    memory = memory_of([usual] * 8, DRAFTER, times=100)
    assert memory.latest(2, (DRAFTER,), 1).tolist() == [[pytest.approx(0.8), 0.0, 0.0]] * 2
    whose = np.array([DRAFTER, LOOKUP])
    whole = np.array([[0.9, 0.5, 0.3], [0.9, 0.5, 0.3]], dtype=np.float32)
    cut = memory.continued(whole, whose, 3, 2)
    assert cut.tolist() == [[*whole[0, :2], 0.0], whole[1].tolist()]
    short = np.array([[0.6, 0.0, 0.0], [0.6, 0.0, 0.0]], dtype=np.float32)
    further = memory.continued(short, whose, 1, 3)
    assert further[0].tolist() == pytest.approx([0.6, 0.3, 0.075], rel=0.02)
    assert further[1].tolist() == short[1].tolist()
    assert (memory.continued(whole, whose, 3, 3) == whole).all()
