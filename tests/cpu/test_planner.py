"""The planner against engines made up of true costs and texts, on a clock that only they move."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_world import Fixed, Seconds, Texts, World
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.goodput import MIN_PACE, best_count
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.planner import Planner

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256)
LOOKUP: Action = ((0,), 0)


def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
    """A small model on a CPU: a second row costs a tenth of the first."""
    rows = requests + prompt_rows + drafts
    return 6e-3 + 6e-4 * (rows - 1) + (3e-5 if action[0] else 0.0)


def dear(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
    """Every row costs as much as the first: no draft ever pays."""
    return 6e-3 * (requests + prompt_rows + drafts) + (6e-5 * requests if action[0] else 0.0)


def host(requests: int, drafting: int, ends: int) -> float:
    return 1e-4 + 2e-6 * requests + 4e-6 * drafting


def planner(wrong: Callable[[int], float] = lambda rows: 1.0, true: Seconds = device) -> Planner:
    """One that has measured the device ``wrong`` times too slow, by rows."""
    seconds = [true(rows, 0, NOTHING, 0) * wrong(rows) for rows in ROWS]
    costs = ExactCosts(ROWS, seconds, {0: Proposing(3e-5)})
    samples = [HostSample(b, d, 0, host(b, d, 0)) for b in (1, 8) for d in (0, b)]
    return Planner(costs, HostCosts(samples), 8, overlap=False)


def best(texts: Texts, requests: int = 1) -> float:
    """Tokens a second of whoever always looks, and verifies what pays."""
    world = World(device, host, texts, requests=requests, hiccups=0.0)
    return world.run(Fixed(LOOKUP, world), 600)


@pytest.mark.parametrize("times", [3, 6, 10])
def test_a_start_on_a_busy_machine_does_not_end_drafting_for_good(times: int) -> None:
    """Measured too slow but for one row, which thousands of quiet rounds then confirm."""
    quiet = Texts(repeating=0.0, idle_offers=0.0)
    world = World(device, host, quiet, hiccups=0.0)
    subject = planner(lambda rows: times if rows > 1 else 1.0)
    world.run(subject, 3000)
    quiet.repeating = 1.0
    quiet.state[:] = True
    world.run(subject, 500)
    assert world.run(subject, 500) > 0.97 * best(Texts(repeating=1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: 10.0,
        lambda rows: 0.1,
        lambda rows: 10.0 if rows > 1 else 1.0,
        lambda rows: 1000.0 if rows == 4 else 1.0,
        lambda rows: 0.001 if rows == 4 else 1.0,
    ],
    ids=["all x 10", "all / 10", "drafts x 10", "one x 1000", "one / 1000"],
)
def test_poisoned_costs_are_right_again_within_500_rounds(wrong: Callable[[int], float]) -> None:
    subject = planner(wrong)
    world = World(device, host, Texts(repeating=1.0), hiccups=0.0)
    world.run(subject, 500)
    assert world.run(subject, 500) > 0.97 * best(Texts(repeating=1.0))


def test_a_busy_minute_leaves_no_trace() -> None:
    subject = planner()
    world = World(device, host, Texts(repeating=1.0), hiccups=0.0)
    world.run(subject, 300)
    world.busy = 6.0
    world.run(subject, 300)
    world.busy = 1.0
    world.run(subject, 500)
    assert world.run(subject, 500) > 0.97 * best(Texts(repeating=1.0))


@pytest.mark.parametrize("requests", [1, 32])
def test_where_no_draft_pays_looking_for_them_costs_a_hundredth(requests: int) -> None:
    texts = Texts(repeating=0.5)
    world = World(dear, host, texts, requests=requests, hiccups=0.0)
    subject = planner(true=dear)
    world.run(subject, 500)
    pace = world.run(subject, 2000)
    plain = World(dear, host, Texts(repeating=0.5), requests=requests, hiccups=0.0)
    assert pace > 0.985 * plain.run(Fixed(NOTHING, plain), 500)


def test_texts_that_begin_to_repeat_are_noticed() -> None:
    texts = Texts(repeating=0.0, idle_offers=0.0)
    world = World(device, host, texts, hiccups=0.0)
    subject = planner()
    world.run(subject, 3000)
    texts.repeating = 1.0
    texts.state[:] = True
    world.run(subject, 150)
    assert world.run(subject, 300) > 0.95 * best(Texts(repeating=1.0))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_number_of_drafts_is_the_best_of_all_that_are_fair(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    chance = st.floats(0.01, 0.99)
    rows = []
    for _ in range(batch):
        own = sorted(data.draw(st.lists(chance, max_size=3)), reverse=True)
        rows.append(own + [0.0] * (3 - len(own)))
    chances = np.array(rows, dtype=np.float32)
    steps = data.draw(st.lists(st.floats(0, 0.3), min_size=9, max_size=9))
    seconds = np.concatenate(([1.0], 1.0 + np.cumsum(steps)))[: 3 * batch + 1]
    drafts = np.arange(len(seconds))
    chosen = int(drafts[best_count(chances, drafts, seconds)])
    ranked = sorted(((p, b) for b, row in enumerate(chances) for p in row if p > 0), reverse=True)

    def outcome(count: int) -> tuple[float, float]:
        gains = [0.0] * batch
        for p, b in ranked[:count]:
            gains[b] += float(p)
        slowdown = float(seconds[count])
        return (batch + sum(gains)) / slowdown, (1 + min(gains)) / slowdown

    assert chosen <= len(ranked)
    rate, fair = outcome(chosen)
    assert chosen == 0 or (rate > batch - 1e-4 and (fair >= MIN_PACE - 1e-3 or batch == 1))
    for count in range(len(ranked) + 1):
        other, other_fair = outcome(count)
        if other_fair >= MIN_PACE + 1e-3:
            assert rate >= other - 1e-3


def test_costs_of_the_host_stay_finite_whatever_is_measured() -> None:
    """Segments of very different rounds, one after the other, each almost without noise."""
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for seed in range(25):
            costs, dice = HostCosts(), random.Random(seed)
            for _ in range(8):
                requests = dice.choice([1, 8, 32, 64, 128])
                drafting = dice.choice([0, requests])
                base, slope = dice.choice([5e-5, 2e-4, 1e-3]), dice.choice([1e-7, 3e-6, 2e-5])
                for turn in range(255):
                    ends = requests if turn == 254 else 0
                    seconds = base + slope * requests + 1e-5 * drafting + 2e-5 * ends
                    seconds *= dice.lognormvariate(0, 0.01)
                    if dice.random() < 0.01:
                        seconds *= dice.choice([5, 20, 100])
                    costs.observe(HostSample(requests, drafting, ends, seconds))
                    assert 0 < costs.seconds(requests, drafting) < 1
