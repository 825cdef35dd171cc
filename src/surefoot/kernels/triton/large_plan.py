"""How a product of many rows is cut: by a rule that estimates what each cut costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PRODUCTS_PER_CYCLE = 2048
"""Multiplications and additions of bf16 numbers that a multiprocessor's tensor cores do."""
READ_PER_CYCLE = 45
"""Bytes that a multiprocessor reads from the L2 cache, or writes, while all of them do."""
ADDED_PER_CYCLE = 30
"""Bytes of spread sums that it reads back, some of them from memory."""
TILE_CYCLES = 1500
"""From a tile's first read to its first product."""
BLOCK_K = 64


@dataclass(frozen=True)
class LargePlan:
    """A tile is ``block_m`` rows by ``block_n`` outputs, computed in steps of ``block_k`` inputs.
    ``split_k``: shares that the inputs' sum is made of; ``spread``: each is a program's of its own.
    At most ``per_processor`` programs of ``num_warps`` warps run on a multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    spread: bool = False
    num_warps: int = 8
    num_stages: int = 3
    per_processor: int = 1
    more: int = 0


def large_plan(
    rows: int,
    outputs: int,
    inputs: int,
    gated: bool,
    itemsize: int,
    sms: int,
    shared: int,
    split_k: int,
) -> LargePlan:
    """The plan for ``rows`` of ``itemsize`` bytes a number, on ``sms`` multiprocessors of
    ``shared`` bytes of memory, the sums made of ``split_k`` shares (``matmul_plan.shares``, which
    does not know the rows: the rest of a plan changes no bit). ``gated``: two products share a
    program, and ``outputs`` are those after gating."""
    if itemsize == 4:  # No tensor cores: sizes that registers hold.
        return LargePlan(64, 64, 16, split_k, num_stages=2)
    plans = candidates(gated, itemsize, shared, split_k)
    return min(plans, key=lambda plan: cost(plan, rows, outputs, inputs, gated, itemsize, sms))


def candidates(gated: bool, itemsize: int, shared: int, split_k: int) -> Iterator[LargePlan]:
    """Plans whose stages ``shared`` bytes hold, the largest tiles first."""
    halves = 2 if gated else 1
    for block_m, width, warps, most, per_processor in (
        (128, 256, 8, 3, 1),
        (128, 128, 4, 3, 2),
        (64, 256, 8, 4, 1),
        (64, 128, 4, 4, 2),
        (64, 64, 4, 6, 2),
    ):
        stage = (block_m + width) * BLOCK_K * itemsize
        stages = min(most, (shared // per_processor - 2_000) // stage)
        if stages >= 2 or width == 64:
            for spread in (False, True)[: 1 if split_k == 1 else 2]:
                yield LargePlan(
                    block_m, width // halves, BLOCK_K, split_k, spread, warps, max(2, stages),
                    per_processor,
                )  # fmt: skip


def cost(
    plan: LargePlan, rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int
) -> float:
    """Cycles of the product, roughly: those of the multiprocessor with most tiles."""
    halves = 2 if gated else 1
    width = plan.block_n * halves
    units = -(-rows // plan.block_m) * -(-outputs // plan.block_n)
    step = max(
        plan.block_m * width / PRODUCTS_PER_CYCLE,
        (plan.block_m + width) * itemsize / READ_PER_CYCLE,
    )
    written = plan.block_m * width * (4 if plan.spread else itemsize) / READ_PER_CYCLE
    added = 0.0
    if plan.spread:
        units *= plan.split_k
        added = 4 * plan.split_k * rows * outputs * halves / (sms * ADDED_PER_CYCLE)
    share = inputs / plan.split_k if plan.spread else inputs
    return -(-units // sms) * (share * step + TILE_CYCLES + written) + added
