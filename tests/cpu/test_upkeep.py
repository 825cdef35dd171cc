"""Whom drafters serve: everybody where they pay; few, now and then, where they do not."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.request import Request, SamplingParams, SpeculationParams
from surefoot.sampling.params import SamplingStages
from surefoot.speculation.decisions import Decision, Expectation
from surefoot.speculation.exploring import Trial
from surefoot.speculation.size import DRAWN as DRAWN_KIND
from surefoot.speculation.size import GREEDY as KIND
from surefoot.speculation.size import kind_of
from surefoot.speculation.upkeep import ENOUGH, Record, Upkeep
from test_planner import DRAFTER

NAME = "drafter"
SLOTS = 64
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
PLAIN = Decision(0, (), 0, expected=Expectation(1.0, 1.0, 1.0))


def drafting(gain: float, **expected: Any) -> Decision:
    """A round that gains so many tokens a request against rounds of 1 s without drafts."""
    return Decision(
        4, (DRAFTER,), 4, expected=Expectation(1.5, 1.5, 1.0, tokens=1.5 + gain, **expected)
    )


def request(
    params: SamplingParams = GREEDY, method: str = "auto", drafters: tuple[str, ...] = (NAME,)
) -> Request:
    return Request(
        "r", (1, 2), params, SpeculationParams(method), 0, 99, drafters=frozenset(drafters)
    )


def launch(
    upkeep: Upkeep,
    requests: Sequence[Request],
    decision: Decision,
    takes: float,
    prompt_rows: int = 0,
    kind: SamplingStages = KIND,
) -> None:
    """A round for requests that were let in, each in the slot of its place."""
    for slot, each in enumerate(requests):
        each.slot = slot
    upkeep.enter(requests)
    upkeep.launched(np.arange(len(requests)), decision, kind, prompt_rows, takes)


@dataclass
class Traffic:
    """Requests that come and go: ``load`` run at a time, each for about ``length`` rounds."""

    upkeep: Upkeep = field(default_factory=lambda: Upkeep((DRAFTER,), SLOTS))
    gain: Callable[[], float] = lambda: 0.0
    """What rounds gain in which the drafter drafts; where that is nothing, nobody drafts."""
    takes: float = 0.02
    """What keeping up with the rows of a round takes."""
    load: int = 4
    length: int = 60
    params: SamplingParams = GREEDY
    seed: int = 0
    served: float = 0.0
    """Rounds by the share of requests with drafter."""
    admitted: list[bool] = field(default_factory=list)
    """Of all requests so far, whether they were served."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.running: dict[Request, int] = {}
        self.free = list(range(self.load))

    def run(self, rounds: int) -> float:
        """The share of served requests in so many rounds."""
        before, batch, share = self.served, None, 0.0
        kind = kind_of(SamplingStages.of((self.params,)))
        for _ in range(rounds):
            ended = [each for each, left in self.running.items() if not left]
            for each in ended:
                del self.running[each]
                self.free.append(each.slot)
            while len(self.running) < self.load:
                new = request(self.params)
                self.upkeep.choose(new, len(self.running), self.load)
                new.slot = self.free.pop()
                self.upkeep.enter([new])
                self.admitted.append(bool(new.drafters))
                self.running[new] = self.random.randint(1, 2 * self.length)
                batch = None
            if batch is None:
                batch = np.array([each.slot for each in self.running])
                share = sum(bool(each.drafters) for each in self.running) / len(batch)
            gain = self.gain()
            # Drafts take as long for few requests as for many.
            pays = share * (1.5 + gain) + (1.0 - share) > 1.5
            decision = drafting(share * (1.5 + gain) + 1.0 - share - 1.5) if pays else PLAIN
            self.upkeep.launched(batch, decision, kind, 0, self.takes / self.load)
            self.served += share
            self.running = {each: left - 1 for each, left in self.running.items()}
        return (self.served - before) / rounds


def record(upkeep: Upkeep) -> Record:
    [only] = upkeep.records.values()
    return only


@pytest.mark.parametrize(
    ("load", "length"), [(1, 4), (1, 400), (4, 60), (8, 4), (8, 400), (64, 60)]
)
def test_where_drafters_never_pay_few_requests_are_served(load: int, length: int) -> None:
    traffic = Traffic(load=load, length=length)
    assert traffic.run(int(ENOUGH)) == 1.0
    traffic.run(4000 + 8 * length)
    # One of nine at most, or more of fewer requests; then less and less, and never nobody for good.
    weight = min(1.0, load / 4)
    assert weight * traffic.run(40_000) < 0.1
    assert 0.0 < weight * traffic.run(120_000) < 0.035


@pytest.mark.parametrize("load", [1, 4, 64])
def test_where_drafters_pay_all_requests_are_served(load: int) -> None:
    assert Traffic(load=load, gain=lambda: 0.3).run(20_000) == 1.0
    assert Traffic(load=load, gain=lambda: 0.01).run(20_000) == 1.0


@pytest.mark.parametrize("load", [1, 4, 64])
@pytest.mark.parametrize("takes", [0.0, 0.002, 0.05])
def test_gains_are_held_against_what_keeping_up_takes(load: int, takes: float) -> None:
    """In every fourth round drafters draft, and in three they keep up with all requests' rows."""

    def served(gain: float) -> float:
        rounds = itertools.cycle((gain, 0.0, 0.0, 0.0))
        traffic = Traffic(gain=lambda: next(rounds), load=load, takes=takes)
        return traffic.run(20_000)

    assert served(1.2 * 3 * takes + 0.01) == 1.0
    assert not takes or served(0.8 * 3 * takes) < 0.5


def test_rounds_of_which_nothing_is_believed_tell_nothing() -> None:
    """Those of a fixed number of drafts, while that is measured."""
    upkeep, served = Upkeep((DRAFTER,), SLOTS), request()
    upkeep.choose(served, 0, 1)
    launch(upkeep, [served], Decision(3, (DRAFTER,), 3), 0.01)
    assert record(upkeep).served == record(upkeep).known == 0.0


def test_gains_may_come_and_go_from_round_to_round() -> None:
    luck = random.Random(1)
    traffic = Traffic(gain=lambda: luck.choice([-1.0, 0.0, 0.5]))
    assert traffic.run(20_000) == 1.0


@pytest.mark.parametrize("load", [1, 8, 64])
@pytest.mark.parametrize("before", [1, 3000])
def test_wrong_beliefs_about_costs_for_a_while_do_not_cost_requests_their_drafters(
    load: int, before: int
) -> None:
    """A poisoned table of costs is right again within 500 rounds; until then nobody drafts."""
    gain = 0.5
    traffic = Traffic(load=load, gain=lambda: gain)
    traffic.run(before)
    gain = 0.0
    traffic.run(400)
    gain = 0.5
    assert traffic.run(5000) == 1.0


@pytest.mark.parametrize("load", [1, 8])
def test_drafters_that_begin_to_pay_come_back_and_stay(load: int) -> None:
    gain = 0.0
    traffic = Traffic(load=load, gain=lambda: gain)
    traffic.run(30_000)
    gain = 0.4
    traffic.run(int(64 * 4 * ENOUGH))
    assert traffic.run(5000) == 1.0
    gain = 0.0
    rounds = 0
    while traffic.admitted[-1]:
        rounds += 1
        traffic.run(1)
    assert rounds < 40 * record(traffic.upkeep).enough
    # It did pay: so the next look is soon.
    assert record(traffic.upkeep).patience == 8
    while not traffic.admitted[-1]:
        rounds += 1
        traffic.run(1)
    assert rounds < 100 * record(traffic.upkeep).enough


def test_loads_and_kinds_of_sampling_are_told_apart() -> None:
    """Whoever is alone keeps its drafter, whatever became of it in company; so does the greedy."""
    upkeep = Upkeep((DRAFTER,), SLOTS)
    crowd = Traffic(upkeep, load=8, params=DRAWN)
    while not crowd.admitted or crowd.admitted[-1]:
        crowd.run(10)
    # One that is greedy among others shares their rounds.
    fresh = request(GREEDY)
    upkeep.choose(fresh, 7, 8)
    assert fresh.declined == {NAME} and not fresh.drafters
    assert Traffic(upkeep, load=1, params=DRAWN, gain=lambda: 0.4).run(3000) == 1.0
    assert Traffic(upkeep, load=8, params=GREEDY, gain=lambda: 0.2).run(3000) == 1.0


def test_loads_that_are_near_each_other_count_as_one() -> None:
    upkeep = Upkeep((DRAFTER,), SLOTS)
    for load in (3, 4, 5, 6, 8, 11):
        upkeep.choose(request(), 0, load)
    assert len(upkeep.records) == 2


def given_up(load: int = 4) -> Upkeep:
    traffic = Traffic(load=load)
    traffic.run(int(2 * ENOUGH))
    while traffic.admitted[-1]:
        traffic.run(1)
    return traffic.upkeep


def test_who_names_its_drafter_keeps_it_and_who_forbids_it_is_no_matter() -> None:
    upkeep = given_up()
    for method, drafters in ((NAME, (NAME,)), ("off", ()), ("ngram", ())):
        new = request(method=method, drafters=drafters)
        upkeep.choose(new, 0, 4)
        assert new.drafters == set(drafters) and not new.declined
    # They do not keep drafters from showing what they gain for others, either.
    others = [request(method="off", drafters=()) for _ in range(3)]
    upkeep, own = Upkeep((DRAFTER,), SLOTS), request()
    upkeep.choose(own, 3, 4)
    for _ in range(int(4 * ENOUGH)):
        launch(upkeep, [own, *others], PLAIN, 0.01)
    assert record(upkeep).told and not record(upkeep).pays


def test_a_request_that_comes_again_is_chosen_for_anew() -> None:
    upkeep = given_up()
    again = request()
    upkeep.choose(again, 0, 4)
    assert again.declined == {NAME} and not again.allows(NAME) and again.allows("ngram")
    upkeep.choose(again, 0, 1)
    assert again.drafters == {NAME} and not again.declined and again.allows(NAME)


def test_few_rounds_tell_nothing() -> None:
    upkeep, own = Upkeep((DRAFTER,), SLOTS), request()
    upkeep.choose(own, 0, 4)
    for rounds in range(int(ENOUGH) + 1):
        new = request()
        upkeep.choose(new, 0, 4)
        assert bool(new.drafters) == (rounds < ENOUGH)
        launch(upkeep, [own], PLAIN, 0.01)


def test_trials_and_prompts_are_no_gain_and_no_loss() -> None:
    """Nor are the gains of others than drafters; but what keeping up takes is a loss: with prompts,
    and with all rows that nobody drafts behind."""
    trial = Trial(False, (DRAFTER,), ())
    for decision, prompt_rows, gained in (
        (drafting(0.5), 0, 0.5),
        (drafting(0.5, trial=trial), 0, 0.0),
        (Decision(2, (DRAFTER + 1,), 0, expected=Expectation(1, 1, 1, tokens=1.7)), 0, -0.01),
        (Decision(4, (DRAFTER,), 4, expected=Expectation(3.5, 3.5, 1, 2, tokens=2.0)), 7, 0.43),
        (Decision(0, (), 0, expected=Expectation(6, 6, 2, 4)), 7, -0.04),
    ):
        upkeep, own = Upkeep((DRAFTER,), SLOTS), request()
        upkeep.choose(own, 0, 1)
        launch(upkeep, [own], decision, 0.01, prompt_rows)
        expected = decision.expected
        assert record(upkeep).known == pytest.approx(expected.seconds / expected.plain_seconds)
        assert record(upkeep).gained == pytest.approx(gained)


def test_a_look_takes_in_all_that_were_given_up() -> None:
    """Two kinds share every batch: neither could show what it gains alone."""
    upkeep, gain = Upkeep((DRAFTER,), SLOTS), 0.0
    running: deque[Request] = deque()
    share: list[float] = []

    def run(rounds: int) -> float:
        for number in range(rounds):
            if number % 15 == 0:
                if len(running) == 8:
                    running.popleft()
                new = request()
                # Now there are some more of them, and now some less.
                upkeep.choose(new, 0, 8 if number % 2 else 4)
                running.append(new)
            served = sum(bool(each.drafters) for each in running) / len(running)
            decision = drafting(gain) if gain and served == 1.0 else PLAIN
            launch(upkeep, running, decision, 0.005)
            share.append(served)
        return sum(share[-rounds:]) / rounds

    run(3000)
    assert 0.0 < run(60_000) < 0.1
    gain = 0.5
    run(int(64 * 4 * ENOUGH))
    assert run(3000) == 1.0


def test_a_look_begins_for_all_at_once() -> None:
    upkeep = Upkeep((DRAFTER,), SLOTS)
    rested = upkeep.records[4, KIND] = Record(4, served=100.0, without=801.0, given_up=True)
    other = upkeep.records[8, KIND] = Record(8, served=100.0, without=1.0, given_up=True)
    rested.patience = other.patience = 8
    new = request()
    upkeep.choose(new, 0, 8)
    assert new.declined and other.given_up
    upkeep.choose(new, 0, 4)
    assert new.drafters and not rested.given_up and not other.given_up
    upkeep.choose(new, 0, 8)
    assert new.drafters


def test_rounds_that_many_are_not_served_in_do_not_tell() -> None:
    """But where that lasts, it is no reason to be served for ever."""
    upkeep, own, other = Upkeep((DRAFTER,), SLOTS), request(), request()
    upkeep.records[1, KIND] = Record(1, served=100.0, given_up=True)
    upkeep.choose(other, 0, 1)
    upkeep.choose(own, 1, 4)
    assert own.drafters and other.declined
    rounds = 0
    while own.drafters:
        launch(upkeep, [own, other], drafting(0.5), 0.01)
        rounds += 1
        upkeep.choose(own, 1, 4)
        assert rounds < 10 * ENOUGH
    crowd = upkeep.records[4, KIND]
    assert crowd.known == 0.0 and crowd.served == pytest.approx(2 * ENOUGH, abs=2.0)
    assert rounds * 1.5 / 2 == pytest.approx(crowd.served)


def test_the_kind_is_that_of_the_rounds_that_a_request_joins() -> None:
    upkeep, own = Upkeep((DRAFTER,), SLOTS), request()
    for running, kind, there in ((1, DRAWN_KIND, 1), (0, DRAWN_KIND, 2), (1, KIND, 2)):
        launch(upkeep, [own], PLAIN, 0.01, kind=kind)
        upkeep.choose(own, running, 4)
        assert len(upkeep.records) == there
    assert set(upkeep.records) == {(4, DRAWN_KIND), (4, KIND)}


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 3, 4, 7, 16]), st.integers(2, 300), st.booleans(),
            st.sampled_from([0.0, 0.02, 0.5]), st.integers(1, 1000),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_whatever_comes_served_time_is_paid_for(phases: list[tuple]) -> None:
    """No request has drafters declined that its choice does not allow, and nobody lacks them
    without hundreds of rounds that say so."""
    upkeep = Upkeep((DRAFTER,), SLOTS)
    for load, length, drawn, gain, rounds in phases:
        params = DRAWN if drawn else GREEDY
        traffic = Traffic(upkeep, lambda gain=gain: gain, 0.02, load, length, params)
        traffic.run(rounds)
        for each in traffic.running:
            assert each.drafters | each.declined == {NAME}
            assert not (each.drafters and each.declined)
    for each in upkeep.records.values():
        assert 0.0 <= each.known <= each.served + 1e-6 <= 4 * each.enough + 3.0
        assert each.patience in (4, 8, 16, 32, 64) and each.without >= 0.0
        assert not each.given_up or each.patience > 4
