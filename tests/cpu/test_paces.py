"""No request is slower than without drafts by more than a twentieth, whoever shares its rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Job, make_engine, run_jobs, tiny_decoder
from planner_world import Decides, Fixed, Texts, Uneven, World
from surefoot.request import SamplingParams, SpeculationParams
from surefoot.speculation import holding
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action, Decision, Situation
from surefoot.speculation.fairness import Fairness, Restraint
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.paces import MIN_PACE, Owed, Paces, Proposers
from surefoot.speculation.planner import Planner
from test_planner import DRAFTER, LOOK, Gpu, gpu_host, small

LOOKING = (0,)
BLOCK: Action = ((DRAFTER,), 8)
FOUR: Action = ((DRAFTER,), 4)


def with_a_drafter(size: RecordedSize) -> float:
    """Seconds of a small model's round; the drafter takes half as long as the model."""
    return 5e-4 + 1e-6 * size.rows + (2.5e-4 if DRAFTER in size.action[0] else 0.0)


def with_a_quick_drafter(size: RecordedSize) -> float:
    """It takes a fifth as long as the model."""
    return 5e-4 + 1e-6 * size.rows + (1e-4 if DRAFTER in size.action[0] else 0.0)


def paces(world: World, planner: Decides, rounds: int = 3000) -> np.ndarray:
    """float64 [requests]: of each against rounds that only decode."""
    world.hiccups = 0.0
    world.run(planner, 300)
    tokens, seconds = world.own_tokens.copy(), world.seconds
    world.run(planner, rounds)
    device = world.device(world.requests, 0, NOTHING, 0)
    plain = max(device, gpu_host(world.requests, 0, 0))
    return (world.own_tokens - tokens) / (world.seconds - seconds) * plain


def of_plain(least: float, seed: int, rounds: int = 3000) -> np.ndarray:
    """float64 [32]: each one's pace beside a quick drafter, against that of rounds that only
    decode; ``least`` as of ``Uneven``."""
    gpu = Gpu(with_a_quick_drafter, 32, [FOUR])
    world, plain = (gpu.world(Uneven(drafter=DRAFTER, least=least)) for _ in range(2))
    for each in (world, plain):
        each.rng, each.text_rng = (np.random.default_rng(seed + n) for n in (0, 1))
    return paces(world, gpu.planner(), rounds) / paces(plain, Fixed(NOTHING, plain), rounds).mean()


@pytest.mark.parametrize("requests", [32, 128])
@pytest.mark.parametrize("least", [0.05, 0.3])
def test_who_gains_little_keeps_its_pace(requests: int, least: float) -> None:
    """Not so where the drafter is always awake: whoever gains least from it takes twice as long."""
    gpu = Gpu(with_a_drafter, requests, [BLOCK])
    world, plain, always = (gpu.world(Uneven(drafter=DRAFTER, least=least)) for _ in range(3))
    got, usual = paces(world, gpu.planner()), paces(plain, Fixed(NOTHING, plain)).mean()
    # All gain at most as much as they could lose: then they lose a quarter of that, and a
    # hundredth, as times vary.
    assert got.min() > (1 - (1 - MIN_PACE) / 4 - 0.01) * usual and got.mean() > 0.99 * usual
    unfair = paces(always, Fixed(BLOCK, always))
    assert unfair.min() < 0.8 * usual < unfair.mean()


def test_where_some_gain_nothing_others_gain_all_the_same() -> None:
    """Each time that drafts begin again, the first round verifies none: one or two more would not
    be worth it, and all together would gain less than others lose."""
    got = [of_plain(0.05, seed, 2000) for seed in range(2)]
    assert np.min(got) > MIN_PACE - 0.01
    # 1.04 where they began as soon as there was something to lend.
    assert np.mean(got) > 1.08


def test_who_gains_little_pays_for_others_what_it_may() -> None:
    """Between rounds with the drafter and without it there is a mean that gives more than either
    plain rounds for all or rounds that are fair by themselves."""
    got = [of_plain(0.3, seed) for seed in range(4)]
    assert all(each.mean() > 1.4 for each in got)
    # By chance it is a hundredth more or less.
    least = np.mean([each.min() for each in got])
    assert 0.98 > least > MIN_PACE - 0.01, "what it may pay is used"


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_is_late_now_and_then_slows_nobody(seed: int) -> None:
    """Seen on a GPU, 512 texts of a small model. Three rounds are in flight, for which the host
    needs half of the device's time, or two thirds with drafts, but twice as long where it decides:
    the next ones wait for that. While less was believed of it, all lost a tenth, and some 15 %."""

    def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
        return 5.5e-4 + 3e-6 * requests + 4e-5 * action[1] + 9e-7 * drafts

    def host(requests: int, drafting: int, ends: int) -> float:
        return 1.8e-6 * requests + 1e-6 * drafting

    rows = [1, 64, 256, 512, 640, 768, 1024, 1536, 2048, 4096]
    seconds = [device(min(n, 512), 0, NOTHING, max(0, n - 512)) for n in rows]
    costs = ExactCosts(rows, seconds, {0: Proposing(2e-5, longest=2)})
    samples = [HostSample(b, d, 0, host(b, d, 0), d > 0) for b in (1, 64, 512) for d in (0, b)]
    planner = Planner(costs, HostCosts(samples), 8, drafters={0: 2})
    world, plain = (
        World(
            device, host, Uneven(least=0.15, most=0.55, spread=0.12), 512, in_flight=3,
            overlap=True, late=True, deciding=3e-3, host_noise=0.3, noise=0.01, hiccups=0.0,
            seed=seed,
        )
        for _ in range(2)
    )  # fmt: skip

    def pace(of: World, decides: Decides) -> np.ndarray:
        of.run(decides, 300)
        tokens, begun = of.own_tokens.copy(), of.seconds
        of.run(decides, 1200)
        return (of.own_tokens - tokens) / (of.seconds - begun)

    usual = pace(plain, Fixed(NOTHING, plain)).mean()
    got = pace(world, planner)
    assert got.min() > MIN_PACE * usual and got.mean() > 0.98 * usual


def test_where_all_gain_alike_nobody_waits() -> None:
    """A bad round now and then is no reason to rest."""
    gpu = Gpu(with_a_drafter, 32, [BLOCK])
    texts = Uneven(drafter=DRAFTER, least=0.75, most=0.75, spread=0.25)
    got = paces(gpu.world(texts), gpu.planner())
    fixed = gpu.world(texts)
    assert got.mean() > 0.985 * paces(fixed, Fixed(BLOCK, fixed)).mean() > 1.25


def test_who_never_drafts_lends_what_it_is_ahead() -> None:
    """Half of the texts repeat themselves; the others were ahead, and lose that and no more."""
    gpu = Gpu(small, 32, [LOOK])
    texts = Texts(repeating=0.5, stretch=1e9, idle_offers=0.0)
    world = gpu.world(texts)
    got = paces(world, gpu.planner())
    still = ~texts.state
    assert got[still].min() > MIN_PACE - 0.01 and got[~still].mean() > 1.2


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.5, 2.0)), min_size=1, max_size=200),
    st.integers(1, 1000),
)
def test_whoever_may_be_slowed_was_fast_enough(
    rounds: list[tuple[float, float]], longest: int
) -> None:
    """Over any beginning of a text: what one may fall behind now, and all it got, are no less than
    what it was owed and six tokens, or a thirty-second of what it may get; and no more is lent than
    it was ahead."""
    book, slots, first = Paces(), np.array([3]), min(6.0, longest / 32)
    book.admit(slots, np.array([longest]))
    got = owed = 0.0
    for gain, took in rounds:
        # As the planner does: whoever would lack something then has a round to itself.
        if not Owed(1.0, 0.0, book.ahead(slots)).fair(took, np.array([gain])):
            gain, took = 0.0, 1.0
        book.passed(slots, 1.0 + gain, took)
        got, owed = got + 1.0 + gain, owed + MIN_PACE * took
        assert got + first >= owed - 1e-6
        assert 0.0 <= book.ahead(slots)[0] <= min(32.0, got + first - owed + 1e-6)
    book.admit(slots, np.array([longest]))
    assert book.ahead(slots).tolist() == [first]


def test_what_a_round_was_believed_to_take_is_not_owed_for_long() -> None:
    """While beliefs are wrong, a trial may be believed to take ten times as long as it does: nobody
    is to wait hundreds of rounds for that."""
    paces, slots = Paces(), np.arange(3)
    paces.admit(slots, np.full(3, 1000))
    paces.passed(slots, 1.0, 30.0)
    assert not paces.ahead(slots).any()
    for _ in range(21):
        paces.passed(slots, 1.0, 1.0)
    assert (paces.ahead(slots) > 0.0).all()


def test_restraint_is_longer_where_slowing_others_gained_nothing() -> None:
    restraint, plenty = Restraint(), Owed(1.0, 0.0, np.array([5.0, 0.8]))

    def restrained(gained: float) -> int:
        """Rounds of restraint after some that gained so much."""
        restraint.passed(3, gained, plenty)
        restraint.begin()
        return next(
            n for n in range(1, 999) if restraint.passed(1, 0.0, plenty) or not restraint.holds
        )

    assert [restrained(-0.1) for _ in range(5)] == [32, 64, 128, 256, 256]
    # Within some 300 rounds that is forgotten.
    assert [restrained(0.1) for _ in range(3)] == [64, 16, 16]
    restraint.begin()
    restraint.passed(100, 0.0, Owed(1.0, 0.0, np.array([5.0, 0.7])))
    assert restraint.holds, "somebody could not bear it"
    restraint.passed(1, 0.0, plenty)
    assert not restraint.holds


def test_restraint_ends_when_some_rounds_can_be_borne() -> None:
    """Not when the first of them would leave somebody with nothing again. Of more than requests
    have at first it never asks: those of a crowd that comes then would wait until they end."""
    restraint = Restraint()
    for enough, needs in ((0.1, 0.75), (1.5, 1.5), (100.0, 2.0)):
        restraint.begin(enough)
        restraint.passed(999, 0.0, Owed(1.0, 0.0, np.array([5.0, needs - 0.01])))
        assert restraint.holds
        restraint.passed(1, 0.0, Owed(1.0, 0.0, np.array([5.0, needs])))
        assert not restraint.holds
    assert needs < Fairness().paces.ahead(np.array([0]))[0]


def test_nobody_waits_for_the_sake_of_who_is_gone() -> None:
    """The last texts of a crowd may be restrained: the next one is not. As long as one of them is
    there, it is."""
    fairness, slots = Fairness(), np.arange(4)
    fairness.admit(slots, np.full(4, 1000))
    fairness.restrain(slots, 3.0)
    fairness.admit(slots[:3], np.full(3, 1000))
    fairness.owed(slots, 1.0, 0.0, 1)
    assert fairness.restraint.holds
    fairness.owed(slots[:3], 1.0, 0.0, 1)
    assert not fairness.restraint.holds


def test_where_all_gain_little_a_quarter_is_lent() -> None:
    """Less than others may lose, over the rounds with drafts and those of restraint before."""
    plenty, paces = Owed(1.0, 0.0, np.array([5.0, 0.8])), []
    for gained in (1.0, 5.2, 5.4, 1.0, 6.0):
        restraint = Restraint()
        restraint.begin()
        assert restraint.pace == MIN_PACE, "it is not known yet"
        restraint.passed(80, 0.0, plenty)
        # A hundred rounds in all.
        restraint.passed(20, gained, plenty)
        restraint.begin()
        paces.append(restraint.pace)
        while restraint.holds:
            restraint.passed(1, 0.0, plenty)
        assert restraint.pace == MIN_PACE
    assert paces == [0.9875, 0.9875, MIN_PACE, 0.9875, MIN_PACE]


def test_the_planner_knows_who_is_who(monkeypatch: pytest.MonkeyPatch) -> None:
    """By slots: those that decode, then those at the end of their prompt, as chances have them; who
    enters a slot owes nothing for who left it."""
    engine = make_engine(
        tiny_decoder(), max_num_seqs=3, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    seen: list[tuple[list[int], int]] = []
    entered: list[tuple[list[int], list[int]]] = []
    decide = engine.planner.decide

    def watch(situation: Situation) -> Decision:
        assert situation.slots is not None
        seen.append((situation.slots.tolist(), situation.prompt_rows))
        return decide(situation)

    monkeypatch.setattr(engine.planner, "decide", watch)
    monkeypatch.setattr(
        engine.planner,
        "admit",
        lambda slots, tokens: entered.append((slots.tolist(), tokens.tolist())),
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    jobs = [
        Job(tuple(range(2, 2 + length)), params, SpeculationParams("off"), arrival=arrival)
        for length, arrival in ((3, 0), (10, 2), (4, 4), (5, 30))
    ]
    run_jobs(engine, jobs)
    # The last one enters a slot that another has left.
    assert entered == [([slot], [8]) for slot in (0, 1, 2, 2)]
    assert seen[0] == ([0], 3)
    # Seven rows of the prompt of ten do not end it, the other three do.
    assert seen[seen.index(([0], 7)) + 1] == ([0, 1], 3)
    assert ([0, 1, 2], 4) in seen and ([2], 5) in seen


def test_a_decision_that_holds_counts_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(with_a_drafter, 32, [BLOCK])
    monkeypatch.setattr(holding, "_CROWD_BOUND", 0.0)
    planner = gpu.planner()
    expected = counted = 0.0
    passed = planner.fairness.paces.passed

    def watch(slots: np.ndarray, tokens: Any, took: float, pace: float) -> None:
        nonlocal counted
        assert len(slots) == 32
        counted += took
        passed(slots, tokens, took, pace)

    decide = planner.decide

    def launched(situation: Situation) -> Decision:
        nonlocal expected
        decision = decide(situation)
        expected += decision.expected.seconds / decision.expected.plain_seconds
        return decision

    monkeypatch.setattr(planner.fairness.paces, "passed", watch)
    monkeypatch.setattr(planner, "decide", launched)
    world, holding_for = gpu.world(Uneven(drafter=DRAFTER)), 0
    for _ in range(200):
        world.step(planner)
        holding_for = max(holding_for, planner.held.left)
    # Those since the last decision are counted by the next one.
    planner.fairness.decided(None, (), 0.0, 1.0)
    assert holding_for > 3 and counted == pytest.approx(expected)


def test_a_decision_holds_while_everybody_can_bear_it() -> None:
    """Who gains least falls behind by what its rounds take longer."""
    fairness, slots = Fairness(), np.arange(4)
    fairness.admit(slots, np.full(4, 1000))
    for _ in range(2000):
        # What each usually gains is known after a while.
        fairness.compare(slots, LOOKING, np.array([0.0, 0.5, 1.0, 1.5]))
    bearable = fairness.decided(slots, LOOKING, 0.75, 1.5)
    # It is six tokens ahead, and gets one where it is owed 0.955 * 1.5.
    assert bearable == int(6.0 / (0.955 * 1.5 - 1.0))
    assert fairness.decided(slots[1:], LOOKING, 0.75, 1.0) > 99
    assert fairness.decided(slots[:1], LOOKING, 0.0, 9.0) > 99, "nobody slows who is alone"
    for _ in range(bearable + 4):
        fairness.decided(slots, LOOKING, 0.75, 1.5)
        fairness.launched(slots)
    assert fairness.decided(slots, LOOKING, 0.75, 1.5) == 0


@pytest.mark.parametrize("batches", [1, 2, 7])
def test_rounds_of_batches_in_turn_are_all_counted(batches: int) -> None:
    """A decision holds for rounds of several batches, of which some have requests in common."""
    fairness = Fairness()
    fairness.admit(np.arange(12), np.full(12, 9999))
    turns = [np.arange(2 + batch) for batch in range(batches)]
    fairness.decided(turns[0], (), 0.0, 1.1)
    for _ in range(3):
        for slots in turns:
            fairness.launched(slots)
    fairness.decided(turns[0], (), 0.0, 1.1)
    before = Fairness().paces.ahead(np.array([0]))[0]
    lost = (before - fairness.paces.ahead(np.arange(12))) / (0.955 * 1.1 - 1.0)
    expected = [3 * sum(slot in slots for slots in turns) for slot in range(12)]
    np.testing.assert_allclose(lost, expected, atol=1e-9)


def test_each_is_expected_to_gain_what_it_usually_does_of_all_gains() -> None:
    """Who has a bad offer when it is decided has others in the rounds after that."""
    fairness, slots = Fairness(), np.arange(2)
    fairness.admit(slots, np.full(2, 1000))
    first = fairness.paces.ahead(slots)
    for turn in range(2000):
        fairness.compare(slots, LOOKING, np.array([0.2, 0.6]) * (1.5 if turn % 2 else 0.5))
    fairness.compare(slots, LOOKING, np.array([0.8, 0.0]))
    fairness.decided(slots, LOOKING, 0.4, 1.3)
    for _ in range(4):
        fairness.launched(slots)
    fairness.decided(None, (), 0.0, 1.0)
    gained = fairness.paces.ahead(slots) - first - 4 * (1.0 - 1.3 * (MIN_PACE + 0.005))
    # From its share, 0.5 of the mean, the first is one case of 32 nearer to twice that mean.
    shares = np.array([0.5 + 1.5 / 32, 1.5 - 1.5 / 32])
    assert gained == pytest.approx(4 * 0.4 * shares, abs=0.01)
    # Who enters a slot is as others are, until more is known of it.
    fairness.admit(slots[:1], np.full(1, 1000))
    assert fairness.least(slots, LOOKING) == pytest.approx(1.0)
    fairness.compare(slots, LOOKING, np.array([0.0, 0.4]))
    assert fairness.least(slots, LOOKING) == pytest.approx(0.5)
    # Another proposer may know other texts better; and nobody slows who is alone.
    assert fairness.least(slots, (DRAFTER,)) == 1.0
    assert fairness.least(slots[:1], LOOKING) == 1.0


def test_what_others_offered_and_trials_tell_nothing_of_who_gains_what() -> None:
    """While nothing is known of the offers at hand, what anybody had lately stands for them; and of
    more drafts than usual, those who gain little have a larger part."""
    gpu = Gpu(with_a_quick_drafter, 32, [FOUR])
    planner, world = gpu.planner(), gpu.world(Uneven(drafter=DRAFTER, least=0.3))
    decisions, compared, unknown = list[Decision](), 0, 0
    compare, decide = planner.fairness.compare, planner.decide

    def decided(situation: Situation) -> Decision:
        nonlocal unknown
        decisions.append(decide(situation))
        unknown += bool(decisions[-1].drafts) and not planner._at_hand.own
        return decisions[-1]

    def watch(slots: np.ndarray | None, proposers: Proposers, gains: np.ndarray) -> None:
        nonlocal compared
        assert planner._at_hand.own and decisions[-1].drafts and not decisions[-1].explores
        compared += 1
        assert proposers == decisions[-1].proposers
        compare(slots, proposers, gains)

    planner.fairness.compare = watch  # type: ignore[method-assign]
    planner.decide = decided  # type: ignore[method-assign]
    world.run(planner, 2000)
    assert compared > 50 and unknown > 10
