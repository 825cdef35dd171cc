"""Requests that engines let in without drafters: texts are the same, and no draft rests on what was
not written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from eagle3_engines import target
from harness import Job, run_alone, run_jobs
from surefoot.bench.sweep import Load, drafting, submit
from surefoot.engine.batch import Wishes, group
from surefoot.engine.engine import Engine
from surefoot.kv.transaction import KVManager
from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.speculation import upkeep
from surefoot.speculation.keeping_up import RowSeconds
from surefoot.speculation.upkeep import Record, Upkeep
from test_drafter_state import DRAFTER, GREEDY, PROMPT, ROUNDS, Watch, crowd, engine_of


class Told(Upkeep):
    """Serves whom it is told to."""

    def __init__(self, engine: Engine, serves: Callable[[Request], bool]) -> None:
        super().__init__((engine.controller.names.index(DRAFTER),), engine.config.max_num_seqs)
        self.serves = serves
        engine.scheduler.upkeep = self

    def choose(self, request: Request, running: int, load: int) -> None:
        self.now = request
        super().choose(request, running, load)

    def _serves(self, record: Record) -> bool:
        return self.serves(self.now)

    def launched(self, *_: Any) -> None:
        """Nothing is expected of rounds that verify all drafts."""


def by_drafter(request: Request) -> int:
    return request.stats.verified_by_proposer.get(DRAFTER, 0)


def test_a_fixed_number_of_drafts_is_measured_though_they_did_not_pay() -> None:
    """``bench --modes 2`` asks for drafts; ``auto`` in the same engine does without them."""
    engine = engine_of(ahead=False, kv_blocks=40, max_num_seqs=2)
    told = Told(engine, lambda request: False)
    load = Load([PROMPT], GREEDY)

    def drafted(mode: int | str) -> bool:
        with drafting(engine, mode) as wish:
            [only] = submit(engine, 1, load, wish)
            while engine.has_work:
                engine.step()
        return by_drafter(only) > 0

    assert [drafted(mode) for mode in ("auto", 2, "auto")] == [False, True, False]
    assert engine.scheduler.upkeep is told


@ROUNDS
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_give_plain_texts(ahead: bool, seed: int) -> None:
    """Prefix hits from one kind to the other, preemption, chunked prompts; and each draft is that
    of an engine that served all requests all the time."""
    luck = random.Random(seed)
    jobs = crowd(("auto", "auto", DRAFTER, "auto", "off", "auto", "auto", DRAFTER), 14, 26, 3)
    engine = engine_of(ahead=ahead, kv_blocks=24, max_num_batched_tokens=7, max_num_seqs=3)
    watch = Watch(engine)
    Told(engine, lambda request: luck.random() < 0.5)
    requests = run_jobs(engine, jobs)
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == run_alone(target(), job).output
    assert watch.check() > 10 and engine.stats.preemptions


@ROUNDS
def test_who_is_let_in_without_its_drafter_costs_nothing_of_it(ahead: bool) -> None:
    """No keys are written, no drafts are verified, also beside one that is served; others' drafts
    are not concerned. It is counted."""
    engine = engine_of(ahead=ahead, enable_prefix_caching=False)
    watch = Watch(engine)
    Told(engine, lambda request: False)
    first, second = run_jobs(engine, [Job(PROMPT, GREEDY)] * 2)
    assert watch.written == [] and engine.stats.without_drafters == 2
    assert not by_drafter(first) and first.stats.verified and first.declined == {DRAFTER}
    # Who names its drafter keeps it.
    named = Job(PROMPT, GREEDY, SpeculationParams(DRAFTER))
    *others, own = run_jobs(engine, [Job(PROMPT, GREEDY), Job(PROMPT, GREEDY), named])
    assert by_drafter(own) and not any(map(by_drafter, others))
    rows = len(PROMPT) + own.stats.rounds - 1 + own.stats.verified
    assert sum(int((batch.row_slot >= 0).sum()) for batch in watch.written) == rows
    assert engine.stats.without_drafters == 4 and own.drafters == {DRAFTER} and not own.declined
    assert first.output == second.output == own.output
    watch.check()


@ROUNDS
def test_what_was_not_written_runs_again_once_for_who_is_served(ahead: bool) -> None:
    engine = engine_of(ahead=ahead)
    watch, served = Watch(engine), False
    Told(engine, lambda request: served)
    found = []
    for served in (False, False, True, True, False):  # noqa: B007
        found += run_jobs(engine, [Job(PROMPT, GREEDY)])
    assert [request.cached for request in found] == [0, 16, 0, 16, 16]
    assert len({tuple(request.output) for request in found}) == 1
    assert [by_drafter(request) > 0 for request in found] == [False, False, True, True, False]
    assert watch.check() > 5


@ROUNDS
def test_a_preempted_request_may_be_served_again_or_not(ahead: bool) -> None:
    for again in (True, False):
        jobs = crowd(("auto",) * 4, 3, 26, 0)
        engine = engine_of(ahead=ahead, kv_blocks=20, max_num_seqs=3, proposers=(DRAFTER,))
        watch = Watch(engine)
        Told(engine, lambda request, again=again: (request.preemptions > 0) == again)
        requests = run_jobs(engine, jobs)
        preempted = [request for request in requests if request.preemptions]
        assert preempted
        for job, request in zip(jobs, requests, strict=True):
            assert request.output == run_alone(target(), job).output
            assert (request.drafters == {DRAFTER}) == ((request in preempted) == again)
        assert any(map(by_drafter, preempted)) or not again
        without = engine.stats.without_drafters
        assert without == (len(requests) if again else sum(r.preemptions for r in requests))
        watch.check()


def test_who_shares_a_choice_may_be_served_or_not() -> None:
    kv, choice = KVManager(9, 4), SpeculationParams()
    served, other = (Request(name, PROMPT, GREEDY, choice, 0, 99) for name in "ab")
    other.declined = frozenset({DRAFTER})
    for request in (served, other):
        kv.open(request.request_id, request)
    Wishes.note((served, other))
    names = {0: "ngram", 1: DRAFTER}
    for requests in ((served, other), (other, served)):
        assert group(requests, names, 4).proposers == (0, 1)
    assert group((other,), names, 4).proposers == (0,)


def test_where_every_draft_is_verified_all_are_served() -> None:
    assert engine_of().scheduler.upkeep is None
    assert engine_of(draft_policy="auto", proposers=("ngram",)).scheduler.upkeep is None


@ROUNDS
def test_what_rounds_tell_of_keeping_up(ahead: bool) -> None:
    """The rows of prompts, and what one of them takes by now."""
    engine = engine_of(ahead=ahead, draft_policy="auto", enable_prefix_caching=False)
    told: list[tuple[int, float]] = []

    class Listens(Upkeep):
        def launched(self, *told_of: Any) -> None:
            told.append(told_of[3:])

    engine.scheduler.upkeep = Listens(
        (engine.controller.names.index(DRAFTER),), engine.config.max_num_seqs
    )
    engine.round.keeping_up.row_seconds = rows = RowSeconds()
    rows.observe(10, 0.5)
    engine.round.keeping_up._observes = False
    run_jobs(engine, [Job(PROMPT, GREEDY)])
    assert told[0] == (len(PROMPT), 0.05) and set(told[1:]) == {(0, 0.05)}


@ROUNDS
def test_an_engine_gives_up_a_drafter_that_is_never_right(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ENOUGH", 40)
    engine = engine_of(ahead=ahead, draft_policy="auto", enable_prefix_caching=False)
    # However busy the host: how much a text tells depends on the rounds in flight.
    monkeypatch.setattr(engine.loop.clock, "compare", lambda host, seconds: None)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    job = Job(PROMPT, params)
    found: list[Any] = []
    while not engine.stats.without_drafters:
        found += run_jobs(engine, [job])
        assert len(found) < 40
    watch = Watch(engine)
    while found[-1].declined:
        assert watch.written == [] and not by_drafter(found[-1])
        found += run_jobs(engine, [job])
        assert len(found) < 100
    # It looks again, after a while.
    assert engine.stats.without_drafters >= 4 and watch.written
    assert all(request.output == run_alone(target(), job).output for request in found)
