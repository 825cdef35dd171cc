"""What the host's time between two reports is said to be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness import make_engine, tiny_decoder
from surefoot.engine import host_clock
from surefoot.engine.engine import Engine
from surefoot.engine.host_clock import HostClock
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.host_costs import HostSample

PLAIN = HostSample(4, 0, 0, 0.0, False)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Time:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(host_clock, "time", clock)
    return clock


def test_it_runs_from_one_report_to_the_next_wait(still: Time) -> None:
    clock = HostClock()
    assert clock.wait_begins() is None
    still.now += 5.0
    clock.report_came()
    clock.read(HostSample(4, 3, 2, 0.0, True))
    still.now += 0.25
    clock.leave_out(0.125)
    clock.launched(3, False)
    clock.launched(2, True)
    assert clock.wait_begins() == HostSample(4, 3, 2, 0.125, True, prompts=5, decided=True)
    still.now += 9.0
    clock.report_came()
    clock.read(PLAIN)
    still.now += 0.5
    assert clock.wait_begins() == HostSample(4, 0, 0, 0.5, False)


def test_what_the_host_has_to_spare_follows_slowly() -> None:
    clock = HostClock()
    for host, device in ((0.5, None), (None, 1.0), (0.5, 0.0)):
        clock.compare(None if host is None else PLAIN._replace(seconds=host), device)
    assert clock.spare == math.inf
    clock.compare(PLAIN._replace(seconds=1.0), 5.0)
    assert clock.spare == pytest.approx(4.0)
    for _ in range(100):
        clock.compare(PLAIN._replace(seconds=0.5), 1.0)
    assert clock.spare == pytest.approx(0.5, abs=0.03)
    # However long the host paused once.
    clock.compare(PLAIN._replace(seconds=1000.0), 1.0)
    assert clock.spare == pytest.approx(0.475, abs=0.03)
    before = clock.spare
    clock.compare(PLAIN._replace(seconds=1.0, prompts=1), 1.0)
    assert clock.spare == before


def test_what_is_interrupted_tells_nothing(still: Time) -> None:
    clock = HostClock()
    clock.report_came()
    clock.read(PLAIN)
    clock.interrupt()
    assert clock.wait_begins() is None
    clock.report_came()
    clock.read(PLAIN)
    still.now += 0.5
    assert clock.wait_begins() == HostSample(4, 0, 0, 0.5, False)


def observed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[HostSample]:
    found: list[HostSample] = []
    planner: Any = engine.planner
    monkeypatch.setattr(planner.weighing.host, "observe", found.append)
    return found


def assert_quarters(found: list[HostSample]) -> None:
    """A quarter of a second each, less what the round itself really took."""
    assert found
    assert [each for each in found if not 0.15 < each.seconds <= 0.25] == []


def add(engine: Engine, name: str) -> None:
    prompt = [2 + (7 * place + ord(name[0])) % 40 for place in range(5)]
    engine.add(engine.make_request(name, prompt, GREEDY, SpeculationParams("off")))


@pytest.mark.parametrize("ahead", [False, True])
def test_the_callers_time_between_steps_is_the_hosts(
    ahead: bool, still: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_decoder(), ahead, max_num_seqs=2)
    found = observed(engine, monkeypatch)
    add(engine, "a")
    while engine.has_work:
        engine.step()
        still.now += 0.25
    assert len(found) >= 30
    assert_quarters(found)


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_are_told_apart_and_idle_times_tell_nothing_of_the_host(
    ahead: bool, still: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_decoder(), ahead, max_num_seqs=2)
    found = observed(engine, monkeypatch)
    add(engine, "a")
    for step in range(200):
        if step == 20:
            add(engine, "b")
        # Letting somebody in takes as long as it takes.
        still.now += 1000.0 if engine.scheduler.waiting else 0.25
        engine.step()
        if step == 100:
            assert not engine.has_work
            # Nobody asks for anything; then comes a prompt of which all is cached.
            still.now += 3600.0
            add(engine, "again")
    beside = [each for each in found if each.prompts]
    assert [(each.requests, each.prompts, round(each.seconds)) for each in beside] == [(1, 1, 1000)]
    assert_quarters([each for each in found if not each.prompts])


def test_running_a_called_round_is_no_work_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Time()
    monkeypatch.setattr(host_clock, "time", clock)
    engine = make_engine(tiny_decoder(), False, max_num_seqs=2)
    found = observed(engine, monkeypatch)
    launch = engine.rounds.launch

    def slow(*args: Any) -> Any:
        report = launch(*args)
        clock.now += 7.0
        engine.rounds.apart_seconds = 7.0
        return report

    monkeypatch.setattr(engine.rounds, "launch", slow)
    add(engine, "a")
    while engine.has_work:
        engine.step()
        clock.now += 0.25
    assert_quarters(found)
