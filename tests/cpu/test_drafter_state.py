"""What drafters keep of requests that do not allow them: nothing; and nobody ever reads it."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_engines import folder, target
from harness import Job, make_engine, needs_native, run_alone, run_jobs
from surefoot.engine.engine import Engine
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.request import FinishReason, Request, SamplingParams, SpeculationParams
from surefoot.speculation import keeping_up
from surefoot.speculation.backlog import MANY
from surefoot.speculation.decisions import Decision, Landed, Situation
from surefoot.speculation.fixed import FixedPlanner
from surefoot.speculation.keeping_up import RowSeconds
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.proposers.eagle3.proposer import Eagle3Proposer
from surefoot.speculation.proposers.ngram import NgramProposer
from surefoot.speculation.size import Size
from test_eagle3_engine import GREEDY, by_formulas, compare, some

DRAFTER = "eagle3"
METHODS = ("off", "ngram", DRAFTER, "auto", "auto; 0")
ROUNDS = pytest.mark.parametrize("ahead", [False, True], ids=["called", "launched ahead"])
formulas = functools.cache(by_formulas)


def speculation(method: str) -> SpeculationParams:
    return SpeculationParams("auto", 0) if method == "auto; 0" else SpeculationParams(method)


# The drafter of random weights is hardly ever right, but what it says depends on all its keys.
def engine_of(backend: str = "torch", ahead: bool = False, **options: Any) -> Engine:
    own = {"path": folder("random"), "draft_tokens": 3, **options.pop("own", {})}
    proposers = options.pop("proposers", ("ngram", DRAFTER))
    values: dict[str, Any] = {
        "proposers": proposers,
        "proposer_options": {DRAFTER: own} if DRAFTER in proposers else {},
        "draft_policy": "fixed",
        **options,
    }
    return make_engine(target(backend), ahead, **values)


class Drowsy(FixedPlanner):
    """Has drafters draft in some rounds only: in ``awake`` of ten, at random."""

    def __init__(self, engine: Engine, awake: int) -> None:
        super().__init__(engine.state.max_drafts, exact=engine.loop.depth == 1)
        self.drafters = engine.round.drafters
        self.awake, self.random = awake, random.Random(awake)
        engine.planner = engine.loop.planner = self

    def decide(self, situation: Situation) -> Decision:
        decision = super().decide(situation)
        if self.random.randrange(10) < self.awake:
            return decision
        others = tuple(index for index in decision.proposers if index not in self.drafters)
        return replace(decision, proposers=others)

    def landed(self, decision: Decision, situation: Situation, outcome: Landed) -> None:
        self.seconds = outcome.device_seconds


class Watch:
    """What an engine's drafter offers to those who allow it, and what it keeps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.index = engine.controller.names.index(DRAFTER)
        self.offers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        self.written: list[FlatBatch] = []
        self._learn = engine.round.books.learn
        engine.round.books.learn = self.learn  # type: ignore[method-assign]
        network = cast(Eagle3Proposer, engine.proposers[self.index]).network
        self._write_keys = network.write_keys
        network.write_keys = self.write_keys  # type: ignore[method-assign]

    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        controller, state = self.engine.controller, self.engine.state
        running = {request.slot for request in self.engine.scheduler.running}
        offers = zip(slots.tolist(), drafts.tokens.tolist(), strict=True) if drafts else ()
        for slot, tokens in offers:
            if index == self.index and slot in running and controller.allowed[index, slot]:
                text = tuple(state.history[slot, : int(state.length[slot])].tolist())
                self.offers.setdefault(text, set()).add(tuple(tokens))
        self._learn(index, slots, drafts)

    def write_keys(self, features: torch.Tensor, batch: FlatBatch, kv: Any) -> None:
        self.written.append(batch)
        self._write_keys(features, batch, kv)

    def check(self) -> int:
        """Every offer is what the formulas say of its text, whatever came before."""
        for text, found in self.offers.items():
            assert found == {formulas("random", text, 3)}, text
        return len(self.offers)


def crowd(methods: tuple[str, ...], shared: int, tokens: int, gap: int) -> list[Job]:
    """Prompts of which the first ``shared`` tokens are those of one text, then of one of two."""
    text = tuple(3 + (7 * i + i // 5) % 40 for i in range(60))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        Job(
            (*text[:shared], *(text[30 + i % 2 : 30 + i % 2 + 9]), 3 + i // 2),
            params,
            speculation(method),
            arrival=gap * i,
        )
        for i, method in enumerate(methods)
    ]


@ROUNDS
def test_drafts_never_rest_on_what_was_not_written(ahead: bool) -> None:
    """Prefix hits from one kind of request to another, preemption, chunked prompts, slots and
    blocks that change hands."""
    jobs = crowd(("off", "auto", "ngram", DRAFTER, "auto; 0", "auto", "off", DRAFTER), 14, 26, 3)
    engine = engine_of(ahead=ahead, kv_blocks=24, max_num_batched_tokens=7, max_num_seqs=3)
    watch = Watch(engine)
    requests = run_jobs(engine, jobs)
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == run_alone(target(), job).output
    assert watch.check() > 25
    assert engine.stats.preemptions and sum(r.cached for r in requests) > 20


@ROUNDS
def test_drafters_may_catch_up_before_a_round_samples(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a device does both at once: a round that verifies nothing, and in which nobody
    drafts, settles what it ran."""
    engine = engine_of(ahead=ahead, kv_blocks=24, max_num_batched_tokens=7, max_num_seqs=3)
    backend, order = engine.round.backend, list[str]()
    monkeypatch.setattr(backend, "runs_beside", True)

    sizes: list[Size] = []
    go_on = engine.round.go_on
    monkeypatch.setattr(
        engine.round, "go_on", lambda size, *a: sizes.append(size) or go_on(size, *a)
    )

    def beside(works: Sequence[Callable[[], None]]) -> AbstractContextManager[None]:
        if works:
            order.append("beside")
            assert not sizes[-1].verifies, "what is settled depends on what is sampled"
        return type(backend).beside(backend, works)

    monkeypatch.setattr(backend, "beside", beside)
    drafter = engine.proposers[engine.controller.names.index(DRAFTER)]
    for owner, name in ((drafter, "catch_up"), (engine.round, "sample")):
        own = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, own=own, name=name: order.append(name) or own(*a)
        )
    watch, _ = Watch(engine), Drowsy(engine, 4)
    jobs = crowd(("off", "auto", DRAFTER, "auto", "off", DRAFTER), 14, 26, 3)
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(target(), job).output
    assert watch.check() > 20
    early = [order[at + 1 : at + 3] for at, name in enumerate(order) if name == "beside"]
    assert len(early) > 10 and all(each == ["catch_up", "sample"] for each in early)
    assert order.count("catch_up") > len(early) + 10
    assert sum(size.verifies and not {*size.proposers} & {*engine.round.drafters} for size in sizes)


@needs_native
@some(12)
@given(
    st.lists(st.sampled_from(METHODS), min_size=3, max_size=7),
    st.integers(0, 20),
    st.integers(4, 12),
    st.integers(0, 8),
    st.sampled_from([22, 26, 80]),
    st.sampled_from([5, 40]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 3, 10]),
    st.sampled_from([None, 9, 17]),
)
def test_any_mixture_gives_plain_texts_and_the_drafts_of_a_fresh_engine(
    methods: list[str], shared: int, tokens: int, gap: int,
    blocks: int, chunk: int, ahead: bool, tree: bool, awake: int, cancel: int | None,
) -> None:  # fmt: skip
    jobs = crowd(tuple(methods), shared, tokens, gap)
    jobs[0] = replace(jobs[0], cancel=cancel)
    own = {"top_k": 2, "depth": 2, "draft_tokens": 4} if tree else {}
    engine = engine_of(
        "native", ahead, own=own, kv_blocks=blocks, max_num_batched_tokens=chunk, max_num_seqs=3
    )
    watch = Watch(engine)
    Drowsy(engine, awake)
    [first, *others] = zip(jobs, run_jobs(engine, jobs), strict=True)
    for job, request in others if cancel else [first, *others]:
        compare("native", run_alone(target("native"), job), request)
    if not tree:
        watch.check()
        return
    for text, found in watch.offers.items():
        [first] = {drafts[0] for drafts in found}
        assert first == formulas("random", text, 3)[0], text


PROMPT = tuple(range(3, 20))
"""16 positions in blocks of 4, and one more."""


@ROUNDS
@pytest.mark.parametrize("method", ["off", "ngram", "auto; 0"])
def test_what_a_request_without_drafts_left_runs_again_once(method: str, ahead: bool) -> None:
    engine = engine_of(ahead=ahead)
    run_jobs(engine, [Job(PROMPT, GREEDY, speculation(method))])
    watch = Watch(engine)
    plain, first, second, third = (
        run_jobs(engine, [Job(PROMPT, GREEDY, speculation(name))])[0]
        for name in (method, "auto", DRAFTER, "off")
    )
    assert [plain.cached, first.cached, second.cached, third.cached] == [16, 0, 16, 16]
    assert plain.output == first.output == second.output == third.output
    assert watch.check() > 5


@ROUNDS
def test_requests_that_do_not_allow_a_drafter_pay_no_catch_up(ahead: bool) -> None:
    engine = engine_of(ahead=ahead, enable_prefix_caching=False)
    watch = Watch(engine)
    others = [Job(PROMPT, GREEDY, speculation(name)) for name in ("off", "ngram", "off")]
    run_jobs(engine, others)
    assert watch.written == []
    # Beside others only its own rows are kept.
    [*_, own] = run_jobs(engine, [*others, Job(PROMPT, GREEDY, speculation(DRAFTER))])
    rows = len(PROMPT) + own.stats.rounds - 1 + own.stats.verified
    assert sum(int((batch.row_slot >= 0).sum()) for batch in watch.written) == rows
    watch.check()


@needs_native
@ROUNDS
def test_a_drafter_that_sleeps_catches_up_in_bulk(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all rows but those of rejected drafts: when there are enough of them, and when the request
    makes room for another one, which finds its keys."""
    monkeypatch.setattr(NativeBackend, "late_rows", 32)
    engine = engine_of("native", ahead, proposers=(DRAFTER,))
    watch = Watch(engine)
    drowsy = Drowsy(engine, 0)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    [request] = run_jobs(engine, [Job(PROMPT, params)])
    room = engine.round.keeping_up.backlog.room
    assert [len(batch.tokens) for batch in watch.written] == [room, room]
    assert engine.round.keeping_up.backlog.rows == len(request.tokens) - 1 - 2 * room
    drowsy.awake = 10
    follow_up = (*request.tokens, 5)
    [second] = run_jobs(engine, [Job(follow_up, params)])
    assert (
        second.cached > 60
        and second.output == run_alone(target("native"), Job(follow_up, params)).output
    )
    assert watch.check() > 20


@needs_native
def test_rows_of_many_requests_are_not_kept() -> None:
    """Each round's are read at once, and those that were kept before them."""
    engine = engine_of("native", proposers=(DRAFTER,), max_num_seqs=MANY, kv_blocks=400)
    Drowsy(engine, 0)
    watch = Watch(engine)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = Job(PROMPT, params)
    others = [Job((*PROMPT[: 3 + i], 9), params, arrival=4) for i in range(MANY - 1)]
    run_jobs(engine, [first, *others])
    sizes = [len(batch.tokens) for batch in watch.written]
    assert sizes.count(MANY) >= 6
    watch.check()


def stepped(engine: Engine, jobs: list[Job], steps: int) -> list[Request]:
    """The requests of ``jobs`` after so many steps."""
    requests = [
        engine.make_request(str(job.prompt), job.prompt, job.params, job.speculation)
        for job in jobs
    ]
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    return requests


LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@needs_native
def test_who_shares_the_text_of_one_that_sleeps_finds_its_keys() -> None:
    engine = engine_of("native", proposers=(DRAFTER,))
    drowsy, watch = Drowsy(engine, 0), Watch(engine)
    [first] = stepped(engine, [Job(PROMPT, LONG)], 13)
    assert engine.round.keeping_up.backlog.rows and not watch.written
    drowsy.awake = 10
    # Of a text that runs, the blocks of its prompt can be found.
    [second] = stepped(engine, [Job((*first.tokens, 5), LONG)], 20)
    assert 10 < second.cached <= len(PROMPT)
    assert watch.check() > 20


@ROUNDS
def test_who_was_switched_off_hears_nothing_while_others_do(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    for kind in (NgramProposer, Eagle3Proposer):
        monkeypatch.setattr(kind, "catch_up", lambda own, commits: heard.append(own.name))
    engine = engine_of(ahead=ahead)
    stepped(engine, [Job(PROMPT, LONG)], 5)
    assert set(heard) == {"ngram", DRAFTER}
    heard.clear()
    engine.controller.active.pop(engine.controller.names.index("ngram"))
    stepped(engine, [Job(PROMPT, LONG)], 5)
    assert heard and set(heard) == {DRAFTER}


@needs_native
def test_blocks_of_one_that_left_asleep_are_not_written_again() -> None:
    """They are the next ones of a request in a lower slot, whose keys are written before its."""
    options = {"kv_blocks": 14, "enable_prefix_caching": False, "proposers": (DRAFTER,)}
    engine = engine_of("native", **options)
    drowsy, watch = Drowsy(engine, 0), Watch(engine)
    jobs = [Job(PROMPT[:3], LONG), Job(PROMPT[3:11], LONG)]
    stays, leaves = stepped(engine, jobs, 2)
    assert stays.slot < leaves.slot
    own = set(engine.kv.leases[leaves.request_id].blocks)
    engine.finish(leaves, FinishReason.ABORT)
    drowsy.awake = 10
    while not stays.finished:
        engine.step()
        taken = engine.kv.leases.get(stays.request_id)
        own -= set(taken.blocks) if taken else set()
    assert not own and watch.check() > 20


@needs_native
def test_what_is_owed_for_earlier_rounds_is_no_part_of_a_round_s_time() -> None:
    engine = engine_of("native", proposers=(DRAFTER,))
    drowsy, watch = Drowsy(engine, 0), Watch(engine)
    stepped(engine, [Job(PROMPT, LONG)], 10)
    network = cast(Eagle3Proposer, engine.proposers[watch.index]).network

    def write_slowly(features: torch.Tensor, batch: FlatBatch, kv: Any) -> None:
        time.sleep(0.03 * (len(batch.tokens) > 3))
        watch.write_keys(features, batch, kv)

    network.write_keys = write_slowly  # type: ignore[method-assign]
    drowsy.awake = 10
    begun = time.perf_counter()
    engine.step()
    assert time.perf_counter() - begun > 0.03
    assert (drowsy.seconds or 1.0) < time.perf_counter() - begun - 0.03


@needs_native
def test_what_a_row_takes_is_observed_where_nobody_drafts_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt's, told at once, and those of rounds, told together; what catching up takes in a
    round with drafts belongs to these."""
    now, row = 0.0, 1e-3
    monkeypatch.setattr(keeping_up, "time", SimpleNamespace(perf_counter=lambda: now))
    engine = engine_of("native", proposers=(DRAFTER,))
    drowsy, watch, seconds = Drowsy(engine, 0), Watch(engine), engine.round.keeping_up.row_seconds
    network = cast(Eagle3Proposer, engine.proposers[watch.index]).network

    def write_slowly(features: torch.Tensor, batch: FlatBatch, kv: Any) -> None:
        nonlocal now
        now += row * len(batch.tokens)
        watch.write_keys(features, batch, kv)

    network.write_keys = write_slowly  # type: ignore[method-assign]
    assert seconds.mean == 0.0
    stepped(engine, [Job((*PROMPT, *PROMPT), LONG)], 1)
    assert len(PROMPT) * 2 > MANY and seconds.mean == pytest.approx(row)
    for _ in range(5):
        engine.step()
    drowsy.awake, row = 10, 3e-3
    engine.step()
    mean = seconds.mean
    assert 1e-3 < mean < 2e-3
    row = 1.0
    for _ in range(3):
        engine.step()
    assert seconds.mean == mean and len(watch.written) >= 5


def test_what_a_row_takes_is_a_mean_of_late() -> None:
    """A pause of the machine counts little, and what lasts counts soon."""
    seconds = RowSeconds()
    seconds.observe(10, 0.0)
    for _ in range(100):
        seconds.observe(10, 1e-3)
    assert seconds.mean == pytest.approx(1e-4, rel=0.1)
    seconds.observe(10, 100.0)
    assert seconds.mean < 1.3e-4
    for _ in range(200):
        seconds.observe(100, 3e-2)
    assert seconds.mean == pytest.approx(3e-4, rel=0.1)


@ROUNDS
@pytest.mark.parametrize("blocks", [120, 26], ids=["room for all", "evictions"])
def test_a_drafter_takes_no_prefix_hit_away(blocks: int, ahead: bool) -> None:
    """Conversations of two turns, of which two and two begin with the same text: every request
    finds as much of its prompt as it does without drafters, and all of it is counted. Where blocks
    are short, spans with drafts may hold one more of them."""

    def hits(**options: Any) -> list[int]:
        engine = engine_of(ahead=ahead, kv_blocks=blocks, max_num_seqs=2, **options)
        talks = [(*PROMPT, 30 + user // 2, 40 - user) for user in range(4)]
        found, asked = [], 0
        for turn in range(2):
            requests = run_jobs(engine, [Job(talk, GREEDY) for talk in talks])
            found += [request.cached for request in requests]
            asked += sum(map(len, talks))
            talks = [(*request.tokens, 20 + turn) for request in requests]
        stats = engine.stats
        assert (stats.prefix_queries, stats.prefix_hits) == (asked, sum(found))
        return found

    drafted, plain = hits(), hits(proposers=())
    assert drafted[2:4] == [16, 16] and (min(drafted[4:]) > 40) == (blocks > 100)
    slack = 0 if blocks > 100 else 4
    assert all(abs(one - other) <= slack for one, other in zip(drafted, plain, strict=True))
