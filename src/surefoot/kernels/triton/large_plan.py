"""How a product of many rows is cut: by a rule that estimates what each cut costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.kernels.triton.matmul_plan import share_length

# Fitted to times on an H200, in cycles of 1.755 GHz; tests/cpu/test_large_plan.py holds the rule to
# them.
PRODUCTS_PER_CYCLE = 2048
"""Multiplications and additions of bf16 numbers that a multiprocessor's tensor cores do."""
READING_SHARE = 0.25
"""Of the time that reading would take alone, what it adds to that of the tensor cores: a chip at
its power limit slows down for both."""
ARRIVAL_CYCLES = 2160
"""From asking for a stage's numbers to using them: what few stages in flight cannot hide."""
READ_PER_CYCLE = 72
"""Bytes that a multiprocessor reads from the L2 cache: its port's width, not met so far."""
WRITTEN_PER_CYCLE = 18
ADDED_PER_CYCLE = 18
"""Bytes of spread sums that it reads back, some of them from memory."""
SHARE_CYCLES, WIDE_SHARE_CYCLES, TILE_CYCLES = 3500, 6500, 300
"""A share that is added to those before, in registers; the same of the widest tiles, which spill;
and what a tile costs beside its shares."""
TWO_PARTS = 1.2
"""How much longer a step takes that has two products, of ``block_n`` and ``more`` columns."""
AHEAD, AHEAD_SHARE_CYCLES = 1.16, 600
"""The same of a step whose numbers are loaded ahead, of one part or two; and a share that is added
there."""
EMPTY = 0.2
"""What a tile's empty rows cost, of what full ones do, beside the time that these take."""
MOST_STAGES = 8
BLOCK_K = 64


@dataclass(frozen=True)
class LargePlan:
    """A tile is ``block_m`` rows by ``block_n`` outputs and, beside them, ``more`` (16, 32, 64 or
    none: blocks are powers of two, and a wave of them seldom fits a matrix), computed in steps of
    ``block_k`` inputs. A gated product has tiles of two halves instead, and no ``more``.
    ``split_k``: shares that the inputs' sum is made of; ``spread``: each is a program's of its own.
    At most ``per_processor`` programs of ``num_warps`` warps run on a multiprocessor. ``ahead``:
    ``shares_kernel`` computes it, which loads beyond the end of a share."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    spread: bool = False
    num_warps: int = 8
    num_stages: int = 3
    per_processor: int = 1
    more: int = 0
    ahead: bool = False


def large_plan(
    rows: int,
    outputs: int,
    inputs: int,
    gated: bool,
    itemsize: int,
    sms: int,
    shared: int,
    split_k: int,
    ahead: bool = False,
) -> LargePlan:
    """The plan for ``rows`` of ``itemsize`` bytes a number, on ``sms`` multiprocessors of
    ``shared`` bytes of memory, the sums made of ``split_k`` shares (``matmul_plan.shares``, which
    does not know the rows: the rest of a plan changes no bit). ``gated``: two products share a
    program, and ``outputs`` are those after gating. ``ahead``: ``shares_kernel`` takes it."""
    if itemsize == 4:  # No tensor cores: sizes that registers hold.
        return LargePlan(64, 64, 16, split_k, num_stages=2)
    plans = candidates(gated, itemsize, shared, split_k, ahead)
    return min(plans, key=lambda plan: cost(plan, rows, outputs, inputs, gated, itemsize, sms))


def candidates(
    gated: bool, itemsize: int, shared: int, split_k: int, ahead: bool = False
) -> Iterator[LargePlan]:
    """Plans with as many stages as ``shared`` bytes hold; the first of equals is taken. ``ahead``:
    shares that one program computes are ``shares_kernel``'s."""
    for width, more in ((128, 128), (128, 64), (128, 32), (128, 0), (64, 16), (64, 0)):
        if ahead:
            stages = (shared - results_bytes(width, more) - 1_000) // ((128 + width + more) * 128)
            yield LargePlan(
                128, width, BLOCK_K, split_k, False, 4, min(MOST_STAGES, stages), 1, more, True
            )
    halves = 2 if gated else 1
    for block_m, width, more, warps, per_processor in (
        (128, 256, 64, 8, 1),
        (128, 256, 0, 8, 1),
        (128, 128, 64, 8, 1),
        (128, 128, 32, 8, 1),
        (128, 128, 0, 8, 1),
        (128, 128, 0, 4, 2),
        (128, 64, 16, 8, 1),
        (64, 128, 0, 4, 2),
        (64, 256, 0, 8, 1),
        (64, 64, 0, 4, 2),
    ):
        if gated and more:
            continue
        stage = (block_m + width + more) * BLOCK_K * itemsize
        stages = min(MOST_STAGES, (shared // per_processor - 2_000) // stage)
        if stages >= 2 or width == 64:
            for spread in (False, True)[int(ahead) : 1 if split_k == 1 else 2]:
                yield LargePlan(
                    block_m, width // halves, BLOCK_K, split_k, spread, warps, max(2, stages),
                    per_processor, more,
                )  # fmt: skip


def results_bytes(width: int, more: int) -> int:
    """Shared memory of ``shares_kernel`` for a tile's results: bf16, or where registers do not hold
    a second part's sums twice, these as fp32."""
    return 128 * more * 4 if more > 64 else 128 * (width + more) * 2


def cost(
    plan: LargePlan, rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int
) -> float:
    """Cycles of the product, roughly: those of the multiprocessor with most tiles."""
    halves = 2 if gated else 1
    width = (plan.block_n + plan.more) * halves
    down = -(-rows // plan.block_m)
    units = down * -(-outputs // (plan.block_n + plan.more))
    added = 0.0
    if plan.spread:
        units *= plan.split_k
        added = 4 * plan.split_k * rows * outputs * halves / (sms * ADDED_PER_CYCLE)
    most = -(-units // sms)
    turns = -(-most // plan.per_processor)
    # The tensor cores read 64 rows of x for every part, whose products take as long at 64 columns.
    parts = [plan.block_n] * halves + [plan.more] * (plan.more > 0)
    columns = sum(max(part, 32 + part / 2) for part in parts)
    reading = most * (plan.block_m + width) * plan.block_k * itemsize / READ_PER_CYCLE
    step = max(
        most * plan.block_m * columns * plan.block_k / PRODUCTS_PER_CYCLE + READING_SHARE * reading,
        reading,
        turns * ARRIVAL_CYCLES / (plan.num_stages - 1),
    )
    step *= 1 + EMPTY * (1 - rows / (down * plan.block_m))
    step *= AHEAD if plan.ahead else TWO_PARTS if plan.more else 1.0
    share, adding = inputs, 0
    if plan.spread:
        share = share_length(inputs, plan.split_k)
    elif plan.ahead:
        adding = plan.split_k * AHEAD_SHARE_CYCLES
    elif plan.split_k > 1:
        adding = plan.split_k * (WIDE_SHARE_CYCLES if width > 256 else SHARE_CYCLES)
    written = most * plan.block_m * width * (4 if plan.spread else itemsize) / WRITTEN_PER_CYCLE
    return share / plan.block_k * step + turns * (adding + TILE_CYCLES) + written + added
