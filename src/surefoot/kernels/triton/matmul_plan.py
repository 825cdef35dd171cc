"""How a product of few rows is cut: measured sizes where there are some, else by rule."""

from __future__ import annotations

from dataclasses import dataclass

GEMV_ROWS = 4
MAX_ROWS = 128


@dataclass(frozen=True)
class MatmulPlan:
    """A program computes ``block_n`` outputs in steps of ``block_k`` inputs; ``split_k`` programs
    share the inputs of the same outputs (only with a tensor-core product)."""

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4


TUNED: dict[tuple[int, int, int], MatmulPlan] = {}
"""(rows rounded up to a power of two, outputs, inputs) -> plan. For a gated product, outputs are
those after gating. What is not here goes by ``default_plan``."""


def rows_bucket(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()


def plan_for(rows: int, outputs: int, inputs: int, gated: bool, sms: int) -> MatmulPlan:
    """The plan for ``rows`` <= 128. ``gated``: two products share a program."""
    tuned = TUNED.get((rows_bucket(rows), outputs, inputs))
    return tuned or default_plan(rows, outputs, inputs, gated, sms)


def default_plan(rows: int, outputs: int, inputs: int, gated: bool, sms: int) -> MatmulPlan:
    """Weights must stream on every multiprocessor: the widest block of outputs that leaves a
    program for each, then shares of the inputs where even narrow blocks leave some idle."""
    if rows <= GEMV_ROWS:
        block_n = 2
        while block_n < (4 if gated else 8) and outputs >= 8 * block_n * sms:
            block_n *= 2
        return MatmulPlan(block_n, 2048 // block_n if gated else 4096 // block_n, num_stages=3)
    block_n = 16
    widest = 64 if rows > 64 or gated else 128
    while block_n < widest and outputs >= 2 * block_n * sms:
        block_n *= 2
    block_n = max(block_n, 32)
    block_k = 128 if rows <= 64 and block_n <= 64 else 64
    programs = -(-outputs // block_n)
    split_k = 1
    while split_k < 8 and 2 * programs * split_k <= sms and inputs >= 8 * split_k * block_k:
        split_k *= 2
    stages = 4 if rows <= 64 else 3
    return MatmulPlan(block_n, block_k, split_k, num_warps=4 if rows <= 64 else 8, num_stages=stages)
