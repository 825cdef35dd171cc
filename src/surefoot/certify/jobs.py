"""Requests of a certificate, run in an engine step by step: arrivals, cancellations, endings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from surefoot.engine.engine import Engine
from surefoot.engine.output import TextStream
from surefoot.engine.stats import EngineStats
from surefoot.models.loading.tokenizer import Tokenizer
from surefoot.request import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    TokenLogprobs,
)

PLAIN = "off"
EVENTS = (
    "preemptions", "prefix_hits", "cancellations", "chunked", "crowded", "leaks", "replays",
    "called",
)  # fmt: skip
"""The plain counters of ``Activity``."""
CROWD = 16
"""More requests than this in one round are a crowd, counted by itself."""
_ids = itertools.count()


class ImpossibleToken(Exception):
    """A request was given a token that is not in the vocabulary. Nothing can be computed behind
    it: not by a reference either. ``activity``: of the run until then."""

    def __init__(self, text: str, activity: Activity) -> None:
        super().__init__(text)
        self.activity = activity


@dataclass(frozen=True)
class Job:
    """A request: ``arrival`` and ``cancel`` count the engine's steps; ``start`` are output tokens
    it already has; ``leader`` is the index of the job that leads its choices."""

    prompt: tuple[int, ...]
    params: SamplingParams
    method: str = PLAIN
    max_drafts: int | None = None
    arrival: int = 0
    cancel: int | None = None
    choice: int = 0
    leader: int | None = None
    start: tuple[int, ...] = ()
    label: str = ""

    @property
    def longest(self) -> int:
        return len(self.prompt) + (self.params.max_tokens or 0)


@dataclass
class Outcome:
    """What a job came to. ``finish`` is ``stop``, ``length`` or ``abort``."""

    tokens: list[int]
    finish: str
    stop_reason: int | str | None = None
    text: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    seed: int = 0
    """The request's own, or the one that was drawn for it."""

    def cut(self, length: int) -> Outcome:
        """What the same request gives with ``max_tokens`` set to ``length``."""
        if len(self.tokens) <= length:
            return self
        return Outcome(self.tokens[:length], "length", None, None, self.logprobs[:length])


@dataclass(frozen=True)
class TurnedDown:
    """The first draft of a span that was: of job ``job``, at output position ``at``, in a round
    that began behind ``start`` output tokens."""

    job: int
    start: int
    at: int


@dataclass
class Activity:
    """What speculation and the scheduler did in a run, by method where that makes sense."""

    rounds: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    """Spans of which a draft was turned down."""
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    """Rounds by accepted length."""
    turned_down: list[TurnedDown] = field(default_factory=list)
    """Every draft that was, of a run; not added up."""
    crowded: int = 0
    """Rejections in rounds of more than ``CROWD`` requests."""
    most: int = 0
    """Requests that ran at once."""
    furthest: int = 0
    """The last position at which a draft was verified."""
    preemptions: int = 0
    prefix_hits: int = 0
    cancellations: int = 0
    chunked: int = 0
    leaks: int = 0
    replays: int = 0
    """Rounds of recorded sizes, which a GPU replays."""
    called: int = 0
    """Rounds called with just the rows that they need."""

    def add(self, other: Activity) -> None:
        for name in ("rounds", "verified", "accepted", "rejections"):
            getattr(self, name).update(getattr(other, name))
        for method, lengths in other.lengths.items():
            self.lengths.setdefault(method, Counter()).update(lengths)
        for name in EVENTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most = max(self.most, other.most)
        self.furthest = max(self.furthest, other.furthest)


def run_jobs(
    engine: Engine,
    jobs: Sequence[Job],
    tokenizer: Tokenizer | None = None,
    on_step: Callable[[int], None] | None = None,
) -> tuple[list[Outcome], Activity]:
    """Run all jobs to their end. Stop strings need the tokenizer. Raises ImpossibleToken."""
    requests = _requests(engine, jobs)
    vocab = engine.decoder.config.vocab_size
    streams = _streams(requests, tokenizer)
    places = {request.request_id: place for place, request in enumerate(requests)}
    activity = Activity()
    before_run = replace(engine.stats)
    pending = list(range(len(jobs)))
    step = 0
    while pending or engine.has_work:
        for index in [index for index in pending if jobs[index].arrival <= step]:
            pending.remove(index)
            if not requests[index].finished:
                engine.add(requests[index])
        for index, job in enumerate(jobs):
            if job.cancel == step and index not in pending and not requests[index].finished:
                engine.finish(requests[index], FinishReason.ABORT)
        before = {r.request_id: (r.stats.verified, r.stats.accepted) for r in requests}
        progress = engine.step()
        activity.most = max(activity.most, len(progress))
        for item in progress:
            request = item.request
            place = places[request.request_id]
            if not all(0 <= token < vocab for token in item.tokens):
                at = len(request.output) - len(item.tokens)
                _count_rounds(activity, engine, before_run)
                raise ImpossibleToken(
                    f"{jobs[place].label or 'a text'}, drafts by {jobs[place].method}: tokens from "
                    f"{at} on are {item.tokens}, of a vocabulary of {vocab}",
                    activity,
                )
            _count(activity, request, before[request.request_id], item.tokens, place, len(progress))
            stream = streams.get(request.request_id)
            if stream is not None:
                stream.push(item.tokens, last=request.finished)
                if stream.stopped_by is not None:
                    engine.finish(request, FinishReason.STOP, stream.stopped_by)
        if on_step is not None:
            on_step(step)
        step += 1
    for request in requests:
        activity.preemptions += request.preemptions
        activity.prefix_hits += request.cached
        activity.cancellations += request.finish_reason is FinishReason.ABORT
        activity.chunked += len(request.prompt) > engine.config.max_num_batched_tokens
    _count_rounds(activity, engine, before_run)
    activity.leaks = engine.kv.pool.capacity - engine.kv.pool.num_free
    return [_outcome(request, streams.get(request.request_id)) for request in requests], activity


def _count_rounds(activity: Activity, engine: Engine, before: EngineStats) -> None:
    activity.replays = engine.stats.replays - before.replays
    activity.called = engine.stats.rounds - before.rounds - activity.replays


def _requests(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    requests: list[Request] = []
    most = engine.state.max_drafts
    for job in jobs:
        limit = None if job.max_drafts is None else min(job.max_drafts, most)
        speculation = SpeculationParams(job.method if most else PLAIN, limit)
        leader = None if job.leader is None else requests[job.leader]
        name = f"certify-{next(_ids)}"
        request = engine.make_request(name, job.prompt, job.params, speculation, job.choice, leader)
        request.output.extend(job.start)
        requests.append(request)
    return requests


def _streams(requests: Sequence[Request], tokenizer: Tokenizer | None) -> dict[str, TextStream]:
    if tokenizer is None:
        return {}
    streams = {}
    for request in requests:
        if request.params.stop_strings:
            stream = streams[request.request_id] = TextStream(request, tokenizer)
            stream.push(request.output, last=False)
            if stream.stopped_by is not None:
                request.finish(FinishReason.STOP, stream.stopped_by)
    return streams


def _count(
    activity: Activity,
    request: Request,
    before: tuple[int, int],
    tokens: Sequence[int],
    job: int,
    running: int,
) -> None:
    """Enter a round that gave a request ``tokens``, beside ``running`` requests in all."""
    method = request.speculation.method
    if method == PLAIN:
        return
    verified = request.stats.verified - before[0]
    accepted = request.stats.accepted - before[1]
    activity.rounds[method] += 1
    activity.verified[method] += verified
    activity.accepted[method] += accepted
    activity.lengths.setdefault(method, Counter())[len(tokens)] += 1
    start = len(request.output) - len(tokens)
    if verified:
        furthest = len(request.prompt) + start + verified - 1
        activity.furthest = max(activity.furthest, furthest)
    if accepted < verified and not request.finished:
        activity.rejections[method] += 1
        activity.crowded += running > CROWD
        activity.turned_down.append(TurnedDown(job, start, start + accepted))


def _outcome(request: Request, stream: TextStream | None) -> Outcome:
    assert request.finish_reason is not None
    prompt_logprobs = request.prompt_logprobs
    if stream is None:
        return Outcome(
            list(request.output),
            request.finish_reason.value,
            request.stop_reason,
            None,
            request.logprobs,
            prompt_logprobs,
            request.seed,
        )
    output = stream.output()
    return Outcome(
        output.token_ids,
        output.finish_reason or "",
        output.stop_reason,
        output.text,
        output.logprobs or [],
        prompt_logprobs,
        request.seed,
    )
