"""Engines that play recorded texts on a clock that only they move: what crowds of them gain."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from planner_world import Decides
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, Decision, Landed, Situation
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import PromptRounds, RecordedCosts

GOLDEN = Path(__file__).parents[1] / "golden" / "planner" / "texts.npz"
WIDTH = 7
DRAFTER = 0
STEPS = (2, 3, 5, 7)
DRAFTING: list[Action] = [((DRAFTER,), steps) for steps in STEPS]
SPANS = (8, 16, 24, 32, 48, 64, 96, 128)
EACH = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Rows of each request that rounds are recorded for."""


class Admits(Decides, Protocol):
    """It is told, too, who comes in."""

    decided: bool
    """As ``Planner`` has it."""

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """As ``Planner.admit``."""
        ...


def device_seconds(spans: int, rows: int, action: Action) -> float:
    """About what an H200 takes for rounds of a model of 135 million weights."""
    drafting = 9e-5 + 1.2e-6 * spans + 4e-6 * action[1] if action[0] else 0.0
    verifying = 1.1e-4 + 1.2e-6 * (rows - spans) if rows > spans else 0.0
    return 6.1e-4 + 4.2e-6 * spans + drafting + verifying


def host_seconds(requests: int, drafting: int) -> float:
    return 1.6e-4 + 1.2e-6 * requests + 1e-6 * drafting


def costs() -> RecordedCosts:
    sizes = [RecordedSize(count, count, count, NOTHING) for count in SPANS]
    for count in SPANS:
        rows = sorted({int(count * each) for each in EACH})
        sizes += [RecordedSize(count, n, n, action) for action in DRAFTING for n in rows]
    times = {size: [(100, device_seconds(size.spans, size.rows, size.action))] for size in sizes}
    prompts = ExactCosts([1, 512], [6e-4, 2e-3], {DRAFTER: Proposing(3e-5, longest=WIDTH)})
    beside = PromptRounds(prompts, [NOTHING, DRAFTING[-1]], 8 * SPANS[-1])
    return RecordedCosts(times, {SPANS[-1]: beside})


def new_planner() -> Planner:
    known = [HostSample(n, d, 0, host_seconds(n, d), d > 0) for n in SPANS for d in (0, n)]
    return Planner(costs(), HostCosts(known), WIDTH, {DRAFTER: WIDTH})


class Always:
    """One action, and of its drafts the number that promises most by what is on offer now, whoever
    has a bad offer."""

    def __init__(self, engine: PlayedTexts, action: Action) -> None:
        self.engine, self.action = engine, action
        self.costs = costs()
        self.decided = False

    def admit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        pass

    def decide(self, situation: Situation) -> Decision:
        chances = np.sort(self.engine.chances[self.engine.running], axis=None)[::-1]
        offered = int(np.count_nonzero(chances))
        if not offered:
            return Decision(0, *self.action)
        requests = situation.requests
        rows, seconds = self.costs.table(requests, 0, self.action, offered, 100.0)
        gains = np.concatenate(([0.0], np.cumsum(chances[:offered])))
        best = ((requests + gains[np.minimum(rows, offered)]) / seconds).argmax()
        return Decision(int(min(rows[best], offered)), *self.action)

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        pass


class PlayedTexts:
    """Two rounds in flight, the host beside the device; ``kind`` as in the golden files."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        recorded = np.load(GOLDEN)
        self.right = recorded[f"{kind}_right"].astype(np.int64)
        self.believed = recorded[f"{kind}_chances"].astype(np.float32) / 255.0
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.costs = costs()
        self.seconds = 0.0
        self.running = np.zeros(0, dtype=np.int64)
        self.text, self.place, self.length = np.zeros((3, SPANS[-1]), dtype=np.int64)
        self.begun = np.zeros(SPANS[-1])
        self.chances = np.zeros((SPANS[-1], WIDTH), dtype=np.float32)
        self.reported = np.full_like(self.chances, np.nan)
        self.told = False
        self.flights: deque[tuple[Decision, Situation, Landed, np.ndarray | None]] = deque()
        self.paces: list[float] = []
        """Seconds a token, of each text that ended."""

    def admit(self, planner: Admits, slots: Sequence[int]) -> None:
        own = np.array(slots, dtype=np.int64)
        for slot in slots:
            self.text[slot], self.length[slot] = next(self.coming)
        self.place[own] = 0
        self.begun[own] = self.seconds
        self.chances[own], self.reported[own] = 0.0, np.nan
        self.running = np.union1d(self.running, own)
        planner.admit(own, self.length[own])

    def _coming(self) -> Iterator[tuple[int, int]]:
        """Texts and their lengths: the same ones whoever decides, and each as often as the others,
        since some gain twice as much as others."""
        rng, count = np.random.default_rng(self.seed), len(self.right)
        for turn in itertools.count():
            if not turn % count:
                order = rng.permutation(count)
            yield int(order[turn % count]), int(rng.integers(96, self.right.shape[1]))

    def traffic(self, planner: Admits, requests: int, texts: int) -> float:
        """Tokens a second, with another text in the place of each that ends."""
        self.coming = self._coming()
        self.admit(planner, range(requests))
        tokens, begun = 0, self.seconds
        while len(self.paces) < texts:
            tokens += self.step(planner)
            ended = self.running[self.place[self.running] >= self.length[self.running]]
            if len(ended):
                taken = self.seconds - self.begun[ended]
                self.paces += (taken / self.length[ended]).tolist()
                self.admit(planner, ended.tolist())
        return tokens / (self.seconds - begun)

    def step(self, planner: Admits) -> int:
        """A round; returns its tokens."""
        own, requests = self.running, len(self.running)
        reported = self.reported[own] if self.told else None
        whose = np.full(requests, DRAFTER) if self.told else None
        situation = Situation(
            requests, 0, reported, whose, (DRAFTER,), WIDTH, 100.0, slots=self.running
        )
        decision = planner.decide(situation)
        offers = self.chances[own]
        taken = np.zeros(offers.shape, dtype=bool)
        order = np.argsort(-offers, axis=None, kind="stable")[: decision.drafts]
        taken.reshape(-1)[order] = offers.reshape(-1)[order] > 0.0
        verified = taken.sum(axis=1)
        gained = np.minimum(verified, self.right[self.text[own], self.place[own]])
        tokens = np.minimum(1 + gained, self.length[own] - self.place[own])
        self.place[own] += tokens
        next_place = np.minimum(self.place[own], self.right.shape[1] - 1)
        self.chances[own] = 0.0
        if decision.proposers:
            steps = decision.steps
            self.chances[own, :steps] = self.believed[self.text[own], next_place][:, :steps]
        size = self.costs.size_for(requests, decision.action, decision.drafts, 100.0)
        assert size is not None
        device = device_seconds(size.spans, size.rows, size.action)
        device *= float(np.exp(self.rng.normal(0.0, 0.01)))
        drafting = int(np.count_nonzero(verified | (self.chances[own, 0] > 0.0)))
        host = host_seconds(requests, drafting)
        self.seconds += max(device, host)
        proposing = bool(decision.proposers)
        sample = HostSample(requests, drafting, 0, host, proposing, decided=planner.decided)
        outcome = Landed(device, sample, int(verified.sum()), float(gained.sum()), drafting)
        offered = self.chances[own].copy() if decision.proposers else None
        self.flights.append((decision, situation, outcome, offered))
        if len(self.flights) == 2:
            decision, situation, outcome, offered = self.flights.popleft()
            planner.landed(decision, situation, outcome)
            self.told = offered is not None
            if offered is not None and situation.slots is not None:
                self.reported[situation.slots] = offered
        return int(tokens.sum())
