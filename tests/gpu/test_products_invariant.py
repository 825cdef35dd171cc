"""A row's result alone is the same bits as among any number of others, through every operation of
the backend that multiplies with a weight."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from surefoot.kernels.backend import AttentionShape, FlatBatch, RopeTable
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.products import TritonLinear
from surefoot.kernels.triton.qkv import queries

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_numbers")]
DTYPES = (torch.bfloat16, torch.float32)
EPS, BLOCK, POSITIONS = 1e-6, 16, 4096
CHOSEN = 12
"""Rows that are looked at alone, and numbers of rows that each is looked at among."""
LARGEST_LOGITS = 600
"""Rows."""


@dataclass(frozen=True)
class Model:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool
    bias: bool = False


MODELS = {
    "Qwen3-4B": Model(2560, 9728, 32, 8, 128, 151936, True),
    "SmolLM2-135M": Model(576, 1536, 9, 3, 64, 49152, False),
    "biased": Model(896, 4864, 14, 2, 64, 4096, False, bias=True),
    "Qwen3-0.6B": Model(1024, 3072, 16, 8, 128, 4096, True),
}
Operation = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
cases = pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in MODELS for dtype in DTYPES]
)


def row_counts(most: int) -> list[int]:
    """Borders of kernels and plans, and what chance brings."""
    fixed = (2, 16, 17, 64, 80, 128, 129, 192, 256, 320, 512, 1024, 4096)
    drawn = [random.randint(1, most) for _ in range(CHOSEN)]
    return sorted({count for count in (*fixed, *drawn) if count <= most})


def hold(run: Operation, width: int, dtype: torch.dtype, most: int = 4096) -> None:
    """``run`` on any number of the rows of one matrix: row by row the same bits."""
    x = torch.randn(most, width, dtype=dtype)
    rows = {0, *(random.randrange(most) for _ in range(CHOSEN))}
    alone = {row: run(x[row : row + 1].clone()) for row in rows}
    for count in row_counts(most):
        # With one of the rows, at least, wherever it lies among the others.
        chosen = random.choice(sorted(rows)) - random.randrange(count)
        first = min(max(chosen, 0), most - count)
        found = run(x[first : first + count].clone())
        for row in rows:
            if first <= row < first + count:
                for part, expected in zip(found, alone[row], strict=True):
                    same = torch.equal(part[row - first], expected[0])
                    assert same, _difference(run, x, row, first, count, found, alone[row])


def _difference(
    run: Operation,
    x: torch.Tensor,
    row: int,
    first: int,
    count: int,
    found: tuple[torch.Tensor, ...],
    alone: tuple[torch.Tensor, ...],
) -> str:
    """What is known of one that may not happen again: in which of the results, how large, and which
    side another try confirms."""
    lines = [f"row {row - first} of {count}"]
    others = run(x[first : first + count].clone()), run(x[row : row + 1].clone())
    for index, (part, single, *again) in enumerate(zip(found, alone, *others, strict=True)):
        here = part[row - first]
        apart = (here.float() - single[0].float()).abs()
        lines.append(
            f"result {index}: {int((apart > 0).sum())} of {apart.numel()} numbers differ, by"
            f" {float(apart.max()):.3g} at most; again among others"
            f" {'the same' if torch.equal(again[0][row - first], here) else 'another'}, alone"
            f" {'the same' if torch.equal(again[1], single) else 'another'}; of all rows"
            f" {int((again[0] != part).any(dim=-1).sum())} are others"
        )
    return "; ".join(lines)


def packed(backend: TritonBackend, outputs: int, inputs: int, bias: bool = False) -> TritonLinear:
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    return backend.pack_linear([weight], torch.randn(outputs) if bias else None)


@cases
def test_linears(name: str, dtype: torch.dtype) -> None:
    """Plain, with gating, with the residual added, and with the norm behind it."""
    model, backend = MODELS[name], TritonBackend("cuda", dtype)
    most = 4096 if dtype is torch.bfloat16 else 1024
    heads = model.heads * model.head_dim
    norm = torch.rand(model.hidden, dtype=dtype) + 0.5, EPS
    width = heads + 2 * model.kv_heads * model.head_dim
    plain = packed(backend, width, model.hidden, model.bias)
    gate_up = packed(backend, 2 * model.inner, model.hidden, model.bias)
    # As at the start of an engine, for cuBLAS to take part.
    for linear, gated in ((plain, False), (gate_up, True)):
        if dtype is torch.bfloat16:
            backend.choices.find([linear], [192, 256, 512, 1024, 4096], gated)
    hold(lambda x: (backend.linear(plain, x),), model.hidden, dtype, most)
    hold(lambda x: (gate_up.gated(x),), model.hidden, dtype, most)
    for inputs in (heads, model.inner):
        linear = packed(backend, model.hidden, inputs, model.bias)

        def after(x: torch.Tensor, linear: TritonLinear = linear) -> tuple[torch.Tensor, ...]:
            residual = x[:, : model.hidden].contiguous()
            return linear.added(x, residual), *linear.added_normed(x, residual, norm)

        hold(after, inputs, dtype, most)


@cases
def test_logits_and_the_greedy_choice(name: str, dtype: torch.dtype) -> None:
    model, backend = MODELS[name], TritonBackend("cuda", dtype)
    head = packed(backend, model.vocabulary, model.hidden)
    norm = torch.rand(model.hidden, dtype=dtype) + 0.5
    most = LARGEST_LOGITS if dtype is torch.bfloat16 else 200
    hold(lambda x: (backend.head(norm, EPS, head, x),), model.hidden, dtype, most)
    hold(lambda x: (backend.greedy(norm, EPS, head, x)[:, None],), model.hidden, dtype, most)


@cases
def test_queries_keys_and_values(name: str, dtype: torch.dtype) -> None:
    """Rows have positions and keys of their own, whoever shares the batch."""
    model, backend = MODELS[name], TritonBackend("cuda", dtype)
    shape = AttentionShape(model.heads, model.kv_heads, model.head_dim, 1.0)
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    linear = packed(backend, width, model.hidden, model.bias)
    norms = None
    if model.qk_norm:
        norms = tuple(torch.rand(model.head_dim, dtype=dtype) + 0.5 for _ in "12")
    angles = torch.rand(POSITIONS, model.head_dim // 2) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    most = 4096 if dtype is torch.bfloat16 else 1024
    if dtype is torch.bfloat16:
        backend.choices.find([linear], [192, 256, 512, 1024], split_k=0 if model.qk_norm else 1)
    x, place = torch.randn(most, model.hidden, dtype=dtype), torch.randperm(POSITIONS)[:most]
    table = torch.arange(POSITIONS // BLOCK).int()[None]

    def run(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = place[first : first + count].clone()
        batch = FlatBatch(
            tokens=torch.zeros_like(keys),
            positions=keys,
            key_index=keys,
            row_slot=torch.zeros_like(keys),
            block_tables=table,
            span_start=torch.zeros(1, dtype=torch.int64),
            max_keys=POSITIONS,
        )
        size = (2, POSITIONS // BLOCK, model.kv_heads, BLOCK, model.head_dim)
        kv = torch.zeros(size, dtype=dtype)
        part = x[first : first + count].clone()
        return queries(linear, part, kv, batch, shape, rope, norms, EPS), kv

    rows = {0, *(random.randrange(most) for _ in range(CHOSEN))}
    alone = {row: run(row, 1) for row in rows}
    for count in row_counts(most):
        first = random.randint(0, most - count)
        q, kv = run(first, count)
        for row in rows:
            if first <= row < first + count:
                expected, own = alone[row]
                assert torch.equal(q[row - first], expected[0]), (count, row - first)
                block, within = divmod(int(place[row]), BLOCK)
                assert torch.equal(kv[:, block, :, within], own[:, block, :, within]), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plan_gives_the_same_bits(dtype: torch.dtype) -> None:
    """At odd sizes: rows that descriptors do not take, last shares of few inputs."""
    from surefoot.kernels.triton.large_plan import LargePlan, candidates
    from surefoot.kernels.triton.launch import shared_memory
    from surefoot.kernels.triton.matmul_plan import MatmulPlan
    from surefoot.kernels.triton.products import matmul

    for outputs, inputs in ((1021, 1003), (1000, 1032)):
        weight = torch.randn(outputs, inputs, dtype=dtype) * 0.05
        bias, x = torch.randn(outputs, dtype=dtype), torch.randn(333, inputs, dtype=dtype)
        residual = torch.randn(333, outputs, dtype=dtype)
        for split_k in (1, 3):
            few = MatmulPlan(64, 64, split_k) if dtype is torch.bfloat16 else MatmulPlan(32, 32)
            few = replace(few, split_k=split_k)
            expected = matmul(x[:7].clone(), weight, bias, residual[:7].clone(), plan=few)
            if dtype is torch.bfloat16:
                plans = list(candidates(False, 2, shared_memory(x.device), split_k))
            else:
                spread = (False, True)[:split_k]
                plans = [
                    LargePlan(64, 64, 16, split_k, each, 8, 2, more=more)
                    for each in spread
                    for more in (0, 16)
                ]
            for plan in plans:
                found = matmul(x, weight, bias, residual, plan=plan)
                assert torch.equal(found[:7], expected), plan


@pytest.mark.parametrize("inputs", [1032, 4096, 8])
@pytest.mark.parametrize("split_k", [2, 3])
def test_plans_that_load_ahead_give_the_same_bits(split_k: int, inputs: int) -> None:
    """With shares that are empty, tiles that stick out, several tiles a program."""
    from surefoot.kernels.triton.large_plan import candidates
    from surefoot.kernels.triton.launch import hopper, shared_memory
    from surefoot.kernels.triton.matmul_plan import MatmulPlan
    from surefoot.kernels.triton.products import matmul

    x = torch.randn(3000, inputs, dtype=torch.bfloat16)
    if not hopper(x.device):
        pytest.skip("they are for Hopper")
    for outputs in (1000, 64, 2560):
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16) * 0.05
        residual = torch.randn(3000, outputs, dtype=torch.bfloat16)
        few = MatmulPlan(64, 64, split_k)
        plans = [p for p in candidates(False, 2, shared_memory(x.device), split_k, True) if p.ahead]
        assert len(plans) == 6
        for rows in (130, 513, 3000):
            at = random.randrange(rows - 7)
            some = x[at : at + 7].clone(), weight, None, residual[at : at + 7].clone()
            expected = matmul(*some, plan=few)
            for plan in plans:
                found = matmul(x[:rows], weight, None, residual[:rows], plan=plan)
                assert torch.equal(found[at : at + 7], expected), (plan, rows, outputs)
                assert not found.isnan().any()
