"""Throughput against concurrency on one engine: plain, fixed draft lengths, auto.

Each point keeps ``c`` requests decoding and measures from the round in which all of them decode to
the first that ends: tokens a second and the time of a round; and end to end, prefill included.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.engine.engine import Engine
from surefoot.request import SamplingParams, SpeculationParams

Mode = int | str
"""A fixed number of drafts, or ``auto``; 0 is plain decoding without proposers."""


@dataclass(frozen=True)
class Point:
    """One measurement: ``round_ms`` is the mean time between verdicts in the steady state."""

    concurrency: int
    mode: str
    tokens_per_s: float
    round_ms: float
    accepted_length: float
    drafts_per_round: float
    end_to_end_per_s: float


def run_point(
    engine: Engine, concurrency: int, mode: Mode, prompt: int, output: int, seed: int = 0
) -> Point:
    """``concurrency`` random prompts of ``prompt`` tokens, ``output`` greedy tokens each."""
    chooser = random.Random(seed)
    vocab = engine.decoder.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    if mode == "auto":
        engine.controller.policy, wish = "auto", SpeculationParams()
    elif mode == 0:
        engine.controller.policy, wish = "auto", SpeculationParams("off")
    else:
        engine.controller.policy, wish = "fixed", SpeculationParams("auto", int(mode))
    requests = [
        engine.make_request(
            f"{mode}-{concurrency}-{seed}-{index}",
            [chooser.randrange(vocab) for _ in range(prompt)],
            params,
            wish,
        )
        for index in range(concurrency)
    ]
    begun = time.perf_counter()
    for request in requests:
        engine.add(request)
    while any(not request.output for request in requests):
        engine.step()
    # The first rounds record what was not recorded yet.
    for _ in range(4):
        engine.step()
    before = sum(len(request.output) for request in requests)
    counted = [engine.stats.rounds, engine.stats.draft_rows]
    started = time.perf_counter()
    now, tokens, rounds, drafts = started, 0, 0, 0
    while not any(request.finished for request in requests):
        engine.step()
        if not any(request.finished for request in requests):
            now = time.perf_counter()
            tokens = sum(len(request.output) for request in requests) - before
            rounds = engine.stats.rounds - counted[0]
            drafts = engine.stats.draft_rows - counted[1]
    while engine.has_work:
        engine.step()
    ended = time.perf_counter()
    seconds, rounds = max(now - started, 1e-9), max(rounds, 1)
    return Point(
        concurrency=concurrency,
        mode=str(mode),
        tokens_per_s=tokens / seconds,
        round_ms=1000 * seconds / rounds,
        accepted_length=tokens / rounds / concurrency,
        drafts_per_round=drafts / rounds,
        end_to_end_per_s=concurrency * output / (ended - begun),
    )


def sweep(
    engine: Engine,
    concurrencies: Sequence[int],
    modes: Sequence[Mode],
    prompt: int = 512,
    output: int = 256,
) -> list[Point]:
    """Every mode at every concurrency."""
    return [
        run_point(engine, concurrency, mode, prompt, output)
        for concurrency in concurrencies
        for mode in modes
    ]
