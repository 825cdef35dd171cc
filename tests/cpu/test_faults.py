"""Whatever fails, wherever, once: nothing is torn, and no text is other than plain decoding's."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eagle3_engines import folder, target
from faults import Calls, Fault
from harness import Job, make_engine, needs_native
from recorded_fakes import record
from structured_harness import grammars, params_with
from surefoot.engine import cuda_graphs
from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.engine import Engine
from surefoot.engine.landing import Landing
from surefoot.request import Request, SamplingParams
from surefoot.speculation.decisions import Decision, Situation

DRAFTER = "eagle3"
APART = 300
"""Calls from one place inside the host's functions to the next. 1 tries them all, for ten minutes.
"""
KINDS = ("called", "recorded")
JOBS = [
    Job((5, 9, 5, 9, 5, 9, 5, 9, 5, 9, 5), SamplingParams(temperature=0, max_tokens=7)),
    Job(
        (7, 8, 7, 8, 7),
        SamplingParams(
            temperature=0.8, seed=3, max_tokens=5, ignore_eos=True, repetition_penalty=1.2,
            presence_penalty=0.5, logit_bias={7: 5.0, 12: 5.0}, logprobs=1,
        ),
    ),
    Job(
        (3, 4, 5),
        params_with({"regex": "(ab1|bc){1,4}"}, temperature=0.5, seed=1, max_tokens=6),
    ),
    Job(
        (7, 8, 7, 8, 7, 9),
        SamplingParams(temperature=0.9, seed=5, max_tokens=5, ignore_eos=True, prompt_logprobs=1),
    ),
]  # fmt: skip
"""Chunked prompts, and more texts than there are slots for, and blocks."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """By kind. The last one launches ahead, and its rounds are recorded, as far as the host is
    concerned."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("graph_pool_handle", "synchronize"):
            patch.setattr(torch.cuda, name, lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(cuda_graphs, "capture", record)
        patch.setattr(cuda_graphs, "RECORDING_SHARE", 1e9)
        patch.setattr(cuda_graphs, "IN_PLACE", 1)
        made = {kind: engine_of(kind != "called") for kind in KINDS}
        engine = made["recorded"]
        rounds = RecordedRounds(engine.round, engine.config.max_num_batched_tokens, True)
        engine.rounds = engine.loop.rounds = rounds
        yield made


def engine_of(ahead: bool) -> Engine:
    engine = make_engine(
        target("native"), ahead, proposers=("ngram", DRAFTER, "grammar"), max_draft_tokens=3,
        proposer_options={DRAFTER: {"path": folder("skilled"), "draft_tokens": 2}},
        draft_policy="fixed", max_num_seqs=3, kv_blocks=6, max_num_batched_tokens=8,
        calibration_seconds=0.0,
    )  # fmt: skip
    engine.grammars = grammars()
    return engine


def requests_of(engine: Engine) -> list[Request]:
    return [engine.make_request(f"r{i}", job.prompt, job.params) for i, job in enumerate(JOBS)]


def outcome(request: Request) -> Any:
    """All that a user gets."""
    scores = [
        [(each.token_id, each.logprob) for each in part]
        for part in (request.logprobs, request.prompt_logprobs)
    ]
    return request.output, request.finish_reason, request.stop_reason, scores


@functools.cache
def plain() -> list[Any]:
    """What the jobs give one by one, without drafts, with ample memory."""
    engine = make_engine(
        target("native"), max_draft_tokens=0, max_num_batched_tokens=64, max_num_seqs=1
    )
    engine.grammars = grammars()
    requests = requests_of(engine)
    for request in requests:
        engine.add(request)
        while engine.has_work:
            engine.step()
    return [outcome(request) for request in requests]


def run(engine: Engine, watch: Calls) -> list[Request]:
    """The jobs, watched. The engine's integrity holds after every step."""
    if isinstance(watch, Fault) and watch.at % 4 == 0:
        engine.rounds.forget()
    requests = requests_of(engine)
    raised = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        try:
            with watch:
                engine.step()
        except (MemoryError, KeyboardInterrupt):
            raised += 1
        engine.check_integrity()
    assert raised == (isinstance(watch, Fault) and bool(watch.place)), "it was swallowed"
    assert engine.kv.pool.num_free == engine.kv.pool.capacity
    return requests


def fail(engine: Engine, at: int, inside: bool = False) -> str:
    """Where it failed; "" if there were fewer calls."""
    fault = Fault(at, KeyboardInterrupt() if at % 2 else MemoryError("no more"), inside)
    got = [outcome(request) for request in run(engine, fault)]
    assert got == plain(), fault.place
    return fault.place


@needs_native
def test_undisturbed_it_is_what_it_should_be(engines: dict[str, Engine]) -> None:
    for engine in engines.values():
        before = engine.stats.preemptions
        requests = run(engine, Calls())
        assert [outcome(request) for request in requests] == plain()
        assert engine.stats.preemptions > before
        assert sum(request.stats.accepted for request in requests) > 3


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_every_function_fails_once(engines: dict[str, Engine], kind: str) -> None:
    """Those of backend, sampling, proposers, book-keeping and KV among them; half of them for each
    kind of engine, in any of their calls."""
    engine = engines[kind]
    run(engine, calls := Calls())
    places: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(calls.names, 1):
        places[name].append(at)
    names, failed = sorted(places), 0
    chosen = names[KINDS.index(kind) :: len(KINDS)]
    for turn, name in enumerate(chosen):
        # What was learnt of acceptance makes some runs shorter than the one that was counted.
        mine = [at for at in places[name] if at < 0.8 * len(calls.names)] or places[name]
        failed += bool(fail(engine, mine[turn % len(mine)]))
    assert failed > 0.9 * len(chosen) > 90
    for known in ("NativeBooks.judge", "NgramProposer.propose", "Eagle3Proposer.catch_up",
                  "NativeBackend.layer", "KVManager.keep", "BlockPool.allocate"):  # fmt: skip
        assert known in names


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_broken_off_anywhere_in_the_host_s_functions(
    engines: dict[str, Engine], kind: str
) -> None:
    at = 1 + 97 * KINDS.index(kind)
    while fail(engines[kind], at, inside=True):
        at += APART
    assert at > 10 * APART


@needs_native
def test_broken_off_twice(engines: dict[str, Engine]) -> None:
    """Also while it restores what the first one tore."""
    engine, restore, times = engines["recorded"], Engine.restore, 0
    land, landed = engine.loop.land, 0

    def torn() -> Landing:
        nonlocal landed
        landed += 1
        if landed == 5:
            raise MemoryError
        return land()

    def again(owner: Engine) -> None:
        nonlocal times
        times += 1
        with Fault(3 * times, KeyboardInterrupt(), inside=True):
            restore(owner)

    requests = requests_of(engine)
    for request in requests:
        engine.add(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "restore", again)
        patch.setattr(engine.loop, "land", torn)
        with pytest.raises(KeyboardInterrupt):
            while engine.has_work:
                engine.step()
        for _ in range(200):
            try:
                engine.settle()
            except KeyboardInterrupt:
                continue
            break
    assert times > 5
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [outcome(request) for request in requests] == plain()


def watch_proposers(engine: Engine) -> set[tuple[int, ...]]:
    """Who may propose in the rounds from now on."""
    found, decide = set(), engine.planner.decide

    def watched(situation: Situation) -> Decision:
        found.add(situation.proposers)
        return decide(situation)

    engine.planner.decide = watched  # type: ignore[method-assign]
    return found


@needs_native
@pytest.mark.parametrize("method", ["admit", "catch_up", "propose"])
def test_without_a_drafter_that_failed_texts_go_on(method: str) -> None:
    """It is called no more, and the other proposer drafts on."""
    engine = engine_of(True)
    drafter = engine.proposers[1]
    inner, calls = getattr(drafter, method), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ZeroDivisionError
        return inner(*args)

    requests = requests_of(engine)
    for request in requests:
        engine.add(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, method, failing)
        with pytest.raises(ZeroDivisionError):
            while engine.has_work:
                engine.step()
        assert engine.switch_off_failed() == [DRAFTER] and engine.switch_off_failed() == []
        found = watch_proposers(engine)
        going = [request for request in requests if not request.finished]
        verified = sum(request.stats.verified for request in requests)
        while engine.has_work:
            engine.step()
            engine.check_integrity()
    assert calls == 4 and found == {(0,)}
    assert [outcome(request) for request in requests] == plain()
    assert sum(request.stats.verified for request in requests) > verified
    assert len(going) > 1 and not any(request.drafters for request in going)
    assert not engine.make_request("new", JOBS[0].prompt, JOBS[0].params).drafters


@needs_native
def test_a_drafter_is_switched_off_beside_rounds_in_flight() -> None:
    engine = engine_of(True)
    requests = requests_of(engine)
    for request in requests[:2]:
        engine.add(request)
    while not (engine.loop.flights and all(request.output for request in requests[:2])):
        engine.step()
    engine.proposers[1].has_raised = True
    assert engine.switch_off_failed() == [DRAFTER]
    engine.check_integrity()
    found = watch_proposers(engine)
    for request in requests[2:]:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [outcome(request) for request in requests] == plain() and found == {(0,)}
