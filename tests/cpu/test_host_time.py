"""Drafts where the host, not the device, sets the pace of recorded rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import Job, run_alone, run_jobs
from surefoot.engine import host_time, pipeline
from surefoot.engine.engine import Engine
from surefoot.engine.host_time import FEWEST, FORGET_EVERY, RECENT, HostTime
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.replay import Size
from test_triton_control import build


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_time, "time", clock)
    monkeypatch.setattr(pipeline, "time", clock)
    return clock


@pytest.fixture
def rounds(clock: Clock) -> tuple[HostTime, Callable[..., None]]:
    host = HostTime()

    def run(count: int, seconds: float, verified: bool, waited: float = 0.0) -> None:
        for _ in range(count):
            host.landed(8, verified, waited)
            clock.now += seconds + waited
            host.launching()

    host.launching()
    return host, run


def test_a_hiccup_counts_nothing(rounds: tuple[HostTime, Callable[..., None]]) -> None:
    host, run = rounds
    run(FEWEST - 1, 2.0, False)
    assert host.seconds(8, False) == 0.0, "too few"
    run(2, 2.0, False)
    run(2, 90.0, False)
    assert host.seconds(8, False) == 2.0
    assert host.seconds(8, True) == host.seconds(16, False) == 0.0


def test_waiting_for_the_device_and_a_pause_count_nothing(
    rounds: tuple[HostTime, Callable[..., None]], clock: Clock
) -> None:
    host, run = rounds
    run(RECENT, 2.0, False, waited=5.0)
    assert host.seconds(8, False) == 2.0
    for _ in range(RECENT):
        host.pause()
        host.landed(8, False, 0.0)
        clock.now += 50.0
        host.launching()
    assert host.seconds(8, False) == 2.0


def test_drafts_cost_what_the_host_takes_for_them(
    rounds: tuple[HostTime, Callable[..., None]],
) -> None:
    host, run = rounds
    device = torch.tensor([1.0, 1.1, 4.0])
    assert host.table(8, device) is device
    run(RECENT, 2.0, False)
    assert host.table(8, device).tolist() == [2.0, 2.0, 4.0], "unknown: as plain rounds"
    run(RECENT, 3.0, True)
    assert host.table(8, device).tolist() == [2.0, 3.0, 4.0]
    assert host.table(4, device) is device and device.tolist() == pytest.approx([1.0, 1.1, 4.0])


def test_what_drafts_took_is_forgotten_one_day(
    rounds: tuple[HostTime, Callable[..., None]],
) -> None:
    host, run = rounds
    run(RECENT, 3.0, True)
    run((RECENT - FEWEST) * FORGET_EVERY, 2.0, False)
    assert host.seconds(8, True) == 3.0
    run(FORGET_EVERY, 2.0, False)
    assert host.seconds(8, True) == 0.0
    run(1, 3.0, True)
    assert host.seconds(8, True) == 3.0, "known again at once"


@pytest.mark.parametrize("slow", [False, True])
def test_an_engine_with_a_slow_host_drafts_only_as_far_as_that_pays(
    slow: bool, clock: Clock
) -> None:
    """The device's rows are nearly free, the host's reading of drafts is not."""
    engine: Engine = build(False, proposers=("ngram",), draft_policy="auto", max_num_seqs=2)
    ahead, sizes = engine.pipeline, []
    assert ahead is not None
    launch, land = ahead.graphs.launch, ahead.land

    def took(size: Size) -> float:
        return 40.0 if size.verifies else 2.0

    def wait(size: Size) -> None:
        clock.now += took(size)

    def record(size: Size) -> Any:
        sizes.append(size)
        report = launch(size)
        return report if slow else replace(report, landed=lambda: wait(size))

    def read() -> Any:
        size = ahead.flights[0].size
        found = land()
        clock.now += took(size) if slow else 0.1
        return found

    ahead.graphs.launch = record  # type: ignore[method-assign]
    ahead.land = read  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=148, ignore_eos=True)
    jobs = [Job((5, 9, 5, 9 + i), params, SpeculationParams("auto")) for i in range(2)]
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(engine.decoder, job).output
    drafting = [size.verifies for size in sizes if size.spans == 2]
    if slow:
        assert FEWEST <= sum(drafting) <= 2 * FEWEST
    else:
        assert sum(drafting) > len(drafting) / 2
