"""Measures plans for the products of a model on this GPU and prints a table of the best.

``python -m surefoot.bench.tune_cuda [--config FILE] [--rows 16,32,64,128]`` compiles every
candidate in parallel, times each in a captured chain of launches over more weights than the cache
holds (with the sum and norm that follow it in a model), and prints lines for
``kernels.triton.matmul_plan.TUNED``. cuBLAS is one of the candidates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.bench.kernels_cuda import QWEN3_4B, seconds
from surefoot.kernels.triton.matmul_plan import MatmulPlan

SHARED_MEMORY = 227_000
CACHE = 300e6
EPS = 1e-6
Product = tuple[str, int, int]
"""Name, outputs (before gating), inputs."""


def products_of(config: dict[str, Any]) -> list[Product]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["heads"] * config["head_dim"], config["kv_heads"] * config["head_dim"]
    return [
        ("qkv", q + 2 * kv, hidden),
        ("o", hidden, q),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", config["vocab_size"], hidden),
    ]


def candidates(rows: int, product: Product) -> Iterator[MatmulPlan]:
    """Plans that fit the multiprocessor; ``prefetch`` is left at its default."""
    name, outputs, inputs = product
    tiles = 2 if name == "gate_up" else 1
    splits = (1,) if name in ("gate_up", "head") else (1, 2, 3, 4, 6, 8)
    for block_n in (64, 128):
        for block_k in (64, 128, 256):
            stage = (tiles * block_n + rows) * block_k * 2
            for warps in (4, 8):
                if warps == 8 and block_n == 64 and rows <= 16:
                    continue
                if warps == 4 and tiles * block_n * rows > 128 * 128:
                    continue
                for total in (75_000, 112_000, 225_000):
                    stages = total // stage
                    if not 2 < stages <= 8 or (total == 225_000 and stages == 112_000 // stage):
                        continue
                    for split in splits:
                        programs = -(-outputs // tiles // block_n) * split
                        if split > 1 and not 60 <= programs <= 400:
                            continue
                        if inputs // split < 2 * block_k:
                            continue
                        yield MatmulPlan(block_n, block_k, split, warps, stages, 512)


def runner(
    product: Product, x: torch.Tensor, weights: list[torch.Tensor], plan: MatmulPlan | None
) -> Callable[[], None]:
    """The product over each of ``weights`` and whatever follows it in a model."""
    from surefoot.kernels.triton.backend import TritonLinear

    name, outputs, _ = product

    class Planned(TritonLinear):
        def plan(self, x: torch.Tensor, gated: bool = False) -> MatmulPlan | None:
            return plan

    linears = [Planned(weight, None) for weight in weights]
    residual = x.new_empty((x.shape[0], outputs)).normal_()
    norm = x.new_ones(outputs), EPS

    def run() -> None:
        for linear in linears:
            if name in ("o", "down"):
                linear.added_normed(x, residual, norm)
            elif name == "gate_up":
                linear.gated(x)
            elif name == "head":
                linear.wide(x)
            else:
                linear(x)

    return run


def compile_one(job: tuple[int, Product, MatmulPlan]) -> str | None:
    """Compile by running on a small matrix; what the kernel is specialised for stays equal."""
    rows, (name, _, _), plan = job
    try:
        product = (name, 512, 1024)
        weight = torch.zeros((512, product[2]), device="cuda", dtype=torch.bfloat16)
        x = weight.new_zeros((rows, product[2]))
        runner(product, x, [weight], plan)()
        torch.cuda.synchronize()
    except Exception as error:  # A plan that does not fit is no candidate.
        return str(error)[:200]
    return None


def tune(
    product: Product, rows: int, plans: list[MatmulPlan | None]
) -> list[tuple[float, MatmulPlan | None]]:
    """(microseconds, plan), the best first."""
    name, outputs, inputs = product
    count = max(2, min(16, round(CACHE / (outputs * inputs * 2))))
    weights = [
        torch.randn((outputs, inputs), device="cuda", dtype=torch.bfloat16) for _ in range(count)
    ]
    x = torch.randn((rows, inputs), device="cuda", dtype=torch.bfloat16)
    results = []
    for plan in plans:
        try:
            results.append((1e6 * seconds(runner(product, x, weights, plan), 7) / count, plan))
        except Exception as error:
            print(product, rows, plan, str(error)[:100])
    return sorted(results, key=lambda result: result[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON with a ModelConfig's sizes")
    parser.add_argument("--rows", default="16,32,64,128")
    parser.add_argument("--names", default="qkv,o,gate_up,down,head")
    parser.add_argument("--out", type=Path, help="JSON file for every measurement")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text()) if arguments.config else QWEN3_4B
    products = [p for p in products_of(config) if p[0] in arguments.names.split(",")]
    buckets = [int(rows) for rows in arguments.rows.split(",")]
    jobs = [(rows, p, plan) for rows in buckets for p in products for plan in candidates(rows, p)]
    started = time.time()
    # Shares are no constant of a kernel; one number of them stands for all.
    kernels = {
        (rows, (name, 0, 0), replace(plan, split_k=min(2, plan.split_k)))
        for rows, (name, _, _), plan in jobs
    }
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        failed = [error for error in pool.imap_unordered(compile_one, kernels) if error]
    print(f"{len(jobs)} plans, {len(kernels)} kernels, {len(failed)} failed, {time.time() - started:.0f} s", failed[:2])
    everything = []
    for product in products:
        name, outputs, inputs = product
        for rows in buckets:
            plans = [None, *(plan for r, p, plan in jobs if r == rows and p == product)]
            results = tune(product, rows, plans)
            cublas = next(us for us, plan in results if plan is None)
            gated = name == "gate_up"
            key = (rows, outputs // 2 if gated else outputs, inputs, gated)
            best = results[0][1]
            print(f"    {key}: {plan_text(best)},  # {name} {results[0][0]:.1f} us, {cublas:.1f}")
            everything += [(name, rows, us, plan_text(plan)) for us, plan in results]
    print(f"{time.time() - started:.0f} s")
    if arguments.out:
        arguments.out.write_text("\n".join(json.dumps(row) for row in everything))


def plan_text(plan: MatmulPlan | None) -> str:
    if plan is None:
        return "None"
    numbers = plan.block_n, plan.block_k, plan.split_k, plan.num_warps, plan.num_stages
    return f"MatmulPlan{(*numbers, plan.prefetch)}"


if __name__ == "__main__":
    main()
