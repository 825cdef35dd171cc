"""Requests without a seed: one is drawn for each, from all of 63 bits, and the text must be what
plain decoding gives for that seed."""

from __future__ import annotations

from dataclasses import replace

from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, run_jobs
from surefoot.certify.sizes import Size
from surefoot.certify.subject import GARBAGE
from surefoot.request import MAX_SEED, SamplingParams

NAME = "requests without a seed"
TEMPERATURES = 0.2, 0.5, 0.9
CHOICES = 2
BATCH = 8
SMALL = 1 << 32


def run_unseeded(judge: Judge, section: Section, size: Size) -> None:
    """Draw first, compare afterwards: nobody knows these texts beforehand, so that drafts are the
    proposers' own, and garbage."""
    subject = judge.subject
    methods = (*subject.proposers, GARBAGE, "auto")
    room = subject.decoder.config.max_positions - max(map(len, subject.prompts))
    jobs: list[Job] = []
    for number in range(size.sampled_jobs):
        params = SamplingParams(
            n=CHOICES,
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            max_tokens=min(size.sampled_length // 2, room),
            ignore_eos=True,
        )
        prompt = subject.prompts[number % len(subject.prompts)]
        method = methods[number % len(methods)]
        leader = len(jobs)
        for choice in range(CHOICES):
            whose = leader if choice else None
            label = f"prompt {number % len(subject.prompts)}, choice {choice}"
            jobs.append(Job(prompt, params, method, choice=choice, leader=whose, label=label))
    engine = subject.engine(max(job.longest for job in jobs), BATCH)
    got, activity = run_jobs(engine, jobs, subject.tokenizer)
    section.activity.add(activity)
    section.scenarios.append(NAME)
    seeds = {outcome.seed for job, outcome in zip(jobs, got, strict=True) if job.leader is None}
    if len(seeds) < size.sampled_jobs:
        section.problem(f"{NAME}: {size.sampled_jobs} requests got {len(seeds)} different seeds")
    elif not all(0 <= seed <= MAX_SEED for seed in seeds) or max(seeds) < SMALL:
        section.problem(f"{NAME}: drawn from another range: {sorted(seeds)}")
    seeded = [
        replace(job, params=replace(job.params, seed=outcome.seed))
        for job, outcome in zip(jobs, got, strict=True)
    ]
    for job, want, outcome in zip(seeded, judge.plain_texts(seeded), got, strict=True):
        judge.compare(section, f"{NAME}, {job.label}, drafts by {job.method}", job, want, outcome)
