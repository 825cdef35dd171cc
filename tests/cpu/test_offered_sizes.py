"""Where some rounds are not recorded yet, planners choose among those that are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation.decisions import NOTHING, Action, Situation
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.recorded_costs import RecordedCosts, RecordedSize
from surefoot.speculation.weighing import Weighing

LOOK: Action = ((0,), 0)
DRAFT: Action = ((0, 1), 3)
SIZES = [RecordedSize(spans, spans, spans, NOTHING) for spans in (4, 8)]
SIZES += [
    RecordedSize(spans, rows, rows, action)
    for spans in (4, 8)
    for action in (LOOK, DRAFT)
    for rows in (spans, spans * 3 // 2, 2 * spans, 4 * spans)
]


@settings(max_examples=200)
@given(
    st.sets(st.sampled_from(SIZES)),
    st.integers(1, 8),
    st.sampled_from([NOTHING, LOOK, DRAFT]),
    st.lists(st.floats(1.0, 2.0), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_of_the_sizes_on_offer_the_cheapest_that_is_large_enough(
    offered: set[RecordedSize], requests: int, action: Action, times: list[float]
) -> None:
    costs = RecordedCosts({size: [(1, t)] for size, t in zip(SIZES, times, strict=True)})
    whole = costs.actions(requests), *costs.table(requests, 0, action, 99, 1.0)
    costs.offer(offered)
    spans = 4 if requests <= 4 else 8
    own = [size for size in SIZES if size.spans == spans and size.action == action]
    there = [size for size in own if size in offered] or own
    drafts, seconds = costs.table(requests, 0, action, 99, 1.0)
    assert drafts[0] == 0 and drafts[-1] == room(there[-1], requests)
    for count, took in zip(drafts, seconds, strict=True):
        found = costs.size_for(requests, action, int(count), 1.0)
        fitting = [size for size in there if room(size, requests) >= count]
        assert found in fitting
        assert took == pytest.approx(min(seconds_of(costs, size) for size in fitting))
    more = costs.size_for(requests, action, int(drafts[-1]) + 1, 1.0)
    assert more == (costs.size_for(requests, action, int(drafts[-1]), 1.0) if drafts[-1] else None)
    plain = {size.action for size in offered if size.spans == spans == size.rows}
    assert set(costs.actions(requests)) == plain | {NOTHING}
    costs.offer(None)
    again = costs.actions(requests), *costs.table(requests, 0, action, 99, 1.0)
    assert all(np.array_equal(*pair) for pair in zip(whole[1:], again[1:], strict=True))
    assert again[0] == whole[0]


def test_planners_hear_of_other_sizes_on_offer() -> None:
    costs = RecordedCosts({size: [(1, 1e-3)] for size in SIZES})
    weighing = Weighing(costs, HostCosts(), OfferMemory(3, {1: 3}), True)
    situation = Situation(4, 0, None, None, (0, 1), 3, 1.0)
    assert weighing.allowed(situation) == (NOTHING, LOOK, DRAFT)
    costs.offer(set(SIZES[:6]))
    assert weighing.allowed(situation) == (NOTHING, LOOK)


def room(size: RecordedSize, requests: int) -> int:
    """Drafts that fit; rounds of one row a span verify none."""
    return size.rows - requests if size.rows > size.spans else 0


def seconds_of(costs: Any, size: RecordedSize) -> float:
    return float(costs._base[costs.sizes.index(size)])
