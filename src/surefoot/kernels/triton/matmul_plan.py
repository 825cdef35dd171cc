"""How a product of few rows is cut: measured sizes where there are some, else by rule."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.kernels.triton.launch import next_power_of_2

MAX_ROWS = 128
"""More rows than this go by ``large_plan``."""
BLOCK_N = 64
SHORTEST_SHARE = 256
"""Inputs."""
SHARE_UNIT = 256
"""A share of the inputs is a multiple of this, and this one of every ``block_k``."""
PREFETCH = 512
"""Inputs of a weight row; between 256 and 1024 it hardly mattered (docs/log.md)."""


@dataclass(frozen=True)
class MatmulPlan:
    """A program computes ``block_n`` outputs of all rows in steps of ``block_k`` inputs;
    ``split_k`` programs share the inputs of the same outputs.

    ``prefetch``: inputs of each weight row, a multiple of 16, that are asked for before the kernel
    ahead has ended.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0


TUNED_ON = 132, 232_448
"""Multiprocessors and shared memory of an H100 or H200 SXM."""
TUNED: dict[tuple[int, int, int, bool], MatmulPlan] = {
    (16, 6144, 2560, False): MatmulPlan(64, 256, 1, 4, 5, 512),
    (16, 2560, 4096, False): MatmulPlan(64, 256, 3, 4, 5, 512),
    (16, 9728, 2560, True): MatmulPlan(64, 128, 1, 4, 3, 256),
    (16, 2560, 9728, False): MatmulPlan(64, 128, 3, 4, 5, 256),
    (16, 151936, 2560, False): MatmulPlan(64, 256, 1, 4, 5, 512),
    (32, 6144, 2560, False): MatmulPlan(64, 256, 1, 4, 4, 512),
    (32, 2560, 4096, False): MatmulPlan(64, 256, 3, 4, 4, 512),
    (32, 9728, 2560, True): MatmulPlan(128, 128, 1, 4, 3, 512),
    (32, 2560, 9728, False): MatmulPlan(64, 256, 3, 4, 4, 512),
    (32, 151936, 2560, False): MatmulPlan(64, 128, 1, 4, 4, 256),
    (64, 6144, 2560, False): MatmulPlan(64, 128, 1, 4, 6, 512),
    (64, 2560, 4096, False): MatmulPlan(64, 128, 3, 4, 6, 512),
    (64, 9728, 2560, True): MatmulPlan(64, 64, 1, 4, 4, 512),
    (64, 2560, 9728, False): MatmulPlan(64, 128, 3, 4, 6, 512),
    (64, 151936, 2560, False): MatmulPlan(64, 128, 1, 4, 6, 512),
    (80, 6144, 2560, False): MatmulPlan(64, 128, 1, 4, 6, 512),
    (80, 2560, 4096, False): MatmulPlan(64, 128, 3, 4, 6, 512),
    (80, 9728, 2560, True): MatmulPlan(64, 64, 1, 4, 4, 512),
    (80, 2560, 9728, False): MatmulPlan(64, 128, 3, 4, 6, 512),
    (80, 151936, 2560, False): MatmulPlan(64, 128, 1, 4, 6, 512),
    (96, 6144, 2560, False): MatmulPlan(64, 128, 1, 4, 5, 512),
    (96, 2560, 4096, False): MatmulPlan(64, 128, 3, 4, 5, 512),
    (96, 9728, 2560, True): MatmulPlan(128, 64, 1, 8, 4, 512),
    (96, 2560, 9728, False): MatmulPlan(64, 128, 3, 4, 5, 512),
    (96, 151936, 2560, False): MatmulPlan(64, 64, 1, 4, 5, 512),
    (128, 6144, 2560, False): MatmulPlan(64, 64, 1, 4, 8, 512),
    (128, 2560, 4096, False): MatmulPlan(64, 128, 3, 4, 4, 512),
    (128, 9728, 2560, True): MatmulPlan(128, 64, 1, 8, 4, 512),
    (128, 2560, 9728, False): MatmulPlan(64, 128, 3, 4, 4, 512),
    (128, 151936, 2560, False): MatmulPlan(64, 64, 1, 4, 8, 512),
}
"""(rows rounded up to those of tiles, outputs, inputs, gated) -> plan. For a gated product, outputs
are those after gating. Measured on an H100 by ``python -m surefoot.bench.tune_cuda`` (Qwen3-4B's
shapes); the rest goes by ``default_plan``. A shape has one number of shares: see ``shares``."""


def row_tiles(rows: int) -> tuple[int, int]:
    """Rows of a program's tile and of a second one below it (0: there is none). Tiles are powers
    of two. With a second one, 80 rows do not pay for 128; at 48 it was no better than one of 64,
    half empty (docs/log.md)."""
    for more in (16, 32):
        if 64 < rows <= 64 + more:
            return 64, more
    return next_power_of_2(rows, 16), 0


def rows_bucket(rows: int) -> int:
    """The rows that ``rows`` are padded to: 16, 32, 64, 80, 96 or 128."""
    return sum(row_tiles(rows))


def shares(outputs: int, inputs: int, gated: bool, itemsize: int, sms: int, shared: int) -> int:
    """The number of shares of the inputs whose sums make up an output, for any number of rows:
    then a row's product is the same to the bit whoever shares the batch. Few rows need shares where
    blocks of outputs leave multiprocessors idle. None of them is empty. Arguments as
    ``plan_for``'s."""
    key = (16, outputs, inputs, gated)
    if itemsize == 2 and (sms, shared) == TUNED_ON and key in TUNED:
        return TUNED[key].split_k
    if gated or itemsize == 4:
        return 1
    count = max(1, min(8, sms // -(-outputs // BLOCK_N), -(-inputs // SHORTEST_SHARE)))
    return filled_shares(inputs, count)


def share_length(inputs: int, count: int) -> int:
    """Inputs of each of ``count`` shares but the last, which may be shorter, or, with those before
    it, empty: see ``filled_shares``."""
    return -(-inputs // (SHARE_UNIT * count)) * SHARE_UNIT


def filled_shares(inputs: int, count: int) -> int:
    """How many of ``count`` shares have inputs; so many are as long as these. Lengths are multiples
    of a unit: of 4,864 inputs seven of eight shares have all."""
    return -(-inputs // share_length(inputs, count))


def plan_for(
    rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int, shared: int
) -> MatmulPlan:
    """The plan for ``rows`` <= 128 of ``itemsize`` bytes a number, on ``sms`` multiprocessors of
    ``shared`` bytes of memory. ``gated``: two products share a program, and ``outputs`` are those
    after gating."""
    key = (rows_bucket(rows), outputs, inputs, gated)
    if itemsize == 2 and (sms, shared) == TUNED_ON and key in TUNED:
        return TUNED[key]
    return default_plan(rows, outputs, inputs, gated, itemsize, sms, shared)


def default_plan(
    rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int, shared: int
) -> MatmulPlan:
    """Weights must stream on every multiprocessor: shares of the inputs where blocks of outputs
    leave some idle, and as many steps in flight as shared memory holds, of one program or of two.
    """
    bucket = rows_bucket(rows)
    if itemsize == 4:  # No tensor cores: sizes that registers hold.
        return MatmulPlan(32, 32, num_warps=4 if bucket <= 32 else 8, num_stages=2)
    split_k, tiles = shares(outputs, inputs, gated, itemsize, sms, shared), 2 if gated else 1
    alone = -(-outputs // BLOCK_N) * split_k <= sms
    block_k = 128 if bucket <= (64 if gated else 96) else 64
    if alone and bucket <= 32 and not gated:
        block_k = 256
    stage = (BLOCK_N * tiles + bucket) * block_k * itemsize
    room = shared - 24_000 if alone else shared // 2 - 3_000
    while block_k > 64 and room // stage < 3:
        block_k, stage = block_k // 2, stage // 2
    stages = room // stage
    ahead = min(inputs, PREFETCH) // 16 * 16
    return MatmulPlan(BLOCK_N, block_k, split_k, num_stages=max(2, min(8, stages)), prefetch=ahead)
