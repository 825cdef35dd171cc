"""Drafters that draft whole blocks, on a made-up GPU: how far they may draft, and that the planner
finds how far they should."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from planner_world import Texts, World
from surefoot.engine.measuring import actions_of, decoding_sizes
from surefoot.engine.rounds import PaddedRounds
from surefoot.speculation.decisions import NOTHING, Action
from surefoot.speculation.host_costs import HostCosts
from surefoot.speculation.measured_times import RecordedSize
from surefoot.speculation.planner import Planner
from surefoot.speculation.recorded_costs import RecordedCosts
from surefoot.speculation.size import GREEDY
from test_planner import gpu_host, samples

WIDTH = 15
CHANCE = 0.753
"""Of a draft, given those before it."""
TARGET = {
    8: ((8, 16, 32, 64, 72, 128, 136), (2.95, 3.0, 3.1, 3.35, 3.55, 3.8, 4.0)),
    32: ((32, 128, 192, 256, 544), (3.6, 4.2, 4.8, 6.0, 7.9)),
    128: ((128, 256, 512, 1152, 2048), (6.7, 8.0, 10.1, 21.0, 37.0)),
}
"""Milliseconds of the target by rows: Qwen3-4B's shapes on an H200, about."""
BLOCK = {8: (0.55, 0.007), 32: (0.9, 0.05), 128: (1.2, 0.25)}
"""Those of the drafter's blocks: what they take in any case, and for each draft."""


def rounds_of(
    drafters: dict[int, int],
    whole: set[int],
    requests: int = 128,
    weighed: bool = True,
    trees: dict[int, int] | None = None,
) -> PaddedRounds:
    """Of an engine for so many requests whose proposers draft so far."""
    state = SimpleNamespace(device=torch.device("cpu"), max_drafts=WIDTH)
    round_ = SimpleNamespace(
        state=state, slots=range(requests), drafters=drafters, whole=whole, trees=trees or {},
        proposers=list(drafters),
    )  # fmt: skip
    return PaddedRounds(cast(Any, round_), 2048, weighed)


def seconds(requests: int, rows: int, action: Action) -> float:
    own, more = BLOCK[requests]
    block = own + more * action[1] if action != NOTHING else 0.0
    return float(np.interp(rows, *TARGET[requests]) + block) / 1000


def test_a_few_depths_of_blocks_are_recorded_where_there_are_many_rows() -> None:
    blocks, steps = rounds_of({0: 15}, {0}), rounds_of({0: 15}, set())
    assert blocks.depths(4) == [15] and blocks.depths(32) == [2, 3, 5, 7, 15]
    assert all(32 * (1 + depth) in blocks.rows(32) for depth in blocks.depths(32))
    assert rounds_of({0: 4}, {0}).depths(128) == [2, 3, 4]
    assert steps.depths(4) == steps.depths(32) == [1, 2, 3, 4, 8, 15]
    assert 192 not in steps.rows(32)
    assert rounds_of({0: 15, 1: 4}, {0}).depths(32) == [1, 2, 3, 4, 8, 15]


def test_of_a_crowd_s_first_drafts_any_part_is_verified() -> None:
    rounds = cast(Any, rounds_of({0: 7}, {0}))

    def rows(spans: int, steps: int) -> list[int]:
        return [size.rows for size in decoding_sizes(rounds, spans, GREEDY, ((0,), steps))]

    assert rows(32, 2) == [32, 40, 48, 64, 80, 96] and rows(32, 3) == [32, 128]
    assert rows(16, 2) == [16, 48], "rows cost these little"
    assert rows(128, 2) == [128, 160, 192, 256, 320, 384] and rows(128, 5) == [128, 768]
    assert rows(128, 7) == rounds.rows(128)


def test_trees_have_fewer_levels_where_they_cost_too_much() -> None:
    """Each of few rows of a request, for their best drafts are worth verifying in any number."""
    rounds = cast(Any, rounds_of({0: 6}, set(), trees={0: WIDTH}))
    assert [rounds.depths(spans) for spans in (1, 32)] == [[2, 4, 6], [1, 2, 6]]
    assert cast(Any, rounds_of({0: 2}, set(), trees={0: 4})).depths(8) == [2]

    def rows(spans: int, steps: int) -> list[int]:
        return [size.rows for size in decoding_sizes(rounds, spans, GREEDY, ((0,), steps))]

    assert rows(1, 4) == rows(1, 2) == [1, 2, 3, 5, 9]
    assert rows(1, 6) == rounds.rows(1)
    assert rows(32, 2) == [32, 40, 48, 64, 96] and rows(32, 6) == [32, 64, 96, 160]
    rounds.weighed = False
    assert rows(32, 6) == rounds.rows(32), "all drafts are verified, whatever that costs"


def test_beside_prompts_a_crowd_s_drafters_make_few_drafts() -> None:
    blocks = rounds_of({0: 7}, {0}, 512)
    assert blocks.prompt_spans == [16, 64, 160, 512]
    assert [blocks.prompt_depth(spans) for spans in blocks.prompt_spans] == [7, 7, 5, 2]
    steps = rounds_of({0: 15, 1: 5}, {0}, 512)
    assert [steps.prompt_depth(spans) for spans in (16, 64, 160, 512, 2048)] == [15, 15, 4, 2, 1]


def test_beside_prompts_a_crowd_has_few_drafts_verified() -> None:
    rounds = rounds_of({0: 7}, {0}, 640)
    assert rounds.prompt_spans == [16, 64, 160, 640]
    assert [rounds.most_samples(n) for n in rounds.prompt_spans] == [144, 576, 160 + 512, 1280]
    assert [rounds.prompt_samples(64, rows, True) for rows in (128, 600)] == [127, 576]


def test_where_drafts_need_not_pay_all_are_made_beside_prompts() -> None:
    rounds = rounds_of({0: 15}, {0}, 512, weighed=False)
    assert [rounds.prompt_depth(spans) for spans in rounds.prompt_spans] == [15] * 4
    assert [rounds.most_samples(spans) for spans in rounds.prompt_spans] == [144, 576, 1440, 4608]


def best_of(requests: int) -> float:
    """Tokens a second with the best number of drafts of all, the same for every request."""
    gained = np.cumsum(CHANCE ** np.arange(1 + WIDTH))
    return max(
        requests * gained[n] / seconds(requests, requests * (1 + n), ((0,), n))
        for n in range(1, 1 + WIDTH)
    )


def engines(*loads: int) -> tuple[Planner, dict[int, World]]:
    """A planner, and engines that it plans for at these numbers of requests."""
    rounds = cast(Any, rounds_of({0: WIDTH}, {0}))
    times = {
        RecordedSize(load, size.rows, size.rows, action): seconds(load, size.rows, action)
        for load in loads
        for action in actions_of(rounds, load)
        for size in decoding_sizes(rounds, load, GREEDY, action)
    }
    costs, true = (RecordedCosts({s: [(100, t)] for s, t in times.items()}) for _ in range(2))
    known: dict[tuple[int, Action, int], float] = {}

    def device(requests: int, prompt_rows: int, action: Action, drafts: int) -> float:
        key = requests, action, drafts
        if key not in known:
            size = true.size_for(requests, action, drafts, 100.0)
            assert size is not None
            known[key] = times[size]
        return known[key]

    def world(requests: int) -> World:
        chances = (CHANCE,) * WIDTH
        texts = Texts(lookup=None, drafter=0, chances=chances, spread=0.05, width=WIDTH)
        return World(device, gpu_host, texts, requests, 2, True, (0,), 0.01, hiccups=0.0)

    planner = Planner(costs, HostCosts(samples(gpu_host)), WIDTH, {0: WIDTH})
    return planner, {load: world(load) for load in loads}


@pytest.mark.parametrize("requests", [32, 128])
def test_the_planner_finds_how_many_drafts_of_blocks_pay(requests: int) -> None:
    """Within a few dozen rounds it is as fast as with the best number of all, the same for every
    request, whether rounds of just this depth are recorded or not."""
    planner, worlds = engines(requests)
    world, best = worlds[requests], best_of(requests)
    assert world.run(planner, 50) > 0.85 * best
    assert world.run(planner, 50) > 0.96 * best
    explored = planner.accounts.explored
    assert world.run(planner, 300) > 0.985 * best
    assert planner.accounts.explored - explored < 30


@pytest.mark.parametrize(("before", "after"), [(8, 32), (8, 128), (32, 128), (128, 8)])
def test_another_load_finds_its_depth_at_once(before: int, after: int) -> None:
    """What paid for few requests is not tried on many for long, nor the other way round."""
    planner, worlds = engines(before, after)
    worlds[before].run(planner, 200)
    assert worlds[after].run(planner, 60) > 0.972 * best_of(after)


@pytest.mark.parametrize("requests", [8, 32, 128])
def test_the_first_requests_need_no_time_to_find_that_drafts_pay(requests: int) -> None:
    planner, worlds = engines(requests)
    assert worlds[requests].run(planner, 24) > 0.75 * best_of(requests)


@pytest.mark.parametrize("after", [32, 128])
def test_behind_requests_without_drafts_the_depth_is_found_at_once(after: int) -> None:
    """A crowd ends, of which few are left at last, who draft far; then others come, who do not
    draft, and others who do."""
    planner, worlds = engines(8, after)
    world = worlds[after]
    world.run(planner, 100)
    worlds[8].run(planner, 12)
    world.proposers, world.hand = (), None
    world.run(planner, 256)
    world.proposers = (0,)
    assert world.run(planner, 60) > 0.972 * best_of(after)


H100_TARGET = {
    8: ((8, 16, 24, 32, 48, 72, 136), (3.85, 3.95, 3.98, 4.0, 4.1, 4.35, 4.9)),
    32: ((32, 64, 96, 128, 192, 288, 544), (4.4, 4.6, 4.85, 5.05, 5.75, 9.1, 9.15)),
    128: ((128, 256, 384, 512, 768, 1152, 2048), (8.5, 9.8, 10.6, 12.2, 16.2, 21.6, 36.0)),
}
H100_BLOCK = {8: (0.5, 0.012), 32: (0.75, 0.08), 128: (1.2, 0.35)}


@pytest.mark.parametrize("after", [32, 128])
def test_a_bad_depth_between_two_good_ones_is_stepped_over(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 requests with 8 drafts each all 288 rows are recorded and no fewer: slower than with
    any other depth. From 15 drafts, the best for 8 requests, it must be found that 5 are better."""
    monkeypatch.setattr(sys.modules[__name__], "TARGET", H100_TARGET)
    monkeypatch.setattr(sys.modules[__name__], "BLOCK", H100_BLOCK)
    planner, worlds = engines(8, after)
    worlds[8].run(planner, 200)
    planner.weighing.best = (0,), 15
    assert worlds[after].run(planner, 60) > 0.97 * best_of(after)


def test_a_good_depth_that_is_no_neighbour_is_gone_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 15 drafts, by bad luck, 7 are worse, and 5 better than both."""
    monkeypatch.setattr(sys.modules[__name__], "TARGET", H100_TARGET)
    monkeypatch.setattr(sys.modules[__name__], "BLOCK", H100_BLOCK)
    planner, worlds = engines(32)
    worlds[32].run(planner, 200)
    good, weighing = planner.weighing.best, planner.weighing
    depths = [action[1] for action in weighing.costs.actions(32)]
    assert abs(depths.index(good[1]) - depths.index(15)) > 1
    weighing.best = (0,), 15
    worlds[32].run(planner, 25)
    assert weighing.best == good
