"""``surefoot bench --traffic``: workloads, the arithmetic of latencies, and the loop."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.bench.latency import Latency, Timeline, summarise
from surefoot.bench.traffic import IDLE, RoundClock, Run, TrafficSettings, run_calls
from surefoot.bench.traffic_report import mode_json, ratio_to_plain, shares
from surefoot.bench.workload import Call, Shape, arrivals, draw_calls
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams

OFF = SpeculationParams("off")


# --- workloads --------------------------------------------------------------------------------


def prompt_length(call: Call) -> int:
    assert isinstance(call.prompt, list)
    return len(call.prompt)


def test_lengths_are_lognormal_between_their_bounds() -> None:
    calls = draw_calls(Shape(requests=6000), 50)
    logs = [math.log(prompt_length(call)) for call in calls]
    inside = sorted(logs)[len(logs) // 2]
    assert min(logs) == math.log(32) and max(logs) == math.log(2048)
    assert inside == pytest.approx(5.9, abs=0.05)
    # A standard deviation below the median and above it.
    below, above = (sorted(logs)[int(len(logs) * share)] for share in (0.1587, 0.8413))
    assert (above - below) / 2 == pytest.approx(0.8, abs=0.04)
    outputs = [call.output_tokens for call in calls]
    assert (min(outputs), max(outputs)) == (64, 448)
    assert fmean(outputs) == pytest.approx(256, abs=6)


def test_other_bounds_have_the_same_shape() -> None:
    lengths = sorted(map(prompt_length, draw_calls(Shape(4000, (10, 1000), (7, 7)), 50)))
    assert lengths[0] == 10 and lengths[-1] == 1000
    place = math.log(lengths[2000] / 10) / math.log(100)
    assert place == pytest.approx((5.9 - math.log(32)) / math.log(64), abs=0.02)
    fixed = draw_calls(Shape(5, (9, 9), (7, 7)), 50)
    assert {(prompt_length(call), call.output_tokens) for call in fixed} == {(9, 7)}


def test_a_seed_draws_the_same_requests_and_a_variant_other_tokens_only() -> None:
    shape = Shape(40, seed=3, rate=2.0)
    calls = draw_calls(shape, 50)
    assert draw_calls(shape, 50) == calls
    assert [call.seed for call in calls] == list(range(3, 43))
    assert all(0 <= token < 50 for call in calls for token in cast(Any, call.prompt))

    def frame(calls: list[Call]) -> list[Any]:
        return [(prompt_length(c), c.output_tokens, c.seed, c.due) for c in calls]

    other = draw_calls(shape, 50, variant=1)
    assert frame(other) == frame(calls) and other != calls
    assert frame(draw_calls(Shape(40, seed=4, rate=2.0), 50)) != frame(calls)
    given = draw_calls(Shape(5), prompts=[[1], [2, 3]])
    assert [call.prompt for call in given] == [[1], [2, 3], [1], [2, 3], [1]]


def test_arrivals_are_a_poisson_process() -> None:
    assert arrivals(Shape(3)) == [0, 0, 0]
    times = arrivals(Shape(4000, rate=8.0))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(4000 / 8) and min(gaps) > 0
    # As wide as long on average, and a gap says nothing of the next.
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.05)
    products = [(a - fmean(gaps)) * (b - fmean(gaps)) for a, b in itertools.pairwise(gaps)]
    assert abs(fmean(products)) < 0.05 * fmean(gaps) ** 2
    assert sum(gap > 2 / 8 for gap in gaps) / 4000 == pytest.approx(math.exp(-2), abs=0.02)


# --- latencies --------------------------------------------------------------------------------


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    lines = [
        # Three chunks of five tokens: speculation.
        Timeline(sent=1.0, chunks=[1.5, 1.6, 1.9], tokens=5, prompt_tokens=10),
        Timeline(sent=2.0, chunks=[4.0], tokens=1, prompt_tokens=3),
        Timeline(sent=0.0, chunks=[0.1, 0.3], tokens=2, prompt_tokens=1),
        Timeline(sent=0.0, chunks=[9.0, 9.5], tokens=7, prompt_tokens=1, error="lost"),
    ]
    found = summarise(lines)
    assert (found.completed, found.failed) == (3, 1)
    assert (found.prompt_tokens, found.output_tokens) == (14, 8)
    assert found.seconds == 4.0 and found.output_throughput == 2.0
    assert found.last_first_token == 4.0
    numbers = found.to_json()
    assert numbers["p50_ttft_ms"] == pytest.approx(500)
    assert numbers["mean_ttft_ms"] == pytest.approx(1000 * (0.5 + 2 + 0.1) / 3)
    # Between neighbours: 80 % of the way from the second to the third, and 98 %.
    assert numbers["p90_ttft_ms"] == pytest.approx(500 + 0.8 * 1500)
    assert numbers["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 1500)
    # All gaps together, whoever's: 0.1, 0.3, 0.2.
    assert numbers["p50_itl_ms"] == pytest.approx(200)
    assert numbers["max_itl_ms"] == pytest.approx(300)
    # A number for each request of two tokens or more: 0.4 / 4 and 0.2 / 1.
    assert numbers["mean_tpot_ms"] == pytest.approx(150)
    assert numbers["max_tpot_ms"] == pytest.approx(200)
    assert numbers["max_e2el_ms"] == pytest.approx(2000)
    assert numbers["request_throughput"] == pytest.approx(3 / 4)
    assert numbers["total_token_throughput"] == pytest.approx(22 / 4)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    found = summarise([Timeline(error="no")])
    assert found.ttft is found.itl is found.tpot is None and found.output_throughput == 0
    assert Latency.of([]) is None
    report = mode_json({"default": [Run(found, errors=("no",))]}, "default")
    assert report["failed"] == 1 and report["runs"][0]["errors"] == ["no"]


# --- the loop, on an engine and a clock that are made up ------------------------------------------


class FakeEngine:
    """Each step takes ``step_seconds`` and gives every running request a token; at most ``slots``
    run. Steps alternate between two kinds of rounds."""

    def __init__(self, slots: int, step_seconds: float = 1.0) -> None:
        self.slots, self.step_seconds = slots, step_seconds
        self.now, self.slept = 100.0, []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.most = 0
        self.stats = SimpleNamespace(preemptions=0, kinds={"even": (0, 0.0), "odd": (0, 0.0)})

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert not self.waiting and not self.running
        self.slept.append(seconds)
        self.now += seconds

    def make_request(
        self, name: str, prompt: Any, params: SamplingParams, wish: SpeculationParams
    ) -> Request:
        assert params.ignore_eos and params.seed is not None
        return Request(name, tuple(prompt), params, wish, params.seed, 10_000)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def step(self) -> list[Any]:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        self.now += self.step_seconds
        kinds = self.stats.kinds
        kind = "odd" if sum(count for count, _ in kinds.values()) % 2 else "even"
        rounds, seconds = kinds[kind]
        kinds[kind] = rounds + 1, seconds + self.step_seconds / 4
        progress = []
        for request in list(self.running):
            request.output.append(7)
            request.stats.rounds += 1
            progress.append(SimpleNamespace(request=request, tokens=[7]))
            if len(request.output) == request.params.max_tokens:
                request.finish(FinishReason.LENGTH)
                self.running.remove(request)
        return progress

    def run(self, calls: list[Call], at_once: int | None) -> Run:
        settings = TrafficSettings((0,), at_once)
        return run_calls(cast(Any, self), calls, settings, OFF, self.clock, self.sleep)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    at_once=st.integers(1, 6),
    slots=st.integers(1, 6),
)
def test_a_closed_loop_keeps_its_number_of_requests_under_way(
    lengths: list[int], at_once: int, slots: int
) -> None:
    engine = FakeEngine(slots)
    run = engine.run([Call([1, 2], n, i) for i, n in enumerate(lengths)], at_once)
    assert engine.most == min(at_once, len(lengths))
    assert run.traffic.completed == len(lengths) and not engine.slept
    assert run.traffic.output_tokens == sum(lengths)
    assert run.speculation is not None and run.speculation.accepted_length == 1
    assert sum(kind.rounds for kind in run.rounds.values()) == engine.now - 100


def test_the_time_to_the_first_token_counts_from_sending() -> None:
    # Two places, one of which the engine cannot serve yet: its wait counts, the client's does not.
    engine = FakeEngine(slots=1)
    traffic = engine.run([Call([1], 3, i) for i in range(3)], at_once=2).traffic
    assert traffic.seconds == 9 and traffic.ttft is not None
    # Sent at 0, 0 and 3; first tokens at 1, 4, 7.
    assert traffic.ttft.mean == pytest.approx(3000) and traffic.ttft.most == pytest.approx(4000)
    assert traffic.itl is not None and traffic.itl.most == 1000


def test_requests_arrive_when_they_are_due() -> None:
    engine = FakeEngine(slots=9)
    run = engine.run(
        [Call([1], 2, 0, due=0.5), Call([1], 2, 1, due=1.25), Call([1], 1, 2, 5)], None
    )
    # The first one waits for nobody; the second for the step that was under way until 1.5; the
    # third finds nobody there.
    assert engine.slept == [0.5, 5 - 3.5]
    assert run.traffic.ttft is not None and run.traffic.ttft.most == pytest.approx(1250)
    assert run.traffic.seconds == 6
    # With a bound, what counts is when there was a place.
    engine = FakeEngine(slots=9)
    bounded = engine.run([Call([1], 2, 0, due=0.5), Call([1], 2, 1, due=1.25)], 1)
    assert engine.most == 1 and bounded.traffic.ttft is not None
    assert bounded.traffic.ttft.most == pytest.approx(1000)


def test_rounds_are_told_apart_by_kind_with_their_time() -> None:
    engine = FakeEngine(slots=1)
    clock = RoundClock(cast(Any, engine), engine.clock)
    engine.add(
        engine.make_request("a", [1], SamplingParams(max_tokens=9, seed=0, ignore_eos=True), OFF)
    )
    for seconds in (1.0, 2.0, 4.0):
        engine.step_seconds = seconds
        clock.step()
    engine.step = lambda: setattr(engine, "now", engine.now + 0.5) or []  # type: ignore[method-assign]
    clock.step()
    found = {kind: (entry.rounds, entry.seconds) for kind, entry in clock.kinds.items()}
    assert found == {"even": (2, 5.0), "odd": (1, 2.0), IDLE: (0, 0.5)}
    assert shares(clock.kinds)["odd"]["share"] == pytest.approx(1 / 3)
    assert shares(clock.kinds)["even"]["time_share"] == pytest.approx(5 / 7.5)
    on_device = {kind: entry.device_seconds for kind, entry in clock.kinds.items()}
    assert on_device == {"even": 1.25, "odd": 0.5, IDLE: 0.0}

    def two_at_once() -> list[Any]:
        engine.now += 3.0
        engine.stats.kinds = {"even": (3, 2.0), "odd": (2, 1.5), "other": (1, 0.25)}
        return []

    engine.step = two_at_once  # type: ignore[method-assign]
    clock.step()
    found = {kind: (entry.rounds, entry.seconds) for kind, entry in clock.kinds.items()}
    assert found == {"even": (3, 6.0), "odd": (2, 3.0), "other": (1, 1.0), IDLE: (0, 0.5)}
    on_device = {kind: entry.device_seconds for kind, entry in clock.kinds.items()}
    assert on_device == {"even": 2.0, "odd": 1.5, "other": 0.25, IDLE: 0.0}


def test_ratios_are_taken_pass_by_pass() -> None:
    def runs(*seconds: float) -> list[Run]:
        lines = [Timeline(chunks=[each], tokens=12) for each in seconds]
        return [Run(summarise([line])) for line in lines]

    results: Any = {0: runs(1, 2, 3), "auto": runs(2, 2, 4)}
    ratio = ratio_to_plain(results, "auto")
    assert ratio is not None and (ratio.low, ratio.median, ratio.high) == (0.5, 0.75, 1)
    assert ratio_to_plain(results, 0) is None
    report = mode_json(results, "auto")
    assert report["output_throughput"] == 6 and report["low_high"]["output_throughput"] == [3, 6]
