"""Rounds that are not recorded yet: which others run in their place, and that no text changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Job, make_engine, run_jobs, tiny_decoder
from recorded_fakes import Replayed, record
from surefoot.engine import cuda_graphs
from surefoot.engine.cuda_graphs import RecordedRounds
from surefoot.engine.engine import Engine
from surefoot.engine.stand_ins import LONGEST, stand_in
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation.decisions import NOTHING
from surefoot.speculation.recorded_costs import RecordedCosts, RecordedSize
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size

SIZES = st.builds(
    Size,
    spans=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 40),
    samples=st.integers(1, 40),
    kind=st.sampled_from([GREEDY, DRAWN, ADJUSTED]),
    proposers=st.sampled_from([(), (0,), (1,), (0, 1)]),
    steps=st.sampled_from([0, 3, 5]),
    verifies=st.booleans(),
    catches_up=st.booleans(),
    logprobs=st.sampled_from([None, 5]),
    masked=st.booleans(),
)
ROOM = ("spans", "rows", "samples")
MORE = {(): [()], (0,): [(0,), (0, 1)], (1,): [(1,), (0, 1)], (0, 1): [(0, 1)]}
"""Who proposes -> who may propose instead."""
FURTHER = {0: [0], 3: [3, 5], 5: [5]}


@settings(max_examples=400)
@given(SIZES, st.lists(SIZES, max_size=30), st.data())
def test_a_stand_in_does_the_same_with_more_room(
    size: Size, recorded: list[Size], data: Any
) -> None:
    # Most sizes have nothing in common: some that differ in their room alone.
    for _ in range(data.draw(st.integers(0, 4))):
        changes: dict[str, Any] = {name: data.draw(st.integers(1, 40)) for name in ROOM}
        changes["proposers"] = data.draw(st.sampled_from(MORE[size.proposers]))
        changes["steps"] = data.draw(st.sampled_from(FURTHER[size.steps or 0]))
        recorded.append(replace(size, **changes))
    found = stand_in(size, recorded)
    roomless = {name: 0 for name in (*ROOM, "catches_up", "proposers", "steps")}
    able = [
        other
        for other in recorded
        if replace(other, **roomless) == replace(size, **roomless)  # type: ignore[arg-type]
        and other.spans >= size.spans
        and other.proposers in MORE[size.proposers]
        and other.steps in FURTHER[size.steps or 0]
        and other.has_prompts == size.has_prompts
        and (other.catches_up or not size.catches_up)
        and (
            not size.has_prompts
            or (other.samples >= size.samples and size.rows <= other.rows <= LONGEST * size.rows)
        )
    ]
    assert (found is None) == (not able)
    if found is not None:
        assert found in able and found.spans == min(other.spans for other in able)


def test_the_nearest_number_of_rows_stands_in() -> None:
    """Too many rows cost time: a round of five times as many is no better than one of few."""
    wanted = Size(8, 16, 16, DRAWN, (0,), verifies=True)
    few, some, many = (replace(wanted, rows=rows, samples=rows) for rows in (10, 20, 80))
    assert stand_in(wanted, [few, some, many]) == some
    assert stand_in(wanted, [few, many]) == few
    assert stand_in(wanted, [many]) == many


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One whose rounds are recorded, as far as the host is concerned."""
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "capture", record)
    engine = make_engine(
        tiny_decoder(), True, proposers=("ngram",), max_num_seqs=6, kv_blocks=300,
        max_draft_tokens=4, draft_policy="fixed",
    )  # fmt: skip
    rounds = RecordedRounds(engine.round, engine.config.max_num_batched_tokens, True)
    engine.rounds = engine.loop.rounds = rounds
    return engine


def jobs() -> list[Job]:
    made = []
    for index in range(14):
        params = SamplingParams(
            temperature=0.8 if index % 3 else 0.0,
            seed=index,
            max_tokens=8 + 5 * index % 37,
            ignore_eos=True,
            logprobs=2 if index == 5 else None,
        )
        made.append(Job((5, 9, 5, 9, 5 + index % 2), params, SpeculationParams("auto")))
    return made


@pytest.mark.parametrize("share", [0.0, 1e9])
def test_texts_are_the_same_whichever_round_runs(
    share: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "RECORDING_SHARE", share)
    monkeypatch.setattr(cuda_graphs, "IN_PLACE", 1)
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    wanted, unknown = set(), 0
    launch = rounds.launch

    def watch(size: Size, *args: Any) -> Any:
        nonlocal unknown
        report = launch(size, *args)
        wanted.add(size)
        unknown += report.seconds() is None
        return report

    monkeypatch.setattr(rounds, "launch", watch)
    plain = run_jobs(make_engine(tiny_decoder(), False, max_num_seqs=1, kv_blocks=300), jobs())
    found = run_jobs(engine, jobs())
    assert [r.output for r in found] == [r.output for r in plain]
    assert sum(r.stats.accepted for r in found) > 5
    if share:
        assert set(rounds.graphs) == wanted and not unknown
    else:
        assert len(rounds.graphs) < len(wanted) and unknown
        missing = wanted - set(rounds.graphs)
        assert missing <= set(rounds.wanted), "recorded when nobody waits"


def test_the_targets_part_is_recorded_once_for_all_that_may_follow_it(engine: Engine) -> None:
    """Whoever proposes, whatever is sampled and reported; and anew where rounds have changed."""
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    engine.state._make_masks()
    size = Size(2, 4, 4, GREEDY, (0,), 0, verifies=True)
    alike = [
        size,
        replace(size, kind=DRAWN),
        replace(size, proposers=(), steps=None),
        replace(size, logprobs=2, scored=2),
        replace(size, masked=True, catches_up=False),
    ]
    others = [
        replace(size, rows=6, samples=6),
        replace(size, spans=3),
        replace(size, rows=16),
        replace(size, rows=2, samples=2, verifies=False),
    ]
    targets = {id(rounds.graph(each).target) for each in alike}
    assert len(targets) == 1
    assert len(targets | {id(rounds.graph(each).target) for each in others}) == 5
    before = rounds.graph(size).target
    rounds._drop(lambda each: each == size)
    assert size not in rounds.graphs and rounds.graph(size).target is before
    rounds.forget()
    assert not rounds.graphs and rounds.graph(size).target is not before


def test_recording_takes_its_share_of_the_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    now = 0.0

    def capture(size: Size) -> Any:
        nonlocal now
        now += 0.03
        return Replayed(partial(engine.round, size))

    monkeypatch.setattr(rounds, "capture", capture)
    monkeypatch.setattr("surefoot.engine.cuda_graphs.time.perf_counter", lambda: now)
    large = Size(8, 16, 16, DRAWN, (0,), verifies=True)
    now = 100.0
    assert rounds.available(large) == large
    for count in range(40):
        small = replace(large, rows=17 + count, samples=17 + count)
        before = len(rounds.graphs)
        got = rounds.available(small)
        assert (got == small) == (len(rounds.graphs) > before)
        now += 0.5
    # 20 seconds at two in a hundred, and the first.
    assert 13 <= len(rounds.graphs) <= 16
    other = replace(large, proposers=())
    assert rounds.available(other) == other, "nothing can stand in for it"


@pytest.mark.parametrize(
    ("rows", "times"), [(16, cuda_graphs.IN_PLACE), (8, cuda_graphs.IN_PLACE // 2)]
)
def test_what_planners_do_not_tell_apart_is_recorded_when_that_pays(
    rows: int, times: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording holds up everybody at once; a round in another's place costs a little each time,
    and more where it has more rows."""
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    monkeypatch.setattr(cuda_graphs, "RECORDING_SHARE", 1e9)
    engine.state._make_masks()
    masked = Size(8, 16, 16, GREEDY, (0,), verifies=True, masked=True)
    assert rounds.available(masked) == masked, "nothing can stand in for it"
    small = replace(masked, rows=rows, samples=rows, catches_up=False)
    got = [rounds.available(small) for _ in range(times)]
    assert got == [masked] * (times - 1) + [small]
    assert rounds.wanted == [small], "it would have been recorded when nobody waits"
    rounds._drop(lambda size: size == small)
    assert rounds.available(small) == masked, "and is counted anew"
    # Planners want to know what those take that they choose.
    usual = replace(masked, masked=False)
    rounds.graph(usual)
    less = replace(usual, rows=12, samples=12)
    assert rounds.available(less) == less


def test_what_stands_in_is_looked_for_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through a thousand recorded rounds takes longer than a small model's round."""
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    looked: list[Size] = []

    def look(size: Size, recorded: Any) -> Size | None:
        looked.append(size)
        return stand_in(size, recorded)

    monkeypatch.setattr(cuda_graphs, "stand_in", look)
    monkeypatch.setattr(cuda_graphs, "RECORDING_SHARE", 0.0)
    large = Size(8, 16, 16, DRAWN, (0,), verifies=True)
    small = replace(large, rows=14, samples=14)
    rounds.graph(large)
    rounds._held_up = 1.0
    assert [rounds.available(small) for _ in range(3)] == [large] * 3
    assert looked == [small]
    better = replace(large, rows=15, samples=15)
    rounds.graph(better)
    assert rounds.available(small) == better
    rounds.forget()
    rounds.graph(large)
    rounds._held_up = 1.0
    assert rounds.available(small) == large


def test_planners_choose_among_recorded_rounds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And among all of them while one more may be recorded; for each kind of sampling."""
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    look = (0,), 0
    sizes = [RecordedSize(8, 8, 8, NOTHING)]
    sizes += [RecordedSize(8, rows, rows, look) for rows in (8, 12, 16, 24)]
    rounds.costs = {
        kind: RecordedCosts({size: [(1, 1e-3 + 1e-5 * size.rows)] for size in sizes})
        for kind in (GREEDY, DRAWN)
    }
    size = Size(8, 8, 8, DRAWN, (0,), 0)
    now = 100.0
    monkeypatch.setattr("surefoot.engine.cuda_graphs.time.perf_counter", lambda: now)
    engine.state._make_masks()
    for unusual in (
        replace(size, rows=24, samples=24, masked=True),
        replace(size, rows=24, samples=24, logprobs=2, scored=4),
        replace(size, rows=24, samples=24, catches_up=False),
    ):
        rounds.graph(unusual)

    def most() -> tuple[int, int]:
        rounds.offer()
        tables = (rounds.costs[kind].table(8, 0, look, 99, 9.0)[0] for kind in (GREEDY, DRAWN))
        greedy, drawn = (int(drafts[-1]) for drafts in tables)
        return greedy, drawn

    assert most() == (16, 16)
    rounds.graph(size)
    rounds.graph(replace(size, rows=12, samples=12, verifies=True))
    rounds._held_up, rounds._serving_since = 0.1, now
    assert most() == (16, 4), "of greedy rounds there is none: one has to be recorded"
    assert rounds.costs[GREEDY].actions(8) == (NOTHING,)
    assert rounds.costs[DRAWN].actions(8) == (NOTHING, look)
    rounds.graph(replace(size, rows=16, samples=16, verifies=True))
    assert most() == (16, 8)
    now += 6.0
    assert most() == (16, 16)


def test_a_wide_request_costs_others_no_more_recorded_rounds_than_it_must(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases are read where some request has any; stop tokens in every round."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    rounds = engine.rounds
    assert isinstance(rounds, RecordedRounds)
    greedy = Size(2, 2, 2, GREEDY, (0,), 0)
    sizes = [replace(greedy, kind=kind) for kind in (GREEDY, DRAWN, ADJUSTED)]

    def admit(**wanted: Any) -> None:
        params = SamplingParams(**wanted)
        request = engine.make_request(f"wide {len(rounds.wanted)}", [5, 9], params)
        request.slot = 0
        engine.state.params.write([request])

    for size in sizes:
        rounds.graph(size)
    admit(logit_bias={token: 1.0 for token in range(3)}, stop_token_ids=[3, 4, 5])
    assert rounds.available(greedy) == greedy and len(rounds.graphs) == 3
    admit(logit_bias={token: 1.0 for token in range(20)})
    assert rounds.available(greedy) == greedy
    assert set(rounds.graphs) == set(sizes[:2]) and rounds.wanted == sizes[2:]
    admit(stop_token_ids=list(range(20)))
    rounds._check_tables()
    assert not rounds.graphs and set(rounds.wanted) == set(sizes)
    while rounds.prepare():
        pass
    assert set(rounds.graphs) == set(sizes)
