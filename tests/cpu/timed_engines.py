"""Tiny engines whose rounds take what a model of costs says, whatever machine runs them.

The texts, the proposer, the estimates of acceptance and the loop are an engine's own; only the
seconds that its planner is told of are made up. What a test finds does not depend on who else uses
the machine.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from harness import make_engine, native_backend, random_weights, tiny_config
from surefoot.engine.rounds import PaddedRounds
from surefoot.kernels.cpu.build import native_unavailable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, Decision, Landed, Situation
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import PromptRounds, RecordedCosts
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size

LOOK: Action = ((0,), 0)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DRAFTS, MOST = 8, 8
REPETITIVE = SamplingParams(temperature=0.0, max_tokens=1200, ignore_eos=True)
"""The tiny model's greedy texts go round in circles, behind this prompt from the start."""
_PROMPT = [2 + (7 * 15 + place**2) % 40 for place in range(12)]
PROSE = SamplingParams(temperature=1.5, max_tokens=100, ignore_eos=True)
"""Its hot texts hold hardly anything that a lookup finds."""
Wrong = Callable[[int], float]
"""How many times too long rounds of so many rows are believed to take."""


@dataclass(frozen=True)
class Kind:
    """A device, and the host beside it."""

    device: Callable[[int, Action], float]
    """Seconds of a round by (rows, action)."""
    ahead: bool
    """Whether rounds come in few sizes, two in flight, with the host at work beside them."""

    def plain_seconds(self, requests: int) -> float:
        """Of a round without drafts and proposers."""
        host, device = host_seconds(requests, 0, 0), self.device(requests, NOTHING)
        return max(host, device) if self.ahead else host + device


def _cpu_seconds(rows: int, action: Action) -> float:
    return 5e-3 * (1 + 0.06 * (rows - 1)) + (3e-5 if action[0] else 0.0)


def _gpu_seconds(rows: int, action: Action) -> float:
    return 3e-3 + 1.5e-5 * rows + (2e-5 if action[0] else 0.0)


CPU, GPU = Kind(_cpu_seconds, ahead=False), Kind(_gpu_seconds, ahead=True)


def host_seconds(requests: int, drafting: int, ends: int) -> float:
    return 2e-4 + 1e-6 * requests + 4e-6 * drafting + 2e-5 * ends


@functools.cache
def _decoder() -> Decoder:
    # Its texts are long, and attention would take most of the time.
    config = tiny_config(layers=1, heads=2, kv_heads=1, max_positions=2048)
    native = native_unavailable() is None
    backend = native_backend() if native else TorchBackend("cpu", torch.float32)
    return Decoder(config, random_weights(config), backend)


@dataclass(frozen=True)
class Pace:
    """What some rounds brought."""

    tokens: int
    seconds: float
    verified: int
    rounds: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def __sub__(self, earlier: Pace) -> Pace:
        return Pace(
            self.tokens - earlier.tokens,
            self.seconds - earlier.seconds,
            self.verified - earlier.verified,
            self.rounds - earlier.rounds,
        )


class TimedEngine:
    """An engine on its own clock, and requests for it."""

    def __init__(self, kind: Kind, requests: int, wrong: Wrong = lambda rows: 1.0) -> None:
        """``requests``: at a time. ``wrong``: of what was measured at the start."""
        self.kind = kind
        self.rng = np.random.default_rng(0)
        self.engine = make_engine(
            _decoder(), kind.ahead, max_num_seqs=MOST, max_draft_tokens=DRAFTS,
            kv_blocks=512 * MOST, calibration_seconds=0.0, enable_prefix_caching=False,
        )  # fmt: skip
        host = [
            HostSample(b, d, e, host_seconds(b, d, e), d > 0, decided=d > 0)
            for b in (1, MOST)
            for d in (0, b)
            for e in (0, 1)
        ]
        self.costs = self._recorded(wrong) if kind.ahead else self._exact(wrong)
        self.planner = Planner(self.costs, HostCosts(host), DRAFTS, overlap=kind.ahead)
        self.engine.planner = self.engine.loop.planner = self.planner
        self.requests, self.params, self.method = requests, REPETITIVE, "auto"
        """How many requests there are, and what the next ones want."""
        self.busy, self.noise = 1.0, 0.02
        """How many times slower the machine is now, and how much that varies."""
        self.seconds = 0.0
        self.tokens = self.verified = self.rounds = 0
        self._names = itertools.count()
        self._attach()

    def _exact(self, wrong: Wrong) -> ExactCosts:
        seconds = [self.kind.device(rows, NOTHING) * wrong(rows) for rows in ROWS]
        looking = self.kind.device(1, LOOK) - self.kind.device(1, NOTHING)
        return ExactCosts(ROWS, seconds, {0: Proposing(looking)})

    def _recorded(self, wrong: Wrong) -> RecordedCosts:
        rounds = self.engine.rounds
        assert isinstance(rounds, PaddedRounds)
        sizes = [RecordedSize(spans, spans, spans, NOTHING) for spans in rounds.spans]
        for spans in rounds.spans:
            sizes += [RecordedSize(spans, rows, rows, LOOK) for rows in rounds.rows(spans)]
        times = {
            size: [(128, self.kind.device(size.rows, size.action) * wrong(size.rows))]
            for size in sizes
        }
        beside = {
            spans: PromptRounds(self._exact(wrong), (NOTHING, LOOK), rounds.most_samples(spans))
            for spans in rounds.prompt_spans
        }
        costs = RecordedCosts(times, beside)
        rounds.costs = dict.fromkeys((GREEDY, DRAWN, ADJUSTED), costs)
        return costs

    def _attach(self) -> None:
        rounds, planner = self.engine.rounds, self.planner
        launch, landed = rounds.launch, planner.landed
        took = deque[float]()

        def timed(size: Size, *args: Any) -> Any:
            action = (size.proposers, size.steps or 0)
            seconds = self.kind.device(size.rows, action) * self.busy
            seconds *= float(np.exp(self.rng.normal(0, self.noise)))
            took.append(seconds)
            return launch(size, *args)._replace(seconds=lambda: seconds)

        def told(decision: Decision, situation: Situation, outcome: Landed) -> None:
            requests, drafting = situation.requests, outcome.drafting
            ends = outcome.host.ends if outcome.host is not None else 0
            host = host_seconds(requests, drafting, ends) * self.busy
            device = took.popleft()
            self.seconds += max(device, host) if self.kind.ahead else device + host
            self.tokens += situation.requests + int(outcome.accepted)
            self.verified += outcome.verified
            self.rounds += 1
            proposing = bool(decision.proposers)
            sample = HostSample(requests, drafting, ends, host, proposing, situation.prompts)
            landed(decision, situation, outcome._replace(host=sample))

        rounds.launch = timed  # type: ignore[method-assign]
        planner.landed = told  # type: ignore[method-assign]

    def spoil(self, wrong: Wrong) -> None:
        """What was measured at the start is now ``wrong``; what rounds corrected stays as it is."""
        for costs in (self.costs, getattr(self.costs, "prompts", None)):
            if isinstance(costs, ExactCosts):
                costs._measured *= [wrong(rows) for rows in ROWS]
                costs.forget_curve()
            elif isinstance(costs, RecordedCosts):
                costs.measured.seconds *= [[wrong(size.rows)] for size in costs.sizes]
                costs._step = None

    def run(self, rounds: int = 0, tokens: int = 0) -> Pace:
        """So many rounds, and on to so many tokens, with another request whenever one ends."""
        before = self.pace()
        while self.rounds < before.rounds + rounds or self.tokens < before.tokens + tokens:
            self._fill()
            self.engine.step()
        return self.pace() - before

    def pace(self) -> Pace:
        """Since the start."""
        return Pace(self.tokens, self.seconds, self.verified, self.rounds)

    def _fill(self) -> None:
        engine = self.engine
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < self.requests:
            count = next(self._names)
            # Of different lengths, so that texts do not begin and end together.
            length = int(np.random.default_rng(count).integers(100))
            most = (self.params.max_tokens or 0) * (50 + length) // 100
            params = replace(self.params, seed=count, max_tokens=most)
            choice = SpeculationParams(self.method)
            engine.add(engine.make_request(f"text {count}", _PROMPT, params, choice))
