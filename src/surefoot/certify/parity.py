"""Greedy and sampled parity: scenarios of traffic and engine shape against plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from surefoot.certify.arranging import arranged
from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, Outcome, run_jobs
from surefoot.certify.near_ties import find_others, refusals
from surefoot.certify.sizes import Scenario, Size
from surefoot.certify.subject import LARGE_BLOCK
from surefoot.certify.unseeded import run_unseeded
from surefoot.request import MAX_SEED, SamplingParams

Progress = Callable[[str, int, int], None]
"""(Label, done, total)."""
TEMPERATURES = (0.7, 1.0, 1.4)


def run_parity(
    judge: Judge,
    size: Size,
    sampled: bool,
    progress: Progress,
    stop_at_first: bool = False,
    first: str = "",
) -> Section:
    """Run every scenario, the one named ``first`` before the others. ``stop_at_first``: end with
    the first scenario that shows a defect."""
    section = Section("sampled parity" if sampled else "greedy parity")
    started = time.perf_counter()
    jobs = base_jobs(judge, size, sampled)
    scenarios = [
        item
        for item in size.scenarios
        if not (sampled and item.policy == "auto")
        and (item.drafts_by != "tree" or judge.subject.trees)
    ]
    progress(section.name, 0, len(scenarios) + 1)
    texts = judge.plain_texts(jobs)
    if not stop_at_first:
        judge.anchor(section, jobs, texts)
        if judge.subject.recorded:
            _run_plain_recorded(judge, section, jobs, texts)
    numbered = sorted(enumerate(scenarios, 1), key=lambda item: item[1].name != first)
    for number, scenario in numbered:
        progress(section.name, number, len(scenarios) + 1)
        run_scenario(judge, section, scenario, number, jobs, texts)
        if stop_at_first and section.failed:
            break
    else:
        if sampled:
            run_unseeded(judge, section, size)
    progress(section.name, len(scenarios) + 1, len(scenarios) + 1)
    section.seconds = time.perf_counter() - started
    return section


def _run_plain_recorded(
    judge: Judge, section: Section, jobs: Sequence[Job], texts: Sequence[Outcome]
) -> None:
    """Recorded rounds that nobody drafts for, against called ones."""
    longest = max(job.longest for job in jobs)
    engine = judge.subject.engine(longest, 8, max_draft_tokens=0, recorded=True)
    got, activity = run_jobs(engine, jobs, judge.subject.tokenizer)
    section.activity.add(activity)
    section.scenarios.append("plain, recorded rounds")
    for job, want, outcome in zip(jobs, texts, got, strict=True):
        judge.compare(section, f"plain, recorded rounds, {job.label}", job, want, outcome)


def seed_of(index: int) -> int:
    """Small seeds, seeds beyond 32 bits, and those near the largest."""
    spread = 1000 + index, (1 << 32) + index, MAX_SEED - 1000 - index, (index + 1) << 45 | 1000
    return spread[index % 4]


def base_jobs(judge: Judge, size: Size, sampled: bool) -> list[Job]:
    """One job per prompt and round over the prompts, every fourth one ending at its end token."""
    prompts = judge.subject.prompts
    count = max(size.sampled_jobs if sampled else size.greedy_jobs, len(prompts))
    room = judge.subject.decoder.config.max_positions - max(map(len, prompts))
    length = min(size.sampled_length if sampled else size.greedy_length, room)
    jobs = []
    for index in range(count):
        params = SamplingParams(
            temperature=TEMPERATURES[index % len(TEMPERATURES)] if sampled else 0.0,
            top_p=(1.0, 0.9)[index % 2] if sampled else 1.0,
            seed=seed_of(index),
            max_tokens=length,
            ignore_eos=index % 4 != 3,
        )
        prompt = prompts[index % len(prompts)]
        jobs.append(Job(prompt, params, label=f"prompt {index % len(prompts)}"))
    return jobs


def run_scenario(
    judge: Judge,
    section: Section,
    scenario: Scenario,
    number: int,
    jobs: Sequence[Job],
    texts: Sequence[Outcome],
) -> None:
    """Run one scenario over its share of the jobs and compare every text."""
    subject = judge.subject
    most = subject.max_drafts
    drafts = min(scenario.drafts or most, most)
    batch = subject.config.max_num_seqs if scenario.crowd else scenario.batch
    # Of a crowd some end early: others wait to take their places.
    count = batch * 5 // 4 if scenario.crowd else max(1, round(len(jobs) * scenario.share))
    # Another part of the jobs in each scenario.
    chosen = [(number * 3 + index) % len(jobs) for index in range(count)] * scenario.repeat
    tested: list[Job] = []
    wanted: list[Outcome] = []
    for place, index in enumerate(chosen):
        job = arranged(jobs[index], scenario, place, number, subject, drafts)
        tested.append(job)
        wanted.append(texts[index].cut(job.params.max_tokens or 0))
    longest = max(job.longest for job in tested)
    block_size = subject.small_block if number % 2 else LARGE_BLOCK
    options: dict = {
        "max_draft_tokens": drafts,
        "draft_policy": scenario.policy,
        "enable_prefix_caching": scenario.prefix_caching,
        "block_size": block_size,
    }
    if scenario.policy == "auto":
        options["calibration_seconds"] = 0.5
    if scenario.chunk is not None:
        options["max_num_batched_tokens"] = max(scenario.chunk, batch)
    if scenario.tight:
        options["kv_blocks"] = 2 * (-(-(longest + drafts) // block_size) + 1)
    used = list(dict.fromkeys(chosen))
    known = tuple((*jobs[index].prompt, *texts[index].tokens) for index in used)
    every = find_others(judge, jobs, texts)
    others = [every[index] for index in used]
    engine = subject.engine(longest, batch, texts=known, others=others, **options)
    got, activity = run_jobs(engine, tested, subject.tokenizer)
    section.activity.add(activity)
    section.refusals.add(refusals(judge, tested, got, known, others, activity.turned_down))
    section.scenarios.append(scenario.name)
    if activity.leaks:
        section.problem(f"{scenario.name}: {activity.leaks} blocks of KV memory leaked")
    for job, want, outcome in zip(tested, wanted, got, strict=True):
        where = f"{scenario.name}, {job.label}, drafts by {job.method}"
        judge.compare(section, where, job, want, outcome)
