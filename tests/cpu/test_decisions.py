"""Single decisions of the planner, on costs that are given: what is tried, what that is charged,
and which chances count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from surefoot.speculation.accounts import Accounts
from surefoot.speculation.decisions import (
    NOTHING,
    Action,
    Decision,
    Expectation,
    Landed,
    Promise,
    Situation,
)
from surefoot.speculation.exploring import Budget, Trial, rounds_apart
from surefoot.speculation.goodput import best_drafts
from surefoot.speculation.holding import DecidedAnew, Held
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.planner import Planner
from surefoot.speculation.size import ADJUSTED, DRAWN, GREEDY
from surefoot.speculation.weighing import Weighing

LOOK: Action = ((0,), 0)
DRAFT: Action = ((1,), 2)
WIDTH = 3
NEVER = [0.0] * WIDTH


class GivenCosts:
    """A round without drafts and proposers takes a second."""

    noise = 0.01

    def __init__(self, actions: Sequence[Action], draft: float, proposing: float = 0.0) -> None:
        """``draft`` and ``proposing``: seconds for each draft, and where somebody proposes."""
        self.all_actions = (NOTHING, *actions)
        self.draft = draft
        self.proposing = proposing
        self.prompt = 0.0
        """Seconds for each row of prompts."""
        self.seen: list[tuple[int, int, float]] = []
        """Drafts, rows of prompts and seconds of the rounds that were to be learnt from."""
        self.passed, self.little = 0, False
        """Those that were not, and whether the others told little."""

    def actions(self, requests: int) -> Sequence[Action]:
        return self.all_actions

    def with_prompts(self, requests: int, action: Action) -> Action:
        return action

    def with_drafts(self, requests: int, action: Action) -> Action:
        return action

    def table(
        self, requests: int, prompt_rows: int, action: Action, most: int, context: float
    ) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.arange(most + 1)
        base = 1.0 + bool(action[0]) * self.proposing + self.prompt * prompt_rows
        return drafts, base + self.draft * drafts

    def observe(
        self,
        requests: int,
        prompt_rows: int,
        action: Action,
        drafts: int,
        context: float,
        seconds: float,
    ) -> bool:
        """They stay as they are."""
        self.seen.append((drafts, prompt_rows, seconds))
        return self.little

    def pass_over(self) -> None:
        self.passed += 1


def situation(*chances: list[float], **changes: Any) -> Situation:
    values: dict[str, Any] = {
        "requests": len(chances),
        "prompt_rows": 0,
        "chances": np.array(chances, dtype=np.float32),
        "whose": np.zeros(len(chances), dtype=np.int64),
        "proposers": (0, 1),
        "draft_limit": WIDTH,
        "context": 100.0,
    }
    return Situation(**(values | changes))


def planner_of(costs: GivenCosts) -> Planner:
    return Planner(costs, HostCosts(), WIDTH, drafters={1: WIDTH})


def waiting_planner(
    costs: GivenCosts, requests: int, host: float = 2.0, overlap: bool = True, **options: Any
) -> Planner:
    """One that knows that rounds of so many requests take the host so many seconds."""
    counts = (0, requests)
    samples = [HostSample(requests, n, 0, host, n > 0, decided=n > 0) for n in counts] * 20
    return Planner(costs, HostCosts(samples), WIDTH, overlap=overlap, **options)


def play(planner: Planner, now: Situation, rounds: int) -> list[Decision]:
    """Rounds that take what was believed, and accept nothing."""
    decisions = []
    for _ in range(rounds):
        decision = planner.decide(now)
        decisions.append(decision)
        seconds = decision.expected.seconds
        planner.landed(decision, now, Landed(seconds, None, decision.drafts, 0, now.requests))
    return decisions


def weighed_by(planner: Planner) -> list[int]:
    """Grows when actions are weighed."""
    weigh, found = planner.weighing.weigh, list[int]()

    def counted(now: Situation, *rest: Any) -> None:
        found.append(now.requests)
        weigh(now, *rest)

    planner.weighing.weigh = counted  # type: ignore[method-assign]
    return found


def test_one_requests_drafts_follow_its_offers_while_who_proposes_holds() -> None:
    """As many are verified as in a decision made anew, which four of five are not."""
    rng, costs = np.random.default_rng(3), GivenCosts([LOOK], 0.2)
    planner = Planner(costs, HostCosts(), WIDTH, overlap=False)
    weighed, followed = weighed_by(planner), 0
    for _ in range(400):
        row = np.cumprod(rng.random(WIDTH) ** 0.3) * (rng.random() < 0.8)
        now = situation(row.astype(np.float32).tolist(), proposers=(0,))
        follows = planner.held.follows and planner.held.left > 0
        before = len(weighed)
        [decision] = play(planner, now, 1)
        assert (len(weighed) == before) == follows
        if follows:
            drafts, seconds = planner.weighing.table(now, LOOK, WIDTH)
            offers = np.array([row], dtype=np.float32)
            at = best_drafts(offers, drafts, seconds, margin=planner.weighing.margin).at
            assert decision.action == LOOK and not decision.explores
            assert decision.drafts == min(int(drafts[at]), np.count_nonzero(row))
            assert decision.expected.seconds == pytest.approx(seconds[at], rel=1e-3)
            assert planner.needs_offers(decision), "the next one looks at them, too"
            followed += 1
    assert 180 < followed < 321, "the rest are decisions and trials"


@pytest.mark.parametrize("change", ["prompt", "company", "another", "limit", "overlap"])
def test_it_is_decided_anew_when_anything_else_has_changed(change: str) -> None:
    overlap = change == "overlap"
    planner = Planner(GivenCosts([LOOK], 0.01), HostCosts(), WIDTH, overlap=overlap)
    slots = np.zeros(1, dtype=np.int64)
    now = situation([0.9, 0.8, 0.7], proposers=(0,), slots=slots)
    for _ in range(60):
        play(planner, now, 1)
        if planner.held.follows and planner.held.left == 3:
            break
    assert planner.held.follows != overlap, "with rounds in flight nobody knows the offers yet"
    if overlap:
        return
    weighed = weighed_by(planner)
    after = now
    if change == "prompt":
        after = replace(now, prompt_rows=5, prompts=1)
    elif change == "company":
        after = situation(*[[0.9, 0.8, 0.7]] * 2, proposers=(0,))
    elif change == "another":
        planner.admit(slots, np.array([50]))
    else:
        after = replace(now, draft_limit=2)
    play(planner, after, 1)
    assert weighed == [after.requests]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("requests", [1, 16])
def test_rounds_ahead_have_rows_for_what_one_request_usually_has_on_offer(
    overlap: bool, requests: int
) -> None:
    """It has something in every other report. With rounds in flight that is not what the next one
    finds; a crowd's reports tell how much it has, and without rounds in flight all is known."""
    planner = Planner(GivenCosts([LOOK], 0.01), HostCosts(), WIDTH, overlap=overlap)
    given = [situation(*[row] * requests, proposers=(0,)) for row in ([0.9, 0.8, 0.7], [0.0] * 3)]
    verifies: dict[int, list[bool]] = {0: [], 1: []}
    for number in range(200):
        now = given[number % 2]
        (decision,) = play(planner, now, 1)
        if decision.action == LOOK and decision.expected.trial is None and number > 100:
            verifies[number % 2].append(decision.drafts > 0)
    assert verifies[0] and verifies[1] and all(verifies[0])
    assert all(verifies[1]) if overlap and requests == 1 else not any(verifies[1])


def test_offers_are_asked_for_where_a_decision_is_to_be_made_or_something_was_tried() -> None:
    planner = waiting_planner(GivenCosts([LOOK], 0.0), 48)
    now = situation(*[[0.9, 0.8, 0.7]] * 48, proposers=(0,))
    trials, held = list[Decision](), 0
    for _ in range(400):
        (decision,) = play(planner, now, 1)
        if decision.expected.trial is not None:
            trials.append(decision)
            continue
        assert planner.needs_offers(decision) == (not planner.held.left)
        held += planner.held.left > 0
        # A trial's round is read when others have been launched behind it.
        assert all(planner.needs_offers(trial) for trial in trials)
    assert len(trials) > 2 and held > 50


def watch_payments(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Trial, float]]:
    paid: list[tuple[Trial, float]] = []
    pay = planner.budget.pay

    def watch(trial: Trial, lost: float, believed: float) -> None:
        paid.append((trial, lost))
        pay(trial, lost, believed)

    monkeypatch.setattr(planner.budget, "pay", watch)
    return paid


def test_a_trial_verifies_what_fairness_forbids() -> None:
    """Its neighbour's pace allows one draft; a trial verifies more, and only a trial does."""
    planner = planner_of(GivenCosts([LOOK], 0.03))
    decisions = play(planner, situation([0.99, 0.98, 0.97], NEVER), 400)
    usual = [d.drafts for d in decisions[20:] if not d.explores]
    tried = [d.drafts for d in decisions if d.explores and d.expected.trial == trial_of(LOOK)]
    assert max(usual) == 1
    assert tried and min(tried) > 1


def trial_of(action: Action) -> Trial:
    """To verify more of what ``action``'s proposers offer."""
    return Trial(True, action[0], action[0])


def test_what_a_trial_lost_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """More drafts cost all the time that they take; other proposers what the usual ones would have
    brought in theirs."""
    planner = planner_of(GivenCosts([LOOK], 0.03, proposing=0.02))
    paid = watch_payments(planner, monkeypatch)
    decisions = play(planner, situation([0.99, 0.98, 0.97], NEVER), 600)
    more = [lost for trial, lost in paid if trial.verify]
    taken = [d.drafts for d in decisions if d.expected.trial == trial_of(LOOK) and d.explores]
    assert len(more) == len(taken) > 1
    # Beyond the one that is fair.
    assert more == pytest.approx([0.03 * (drafts - 1) for drafts in taken], abs=0.002)
    none = [lost for trial, lost in paid if trial == Trial(False, (), (0,))]
    # Nothing was accepted in any round, so that one without drafts gains their time.
    assert none and min(none) < 0 and max(map(abs, none)) < 0.06


def test_a_trial_of_other_proposers_takes_two_rounds() -> None:
    """In the second there is something to verify."""
    planner = planner_of(GivenCosts([LOOK], 5.0))
    decisions = play(planner, situation(NEVER, NEVER), 300)
    explored = [at for at, each in enumerate(decisions) if each.explores and each.action == LOOK]
    pairs = [at for at in explored if at + 1 in explored]
    assert pairs and not any(at + 2 in explored for at in pairs)


def test_credit_is_saved_up_and_owed_within_bounds() -> None:
    budget, trial = Budget(), Trial(True, (0,), (0,))
    budget.earn([trial], 1e9)
    # One plain round is saved at most: a trial that costs two leaves it without credit ...
    budget.pay(trial, 2.0)
    assert all(budget.next([trial]) is None for _ in range(20))
    # ... and one more may be owed, whatever it lost.
    budget.pay(trial, 1e9)
    budget.earn([trial], 1.01 / 0.005)
    assert budget.next([trial]) == trial
    # What was gained is bounded like what was saved.
    budget.pay(trial, -1e9)
    budget.pay(trial, 1.01)
    assert all(budget.next([trial]) is None for _ in range(20))


def test_what_is_known_to_be_dear_is_tried_as_rarely() -> None:
    """Ten plain rounds for two in which somebody else proposes: half a percent of the time, as
    there is nothing else to try, and what may be spent and owed at first."""
    planner = planner_of(GivenCosts([LOOK], 0.0, proposing=5.0))
    decisions = play(planner, situation(NEVER, NEVER), 6000)
    tried = sum(each.explores and each.action == LOOK for each in decisions)
    assert 2 <= tried <= 8


def test_who_has_saved_all_it_may_leaves_its_part_to_others() -> None:
    budget, rich, poor = Budget(), Trial(True, (), ()), Trial(False, (0,), ())
    budget.earn([rich], 1e9)
    budget.pay(poor, 0.5 + 0.8)
    assert budget.next([poor]) is None
    budget.earn([rich, poor], 0.79 / 0.005)
    assert budget.next([poor]) is None
    budget.earn([rich, poor], 0.02 / 0.005)
    assert budget.next([poor]) == poor
    # While both are in need, each has half.
    budget.pay(poor, 0.5)
    budget.pay(rich, 1.5)
    budget.earn([rich, poor], 0.9 / 0.005)
    assert budget.next([poor, rich], 99) is None


def test_what_is_usual_is_known_at_once_and_for_as_many_requests() -> None:
    """Rounds with drafts gain half a token in the time of one and a half: a trial that does the
    same loses nothing, after the first of them as after many, and after a crowd has left."""
    budget, trial = Budget(), Trial(False, (1,), (0,))
    accounts = Accounts(budget)
    paid: list[float] = []
    budget.pay = lambda trial, lost, believed: paid.append(lost)  # type: ignore[method-assign]
    for requests, accepted, took in ((4, 2, 1.5), (32, 64, 2.0)):
        now = replace(situation(NEVER), requests=requests)
        landed = Landed(took, None, requests, accepted, requests)
        for tries in (None, trial, None, trial):
            expected = Expectation(took, took, 1.0, 0.0, tries, (trial,), 1 + accepted / requests)
            accounts.landed(Decision(requests, *LOOK, False, expected), now, landed, took, 0.01)
    assert paid == pytest.approx([0.0] * 4)


def test_what_is_usual_is_not_taken_from_rounds_with_prompts() -> None:
    """Their time is that of prompts, a multiple of what is asked for, and noisy. A dear trial does
    not seem to gain something behind them, nor beside them."""
    budget, trial = Budget(), Trial(False, (1,), (0,))
    accounts = Accounts(budget)
    paid: list[float] = []
    budget.pay = lambda trial, lost, believed: paid.append(lost)  # type: ignore[method-assign]
    # Plain rounds of 1 s, drafts that take half of one more and gain 0.5. Beside prompts of 20 s
    # they seem to take 3 more, and what is measured is something else again.
    rounds = [(None, 20.0, 26.0), (None, 20.0, 17.0), (trial, 20.0, 25.0)]
    rounds += [(None, 0.0, 1.5), (None, 20.0, 26.0), (trial, 0.0, 4.5), (trial, 20.0, 17.0)]
    for tried, prompts, took in rounds:
        usual = 4.0 if prompts else 1.5
        believed = prompts + (usual if tried is None else 4.5)
        expected = Expectation(believed, prompts + usual, 1.0, prompts, tried, (trial,), 1.5)
        now = replace(situation(NEVER), requests=8, prompt_rows=int(prompts))
        landed = Landed(took, None, 8, 4, 8)
        accounts.landed(Decision(8, *LOOK, False, expected), now, landed, took, 0.01)
    # The first has nothing else to go by.
    assert paid == pytest.approx([0.5, 3.0, 3.0])


def test_while_nobody_may_be_slowed_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found, nobody proposes; afterwards all rounds since then count."""
    planner = planner_of(GivenCosts([LOOK], 0.1))
    slots = np.arange(8)
    planner.admit(slots, np.full(8, 256))
    now = situation(*[NEVER] * 8, slots=slots)
    play(planner, now, 20)
    weighed: list[int] = []
    weigh = planner.weighing.weigh

    def watch(now: Situation, actions: Any, plain: float, rounds: int, least: Any) -> None:
        weighed.append(rounds)
        weigh(now, actions, plain, rounds, least)

    monkeypatch.setattr(planner.weighing, "weigh", watch)
    restraint = planner.fairness.restraint
    monkeypatch.setattr(restraint, "passed", lambda *args: None)
    planner.fairness.restrain(slots, 0.0)
    planner.restrained.action = NOTHING
    waiting = play(planner, now, 40)
    assert not weighed and all(d.action == NOTHING or d.explores for d in waiting)
    restraint.holds = False
    play(planner, now, 20)
    assert weighed[0] > 20
    # Where somebody else may propose, who is best is a question.
    planner.fairness.restrain(slots, 0.0)
    planner.restrained.action = LOOK
    weighed.clear()
    play(planner, now, 40)
    assert weighed


@pytest.mark.parametrize(
    ("gained", "least", "pace", "action"),
    [
        # The best gains 0.185 a second, and costs who gains least 0.03, 0.21 or 0.07 tokens, where
        # a plain round gives it 0.05 (or 0.0125): it may go on for 0.61, 0.19 or 0.15 of the time.
        *((0.10, 0.4, 0.95, NOTHING), (0.12, 0.4, 0.95, LOOK), (0.03, 0.0, 0.95, NOTHING)),
        *((0.04, 0.0, 0.95, LOOK), (0.02, 0.4, 0.9875, NOTHING), (0.03, 0.4, 0.9875, LOOK)),
        # To who gains least it is fair by itself.
        (0.17, 0.9, 0.95, NOTHING),
    ],
)
def test_plain_rounds_are_taken_if_the_best_action_goes_on_sooner_for_them(
    gained: float, least: float, pace: float, action: Action
) -> None:
    """Seen on a GPU: while fairness forbade more, 512 texts looked up, for 0.03 tokens a round and
    5 % of its time. With plain rounds instead they drafted for twice as long, and the last text
    ended 2 % sooner."""
    weighing = planner_of(GivenCosts([LOOK, DRAFT], 0.1, 0.04)).weighing
    weighing.best, weighing._least = DRAFT, lambda proposers: least
    weighing._promises = {DRAFT: Promise(1.6, 1.35), LOOK: Promise(1.04 * (1 + gained), 1.04)}
    actions, now = (NOTHING, LOOK, DRAFT), situation(*[NEVER] * 8)
    # The drafter is not fair to who gains nothing, however much it promises.
    weighing.seconds = lambda _, a: 1.35 if a == DRAFT else 1.04  # type: ignore[method-assign]
    assert weighing.harmless(now, actions, 1.0, weighing.worth_of_waiting(pace)) == action


@pytest.mark.parametrize(("chance", "goes_on"), [(0.3, True), (0.03, False)])
def test_what_finds_little_makes_way_for_plain_rounds(chance: float, goes_on: bool) -> None:
    """It promised more than it is worth to wait for what is best; where nobody may be slowed there
    is nothing for it to verify."""
    planner, slots = planner_of(GivenCosts([LOOK], 0.001, 0.04)), np.arange(8)
    planner.admit(slots, np.full(8, 256))
    now = situation(*[[chance, 0.0, 0.0]] * 8, slots=slots, proposers=(0,))
    planner.weighing.best = LOOK
    restraint = planner.fairness.restraint
    restraint.passed = lambda *args: None  # type: ignore[method-assign]
    planner.fairness.restrain(slots, 0.0)
    planner.restrained.action, planner.restrained.waiting = LOOK, 0.05
    decisions = [each for each in play(planner, now, 60) if not each.explores]
    assert decisions[0].action == LOOK
    late = {each.action for each in decisions[10:]}
    assert late == {LOOK if goes_on else NOTHING}


@pytest.mark.parametrize(
    ("requests", "restrained", "late", "rounds"),
    [
        *((1, False, False, 6), (1, True, False, 12), (1, False, True, 6), (2, True, False, 12)),
        *((4, False, False, 12), (8, False, False, 24), (512, True, False, 24)),
        *((4, False, True, 12), (8, False, True, 128), (128, True, True, 128)),
    ],
)
def test_trials_take_turns(requests: int, restrained: bool, late: bool, rounds: int) -> None:
    """What was tried longest ago is next, some rounds after any other of its kind; more while
    nobody may be slowed, in crowds, and where rounds wait for the host."""
    trials = [Trial(False, (index,), ()) for index in range(3)]
    budget, apart = Budget(), rounds_apart(requests, restrained, late)
    asked = (budget.next(trials, apart=apart) for _ in range(900))
    tried = [(at, trial) for at, trial in enumerate(asked) if trial]
    assert [trial for _, trial in tried[:6]] == [*trials, *trials]
    assert {later - earlier for (earlier, _), (later, _) in pairwise(tried)} == {rounds}


def test_while_a_crowd_leaves_actions_are_weighed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under any other load all at once."""
    actions = [LOOK, *(((1,), depth) for depth in (1, 2, 3))]
    planner = planner_of(GivenCosts(actions, 0.1))
    weighing, weighed = planner.weighing, list[Action]()

    def promise(now: Situation, action: Action, plain: float, lately: bool = True) -> Promise:
        weighed.append(action)
        return Promise(2.0 if action == ((1,), 2) else 1.0, 1.0)

    monkeypatch.setattr(weighing, "promise", promise)
    for requests, at_once in ((8, True), (4, False), (1, True), (8, True), (5, False)):
        crowd = situation(*[NEVER] * requests, proposers=(0, 1))
        there = weighing.allowed(crowd)
        weighing.best = NOTHING
        rounds = []
        for _ in range(5):
            weighed.clear()
            weighing.weigh(crowd, there, 1.0, rounds=0)
            rounds.append(tuple(weighed))
        assert rounds == ([(*there,), *[()] * 4] if at_once else [(action,) for action in there])
        assert weighing.best == ((1,), 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_whoever_arrives_does_not_wait_until_actions_are_weighed(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is idle then, and works on the first prompts during the next decisions. Until all
    are weighed no decision holds. Where the host's time adds to the device's, nothing is gained."""
    actions = [LOOK, *(((1,), depth) for depth in (1, 2, 3))]
    costs = GivenCosts(actions, 0.1)
    planner = waiting_planner(costs, 20, overlap=overlap)
    weighing, weighed = planner.weighing, list[Action]()

    def promise(now: Situation, action: Action, plain: float, lately: bool = True) -> Promise:
        weighed.append(action)
        return Promise(2.0 if action == ((1,), 2) else 1.0, 1.0)

    monkeypatch.setattr(weighing, "promise", promise)
    monkeypatch.setattr(planner.budget, "next", lambda *args: None)
    crowd = situation(*[NEVER] * 20, proposers=(0, 1), prompt_rows=50, prompts=20)
    planner.decide(crowd)
    assert weighed == [] if overlap else set(weighed) == {*actions, NOTHING}
    assert weighing.best == (NOTHING if overlap else ((1,), 2))
    assert planner.held.left == 0 or not overlap
    later = replace(crowd, prompt_rows=0, prompts=0)
    planner.decide(later)
    if overlap:
        assert len(weighed) == 4 and weighing.best == NOTHING and planner.held.left == 0
        planner.decide(later)
    assert set(weighed) >= {*actions, NOTHING} and weighing.best == ((1,), 2)


def test_nothing_is_tried_while_it_is_not_known_what_is_best() -> None:
    """A trial in a crowd's first round would make all of it wait."""
    planner = waiting_planner(GivenCosts([LOOK, *(((1,), depth) for depth in (1, 2, 3))], 0.1), 20)
    crowd = situation(*[NEVER] * 20, proposers=(0, 1), prompt_rows=50, prompts=20)
    later = replace(crowd, prompt_rows=0, prompts=0)
    tried = []
    for now in [crowd] + [later] * 80:
        (decision,) = play(planner, now, 1)
        tried.append(decision.explores)
        assert not (decision.explores and planner.weighing.undecided)
    # All of the six actions are weighed in the second and the third.
    assert not any(tried[:2]) and any(tried)


def test_rounds_of_prompts_alone_leave_what_is_best_for_their_requests() -> None:
    """And propose nothing themselves."""
    planner = planner_of(GivenCosts([LOOK, DRAFT], 0.01))
    now = situation([0.9, 0.8, 0.7], proposers=(0, 1))
    play(planner, now, 60)
    best = planner.weighing.best
    assert best != NOTHING
    alone = replace(now, requests=0, prompt_rows=64, prompts=1, chances=None, whose=None)
    assert all(decision.action == NOTHING for decision in play(planner, alone, 3))
    assert planner.weighing.best == best
    (next_one,) = play(planner, now, 1)
    assert next_one.action == best or next_one.explores


@pytest.mark.parametrize("more", range(5))
@pytest.mark.parametrize("requests", [1, 2])
def test_another_request_alone_is_not_expected_to_go_on_as_the_one_before(
    requests: int, more: int
) -> None:
    """Drafts of most were likely, of the last they were not: the next one's are as most were. Of
    several, who enters is not all that there is."""
    planner = planner_of(GivenCosts([DRAFT], 0.05, proposing=0.2))
    likely, unlikely = (
        situation(
            *[row] * requests,
            proposers=(1,),
            slots=np.arange(requests),
            whose=np.ones(requests, dtype=np.int64),
        )
        for row in ([0.9, 0.85, 0.0], [0.05, 0.01, 0.0])
    )
    play(planner, likely, 500)
    # Otherwise it is looked only every five rounds whether another action is better.
    play(planner, unlikely, 60 + more)
    assert planner.weighing.best == NOTHING
    planner.admit(np.array([0]), np.array([100]))
    nothing = replace(unlikely, chances=None, whose=None)
    play(planner, nothing, 2)
    assert planner.weighing.best == (DRAFT if requests == 1 else NOTHING)
    # Once, not whenever there is one; nor while it is somebody else who begins.
    play(planner, unlikely, 60 + more)
    planner.admit(np.array([7]), np.array([100]))
    play(planner, nothing, 2)
    assert planner.weighing.best == NOTHING


def test_rounds_between_two_questions_count() -> None:
    trials, budget = [Trial(False, (index,), ()) for index in range(3)], Budget()
    asked = [budget.next(trials, 3) for _ in range(6)]
    assert asked == [trials[0], None, trials[1], None, trials[2], None]


def outcome(seconds: float = 1.0) -> Landed:
    return Landed(seconds, None, 0, 0, 0)


def test_chances_of_another_proposer_are_stale() -> None:
    """The report is that of a round in which another one proposed, two rounds ago: what the one
    that proposed since has on offer is expected to be as usual."""
    planner = planner_of(GivenCosts([DRAFT], 0.01))
    nothing = situation(NEVER, NEVER, chances=None, whose=None)
    assert any(planner.decide(nothing).action == DRAFT for _ in range(5))
    planner.landed(Decision(0, *LOOK), nothing, outcome())
    decision = planner.decide(situation(NEVER, NEVER))
    assert decision.drafts == 4


def test_a_report_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions without news learn nothing from old ones."""
    planner, now, read = planner_of(GivenCosts([LOOK], 0.01)), situation(NEVER, NEVER), []
    monkeypatch.setattr(planner.offers, "record", lambda *offers: read.append(offers))
    for landings in (1, 2):
        planner.landed(Decision(0, *LOOK), now, outcome())
        planner.decide(now)
        planner.decide(now)
        assert len(read) == landings


def test_kinds_of_sampling_have_costs_of_their_own() -> None:
    """Drafts are cheap where the likeliest tokens are taken, dear where they are drawn."""
    cheap, dear = GivenCosts([LOOK], 0.01), GivenCosts([LOOK], 2.0)
    planner = Planner(cheap, HostCosts(), WIDTH, others={DRAWN: dear})
    sure = [0.9, 0.8, 0.7]
    for kind, drafts in ((GREEDY, 3), (DRAWN, 0), (GREEDY, 3), (ADJUSTED, 3)):
        now = situation(sure, kind=kind, proposers=(0,))
        for costs in (cheap, dear):
            costs.seen.clear()
        for _ in range(30):
            decision = planner.decide(now)
            planner.landed(decision, now, Landed(1.25, None, 0, 0, 1))
        told = {(costs is dear, seen[2]) for costs in (cheap, dear) for seen in costs.seen}
        assert told == {(kind == DRAWN, 1.25)}
        late = Counter(planner.decide(now).drafts for _ in range(10))
        assert late.most_common(1)[0][0] == drafts


@pytest.mark.parametrize(
    ("best", "requests", "host", "overlap", "every"),
    [
        (LOOK, 1, 2.0, True, 1), (LOOK, 7, 2.0, True, 4), (LOOK, 15, 2.0, True, 4),
        (LOOK, 48, 2.0, True, 8), (LOOK, 48, 0.1, True, 1), (LOOK, 48, 0.1, False, 1),
        (NOTHING, 7, 2.0, True, 16), (NOTHING, 15, 2.0, True, 16), (NOTHING, 48, 0.1, True, 1),
        (NOTHING, 48, 0.25, True, 1), (NOTHING, 8, 0.4, True, 16), (LOOK, 48, 0.4, True, 8),
        (LOOK, 48, 0.25, True, 1), (LOOK, 7, 0.7, True, 1), (NOTHING, 7, 0.7, True, 1),
        (NOTHING, 48, 0.1, False, 16), (NOTHING, 7, 0.1, False, 16), (NOTHING, 1, 0.1, False, 16),
    ],
)  # fmt: skip
def test_where_rounds_wait_for_the_host_a_decision_for_many_holds(
    best: Action,
    requests: int,
    host: float,
    overlap: bool,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = GivenCosts([LOOK], 0.0)
    costs.prompt = 0.05
    planner = waiting_planner(costs, requests, host, overlap)
    weighed: list[Situation] = []

    def weigh(now: Situation, *args: Any) -> None:
        weighed.append(now)
        planner.weighing.best = best

    monkeypatch.setattr(planner.weighing, "weigh", weigh)
    monkeypatch.setattr(planner.budget, "next", lambda *asked: None)
    row = NEVER if best == NOTHING else [0.9, 0.8, 0.7]
    now = situation(*[row] * requests, proposers=(0,))
    for _ in range(4):
        play(planner, now, 1)
    while planner.held.left:
        planner.decide(now)
    weighed.clear()
    for _ in range(48):
        planner.decide(now)
    assert len(weighed) == 48 // every
    # Others come, or want something else: that is another question.
    hosted = np.full((requests, WIDTH), np.nan, dtype=np.float32)
    hosted[0] = 0.9
    prompts = replace(now, prompt_rows=64)
    crowd = situation(*[row] * (requests + 8), proposers=(0,))
    for other in (crowd, replace(now, hosted=hosted)):
        planner.decide(now)
        weighed.clear()
        planner.decide(other)
        assert weighed == [other]
        planner.decide(now)
        while planner.held.left:
            planner.decide(now)
        weighed.clear()
    # It is the same beside prompts, which take their time; that nobody proposes is found out there
    # as well, where such rounds, too, may wait for the host.
    there = best == NOTHING and (requests, host) != (8, 0.4) and requests >= 8
    orders = [(now, prompts, now), *([(prompts, now, prompts)] if there else [])]
    for order in orders if every > 1 else []:
        weighed.clear()
        decided = [planner.decide(each) for each in order[:every]]
        assert len(weighed) == 1
        alone = [each.expected.seconds - each.expected.prompt_seconds for each in decided]
        for each, decision in zip(order, decided, strict=False):
            expected = decision.expected
            assert (decision.action, decision.drafts) == (decided[0].action, decided[0].drafts)
            assert (expected.prompt_seconds > 0.0) == (each is prompts)
            assert expected.without_trial == expected.seconds
        assert alone == pytest.approx([alone[0]] * len(alone))
        while planner.held.left:
            planner.decide(now)
    # Of many one more is the same crowd.
    planner.decide(now)
    weighed.clear()
    planner.decide(situation(*[row] * (requests + 1), proposers=(0,)))
    assert bool(weighed) == (every == 1 or requests < 8)


@pytest.mark.parametrize("requests", [1, 7, 32])
def test_what_leaves_no_choice_holds(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(GivenCosts([LOOK], 0.0), HostCosts(), WIDTH, overlap=True)
    weighed: list[Situation] = []
    monkeypatch.setattr(planner.weighing, "weigh", lambda now, *args: weighed.append(now))
    off = situation(*[NEVER] * requests, proposers=(), chances=None, whose=None)
    for _ in range(4):
        play(planner, off, 1)
    while planner.held.left:
        planner.decide(off)
    weighed.clear()
    assert {planner.decide(off).action for _ in range(48)} == {NOTHING}
    assert len(weighed) == 3
    # Somebody comes who allows drafts: then there is one.
    planner.decide(situation(*[NEVER] * requests, proposers=(0,)))
    assert len(weighed) == 4


@pytest.mark.parametrize(
    ("requests", "steps", "drafts", "host", "rounds"),
    [
        (1, 3, 3, 2.0, 3), (3, 2, 6, 2.0, 3), (3, 2, 5, 2.0, 3), (3, 2, 5, 0.5, 0),
        (1, 3, 2, 2.0, 0),
        (1, 0, 3, 2.0, 0), (1, 3, 3, 0.5, 0), (1, 3, 0, 2.0, 0), (16, 3, 40, 2.0, 4),
        (8, 3, 24, 2.0, 2), (48, 3, 40, 2.0, 7),
    ],
)  # fmt: skip
def test_where_rounds_wait_for_the_host_a_decision_holds_the_longer_the_more_requests_there_are(
    requests: int, steps: int, drafts: int, host: float, rounds: int
) -> None:
    """For one, if all that drafters can offer is verified: what n-grams offer is now long and now
    nothing."""
    now, held = situation(*[[0.9, 0.8, 0.7]] * requests), Held()
    expected = Expectation(1.0, 1.0, 1.0, 0.0, None, (), 1.5)
    decision = Decision(drafts, (1,) if steps else (0,), steps, False, expected)
    held.end(now)
    held.grant(now, decision, host, True, True, 99)
    assert held.left == rounds
    # No longer than nobody lacks anything.
    for most in (3, 1, 0):
        held.end(now)
        held.grant(now, decision, host, True, True, most)
        assert held.left == min(rounds, max(0, most - 1))


def test_what_a_few_have_on_offer_is_looked_at_where_it_is_known_in_time() -> None:
    """Where the round before has been read, a decision holds for a few requests only if all that
    drafters can offer is verified."""
    now, held = situation(*[[0.9, 0.8, 0.7]] * 3), Held()
    expected = Expectation(1.0, 1.0, 1.0, 0.0, None, (), 1.5)
    for drafts, overlap, rounds in ((6, False, 3), (5, False, 0), (5, True, 3)):
        held.end(now)
        held.grant(now, Decision(drafts, (1,), 2, False, expected), 2.0, overlap, True, 99)
        assert held.left == rounds


@pytest.mark.parametrize(
    ("requests", "holds"), [(16, True), (18, True), (19, False), (9, True), (8, True), (7, False)]
)
def test_a_decision_outlasts_half_of_a_crowd_that_leaves(requests: int, holds: bool) -> None:
    """Where rounds wait for the host, each of hundreds of texts that end apart would have it decide
    anew."""
    expected, held = Expectation(1.0, 1.0, 1.0, 0.0, None, (), 1.5), Held()
    made_for = situation(*[[0.9, 0.8, 0.7]] * 16)
    held.end(made_for)
    decision = Decision(48, (1,), 3, False, expected)
    held.grant(made_for, decision, 2.0, True, True, 99)
    now = situation(*[[0.9, 0.8, 0.7]] * requests)
    # Rounds of fewer requests may be recorded with other depths.
    assert held.next(now, [NOTHING, ((1,), 7)]) is None
    assert held.next(now, [NOTHING, ((1,), 3)]) == (decision if holds else None)
    assert held.left == 4 - holds


def test_a_decision_that_is_broken_off_held_for_the_rounds_before() -> None:
    expected, held = Expectation(1.0, 1.0, 1.0, 0.0, None, (), 1.0), Held()
    now = situation(*[[0.9, 0.8, 0.7]] * 16)
    held.end(now)
    held.grant(now, Decision(0, (), 0, False, expected), 2.0, True, True, 99)
    for _ in range(2):
        assert held.next(now, [NOTHING]) is not None
    held.break_off()
    assert held.next(now, [NOTHING]) is None
    assert held.end(now) == 3


def test_while_a_crowd_leaves_there_may_be_actions_that_were_never_weighed() -> None:
    """Drafters go to other depths where there are fewer requests, and what was best for all of them
    is no good for these."""
    few, many = (NOTHING, ((1,), 1), ((1,), 2), ((1,), 3)), (NOTHING, ((1,), 2))
    costs = GivenCosts(few, 0.01, 0.3)
    costs.actions = lambda requests: few if requests < 8 else many  # type: ignore[method-assign]
    offers = OfferMemory(WIDTH, {1: WIDTH})
    weighing = Weighing(costs, HostCosts(), offers, True)

    def weigh(requests: int, row: list[float]) -> Action:
        for _ in range(8):
            chances = np.array([row] * 32, dtype=np.float32)
            offers.record(chances, np.ones(32, dtype=np.int64), (1,), WIDTH)
        now = situation(*[NEVER] * requests, proposers=(1,))
        weighing.weigh(now, weighing.allowed(now), 1.0, 5)
        return weighing.best

    assert weigh(16, [0.9, 0.8, 0.7]) == ((1,), 2)
    assert NOTHING in [weigh(4, [1e-3, 1e-4, 1e-5]) for _ in range(8)]
    assert ((1,), 3) in [weigh(4, [0.9, 0.8, 0.7]) for _ in range(24)]


def test_what_an_action_promises_does_not_depend_on_prompts_beside_it() -> None:
    costs = GivenCosts([LOOK], 0.01, 0.1)
    costs.prompt = 0.05
    weighing = Weighing(costs, HostCosts(), OfferMemory(WIDTH), True)
    now = situation(*[[0.9, 0.8, 0.7]] * 4, proposers=(0,))
    beside = replace(now, prompt_rows=64, prompts=1)
    alone, nothing = weighing.plain_seconds(now)
    with_prompts, prompts = weighing.plain_seconds(beside)
    assert nothing == 0.0 and with_prompts == pytest.approx(alone)
    assert prompts == pytest.approx(64 * 0.05)
    assert weighing.promise(beside, LOOK, alone) == weighing.promise(now, LOOK, alone)


def test_promises_are_fair_to_who_usually_gains_least_by_these_proposers() -> None:
    block: Action = ((1,), WIDTH)
    costs, memory = GivenCosts([LOOK, block], 0.02, 0.3), OfferMemory(WIDTH, {1: WIDTH})
    weighing, now = Weighing(costs, HostCosts(), memory, True), situation(*[NEVER] * 4)
    for proposers in ((0,), (1,)):
        chances = np.tile(np.array([0.9, 0.8, 0.7], dtype=np.float32), (4, 1))
        for _ in range(20):
            weighing.offers.record(chances, np.full(4, proposers[0]), proposers, WIDTH)
    weighing.weigh(now, (NOTHING, LOOK, block), 1.0, 1, lambda found: float(found == (1,)))
    looking, drafting = (weighing.promise(now, each, 1.0) for each in (LOOK, block))
    assert drafting.tokens == pytest.approx(1 + 0.9 + 0.8 + 0.7)
    # With three drafts, rounds are a twentieth longer than those that only look.
    assert looking == pytest.approx((1 + 3 * 0.9 / 4, 1.3 + 3 * 0.02))


def test_what_others_offered_beside_prompts_is_there_for_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside prompts all propose, as far as they can, where rounds are recorded. What is best for
    rounds without finds its own offers among these, and holds; what takes others waits for them."""
    every: Action = ((0, 1), 3)
    costs = GivenCosts([LOOK, DRAFT, every], 0.0)
    costs.prompt = 0.05
    costs.with_prompts = lambda requests, action: every  # type: ignore[method-assign]
    planner = Planner(costs, HostCosts(), WIDTH, drafters={1: WIDTH}, overlap=True)
    monkeypatch.setattr(planner.weighing, "host_seconds", lambda *args, **more: 2.0)
    monkeypatch.setattr(planner.budget, "next", lambda *asked: None)
    best = [DRAFT]

    def weigh(*args: Any) -> None:
        planner.weighing.best = best[0]

    monkeypatch.setattr(planner.weighing, "weigh", weigh)
    now = situation(*[[0.9, 0.8, 0.7]] * 32, proposers=(0, 1))
    prompts = replace(now, prompt_rows=64)
    planner.decide(now)
    assert planner.decide(now).action == DRAFT and planner.held.left == 7
    beside = planner.decide(prompts)
    assert beside.action == every and planner.held.left == 6
    assert planner.decide(now).action == DRAFT and planner.held.left == 5
    while planner.held.left:
        planner.decide(now)
    # Made beside prompts: for this round alone.
    assert planner.decide(prompts).action == every and not planner.held.left
    assert planner.decide(now).action == DRAFT and planner.held.left == 7
    while planner.held.left:
        planner.decide(now)
    best[0] = LOOK
    assert planner.decide(now).action == LOOK and not planner.held.left
    assert planner.decide(now).action == LOOK and planner.held.left == 7


def test_rounds_that_told_little_are_learnt_from_now_and_then() -> None:
    """Until one tells much; those with prompts always are."""
    costs = GivenCosts([LOOK], 0.0)
    costs.little = True
    planner = Planner(costs, HostCosts(), WIDTH)
    now = situation([0.9, 0.8, 0.7], proposers=(0,))

    def land(*drafts: int, **changes: Any) -> list[tuple[int, int]]:
        costs.seen.clear()
        for count in drafts:
            decision = Decision(count, *LOOK)
            planner.landed(decision, replace(now, **changes), Landed(1.0, None, 0, 0, 1))
        return [seen[:2] for seen in costs.seen]

    assert land(*[2] * 11) == [(2, 0)] * 3 and costs.passed == 8
    # Others are not like it; when it is its turn again nothing has changed.
    assert land(3, 2, 3, 2) == [(3, 0)] and costs.passed == 11
    assert land(2, 2, prompt_rows=5) == [(2, 5)] * 2
    costs.little = False
    assert land(2, 2, 2) == [(2, 0)], "its turn"
    assert land(3, 3, 3, 2, 2) == [(3, 0)] * 3 + [(2, 0)] * 2, "all of them may have changed"


def test_what_finds_nothing_on_offer_yet_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is left over once nobody proposes any more."""
    requests = 48
    planner = waiting_planner(GivenCosts([LOOK], 0.01), requests)
    monkeypatch.setattr(planner.budget, "next", lambda *asked: None)
    sure = situation(*[[0.9, 0.8, 0.7]] * requests, proposers=(0,))
    for best, later in ((LOOK, True), (NOTHING, False)):

        def weigh(*args: Any, best: Action = best) -> None:
            planner.weighing.best = best

        monkeypatch.setattr(planner.weighing, "weigh", weigh)
        while planner.decide(sure).action != best:
            pass
        decisions = [planner._last, *play(planner, sure, 12)]
        assert [bool(each.drafts) for each in decisions] == [not later] + 12 * [later]
        anew = (0, 8) if later else (0,)
        assert all((a is b) == (at not in anew) for at, (a, b) in enumerate(pairwise(decisions)))


def test_held_decisions_do_not_keep_other_actions_from_being_weighed() -> None:
    costs, offers = GivenCosts([LOOK, DRAFT], 0.01), OfferMemory(WIDTH, {1: WIDTH})
    now = situation(NEVER, NEVER)
    for rounds in (1, 4, 7):
        weighing = Weighing(costs, HostCosts(), offers, True)
        looked: list[Action] = []
        promise = weighing.promise

        def watch(
            s: Situation, action: Action, *args: Any, looked: Any = looked, promise: Any = promise
        ) -> Any:
            looked.append(action)
            return promise(s, action, *args)

        weighing.promise = watch  # type: ignore[method-assign]
        for _ in range(280 // rounds):
            weighing.weigh(now, (NOTHING, LOOK, DRAFT), 1.0, rounds)
        # Of the rounds for which decisions hold, three count: one action is weighed in each.
        times = 2 * 280 / rounds * min(rounds, 3) / 5
        assert times - 3 <= len(looked) <= times + 3
        assert set(looked) == {NOTHING, LOOK, DRAFT}


def simulated(device: float, host: Sequence[float], in_flight: int) -> float:
    """Mean seconds of rounds that take the device ``device`` and the host so long, which launches
    one more for each report that it has read."""
    launched, busy, free = [0.0] * in_flight, 0.0, 0.0
    for at, seconds in enumerate(host):
        busy = max(busy, launched[at]) + device
        free = max(free, busy) + seconds
        launched.append(free)
    return busy / len(host)


@pytest.mark.parametrize("part", [0.3, 0.45, 0.55, 0.8, 0.9, 1.0, 1.1, 1.3, 2.0])
def test_rounds_take_as_long_as_the_device_and_a_host_that_varies_let_them(part: float) -> None:
    """Of 2 ms of the device; three are in flight where the host has less than 1 ms to spare."""
    device, host = 0.002, 0.002 * part
    costs = HostCosts([HostSample(1, 0, 0, host, False)] * 20)
    weighing = Weighing(GivenCosts([], 0.0), costs, OfferMemory(WIDTH), True)
    times = host * (1 + costs.noise * np.random.default_rng(0).normal(size=40_000))
    want = simulated(device, np.maximum(times, 0.0).tolist(), 3 if part > 0.5 else 2)
    expected = weighing.expected(np.array([device]), host, costs.spread(host, 0.0))
    assert expected == pytest.approx([want], rel=0.02)
    apart = Weighing(GivenCosts([], 0.0), costs, OfferMemory(WIDTH), False)
    assert apart.expected(np.full(1, device), host, host) == device + host


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host", [0.3, 0.8, 0.95, 0.9999, 1.0, 1.0001, 1.05, 1.3, 3.0])
def test_one_round_is_expected_to_take_what_a_table_of_them_says(
    host: float, overlap: bool
) -> None:
    """Of a second of the device."""
    costs = HostCosts([HostSample(1, 0, 0, host, False)] * 20)
    weighing = Weighing(GivenCosts([], 0.0), costs, OfferMemory(WIDTH), overlap)
    own = situation([0.5])
    weighing.anew.of = lambda requests: 0.5  # type: ignore[method-assign]
    for action, anew in ((NOTHING, 0.0), (LOOK, 0.5)):
        seconds = weighing.host_seconds(own, action)
        table = weighing.expected(np.array([1.0, 9.0]), seconds, costs.spread(seconds, anew))
        assert weighing.seconds(own, action) == pytest.approx(float(table[0]), rel=1e-12)


@pytest.mark.parametrize("part", [0.95, 0.98, 0.995, 1.1])
def test_with_two_in_flight_rounds_take_the_longer_of_two_times_that_vary(part: float) -> None:
    """100 ms of the device: a third is in flight from 99 on only."""
    host = 0.1 * part
    costs = HostCosts([HostSample(1, 0, 0, host, False)] * 20)
    weighing = Weighing(GivenCosts([], 0.0), costs, OfferMemory(WIDTH), True)
    times = host * (1 + costs.noise * np.random.default_rng(0).normal(size=200_000))
    longer = float(np.maximum(0.1, times).mean())
    found = float(weighing.expected(np.array([0.1]), host, costs.spread(host, 0.0))[0])
    if part < 0.99:
        assert found == pytest.approx(longer, rel=2e-3)
    else:
        assert max(0.1, host) <= found < longer


def test_how_often_is_decided_anew_is_learnt_where_somebody_proposes_and_forgotten_else() -> None:
    anew = DecidedAnew(overlap=True)
    assert [anew.of(requests) for requests in (1, 7, 8, 16, 512)] == [1, 1, 1 / 3, 1 / 5, 1 / 8]
    for _ in range(200):
        anew.passed(512, prompts=False, proposing=True, decided=True)
    assert anew.of(512) > 0.95 and anew.of(128) == 1 / 8
    # Rounds without proposers have no say, whether they are decided anew or not.
    for _ in range(200):
        anew.passed(512, prompts=False, proposing=False, decided=False)
    assert anew.of(512) > 0.8
    for _ in range(10_000):
        anew.passed(512, prompts=False, proposing=False, decided=False)
    assert anew.of(512) == pytest.approx(1 / 8, abs=0.02)
    for at in range(400):
        anew.passed(512, prompts=False, proposing=True, decided=at % 4 == 0)
    assert anew.of(512) == pytest.approx(1 / 4, abs=0.1)
    assert DecidedAnew(overlap=False).of(1) == 1 / 5


def test_rounds_of_nearly_as_many_requests_are_alike_and_others_are_not() -> None:
    """In traffic their number changes in most rounds. One of 512 says nothing of 16, 32, … or 256,
    whose first digits are the same in binary."""
    costs = GivenCosts([], 0.0)
    costs.little, planner = True, Planner(costs, HostCosts(), WIDTH)
    for requests in (512, 510, 511, 505, 512, 509):
        now = replace(situation(), requests=requests, chances=None)
        planner.landed(planner.decide(now), now, Landed(1.0, None, 0, 0, 0))
    # 512 itself is one more digit long.
    assert len(costs.seen) == 2 and costs.passed == 4
    for requests in (256, 128, 64, 32, 16):
        now = replace(situation(), requests=requests, chances=None)
        planner.landed(planner.decide(now), now, Landed(1.0, None, 0, 0, 0))
    assert len(costs.seen) == 7 and costs.passed == 4


def test_what_traffic_decides_is_not_expected_of_a_crowd_that_is_complete() -> None:
    """Beside prompts, which every other round runs, no decision holds. Then nobody comes."""
    anew = DecidedAnew(overlap=True)
    for at in range(400):
        anew.passed(512, prompts=at % 2 > 0, proposing=True, decided=True)
    assert anew.of(512) > 0.95
    for _ in range(60):
        anew.passed(512, prompts=False, proposing=False, decided=False)
    assert anew.of(512) < 0.4
    for _ in range(10):
        anew.passed(512, prompts=True, proposing=False, decided=False)
    assert anew.of(512) > 0.9


def test_decisions_make_the_host_s_time_vary() -> None:
    """Of eight rounds one takes a millisecond longer."""
    costs, chance = HostCosts(), np.random.default_rng(0)
    for at in range(400):
        seconds = (1e-3 + 1e-3 * (at % 8 == 0)) * float(np.exp(chance.normal(0, 0.1)))
        costs.observe(HostSample(64, 64, 0, seconds, True, decided=at % 8 == 0))
    usual = costs.spread(1e-3, 0.0)
    assert usual == pytest.approx(1e-4, rel=0.4)
    assert costs.spread(1e-3, 1 / 8) == pytest.approx(math.hypot(3.3e-4, usual), rel=0.2)
    assert costs.spread(1e-3, 1.0) == usual


def test_what_a_trial_found_is_read_while_nobody_proposes_again() -> None:
    """Behind the trial's two rounds the next decision holds at once; their reports come later."""
    requests = 48
    planner = waiting_planner(GivenCosts([LOOK], 5.0), requests)
    now = situation(*[[0.1, 0.0, 0.0]] * requests, proposers=(0,))
    quiet = replace(now, chances=None, whose=None)
    flights: list[Decision] = []
    tried: list[int] = []
    told = planner.offers.reports
    for round_ in range(400):
        before = flights.pop(0) if len(flights) == 3 else None
        if before is not None:
            planner.landed(before, now, Landed(1.0, None, 0, 0, 0))
        seen = now if before is not None and before.proposers else quiet
        flights.append(planner.decide(seen))
        if flights[-1].explores:
            tried.append(round_)
            assert flights[-1].action == LOOK
        elif tried and round_ == tried[-1] + 1:
            assert planner.held.left and flights[-1].action == NOTHING
    found = planner.offers.reports - told
    assert len(tried) >= 4 and found >= len(tried) - 2


@pytest.mark.parametrize("kinds", [(DRAWN, GREEDY), (GREEDY, DRAWN), (GREEDY, ADJUSTED)])
def test_texts_of_another_kind_are_tried_without_delay(kinds: tuple[Any, Any]) -> None:
    """Seen on a GPU: 512 greedy texts after drawn ones decoded for 130 rounds without drafts, which
    then gained 60 %: trials of crowds that wait for the host are as far apart."""
    requests, costs = 48, GivenCosts([LOOK], 5.0)
    planner = waiting_planner(costs, requests, others={kind: costs for kind in kinds})
    now = situation(*[NEVER] * requests, proposers=(0,), kind=kinds[0])

    def tried(kind: Any, rounds: int) -> list[int]:
        decisions = play(planner, replace(now, kind=kind), rounds)
        return [at for at, each in enumerate(decisions) if each.explores]

    assert max(np.diff(tried(kinds[0], 600))) > 100
    play(planner, replace(now, kind=kinds[0]), 40)
    assert tried(kinds[1], 40)[0] < 3
    # It is not tried again because the others are back so soon.
    play(planner, replace(now, kind=kinds[0]), 100)
    assert not tried(kinds[1], 10)


def test_trials_are_as_seldom_where_only_drafting_would_wait_for_the_host() -> None:
    """While nobody proposes a crowd's rounds do not wait for it; those of a trial would, now and
    then, though it takes no more than the device's second."""
    requests = 48
    samples = [HostSample(requests, 0, 0, 0.2, False)]
    for decided in (False, True):
        samples.append(HostSample(requests, requests, 0, 0.95, True, decided=decided))
    planner = Planner(GivenCosts([LOOK], 5.0), HostCosts(samples * 20), WIDTH)
    decisions = play(planner, situation(*[[0.1, 0.0, 0.0]] * requests, proposers=(0,)), 600)
    tried = np.flatnonzero([each.explores for each in decisions])
    # What the first round of a trial had offered, the second verifies.
    apart = [rounds for rounds in np.diff(tried) if rounds > 1]
    assert len(apart) > 2 and min(apart) > 100


@pytest.mark.parametrize(("requests", "every"), [(8, 1), (48, 2)])
def test_a_crowd_weighs_the_same_offers_now_and_then(
    requests: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in so many decisions, of which each holds for sixteen rounds."""
    planner = waiting_planner(GivenCosts([LOOK], 5.0), requests)
    monkeypatch.setattr(planner.budget, "next", lambda *asked: None)
    quiet = situation(*[NEVER] * requests, proposers=(0,), chances=None, whose=None)
    play(planner, quiet, 100)
    weighed: list[Any] = []
    weigh = planner.weighing.weigh
    monkeypatch.setattr(
        planner.weighing, "weigh", lambda *args: (weighed.append(args), weigh(*args))
    )
    play(planner, quiet, 160)
    assert len(weighed) == 10 // every
    # Others come: that is another question. And so is what somebody offers.
    play(planner, replace(quiet, requests=3 * requests), 1)
    assert len(weighed) == 10 // every + 1
