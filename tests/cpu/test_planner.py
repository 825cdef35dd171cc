"""The law that speculation is never slower, and never stays slower, on made-up engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from planner_world import Decides, Fixed, Seconds, Stretches, Texts, World
from surefoot.speculation import accounts
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, Decision, Landed, Promise, Situation
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import RecordedCosts

LOOKUP, DRAFTER = 0, 1
LOOK: Action = ((LOOKUP,), 0)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512)
LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 128, 256, 512)
DEPTHS = (1, 2, 3, 4, 8)
DRAFTING: list[Action] = [((DRAFTER,), depth) for depth in DEPTHS]
BOTH: list[Action] = [((LOOKUP, DRAFTER), depth) for depth in DEPTHS]


# --- a CPU ----------------------------------------------------------------------------------------


def cpu_host(requests: int, drafting: int, ends: int) -> float:
    return 2e-4 + 1e-6 * requests + 4e-6 * drafting + 2e-5 * ends


def cpu_seconds(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
    forward = 5e-3 * (1 + 0.06 * (requests + prompt_rows + drafts - 1))
    look = 2e-5 + 2e-6 * requests if LOOKUP in action[0] else 0.0
    return forward + look + action[1] * (6e-4 + 1e-5 * requests)


def samples(host: Callable[[int, int, int], float]) -> list[HostSample]:
    return [
        HostSample(b, d, e, host(b, d, e), d > 0, decided=d > 0)
        for b in (1, 64, 512)
        for d in (0, b)
        for e in (0, 1)
    ]


def cpu_planner(
    factor: Callable[[int], float] = lambda rows: 1.0, drafter: bool = False
) -> Planner:
    proposing = {LOOKUP: Proposing(2e-5, 2e-6)}
    if drafter:
        proposing[DRAFTER] = Proposing(6e-4, 1e-5, longest=8)
    seconds = [cpu_seconds(1, 0, NOTHING, rows - 1) * factor(rows) for rows in ROWS]
    costs = ExactCosts(ROWS, seconds, proposing)
    drafters = {DRAFTER: 8} if drafter else {}
    return Planner(costs, HostCosts(samples(cpu_host)), 8, drafters, overlap=False)


def cpu(texts: Texts, requests: int = 1, drafter: bool = False) -> World:
    proposers = (LOOKUP, DRAFTER) if drafter else (LOOKUP,)
    return World(cpu_seconds, cpu_host, texts, requests, proposers=proposers)


# --- a GPU ----------------------------------------------------------------------------------------


def gpu_host(requests: int, drafting: int, ends: int) -> float:
    return 3e-4 + 2e-6 * requests + 6e-6 * drafting + 2e-5 * ends


def small(size: RecordedSize) -> float:
    """Seconds of a small model's round."""
    return 7e-4 + 4e-6 * size.rows + (1.5e-5 if LOOKUP in size.action[0] else 0.0)


def middling(size: RecordedSize) -> float:
    """Of a model of some billion weights, with a drafter."""
    return small(size) + 2.3e-3 + 1.1e-5 * size.rows + 2.5e-4 * size.action[1]


def sizes(actions: list[Action], spans: tuple[int, ...] = LADDER) -> list[RecordedSize]:
    found = [RecordedSize(count, count, count, NOTHING) for count in spans]
    for count in spans:
        rows = sorted({count * quarters // 4 for quarters in (4, 5, 6, 8, 10, 12, 16, 20, 36)})
        found += [RecordedSize(count, r, r, action) for action in actions for r in rows]
    return found


class Gpu:
    """A device with recorded rounds: two in flight, the host beside it."""

    def __init__(
        self,
        seconds: Callable[[RecordedSize], float],
        requests: int,
        actions: list[Action],
        wrong: Callable[[RecordedSize], float] = lambda size: 1.0,
    ) -> None:
        self.requests = requests
        self.actions = actions
        self.proposers = tuple(sorted({index for chosen, _ in actions for index in chosen}))
        spans = next(count for count in LADDER if count >= requests)
        near = tuple(count for count in LADDER if spans // 4 <= count <= 4 * spans)
        times = {size: seconds(size) for size in sizes(actions, near)}
        right = RecordedCosts({size: [(100, time)] for size, time in times.items()})
        self.costs = RecordedCosts(
            {size: [(100, time * wrong(size))] for size, time in times.items()}
        )
        known: dict[tuple[int, int, Action, int], float] = {}

        def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
            key = requests, prompt_rows, action, drafts
            if key not in known:
                size = right.size_for(requests, action, drafts, 100.0)
                assert size is not None
                known[key] = times[size]
            return known[key]

        self.device: Seconds = device
        stairs = right.table(requests, 0, actions[0], 8 * requests, 100.0)[0]
        self.stairs = tuple(stairs.tolist())

    def world(self, texts: Texts) -> World:
        return World(
            self.device, gpu_host, texts, self.requests, 2, True, self.proposers, 0.01,
            stairs=self.stairs,
        )  # fmt: skip

    def planner(self) -> Planner:
        drafters = {DRAFTER: 8} if DRAFTER in self.proposers else {}
        return Planner(self.costs, HostCosts(samples(gpu_host)), 8, drafters)


_HOPEFUL = 0.9
"""Of the best fixed action's rate, in the first quarter of the rounds."""


def share(
    world: Callable[[], World], planner: Planner, actions: list[Action], rounds: int = 1500
) -> tuple[float, float]:
    """Tokens a second of a planner that knows the engine a little, against the best action that is
    always the same, and against none."""
    warm = world()
    warm.run(planner, 500)
    ours = warm.run(planner, rounds)

    def runs(action: Action) -> Callable[[int], float]:
        fixed = world()
        same = Fixed(action, fixed)
        return lambda rounds: fixed.run(same, rounds)

    # Over the same stretch of the texts as the planner.
    fixed = {action: runs(action) for action in (NOTHING, *actions)}
    rates = {action: run(500) for action, run in fixed.items()}
    # What is far behind by then is not the best in the end.
    least = _HOPEFUL * max(rates.values())
    later = {a: run(rounds) for a, run in fixed.items() if rates[a] >= least or a == NOTHING}
    return ours / max(later.values()), ours / later[NOTHING]


# --- never slower ---------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 8])
def test_prose_on_a_cpu_is_as_fast_as_without_drafts(requests: int) -> None:
    best, _ = share(lambda: cpu(Texts(repeating=0.0), requests), cpu_planner(), [LOOK])
    assert best > 0.99


@pytest.mark.parametrize("requests", [1, 32, 128, 512])
def test_prose_on_a_gpu_is_as_fast_as_without_drafts(requests: int) -> None:
    gpu = Gpu(small, requests, [LOOK])
    best, _ = share(lambda: gpu.world(Texts(repeating=0.0)), gpu.planner(), [LOOK])
    assert best > 0.99


def test_what_drafts_cost_the_host_counts() -> None:
    # By the device alone, drafts for all of 512 requests would pay; reading so many does not.
    def quick(size: RecordedSize) -> float:
        return 7e-4 + 1e-6 * size.rows

    gpu = Gpu(quick, 512, [LOOK])
    texts = Texts(repeating=1.0, chance=0.6)
    alone = gpu.device(512, 0, LOOK, 512) / gpu.device(512, 0, NOTHING, 0)
    assert alone < 1.5 and gpu_host(512, 512, 0) > 2 * gpu.device(512, 0, LOOK, 512)
    best, _ = share(lambda: gpu.world(texts), gpu.planner(), [LOOK])
    assert best > 0.98


@pytest.mark.parametrize("requests", [1, 32, 128])
def test_a_useless_drafter_costs_nothing(requests: int) -> None:
    gpu = Gpu(middling, requests, DRAFTING)
    texts = Texts(lookup=None, drafter=DRAFTER, chances=(0.05,) * 8, spread=0.0)
    best, _ = share(lambda: gpu.world(texts), gpu.planner(), DRAFTING)
    assert best > 0.99


# --- never slower than the best -------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 32, 64, 128])
def test_a_good_drafter_is_used_as_far_as_it_pays(requests: int) -> None:
    gpu = Gpu(middling, requests, DRAFTING)
    texts = Texts(lookup=None, drafter=DRAFTER)
    best, plain = share(lambda: gpu.world(texts), gpu.planner(), DRAFTING)
    assert best > 0.985 and plain > 1.15


@pytest.mark.parametrize("requests", [32, 64])
def test_a_bad_offer_now_and_then_is_no_reason_against_drafts(requests: int) -> None:
    """All gain alike, but not in every round, and rounds with drafts are so long that they would be
    unfair to somebody if this one were all there is. Of a crowd somebody always has a bad one:
    while that counted, nobody drafted."""

    def device(size: RecordedSize) -> float:
        drafting = 1e-4 + 1e-5 * size.action[1] if size.action[0] else 0.0
        verifying = 2e-4 if size.rows > requests else 0.0
        return 6.4e-4 + 3e-6 * requests + 5e-7 * size.rows + drafting + verifying

    gpu = Gpu(device, requests, [((DRAFTER,), 2), ((DRAFTER,), 4)])
    plain, world = (
        gpu.world(Texts(lookup=None, drafter=DRAFTER, chances=(0.75,) * 8, spread=0.7))
        for _ in range(2)
    )
    usual, planner = plain.run(Fixed(NOTHING, plain), 600), gpu.planner()
    planner.admit(np.arange(requests), np.full(requests, 256))
    world.run(planner, 300)
    assert world.run(planner, 1500) > 1.6 * usual


def test_what_held_for_a_crowd_holds_for_nobody_who_is_alone() -> None:
    """It left while nobody might be slowed, and proposing would have slowed somebody."""
    gpu = Gpu(middling, 1, DRAFTING)
    planner = gpu.planner()
    planner.fairness.restraint.begin()
    best, plain = share(lambda: gpu.world(Texts(lookup=None, drafter=DRAFTER)), planner, DRAFTING)
    assert best > 0.985 and plain > 1.15


@pytest.mark.parametrize(("repeating", "least"), [(0.5, 2.0), (1.0, 3.0)])
def test_repetition_is_used(repeating: float, least: float) -> None:
    best, plain = share(lambda: cpu(Texts(repeating=repeating)), cpu_planner(), [LOOK])
    assert best > 0.985 and plain > least


def test_stretches_of_repetition_are_waited_for() -> None:
    gpu, found = Gpu(small, 1, [LOOK]), []
    for seed in range(6):

        def world(seed: int = seed) -> World:
            made = gpu.world(Texts(repeating=0.15, stretch=60.0, idle_offers=0.05))
            made.seed, made.hiccups = seed, 0.0
            made.__post_init__()
            return made

        found.append(share(world, gpu.planner(), [LOOK], 3000))
    best, plain = np.mean(found, axis=0)
    assert best > 0.97 and plain > 1.3


@pytest.mark.parametrize("repeating", [0.0, 0.3, 1.0])
def test_two_proposers_are_as_good_as_the_better_one(repeating: float) -> None:
    actions, shares = [LOOK, *DRAFTING, *BOTH], []
    gpu = Gpu(middling, 32, actions)
    for seed in range(3):

        def world(seed: int = seed) -> World:
            made = gpu.world(Texts(drafter=DRAFTER, repeating=repeating))
            made.seed = seed
            made.__post_init__()
            return made

        shares.append(share(world, gpu.planner(), actions)[0])
    # One run's share has a standard deviation of half a percent.
    assert np.mean(shares) > 0.985


@pytest.mark.parametrize("chance", [0.7, 0.2])
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_two_proposers_take_turns_with_the_stretches_of_a_text(device: str, chance: float) -> None:
    actions, shares = [LOOK, *DRAFTING, *BOTH], []
    gpu = Gpu(middling, 1, actions)

    def world(seed: int) -> World:
        texts = Stretches(
            drafter=DRAFTER, repeating=0.3, stretch=100.0, chances=(chance,) * 8, idle_offers=0.1
        )
        made = gpu.world(texts) if device == "GPU" else cpu(texts, 1, drafter=True)
        made.seed, made.hiccups = seed, 0.0
        made.__post_init__()
        return made

    for seed in range(3):
        planner = gpu.planner() if device == "GPU" else cpu_planner(drafter=True)
        ours = pace_of_text(world(seed), planner)
        made = {action: world(seed) for action in (LOOK, BOTH[0], BOTH[2], BOTH[3])}
        shares.append(
            ours / max(pace_of_text(each, Fixed(action, each)) for action, each in made.items())
        )
    assert np.mean(shares) > 0.985


def pace_of_text(world: World, planner: Decides) -> float:
    """Tokens a second over one part of the text, whoever writes it."""
    while world.tokens < 800:
        world.step(planner)
    tokens, seconds = world.tokens, world.seconds
    while world.tokens < 6000:
        world.step(planner)
    return (world.tokens - tokens) / (world.seconds - seconds)


def test_a_text_that_begins_to_repeat_itself_is_noticed_soon() -> None:
    texts, planner = Texts(repeating=0.0, idle_offers=0.1), cpu_planner()
    world = cpu(texts)
    world.run(planner, 3000)
    texts.repeating, texts.state[:] = 1.0, True
    waited = next(count for count in range(200) if world.step(planner).drafts > 3)
    assert waited < 60


@pytest.mark.parametrize("requests", [7, 8])
def test_exploring_takes_a_small_part_of_the_time(requests: int) -> None:
    """Also where every round is decided by itself: decisions for eight or more may hold."""
    texts, planner = Texts(repeating=0.0), cpu_planner()
    world, plain = cpu(texts, requests), cpu(Texts(repeating=0.0), requests)
    world.hiccups = plain.hiccups = 0.0
    world.run(planner, 500)
    rate = world.run(planner, 3000)
    assert rate > 0.994 * plain.run(Fixed(NOTHING, plain), 3000)
    assert world.verified > 20


# --- never slower for long ------------------------------------------------------------------------


def recovered(world: World, planner: Planner, best: float, within: int = 500) -> float:
    """The pace after so many rounds, against the best."""
    world.hiccups = 0.0
    world.run(planner, within)
    return world.run(planner, 200) / best


@pytest.mark.parametrize("factor", [3.0, 6.0, 10.0])
@pytest.mark.parametrize("right", [0, 1])
def test_drafting_comes_back_after_a_calibration_on_a_busy_machine(
    factor: float, right: int
) -> None:
    planner = cpu_planner(lambda rows: 1.0 if rows <= right else factor)
    texts = Texts(repeating=0.0, idle_offers=0.0)
    world = cpu(texts)
    world.run(planner, 5000)
    texts.repeating, texts.state[:] = 1.0, True
    fixed = cpu(Texts(repeating=1.0))
    assert recovered(world, planner, fixed.run(Fixed(LOOK, fixed), 300)) > 0.95


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("part", ["all", "more rows"])
def test_poisoned_beliefs_of_a_cpu_are_right_again(factor: float, requests: int, part: str) -> None:
    planner, world = cpu_planner(), cpu(Texts(repeating=1.0), requests)
    world.run(planner, 800)
    costs = planner.costs
    assert isinstance(costs, ExactCosts)
    costs.beliefs.mean[0 if part == "all" else slice(2, 1 + len(ROWS))] += np.log(factor)
    costs.forget_curve()
    fixed = cpu(Texts(repeating=1.0), requests)
    assert recovered(world, planner, fixed.run(Fixed(LOOK, fixed), 300)) > 0.95


def one_size(requests: int, size: RecordedSize, drafting: bool) -> bool:
    rows = 4 * requests if drafting else requests
    return size.spans == requests and size.rows == rows and bool(size.action[0]) == drafting


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda requests, size: 10.0,
        lambda requests, size: 0.1,
        lambda requests, size: 1000.0 if one_size(requests, size, True) else 1.0,
        lambda requests, size: 1000.0 if one_size(requests, size, False) else 1.0,
        lambda requests, size: 0.001 if one_size(requests, size, False) else 1.0,
        lambda requests, size: 10.0 if size.action[0] else 1.0,
    ],
    ids=["x10", "/10", "a drafting size x1000", "plain x1000", "plain /1000", "drafting x10"],
)
def test_poisoned_tables_of_a_gpu_are_right_again(
    requests: int, wrong: Callable[[int, RecordedSize], float]
) -> None:
    gpu = Gpu(middling, requests, DRAFTING, lambda size: wrong(requests, size))
    texts = Texts(lookup=None, drafter=DRAFTER, spread=0.0)
    world, planner = gpu.world(texts), gpu.planner()

    def fixed(action: Action) -> float:
        other = gpu.world(texts)
        return other.run(Fixed(action, other), 200)

    assert recovered(world, planner, max(map(fixed, DRAFTING))) > 0.95


def sleeping(late: float) -> tuple[World, Planner]:
    """A crowd whom drafts gain nothing, and a host that needs so many times as long as usual."""
    gpu = Gpu(middling, 32, DRAFTING)
    world = gpu.world(Texts(lookup=None, drafter=DRAFTER, chances=(0.1,) * 8))
    world.host = lambda *counts: late * gpu_host(*counts)
    return world, gpu.planner()


@pytest.mark.parametrize("late", [1.0, 8.0])
def test_what_a_trial_found_of_a_crowd_is_weighed_next(late: float) -> None:
    """The turn may be another action's, and another decision may hold by then, where rounds wait
    for the host."""
    world, planner = sleeping(late)
    weighed, tried = list[Action](), list[bool]()
    promise, landed = planner.weighing.promise, planner.landed

    def weighing(situation: Situation, action: Action, *rest: Any) -> Promise:
        weighed.append(action)
        return promise(situation, action, *rest)

    def landing(decision: Decision, situation: Situation, outcome: Landed) -> None:
        trial = decision.expected.trial
        found = trial is not None and not trial.beside and decision.drafts
        told[:] = [decision.action] if decision.proposers and found else []
        # Where none of those on offer has room, there is nothing to try.
        assert trial is None or not trial.verify or decision.drafts
        landed(decision, situation, outcome)

    told = list[Action]()
    planner.weighing.promise = weighing  # type: ignore[method-assign]
    planner.landed = landing  # type: ignore[method-assign]
    for _ in range(1200):
        now = told[:]
        weighed.clear()
        world.step(planner)
        if now:
            tried.append(now[0] in weighed)
    assert len(tried) > 8 and all(tried)


def test_what_a_trial_found_breaks_a_decision_off() -> None:
    """If that pays."""
    world, planner = sleeping(8.0)
    anew, events = planner._anew, list[str]()

    def pays(situation: Situation, action: Action, left: int) -> bool:
        events.append("holds" if left else "ends")
        return True

    def deciding(situation: Situation) -> Decision:
        events.append("anew")
        return anew(situation)

    planner.weighing.weigh_tried = pays  # type: ignore[method-assign]
    planner._anew = deciding  # type: ignore[method-assign]
    found = 0
    for _ in range(1200):
        events.clear()
        world.step(planner)
        if "holds" in events:
            found += 1
            assert events == ["holds", "anew"]
    assert found > 5


def test_a_busy_minute_leaves_no_trace() -> None:
    planner, world = cpu_planner(), cpu(Texts(repeating=1.0))
    world.run(planner, 500)
    world.busy, world.noise = 6.0, 0.5
    world.run(planner, 1000)
    world.busy, world.noise = 1.0, 0.02
    fixed = cpu(Texts(repeating=1.0))
    assert recovered(world, planner, fixed.run(Fixed(LOOK, fixed), 300)) > 0.95


def test_a_long_life_of_changing_texts_ends_as_it_began() -> None:
    planner, paces = cpu_planner(), []
    texts = Texts(repeating=0.5, stretch=400.0)
    world = cpu(texts, 4)
    for _ in range(4):
        texts.repeating, world.requests = 0.0, 8
        world.run(planner, 1500)
        texts.repeating, world.requests = 1.0, 2
        world.run(planner, 900)
        paces.append(world.run(planner, 300))
    assert paces[-1] > 0.97 * paces[0]


# --- what a decision is ---------------------------------------------------------------------------


def situation(chances: list[list[float]] | None, **changes: object) -> Situation:
    count = len(chances) if chances is not None else 2
    values: dict[str, object] = {
        "requests": count,
        "prompt_rows": 0,
        "chances": None if chances is None else np.array(chances, dtype=np.float32),
        "whose": np.zeros(count, dtype=np.int64),
        "proposers": (LOOKUP,),
        "draft_limit": 8,
        "context": 100.0,
    }
    return Situation(**(values | changes))  # type: ignore[arg-type]


def test_nobody_proposes_where_nobody_may() -> None:
    for changes in ({"proposers": ()}, {"draft_limit": 0}, {"requests": 0}):
        decision = cpu_planner().decide(situation(None, **changes))
        assert decision.action == NOTHING and decision.drafts == 0 and not decision.explores


def test_actions_stay_within_what_requests_allow() -> None:
    planner = cpu_planner(drafter=True)
    seen = set()
    for _ in range(60):
        now = situation([[0.0] * 8] * 2, proposers=(DRAFTER,), draft_limit=3)
        decision = planner.decide(now)
        planner.landed(decision, now, Landed(6e-3, None, 0, 0, 0))
        seen.add(decision.action)
    assert seen <= {NOTHING, *(((DRAFTER,), depth) for depth in (1, 2, 3))} and len(seen) > 1


def test_a_drafter_that_is_recorded_with_others_only_drafts_with_few_of_them() -> None:
    """On a GPU two drafters are asked together or not at all; a request may want but one of them.
    Who allows neither is not asked for, and an allowed lookup alone needs no drafter."""

    class Recorded:
        def actions(self, requests: int) -> tuple[Action, ...]:
            return NOTHING, ((0,), 0), ((1, 2), 3), ((1, 2), 7), ((0, 1, 2), 3), ((0, 1, 2), 7)

    weighing = cpu_planner().weighing
    weighing.costs = cast(Any, Recorded())

    def allowed(*proposers: int) -> set[Action]:
        return {*weighing.allowed(situation(None, proposers=proposers))}

    both, all_three = {((1, 2), 3), ((1, 2), 7)}, {((0, 1, 2), 3), ((0, 1, 2), 7)}
    assert allowed(0) == {NOTHING, ((0,), 0)}
    assert allowed(1) == allowed(2) == {NOTHING, *both}
    assert allowed(1, 2) == {NOTHING, *both}
    assert allowed(0, 2) == {NOTHING, ((0,), 0), *both, *all_three}
    assert allowed(0, 1, 2) == {NOTHING, ((0,), 0), *both, *all_three}


def test_who_just_arrived_is_expected_to_be_like_the_others() -> None:
    planner = cpu_planner()
    good = [[0.9**step for step in range(1, 9)]] * 2
    for _ in range(40):
        now = situation(good)
        decision = planner.decide(now)
        planner.landed(decision, now, Landed(8e-3, None, decision.drafts, 6, 2))
    arrived = planner.decide(situation([*good, [float("nan")] * 8]))
    assert arrived.drafts > 16


def test_rounds_that_never_verify_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accounts, "BARREN_ROUNDS", 20)
    planner = cpu_planner()
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            now = situation([[0.01] + [0.0] * 7] * 2)
            decision = planner.decide(now)
            planner.landed(decision, now, Landed(6e-3, None, 0, 0, 2))
    assert [record.message for record in caplog.records] == [
        "no draft was verified in 20 rounds that had some on offer"
    ]


def test_a_round_with_a_prompt_weighs_drafts_by_the_time_they_add() -> None:
    planner = cpu_planner()
    weak = [[0.5] + [0.0] * 7] * 4
    for _ in range(200):
        now = situation(weak)
        decision = planner.decide(now)
        seconds = cpu_seconds(4, 0, decision.action, decision.drafts)
        planner.landed(decision, now, Landed(seconds, None, decision.drafts, 1, 4))
    for rows in (0, 500):
        decision = planner.decide(situation(weak, prompt_rows=rows))
        assert decision.explores or decision.drafts == 4


# --- what is told of it ---------------------------------------------------------------------------


def test_what_drafts_saved_is_what_plain_rounds_would_have_taken() -> None:
    planner, world = cpu_planner(), cpu(Texts(repeating=1.0))
    world.run(planner, 400)
    plain = world.tokens * (cpu_seconds(1, 0, NOTHING, 0) + cpu_host(1, 0, 0))
    assert planner.accounts.saved_seconds == pytest.approx(plain - world.seconds, rel=0.2)


def test_what_drafts_saved_is_bounded_whatever_was_believed() -> None:
    """A plain round takes no longer than the measured one with drafts."""
    planner = cpu_planner()
    situation = Situation(1, 0, np.ones((1, 8), np.float32), None, (LOOKUP,), 8, 100.0)
    decision = planner.decide(situation)
    believed = decision.expected._replace(plain_seconds=3600.0)
    host = HostSample(1, 1, 0, 0.001, True)
    outcome = Landed(0.010, host, verified=2, accepted=1.5, drafting=1)
    planner.landed(replace(decision, expected=believed), situation, outcome)
    assert planner.accounts.saved_seconds == pytest.approx(1.5 * 0.011, rel=0.01)
