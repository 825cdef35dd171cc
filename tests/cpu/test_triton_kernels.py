"""The Triton kernels against their torch twins, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.errors import SurefootError
from surefoot.kernels import reference as ops
from surefoot.kernels.attention import torch_paged
from surefoot.kernels.backend import AttentionShape, Backend, FlatBatch, SpanTable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import activation, attend, attention, norm, products
from surefoot.kernels.triton.argmax import argmax
from surefoot.kernels.triton.attention import AttentionPlan
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.drafting import TritonDrafting
from surefoot.kernels.triton.matmul_plan import TUNED, TUNED_ON, MatmulPlan, default_plan, plan_for
from surefoot.kernels.triton.paths import path_places
from surefoot.kernels.triton.qkv import project_qkv
from surefoot.kernels.triton.rope_kv import rope_and_write
from test_native_backend import LAYOUTS, Layout, Row, Runner, chain, difference, row_errors, tree
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    # numpy warns where -inf is meant.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DTYPES = (torch.float32, torch.bfloat16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Summed in float64 and rounded once."""
    wide = torch.nn.functional.linear(x.double(), weight.double())
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def close(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-6) -> None:
    """fp32 up to the order of a sum; bf16 up to one rounding where that order tips it."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert difference(found, expected) < (most if found.dtype == torch.float32 else 1e-2)
    if found.dtype == torch.bfloat16:
        assert (found != expected).float().mean() < 0.03


# --- row by row ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gating_equal_their_twins(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, packed = (torch.randn(3, n).to(dtype) for n in (48, 48, 80))
    weight = torch.randn(48).to(dtype)
    close(norm.rms_norm(x, weight, 1e-3), ops.rms_norm(x, weight, 1e-3))
    total, normed = norm.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    close(normed, ops.rms_norm(x + residual, weight, 1e-3))
    close(activation.silu_mul(packed), ops.silu_mul(packed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_some_rows_of_each_block(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    blocks, weight = torch.randn(4, 5, 48).to(dtype), torch.randn(48).to(dtype)
    expected = ops.rms_norm(blocks[:, 1:4].flatten(0, 1), weight, 1e-3)
    close(norm.rms_norm(blocks[:, 1:4], weight, 1e-3), expected)


def test_a_sum_is_kept_in_a_second_place() -> None:
    torch.manual_seed(3)
    x, residual, weight = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    for shares in (None, torch.stack((x, torch.zeros(3, 48)))):
        places = torch.full((3, 144), 7.0)
        if shares is None:
            found = norm.add_rms_norm(x, residual, weight, 1e-3, places[:, 48:96])
        else:
            found = norm.sum_add_rms_norm(shares, None, residual, weight, 1e-3, places[:, 48:96])
        assert torch.equal(places[:, 48:96], found[0])
        assert (places[:, :48] == 7).all() and (places[:, 96:] == 7).all()


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [100, 104])  # 104: rows that tensor descriptors allow
@pytest.mark.parametrize("rows", [1, 5, 33, 66, 96])
def test_a_product_equals_its_twin(rows: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(70, inputs).div(10).to(dtype)
    bias, residual = torch.randn(70).to(dtype), torch.randn(rows, 70).to(dtype)
    plan = MatmulPlan(32, 32, prefetch=64)
    close(products.matmul(x, weight, plan=plan), linear(x, weight))
    found = products.matmul(x, weight, bias, residual, plan=plan)
    close(found, linear(x, weight, bias) + residual)
    found = products.matmul(x, weight, bias, silu=True, plan=plan)
    close(found, ops.silu_mul(linear(x, weight, bias)))
    wide = products.matmul(x, weight, dtype=torch.float32, plan=plan)
    assert difference(wide, x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("silu", [False, True])
def test_shares_of_the_inputs_add_up(silu: bool) -> None:
    x, weight, bias = torch.randn(7, 200), torch.randn(70, 200) / 14, torch.randn(70)
    expected = linear(x, weight, bias)
    expected = ops.silu_mul(expected) if silu else expected
    for split_k in (2, 3, 8):  # 8: more shares than steps
        plan = MatmulPlan(16, 64, split_k)
        close(products.matmul(x, weight, bias, silu=silu, plan=plan), expected)


def test_products_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="129 rows"):
        products.matmul(torch.zeros(129, 16), torch.zeros(8, 16), plan=MatmulPlan(16, 16))


@pytest.mark.parametrize("shared", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("outputs", [256, 960, 4096, 6144, 14336, 128256])
def test_plans_keep_every_processor_reading(outputs: int, gated: bool, shared: int) -> None:
    shares = set()
    for rows in (1, 16, 17, 64, 80, 96, 128):
        plan = default_plan(rows, outputs, 4096, gated, 2, 132, shared)
        programs = -(-outputs // plan.block_n) * plan.split_k
        assert gated or programs >= min(66, outputs // 64 * 8)
        stage = (plan.block_n * (1 + gated) + max(16, rows)) * plan.block_k * 2
        assert stage * plan.num_stages <= shared - 5_000, "shared memory of a processor"
        assert plan_for(rows, outputs, 4096, gated, 2, 132, shared) == plan
        assert default_plan(rows, outputs, 40, gated, 2, 132, shared).prefetch == 32
        shares.add(plan.split_k)
    assert len(shares) == 1, "sums depend on the number of rows"


@pytest.mark.parametrize("key", TUNED)
def test_measured_plans_can_run(key: tuple[int, int, int, bool]) -> None:
    rows, outputs, inputs, gated = key
    plan = plan_for(rows, outputs, inputs, gated, 2, *TUNED_ON)
    assert plan is TUNED[key]
    if plan is not None:
        stage = (plan.block_n * (1 + gated) + rows) * plan.block_k * 2
        assert stage * plan.num_stages <= 226_000, "shared memory of a processor"
        assert plan.prefetch % 16 == 0 and plan.split_k * plan.block_k <= inputs
        assert plan.split_k == TUNED[16, outputs, inputs, gated].split_k


# --- layers -------------------------------------------------------------------------------------

DENSE = {
    "fp32": LAYOUTS["fp32"],
    "fp32 odd, bias, norms": Layout(33, 71, 3, 1, 48, bias=True, qk_norm=True),
    "fp32 heads of 256": LAYOUTS["fp32 heads of 256"],
    "bf16 group of 10": LAYOUTS["bf16 group of 10"],
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are what costs time in the interpreter."""
    monkeypatch.setattr("surefoot.kernels.triton.launch.DEFAULT_PROCESSORS", 3)
    plans = MatmulPlan(64, 64), MatmulPlan(64, 32, split_k=2)
    monkeypatch.setattr(
        "surefoot.kernels.triton.products.plan_for",
        lambda *args: plans[args[0] > 4 and not args[3]],
    )


class TypedRunner(Runner):
    def input(self, row: Row) -> torch.Tensor:
        return super().input(row).to(self.layout.dtype)


def pair(layout: Layout, **options: int) -> tuple[Runner, Runner]:
    found = TypedRunner(layout, TritonBackend(DEVICE, layout.dtype), **options)
    return found, TypedRunner(layout, TorchBackend(DEVICE, layout.dtype), **options)


def equal_rows(layout: Layout, found: torch.Tensor, expected: torch.Tensor) -> None:
    errors = row_errors(found, expected)
    assert errors[-1] < (1e-5 if layout.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_equals_the_torch_backend(name: str) -> None:
    layout = DENSE[name]
    found, expected = pair(layout, block_size=8 if "odd" in name else 4)
    for rows in (
        chain(0, 0, 11),
        [*chain(1, 0, 3), Row(-1, 0), *chain(0, 11, 13), Row(-1, 0)],
        [*chain(0, 13, 14), *chain(1, 3, 4)],
    ):
        real = [index for index, row in enumerate(rows) if row.slot >= 0]
        equal_rows(layout, found.forward(rows)[real], expected.forward(rows)[real])


def test_many_rows_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.kernels.triton.products.MAX_ROWS", 8)
    found, expected = pair(DENSE["fp32 odd, bias, norms"])
    rows = [*chain(0, 0, 7), *chain(1, 0, 5)]
    equal_rows(LAYOUTS["fp32"], found.forward(rows), expected.forward(rows))


@pytest.mark.parametrize("rows", [3, 6])
def test_layers_in_one_go_are_the_same_layers(rows: int) -> None:
    """And the residual streams kept on the way, however the ends of layers are fused."""
    runner = TypedRunner(DENSE["fp32 odd, bias, norms"], TritonBackend(DEVICE, torch.float32))
    batch, x = runner.batch(chain(0, 0, rows), {}), torch.randn(rows, 33)
    weights = [replace(runner.weights, input_norm=torch.rand(33)) for _ in range(3)]
    caches = [[kv.clone() for kv in (*runner.kv, runner.kv[0])] for _ in range(2)]
    backend, rope, capture = runner.backend, runner.layout.rope(), [0, 3, 2]
    found, kept = backend.layers(weights, x, batch, caches[0], rope, capture)
    plain, each = Backend.layers(backend, weights, x, batch, caches[1], rope, capture)
    close(found, plain)
    close(kept, each)


@pytest.mark.parametrize("rows", [3, 6])
def test_a_layer_and_its_head_are_those_apart(rows: int) -> None:
    """For a drafter, whose attention reads something else than the residual stream."""
    runner = TypedRunner(DENSE["fp32 odd, bias, norms"], TritonBackend(DEVICE, torch.float32))
    backend, rope = runner.backend, runner.layout.rope()
    batch, x = runner.batch(chain(0, 0, rows), {}), torch.randn(rows, 33)
    inputs, norm = torch.randn(rows, 33), torch.rand(33)
    head = backend.pack_linear([torch.randn(90, 33)])
    results = []
    drafting = backend.drafting
    for way in (drafting, super(TritonDrafting, drafting)):
        kv = runner.kv[0].clone()
        rest = runner.weights, x.clone(), batch, kv, rope, inputs, norm, head
        results.append((*way.layer_and_head(*rest), kv))
    for left, right in zip(*results, strict=True):
        close(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_one_kernel_projects_rotates_and_writes(many: bool, bias: bool, dtype: torch.dtype) -> None:
    """As the product, then the rotation and the write."""
    torch.manual_seed(4)
    layout = Layout(40, 24, 3, 1, 16, dtype=dtype, bias=bias)
    runner = TypedRunner(layout, TritonBackend(DEVICE, dtype))
    weights, shape = runner.weights, layout.shape
    rows = [*chain(1, 13, 17), Row(-1, 0), *chain(0, 3, 5)]
    if many:
        rows += [Row(-1, 0)] * 60 + chain(2, 0, 13)  # A tile of 64 rows, and one below it.
    batch, x = runner.batch(rows, {}), torch.randn(len(rows), 40).to(dtype)
    caches = [torch.full_like(runner.kv[0], 7.0) for _ in "12"]
    rest = batch, shape, runner.rope
    linear, plan = weights.qkv, MatmulPlan(16, 32)
    found = project_qkv(x, linear.weight, linear.bias, caches[0], *rest, plan=plan)
    expected = rope_and_write(linear(x), caches[1], *rest)
    real = [index for index, row in enumerate(rows) if row.slot >= 0]
    close(found[real], expected[real])
    close(*caches)


def test_a_tree_equals_the_torch_backend() -> None:
    runners = pair(LAYOUTS["fp32"])
    results = []
    for runner in runners:
        runner.forward([*chain(0, 0, 3), *chain(1, 0, 5)])
        results.append(runner.forward(tree(0, 3) + tree(1, 5)))
    equal_rows(LAYOUTS["fp32"], *results)


def test_the_places_of_trees_keys_are_found_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, rows = Runner(LAYOUTS["fp32"], TritonBackend(DEVICE, torch.float32)), tree(0, 3)
    runner.forward(chain(0, 0, 3))
    expected, x = runner.forward(rows), torch.stack([runner.input(row) for row in rows])
    found: list[torch.Tensor] = []

    def counted(mask: torch.Tensor) -> torch.Tensor:
        found.append(path_places(mask))
        return found[-1]

    for module in (attention, attend):
        monkeypatch.setattr(module, "path_places", counted)
    batch, weights = runner.batch(rows, {0: 3}), [runner.weights] * 2
    together, _ = runner.backend.layers(weights, x, batch, runner.kv, runner.rope, ())
    assert len(found) == 1 and torch.equal(together, expected)


def test_stale_keys_are_never_read() -> None:
    clean, dirty = (Runner(LAYOUTS["fp32"], TritonBackend(DEVICE, torch.float32)) for _ in "12")
    for kv in dirty.kv:
        kv.fill_(float("nan"))
    for rows in (chain(0, 0, 3), [Row(0, 3, mask=1), Row(0, 4, mask=3)]):
        assert torch.equal(clean.forward(rows), dirty.forward(rows))


def test_padding_rows_write_nothing() -> None:
    runner = Runner(LAYOUTS["fp32"], TritonBackend(DEVICE, torch.float32))
    runner.forward(chain(0, 0, 5))
    before = [kv.clone() for kv in runner.kv]
    runner.forward([Row(-1, 3), Row(-1, 0)])
    assert all(torch.equal(kv, kept) for kv, kept in zip(runner.kv, before, strict=True))


# --- attention ----------------------------------------------------------------------------------


def attention_case(
    spans: Sequence[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype, mask: bool
) -> tuple[torch.Tensor, torch.Tensor, FlatBatch]:
    """(q, torch's KV, batch) of random numbers for ``spans``: (first key, rows) by slot; a slot
    with no rows has no span."""
    size, pages = 8, 12
    q = torch.randn(sum(rows for _, rows in spans) + 2, shape.heads, shape.head_dim).to(dtype)
    kv = torch.randn(2, len(spans) * pages + 1, size, shape.kv_heads, shape.head_dim).to(dtype)
    place = [(slot, at) for slot, (first, n) in enumerate(spans) for at in range(first, first + n)]
    slots = torch.tensor([slot for slot, _ in place] + [-1, -1])
    keys = torch.tensor([at for _, at in place] + [0, 0])
    bits = torch.randint(-(2**63), 2**63 - 1, keys.shape)
    within = keys - torch.tensor([first for first, _ in spans])[slots]
    causal = (2 << within.clamp(0, 62)) - 1  # No row looks beyond its span.
    bits = (bits & causal) | (1 << within.clamp(0, 63))
    batch = FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys,
        key_index=keys,
        row_slot=slots,
        block_tables=1 + torch.randperm(len(spans) * pages).view(-1, pages).int(),
        span_start=torch.tensor([first for first, _ in spans]),
        max_keys=96,
        mask=bits if mask else None,
    )
    return q, kv, batch


@pytest.mark.parametrize("tiles", [0, 4])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", ["none", "a drafter's", "a target's"])
def test_attention_equals_its_twin(mask: str, splits: int, tiles: int) -> None:
    """Spans over several tiles, programs that search theirs or know it, shares without keys."""
    torch.manual_seed(splits)
    for dtype, shape in (
        (torch.float32, AttentionShape(6, 2, 24, 0.3)),
        (torch.bfloat16, AttentionShape(4, 2, 16, 0.25)),
    ):
        spans = [(70, 12), (0, 0), (0, 3), (33, 1)]
        q, kv, batch = attention_case(spans, shape, dtype, mask != "none")
        batch = replace(batch, all_masked=mask == "a drafter's")
        per_tile = 1 if batch.has_paths else 16 * shape.kv_heads // shape.heads
        most = 12 if batch.has_paths else tiles
        programs = 4 * most if tiles else sum(-(-rows // per_tile) for _, rows in spans) + 1
        plan = AttentionPlan(16, 32, splits, tiles and most, programs, 4, 2)
        own = kv.transpose(2, 3).contiguous()
        found = attention.span_attention(q, own, batch, shape, plan)
        close_attention(found[:-2], torch_paged.span_attention(q, kv, batch, shape)[:-2])


def close_attention(found: torch.Tensor, expected: torch.Tensor) -> None:
    errors = row_errors(found.flatten(1), expected.flatten(1))
    assert errors[-1] < (1e-6 if found.dtype == torch.float32 else 1e-2)


def test_a_tree_of_64_rows_reads_every_bit() -> None:
    shape = AttentionShape(2, 2, 16, 0.25)
    q, kv, batch = attention_case([(20, 64)], shape, torch.float32, True)
    # Row j sees itself and every third row before it; the last row uses the sign bit.
    masks = [sum(1 << i for i in range(j % 3, j + 1, 3)) for j in range(64)] + [0, 0]
    signed = [mask - (1 << 64 if mask >> 63 else 0) for mask in masks]
    batch = replace(batch, mask=torch.tensor(signed))
    found = attention.span_attention(q, kv.transpose(2, 3).contiguous(), batch, shape)
    close_attention(found[:-2], torch_paged.span_attention(q, kv, batch, shape)[:-2])


@pytest.mark.parametrize("programs", [1, 500])
def test_blocks_see_each_other_within_windows(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that see the keys behind them, and none before a first of their own; keys shared out to
    several programs, some of which a row has nothing to see of."""
    monkeypatch.setattr(attention, "MOST_CHUNK_KEYS", 16)
    shape = AttentionShape(2, 1, 16, 0.25)
    spans = [(85, 5), (3, 5), (50, 5)]
    q, kv, batch = attention_case(spans, shape, torch.float32, True)
    used = batch.row_slot >= 0
    mask = torch.where(used, 31, 0)
    oldest = (batch.key_index - torch.arange(len(q)) % 4 * 20).clamp(min=0)
    batch = replace(batch, mask=mask, oldest=oldest, all_masked=True)
    plan = attention.plan_attention(len(q), 3, 5, batch.max_keys, shape, programs, 4)
    assert (plan.splits > 1) == (programs > 1)
    found = attention.span_attention(q, kv.transpose(2, 3).contiguous(), batch, shape, plan)
    expected = torch_paged.span_attention(q, kv, batch, shape)
    close_attention(found[used], expected[used])


def test_a_span_table_may_come_with_the_batch() -> None:
    shape = AttentionShape(2, 1, 16, 0.25)
    q, kv, batch = attention_case([(9, 2), (4, 1), (0, 3)], shape, torch.float32, False)
    # In another order, with an entry that is not used.
    table = SpanTable(
        first_row=torch.tensor([3, 0, 0, 2]),
        rows=torch.tensor([3, 0, 2, 1]),
        slot=torch.tensor([2, -1, 0, 1]),
        max_rows=3,
    )
    batch, own = replace(batch, spans=table), kv.transpose(2, 3).contiguous()
    found = attention.span_attention(q, own, batch, shape)
    close_attention(found[:-2], torch_paged.span_attention(q, kv, batch, shape)[:-2])


# --- the rest -----------------------------------------------------------------------------------


def test_head_and_argmax() -> None:
    torch.manual_seed(3)
    x, weight, scale = torch.randn(6, 40), torch.randn(300, 40), torch.rand(40)
    logits = []
    backends: list[Any] = [
        TritonBackend(DEVICE, torch.float32),
        TorchBackend(DEVICE, torch.float32),
    ]
    for backend in backends:
        _, linear = backend.pack_embedding(weight)
        logits.append(backend.head(backend.pack_norm(scale), 1e-5, linear, x))
    close(*logits)
    wide = torch.randint(-3, 3, (4, 9000)).float()
    wide[0, [4095, 4096, 8999]] = 7.0
    wide[1] = -float("inf")
    for scores in (wide, wide.bfloat16()):
        assert torch.equal(argmax(scores), scores.argmax(dim=-1))
    assert argmax(wide)[0] == 4095 and argmax(wide)[1] == 0


def test_other_devices_and_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SurefootError, match="float16"):
        TritonBackend(DEVICE, torch.float16)
    monkeypatch.setattr("surefoot.kernels.triton.launch.interpreted", lambda: False)
    with pytest.raises(SurefootError, match="cpu"):
        TritonBackend("cpu", torch.float32)
