"""When ``product.cu`` computes a product, and how: by rule.

It is for weights whose blocks of 64 outputs leave multiprocessors idle in Triton's kernels (9,728
gated outputs are 152 blocks, for 132 of them), and for those of more blocks than there are
multiprocessors, since its steps run on from tile to tile. Up to 64 rows, and with large weights up
to 80, Triton's kernels are as good or better; beyond 192 nothing is gained (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 64
"""Inputs of a step, as ``product.cu`` has it."""
GROUP = 64
"""Rows of x that a warpgroup multiplies."""
FEWEST_ROWS, MOST_ROWS = 65, 192
FEW_ROWS, LARGE = 80, 2**25
"""With up to so many rows, weights of more numbers are left to Triton."""
BLOCK = 64
"""Outputs that a program of ``triton.matmul`` computes."""
WIDEST = {(2, False): 256, (2, True): 192, (3, False): 192, (3, True): 160}
"""Most rows of a weight's tile, by (groups, gated): what registers hold."""
MOST_STAGES = 12
ALIGNMENT = 1024
"""Bytes that the ring's place in shared memory is a multiple of."""
BETTER = 0.9
"""Tiles gain if the multiprocessor that has most computes at most so much of what it computes of
blocks."""


@dataclass(frozen=True)
class ProductPlan:
    """For up to 64 * ``groups`` rows of x: ``tile`` rows of the weight at a time (of both halves
    together, if ``gated``), and ``stages`` steps in flight."""

    groups: int
    tile: int
    stages: int
    gated: bool

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
    rows: int, outputs: int, inputs: int, gated: bool, sms: int, shared: int
) -> ProductPlan | None:
    """The plan for ``rows`` of bf16, on ``sms`` multiprocessors of ``shared`` bytes of memory, or
    None where Triton's kernels are as good. ``gated``: ``outputs`` are those after gating."""
    if not FEWEST_ROWS <= rows <= MOST_ROWS or outputs % 8 or inputs % 8:
        return None
    groups, halves = -(-rows // GROUP), 2 if gated else 1
    if rows <= FEW_ROWS and halves * outputs * inputs > LARGE:
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
    return ProductPlan(groups, tile, stages, gated) if stages > 1 else None
