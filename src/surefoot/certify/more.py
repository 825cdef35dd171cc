"""Further texts, where a proposer had too few drafts verified or accepted, or too little was
compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, run_jobs
from surefoot.certify.near_ties import find_others, refusals
from surefoot.certify.parity import seed_of
from surefoot.certify.sizes import Size
from surefoot.certify.subject import MIXED
from surefoot.request import SamplingParams

MORE = "further texts"
BATCH = 8
TEXTS = 16
"""Of a batch of further texts."""


def run_more(
    judge: Judge, section: Section, size: Size, number: int, wanted: Sequence[str]
) -> Section:
    """Batch ``number`` of further texts, for ``section``, drafted for by those that are ``wanted``
    ("": a probe). Prompts repeat what came before, so that those who look things up find
    something."""
    started = time.perf_counter()
    subject, random = judge.subject, Random(number)
    prompts = subject.prompts
    jobs = []
    for place in range(TEXTS):
        head, tail = prompts[(number + place) % len(prompts)], random.choice(prompts)
        prompt = (*head, *tail, *head)[: subject.decoder.config.max_positions // 2]
        room = subject.decoder.config.max_positions - len(prompt)
        params = SamplingParams(
            temperature=0.0 if place % 4 else 0.7,
            seed=seed_of(9000 + TEXTS * number + place),
            max_tokens=min(size.greedy_length, room),
            ignore_eos=True,
        )
        method = wanted[place % len(wanted)] or MIXED
        jobs.append(Job(prompt, params, method, arrival=place, label=f"further text {place}"))
    texts = judge.plain_texts(jobs)
    known = tuple((*job.prompt, *text.tokens) for job, text in zip(jobs, texts, strict=True))
    others = find_others(judge, jobs, texts)
    engine = subject.engine(max(job.longest for job in jobs), BATCH, texts=known, others=others)
    got, activity = run_jobs(engine, jobs, subject.tokenizer)
    section.activity.add(activity)
    section.refusals.add(refusals(judge, jobs, got, known, others, activity.turned_down))
    section.scenarios.append(f"batch {number + 1}")
    for job, want, outcome in zip(jobs, texts, got, strict=True):
        where = f"batch {number + 1}, {job.label}, drafts by {job.method}"
        judge.compare(section, where, replace(job, arrival=0), want, outcome)
    section.seconds += time.perf_counter() - started
    return section
