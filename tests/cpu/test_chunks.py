"""How long prompts' chunks are beside requests that wait for their next token."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.engine.chunks import FEW, KEPT, LONGEST_STALL, PATIENCE, SHORT_ROUNDS, TimedLimits
from surefoot.speculation.costs import ExactCosts

MOST = 8192


def limits(seconds: Callable[[float], float], recorded: bool) -> TimedLimits:
    """Where rounds of so many rows take so many ``seconds``, the same more for each that
    follows."""
    costs = ExactCosts([1, 4096], [seconds(1), seconds(4096)])
    return TimedLimits(lambda: costs, recorded, MOST)


def test_prompt_chunks_are_as_short_as_a_cpu_allows_and_as_long_as_others_can_wait() -> None:
    """6 ms, and 0.2 ms a row: 1,024 rows fit into 0.25 s and 192 into 0.04 s more than without, of
    whose pace 112 are read at 0.91."""
    assert limits(lambda rows: 0.006 + 0.0002 * rows, True).longest(0) == 1024
    assert limits(lambda rows: 0.006 + 0.0002 * rows, False).longest(0) == 112


def test_on_a_slow_cpu_prompts_do_not_wait_for_ever_nor_others_for_them() -> None:
    """1 ms a row: of 40 rows that fit 24 have 0.9 of the pace. At 5 ms not even 16 fit."""
    assert limits(lambda rows: 0.006 + 0.001 * rows, False).longest(0) == 24
    assert limits(lambda rows: 0.010 + 0.005 * rows, False).longest(0) == 16


def test_the_longest_chunk_follows_costs_though_it_is_not_always_looked_up() -> None:
    """For each number of requests that decode, and anew after a while. 512 take so long that four
    times that is more than a stall."""
    costs, asked = [ExactCosts([1, 4096], [0.0062, 0.8252])], []

    def now() -> ExactCosts:
        asked.append(1)
        return costs[0]

    found = TimedLimits(now, True, MOST)
    assert found.longest(0) == 1024 and found.longest(512) == 1536
    costs[0] = ExactCosts([1, 4096], [0.0064, 0.006 + 1.6384])
    looked_up = len(asked)
    assert found.longest(0) == 1024 and len(asked) == looked_up
    for _ in range(KEPT):
        found.longest(0)
    assert found.longest(0) == 512


def seconds(rows: float) -> float:
    """A GPU's: 4 ms, and 10 us a row."""
    return 0.004 + 1e-5 * rows


def test_few_rows_of_prompts_leave_a_recorded_round_short() -> None:
    """64 requests take 4.64 ms without: 896 rows more are 13.6 ms, 1,024 would be 14.88."""
    found = limits(seconds, True)
    assert found.short(64, 300) == found.short(64, PATIENCE * 896) == 896
    assert seconds(64 + 896) <= SHORT_ROUNDS * seconds(64) < seconds(64 + 1024)
    assert limits(seconds, False).short(64, 300) == limits(seconds, False).longest(64)


def test_no_prompt_waits_longer_than_some_rounds() -> None:
    found = limits(lambda rows: 0.001 + 1e-4 * rows, True)
    # Of so few requests rounds are so short that next to nothing would fit.
    for pending in range(1, MOST // FEW, 97):
        assert PATIENCE * found.short(1, pending) >= pending


def test_many_rows_of_prompts_are_read_as_fast_as_can_be() -> None:
    """Whoever waits for the first token outnumbers those that wait for their next one."""
    found, many = limits(seconds, True), MOST // FEW + 1
    assert found.short(64, many) == found.longest(64) > MOST
    assert seconds(64 + found.longest(64)) <= LONGEST_STALL
