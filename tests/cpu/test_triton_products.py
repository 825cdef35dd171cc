"""Products whose bits do not depend on how many rows there are, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import linear as torch_linear

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels import reference as ops
from surefoot.kernels.triton import products, qkv
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.cublas import CublasChoices
from surefoot.kernels.triton.large_plan import LargePlan, large_plan
from surefoot.kernels.triton.matmul_plan import TUNED, TUNED_ON, MatmulPlan, plan_for, shares
from surefoot.kernels.triton.products import TritonLinear
from test_native_backend import Layout, Row, Runner, chain, difference
from test_triton_kernels import close, linear
from triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(
    triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"
)
CARDS = [TUNED_ON, (132, 166_912), (142, 101_376), (46, 101_376), (3, 232_448)]
"""Multiprocessors, and bytes of shared memory."""
SHAPES = [
    *((6144, 2560, False), (2560, 4096, False), (9728, 2560, True), (2560, 9728, False)),
    *((151936, 2560, False), (960, 576, False), (576, 576, False), (1536, 576, True)),
    *((576, 1536, False), (49152, 576, False), (1021, 333, False)),
]
"""Outputs, inputs, gated."""
PLANS = {
    "one share": LargePlan(32, 64, 64, 1),
    "shares in turn": LargePlan(32, 16, 64, 3),
    "spread shares": LargePlan(64, 32, 64, 3, spread=True, per_processor=2),
    "two parts": LargePlan(32, 32, 64, 1, more=16),
    "two parts, shares in turn": LargePlan(32, 16, 64, 3, more=32),
    "two parts, spread shares": LargePlan(64, 32, 64, 3, spread=True, more=16),
}


@pytest.fixture(autouse=True)
def _few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that programs compute several tiles each."""
    monkeypatch.setattr("surefoot.kernels.triton.launch.DEFAULT_PROCESSORS", 3)


# --- the kernel for many rows -------------------------------------------------------------------


# 1032: descriptors, and a last share of 8; 100 in bf16: rows that no descriptor can take.
@pytest.mark.parametrize(
    ("inputs", "dtype"), [(1032, torch.float32), (1032, torch.bfloat16), (100, torch.bfloat16)]
)
@pytest.mark.parametrize("name", PLANS)
def test_a_product_of_many_rows_equals_its_twin(name: str, inputs: int, dtype: torch.dtype) -> None:
    """Ten tiles of rows, more than a group; the last ones of both sides partly empty."""
    torch.manual_seed(inputs)
    plan = PLANS[name]
    x, weight = torch.randn(291, inputs).to(dtype), torch.randn(70, inputs).div(10).to(dtype)
    bias, residual = torch.randn(70).to(dtype), torch.randn(291, 70).to(dtype)
    # A thousand products that a GPU adds up in another order than torch does.
    most = 2e-6
    close(products.matmul(x, weight, plan=plan), linear(x, weight), most)
    found = products.matmul(x, weight, bias, residual, plan=plan)
    close(found, linear(x, weight, bias) + residual, most)
    if plan.more:
        with pytest.raises(ValueError, match="gated"):
            products.matmul(x, weight, bias, silu=True, plan=plan)
    else:
        found = products.matmul(x, weight, bias, silu=True, plan=plan)
        close(found, ops.silu_mul(linear(x, weight, bias)), most)
    wide = products.matmul(x, weight, bias, dtype=torch.float32, plan=plan)
    assert difference(wide, x.double() @ weight.double().T + bias.double()) < most


def test_shares_are_summed_apart_and_added_in_order() -> None:
    """One row or many, shares in one program or several, with a norm or without."""
    inputs, rows = 700, 140  # Shares of 256, 256 and 188.
    weight, x = torch.zeros(32, inputs), torch.ones(rows, inputs)
    for first in (0, 30):  # Both parts of a tile of 16 + 16.
        two = slice(first, first + 2)
        weight[two, 255], weight[two, 699] = 2.0**24, -(2.0**24)
        weight[two, 256] = 1.0  # Is lost when it is added to 2^24, but not to -2^24.
        weight[first + 1, 400] = 1.0  # Both together are not lost.
    expected = torch.zeros(rows, 32)
    expected[:, [1, 31]] = 2.0
    residual, norm = torch.ones(rows, 32), (torch.ones(32), 1.0)
    many = [LargePlan(64, 16, 32, 3, spread, more=more)
            for spread in (False, True) for more in (0, 16)]  # fmt: skip
    for plan in (MatmulPlan(16, 64, 3), *many):
        count = rows if isinstance(plan, LargePlan) else 1
        found = products.matmul(x[:count], weight, plan=plan)
        assert torch.equal(found, expected[:count]), plan
        total, _ = planned(weight, plan).added_normed(x[:count], residual[:count], norm)
        assert torch.equal(total, expected[:count] + 1), plan
    for more in (0, 16):
        one = LargePlan(64, 16, 32, 1, more=more)
        assert not products.matmul(x, weight, plan=one).count_nonzero()


def planned(weight: torch.Tensor, plan: products.Plan) -> TritonLinear:
    class Planned(TritonLinear):
        def plan(self, x: torch.Tensor, gated: bool = False, split_k: int = 0) -> products.Plan:
            return plan

    return Planned(weight, None)


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_of_rows_changes_the_shares(
    shape: tuple[int, int, bool], itemsize: int, card: tuple[int, int]
) -> None:
    outputs, inputs, gated = shape
    split_k = shares(outputs, inputs, gated, itemsize, *card)
    for rows in range(1, 129):
        plan = plan_for(rows, outputs, inputs, gated, itemsize, *card)
        assert plan.split_k == split_k, rows
    for rows in (129, 160, 256, 512, 2048, 8192):
        plan = large_plan(rows, outputs, inputs, gated, itemsize, *card, split_k)
        assert plan.split_k == split_k, rows


def test_tuned_shapes_have_one_number_of_shares() -> None:
    """And a plan for every number of rows: the rule's shares would be others."""
    for rows, outputs, inputs, gated in TUNED:
        assert (
            TUNED[rows, outputs, inputs, gated].split_k == TUNED[16, outputs, inputs, gated].split_k
        )
        for bucket in (16, 32, 64, 80, 96, 128):
            assert (bucket, outputs, inputs, gated) in TUNED


# --- cuBLAS, where it has the same bits ----------------------------------------------------------


class Reported:
    """A linear on which cuBLAS and the kernel differ at some numbers of rows."""

    def __init__(self, differing: Sequence[int]) -> None:
        self.weight, self.differing = torch.zeros(4, 8), differing
        self.compared = 0

    def key(self, gated: bool, split_k: int) -> Any:
        return (4, 8, False, gated, split_k)

    def by_our_own(self, x: torch.Tensor, gated: bool, split_k: int) -> torch.Tensor:
        return x[:, :4].clone()

    def by_cublas(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        self.compared += 1
        y = x[:, :4].clone()
        if x.shape[0] in self.differing:
            y[-1, -1] = torch.nextafter(y[-1, -1], torch.tensor(9.0))
        return y


def timer(linear: Reported, faster: Sequence[int]) -> Callable[[Sequence[Any]], float]:
    """cuBLAS is faster at these numbers of rows."""

    def seconds(runs: Sequence[Any]) -> float:
        before = linear.compared
        rows = [run() for run in runs][-1].shape[0]
        return 1.0 if linear.compared == before else (0.5 if rows in faster else 2.0)

    return seconds


def test_cublas_is_taken_where_it_is_equal_and_faster() -> None:
    choices, few = CublasChoices(), Reported(differing=[192])
    choices.find([few], [160, 192, 256], seconds=timer(few, [160, 192]))
    assert choices.rows == {(4, 8, False, False, 0): {160}}
    before = few.compared
    choices.find([few], [160, 192, 256], seconds=timer(few, [256]))
    assert few.compared == before, "a shape is compared once"
    key, room = few.key(False, 0), torch.zeros(300 * 8 + 64)
    weight = room[-room.data_ptr() % 256 // 4 :]
    x = weight[: 300 * 8].view(300, 8)
    assert choices.takes(key, x[:160], weight)
    assert not choices.takes(key, x[:192], weight), "other bits"
    assert not choices.takes(key, x[:256], weight), "slower"
    assert not choices.takes(key, x[:161], weight), "never compared"
    assert not choices.takes(few.key(True, 0), x[:160], weight), "never compared when gated"
    assert not choices.takes(key, x[1:161], weight), "rows at another alignment"
    assert not choices.takes(key, x[:160], weight[1:]), "weights at another alignment"


def test_a_linear_asks_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randint(-3, 4, (12, 16)).float()
    linear = TritonBackend(DEVICE, torch.float32).pack_linear([weight])
    x, residual = torch.randint(-3, 4, (130, 16)).float(), torch.ones(130, 12)
    norm = torch.ones(12), 1e-3

    def results() -> list[torch.Tensor]:
        return [linear(x), linear.gated(x), linear.added(x, residual),
                *linear.added_normed(x, residual, norm), linear.wide(x)]  # fmt: skip

    by_kernels = results()
    asked: list[Any] = []

    def takes(key: Any, x: torch.Tensor, weight: torch.Tensor) -> bool:
        asked.append(key)
        return True

    linear.choices.takes = takes
    called = []
    monkeypatch.setattr(products, "linear", lambda *args: called.append(1) or torch_linear(*args))
    for found, expected in zip(results(), by_kernels, strict=True):
        close(found, expected)
    assert len(called) == len(asked)
    assert asked == [(12, 16, False, gated, 0) for gated in (False, True, False, False)]


# --- queries, keys and values -------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_turned_to_the_bits_of_many(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused kernel and the separate ones, on sums that are exact in any order, -0 included."""
    layout = Layout(512, 24, 3, 1, 64, dtype=torch.bfloat16, bias=bias)
    runner = Runner(layout, TritonBackend(DEVICE, torch.bfloat16))
    packed, results = runner.weights.qkv, []
    packed.weight.copy_(torch.randint(-2, 3, packed.weight.shape))
    packed.weight[:, 0] = 0
    packed.weight[-64:-32] = 0
    packed.weight[-64:-32, 0] = -(2.0**-70)
    rows = [*chain(1, 3, 9), Row(-1, 0), *chain(0, 3, 5)]
    batch, x = runner.batch(rows, {}), torch.randint(-2, 3, (len(rows), 512)).bfloat16()
    x[:, 0] = 2.0**-70  # Half of the values become -0 when the product is rounded.
    real = [index for index, row in enumerate(rows) if row.slot >= 0]
    asked = []
    plan_of = products.plan_of
    monkeypatch.setattr(products, "plan_of", lambda *args: asked.append(args[3]) or plan_of(*args))
    for most in (128, 4):
        monkeypatch.setattr(qkv, "MAX_ROWS", most)
        monkeypatch.setattr(products, "MAX_ROWS", most)
        kv = torch.full_like(runner.kv[0], 7.0)
        found = qkv.queries(packed, x, kv, batch, layout.shape, runner.rope, None, 0.0)
        results.append((found[real].view(torch.int16), kv.view(torch.int16)))
    assert asked == [1], "many rows are summed as one share, as in the fused kernel"
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
