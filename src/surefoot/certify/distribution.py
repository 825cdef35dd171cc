"""Sampled text follows the model's distribution, and its randomness is independent where it must
be: judged by statistics alone, without trust in how the noise is made.

Many seeds draw a few tokens after each of a few prompts, with speculation and without. Every token
is turned into a number that is uniform on [0, 1) if and only if the token follows its exact
distribution: the mass of all lower ids plus a random part of its own (randomised probability
integral transform). Uniformity, and independence of neighbouring positions, seeds and choices, are
then chi-square tests, whatever the vocabulary. A flat cell (very high temperature) makes nearly
every number distinct, so that shared noise cannot hide behind a peaked distribution.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from surefoot.certify import statistics
from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import PLAIN, Job, Outcome, run_jobs
from surefoot.certify.parity import Progress
from surefoot.certify.prefill import continuations
from surefoot.certify.regret import probabilities
from surefoot.certify.sizes import Size
from surefoot.certify.subject import MIXED, RIGHT
from surefoot.request import SamplingParams

FALSE_DISCOVERY_RATE = 0.05
FIRST_SEED = 100_000
SEED_ORDER = (0, 0), (1, 0), (1, 1 << 40), (0, 1 << 40)
"""Of every four seeds in a row, what is added."""
CHOICES = 2
BATCH = 32
MAX_DRAFTS = 3
PROMPT_TOKENS = 17
CELLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("flat", {"temperature": 100.0}),
    ("temperature 1", {"temperature": 1.0}),
    ("temperature 0.8, top-k 50, top-p 0.9", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    ("temperature 1.3, min-p 0.05", {"temperature": 1.3, "min_p": 0.05}),
)


@dataclass(frozen=True)
class Test:
    """One hypothesis, with the p-value of its chi-square test."""

    name: str
    p_value: float
    samples: int
    freedom: int


@dataclass
class Draws:
    """Of one cell, one way: uniform numbers by (seed index, choice, position), and how often each
    token came first beside its exact chance."""

    uniforms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    firsts: Counter[int] = field(default_factory=Counter)
    first_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    chances: torch.Tensor | None = None


def run_distribution(
    judge: Judge, size: Size, progress: Progress, stop_at_first: bool = False
) -> Section:
    """All cells; what is rejected is drawn again with fresh seeds, and fails if rejected again.
    ``stop_at_first``: weigh each cell by itself and end with the first that fails."""
    section = Section("distribution")
    started = time.perf_counter()
    tests: list[Test] = []
    for number in range(len(CELLS)):
        progress(section.name, number, len(CELLS))
        tests += _run_cell(judge, section, size, number, first_seed=FIRST_SEED)
        if stop_at_first:
            _weigh(judge, section, size, tests)
            if section.failed:
                return section
            tests = []
    progress(section.name, len(CELLS), len(CELLS))
    if tests:
        _weigh(judge, section, size, tests)
    section.seconds = time.perf_counter() - started
    return section


def _weigh(judge: Judge, section: Section, size: Size, tests: Sequence[Test]) -> None:
    rejected = statistics.benjamini_hochberg([t.p_value for t in tests], FALSE_DISCOVERY_RATE)
    suspects = [test for test, bad in zip(tests, rejected, strict=True) if bad]
    confirmed = _confirm(judge, section, size, suspects)
    alpha = FALSE_DISCOVERY_RATE / len(tests)
    for test in confirmed:
        section.problem(
            f"{test.name}: rejected twice, the second time on fresh seeds with p = "
            f"{test.p_value:.2g} ({test.samples} samples)"
        )
    section.details = {
        "q": FALSE_DISCOVERY_RATE,
        "tests": [
            {
                "name": test.name,
                "p": test.p_value,
                "samples": test.samples,
                "freedom": test.freedom,
                "rejected": bad,
                "smallest_shift": _shift(test, alpha),
            }
            for test, bad in zip(tests, rejected, strict=True)
        ],
        "rejected_once": [test.name for test in suspects],
        "smallest_shift": min((_shift(test, alpha) for test in tests), default=1.0),
        "largest_smallest_shift": max((_shift(test, alpha) for test in tests), default=1.0),
    }


def _shift(test: Test, alpha: float) -> float:
    return round(statistics.smallest_shift(test.samples, test.freedom, alpha), 4)


def _confirm(judge: Judge, section: Section, size: Size, suspects: Sequence[Test]) -> list[Test]:
    """One run in twenty rejects something by chance; fresh seeds tell chance from defect."""
    numbers = {
        number
        for number, (name, _) in enumerate(CELLS)
        if any(test.name.startswith(f"{name}: ") for test in suspects)
    }
    again = [
        test
        for number in sorted(numbers)
        for test in _run_cell(judge, section, size, number, first_seed=9 * FIRST_SEED)
        if test.name in {suspect.name for suspect in suspects}
    ]
    if not again:
        return []
    bad = statistics.benjamini_hochberg([test.p_value for test in again], FALSE_DISCOVERY_RATE)
    return [test for test, is_bad in zip(again, bad, strict=True) if is_bad]


def _run_cell(
    judge: Judge, section: Section, size: Size, number: int, first_seed: int
) -> list[Test]:
    name, values = CELLS[number]
    jobs = _jobs(judge, size, values, number, first_seed)
    subject = judge.subject
    # The prefix cache is on, on both sides: hundreds of requests share a prompt, and the judge is
    # the exact distribution.
    off = judge.plain_texts(jobs, prefix_caching=True)
    texts = tuple({(*job.prompt, *out.tokens) for job, out in zip(jobs, off, strict=True)})
    methods = (MIXED, RIGHT, *subject.proposers)
    tested = [
        replace(job, method=methods[i % len(methods)], max_drafts=MAX_DRAFTS)
        for i, job in enumerate(jobs)
    ]
    engine = subject.engine(
        max(job.longest for job in jobs), BATCH, texts=texts, enable_prefix_caching=True
    )
    on, activity = run_jobs(engine, tested)
    section.activity.add(activity)
    section.texts += 2 * len(jobs)
    section.positions += sum(len(out.tokens) for out in on)
    exact = _Exact(judge, jobs, [*off, *on])
    draws = {"off": exact.draws(jobs, off, 11), "on": exact.draws(jobs, on, 12)}
    return _tests(name, draws, size)


def _jobs(
    judge: Judge, size: Size, values: dict[str, Any], number: int, first_seed: int
) -> list[Job]:
    subject = judge.subject
    prompt = subject.prompts[number % len(subject.prompts)][:PROMPT_TOKENS]
    length = min(size.sampled_positions, subject.decoder.config.max_positions - len(prompt))
    jobs = []
    for index in range(size.seeds):
        # Neighbouring seeds on purpose, and seeds that differ in their upper half alone: they must
        # be as independent as distant ones.
        place, upper = SEED_ORDER[index % 4]
        seed = first_seed + 1000 * number + index // 4 * 4 + place + upper
        params = SamplingParams(seed=seed, max_tokens=length, ignore_eos=True, **values)
        for choice in range(CHOICES):
            jobs.append(Job(prompt, params, PLAIN, choice=choice, label=f"seed {seed}"))
    return jobs


class _Exact:
    """Exact distributions after every prefix that was drawn, computed once each."""

    def __init__(self, judge: Judge, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        self.judge = judge
        self.prompt = jobs[0].prompt
        self.job = jobs[0]
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        texts = list({tuple(outcome.tokens) for outcome in outcomes})
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            logits = continuations(judge.subject.decoder, self.prompt, part)
            for text, rows in zip(part, logits, strict=True):
                self._enter(text, rows)

    def _enter(self, text: tuple[int, ...], rows: torch.Tensor) -> None:
        """Keep, per prefix and drawn token, (mass of lower ids, own mass); the whole distribution
        for the first position only."""
        for at, token in enumerate(text):
            if text[: at + 1] in self.known:
                continue
            chances = probabilities(rows[at], self.judge.row(self.job, text[:at]))
            below = chances[:token].sum()
            self.known[text[: at + 1]] = torch.stack((below, chances[token]))
            if at == 0 and () not in self.known:
                self.known[()] = chances

    def draws(self, jobs: Sequence[Job], outcomes: Sequence[Outcome], seed: int) -> Draws:
        random, draws = Random(seed), Draws(chances=self.known[()])
        for index, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True)):
            tokens = tuple(outcome.tokens)
            for at in range(len(tokens)):
                below, own = self.known[tokens[: at + 1]].tolist()
                value = below + random.random() * own if own else -1.0
                # A token without any chance lands where it does the most harm.
                draws.uniforms[index // CHOICES, job.choice, at] = max(0.0, value)
            draws.firsts[tokens[0]] += 1
            draws.first_tokens[index // CHOICES, job.choice] = tokens[0]
        return draws


def _tests(name: str, draws: dict[str, Draws], size: Size) -> list[Test]:
    found: list[Test] = []

    def enter(what: str, samples: int, result: tuple[float, int]) -> None:
        if result[1] > 0:
            found.append(Test(f"{name}: {what}", result[0], samples, result[1]))

    for way, draw in draws.items():
        values = draw.uniforms
        assert draw.chances is not None
        chances = draw.chances.tolist()
        counts = [draw.firsts[token] for token in range(len(chances))]
        result = statistics.goodness_of_fit(counts, chances)
        enter(f"first tokens against the exact chances, {way}", sum(counts), result)
        for at in range(size.sampled_positions):
            here = [value for (_, _, position), value in values.items() if position == at]
            enter(f"token {at} follows its distribution, {way}", len(here), _uniform(here))
        everything = list(values.values())
        enter(f"all tokens follow their distribution, {way}", len(everything), _uniform(everything))
        steps = {"positions": (0, 0, 1), "seeds": (1, 0, 0), "choices": (0, 1, 0)}
        for (what, step), first in itertools.product(steps.items(), (0, 1)):
            pairs = _pairs(values, step, first)
            result = statistics.independent(pairs) if pairs else (1.0, 0)
            words = f"neighbouring {what} are independent, from {('even', 'odd')[first]} ones"
            enter(f"{words}, {way}", len(pairs), result)
    # Equal seeds give equal texts, so each side brings other seeds.
    on = Counter(t for (seed, _), t in draws["on"].first_tokens.items() if seed % 2)
    off = Counter(t for (seed, _), t in draws["off"].first_tokens.items() if not seed % 2)
    tokens = sorted({*on, *off})
    result = statistics.same_distribution([on[t] for t in tokens], [off[t] for t in tokens])
    enter("first tokens, on against off", sum(on.values()), result)
    left, right = _histogram(draws["on"].uniforms, 1), _histogram(draws["off"].uniforms, 0)
    result = statistics.same_distribution(left, right)
    enter("all tokens, on against off", int(sum(left)), result)
    return found


def _uniform(values: Sequence[float]) -> tuple[float, int]:
    return statistics.uniform(values) if values else (1.0, 0)


def _pairs(
    values: dict[tuple[int, int, int], float], step: tuple[int, int, int], first: int
) -> list[tuple[float, float]]:
    """Neighbours along ``step``, the first of each pair even (``first`` 0) or odd (1): a defect may
    tie every other pair only."""
    pairs = []
    for (seed, choice, position), value in values.items():
        # Disjoint pairs, so that the pairs are independent of each other.
        if any(
            s and key % 2 != first for key, s in zip((seed, choice, position), step, strict=True)
        ):
            continue
        other = values.get((seed + step[0], choice + step[1], position + step[2]))
        if other is not None:
            pairs.append((value, other))
    return pairs


def _histogram(
    values: dict[tuple[int, int, int], float], parity: int, bins: int = 8
) -> list[float]:
    """Of the numbers whose seed is even (0) or odd (1)."""
    counts = [0.0] * bins
    for (seed, _, _), value in values.items():
        if seed % 2 == parity:
            counts[min(bins - 1, int(value * bins))] += 1
    return counts
