"""Every sampling parameter, alone and in combinations in which any two values meet, mixed in one
batch: text, ending and logprobs must be those of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.certify.combinations import GREEDY_FACTORS, SAMPLED_FACTORS, parameter_jobs
from surefoot.certify.compare import Judge
from surefoot.certify.findings import Section
from surefoot.certify.jobs import Job, Outcome, run_jobs
from surefoot.certify.near_ties import find_others, refusals
from surefoot.certify.pairs import count_pairs
from surefoot.certify.parity import Progress
from surefoot.certify.sizes import Size
from surefoot.certify.structure import STRUCTURES, fits
from surefoot.certify.subject import MIXED, RIGHT, RUNNER_UP, TREE
from surefoot.errors import SurefootError
from surefoot.structured import StructuredOutputsParams

FEW = 24
"""Jobs after which a self-test looks whether it has found something."""
PASSES = "batch of 12", "batch of 8, chunked, prefix hits, shortage"


def run_parameters(
    judge: Judge, size: Size, progress: Progress, stop_at_first: bool = False, first: str = ""
) -> Section:
    """Both passes, the one named ``first`` before the other. ``stop_at_first``: end with the first
    pass that shows a defect."""
    section = Section("sampling parameters")
    started = time.perf_counter()
    structures = _structures(judge, section)
    jobs = parameter_jobs(judge, size, structures)
    if judge.subject.tokenizer is None:
        section.notes.append("stop strings were not tested: the model came without a tokenizer")
    passes = len(PASSES)
    progress(section.name, 0, passes + 1)
    wanted = judge.plain_texts(jobs)
    _check_structures(judge, section, jobs, wanted)
    if not stop_at_first:
        judge.anchor(section, *_unstopped(jobs, wanted))
    for turn in sorted(range(passes), key=lambda turn: PASSES[turn] != first):
        progress(section.name, turn + 1, passes + 1)
        for chosen in _batches(judge, jobs, turn, FEW if stop_at_first else len(jobs)):
            _run_batch(judge, section, *_take(chosen, jobs, wanted), turn)
            if stop_at_first and section.failed:
                section.seconds = time.perf_counter() - started
                return section
    progress(section.name, passes + 1, passes + 1)
    section.details["combinations"] = len(jobs)
    section.details["pairs"] = count_pairs(GREEDY_FACTORS) + count_pairs(SAMPLED_FACTORS)
    section.seconds = time.perf_counter() - started
    return section


def _batches(judge: Judge, jobs: Sequence[Job], turn: int, most: int) -> list[list[int]]:
    """Indices of the jobs that run in one engine, about ``most`` of them. One request that needs
    the host in every round takes its whole batch along, so those that can be recorded run by
    themselves once."""
    everyone = list(range(len(jobs)))
    groups = [everyone]
    if not turn and judge.subject.recorded:
        hosted = {
            index
            for index in everyone
            if jobs[index].params.logprobs is not None or jobs[index].params.hosted
        }
        groups = [[index for index in everyone if index not in hosted], sorted(hosted)]
    return [part for group in groups for part in _parts(group, jobs, most)]


def _parts(indices: Sequence[int], jobs: Sequence[Job], most: int) -> list[list[int]]:
    """Choices of one prompt stay together."""
    parts: list[list[int]] = []
    for index in indices:
        if not parts or (len(parts[-1]) >= most and jobs[index].leader is None):
            parts.append([])
        parts[-1].append(index)
    return parts


def _take(
    chosen: Sequence[int], jobs: Sequence[Job], outcomes: Sequence[Outcome]
) -> tuple[list[Job], list[Outcome]]:
    places = {index: place for place, index in enumerate(chosen)}
    leaders = [jobs[index].leader for index in chosen]
    taken = [
        replace(jobs[index], leader=None if leader is None else places[leader])
        for index, leader in zip(chosen, leaders, strict=True)
    ]
    return taken, [outcomes[index] for index in chosen]


def _unstopped(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> tuple[list[Job], list[Outcome]]:
    """Those with tokens; a stop string may leave none."""
    pairs = [(j, o) for j, o in zip(jobs, outcomes, strict=True) if o.tokens]
    return [job for job, _ in pairs], [outcome for _, outcome in pairs]


def _run_batch(
    judge: Judge, section: Section, jobs: Sequence[Job], wanted: Sequence[Outcome], turn: int
) -> None:
    subject = judge.subject
    # Requests that a stop string ends early are continued by what plain decoding said anyway.
    texts = tuple((*job.prompt, *out.tokens) for job, out in zip(jobs, wanted, strict=True))
    others = find_others(judge, jobs, wanted)
    trees = (TREE,) if subject.trees else ()
    methods = [MIXED, RUNNER_UP, *subject.proposers, *trees, MIXED, RIGHT, *subject.proposers]
    tested = []
    for place, job in enumerate(jobs):
        method = methods[(place + turn) % len(methods)]
        if method == RIGHT and subject.hosts and job.params.structured_outputs is not None:
            method = subject.hosts[place % len(subject.hosts)]
        tested.append(replace(job, method=method, arrival=place // 2))
    longest = max(job.longest for job in tested)
    options: dict[str, Any] = {"max_num_batched_tokens": 256}
    if turn:
        # Room for two or three requests: others are preempted, and go on from what they had said.
        block_size, drafts = subject.small_block, subject.max_drafts
        options = {"max_num_batched_tokens": 32, "enable_prefix_caching": True}
        options |= {"block_size": block_size}
        options |= {"kv_blocks": 3 * (-(-(longest + drafts) // block_size) + 1) // 2}
    engine = subject.engine(longest, (12, 8)[turn], texts=texts, others=others, **options)
    got, activity = run_jobs(engine, tested, subject.tokenizer)
    section.activity.add(activity)
    section.refusals.add(refusals(judge, tested, got, texts, others, activity.turned_down))
    section.scenarios.append(PASSES[turn])
    for job, want, outcome in zip(tested, wanted, got, strict=True):
        where = f"{section.scenarios[-1]}, {job.label}, drafts by {job.method}"
        judge.compare(section, where, job, want, outcome)


def _structures(judge: Judge, section: Section) -> list[StructuredOutputsParams]:
    """The structured output that this model and installation can give."""
    grammars = judge.subject.grammars
    found: list[StructuredOutputsParams] = []
    if grammars is None:
        section.notes.append("structured output was not tested: the model came without a tokenizer")
        return found
    for item in STRUCTURES:
        try:
            grammars.start(item.params)
            found.append(item.params)
        except SurefootError as error:
            section.notes.append(f"{item.params.kind} was not tested: {error}")
    return found


def _check_structures(
    judge: Judge, section: Section, jobs: Sequence[Job], outcomes: Sequence[Outcome]
) -> None:
    """Finished texts must fit their grammar, by Python's own parsers."""
    tokenizer = judge.subject.tokenizer
    for job, outcome in zip(jobs, outcomes, strict=True):
        structure = job.params.structured_outputs
        if structure is None or tokenizer is None or outcome.finish != "stop":
            continue
        tokens = outcome.tokens
        ended = tokens[-1] in judge.subject.decoder.config.eos_token_ids
        text = tokenizer.decode(tokens[:-1] if ended else tokens)
        if not fits(structure, text):
            section.problem(f"plain decoding of {job.label}: {text!r} does not fit")
