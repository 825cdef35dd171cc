"""Trees of few levels and of many: what is remembered of them, and which the planner chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_world import Fixed, Texts, World
from surefoot.speculation.costs import ExactCosts, Proposing
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.host_costs import HostCosts, HostSample
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.offer_memory import OfferMemory
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import RecordedCosts
from surefoot.speculation.tree_offers import TreeOffers, levels_of
from surefoot.speculation.trees import ancestors

LEVELS, NODES, BRANCHES = 6, 16, (0.45, 0.2, 0.1, 0.05)
DEPTHS = 1, 2, 4, 6


def grown(levels: int, branches: tuple[float, ...] = BRANCHES) -> tuple[np.ndarray, np.ndarray]:
    """(Chances, parents) [NODES]: the best nodes of a tree in which everything has successors with
    these chances."""
    nodes, ends = [(1.0, -1, 0)], [0]
    for level in range(1, levels + 1):
        new = [(nodes[end][0] * chance, end, level) for end in ends for chance in branches]
        best = sorted(range(len(new)), key=lambda i: -new[i][0])[:NODES]
        ends = list(range(len(nodes), len(nodes) + len(best)))
        nodes += [new[i] for i in best]
    order = sorted(range(1, len(nodes)), key=lambda i: (-nodes[i][0], i))[:NODES]
    place = {node: at for at, node in enumerate(order)} | {0: -1}
    chances, parents = np.zeros(NODES, np.float32), np.zeros(NODES, np.int32)
    chances[: len(order)] = [nodes[i][0] for i in order]
    parents[: len(order)] = [place[nodes[i][1]] for i in order]
    return chances, parents


@dataclass
class Growing(Texts):
    """Trees as ``grown``, likelier for some requests than for others."""

    lookup: int | None = None
    drafter: int | None = 0
    width: int = NODES
    branches: tuple[float, ...] = BRANCHES

    def __post_init__(self) -> None:
        self.become(self.branches)

    def become(self, branches: tuple[float, ...]) -> None:
        """From now on everything has successors with these chances."""
        self._grown = {levels: grown(levels, branches) for levels in range(LEVELS + 1)}

    def offers(
        self, requests: int, action: Action, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        luck = 1.0 + self.spread * (2.0 * rng.random((requests, 1)) - 1.0)
        levels = min(action[1], LEVELS) if self.drafter in action[0] else 0
        rows = (luck * self._grown[levels][0]).astype(np.float32)
        return rows, np.zeros(requests, dtype=np.int64)

    def parents(self, requests: int, action: Action) -> np.ndarray:
        return np.tile(self._grown[min(action[1], LEVELS)][1], (requests, 1))


@given(st.lists(st.integers(-1, 62), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_levels_are_depths(choices: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = np.array([[rng.integers(-1, k) for k in range(len(choices))] for _ in range(3)])
    parents[0] = [min(choice, k - 1) for k, choice in enumerate(choices)]
    depths = ancestors(torch.from_numpy(parents))[1][:, 1:]
    assert (levels_of(parents) == depths.numpy()).all()


def test_of_what_lies_beyond_an_offer_nothing_is_asked() -> None:
    assert levels_of(np.array([[-1, 0, 1, 99, 3, -7]])).tolist() == [[1, 2, 3, 1, 2, 1]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_deep_tree_tells_what_shallow_ones_hold(count: int) -> None:
    chances, parents = grown(LEVELS)
    levels = levels_of(parents[np.newaxis])[0]
    offers = TreeOffers(NODES, LEVELS, NODES)
    for _ in range(4):
        offers.record(np.tile(chances, (count, 1)), LEVELS, np.tile(parents, (count, 1)))
    for most in range(1, LEVELS + 1):
        expected = sorted(chances[levels <= most].tolist(), reverse=True)
        for row in offers.latest(2, most):
            assert row[: len(expected)].tolist() == expected and not row[len(expected) :].any()
        row = offers.reaching(chances[np.newaxis], LEVELS, most, parents[np.newaxis])[0]
        assert row[: len(expected)].tolist() == expected and not row[len(expected) :].any()


@pytest.mark.parametrize("count", [1, 3])
def test_shallow_trees_go_on_as_deep_ones_usually_do(count: int) -> None:
    """The sum over each level, which is what a level brings, is that of the deeper trees."""
    offers = TreeOffers(NODES, LEVELS, NODES)
    deep, deep_parents = grown(LEVELS, (0.6, 0.2))
    for _ in range(600 // count):
        offers.record(np.tile(deep, (count, 1)), LEVELS, np.tile(deep_parents, (count, 1)))
    few, parents = grown(2, (0.6, 0.2))
    for _ in range(8):
        offers.record(np.tile(few, (count, 1)), 2, np.tile(parents, (count, 1)))
    for most in range(1, LEVELS + 1):
        wanted = float(deep[levels_of(deep_parents[np.newaxis])[0] <= most].sum())
        assert float(offers.latest(1, most).sum()) == pytest.approx(wanted, rel=0.08)
        row = offers.reaching(few[np.newaxis], 2, most, parents[np.newaxis])
        assert float(row.sum()) == pytest.approx(wanted, rel=0.08)
        assert (np.diff(row[0]) <= 0).all()


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, LEVELS), st.integers(1, 5))
def test_more_levels_never_promise_less(seed: int, steps: int, count: int) -> None:
    """Whatever was offered: likelier drafts come first, none is likelier than one that was there,
    and there are no more than a tree may have."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(LEVELS, NODES))
    offers = TreeOffers(NODES, LEVELS, nodes)
    for _ in range(5):
        told = int(rng.integers(1, LEVELS + 1))
        offers.record(*random_trees(rng, count, told, nodes))
    rows, levels, parents = random_trees(rng, count, steps, nodes)
    before = np.zeros(count)
    for wanted in range(1, LEVELS + 1):
        row = offers.reaching(rows, levels, wanted, parents)
        kept = offers.latest(count, wanted)
        for each in (row, kept):
            assert (np.diff(each, axis=1) <= 0).all() and (each >= 0).all() and each.max() <= 1.0
            assert not each[:, nodes:].any()
        assert (row.sum(axis=1) >= before - 1e-6).all()
        before = row.sum(axis=1)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0, 1, 3, 200]), max_size=8))
def test_when_somebody_asked_changes_nothing(seed: int, counts: list[int]) -> None:
    """Of the latest trees, the first levels are told, each time; 0: another request begins."""
    rng = np.random.default_rng(seed)
    asked, unasked = (TreeOffers(NODES, LEVELS, NODES) for _ in range(2))
    for count in counts:
        rows, told, parents = random_trees(rng, count, int(rng.integers(1, LEVELS + 1)), NODES)
        for offers in (asked, unasked):
            if count:
                offers.record(rows, told, parents)
            else:
                offers.renew()
        fewest = int(asked._steps[asked._latest_places(3)].min())
        assert (asked.latest(3, fewest) == known(asked, 3, fewest)).all()
        assert asked.latest(5, int(rng.integers(1, LEVELS + 1))).shape == (5, NODES)
    assert (asked._rows == unasked._rows).all()
    for levels in range(1, LEVELS + 1):
        same = asked._steps >= levels
        assert (asked._with(levels)[same] == unasked._with(levels)[same]).all()


def known(offers: TreeOffers, count: int, most: int) -> np.ndarray:
    """float32 [count, NODES]: what of the latest trees is on the first levels, in order."""
    places = offers._latest_places(count)
    rows = np.where(offers._levels[places] <= most, offers._rows[places], 0.0)
    return np.sort(rows, axis=1)[:, ::-1]


def random_trees(
    rng: np.random.Generator, count: int, levels: int, nodes: int
) -> tuple[np.ndarray, int, np.ndarray]:
    """(Chances, levels, parents) of ``count`` trees."""
    chances = np.zeros((count, NODES), dtype=np.float32)
    parents = np.zeros((count, NODES), dtype=np.int32)
    for row, above in zip(chances, parents, strict=True):
        own, branches = grown(levels, tuple(np.sort(rng.dirichlet(np.ones(4)))[::-1]))
        row[:nodes], above[:nodes] = own[:nodes], branches[:nodes]
    return chances, levels, parents


def test_trees_that_were_cut_tell_nothing() -> None:
    """Their requests are about to end, or want no more; small ones with all their nodes do."""
    offers = TreeOffers(NODES, LEVELS, NODES)
    chances, parents = grown(LEVELS)
    before = offers.latest(1, LEVELS)
    offers.record(np.where(np.arange(NODES) < 3, chances, 0)[None], LEVELS, parents[None])
    assert (offers.latest(1, LEVELS) == before).all()
    flat = np.full((1, NODES), 0.05, dtype=np.float32)
    offers.record(flat, LEVELS, np.full((1, NODES), -1, dtype=np.int32))
    assert (offers.latest(1, LEVELS) == flat).all()


def test_a_memory_knows_trees_of_the_one_and_what_another_offers() -> None:
    memory = OfferMemory(NODES, {1: LEVELS}, trees={1: NODES})
    chances, parents = grown(LEVELS)
    rows, own = np.stack((chances, chances)), np.stack((parents, np.arange(-1, NODES - 1)))
    for _ in range(10):
        memory.record(rows, np.array([1, 0]), (0, 1), LEVELS, own)
    levels = levels_of(parents[np.newaxis])[0]
    alone = memory.latest(2, (1,), 1)
    assert alone.sum(axis=1).tolist() == pytest.approx([chances[levels == 1].sum()] * 2)
    cut = memory.continued(rows, np.array([1, 0]), LEVELS, 2, own)
    assert cut[0].sum() == pytest.approx(chances[levels <= 2].sum())
    assert (cut[1] == rows[1]).all()


def seconds(size: RecordedSize) -> float:
    """Of 32 requests to SmolLM2 on an H200, about: levels cost more than rows."""
    levels = size.action[1]
    return 7.5e-4 + 2.3e-6 * (size.rows - 32) + 9e-5 * levels


def test_a_crowd_grows_trees_of_few_levels() -> None:
    """Where the whole trees are slower than nothing."""
    actions: list[Action] = [((0,), levels) for levels in DEPTHS]
    rows = [32 * quarters // 4 for quarters in (4, 5, 6, 8, 10, 12, 20, 36, 68)]
    sizes = [RecordedSize(32, 32, 32, NOTHING)]
    sizes += [RecordedSize(32, count, count, action) for action in actions for count in rows]
    times = {size: seconds(size) for size in sizes}
    costs, right = (
        RecordedCosts({size: [(100, time)] for size, time in times.items()}) for _ in range(2)
    )

    def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
        size = right.size_for(requests, action, drafts, 100.0)
        assert size is not None
        return times[size]

    stairs = tuple(right.table(32, 0, actions[0], NODES * 32, 100.0)[0].tolist())

    def world() -> World:
        return World(
            device, lambda *_: 1e-4, Growing(), 32, 2, True, (0,), 0.01, stairs=stairs
        )  # fmt: skip

    def always(action: Action) -> float:
        fixed = world()
        return fixed.run(Fixed(action, fixed), 800)

    best = {action: always(action) for action in (NOTHING, *actions)}
    assert best[actions[-1]] < best[NOTHING] < 0.85 * best[actions[0]]
    ours = world()
    planner = Planner(costs, HostCosts(), NODES, {0: LEVELS}, trees={0: NODES})
    ours.run(planner, 300)
    assert ours.run(planner, 1500) > 0.96 * max(best.values())


@pytest.mark.parametrize("seed", range(3))
def test_what_a_trial_found_is_known_at_once(seed: int) -> None:
    """Seen on a GPU: greedy texts after drawn ones, 512 of them, which gain a third by trees. The
    device waits for the host, so that trials are 128 rounds apart, and the crowd decoded without
    drafts until it ended, though each trial was much faster than plain rounds."""

    def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
        return 5.5e-4 + 2.6e-6 * requests + 6e-5 * action[1] + 1.6e-6 * drafts

    def host(requests: int, drafting: int, ends: int) -> float:
        return 2e-4 + 1e-6 * requests + 2.2e-6 * drafting

    rows = [1, 512, 640, 768, 1024, 1536, 2048]
    times = [device(min(n, 512), 0, NOTHING, max(0, n - 512)) for n in rows]
    costs = ExactCosts(rows, times, {0: Proposing(6e-5, longest=4)})
    samples = [HostSample(b, d, 0, host(b, d, 0), d > 0) for b in (1, 256, 512) for d in (0, b)]
    planner = Planner(costs, HostCosts(samples), NODES, {0: 4}, trees={0: NODES})
    texts = Growing(branches=(0.3,))
    world = World(
        device, host, texts, 512, in_flight=2, overlap=True, late=True, deciding=1.2e-3,
        host_noise=0.2, hiccups=0.0, seed=seed,
    )  # fmt: skip
    world.run(planner, 500)
    assert world.verified < 0.1 * 512 * world.rounds
    texts.become((0.8, 0.1))
    decisions = [world.step(planner) for _ in range(60)]
    assert any(each.drafts and not each.explores for each in decisions)
