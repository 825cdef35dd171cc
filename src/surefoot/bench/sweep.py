"""Throughput against concurrency on one engine: plain, fixed draft lengths, auto.

A pass keeps ``c`` requests decoding and measures from the round in which all of them decode to the
first that ends: tokens a second and the time of a round; and end to end, prefill included. A point
is several passes of one mode. Passes that are not counted come first: they record what was not
recorded yet and teach ``auto`` what it will know in a server that has run for a while.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from surefoot.engine.engine import Engine
from surefoot.engine.garbage import only_new_garbage
from surefoot.errors import SurefootError
from surefoot.request import MAX_SEED, Request, SamplingParams, SpeculationParams
from surefoot.speculation.fixed import FixedPlanner

Mode = int | str
"""A fixed number of drafts, or ``auto``; 0 is plain decoding without proposers."""
PLAIN: Mode = 0
SETTLING = 4
"""Rounds before the clock runs: the last prompts' chunks are still being read."""
_ids = itertools.count()


def mode_name(mode: Mode) -> str:
    return "plain" if mode == PLAIN else str(mode)


@dataclass(frozen=True)
class Load:
    """What requests ask for: the prompts in turn, always up to ``max_tokens``."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams

    def from_prompt(self, first: int) -> Load:
        """The same, beginning with prompt number ``first``."""
        first %= len(self.prompts)
        return replace(self, prompts=[*self.prompts[first:], *self.prompts[:first]])

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(len, self.prompts)) + (self.params.max_tokens or 0)


@dataclass(frozen=True)
class SweepSettings:
    """``repeats`` passes of every mode, in turn, after ``warmup`` that are not counted. Each turn
    has the next prompts, the same in every mode: what drafts are worth depends on the text."""

    concurrency: tuple[int, ...]
    modes: tuple[Mode, ...]
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        for name, low in (("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < low:
                raise SurefootError(name, f"{getattr(self, name)} is below {low}")

    @property
    def passes(self) -> int:
        return len(self.concurrency) * len(self.modes) * (self.repeats + self.warmup)


@dataclass(frozen=True)
class Pass:
    """One run of ``concurrency`` requests. The steady numbers are None where some request ended
    before all had been decoding for a while."""

    end_to_end_per_s: float
    tokens_per_s: float | None = None
    round_ms: float | None = None
    """Mean time between verdicts."""
    accepted_length: float | None = None
    drafts_per_round: float | None = None
    context: float | None = None
    """Tokens of all requests together, on average."""


@dataclass(frozen=True)
class Point:
    """A mode at a concurrency: medians of its passes, and the lowest and highest speed of any."""

    concurrency: int
    mode: str
    median: Pass
    lowest: Pass
    highest: Pass
    passes: tuple[Pass, ...]


def random_prompts(vocab: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly."""
    chooser = random.Random(seed)
    return [[chooser.randrange(vocab) for _ in range(length)] for _ in range(count)]


def run_pass(engine: Engine, concurrency: int, mode: Mode, load: Load) -> Pass:
    """Submit ``concurrency`` requests at once and run them to their end."""
    with drafting(engine, mode) as wish:
        begun = time.perf_counter()
        requests = submit(engine, concurrency, load, wish)
        until_all_decode(engine, requests)
        for _ in range(SETTLING):
            if not any(request.finished for request in requests):
                engine.step()
        steady = _steady(engine, requests)
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - begun
    tokens = sum(len(request.output) for request in requests)
    return replace(steady, end_to_end_per_s=tokens / seconds)


def _steady(engine: Engine, requests: Sequence[Request]) -> Pass:
    """Up to the last round before a request ends."""
    count, stats = len(requests), engine.stats
    length = sum(request.length for request in requests)
    counted = stats.rounds, stats.draft_rows
    started = now = time.perf_counter()
    tokens = rounds = drafts = 0
    over = any(request.finished for request in requests)
    while not over:
        progress = engine.step()
        over = any(item.request.finished for item in progress)
        if not over:
            now = time.perf_counter()
            tokens += sum(len(item.tokens) for item in progress)
            rounds = stats.rounds - counted[0]
            drafts = stats.draft_rows - counted[1]
    if not rounds:
        return Pass(0.0)
    return Pass(
        end_to_end_per_s=0.0,
        tokens_per_s=tokens / (now - started),
        round_ms=1000 * (now - started) / rounds,
        accepted_length=tokens / rounds / count,
        drafts_per_round=drafts / rounds,
        context=length + tokens / 2,
    )


def submit(engine: Engine, concurrency: int, load: Load, wish: SpeculationParams) -> list[Request]:
    """Make the requests and add them to the engine. Each has a seed of its own."""
    prompts = itertools.islice(itertools.cycle(load.prompts), concurrency)
    requests = [
        engine.make_request(f"sweep-{next(_ids)}", prompt, load.params, wish) for prompt in prompts
    ]
    for index, request in enumerate(requests):
        request.seed = (request.seed + index) % MAX_SEED
        engine.add(request)
    return requests


def until_all_decode(engine: Engine, requests: Sequence[Request]) -> None:
    while any(not request.output for request in requests):
        engine.step()


@contextmanager
def drafting(engine: Engine, mode: Mode) -> Iterator[SpeculationParams]:
    """Set the engine's policy for a mode; what its requests have to say for it. Meanwhile new
    garbage is collected only, as while generating or serving."""
    loop, scheduler = engine.loop, engine.scheduler
    before = loop.planner, scheduler.upkeep
    if mode not in ("auto", PLAIN):
        # A drafter that does not pay drafts all the same.
        loop.planner = FixedPlanner(engine.state.max_drafts, exact=not engine.rounds.recorded)
        scheduler.upkeep = None
    try:
        with only_new_garbage():
            if mode == "auto":
                yield SpeculationParams()
            elif mode == PLAIN:
                yield SpeculationParams("off")
            else:
                yield SpeculationParams("auto", int(mode))
    finally:
        loop.planner, scheduler.upkeep = before


def sweep(
    engine: Engine,
    settings: SweepSettings,
    load: Load,
    on_point: Callable[[Point], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Every mode at every concurrency, in ``turns``. ``on_point`` gets each result as it is there,
    ``on_progress`` (passes done, passes in all)."""
    _check(engine, settings, load)
    points: list[Point] = []
    done = 0
    for concurrency in settings.concurrency:
        passes: dict[Mode, list[Pass]] = {mode: [] for mode in settings.modes}
        order = turns(settings.modes, settings.repeats, settings.warmup)
        for number, (mode, counts) in enumerate(order):
            first = number // len(settings.modes) * concurrency
            result = run_pass(engine, concurrency, mode, load.from_prompt(first))
            if counts:
                passes[mode].append(result)
            done += 1
            if on_progress is not None:
                on_progress(done, settings.passes)
        for mode, results in passes.items():
            points.append(summarise(concurrency, mode, results))
            if on_point is not None:
                on_point(points[-1])
    return points


def turns(modes: Sequence[Mode], repeats: int, warmup: int) -> Iterator[tuple[Mode, bool]]:
    """``warmup`` passes of every mode and then ``repeats`` that count: (mode, whether it counts).
    Modes take turns, the other way round every other time, so that a machine that slows down harms
    all alike."""
    for turn in range(-warmup, repeats):
        for mode in modes[:: -1 if turn % 2 else 1]:
            yield mode, turn >= 0


def _check(engine: Engine, settings: SweepSettings, load: Load) -> None:
    """Everything that could be refused later, before anything runs."""
    most = max(settings.concurrency)
    if most > engine.config.max_num_seqs:
        raise SurefootError(
            "concurrency",
            f"{most} is above the engine's {engine.config.max_num_seqs}",
            "raise max_num_seqs",
        )
    check_modes(engine, settings.modes)
    for prompt in load.prompts:
        engine.make_request("check", prompt, load.params)
    blocks = -(-load.longest // engine.config.block_size)
    if most * blocks > engine.kv.pool.capacity:
        raise SurefootError(
            "concurrency",
            f"{most} requests of up to {load.longest} tokens exceed the KV pool, which holds "
            f"{engine.kv_tokens}: some would wait",
            "lower it, or raise kv_cache_memory",
        )


def check_modes(engine: Engine, modes: Sequence[Mode]) -> None:
    """Refuse modes that draft more than the engine may."""
    for mode in modes:
        if mode != PLAIN and not engine.proposer_names:
            raise SurefootError("modes", f"{mode_name(mode)} needs drafts, and none are allowed")
        if isinstance(mode, int) and mode > engine.state.max_drafts:
            raise SurefootError(
                "modes",
                f"{mode} drafts are above the engine's {engine.state.max_drafts}",
                "raise max_draft_tokens",
            )


def summarise(concurrency: int, mode: Mode, passes: Sequence[Pass]) -> Point:
    """Medians, lows and highs, each number by itself."""
    by: dict[str, list[float]] = {
        name: [value for item in passes if (value := getattr(item, name)) is not None]
        for name in vars(passes[0])
    }
    speeds = by.pop("end_to_end_per_s")
    low, middle, high = (
        Pass(pick(speeds), **{name: pick(values) for name, values in by.items() if values})
        for pick in (min, median, max)
    )
    return Point(concurrency, mode_name(mode), middle, low, high, tuple(passes))
