"""Texts that cross the positions at which something changes, or may: powers of two up to 1,024, and
where the model has it the length from which its RoPE is scaled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, Outcome, run_jobs
from surefoot.certify.near_ties import find_others, refusals
from surefoot.certify.parity import Progress, seed_of
from surefoot.certify.sizes import Size
from surefoot.certify.subject import MIXED, RUNNER_UP
from surefoot.models.config import ModelConfig
from surefoot.request import SamplingParams

NAME = "long texts"
BOUNDARIES = 256, 512, 1024
BEFORE = 12
"""Tokens between a prompt's end and its boundary."""
BATCH = 4
PASSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("long texts", {"max_num_batched_tokens": 256}),
    ("long texts, chunked, prefix hits, small blocks", {"max_num_batched_tokens": 64}),
)


def rope_boundary(model: ModelConfig) -> int | None:
    """The length from which the model's RoPE is scaled, inside its context; None: nowhere."""
    scaling = model.rope_scaling
    length = scaling.original_max_positions if scaling.kind != "default" else 0
    return length if 0 < length < model.max_positions else None


def boundaries(model: ModelConfig, size: Size) -> list[int]:
    """Positions that texts cross, rising: those that fit in the context and in the size."""
    most = min(model.max_positions, size.long_texts) - size.long_tokens
    scaled = rope_boundary(model)
    wanted = {*BOUNDARIES, *([] if scaled is None else [scaled])}
    return sorted(item for item in wanted if BEFORE < item <= most)


def run_long_texts(
    judge: Judge, size: Size, progress: Progress, stop_at_first: bool = False
) -> Section:
    """Every boundary, greedy with logprobs and sampled without. ``stop_at_first``: end with the
    first pass that shows a defect."""
    section = Section(NAME)
    started = time.perf_counter()
    jobs = long_jobs(judge, size)
    progress(NAME, 0, len(PASSES) + 1)
    if jobs:
        texts = judge.plain_texts(jobs)
        if not stop_at_first:
            judge.anchor(section, jobs, texts)
        for turn in range(len(PASSES)):
            progress(NAME, turn + 1, len(PASSES) + 1)
            few = 2 if stop_at_first else len(jobs)
            for at in range(0, len(jobs), few):
                if not (stop_at_first and section.failed):
                    _run_pass(judge, section, jobs[at : at + few], texts[at : at + few], turn)
    else:
        section.notes.append("no text crosses a boundary: the model's context is too short")
    progress(NAME, len(PASSES) + 1, len(PASSES) + 1)
    section.details["boundaries"] = boundaries(judge.subject.decoder.config, size)
    section.seconds = time.perf_counter() - started
    return section


def long_jobs(judge: Judge, size: Size) -> list[Job]:
    """Two jobs at each boundary."""
    edges = boundaries(judge.subject.decoder.config, size)
    document = _document(judge.subject.prompts, max(edges, default=0) + len(edges))
    jobs = []
    for number, edge in enumerate(edges):
        length = BEFORE + size.long_tokens
        greedy = SamplingParams(temperature=0, logprobs=0, max_tokens=length, ignore_eos=True)
        sampled = SamplingParams(seed=seed_of(number + 1), max_tokens=length, ignore_eos=True)
        for shift, params in enumerate((greedy, sampled)):
            first = number + shift
            prompt = document[first : first + edge - BEFORE]
            jobs.append(Job(prompt, params, label=f"across position {edge}"))
    return jobs


def _document(prompts: Sequence[tuple[int, ...]], length: int) -> tuple[int, ...]:
    """The prompts in changing order, so that something can be looked up and nothing goes on for
    ever."""
    random, tokens = Random(5), list[int]()
    while len(tokens) < length:
        for prompt in random.sample(prompts, len(prompts)):
            tokens += prompt
    return tuple(tokens[:length])


def _run_pass(
    judge: Judge, section: Section, jobs: Sequence[Job], texts: Sequence[Outcome], turn: int
) -> None:
    subject = judge.subject
    name, options = PASSES[turn]
    if turn:
        options = {**options, "block_size": subject.small_block}
    others = find_others(judge, jobs, texts)
    known = tuple((*job.prompt, *text.tokens) for job, text in zip(jobs, texts, strict=True))
    probes, proposers = (MIXED, RUNNER_UP), subject.proposers
    tested, wanted = [], []
    for place, (job, text) in enumerate(zip(jobs, texts, strict=True)):
        # First by a probe or a proposer; then, where the prefix is known, by both.
        own = probes[(place + place // 2 + turn) % 2], proposers[place // 2 % len(proposers)]
        for method in own if turn else (own[place // 2 % 2],):
            tested.append(replace(job, method=method, arrival=turn * 3 * len(tested)))
            wanted.append(text)
    longest = max(job.longest for job in tested)
    engine = subject.engine(
        longest, BATCH, texts=known, others=others, enable_prefix_caching=turn > 0, **options
    )
    got, activity = run_jobs(engine, tested, subject.tokenizer)
    section.activity.add(activity)
    section.refusals.add(refusals(judge, tested, got, known, others, activity.turned_down))
    section.scenarios.append(name)
    for job, want, outcome in zip(tested, wanted, got, strict=True):
        judge.compare(section, f"{name}, {job.label}, drafts by {job.method}", job, want, outcome)
