"""Measures plans for the products of a model on this GPU and prints a table of the best.

``python -m surefoot.bench.tune_cuda [--config FILE] [--rows 16,32,64,128]`` compiles every
candidate in parallel and times each in a captured chain of launches over more weights than the
cache holds. Shares of the inputs are then settled, the same for any number of rows, and the best
few with them tried in place, in some layers of the model. Prints lines for
``kernels.triton.matmul_plan.TUNED``. cuBLAS's times stand beside, for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.bench.cuda_shapes import BLOCK, QWEN3_4B, make_batch, seconds
from surefoot.kernels.triton.matmul_plan import MatmulPlan
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights

CACHE = 300e6
EPS = 1e-6
Product = tuple[str, int, int]
"""Name, outputs (before gating), inputs."""
Ranking = list[tuple[float, MatmulPlan | None]]
"""(microseconds, plan), the best first; None for cuBLAS."""
Key = tuple[int, int, int, bool]
Table = dict[Key, MatmulPlan]
CONTEXT = 640


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
                    stages = min(total // stage, 8)
                    if stages < 3 or (total == 225_000 and stages == min(112_000 // stage, 8)):
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
    from surefoot.kernels.triton.products import TritonLinear

    name, outputs, _ = product
    if plan is None:

        def cublas() -> None:
            for weight in weights:
                torch.mm(x, weight.T)

        return cublas

    class Planned(TritonLinear):
        def plan(
            self, x: torch.Tensor, gated: bool = False, split_k: int = 0, plain: bool = True
        ) -> MatmulPlan:
            return plan

        def cuda_plan(self, x: torch.Tensor, gated: bool) -> None:
            """It is Triton's kernels that are measured."""

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


def tune(product: Product, rows: int, plans: list[MatmulPlan | None]) -> Ranking:
    """Time ``plans``."""
    _, outputs, inputs = product
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


def settle_shares(ranked: dict[int, Ranking]) -> int:
    """The number of shares whose best plans cost least, summed over the numbers of rows."""

    def cost(split: int) -> float:
        best = [
            min((us for us, plan in results if plan and plan.split_k == split), default=math.inf)
            for results in ranked.values()
        ]
        return sum(us / results[0][0] for us, results in zip(best, ranked.values(), strict=True))

    splits = {plan.split_k for results in ranked.values() for _, plan in results if plan}
    return min(splits, key=cost)


def shortlist(results: Ranking, split: int, count: int) -> list[MatmulPlan]:
    """The best plans with ``split`` shares."""
    return [plan for _, plan in results if plan and plan.split_k == split][:count]


def refine(
    config: ModelConfig, rows: int, table: Table, choices: dict[Key, list[MatmulPlan]]
) -> None:
    """Set ``table``'s entries for ``rows`` to those of ``choices`` that are best in a few layers
    of the model, one product after the other. One request up to 16 rows, else one for each."""
    from surefoot.kernels.triton.backend import TritonBackend

    weights = DummyWeights(config, torch.device("cuda"), torch.bfloat16)
    decoder = Decoder(config, weights, TritonBackend())
    requests = 1 if rows <= 16 else rows
    batch = make_batch(requests, 1, CONTEXT, config.vocab_size)
    blocks = requests * (-(-(CONTEXT + 1) // BLOCK)) + 1
    kv = decoder.backend.allocate_kv(config.layers, blocks, BLOCK, decoder.shape)
    for pool in kv:
        pool.normal_()

    def measure() -> float:
        return 1e6 * seconds(lambda: decoder.forward(batch, kv), 15) / config.layers

    for key, plans in choices.items():
        table[key] = plans[0]
    for key, plans in choices.items():
        trials = []
        for plan in plans:
            share = key[2] // plan.split_k
            ahead = (0, 256, 512, 1024, share)
            for count in sorted({min(share, count) // 16 * 16 for count in ahead}):
                table[key] = replace(plan, prefetch=count)
                trials.append((measure(), table[key]))
        trials.sort(key=lambda trial: trial[0])
        table[key] = trials[0][1]
        print(rows, key, [(round(us, 2), plan_text(plan)) for us, plan in trials[:3]], flush=True)


def main() -> None:
    from surefoot.kernels.triton.matmul_plan import TUNED

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON with a ModelConfig's sizes")
    parser.add_argument("--rows", default="16,32,64,128")
    parser.add_argument("--out", type=Path, help="JSON lines for every measurement")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text()) if arguments.config else QWEN3_4B
    products = products_of(config)
    buckets = [int(rows) for rows in arguments.rows.split(",")]
    jobs = [(rows, p, plan) for rows in buckets for p in products for plan in candidates(rows, p)]
    compile_all(jobs)
    choices: dict[int, dict[Key, list[MatmulPlan]]] = {rows: {} for rows in buckets}
    lines = []
    for product in products:
        name, outputs, inputs = product
        ranked = {}
        for rows in buckets:
            plans = [None, *(plan for r, p, plan in jobs if r == rows and p == product)]
            ranked[rows] = tune(product, rows, plans)
            best = [(round(us, 1), plan_text(plan)) for us, plan in ranked[rows][:3]]
            cublas = next(us for us, plan in ranked[rows] if plan is None)
            print(f"{name} {rows}: cuBLAS {cublas:.1f} us, {best}", flush=True)
            lines += [(name, rows, us, plan_text(plan)) for us, plan in ranked[rows]]
        split = settle_shares(ranked)
        for rows in buckets:
            gated = name == "gate_up"
            key = (rows, outputs // 2 if gated else outputs, inputs, gated)
            choices[rows][key] = shortlist(ranked[rows], split, 1 if name == "head" else 4)
    small = ModelConfig(**{**config, "layers": min(config["layers"], 6)})
    for rows in buckets:
        refine(small, rows, TUNED, choices[rows])
    for rows in buckets:
        for key in choices[rows]:
            print(f"    {key}: {plan_text(TUNED[key])},")
    if arguments.out:
        arguments.out.write_text("\n".join(json.dumps(line) for line in lines))


def compile_all(jobs: list[tuple[int, Product, MatmulPlan]]) -> None:
    """Compile the kernels of ``jobs`` on all processors, into Triton's cache."""
    # Neither shares nor prefetching are constants of a kernel.
    kernels = {
        (rows, (name, 0, 0), replace(plan, split_k=min(2, plan.split_k)))
        for rows, (name, _, _), plan in jobs
    }
    started = time.time()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        failed = [error for error in pool.imap_unordered(compile_one, kernels) if error]
    print(f"{len(kernels)} kernels in {time.time() - started:.0f} s, failed: {failed[:2]}")


def plan_text(plan: MatmulPlan | None) -> str:
    if plan is None:
        return "None"
    numbers = plan.block_n, plan.block_k, plan.split_k, plan.num_warps, plan.num_stages
    return f"MatmulPlan{(*numbers, plan.prefetch)}"


if __name__ == "__main__":
    main()
