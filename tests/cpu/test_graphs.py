"""Which recorded round serves how many rows, and what the controller is told of its cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from harness import Job, make_engine, on_torch_alone, run_alone, run_jobs, tiny_decoder
from surefoot.engine.graphs import RoundGraphs
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.sampling.params import Features
from surefoot.speculation.replay import ADJUSTED, DRAWN, GREEDY, Size


@pytest.fixture
def graphs() -> RoundGraphs:
    engine = make_engine(tiny_decoder(), True, max_num_seqs=6, max_draft_tokens=3)
    assert engine.pipeline is not None
    return engine.pipeline.graphs


def test_sizes_cover_every_round(graphs: RoundGraphs) -> None:
    assert graphs.spans == [1, 2, 4, 8]
    for spans in graphs.spans:
        rows = graphs.rows(spans)
        assert rows[0] == spans and rows[-1] == spans * 4 and rows == sorted(set(rows))
    assert graphs.plain(5, Features(), ()) == Size(8, 8, Features(), ())


def test_a_larger_round_is_taken_where_it_costs_less(graphs: RoundGraphs) -> None:
    base = graphs.plain(4, Features(), (0,))
    rows = graphs.rows(4)
    assert rows == [4, 5, 6, 8, 10, 12, 16]
    seconds = (1, 2, 5, 5, 5, 3, 4)
    graphs.costs = {(4, r, None): cost for r, cost in zip(rows, seconds, strict=True)}
    assert [graphs.holding(base, r).rows for r in (4, 5, 6, 8, 13)] == [4, 5, 12, 12, 16]
    # 3 requests: a round of 4 rows has room for a draft, but verifies none; 9 are all there are.
    assert graphs.table(base, 3).tolist() == [1, 2, 2, 3, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 5, 6])
def test_the_cost_of_drafts_is_that_of_the_cheapest_round_that_holds_them(
    graphs: RoundGraphs, requests: int
) -> None:
    base = graphs.plain(requests, Features(), (0,))
    rows = graphs.rows(base.spans)
    chance = random.Random(requests)
    for _ in range(20):
        costs = {r: float(chance.randint(1, 9)) for r in rows}
        graphs.costs = {(base.spans, r, None): cost for r, cost in costs.items()}
        graphs._tables_by.clear()
        expected = [
            min(costs[r] for r in rows if r >= (graphs.rows_with(base, requests, n) if n else 0))
            for n in range(min(rows[-1] - base.spans, 3 * requests) + 1)
        ]
        assert graphs.table(base, requests).tolist() == expected


def test_a_draft_that_fits_an_empty_span_is_verified() -> None:
    """3 requests in a round of 4 spans, of which one drafts one token."""
    plain = make_engine(tiny_decoder(), False, max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def jobs(method: str) -> list[Job]:
        methods = (method, "off", "off")
        return [
            Job((5, 9, 2 + i), params, SpeculationParams(m, 1 if m == "oracle" else None))
            for i, m in enumerate(methods)
        ]

    texts = tuple(tuple(request.tokens) for request in run_jobs(plain, jobs("off")))
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=3, max_draft_tokens=4, proposers=("oracle",),
        proposer_options={"oracle": {"texts": texts}},
    )  # fmt: skip
    requests = run_jobs(on_torch_alone(engine), jobs("oracle"))
    assert tuple(tuple(request.tokens) for request in requests) == texts
    assert requests[0].stats.accepted > 8


def test_drafters_draft_as_far_as_rows_hold_or_as_far_as_they_can() -> None:
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=4, proposers=("eagle3=dummy",)
    )
    assert engine.pipeline is not None
    graphs = engine.pipeline.graphs
    assert graphs.longest == 4 and graphs.depths(4) == [1, 2, 3, 4]
    assert set(graphs.variants(4)) == {
        (4, 0), (4, 4), (5, 4), (6, 4), (8, 4), (10, 4), (12, 4), (16, 4), (20, 4),
        (8, 1), (12, 2), (16, 3),
    }  # fmt: skip
    base = graphs.plain(3, Features(), (0,))
    assert base == Size(4, 4, Features(), (0,), 0) and graphs.plain(3, Features(), ()).steps is None
    assert graphs.holding(replace(base, steps=2), 20) == replace(base, steps=2, rows=12)
    assert len(graphs.table(base, 3)) == 1 and len(graphs.table(replace(base, steps=1), 3)) == 5


@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_requests_may_do_without_the_drafter_that_others_have(policy: str) -> None:
    """An engine with a drafter, and nobody there who uses it: some look things up, some do not."""
    engine = on_torch_alone(
        make_engine(
            tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=4, draft_policy=policy,
            proposers=("ngram", "eagle3=dummy"),
        )
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for methods in (("ngram",), ("off", "ngram", "ngram"), ("off", "off")):
        jobs = [Job((5, 9, 5, 9, i), params, SpeculationParams(m)) for i, m in enumerate(methods)]
        before = engine.stats.replays
        for job, request in zip(jobs, run_jobs(engine, jobs), strict=True):
            assert request.output == run_alone(tiny_decoder(), job).output
            assert (request.stats.drafted > 0) == (job.speculation.method == "ngram")
        assert engine.stats.replays > before
    graphs = engine.pipeline.graphs if engine.pipeline else None
    assert graphs is not None
    look, sleep = Size(4, 8, GREEDY, (0,)), Size(4, 8, GREEDY, (0, 1), 0)
    assert graphs.seconds(look) == graphs.seconds(sleep) > 0
    assert graphs.table(look, 3).tolist() == graphs.table(sleep, 3).tolist()


def test_a_drafter_that_sleeps_offers_nothing() -> None:
    """And what it offered before is forgotten."""
    engine = make_engine(
        tiny_decoder(), True, max_num_seqs=2, max_draft_tokens=3, proposers=("eagle3=dummy",)
    )
    assert engine.pipeline is not None
    replay, state = engine.pipeline.replay, engine.state
    for slot in (0, 1):
        engine.controller.admit([slot], [SpeculationParams()])
    replay.enter([0, 1])
    replay.seat([0, 1])
    state.length[:2], state.computed[:2], state.limit[:2] = 5, 4, 40
    for steps in (2, 0, 3):
        engine.pipeline.graphs.launch(Size(2, 2, GREEDY, (0,), steps))
        assert replay.lengths[:2].tolist() == [steps] * 2
        assert replay.report[:2, 5].tolist() == [steps] * 2


def test_blocks_that_change_in_the_middle_reach_the_device() -> None:
    state = make_engine(tiny_decoder(), True, max_num_seqs=2).state
    for blocks in ([1, 2, 3], [1, 4, 3], [1, 4], [5], [5, 6, 7, 8]):
        state.set_blocks([(0, blocks)])
        state.set_blocks([(1, blocks[:1])])
        state.set_blocks([(1, blocks), (0, blocks)])
        for slot in (0, 1):
            assert state.block_tables[slot, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, ADJUSTED])
def test_a_round_in_which_everybody_has_ended_writes_nothing(kind: Features) -> None:
    """The host launches it before it has read that they ended; all its rows are padding."""
    engine = make_engine(tiny_decoder(), True, max_num_seqs=4, max_draft_tokens=3)
    assert engine.pipeline is not None
    replay, state = engine.pipeline.replay, engine.state
    replay.enter([])
    replay.seat([0, 1, 2])
    before = state.length.clone(), state.computed.clone()
    engine.pipeline.graphs.launch(Size(4, 8, kind, (0,)))
    assert replay.report[:3, 0].tolist() == [0, 0, 0]
    assert torch.equal(state.length, before[0]) and torch.equal(state.computed, before[1])
