"""How a product of few rows is cut: measured sizes where there are some, else by rule."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 128
"""More rows than this are cuBLAS's."""


@dataclass(frozen=True)
class MatmulPlan:
    """A program computes ``block_n`` outputs of all rows in steps of ``block_k`` inputs;
    ``split_k`` programs share the inputs of the same outputs.

    ``prefetch``: inputs of each weight row that are asked for before the kernel ahead has ended.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0


TUNED: dict[tuple[int, int, int, bool], MatmulPlan | None] = {}
"""(rows rounded up to a power of two >= 16, outputs, inputs, gated) -> plan, or None where cuBLAS
measured better. For a gated product, outputs are those after gating. Measured on an H100 by
``python -m surefoot.bench.tune_cuda``; what is not here goes by ``default_plan``."""


def rows_bucket(rows: int) -> int:
    return max(16, 1 << max(0, rows - 1).bit_length())


def plan_for(
    rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int
) -> MatmulPlan | None:
    """The plan for ``rows`` <= 128 of ``itemsize`` bytes a number; None for cuBLAS.
    ``gated``: two products share a program."""
    key = (rows_bucket(rows), outputs, inputs, gated)
    if itemsize == 2 and key in TUNED:
        return TUNED[key]
    return default_plan(rows, outputs, inputs, gated, itemsize, sms)


def default_plan(
    rows: int, outputs: int, inputs: int, gated: bool, itemsize: int, sms: int
) -> MatmulPlan:
    """Weights must stream on every multiprocessor: shares of the inputs where blocks of outputs
    leave some idle, and as many steps in flight as shared memory holds twice."""
    bucket = rows_bucket(rows)
    if itemsize == 4:  # No tensor cores: sizes that registers hold.
        return MatmulPlan(32, 32, num_warps=4 if bucket <= 32 else 8, num_stages=2)
    block_n = 128 if bucket >= 64 and not gated else 64
    block_k = 128 if bucket <= 64 else 64
    programs = -(-outputs // block_n)
    split_k = 1
    if not gated:
        most = max(1, inputs // (4 * block_k))
        split_k = max(1, min(8, most, round(1.5 * sms / programs)))
    stage = (block_n * (2 if gated else 1) + bucket) * block_k * itemsize
    return MatmulPlan(
        block_n,
        block_k,
        split_k,
        num_warps=8 if bucket >= 64 else 4,
        num_stages=max(2, min(5, 110_000 // stage)),
        prefetch=min(inputs, 512),
    )
