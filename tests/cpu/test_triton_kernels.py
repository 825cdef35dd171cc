"""The Triton kernels against their torch twins, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.errors import SurefootError
from surefoot.kernels import reference as ops
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import activation, attention, matmul, norm
from surefoot.kernels.triton.argmax import argmax
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.matmul_plan import MatmulPlan, default_plan, plan_for
from test_native_backend import LAYOUTS, Layout, Row, Runner, chain, difference, row_errors, tree

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    # numpy warns where -inf is meant.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
linear = torch.nn.functional.linear
DTYPES = (torch.float32, torch.bfloat16)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32 up to the order of a sum; bf16 up to one rounding where that order tips it."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert difference(found, expected) < (1e-6 if found.dtype == torch.float32 else 1e-2)
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


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
def test_a_product_equals_its_twin(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 100).to(dtype), torch.randn(70, 100).div(10).to(dtype)
    bias, residual = torch.randn(70).to(dtype), torch.randn(rows, 70).to(dtype)
    plan = MatmulPlan(32, 64)
    close(matmul.matmul(x, weight, plan=plan), linear(x, weight))
    found = matmul.matmul(x, weight, bias, residual, plan=plan)
    close(found, linear(x, weight, bias) + residual)
    found = matmul.matmul(x, weight, bias, silu=True, plan=plan)
    close(found, ops.silu_mul(linear(x, weight, bias)))
    wide = matmul.matmul(x, weight, dtype=torch.float32, plan=plan)
    assert difference(wide, x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_product_of_few_rows_takes_their_norm(rows: int) -> None:
    torch.manual_seed(rows)
    for dtype in DTYPES:
        x, weight = torch.randn(rows, 100).to(dtype), torch.randn(40, 100).div(10).to(dtype)
        scale = torch.rand(100).to(dtype)
        found = matmul.matmul(x, weight, norm=(scale, 1e-2), plan=MatmulPlan(32, 64))
        close(found, linear(ops.rms_norm(x, scale, 1e-2), weight))


@pytest.mark.parametrize("silu", [False, True])
def test_shares_of_the_inputs_add_up(silu: bool) -> None:
    x, weight, bias = torch.randn(7, 200), torch.randn(70, 200) / 14, torch.randn(70)
    expected = linear(x, weight, bias)
    expected = ops.silu_mul(expected) if silu else expected
    for split_k in (2, 3, 8):  # 8: more shares than steps
        plan = MatmulPlan(16, 64, split_k)
        close(matmul.matmul(x, weight, bias, silu=silu, plan=plan), expected)


def test_products_refuse_what_they_cannot_do() -> None:
    weight, scale = torch.zeros(8, 16), torch.ones(16)
    with pytest.raises(ValueError, match="129 rows"):
        matmul.matmul(torch.zeros(129, 16), weight)
    with pytest.raises(ValueError, match="with its norm"):
        matmul.matmul(torch.zeros(5, 16), weight, norm=(scale, 1e-5))


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 64, 128])
@pytest.mark.parametrize("outputs", [256, 4096, 6144, 14336, 128256])
def test_plans_keep_every_processor_reading(outputs: int, rows: int) -> None:
    plan = default_plan(rows, outputs, 4096, False, 132)
    programs = -(-outputs // plan.block_n) * plan.split_k
    assert programs >= min(132, outputs // 8) * 0.45
    stage = (plan.block_n + (0 if rows <= 4 else max(16, rows))) * plan.block_k * 2
    assert rows <= 4 or stage * plan.num_stages <= 220_000, "shared memory of a processor"
    assert plan_for(rows, outputs, 4096, False, 132) == plan


# --- layers -------------------------------------------------------------------------------------

DENSE = {
    "fp32": LAYOUTS["fp32"],
    "fp32 odd, bias, norms": Layout(33, 71, 3, 1, 48, bias=True, qk_norm=True),
    "fp32 heads of 256": LAYOUTS["fp32 heads of 256"],
    "bf16 group of 10": LAYOUTS["bf16 group of 10"],
}


@pytest.fixture(autouse=True)
def _small_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are what costs time in the interpreter."""
    monkeypatch.setattr("surefoot.kernels.triton.launch.DEFAULT_PROCESSORS", 3)


class TypedRunner(Runner):
    def input(self, row: Row) -> torch.Tensor:
        return super().input(row).to(self.layout.dtype)


def pair(layout: Layout, **options: int) -> tuple[Runner, Runner]:
    found = TypedRunner(layout, TritonBackend("cpu", layout.dtype), **options)
    return found, TypedRunner(layout, TorchBackend("cpu", layout.dtype), **options)


def equal_rows(layout: Layout, found: torch.Tensor, expected: torch.Tensor) -> None:
    errors = row_errors(found, expected)
    assert errors[-1] < (1e-5 if layout.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_equals_the_torch_backend(name: str) -> None:
    layout = DENSE[name]
    found, expected = pair(layout, block_size=8 if "odd" in name else 16)
    first = chain(0, 0, 37)
    equal_rows(layout, found.forward(first), expected.forward(first))
    for rows in (
        [*chain(1, 0, 5), Row(-1, 0), *chain(0, 37, 40), Row(-1, 0)],
        [*chain(0, 40, 41), *chain(1, 5, 6)],
    ):
        real = [index for index, row in enumerate(rows) if row.slot >= 0]
        equal_rows(layout, found.forward(rows)[real], expected.forward(rows)[real])


def test_many_rows_go_another_way() -> None:
    found, expected = pair(LAYOUTS["fp32"])
    rows = [*chain(0, 0, 100), *chain(1, 0, 33)]
    equal_rows(LAYOUTS["fp32"], found.forward(rows), expected.forward(rows))


def test_a_tree_equals_the_torch_backend() -> None:
    for layout in (LAYOUTS["fp32"], LAYOUTS["bf16 group of 10"]):
        for start in (0, 30):
            runners = pair(layout)
            rows = tree(0, start) + tree(1, start + 3)
            results = []
            for runner in runners:
                runner.forward([*chain(0, 0, start), *chain(1, 0, start + 3)])
                results.append(runner.forward(rows))
            equal_rows(layout, *results)


def test_a_tree_of_64_rows_reads_every_bit() -> None:
    # Row j sees itself and every third row before it; the last row uses the sign bit.
    masks = [sum(1 << i for i in range(j % 3, j + 1, 3)) for j in range(64)]
    signed = [mask - (1 << 64 if mask >> 63 else 0) for mask in masks]
    rows = [Row(0, 20 + j, mask=signed[j]) for j in range(64)]
    results = []
    for runner in pair(LAYOUTS["fp32"]):
        runner.forward(chain(0, 0, 20))
        results.append(runner.forward(rows))
    equal_rows(LAYOUTS["fp32"], *results)


def test_stale_keys_are_never_read() -> None:
    clean, dirty = (Runner(LAYOUTS["fp32"], TritonBackend("cpu", torch.float32)) for _ in "12")
    for kv in dirty.kv:
        kv.fill_(float("nan"))
    for rows in (chain(0, 0, 3), chain(0, 3, 10), [Row(0, 10, mask=1), Row(0, 11, mask=3)]):
        assert torch.equal(clean.forward(rows), dirty.forward(rows))


def test_padding_rows_write_nothing() -> None:
    runner = Runner(LAYOUTS["fp32"], TritonBackend("cpu", torch.float32))
    runner.forward(chain(0, 0, 20))
    before = [kv.clone() for kv in runner.kv]
    runner.forward([Row(-1, 3), Row(-1, 0)])
    assert all(torch.equal(kv, kept) for kv, kept in zip(runner.kv, before, strict=True))


def test_head_and_argmax() -> None:
    torch.manual_seed(3)
    x, weight, scale = torch.randn(6, 40), torch.randn(300, 40), torch.rand(40)
    logits = []
    for backend in (TritonBackend("cpu", torch.float32), TorchBackend("cpu", torch.float32)):
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
        TritonBackend("cpu", torch.float16)
    monkeypatch.setattr("surefoot.kernels.triton.launch.interpreted", lambda: False)
    with pytest.raises(SurefootError, match="cpu"):
        TritonBackend("cpu", torch.float32)
