"""The product in CUDA C++: the bits of Triton's kernels, for any shape and number of rows."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from surefoot.kernels import reference
from surefoot.kernels.cuda.product import Kept, available, multiply
from surefoot.kernels.cuda.product_plan import (
    ALIGNMENT,
    FEW_ROWS,
    GROUP,
    WIDEST,
    ProductPlan,
    product_plan,
    shared_plan,
    stage_bytes,
)
from surefoot.kernels.draws import CHANGED
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.drafting import TritonDrafting
from surefoot.kernels.triton.large_matmul import multiply_many
from surefoot.kernels.triton.large_plan import LargePlan
from surefoot.kernels.triton.launch import processors, shared_memory
from surefoot.kernels.triton.matmul_plan import shares
from surefoot.kernels.triton.norm import rms_norm
from surefoot.kernels.triton.products import TritonLinear, matmul
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, draws_of, sample_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_numbers"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or not available(torch.device("cuda")),
        reason="for Hopper",
    ),
]
SHAPES = [
    *((9728, 2560, True), (1536, 576, True), (12288, 4096, True), (1000, 1032, True)),
    *((151936, 2560, False), (49152, 576, False), (32000, 2560, False), (8456, 1000, False)),
]
"""Outputs, inputs, gated. 1,032 and 1,000 inputs: a last step that is partly empty; 1,000 and 8,456
outputs: a last tile that is."""


def run(x: torch.Tensor, weight: torch.Tensor, plan: ProductPlan) -> torch.Tensor:
    outputs, dtype = weight.shape[0], torch.float32
    if plan.gated:
        outputs, dtype = outputs // 2, torch.bfloat16
    # Whatever is not written shows.
    y = torch.full((x.shape[0], outputs), torch.nan, dtype=dtype)
    multiply(x, weight, y, plan)
    return y


def by_triton(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    dtype = torch.bfloat16 if gated else torch.float32
    return matmul(x, weight, silu=gated, dtype=dtype, plan=LargePlan(64, 64, 64))


def numbers(outputs: int, inputs: int, gated: bool, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, inputs, dtype=torch.bfloat16)
    weight = torch.randn(outputs * (1 + gated), inputs, dtype=torch.bfloat16) * 0.1
    return x, weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_bits_are_those_of_triton(shape: tuple[int, int, bool]) -> None:
    outputs, inputs, gated = shape
    card = processors(torch.device("cuda", 0)), shared_memory(torch.device("cuda", 0))
    few = (1, 16, 31, 32, 64, random.randint(1, 64))
    few += (65, 80, 97, 127, 128, 129, 160, 192, random.randint(65, 192))
    many = (193, 256, 384, 513, 1024, random.randint(193, 1024)) if gated else ()
    for rows in few + many:
        x, weight = numbers(outputs, inputs, gated, rows)
        plan = product_plan(rows, outputs, inputs, gated, *card)
        if plan is None:
            assert rows in FEW_ROWS or (rows <= GROUP and not gated)
            continue
        found = run(x, weight, plan)
        assert torch.equal(found, by_triton(x, weight, gated)), rows
        product = x.double() @ weight.double().T
        if gated:
            # Rounded where separate operations round.
            product = reference.silu_mul(product.to(torch.bfloat16)).double()
            assert (found.double() - product).abs().max() <= 0.02 * product.abs().max()
        else:
            assert (found.double() - product).abs().max() <= 1e-5 * product.abs().max()


@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_gives_the_same_bits(gated: bool) -> None:
    shared = shared_memory(torch.device("cuda", 0)) - ALIGNMENT
    for groups in (1, 2, 3, 4):
        # One tile high, or two, of which the second is partly empty.
        rows = random.randint(64 * groups - 63, 128 * groups)
        x, weight = numbers(1000, 520, gated, rows)
        expected = by_triton(x, weight, gated)
        for tile in range(16 if gated else 8, WIDEST[groups, gated] + 1, 16 if gated else 8):
            stages = min(random.randint(2, 12), shared // stage_bytes(groups, tile))
            plan = ProductPlan(groups, tile, stages, gated)
            assert torch.equal(run(x, weight, plan), expected), plan


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape[2]], ids=str)
def test_the_largest_of_a_row_is_that_of_its_logits(shape: tuple[int, int, bool]) -> None:
    outputs, inputs, _ = shape
    for rows in (1, 16, 64, 65, 128, 192, 193, 384, 1024, random.randint(1, 1024)):
        x, weight = numbers(outputs, inputs, False, rows)
        # Equal logits, in one tile and in two.
        weight[outputs // 2] = weight[1] = weight[0] = 3 * weight[2]
        linear = TritonLinear(weight, None)
        assert linear.largest_of_tiles(x) is not None
        logits = by_triton(x, weight, False)
        best, index = logits.max(dim=1)[0], linear.largest(x)
        lowest = (logits == best[:, None]).int().argmax(dim=1)
        assert torch.equal(index, lowest), rows
        tokens, chances = torch.empty_like(index), torch.empty(rows)
        ids = torch.randperm(outputs)
        drafting = TritonDrafting(TritonBackend(torch.device("cuda", 0), torch.bfloat16))
        norm, eps = torch.ones(inputs, dtype=torch.bfloat16), 1e-6
        drafting.likeliest_by_head(norm, eps, linear, x.unsqueeze(1), ids, tokens, chances, 64)
        logits = by_triton(rms_norm(x, norm, eps), weight, False).double()
        assert torch.equal(tokens, ids[logits.argmax(dim=1)])
        expected = logits.softmax(dim=1).max(dim=1)[0]
        torch.testing.assert_close(chances.double(), expected, rtol=1e-4, atol=0.0)


def test_every_tile_finds_the_largest() -> None:
    shared = shared_memory(torch.device("cuda", 0)) - ALIGNMENT
    for groups in (1, 2, 3, 4):
        rows = random.randint(64 * groups - 63, 128 * groups)
        x, weight = numbers(1000, 520, False, rows)
        logits = by_triton(x, weight, False)
        for tile in range(8, WIDEST[groups, False] + 1, 8):
            stages = min(random.randint(2, 12), shared // stage_bytes(groups, tile))
            plan = ProductPlan(groups, tile, stages, False, largest=True)
            parts = -(-1000 // tile)
            sums, totals = torch.full((2, rows, parts), torch.nan)
            index = torch.full((rows, parts), -1, dtype=torch.int32)
            multiply(x, weight, sums, plan, index, totals)
            padded = torch.nn.functional.pad(logits, (0, parts * tile - 1000), value=-torch.inf)
            padded = padded.view(rows, parts, tile)
            best, where = padded.max(dim=2)
            assert torch.equal(sums, best), plan
            found = (where + tile * torch.arange(parts)).int()
            assert torch.equal(index, found), plan
            expected = (padded - best[..., None]).double().exp().sum(dim=2)
            torch.testing.assert_close(totals.double(), expected, rtol=1e-4, atol=0.0)
            slots, use = torch.randint(-1, 9, (rows,)), torch.randint(0, 3, (9,))
            products = torch.full((rows, 1000), torch.nan)
            multiply(x, weight, sums, plan, index, totals, Kept(products, slots, use))
            assert torch.equal(sums, best) and torch.equal(index, found), plan
            kept = use[slots.clamp(min=0)] > 0
            assert torch.equal(products[kept], logits[kept]), plan
            assert products[~kept].isnan().all(), "nothing is written of the others"


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_samples_are_those_of_all_logits(vocab: int) -> None:
    """Whatever is wanted of which rows."""
    inputs = 576 if vocab == 49152 else 2560
    backend = TritonBackend(torch.device("cuda", 0), torch.bfloat16)
    norm, slots = torch.ones(inputs, dtype=torch.bfloat16), 40
    for rows in (1, 32, 64, 70, 128, 256, random.randint(1, 512)):
        x, weight = numbers(vocab, inputs, False, rows)
        linear = backend.pack_linear([weight])
        use = torch.randint(0, 3, (slots,))
        params = SlotParams(slots, vocab, torch.device("cuda", 0))
        params.use.copy_(use)
        drawn = (use > 0) & (torch.rand(slots) < 0.6)
        params.temperature.copy_(drawn * 0.9)
        params.top_p[: slots // 3], params.top_k[slots // 4 : slots // 2] = 0.9, 20
        params.seed.copy_(torch.randint(0, 2**62, (slots,)))
        of = torch.randint(0, slots, (rows,))
        history = torch.zeros(slots, 8, dtype=torch.int64)
        who = SampleRows(of, torch.randint(1, 99, (rows,)), history, 8)
        logits, told = backend.head_where_used(norm, 1e-6, linear, x, of, params.use)
        every = backend.head(norm, 1e-6, linear, x)
        assert told is not None
        assert torch.equal(logits[use[of] > 0], every[use[of] > 0])
        changed = (use[of] == CHANGED).nonzero()[:, 0]
        for each in (logits, every):
            each[changed, 17 + changed] = 200.0
        for stages in (SamplingStages(True, top_k=20, top_p=True), SamplingStages()):
            if not stages.noise:
                params.temperature.zero_()
            expected = sample_rows(every, who, params, stages, backend)
            found = backend.draw(logits, draws_of(who, params, stages.noise, told))
            assert torch.equal(found, expected), rows


@pytest.mark.parametrize(
    "shape",
    [(2560, 9728), (4096, 4096), (576, 1536), (576, 576), (896, 4864), (1024, 3072), (960, 2560)],
    ids=str,
)
def test_shares_are_those_of_triton(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    card = processors(torch.device("cuda", 0)), shared_memory(torch.device("cuda", 0))
    count = shares(outputs, inputs, False, 2, *card)
    assert count > 1
    for rows in (1, 64, 65, 128, 129, 192, 256, 257, 320, 384, 512, random.randint(1, 512)):
        x, weight = numbers(outputs, inputs, False, rows)
        spread = LargePlan(64, 64, 64, count, spread=True)
        expected = torch.empty(rows, outputs)
        expected = multiply_many(x, weight, None, None, False, expected, spread)
        assert expected is not None
        plan = shared_plan(rows, outputs, inputs, count, *card)
        found = TritonLinear(weight, None).shares_by_cuda(x)
        assert (found is None) == (plan is None)
        if plan is None:
            plan = ProductPlan(-(-rows // 128), 64, 4, False, shares=count)
            if plan.groups > 4:
                continue
            found = torch.full_like(expected, torch.nan)
            multiply(x, weight, found, plan)
        assert torch.equal(found, expected), rows


def test_every_tile_gives_the_same_shares() -> None:
    shared = shared_memory(torch.device("cuda", 0)) - ALIGNMENT
    for groups in (1, 2, 3, 4):
        rows = random.randint(64 * groups - 63, 128 * groups)
        # The last share is shorter, and ends within a step.
        x, weight = numbers(1000, 1400, False, rows)
        spread = LargePlan(64, 64, 64, 3, spread=True)
        expected = multiply_many(x, weight, None, None, False, torch.empty(rows, 1000), spread)
        assert expected is not None
        for tile in range(8, WIDEST[groups, False] + 1, 8):
            stages = min(random.randint(2, 12), shared // stage_bytes(groups, tile))
            found = torch.full_like(expected, torch.nan)
            multiply(x, weight, found, ProductPlan(groups, tile, stages, False, shares=3))
            assert torch.equal(found, expected), (groups, tile, stages)


def test_gates_at_their_limits() -> None:
    """Infinite, none, and so negative that SiLU's exponential overflows."""
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weight = torch.zeros(2 * 1536, 128, dtype=torch.bfloat16)
    limits = [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, 88.0, -88.0, -89.0, -200.0, torch.inf]
    limits += [-torch.inf, torch.nan]
    for index, gate in enumerate(limits):
        for place, up in enumerate(limits):
            weight[index * 16 + place, 0] = gate
            weight[1536 + index * 16 + place, 0] = up
    found = run(x, weight, ProductPlan(2, 32, 2, True))
    assert torch.equal(found.view(torch.int16), by_triton(x, weight, True).view(torch.int16))


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    x, weight = numbers(8456, 1000, False, 128)
    plan = ProductPlan(2, 64, 4, False)
    expected = run(x, weight, plan)
    x[7], x[90, 3] = torch.nan, torch.inf
    found, others = run(x, weight, plan), torch.ones(128, dtype=torch.bool)
    others[[7, 90]] = False
    assert torch.equal(found[others], expected[others])
    assert found[7].isnan().all()


def test_launched_one_behind_the_other_each_reads_what_the_one_before_wrote() -> None:
    """As in a model: the next kernel is let in early, by every product, a thousand times over."""
    backend = TritonBackend("cuda", torch.bfloat16)
    gate_up = backend.pack_linear([torch.randn(2 * 1536, 576) * 576**-0.5])
    down = backend.pack_linear([torch.randn(576, 1536) * 1536**-0.5])
    norm = torch.ones(576, dtype=torch.bfloat16), 1e-6
    start = torch.randn(128, 576, dtype=torch.bfloat16)

    def chain(times: int) -> torch.Tensor:
        x, normed = start, start
        for _ in range(times):
            x, normed = down.added_normed(gate_up.gated(normed), x, norm)
        return normed

    assert gate_up.cuda_plan(start, True) is not None
    x, normed = start, start
    for _ in range(20):
        hidden = gate_up.by_kernel(normed, True, 0)
        torch.cuda.synchronize()
        x, normed = down.added_normed(hidden, x, norm)
        torch.cuda.synchronize()
    expected = normed
    for _ in range(50):
        assert torch.equal(chain(20), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = chain(20)
    for _ in range(50):
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, expected)
