"""Plans for products of many rows: by a rule that is held to measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from surefoot.kernels.triton.large_plan import LargePlan, candidates, cost, large_plan
from surefoot.kernels.triton.matmul_plan import TUNED_ON, shares

CARDS = [TUNED_ON, (132, 166_912), (142, 101_376), (46, 101_376), (3, 232_448)]
"""Multiprocessors, and bytes of shared memory."""
SHAPES = {
    "qkv": (6144, 2560, False),
    "o": (2560, 4096, False),
    "gate_up": (9728, 2560, True),
    "down": (2560, 9728, False),
    "head": (151936, 2560, False),
}
"""Outputs, inputs, gated: Qwen3-4B's."""
TILES = [
    LargePlan(128, 256, 64, num_stages=3),
    LargePlan(128, 128, 64, num_stages=4),
    LargePlan(128, 128, 64, num_warps=4, num_stages=3, per_processor=2),
    LargePlan(64, 128, 64, num_warps=4, num_stages=4, per_processor=2),
    LargePlan(64, 256, 64, num_stages=4),
]
"""Those that were measured, in the order of candidates; gated ones with half as many outputs, of
both halves."""
MICROSECONDS: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("down", 160): (40.9, 33.2, 48.5, None, 29.8),
    ("down", 256): (42.8, 31.0, 45.0, None, 31.8),
    ("down", 320): (44.3, 49.7, 45.6, None, 50.2),
    ("down", 512): (48.6, 54.8, 50.1, None, 56.1),
    ("gate_up", 160): (63.7, 66.7, 70.5, 42.1, 42.8),
    ("gate_up", 256): (64.4, 58.7, 55.5, 52.6, 58.0),
    ("gate_up", 320): (63.5, 76.4, 76.6, 56.9, 59.2),
    ("gate_up", 512): (92.2, 93.3, 82.8, 88.0, 92.5),
    ("qkv", 160): (27.8, 19.9, 23.2, 17.4, 18.4),
    ("qkv", 256): (28.0, 18.6, 23.2, 17.8, 18.8),
    ("qkv", 320): (28.6, 33.0, 29.2, 18.8, 19.3),
    ("qkv", 512): (29.5, 34.2, 31.3, 32.4, 35.2),
    ("o", 160): (22.6, 19.7, 25.3, None, 16.3),
    ("o", 256): (24.4, 17.4, 23.4, None, 17.8),
    ("o", 320): (25.0, 26.3, 24.8, None, 26.6),
    ("o", 512): (29.0, 32.2, 28.3, None, 32.8),
}
"""By shape and rows, for each of ``TILES``: on an H200, with the norm behind o and down, whose
three shares are spread."""
IN_TURN = {160: (46.2, 97.6), 512: (47.8, 99.7)}
"""The same of the first tile for o and down when one program computes all shares."""


WIDE, BROAD = (
    LargePlan(128, 256, 64, 3, more=64, num_stages=4),
    LargePlan(128, 256, 64, 3, num_stages=4),
)
SMALL = LargePlan(128, 128, 64, 3, more=32, num_stages=6)
SPREAD = replace(BROAD, spread=True)
LARGER: dict[tuple[str, int], dict[LargePlan, float]] = {
    ("o", 1024): {SMALL: 47.3, BROAD: 53.4, SPREAD: 54.8},
    ("down", 1024): {SPREAD: 91.3, SMALL: 93.2, BROAD: 105.5},
    ("o", 2048): {WIDE: 88.3, SMALL: 93.2, BROAD: 106.1},
    ("down", 2048): {WIDE: 165.3, SPREAD: 178.3, SMALL: 182.6},
    ("o", 4096): {BROAD: 165.0, WIDE: 174.0},
    ("down", 4096): {WIDE: 325.9, BROAD: 326.5, SPREAD: 347.3},
    ("o", 8192): {BROAD: 280.1, WIDE: 340.0},
    ("down", 8192): {BROAD: 561.8, WIDE: 645.7},
}
"""Of more rows, in tiles of one and of two parts, their shares in turn or spread."""


AHEAD = {
    tile: LargePlan(
        128, *tile[:1], 64, 3, num_warps=4, num_stages=tile[2], more=tile[1], ahead=True
    )
    for tile in ((128, 128, 3), (128, 64, 4), (128, 32, 5), (128, 0, 6), (64, 16, 7), (64, 0, 8))
}
LONG_RUN: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("o", 512): (None, None, None, 26.4, 26.5, 33.7),
    ("down", 512): (None, None, None, 56.8, 54.3, 75.9),
    ("o", 768): (None, None, 38.1, 32.2, 44.2, None),
    ("down", 768): (None, None, 77.5, 68.0, 110.2, None),
    ("o", 1024): (None, 45.4, 43.9, 53.6, 50.5, None),
    ("down", 1024): (None, 109.0, 89.5, 119.4, 107.1, None),
    ("o", 2048): (103.3, 84.0, 81.0, 87.5, None, None),
    ("down", 2048): (225.0, 188.0, 178.0, 203.0, None, None),
    ("o", 4096): (170.8, None, 168.0, 171.5, None, None),
    ("down", 4096): (366.0, None, 367.0, 362.5, None, None),
    ("o", 8192): (319.0, None, 338.0, None, None, None),
    ("down", 8192): (665.0, None, 740.0, None, None, None),
}
"""By shape and rows, of ``AHEAD``, in microseconds with the norm behind; the chip at its power
limit."""


@pytest.mark.parametrize(("name", "rows"), LONG_RUN)
def test_the_rule_prefers_what_was_fastest_of_those_that_load_ahead(name: str, rows: int) -> None:
    outputs, inputs, gated = SHAPES[name]
    pairs = zip(AHEAD.values(), LONG_RUN[name, rows], strict=True)
    times = {plan: time for plan, time in pairs if time is not None}
    assert set(AHEAD.values()) <= set(candidates(gated, 2, TUNED_ON[1], 3, ahead=True))
    costs = {plan: cost(plan, rows, outputs, inputs, gated, 2, TUNED_ON[0]) for plan in times}
    chosen = min(costs, key=lambda plan: costs[plan])
    assert times[chosen] <= 1.05 * min(times.values()), costs
    for plan, time in times.items():
        assert costs[plan] / 1755 + 2 + rows / 200 == pytest.approx(time, rel=0.3), plan


@pytest.mark.parametrize(("name", "rows"), LARGER)
def test_the_rule_prefers_what_was_fastest_of_many_rows(name: str, rows: int) -> None:
    outputs, inputs, gated = SHAPES[name]
    times = LARGER[name, rows]
    costs = {plan: cost(plan, rows, outputs, inputs, gated, 2, TUNED_ON[0]) for plan in times}
    chosen = min(costs, key=lambda plan: costs[plan])
    assert times[chosen] <= 1.05 * min(times.values()), costs
    for plan, time in times.items():
        # The norm behind reads and writes as much as the rows are long.
        assert costs[plan] / 1755 + 2 + rows / 400 == pytest.approx(time, rel=0.15), plan


@pytest.mark.parametrize(("name", "rows"), MICROSECONDS)
def test_the_rule_prefers_what_was_fastest(name: str, rows: int) -> None:
    """Or what came within 5 % of it."""
    outputs, inputs, gated = SHAPES[name]
    split_k = shares(outputs, inputs, gated, 2, *TUNED_ON)
    times: dict[LargePlan, float] = {}
    for tile, time in zip(TILES, MICROSECONDS[name, rows], strict=True):
        if time is not None:
            width = tile.block_n // 2 if gated else tile.block_n
            plan = replace(tile, block_n=width, split_k=split_k, spread=split_k > 1)
            times[plan] = time
            if split_k > 1 and tile is TILES[0] and rows in IN_TURN:
                times[replace(plan, spread=False)] = IN_TURN[rows][name == "down"]
    costs = {plan: cost(plan, rows, outputs, inputs, gated, 2, TUNED_ON[0]) for plan in times}
    chosen = min(costs, key=lambda plan: costs[plan])
    assert times[chosen] <= 1.05 * min(times.values()), (chosen, costs)
    for plan, time in times.items():
        # Cycles, and what costs the same with every plan.
        assert costs[plan] / 1755 + 2 == pytest.approx(time, rel=0.3), plan


@pytest.mark.parametrize("rows", [160, 256, 320, 512, 1024, 2048])
@pytest.mark.parametrize("name", SHAPES)
def test_waves_of_tiles_are_full(name: str, rows: int) -> None:
    """For half of the time, at least, all multiprocessors are busy."""
    outputs, inputs, gated = SHAPES[name]
    split_k = shares(outputs, inputs, gated, 2, *TUNED_ON)
    plan = large_plan(rows, outputs, inputs, gated, 2, *TUNED_ON, split_k)
    units = -(-rows // plan.block_m) * -(-outputs // (plan.block_n + plan.more))
    units *= split_k if plan.spread else 1
    waves = -(-units // TUNED_ON[0])
    assert units >= 0.5 * waves * TUNED_ON[0], (plan, units)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("gated", [False, True])
def test_stages_fit_the_memory(gated: bool, card: tuple[int, int]) -> None:
    plans = list(candidates(gated, 2, card[1], 3))
    assert any(plan.more for plan in plans) is not gated
    for plan in plans:
        stage = (plan.block_m + (plan.block_n + plan.more) * (1 + gated)) * plan.block_k * 2
        assert stage * plan.num_stages * plan.per_processor <= card[1] - 2_000
