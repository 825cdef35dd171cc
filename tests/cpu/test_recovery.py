"""Speculation never stays switched off: engines whose beliefs about costs were spoilt."""

from __future__ import annotations

import functools

import pytest

from timed_engines import CPU, GPU, PROSE, REPETITIVE, Kind, Pace, TimedEngine, Wrong

WITHIN = 500
"""Rounds that recovering may take."""
ENGINES = [(CPU, 1), (CPU, 8), (GPU, 1), (GPU, 8)]
NAMES = ["CPU, 1 request", "CPU, 8 requests", "GPU, 1 request", "GPU, 8 requests"]


def right(rows: int) -> float:
    return 1.0


def spoilt_later(kind: Kind, requests: int, wrong: Wrong) -> TimedEngine:
    timed = TimedEngine(kind, requests)
    timed.run(300)
    timed.spoil(wrong)
    return timed


def spoilt_at_the_start(kind: Kind, requests: int, wrong: Wrong) -> TimedEngine:
    timed = TimedEngine(kind, requests, wrong)
    timed.params = PROSE
    timed.run(600)
    timed.params = REPETITIVE
    return timed


def recover(timed: TimedEngine, times: int = 1) -> Pace:
    """The pace of an engine that has had time to recover, over as many rounds as it takes for
    trials to come as often in one engine as in another."""
    timed.run(WITHIN)
    return timed.run(tokens=2400 * times if timed.requests == 1 else 19200)


@functools.cache
def usual(kind: Kind, requests: int, at_the_start: bool) -> Pace:
    """That of one that did the same and was never spoilt."""
    make = spoilt_at_the_start if at_the_start else spoilt_later
    return recover(make(kind, requests, right))


def assert_alike(pace: Pace, usual: Pace) -> None:
    """As fast, and by verifying drafts."""
    assert pace.rate > 0.95 * usual.rate
    assert pace.verified / pace.tokens > 0.85 * usual.verified / usual.tokens


@pytest.mark.parametrize(("kind", "requests"), ENGINES, ids=NAMES)
def test_drafts_pay_for_an_engine_that_is_not_spoilt(kind: Kind, requests: int) -> None:
    for at_the_start in (True, False):
        pace = usual(kind, requests, at_the_start)
        assert pace.rate > 1.4 * requests / kind.plain_seconds(requests)


@pytest.mark.parametrize(("kind", "requests"), ENGINES, ids=NAMES)
@pytest.mark.parametrize(
    ("part", "factor"),
    [
        ("all", 10.0), ("all", 0.1), ("plain", 1000.0), ("plain", 0.001), ("drafting", 1000.0),
        ("drafting", 0.001),
    ],
)  # fmt: skip
def test_a_table_of_costs_that_is_spoilt_is_right_again(
    kind: Kind, requests: int, part: str, factor: float
) -> None:
    one = {"plain": requests, "drafting": 4 * requests}.get(part)
    timed = spoilt_later(kind, requests, lambda rows: factor if one in (rows, None) else 1.0)
    assert_alike(recover(timed), usual(kind, requests, False))


@pytest.mark.parametrize(("kind", "requests"), ENGINES, ids=NAMES)
@pytest.mark.parametrize(
    ("part", "factor"), [("all", 3.0), ("all", 6.0), ("all", 10.0), ("drafting", 10.0)]
)
def test_an_engine_that_started_on_a_busy_machine_drafts_when_that_is_quiet(
    kind: Kind, requests: int, part: str, factor: float
) -> None:
    quiet = requests if part == "drafting" else 0
    timed = spoilt_at_the_start(kind, requests, lambda rows: factor if rows > quiet else 1.0)
    assert_alike(recover(timed), usual(kind, requests, True))


@pytest.mark.parametrize(("kind", "requests"), ENGINES, ids=NAMES)
def test_a_busy_minute_leaves_no_trace(kind: Kind, requests: int) -> None:
    timed = spoilt_later(kind, requests, right)
    timed.busy, timed.noise = 6.0, 0.7
    timed.run(600)
    timed.busy, timed.noise = 1.0, 0.02
    assert_alike(recover(timed), usual(kind, requests, False))


@pytest.mark.parametrize("kind", [CPU, GPU], ids=["CPU", "GPU"])
def test_a_long_life_of_mixed_traffic_ends_as_it_began(kind: Kind) -> None:
    timed = TimedEngine(kind, 1)
    paces: list[Pace] = []
    for _ in range(3):
        timed.params = PROSE
        for requests in (8, 1, 3):
            timed.requests = requests
            timed.run(300)
        timed.busy, timed.noise = 4.0, 0.5
        timed.run(100)
        timed.busy, timed.noise = 1.0, 0.02
        timed.params = REPETITIVE
        for requests in (8, 1):
            timed.requests = requests
            # Texts differ from those of the beginning: over 2400 tokens by up to 5 %.
            paces.append(recover(timed, 4))
    for first, last in zip(paces[:2], paces[-2:], strict=True):
        assert_alike(last, first)


@pytest.mark.parametrize(("kind", "requests"), ENGINES, ids=NAMES)
def test_where_nothing_pays_it_is_as_fast_as_plain_decoding(kind: Kind, requests: int) -> None:
    paces = []
    for method in ("auto", "off"):
        timed = TimedEngine(kind, requests)
        timed.params, timed.method = PROSE, method
        timed.run(300)
        paces.append(timed.run(1200).rate)
    assert paces[0] > 0.99 * paces[1]
