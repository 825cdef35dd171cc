"""When ``product.cu`` computes a product, and how: by rule.

It is for weights whose blocks of 64 outputs leave multiprocessors idle in Triton's kernels (9,728
gated outputs are 152 blocks, for 132 of them), and for those of more blocks than there are
multiprocessors, since its steps run on from tile to tile. Of large weights it leaves fewer than 32
rows, and 65 to 80, to Triton's kernels, and of logits up to 64 rows. Gated products of more than
192 rows are its own up to 1,024, where cuBLAS is not quicker (``triton.cublas``). Logits gain
nothing there (docs/log.md). Where it is only asked which of them are the largest, all numbers of
rows up to 1,024 are its own. Of products in shares it computes those that ``shared_plan`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.kernels.triton.matmul_plan import filled_shares, share_length

STEP = 64
"""Inputs of a step, as ``product.cu`` has it."""
GROUP = 64
"""Rows of x that a warpgroup multiplies."""
MOST_ROWS, MOST_MANY_ROWS = 192, 1024
"""The latter of gated products and of largest sums."""
LARGE = 2**25
"""Numbers of a weight that is large."""
FEW_ROWS = (*range(1, 32), *range(65, 81))
"""With so many rows, such are left to Triton."""
BLOCK = 64
"""Outputs that a program of ``triton.matmul`` computes."""
WIDEST = {
    (1, True): 256, (2, True): 192, (3, True): 160, (4, True): 128,
    (1, False): 256, (2, False): 256, (3, False): 192, (4, False): 128,
}  # fmt: skip
"""Most rows of a weight's tile, by (groups, gated): what registers hold."""
MOST_STAGES = 12
ALIGNMENT = 1024
"""Bytes that the ring's place in shared memory is a multiple of."""
SMALL = 2**20
"""Numbers of a weight that is small."""
LONG_SHARE = 2048
"""Inputs of a share: of shorter ones of large weights it leaves more than 320 rows to Triton."""
LEAST_TILE = 32
# Of products that multiplying limits; fitted to times on an H200 (docs/log.md).
PRODUCTS_PER_CYCLE = 1843
"""Multiplications and additions of a multiprocessor's tensor cores: 2,048 at best."""
WAIT_CYCLES = 100
"""For a step's last product, while other warpgroups multiply: the more there are, the less."""
READ_PER_CYCLE = 50
"""Bytes that a multiprocessor reads from the L2 cache."""
SLOWED = 0.3
"""By how much of the shorter time multiplying and reading slow each other down."""
TILE_CYCLES, WRITE_CYCLES = 4000, 20
"""What a tile costs beside its steps, and for each of the weight's rows."""
BETTER = 0.9
"""Tiles gain if the multiprocessor that has most computes at most so much of what it computes of
blocks."""


@dataclass(frozen=True)
class ProductPlan:
    """Tiles of 64 * ``groups`` rows of x by ``tile`` rows of the weight (of both halves together,
    if ``gated``), and ``stages`` steps in flight. ``largest``: of the outputs of a tile it is only
    asked which is the largest. ``shares``: of the inputs, whose sums are results of their own."""

    groups: int
    tile: int
    stages: int
    gated: bool
    largest: bool = False
    shares: int = 1

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return self.tile // 2 if self.gated else self.tile

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32

    @property
    def shared_bytes(self) -> int:
        return self.stages * stage_bytes(self.groups, self.tile) + ALIGNMENT


def stage_bytes(groups: int, tile: int) -> int:
    """Shared memory of a step: its numbers and two barriers."""
    return (GROUP * groups + tile) * STEP * 2 + 16


def product_plan(
    rows: int, outputs: int, inputs: int, gated: bool, sms: int, shared: int, largest: bool = False
) -> ProductPlan | None:
    """The plan for ``rows`` of bf16, on ``sms`` multiprocessors of ``shared`` bytes of memory, or
    None where Triton's kernels are as good. ``gated``: ``outputs`` are those after gating;
    ``largest`` as ``ProductPlan`` has it."""
    if rows > (MOST_MANY_ROWS if gated or largest else MOST_ROWS):
        return None
    if outputs % 8 or inputs % 8:
        return None
    if rows > MOST_ROWS:
        return _of_many_rows(rows, outputs, inputs, gated, sms, shared, largest)
    groups, halves = -(-rows // GROUP), 2 if gated else 1
    if groups == 1 and not gated and not largest:
        return None
    if rows in FEW_ROWS and halves * outputs * inputs > LARGE and not largest:
        return None

    def turns(width: int) -> int:
        """Tiles of ``width`` outputs of the multiprocessor that has most."""
        tiles = -(-outputs // width)
        return -(-tiles // sms)

    def cost(tile: int) -> int:
        """Numbers that it multiplies: rows of x come once for every tile, from the L2 cache."""
        return turns(tile // halves) * (tile + GROUP * groups // 2)

    tile = min(range(8 * halves, WIDEST[groups, gated] + 1, 8 * halves), key=cost)
    width = tile // halves
    balanced = turns(width) * width <= BETTER * turns(BLOCK) * BLOCK
    if not balanced and (gated or turns(BLOCK) == 1):
        return None
    stages = min(MOST_STAGES, turns(width) * -(-inputs // STEP))
    stages = min(stages, (shared - ALIGNMENT) // stage_bytes(groups, tile))
    return ProductPlan(groups, tile, stages, gated, largest) if stages > 1 else None


def _of_many_rows(
    rows: int, outputs: int, inputs: int, gated: bool, sms: int, shared: int, largest: bool
) -> ProductPlan | None:
    """The plan for products that multiplying limits, not reading the weight."""
    halves = 2 if gated else 1

    def cost(groups: int, tile: int) -> float:
        """Cycles of the multiprocessor that has most tiles."""
        height = GROUP * groups
        tiles = -(-rows // height) * -(-outputs // (tile // halves))
        multiplying = height * tile * STEP / PRODUCTS_PER_CYCLE + WAIT_CYCLES / groups
        reading = (height + tile) * STEP * 2 / READ_PER_CYCLE
        step = max(multiplying, reading) + SLOWED * min(multiplying, reading)
        return -(-tiles // sms) * (inputs / STEP * step + TILE_CYCLES + WRITE_CYCLES * tile)

    tiles = [
        (groups, tile)
        for (groups, each), widest in WIDEST.items()
        if each == gated and groups > 1
        for tile in range(8 * halves, widest + 1, 8 * halves)
        if 2 * stage_bytes(groups, tile) <= shared - ALIGNMENT
    ]
    if not tiles:
        return None
    groups, tile = min(tiles, key=lambda each: cost(*each))
    stages = min(MOST_STAGES, (shared - ALIGNMENT) // stage_bytes(groups, tile))
    return ProductPlan(groups, tile, stages, gated, largest)


def shared_plan(
    rows: int, outputs: int, inputs: int, shares: int, sms: int, shared: int
) -> ProductPlan | None:
    """The plan for the sums of ``shares`` of the inputs, each a program's own; None where Triton's
    kernels are as good, there are more of them than multiprocessors, or one of them is empty.
    (Times of several models' shapes on an H200: docs/log.md.)"""
    share = share_length(inputs, shares)
    if outputs * inputs > SMALL:
        most = 384 if share > LONG_SHARE else 320
        if not (128 < rows <= 192 or 256 < rows <= most):
            return None
    if rows > 512 or outputs % 8 or inputs % 8 or filled_shares(inputs, shares) < shares:
        return None
    down = 1 if rows <= 192 else 2
    groups = -(-rows // (GROUP * down))
    across = sms // (down * shares)
    if not across:
        return None
    tile = max(LEAST_TILE, -(-outputs // (8 * across)) * 8)
    # Fewer multiprocessors, which read the rows less often.
    tile += 8 * (down == 1 and groups > 1)
    stages = min(MOST_STAGES, -(-share // STEP), (shared - ALIGNMENT) // stage_bytes(groups, tile))
    if tile > WIDEST[groups, False] or stages < 2:
        return None
    return ProductPlan(groups, tile, stages, False, shares=shares)
