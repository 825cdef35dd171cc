"""What an engine on a GPU records and measures when it starts, by a made-up clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from surefoot.engine import rounds as engine_rounds
from surefoot.engine import timing
from surefoot.engine.cuda_graphs import RecordedRounds, Recording
from surefoot.engine.measuring import measure_recorded
from surefoot.speculation.decisions import NOTHING
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY, Size
from test_recorded_sizes import CHAIN, padded_engine, recorded_sizes

EVERYTHING = (0, 1)


class Clocked(RecordedRounds):
    """Nothing is recorded, and rounds take what ``seconds_of`` says."""

    def graph(self, size: Size) -> Recording:
        self.graphs[size] = None  # type: ignore[assignment]
        return self.graphs[size]

    def time(self, size: Size, prepare: Callable[[], None], repeats: int = 4) -> float:
        self.graph(size)
        prepare()
        state, busy = self.round.state, self.round.slots != self.round.state.padding_slot
        assert int(busy.sum()) == (1 if size.has_prompts else size.spans)
        return seconds_of(size, int(state.length[0]) * (not size.has_prompts))


def seconds_of(size: Size, context: int) -> float:
    # A drafter reads keys as the target does, a lookup none.
    proposing = 0.2 * (1 in size.proposers) + (size.steps or 0) * (0.4 + 0.004 * context)
    draws = (GREEDY, DRAWN, ADJUSTED).index(size.kind) * (0.3 + 0.05 * size.samples)
    return 1e-3 * (2.0 + 0.1 * size.rows + 0.01 * context + proposing + draws)


@pytest.fixture(scope="module")
def rounds() -> Iterator[Clocked]:
    """Of a drafter and a lookup."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(timing, "CONTEXTS", (32, 96))
        engine = padded_engine(("eagle3", "ngram"), CHAIN, "fixed", max_num_seqs=4)
        yield Clocked(engine.round, 64, True)


def test_every_size_is_recorded_and_those_with_penalties_wait(rounds: Clocked) -> None:
    """Nobody has to wait for recording where the likeliest tokens are taken or text is drawn, with
    drafters or without."""
    costs = measure_recorded(rounds, 400)
    usual = recorded_sizes(rounds)
    idle = {replace(size, catches_up=False) for size in usual if 0 not in size.proposers}
    assert {size.proposers for size in idle} == {(), (1,)}
    for kind in (GREEDY, DRAWN):
        there = {size for size in rounds.graphs if size.kind == kind}
        assert there == {replace(size, kind=kind) for size in usual | idle}
    assert set(rounds.wanted) == {replace(size, kind=ADJUSTED) for size in usual}
    adjusted = {size for size in rounds.graphs if size.kind == ADJUSTED}
    assert adjusted < set(rounds.wanted) and len(adjusted) < 5
    assert rounds.costs == costs


def test_an_engine_for_one_request_and_one_row_at_a_time_is_measured(rounds: Clocked) -> None:
    """The smallest round is of one row, which was entered twice."""
    one = Clocked(padded_engine((), {}, "fixed", max_num_seqs=1).round, 1, True)
    costs = measure_recorded(one, 400)[GREEDY]
    [seconds] = costs.table(1, 1, NOTHING, 0, 32.0)[1]
    assert one.prompt_rows == [1] and seconds > 0


def test_what_drawing_adds_is_told_apart(rounds: Clocked) -> None:
    costs = measure_recorded(rounds, 400)
    for context in (32, 96):
        greedy, drawn, adjusted = (
            costs[kind].table(4, 0, (EVERYTHING, 3), 12, context)[1]
            for kind in (GREEDY, DRAWN, ADJUSTED)
        )
        rows = 4 + costs[GREEDY].table(4, 0, (EVERYTHING, 3), 12, context)[0]
        assert drawn - greedy == pytest.approx(1e-3 * (0.3 + 0.05 * rows), rel=0.1)
        assert adjusted - greedy == pytest.approx(1e-3 * (0.6 + 0.1 * rows), rel=0.1)


def test_costs_are_those_that_were_measured(rounds: Clocked) -> None:
    costs = measure_recorded(rounds, 400)[GREEDY]
    for context in (32, 64, 96):
        for action in ((EVERYTHING, 3), ((1,), 0), NOTHING):
            for spans in (1, 2, 4):
                rows, seconds = costs.table(spans, 0, action, 3 * spans, context)
                assert rows[0] == 0
                size = Size(spans, spans, spans, GREEDY, *action)
                # Between what was measured it goes by steps.
                assert seconds[0] == pytest.approx(seconds_of(size, context), rel=0.03)
    # Prompts cost by their rows, and drafting beside them is what it saves not to.
    for action, extra in ((NOTHING, 0.0), ((EVERYTHING, 3), 1.784e-3)):
        _, [one] = costs.table(1, 63, action, 0, 128)
        assert one == pytest.approx(seconds_of(Size(1, 64, 1, GREEDY, ()), 0) + extra, rel=0.02)


class Keeping(Clocked):
    """Drafters take a while to keep up, and rounds now and then longer than they have to."""

    calls = 0

    def time(self, size: Size, prepare: Callable[[], None], repeats: int = 4) -> float:
        self.calls += 1
        seconds = super().time(size, prepare, repeats)
        kept = int(self.round.quota.max()) * size.catches_up
        return seconds + 2e-6 * kept + 0.5 * (self.calls % 3 == 0)


def test_what_keeping_up_takes_is_measured_by_rows() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        for proposers, options, seconds in ((("eagle3",), CHAIN, 2e-6), (("ngram",), {}, 0.0)):
            engine = padded_engine(proposers, options, "fixed", max_num_seqs=4)
            rounds = Keeping(engine.round, 64, True)
            measure_recorded(rounds, 400)
            assert engine.round.keeping_up.row_seconds.mean == pytest.approx(seconds)
            # Where prompts come a few rows at a time, there is nothing to measure.
            few = Keeping(
                padded_engine(proposers, options, "fixed", max_num_seqs=80).round, 0, True
            )
            measure_recorded(few, 400)


class Padded(Clocked):
    """Padding to more requests takes time, and so does drafting for them."""

    def time(self, size: Size, prepare: Callable[[], None], repeats: int = 4) -> float:
        self.graph(size)
        prepare()
        assert size.rows <= 2048 or size.spans == 80, "takes long, and tells little"
        return padded_seconds(size)


def padded_seconds(size: Size) -> float:
    proposing = 0.1 * (1 in size.proposers) + (size.steps or 0) * (0.2 + 0.1 * size.spans)
    return 1e-3 * (2.0 + 0.01 * size.rows + 0.2 * size.spans + proposing)


def test_rounds_with_prompts_cost_what_they_are_padded_to() -> None:
    """What rounds of many requests teach is not believed of those of a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(engine_rounds, "PROMPT_DRAFTED", 100)
        engine = padded_engine(("eagle3", "ngram"), CHAIN, "fixed", max_num_seqs=80)
        rounds = Padded(engine.round, 4096, True)
        steps = {spans: rounds.prompt_depth(spans) for spans in rounds.prompt_spans}
        assert steps == {16: 3, 64: 1, 80: 1}
        costs = measure_recorded(rounds, 400)[GREEDY]

    def check(requests: int, spans: int, rows: int) -> None:
        for action in (NOTHING, (EVERYTHING, steps[spans]), ((1,), 0)):
            _, [found] = costs.table(requests, 200 - requests, action, 0, 128)
            size = Size(spans, rows, spans, GREEDY, *action)
            assert found == pytest.approx(padded_seconds(size), rel=0.03)
        # A few rows are padded, too.
        _, [found] = costs.table(requests, 2, NOTHING, 0, 128)
        least = next(count for count in rounds.prompt_rows if count > max(spans, requests + 1))
        assert found == pytest.approx(padded_seconds(Size(spans, least, spans, GREEDY, ())))

    for requests, spans in ((1, 16), (16, 16), (17, 64), (80, 80)):
        check(requests, spans, 200)
    for _ in range(100):
        for action in (NOTHING, (EVERYTHING, 1), ((1,), 0)):
            costs.observe(
                80, 120, action, 0, 128, 5 * padded_seconds(Size(80, 200, 80, GREEDY, *action))
            )
    assert costs.table(80, 120, NOTHING, 0, 128)[1][0] > 4 * padded_seconds(
        Size(80, 200, 80, GREEDY, ())
    )
    check(1, 16, 200)
    check(17, 64, 200)
    _, [found] = costs.table(1, 3000, NOTHING, 0, 128)
    assert found == pytest.approx(padded_seconds(Size(16, 3001, 16, GREEDY, ())), rel=0.01)


def test_where_no_round_has_room_for_prompts_beside_all_requests() -> None:
    """Nobody can tell what such a round takes: as long as they do without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        engine = padded_engine((), {}, "fixed", max_num_seqs=80)
        rounds = Padded(engine.round, 0, True)
        assert rounds.prompt_rows[-1] <= rounds.prompt_spans[-1]
        costs = measure_recorded(rounds, 400)[GREEDY]
    _, [found] = costs.table(80, 1, NOTHING, 0, 128)
    assert found == pytest.approx(padded_seconds(Size(80, 80, 80, GREEDY, ())), rel=0.05)
