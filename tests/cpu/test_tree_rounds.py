"""Trees in rounds of recorded sizes: the same as in rounds called with just the rows they need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tree_proposers  # noqa: F401 - registers
from eagle3_engines import folder, target
from harness import Job, make_engine, run_alone, run_jobs
from surefoot.engine.engine import Engine
from surefoot.engine.rounds import PaddedRounds
from surefoot.kernels.rounds import RoundSpans, lay_out_spans
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.decisions import Decision, Situation
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.size import GREEDY as GREEDY_STAGES
from surefoot.speculation.size import Size
from surefoot.speculation.trees import CAUSAL, Trees, ancestors, lay_out_trees, node_rows
from test_eagle3_engine import crowd
from test_round import EVERY_OPTION, Watch
from test_trees import greedy_trees

TREE = {"top_k": 3, "depth": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
RECORDED = replace(EVERY_OPTION, logprobs=None, prompt_logprobs=None)


def tree_engine(ahead: bool, kind: str = "skilled", **options: Any) -> Engine:
    own = {"path": folder(kind), "draft_tokens": 7, **TREE, **options.pop("own", {})}
    values: dict[str, Any] = {
        "proposers": ("eagle3", "ngram"),
        "proposer_options": {"eagle3": own},
        "draft_policy": "fixed",
        "max_draft_tokens": 7,
        **options,
    }
    engine = make_engine(target(), ahead, **values)
    assert engine.rounds.recorded == ahead
    return engine


def mixed() -> list[Job]:
    """Trees, chains, both, and neither, side by side."""
    jobs = crowd(6)
    for index, job in enumerate(jobs):
        method = ("auto", "eagle3", "ngram", "off", "auto", "eagle3")[index]
        job.speculation = SpeculationParams(method, (None, 3, None, None, 5, None)[index])
        job.params = replace(RECORDED if index in (1, 4) else GREEDY, max_tokens=20 + index)
    return jobs


# --- the same as the host's rounds --------------------------------------------------------------


@pytest.mark.parametrize("names", [("eagle3",), ("eagle3", "ngram")])
def test_a_request_alone_takes_the_rounds_that_the_host_would_plan(names: tuple[str, ...]) -> None:
    job = Job((7, 4, 11, 30, 2), GREEDY)
    stats, learnt = [], []
    for ahead in (False, True):
        engine = tree_engine(ahead, proposers=names)
        [request] = run_jobs(engine, [job])
        assert request.output == run_alone(target(), job).output
        # What was offered and not chosen is counted by the host only.
        stats.append(replace(request.stats, offered=0))
        tables = [(e.all_trials, e.all_hits, e.trials[:1]) for e in engine.controller.estimators]
        learnt.append([table for tables_ in tables for table in tables_])
    assert stats[0] == stats[1]
    assert stats[1].accepted > 12 and stats[1].verified_by_proposer["eagle3"] > 20
    for left, right in zip(*learnt, strict=True):
        torch.testing.assert_close(left, right)


def watch_offers(engine: Engine) -> dict[tuple[int, ...], list[Drafts]]:
    """By text: what the first proposer offers after it."""
    found: dict[tuple[int, ...], list[Drafts]] = {}
    state, propose = engine.state, engine.proposers[0].propose

    def watched(slots: torch.Tensor) -> Drafts:
        drafts = propose(slots)
        assert drafts.parents is not None
        for row, slot in enumerate(slots.tolist()):
            # The last slot is nobody's.
            if slot != state.padding_slot:
                text = tuple(state.history[slot, : int(state.length[slot])].tolist())
                parts = drafts.tokens, drafts.lengths, drafts.confidence, drafts.parents
                found.setdefault(text, []).append(Drafts(*(part[row] for part in parts)))
        return drafts

    engine.proposers[0].propose = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", ["skilled", "random"])
def test_offers_are_those_of_a_slot_that_was_never_used(kind: str) -> None:
    """What trees leave behind in the drafter's state: as if the text had been read at once."""
    own = {"top_k": 6, "draft_tokens": 15}
    options: dict[str, Any] = {"max_draft_tokens": 15, "own": own, "proposers": ("eagle3",)}
    engine = tree_engine(True, kind, max_num_seqs=3, max_num_batched_tokens=7, **options)
    found = watch_offers(engine)
    requests = run_jobs(engine, crowd(4))
    assert sum(request.stats.accepted for request in requests) > (30 if kind == "skilled" else 3)
    texts = list(found)[:: 2 if kind == "skilled" else 4]
    assert len(texts) > 12
    for text in texts:
        fresh = tree_engine(False, kind, **options)
        offers = watch_offers(fresh)
        fresh.add(fresh.make_request("fresh", text[:-1], replace(GREEDY, max_tokens=99)))
        fresh.step()
        [[want]] = offers.values()
        assert set(offers) == {text}
        for got in found[text]:
            for name in ("tokens", "parents"):
                assert torch.equal(getattr(got, name), getattr(want, name)), text
            torch.testing.assert_close(got.confidence, want.confidence, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_requests_choose_their_proposers(policy: str) -> None:
    engine = tree_engine(True, draft_policy=policy, max_num_seqs=4)
    verified: dict[str, set[str | None]] = {}
    for job, request in zip(mixed(), run_jobs(engine, mixed()), strict=True):
        assert request.output == run_alone(target(), job).output
        verified.setdefault(job.speculation.method, set()).update(
            request.stats.verified_by_proposer
        )
    assert "off" not in verified or not verified["off"]
    assert verified["eagle3"] == {"eagle3"} and verified["ngram"] <= {"ngram"}
    assert verified["auto"]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "seed": 5, "min_tokens": 30, "ignore_eos": False},
        {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_paths_anywhere_in_the_tree_change_nothing(params: dict[str, Any]) -> None:
    """Keys that lie in the order of rows, positions and penalties that follow paths."""
    accepted = 0
    for seed in range(5):
        want, got = greedy_trees(seed, params, ahead=True, max_draft_tokens=9)
        assert got.output == want.output
        accepted += got.stats.accepted
    assert accepted > 60


def test_rows_of_padding_repeat_the_last() -> None:
    """Whatever their place, their positions are some row's: never before the text."""
    history, computed = torch.arange(40).expand(4, 40), torch.tensor([0, 3, 1, 0])
    tables = torch.zeros((4, 10), dtype=torch.int32)
    parents = torch.tensor([[-1, -1, -1], [-1, 0, -1], [-1, 0, 1], [-1, 0, 1]])
    trees = Trees(parents, parents, *ancestors(parents))
    for drafts in ([3, 2, 0, 0], [0, 3, 1, 0], [0, 0, 0, 0]):
        known = torch.tensor([1, 1, int(drafts[2] > 0), 0])
        spans = RoundSpans(torch.arange(4), known, torch.tensor(drafts), known)
        layout = lay_out_spans(spans, history, computed, tables, 16, 16, 40, 4)
        rows = node_rows(layout, trees, spans.drafts)
        used = int((known + spans.drafts).sum())
        assert used == int((layout.batch.row_slot >= 0).sum())
        positions = lay_out_trees(layout, rows, trees).batch.positions
        for values in (rows.owner, rows.offset, rows.depth, positions):
            assert (values[used:] == values[used - 1]).all()
        assert (rows.owner[:used] == layout.batch.row_slot[:used]).all()


def test_drafts_that_do_not_branch_are_rows_in_a_line() -> None:
    """Of a tree that branches later, too: then rows need no masks, and cost what a chain's do."""
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0], [-1, 0, 0], [-1, -1, 0]])
    trees = Trees(parents, parents, *ancestors(parents))
    drafts, known = torch.tensor([3, 2, 3, 2]), torch.ones(4, dtype=torch.int64)
    spans = RoundSpans(torch.arange(4), known, drafts, known)
    history, computed = torch.arange(40).expand(4, 40), torch.tensor([0, 3, 1, 0])
    tables = torch.zeros((4, 10), dtype=torch.int32)
    layout = lay_out_spans(spans, history, computed, tables, 14, 14, 40, 4)
    rows = node_rows(layout, trees, drafts)
    line = torch.isin(rows.owner, torch.tensor([0, 1]))
    assert (rows.masks[line] == CAUSAL).all() and (rows.masks[~line] != CAUSAL).all()
    assert (rows.depth[line] == rows.offset[line]).all()
    assert rows.depth[~line].tolist() == [0, 1, 2, 2, 0, 1, 1]


# --- memory -------------------------------------------------------------------------------------


def test_nodes_beyond_the_last_token_stay_within_the_lease() -> None:
    """A tree of 7 nodes behind a text that ends in a token or two: its keys have blocks."""
    engine = tree_engine(True, block_size=1, kv_blocks=200, max_num_seqs=2)
    launch, state = engine.rounds.launch, engine.state
    beyond = 0

    def check(size: Size, *rest: Any) -> Any:
        nonlocal beyond
        offers = engine.round.books.offers
        for request in engine.scheduler.running:
            slot = request.slot
            if not int(state.alive[slot]) or not size.verifies:
                continue
            last = int(state.computed[slot]) + int(offers.lengths[slot])
            leased = engine.kv.leases[request.request_id].blocks
            assert state.block_tables[slot, : last + 1].tolist() == leased[: last + 1]
            beyond += last >= request.max_length
        return launch(size, *rest)

    engine.rounds.launch = check  # type: ignore[method-assign]
    jobs = [Job((5, 9, 2 + i), replace(GREEDY, max_tokens=12 + i)) for i in range(4)]
    for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
        assert request.output == run_alone(target(), job).output
    assert beyond >= 3


# --- what a graph can record --------------------------------------------------------------------


def watch_rounds(engine: Engine, watch: Watch) -> None:
    run = engine.rounds.run

    def watched(*args: Any) -> Any:
        with watch:
            return run(*args)

    engine.rounds.run = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, RECORDED], ids=["greedy", "every"])
def test_no_host_read_in_a_recorded_round(params: SamplingParams, top_k: int) -> None:
    own = {"top_k": top_k, "depth": 3 if top_k > 1 else None}
    engine = tree_engine(True, own=own)
    watch = Watch()
    watch_rounds(engine, watch)
    requests = run_jobs(engine, [Job((2, 3, 4) * 8, params), Job((5, 6, 5, 6, 5), params)])
    assert sum(request.stats.accepted for request in requests) > 5
    assert len(watch.seen) > 2000
    assert watch.reads == []


def test_a_recorded_round_leaves_every_tensor_where_it_is() -> None:
    """A graph reads and writes the memory that it was recorded with."""
    engine = tree_engine(True, max_num_seqs=4)
    before = dict(tensors(engine))
    assert len(before) > 50
    run_jobs(engine, mixed())
    for name, tensor in tensors(engine):
        assert tensor.data_ptr() == before[name].data_ptr(), name


def tensors(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    books = engine.round.books
    holders = [engine.round, books, books.offers, engine.state, engine.state.params]
    holders += [engine.controller]
    holders += [*engine.controller.estimators, *engine.proposers]
    holders += [getattr(proposer, "pools", None) for proposer in engine.proposers]
    for index, holder in enumerate(holders):
        for name, value in vars(holder).items() if holder is not None else ():
            for place, item in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(item, torch.Tensor):
                    yield f"{index} {type(holder).__name__}.{name} {place}", item


# --- drafters that sleep -------------------------------------------------------------------------

CHAIN = {"top_k": 1, "depth": None}


@pytest.mark.parametrize("names", [("eagle3",), ("eagle3", "ngram")])
@pytest.mark.parametrize("own", [TREE, CHAIN], ids=["tree", "chain"])
def test_every_recorded_size_can_be_run(names: tuple[str, ...], own: dict[str, Any]) -> None:
    engine = tree_engine(True, proposers=names, own=own, max_num_seqs=4)
    rounds = engine.rounds
    assert isinstance(rounds, PaddedRounds)
    actions: list[tuple[tuple[int, ...], int]] = [((), 0)]
    actions += [(tuple(range(len(names))), depth) for depth in rounds.depths(1)]
    for spans in rounds.spans:
        for proposers, steps in actions:
            base = Size(spans, spans, spans, GREEDY_STAGES, proposers, steps)
            engine.round.set_batch([], [], [])
            for rows in rounds.rows(spans):
                rounds.launch(replace(base, rows=rows, samples=rows, verifies=rows > spans), 99)
            for rows, verifies in ((16, True), (16, False), (256, True), (256, False)):
                samples = rounds.prompt_samples(spans, rows, verifies)
                rounds.launch(replace(base, rows=rows, samples=samples, verifies=verifies), 99)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("own", [TREE, CHAIN], ids=["tree", "chain"])
def test_drafters_that_fall_asleep_and_wake_change_nothing(
    own: dict[str, Any], policy: str
) -> None:
    engine = tree_engine(True, own=own, draft_policy=policy, max_num_seqs=4)
    dice, steps = random.Random(3), []
    planner = engine.loop.planner
    decide = planner.decide

    def restless(situation: Situation) -> Decision:
        decision = decide(situation)
        awake = decision.proposers
        if dice.random() < 0.4:
            # The drafter sleeps; whoever else is there goes on.
            awake = tuple(index for index in awake if index != 0)
            decision = replace(decision, proposers=awake, steps=0)
        if 0 in situation.proposers:
            steps.append(0 in awake)
        return decision

    planner.decide = restless  # type: ignore[method-assign]
    drafted = 0
    for job, request in zip(mixed(), run_jobs(engine, mixed()), strict=True):
        assert request.output == run_alone(target(), job).output
        drafted += request.stats.verified_by_proposer.get("eagle3", 0)
    assert steps.count(False) > 5 and steps.count(True) > 1 and drafted > 10
