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

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from surefoot.certify import statistics
from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.hypotheses import Draws, Test, tests_of
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
    # The same random parts in each cell, or in what is drawn again, would repeat an accident.
    own = 2 * (first_seed + number)
    draws = {"off": exact.draws(jobs, off, own), "on": exact.draws(jobs, on, own + 1)}
    return tests_of(name, draws, size.sampled_positions)


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
