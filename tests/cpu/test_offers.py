"""What rounds may expect of proposers, by what these offered lately."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.offers import Offers

LOOKUP, DRAFTER = 0, 1
WIDTH = 3


def memory_of(rows: list[list[float]], proposer: int, times: int = 30) -> OfferMemory:
    """That has seen ``rows``, one for each request, again and again."""
    memory = OfferMemory(WIDTH, {DRAFTER: WIDTH})
    chances = np.array(rows, dtype=np.float32)
    for _ in range(times):
        memory.record(chances, np.full(len(rows), proposer), (proposer,), WIDTH)
    return memory


@pytest.mark.parametrize(
    ("neighbour", "least", "best"),
    [
        *(([0.0, 0.0, 0.0], least, best) for least, best in ((0.0, 1), (0.2, 3), (1.0, 3))),
        ([0.99, 0.98, 0.97], 1.0, 6),
    ],
)
def test_a_promise_is_fair_to_who_usually_gains_least(
    neighbour: list[float], least: float, best: int
) -> None:
    """More drafts would bring more, and slow who has none of that by more than a twentieth. Who has
    nothing on offer just now may have had enough, and have it again."""
    drafts = np.arange(2 * WIDTH + 1)
    seconds = 1.0 + 0.03 * drafts
    rows = [[0.99, 0.98, 0.97], neighbour]
    memory = memory_of(rows, LOOKUP)
    tokens, took = memory.promise(2, (LOOKUP,), 0, drafts, seconds, 1.0, least=least)
    ranked = sorted([*rows[0], *rows[1]], reverse=True)
    assert tokens == pytest.approx(2 + sum(ranked[:best]))
    assert took == pytest.approx(1.0 + 0.03 * best)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("requests", [9, 33, 128, 500])
def test_of_a_crowd_every_request_has_its_turn(requests: int, trees: bool) -> None:
    memory = OfferMemory(WIDTH, {DRAFTER: WIDTH}, trees={DRAFTER: WIDTH} if trees else {})
    parents = np.tile(np.arange(-1, WIDTH - 1, dtype=np.int32), (requests, 1)) if trees else None
    first, seen = np.linspace(0.1, 0.9, requests, dtype=np.float32)[:, np.newaxis], set[float]()
    # Of many, few are remembered, and only the latest are kept.
    for _ in range(8 * requests):
        chances = first ** np.arange(1, 1 + WIDTH)
        whose = np.full(requests, DRAFTER)
        memory.record(chances.astype(np.float32), whose, (DRAFTER,), WIDTH, parents)
        offers = memory.of(DRAFTER)
        seen.update(offers.latest(min(offers.count, 32), WIDTH)[:, 0].tolist())
    assert seen.issuperset(first[:, 0].tolist())


@pytest.mark.parametrize("before", range(4))
def test_after_a_trial_a_crowd_expects_of_trees_what_that_found(before: int) -> None:
    """Whichever reports are usually remembered. Seen on a GPU: greedy texts came after drawn ones,
    and of each trial eight of 512 trees were remembered, or none."""
    parents = np.tile(np.arange(-1, WIDTH - 1, dtype=np.int32), (512, 1))
    drafts = np.arange(0, 1537, 64)
    promises = []
    for bad in (100 + before, 0):
        memory = OfferMemory(WIDTH, {DRAFTER: WIDTH}, trees={DRAFTER: WIDTH})
        for chance, times, found in ((0.1, bad, False), (0.1, 1, False), (0.9, 1, True)):
            chances = np.tile(chance ** np.arange(1.0, 1.0 + WIDTH, dtype=np.float32), (512, 1))
            for _ in range(times):
                told = chances, np.full(512, DRAFTER), (DRAFTER,), WIDTH, parents, found
                memory.record(*told)
        promises.append(memory.promise(512, (DRAFTER,), WIDTH, drafts, 1.0 + 1e-3 * drafts, 1.0))
    assert promises[0] == pytest.approx(promises[1]) and promises[1][0] > 512 * 2.0


@pytest.mark.parametrize("lately", [True, False])
@pytest.mark.parametrize("margin", [1.0, 1.1])
def test_a_promise_to_one_request_is_the_mean_of_its_best_rounds(
    margin: float, lately: bool
) -> None:
    """Of the latest eight offers, whose sums are made number by number, or of all."""
    rng = np.random.default_rng(7)
    for case in range(40):
        memory = OfferMemory(WIDTH, {DRAFTER: WIDTH})
        for _ in range(int(rng.integers(9, 30))):
            row = np.cumprod(rng.random(WIDTH)) * (rng.random() < 0.8)
            memory.record(row[np.newaxis].astype(np.float32), np.zeros(1, int), (LOOKUP,), 0)
        drafts = np.arange(WIDTH + 1) if case % 2 else np.array([0, 2, 3])
        seconds = 1.0 + np.cumsum(rng.random(len(drafts)) * 0.3)
        count = 8 if lately else memory.of(LOOKUP).count
        best = []
        for row in memory.latest(count, (LOOKUP,), 0):
            gains = [float(row[:taken].sum()) for taken in drafts]
            rates = [
                (1.0 + gain) / took * (1.0 if at else margin)
                for at, (gain, took) in enumerate(zip(gains, seconds, strict=True))
            ]
            at = int(np.argmax(rates))
            best.append((1.0 + gains[at], seconds[at]))
        found = memory.promise(1, (LOOKUP,), 0, drafts, seconds, margin, lately)
        assert found == pytest.approx(tuple(np.mean(best, axis=0)), rel=1e-5)


def test_ahead_of_its_offers_one_request_is_promised_what_one_number_of_drafts_brings() -> None:
    """Offers come and go: who had to know of each before its round, cannot choose for each."""
    drafts, seconds = np.arange(WIDTH + 1), np.array([1.0, 1.1, 1.2, 1.4])
    rows = np.array([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]] * 8, dtype=np.float32)
    known, ahead = (OfferMemory(WIDTH, {DRAFTER: WIDTH}, each) for each in (False, True))
    for memory in (known, ahead):
        for row in rows:
            memory.record(row[np.newaxis], np.zeros(1, int), (LOOKUP,), 0)
    found = ahead.promise(1, (LOOKUP,), 0, drafts, seconds, 1.0)
    gains = np.concatenate(([0.0], np.cumsum(rows.mean(axis=0))))
    best = int(((1.0 + gains) / seconds).argmax())
    assert found == pytest.approx((1.0 + gains[best], seconds[best]))
    each = known.promise(1, (LOOKUP,), 0, drafts, seconds, 1.0)
    assert each == pytest.approx((1.0 + 0.5 * 2.4, 0.5 * (1.0 + 1.4)))
    assert ahead.usual((LOOKUP,), 0) == pytest.approx([0.45, 0.4, 0.35])


def test_drafters_offers_are_seen_as_long_as_they_would_be() -> None:
    """Cut where they would draft less far; continued as usual where further."""
    usual = [0.8, 0.4, 0.1]
    memory = memory_of([usual] * 8, DRAFTER, times=100)
    assert memory.latest(2, (DRAFTER,), 1).tolist() == [[pytest.approx(0.8), 0.0, 0.0]] * 2
    whose = np.array([DRAFTER, LOOKUP])
    whole = np.array([[0.9, 0.5, 0.3], [0.9, 0.5, 0.3]], dtype=np.float32)
    cut = memory.continued(whole, whose, 3, 2)
    assert cut.tolist() == [[*whole[0, :2], 0.0], whole[1].tolist()]
    short = np.array([[0.6, 0.0, 0.0], [0.6, 0.0, 0.0]], dtype=np.float32)
    further = memory.continued(short, whose, 1, 3)
    assert further[0].tolist() == pytest.approx([0.6, 0.3, 0.075], rel=0.02)
    assert further[1].tolist() == short[1].tolist()
    assert (memory.continued(whole, whose, 3, 3) == whole).all()


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("trees", [{}, {LOOKUP: WIDTH}], ids=["chain", "tree"])
def test_a_drafter_that_makes_fewer_steps_than_another_is_remembered(
    requests: int, trees: dict[int, int]
) -> None:
    """Told to make as many as that one can, it makes all that it can."""
    memory = OfferMemory(WIDTH, {LOOKUP: 2, DRAFTER: WIDTH}, trees=trees)
    rows = np.tile(np.array([[0.9, 0.7, 0.0]], dtype=np.float32), (requests, 1))
    for _ in range(20):
        memory.record(rows, np.full(requests, LOOKUP), (LOOKUP, DRAFTER), WIDTH)
    for steps, found in ((WIDTH, [0.9, 0.7, 0.0]), (2, [0.9, 0.7, 0.0]), (1, [0.9, 0.0, 0.0])):
        assert memory.latest(2, (LOOKUP,), steps)[1].tolist() == pytest.approx(found)
        chances = memory.continued(rows, np.full(requests, LOOKUP), WIDTH, steps)
        assert chances[0].tolist() == pytest.approx(found)


def test_one_offer_is_recorded_as_several_are() -> None:
    """Number by number, the same to the bit as by arrays: a request that the report does not know
    is nobody's, but makes them of two rows."""
    rng = np.random.default_rng(5)
    alone, beside = (OfferMemory(8, {DRAFTER: 8}) for _ in range(2))
    for _ in range(700):
        proposers = ((LOOKUP,), (DRAFTER,), (LOOKUP, DRAFTER))[rng.integers(3)]
        steps, whose = int(rng.integers(1, 8)), int(rng.choice(proposers))
        most = steps if whose == DRAFTER and rng.random() < 0.8 else int(rng.integers(0, 9))
        chances = np.zeros((2, 8), dtype=np.float32)
        chances[0, :most] = np.cumprod(rng.random(most))
        if rng.random() < 0.05:
            chances[0] = np.nan
        chances[1] = np.nan
        alone.record(chances[:1], np.array([whose]), proposers, steps)
        beside.record(chances, np.array([whose, 0]), proposers, steps)
    for found, expected in ((alone._offers, beside._offers), (alone._alone, beside._alone)):
        for proposer in (LOOKUP, DRAFTER):
            assert vars_equal(found[proposer], expected[proposer])


def test_a_drafters_offer_is_learnt_number_by_number() -> None:
    rng = np.random.default_rng(6)
    found, expected = Offers(8, 8), Offers(8, 8)
    for _ in range(50):
        steps = int(rng.integers(1, 8))
        row = np.zeros((1, 8), dtype=np.float32)
        row[0, :steps] = np.cumprod(rng.random(steps))
        found.record(row, steps)
        expected._learn(row, steps)
        expected._rows[expected._entered] = expected.reaching(row, steps, 8)
        expected._entered += 1
        assert vars_equal(found, expected)


def vars_equal(found: Offers, expected: Offers) -> bool:
    pairs = [(vars(found)[name], value) for name, value in vars(expected).items()]
    return all(np.array_equal(*pair) for pair in pairs)


def test_what_a_better_offer_hides_is_what_there_usually_is() -> None:
    """One long offer that was seen last is not taken for what the look-up has ever since."""
    memory = OfferMemory(WIDTH, {DRAFTER: WIDTH})
    long, none = (np.array([row], dtype=np.float32) for row in ([0.9, 0.8, 0.7], [0.0, 0.0, 0.0]))
    for row in [none] * 15 + [long]:
        memory.record(row, np.array([LOOKUP]), (LOOKUP,), 0)
    hiding = np.array([[0.8, 0.02, 0.01]], dtype=np.float32)
    memory.record(hiding, np.array([DRAFTER]), (LOOKUP, DRAFTER), 3)
    assert memory.latest(1, (LOOKUP,), 0)[0].tolist() == pytest.approx([0.9 / 16, 0.02, 0.01])


def test_of_another_request_is_expected_what_all_before_it_offered() -> None:
    """Not what the one before it did, whose text repeated itself."""
    memory = OfferMemory(WIDTH, {DRAFTER: WIDTH})
    for _ in range(5):
        for row in [[0.1, 0.0, 0.0]] * 70 + [[0.9, 0.9, 0.9]] * 30:
            memory.record(np.array([row], dtype=np.float32), np.array([LOOKUP]), (LOOKUP,), 0)
    assert memory.latest(8, (LOOKUP,), 0).mean(axis=0).tolist() == pytest.approx([0.9] * 3)
    memory.renew()
    assert memory.latest(8, (LOOKUP,), 0).mean(axis=0)[0] == pytest.approx(0.34, abs=0.15)
    few = OfferMemory(WIDTH, {DRAFTER: WIDTH})
    few.record(np.array([[0.5, 0.4, 0.3]], dtype=np.float32), np.array([LOOKUP]), (LOOKUP,), 0)
    few.renew()
    assert (few.latest(8, (LOOKUP,), 0) > 0).all()
