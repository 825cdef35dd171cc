"""How many drafts a round verifies: the most tokens a second, fair to every request."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.speculation.goodput import best_drafts, gains_of, nearest_count
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.paces import MIN_PACE

K = 3


def matrix(*rows: list[float]) -> np.ndarray:
    return np.array([row + [0.0] * (K - len(row)) for row in rows], dtype=np.float32)


def line(base: float, per_draft: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    drafts = np.arange(count + 1)
    return drafts, base + per_draft * drafts


def best_count(*arguments: Any, **options: Any) -> int:
    return best_drafts(*arguments, **options).at


def test_free_rows_are_all_taken_and_dear_rows_none() -> None:
    chances = matrix([0.9, 0.5, 0.1], [0.8])
    assert best_count(chances, *line(1.0, 0.0, 4)) == 4
    assert best_count(chances, *line(1.0, 1.0, 4)) == 0


def test_numbers_of_drafts_between_those_that_are_weighed_count() -> None:
    drafts, seconds = np.array([0, 1, 3]), np.array([1.0, 2.5, 3.0])
    assert best_count(matrix([0.9, 0.8, 0.7]), drafts, seconds) == 2
    assert best_count(matrix([0.9, 0.8, 0.2]), drafts, seconds) == 0


def test_a_request_without_drafts_is_slowed_by_a_twentieth_at_most() -> None:
    chances = matrix([0.99, 0.98, 0.97], [])
    assert best_count(chances, *line(1.0, 0.03, 3)) == 1
    assert best_count(chances, *line(1.0, 0.01, 3)) == 3


def test_who_is_ahead_may_be_slowed() -> None:
    chances = matrix([0.99, 0.98, 0.97], [])
    drafts, seconds = line(1.0, 0.03, 3)
    # The third draft takes more from the other than the twentieth: 0.95 * 1.09 - 1.
    for lead, most in ((0.0, 1), (0.03, 2), (0.04, 3)):
        assert best_count(chances, drafts, seconds, ahead=np.array([0.0, lead])) == most
    assert best_count(chances, drafts, seconds, ahead=np.array([5.0, 0.0])) == 1
    drafts, seconds = line(1.0, 0.4, 3)
    assert nearest_count(chances, drafts, seconds, ahead=np.array([9.0, 0.0])) == 1
    assert nearest_count(chances, drafts, seconds, ahead=np.array([0.0, 9.0])) == 3


def test_what_proposing_takes_is_held_against_it() -> None:
    """A round with no draft verified has a drafter's time in it; one without has not."""
    chances = matrix([0.99, 0.5], [0.3])
    drafts, seconds = line(1.3, 0.01, 3)
    assert best_count(chances, drafts, seconds) == 3
    assert best_count(chances, drafts, seconds, plain=1.0) == 3
    assert best_count(chances, drafts, seconds, plain=0.9) == 0
    # 0.95 * 1.33 / 0.9 - 1.3 are missing.
    assert best_count(chances, drafts, seconds, plain=0.9, ahead=np.array([0.0, 0.11])) == 3
    assert nearest_count(chances, drafts, seconds, plain=0.9) == 3


def test_a_gain_within_the_margin_is_none() -> None:
    chances = matrix([0.06])
    assert best_count(chances, *line(1.0, 0.05, 1)) == 1
    assert best_count(chances, *line(1.0, 0.05, 1), margin=1.02) == 0
    two = matrix([0.06], [0.06])
    assert best_count(two, *line(1.0, 0.025, 2)) == 2
    assert best_count(two, *line(1.0, 0.025, 2), margin=1.02) == 0


def test_time_that_prompts_take_is_not_held_against_drafts_nor_for_them() -> None:
    chances = matrix([0.2, 0.1])
    drafts, seconds = line(10.0, 0.15, 2)
    # As a share of a round with a long prompt, 0.15 is nothing; of the time tokens take, it is.
    assert best_count(chances, drafts, seconds) == 2
    assert best_count(chances, drafts, seconds, apart=9.0) == 1
    assert best_count(chances, drafts, seconds, apart=9.5) == 0
    two, ahead = matrix([0.2], [0.1]), np.ones(2)
    for apart, count in ((0.0, 2), (9.5, 0)):
        drafts, seconds = line(10.0, 0.06, 2)
        assert best_count(two, drafts, seconds, apart=apart, ahead=ahead) == count


def test_the_nearest_miss_is_the_cheapest_to_be_wrong_about() -> None:
    chances = matrix([0.9, 0.8, 0.7], [])
    drafts, seconds = line(1.0, 0.06, 3)
    assert best_count(chances, drafts, seconds) == 0
    assert nearest_count(chances, drafts, seconds) == 1
    assert nearest_count(matrix([0.9, 0.8, 0.7]), *line(1.0, 9.0, 3)) > 0


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        chain = draw(st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95]), max_size=K))
        rows.append(sorted(chain, reverse=True))
    steps = draw(st.lists(st.floats(0, 0.3), min_size=3 * K, max_size=3 * K))
    return rows, list(itertools.accumulate(steps, initial=1.0))


@settings(max_examples=300)
@given(
    cases(),
    st.sets(st.integers(1, 3 * K), max_size=4),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 4.0]), min_size=3, max_size=3),
    st.sampled_from([1.0, 0.9]),
)
def test_it_is_the_best_of_all_fair_counts(
    case: Any, stairs: set[int], leads: list[float], plain: float
) -> None:
    rows, times = case
    ahead = np.array(leads[: len(rows)])
    chances = matrix(*rows)
    drafts = np.array([0, *sorted(stairs)])
    seconds = np.array([times[count] for count in drafts])
    flat = sorted(((-p, b, j) for b, row in enumerate(rows) for j, p in enumerate(row)))

    def worth(at: int) -> float:
        """Tokens a second; 0 where somebody falls behind."""
        gains = [0.0] * len(rows)
        for minus, b, _ in flat[: int(drafts[at])]:
            gains[b] -= minus
        assert gains_of(chances, min(int(drafts[at]), len(flat))) == pytest.approx(gains)
        owed = MIN_PACE * seconds[at] / plain
        kept = [1 + gain + lead >= owed - 1e-5 for gain, lead in zip(gains, ahead, strict=True)]
        # Of one alone that is no question, and where no draft is verified there is no choice.
        fair = not at or len(rows) == 1 or all(kept)
        return (len(rows) + sum(gains)) / seconds[at] if fair else 0.0

    chosen, gains = best_drafts(chances, drafts, seconds, plain=plain, ahead=ahead)
    count = min(int(drafts[chosen]), int(np.count_nonzero(chances)))
    assert gains == pytest.approx(gains_of(chances, count))
    # What is offered may be fewer than a stair holds.
    assert worth(chosen) > 0
    assert worth(chosen) >= max(worth(at) for at in range(len(drafts))) - 1e-5


def test_offers_that_ends_cut_short_do_not_count() -> None:
    """Requests that are about to end take shorter drafts: nothing follows for those that come."""
    memory = OfferMemory(3, {0: 3})
    whole = np.tile(np.array([0.75, 0.55, 0.4], dtype=np.float32), (32, 1))
    whose = np.zeros(32, dtype=np.int64)
    for _ in range(20):
        memory.record(whole, whose, (0,), 3)
    expected = memory.latest(64, (0,), 3)
    for left in (2, 1, 0) * 10:
        memory.record(whole * (np.arange(3) < left), whose, (0,), 3)
    assert (memory.latest(64, (0,), 3) == expected).all()
    assert memory.share((0,)) < 1.0
