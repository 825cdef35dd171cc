"""Traffic on an engine in this process: requests of many lengths that come and go.

With a bound on how many there are at once, the next request is sent as soon as there is a place (a
closed loop); at a rate of arrivals, when it is due. ``latency`` says what is reported.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from surefoot.bench.latency import Timeline, Traffic, summarise
from surefoot.bench.sweep import Mode, drafting, turns
from surefoot.bench.workload import Call
from surefoot.engine.engine import Engine
from surefoot.engine.stats import Progress
from surefoot.errors import SurefootError
from surefoot.request import Request, SamplingParams, SpeculationParams

IDLE = "no round"
"""The kind of a step that ran none."""
NONE = 0, 0.0
"""Rounds, and seconds on the device."""


@dataclass(frozen=True)
class TrafficSettings:
    """``repeats`` passes of every mode, in turn, after ``warmup`` that are not counted.
    ``at_once``: most requests that are under way; None: as many as are due."""

    modes: tuple[Mode, ...]
    at_once: int | None = 64
    repeats: int = 3
    warmup: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("at_once", 1), ("repeats", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise SurefootError(name, f"{value} is below {low}")


@dataclass(frozen=True)
class DraftCounts:
    """What speculation did for all requests of a run together: the rounds of each that gave it
    tokens, and the drafts verified and accepted in them."""

    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens that a round gives a request, its own included."""
        return (self.rounds + self.accepted) / self.rounds if self.rounds else 0.0


@dataclass
class KindOfRounds:
    """How many rounds of a kind there were, the seconds of the steps that read them (with rounds
    launched ahead, from one to the next), and the seconds that the device was at work for them."""

    rounds: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """One pass of one mode."""

    traffic: Traffic
    speculation: DraftCounts | None = None
    """None where a server does not tell."""
    rounds: dict[str, KindOfRounds] = field(default_factory=dict)
    """By kind; empty where it is not known."""
    preemptions: int = 0
    errors: tuple[str, ...] = ()
    """Why requests failed, each reason once."""


class RoundClock:
    """Steps an engine and keeps account of the time by kind of round."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.clock = clock
        self.kinds: dict[str, KindOfRounds] = {}
        self._counted = dict(engine.stats.kinds)

    def step(self) -> list[Progress]:
        """``Engine.step``. A step that ran rounds of several kinds took the same for each round."""
        begun = self.clock()
        progress = self.engine.step()
        seconds = self.clock() - begun
        before, self._counted = self._counted, dict(self.engine.stats.kinds)
        new: dict[str, tuple[int, float]] = {}
        for kind, (count, on_device) in self._counted.items():
            earlier_count, earlier_on_device = before.get(kind, NONE)
            if count > earlier_count:
                new[kind] = count - earlier_count, on_device - earlier_on_device
        total = sum(count for count, _ in new.values())
        if not total:
            self.kinds.setdefault(IDLE, KindOfRounds()).seconds += seconds
        for kind, (count, on_device) in new.items():
            entry = self.kinds.setdefault(kind, KindOfRounds())
            entry.rounds += count
            entry.seconds += seconds * count / total
            entry.device_seconds += on_device
        return progress


def run_calls(
    engine: Engine,
    calls: Sequence[Call],
    settings: TrafficSettings,
    wish: SpeculationParams,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Send ``calls``, whose prompts are token ids, and run them all to their ends. The engine must
    be idle; raises SurefootError before anything runs if it cannot take one of them."""
    requests = [_request(engine, index, call, settings, wish) for index, call in enumerate(calls)]
    lines = {r.request_id: Timeline(prompt_tokens=len(r.prompt)) for r in requests}
    waiting = deque(zip(calls, requests, strict=True))
    most = len(calls) if settings.at_once is None else settings.at_once
    under_way, preemptions = 0, engine.stats.preemptions
    rounds, started = RoundClock(engine, clock), clock()
    while waiting or under_way:
        now = clock() - started
        while waiting and under_way < most and waiting[0][0].due <= now:
            call, request = waiting.popleft()
            # Requests due during a round wait for its end, and that is part of their latency; not
            # so the time until there is a place for them.
            lines[request.request_id].sent = call.due if settings.at_once is None else now
            engine.add(request)
            under_way += 1
        if not under_way:
            sleep(waiting[0][0].due - now)
            continue
        progress = rounds.step()
        now = clock() - started
        for item in progress:
            lines[item.request.request_id].chunks.append(now)
            under_way -= item.request.finished
    for request in requests:
        lines[request.request_id].tokens = len(request.output)
    return Run(
        traffic=summarise(list(lines.values())),
        speculation=DraftCounts(
            rounds=sum(request.stats.rounds for request in requests),
            verified=sum(request.stats.verified for request in requests),
            accepted=sum(request.stats.accepted for request in requests),
        ),
        rounds=rounds.kinds,
        preemptions=engine.stats.preemptions - preemptions,
    )


def _request(
    engine: Engine, index: int, call: Call, settings: TrafficSettings, wish: SpeculationParams
) -> Request:
    assert isinstance(call.prompt, Sequence)
    params = SamplingParams(
        temperature=settings.temperature,
        max_tokens=call.output_tokens,
        ignore_eos=True,
        seed=call.seed,
    )
    return engine.make_request(f"traffic-{index}", call.prompt, params, wish)


def measure(
    engine: Engine,
    calls: Sequence[Call],
    settings: TrafficSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Mode, list[Run]]:
    """The runs that count, by mode; every run sends the same requests. ``on_progress``: (passes
    done, passes in all)."""
    results: dict[Mode, list[Run]] = {mode: [] for mode in settings.modes}
    passes = list(turns(settings.modes, settings.repeats, settings.warmup))
    for done, (mode, counts) in enumerate(passes, 1):
        with drafting(engine, mode) as wish:
            run = run_calls(engine, calls, settings, wish)
        if counts:
            results[mode].append(run)
        on_progress(done, len(passes))
    return results
