"""Engines made up of true costs and texts, on a clock that only they move: what a planner meets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from surefoot.speculation.decisions import Action, Decision, Landed, Situation
from surefoot.speculation.goodput import best_drafts
from surefoot.speculation.host_costs import HostSample

Seconds = Callable[[int, int, Action, int], float]
"""Of a round by (requests, prompt rows, action, drafts)."""


class Decides(Protocol):
    """A planner, or what takes its place."""

    def decide(self, situation: Situation) -> Decision:
        """As ``Planner.decide``."""
        ...

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        """As ``Planner.landed``."""
        ...


@dataclass
class Texts:
    """What proposers offer for some requests: chances by request and draft."""

    lookup: int | None = 0
    """The index of a proposer that now and then finds what comes next."""
    drafter: int | None = None
    """That of one which always offers as many drafts as it is told to."""
    repeating: float = 0.0
    """The part of the texts that a lookup knows the rest of."""
    stretch: float = 100.0
    """Rounds that a text goes on as it does, on average."""
    chance: float = 0.9
    """Of a draft for a text that repeats, given those before it."""
    idle_offers: float = 0.3
    """How often there is an offer for one that does not; it has one chance in twenty."""
    chances: tuple[float, ...] = (0.75, 0.73, 0.72, 0.7, 0.7, 0.7, 0.7, 0.7)
    """Of a drafter's drafts, each given those before it."""
    spread: float = 0.15
    """By how much these differ from request to request."""
    width: int = 8

    def start(self, requests: int, rng: np.random.Generator) -> None:
        self.state = rng.random(requests) < self.repeating

    def reached(self, tokens: float) -> None:
        """So many tokens are there, of all requests."""

    def parents(self, requests: int, action: Action) -> np.ndarray | None:
        """As in ``Situation``, of what is offered with an action."""
        return None

    def _move(self, luck: np.ndarray) -> None:
        move = luck[0] < 1 / self.stretch
        self.state = np.where(move, luck[1] < self.repeating, self.state)

    def offers(
        self, requests: int, action: Action, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if len(self.state) != requests:
            self.start(requests, rng)
        # The same draws whatever is asked for: texts do not depend on the planner.
        luck = rng.random((4, requests))
        self._move(luck)
        chances = np.zeros((requests, self.width), dtype=np.float32)
        whose = np.zeros(requests, dtype=np.int64)
        proposers, depth = action
        if self.drafter in proposers:
            own = self.spread * (2 * luck[2, :, None] - 1) + np.asarray(self.chances[: self.width])
            own = np.minimum(np.maximum(own, 0.01), 0.99)
            np.cumprod(own, axis=1, out=own)
            chances[:, :depth] = own[:, :depth]
            whose[:] = self.drafter
        if self.lookup in proposers:
            some = self.state | (luck[3] < self.idle_offers)
            if some.any():
                known = self.state.astype(np.int64) + some
                own = self._found[known]
                better = own.sum(axis=1) > chances.sum(axis=1)
                chances[better] = own[better]
                whose[better] = self.lookup
        return chances, whose

    @cached_property
    def _found(self) -> np.ndarray:
        """[3, width]: chances of a lookup's drafts where it offers none, for a text that does not
        repeat, and for one that does."""
        steps = 1 + np.arange(self.width)
        return np.stack([np.zeros(self.width), 0.05**steps, self.chance**steps])


@dataclass
class Stretches(Texts):
    """Of one request, which goes on as it does for ``stretch`` tokens: drafts that are accepted
    bring the end of a stretch nearer."""

    def start(self, requests: int, rng: np.random.Generator) -> None:
        own = np.random.default_rng(int(rng.integers(1 << 30)))
        self.ends = np.cumsum(own.exponential(self.stretch, 4000))
        self.states = own.random(4000) < self.repeating
        self.reached(0.0)

    def reached(self, tokens: float) -> None:
        """The text has so many tokens now."""
        self.state = self.states[[int(np.searchsorted(self.ends, tokens, side="right"))]]

    def _move(self, luck: np.ndarray) -> None:
        pass


@dataclass
class Uneven(Texts):
    """What a drafter offers, which knows some texts better than others for good."""

    lookup: int | None = None
    drafter: int | None = 0
    least: float = 0.3
    most: float = 0.9
    """Chances of a draft given those before it, of the first request and of the last."""

    def offers(
        self, requests: int, action: Action, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        chances = np.zeros((requests, self.width), dtype=np.float32)
        if self.drafter in action[0]:
            own = np.linspace(self.least, self.most, requests)[:, None]
            own = np.clip(own + rng.normal(0.0, self.spread, chances.shape), 0.02, 0.98)
            chances[:] = np.cumprod(own, axis=1)
        return chances, np.full(requests, self.drafter, dtype=np.int64)


@dataclass
class World:
    """An engine without a model: ``requests`` decode for ever."""

    device: Seconds
    host: Callable[[int, int, int], float]
    """By (requests, drafting requests, ends)."""
    texts: Texts
    requests: int = 1
    in_flight: int = 1
    overlap: bool = False
    proposers: tuple[int, ...] = (0,)
    noise: float = 0.02
    hiccups: float = 0.001
    """How often a round takes ten times as long."""
    busy: float = 1.0
    """How many times slower the machine is now."""
    prompt_rows: int = 0
    prompts: int = 0
    """That these are of; each takes the host ``prompt_host`` seconds."""
    prompt_host: float = 0.0
    prompt_share: float = 1.0
    """How many of the rounds carry them."""
    stairs: tuple[int, ...] = ()
    """Numbers of drafts at which the device's time rises, beside others."""
    seed: int = 0
    late: bool = False
    """Whether what the host was late for one round the next ones have to make up for."""
    deciding: float = 0.0
    """Seconds that it takes the host to decide about drafts anew."""
    host_noise: float = 0.1
    tokens: float = 0.0
    own_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """float64 [requests]: of each, since there are so many."""
    seconds: float = 0.0
    verified: int = 0
    looked: int = 0
    rounds: int = 0
    flights: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.text_rng = np.random.default_rng(self.seed + 1)
        self.hand: tuple[np.ndarray, np.ndarray] | None = None
        self.report: tuple[np.ndarray, np.ndarray] | None = None
        self.parents: np.ndarray | None = None
        """Of what was reported last."""
        self._decision: Decision | None = None
        self._launched = 0.0
        self._ends: deque[float] = deque()
        """When the last round was launched, and when rounds in flight end on the device."""
        self.texts.start(self.requests, self.text_rng)

    def run(self, planner: Decides, rounds: int) -> float:
        """Tokens a second over so many rounds."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            self.step(planner)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def step(self, planner: Decides) -> Decision:
        chances, whose = self.report if self.report is not None else (None, None)
        if chances is not None and whose is not None and len(chances) != self.requests:
            grown = np.full((self.requests, chances.shape[1]), np.nan, dtype=np.float32)
            count = min(len(grown), len(chances))
            grown[:count] = chances[:count]
            chances = grown
            whose = np.resize(whose, self.requests)
        beside = self.prompt_rows and (
            self.prompt_share == 1.0 or self.rng.random() < self.prompt_share
        )
        rows, prompts = (self.prompt_rows, self.prompts) if beside else (0, 0)
        situation = Situation(
            self.requests,
            rows,
            chances,
            whose,
            self.proposers,
            self.texts.width,
            100.0,
            slots=np.arange(self.requests),
            prompts=prompts,
            parents=self.parents,
        )
        decision = planner.decide(situation)
        anew, self._decision = decision is not self._decision, decision
        self.flights.append((decision, situation, *self._execute(decision, rows, prompts, anew)))
        if len(self.flights) >= self.in_flight:
            decision, situation, landed, report = self.flights.popleft()
            planner.landed(decision, situation, landed)
            self.report = report
            self.parents = self.texts.parents(self.requests, decision.action)
        self.rounds += 1
        return decision

    def _execute(
        self, decision: Decision, rows: int, prompts: int, anew: bool
    ) -> tuple[Landed, tuple[np.ndarray, np.ndarray]]:
        requests, rng = self.requests, self.rng
        verified, drafting = 0, np.zeros(requests, dtype=bool)
        gains = np.zeros(requests)
        if self.hand is not None and decision.drafts and len(self.hand[0]) == requests:
            chances = self.hand[0]
            order = np.argsort(-chances, axis=None, kind="stable")[: decision.drafts]
            order = order[chances.reshape(-1)[order] > 0]
            taken = np.zeros(chances.shape, dtype=bool)
            taken.reshape(-1)[order] = True
            verified = len(order)
            drafting |= taken.any(axis=1)
            # As many tokens as are to be expected: the same in the end, with less noise.
            gains = (chances * taken).sum(axis=1)
        gained = float(gains.sum())
        self.tokens += requests + gained
        if np.shape(self.own_tokens) != gains.shape:
            self.own_tokens = np.zeros(requests)
        self.own_tokens += 1.0 + gains
        self.texts.reached(self.tokens)
        new = self.texts.offers(requests, decision.action, self.text_rng)
        drafting |= new[0][:, 0] > 0
        self.hand = new if decision.proposers else None
        factor = self.busy * math.exp(rng.normal(0, self.noise))
        factor *= 10 if rng.random() < self.hiccups else 1
        device = self.device(requests, rows, decision.action, decision.drafts) * factor
        count = int(np.count_nonzero(drafting))
        host = self.host(requests, count, 0) + self.prompt_host * prompts
        proposing = bool(decision.proposers)
        host += self.deciding * (anew and proposing)
        host *= math.exp(rng.normal(0, self.host_noise))
        if self.late:
            if len(self._ends) == self.in_flight:
                self._launched = max(self._launched, self._ends.popleft())
            self._launched += host
            self.seconds = max(self.seconds, self._launched) + device
            self._ends.append(self.seconds)
        else:
            self.seconds += max(device, host) if self.overlap else device + host
        self.verified += verified
        self.looked += proposing
        sample = HostSample(requests, count, 0, host, proposing, prompts, anew and proposing)
        landed = Landed(device, sample, verified, gained, count)
        return landed, new


@dataclass
class Fixed:
    """Always the same action, and of its drafts what is best by true costs."""

    action: Action
    world: World

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def device(self, requests: int, offered: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of drafts, and what the device takes for them."""
        if (requests, offered) not in self._known:
            world = self.world
            some = np.unique([*np.linspace(0, offered, 65).astype(int).tolist(), *world.stairs])
            some = some[some <= offered]
            times = np.array([world.device(requests, 0, self.action, n) for n in some])
            self._known[requests, offered] = some, times
        return self._known[requests, offered]

    def decide(self, situation: Situation) -> Decision:
        drafts, world = 0, self.world
        if world.hand is not None and world.hand[0].any():
            chances = world.hand[0]
            some, times = self.device(situation.requests, int(np.count_nonzero(chances)))
            host = world.host(situation.requests, int((chances[:, 0] > 0).sum()), 0)
            times = np.maximum(times, host) if world.overlap else times + host
            drafts = int(some[best_drafts(chances, some, times).at])
        return Decision(drafts, *self.action)

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        pass
