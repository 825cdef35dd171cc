"""Products by ``product.cu``: when and how, and that its source compiles. What it computes is
checked on a GPU (tests/gpu/test_product_cuda.py)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip  # noqa: F401

from surefoot.kernels.cuda.machine_code import source
from surefoot.kernels.cuda.product import KERNEL, multiply
from surefoot.kernels.cuda.product_plan import WIDEST, ProductPlan, product_plan, shared_plan
from surefoot.kernels.triton import products
from surefoot.kernels.triton.matmul_plan import TUNED_ON, share_length, shares
from surefoot.kernels.triton.products import TritonLinear

H200 = TUNED_ON
SHARED = H200[1]


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        # Qwen3-4B: 122 tiles of 80 gated outputs for 132 multiprocessors.
        (81, (9728, 2560, True), ProductPlan(2, 160, 6, True)),
        (128, (9728, 2560, True), ProductPlan(2, 160, 6, True)),
        (129, (9728, 2560, True), ProductPlan(3, 160, 5, True)),
        (192, (151936, 2560, False), ProductPlan(3, 192, 4, False)),
        # SmolLM2: nine steps are all there are.
        (128, (1536, 576, True), ProductPlan(2, 32, 9, True)),
        (65, (1536, 576, True), ProductPlan(2, 32, 9, True)),
        (64, (1536, 576, True), ProductPlan(1, 32, 9, True)),
        (1, (1536, 576, True), ProductPlan(1, 32, 9, True)),
        (64, (1536, 576, False), None),
        (31, (9728, 2560, True), None),
        (32, (9728, 2560, True), ProductPlan(1, 160, 8, True)),
        (64, (9728, 2560, True), ProductPlan(1, 160, 8, True)),
        (65, (9728, 2560, True), None),
        (16, (6144, 2048, True), ProductPlan(1, 96, 11, True)),
        (80, (9728, 2560, True), None),
        (80, (49152, 576, False), ProductPlan(2, 192, 5, False)),
        (80, (151936, 2560, False), None),
        # More than reading the weight takes: tiles as high as pays, in as few turns as can be.
        (193, (9728, 2560, True), ProductPlan(2, 160, 6, True)),
        (384, (9728, 2560, True), ProductPlan(3, 160, 5, True)),
        (1024, (9728, 2560, True), ProductPlan(4, 128, 4, True)),
        (512, (1536, 576, True), ProductPlan(2, 96, 8, True)),
        (256, (8192, 2048, True), ProductPlan(4, 128, 4, True)),
        (1025, (9728, 2560, True), None),
        (193, (151936, 2560, False), None),
        # 128 blocks of 64 fit as they are.
        (128, (8192, 2048, True), None),
        (128, (8192, 2048, False), None),
        (128, (9732, 2560, True), None),
        (128, (9728, 2564, True), None),
    ],
)
def test_plans(rows: int, shape: tuple[int, int, bool], expected: ProductPlan | None) -> None:
    assert product_plan(rows, *shape, *H200) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, ProductPlan(1, 232, 6, False, largest=True)),
        (80, ProductPlan(2, 232, 5, False, largest=True)),
        (192, ProductPlan(3, 192, 4, False, largest=True)),
        (384, ProductPlan(3, 192, 4, False, largest=True)),
        (1025, None),
    ],
)
def test_the_largest_logits_are_found_for_all_rows(rows: int, expected: ProductPlan | None) -> None:
    assert product_plan(rows, 151936, 2560, False, *H200, largest=True) == expected


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        # Of large weights those that fill 129 to 192 rows, or 257 and more.
        (128, (2560, 9728, 3), None),
        (129, (2560, 9728, 3), ProductPlan(3, 72, 6, False, shares=3)),
        (193, (2560, 9728, 3), None),
        (384, (2560, 9728, 3), ProductPlan(3, 120, 5, False, shares=3)),
        (320, (2560, 4096, 3), ProductPlan(3, 120, 5, False, shares=3)),
        (321, (2560, 4096, 3), None),
        (385, (2560, 9728, 3), None),
        # One turn would take tiles that registers do not hold.
        (160, (12800, 4096, 3), None),
        # SmolLM2's: all.
        (1, (576, 1536, 6), ProductPlan(1, 32, 4, False, shares=6)),
        (512, (576, 1536, 6), ProductPlan(4, 56, 4, False, shares=6)),
        (513, (576, 1536, 6), None),
        (128, (580, 1536, 6), None),
        # Seven have all inputs.
        (160, (896, 4864, 8), None),
    ],
)
def test_plans_of_shares(
    rows: int, shape: tuple[int, int, int], expected: ProductPlan | None
) -> None:
    assert shared_plan(rows, *shape, *H200) == expected


@given(
    rows=st.integers(1, 520),
    outputs=st.integers(1, 20_000).map(lambda n: 8 * n),
    inputs=st.integers(1, 2_000).map(lambda n: 8 * n),
    count=st.integers(2, 8),
    sms=st.integers(1, 160),
    shared=st.sampled_from([65_536, 101_376, 166_912, SHARED]),
)
def test_every_plan_of_shares_fits_the_multiprocessor(
    rows: int, outputs: int, inputs: int, count: int, sms: int, shared: int
) -> None:
    plan = shared_plan(rows, outputs, inputs, count, sms, shared)
    if plan is None:
        return
    down = -(-rows // (64 * plan.groups))
    assert down * -(-outputs // plan.tile) * count <= sms, "one turn"
    assert (count - 1) * share_length(inputs, count) < inputs, "none is empty"
    assert plan.tile % 8 == 0 and plan.tile <= WIDEST[plan.groups, False]
    assert plan.shared_bytes <= shared and plan.threads <= 1024 and plan.stages >= 2


@given(
    outputs=st.integers(1, 20_000).map(lambda n: 8 * n),
    inputs=st.integers(1, 20_000).map(lambda n: 8 * n),
    sms=st.integers(1, 160),
)
def test_no_share_is_empty(outputs: int, inputs: int, sms: int) -> None:
    """The number of shares and their length are of each other."""
    count = shares(outputs, inputs, False, 2, sms, SHARED)
    length = share_length(inputs, count)
    assert (count - 1) * length < inputs <= count * length


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # o and down of Qwen2.5-0.5B, Qwen3-0.6B and SmolLM2-360M.
        ((896, 896), 4), ((896, 4864), 7), ((1024, 2048), 8), ((1024, 3072), 6), ((960, 2560), 5),
    ],
)  # fmt: skip
def test_shares_of_small_models(shape: tuple[int, int], expected: int) -> None:
    assert shares(*shape, False, 2, *H200) == expected


def test_an_empty_share_is_refused() -> None:
    x, weight = torch.zeros(192, 4864), torch.zeros(896, 4864)
    plan = ProductPlan(3, 64, 7, False, shares=8)
    with pytest.raises(ValueError, match="8 shares of 4864 inputs: the last one is empty"):
        multiply(x, weight, torch.zeros(8, 192, 896), plan)


def test_a_weight_of_one_wave_is_left_to_triton_unless_tiles_are_balanced_better() -> None:
    assert product_plan(128, 64 * 132, 2560, False, *H200) is None
    assert product_plan(128, 64 * 133, 2560, False, *H200) is not None
    assert product_plan(128, 64 * 132, 2560, True, *H200) is None


@given(
    rows=st.one_of(st.integers(65, 192), st.integers(1, 1100)),
    outputs=st.integers(1, 20_000).map(lambda n: 8 * n),
    inputs=st.integers(1, 2_000).map(lambda n: 8 * n),
    kind=st.sampled_from(["logits", "gated", "largest"]),
    sms=st.integers(1, 160),
    shared=st.sampled_from([65_536, 101_376, 166_912, SHARED]),
)
def test_every_plan_fits_the_multiprocessor(
    rows: int, outputs: int, inputs: int, kind: str, sms: int, shared: int
) -> None:
    gated, largest = kind == "gated", kind == "largest"
    plan = product_plan(rows, outputs, inputs, gated, sms, shared, largest)
    if plan is None:
        return
    assert rows > 64 * (plan.groups - 1)
    assert rows <= 64 * plan.groups or ((plan.gated or plan.largest) and rows > 192)
    assert plan.tile % (16 if gated else 8) == 0 and plan.tile <= WIDEST[plan.groups, gated]
    # A box of a tensor copy has at most 256 rows.
    assert plan.width <= 256 and 64 * plan.groups <= 256
    assert plan.shared_bytes <= shared and plan.threads <= 1024
    assert plan.stages >= 2


@pytest.mark.parametrize("rows", [128, 384])
def test_stages_fit_whatever_memory_there_is(rows: int) -> None:
    for shared in range(32 << 10, SHARED, 512):
        plan = product_plan(rows, 9728, 2560, True, H200[0], shared)
        assert plan is None or plan.shared_bytes <= shared


def test_the_source_is_made_for_the_plan() -> None:
    text = source(ProductPlan(2, 160, 6, True))
    assert text.startswith(
        "#define GROUPS 2\n#define TILE 160\n#define STAGES 6\n#define GATED 1\n"
    )
    (names,) = re.findall(r"m64n160k16\.f32\.bf16\.bf16 \{(.*?)\}, *\"?\n? *\"? *%80, %81", text)
    assert names.split(", ") == [f"%{index}" for index in range(80)]
    assert f"\n{KERNEL}(const __grid_constant__ TensorMap x_map" in text
    assert "// MULTIPLY" not in text and "setp.ne.b32 add, %82, 0;" in text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")
@pytest.mark.parametrize(
    "plan",
    [
        ProductPlan(1, 256, 4, True),
        ProductPlan(1, 32, 9, True),
        ProductPlan(2, 160, 6, True),
        ProductPlan(2, 16, 12, True),
        ProductPlan(3, 192, 4, False),
        ProductPlan(2, 8, 12, False),
        ProductPlan(4, 128, 4, True),
    ],
    ids=str,
)
def test_the_source_compiles_for_hopper(plan: ProductPlan, tmp_path: Path) -> None:
    (tmp_path / "product.cu").write_text(source(plan))
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"]
    command += ["product.cu", "-o", "product.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    # Nor has the compiler each matrix instruction wait for the one before.
    assert "serialized" not in done.stderr


# --- who computes a product --------------------------------------------------------------------


class Called(Exception):
    """That ``product.cu`` was asked."""


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Any:
    def asked(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, plan: ProductPlan) -> None:
        raise Called(tuple(y.shape), y.dtype, plan)

    monkeypatch.setattr(products, "available", lambda device: True)
    monkeypatch.setattr(products, "multiply_by_cuda", asked)

    def make(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = False) -> TritonLinear:
        weight = torch.zeros(outputs, inputs, dtype=dtype)
        return TritonLinear(weight, weight[:, 0].clone() if bias else None)

    return make


def test_gated_products_and_logits_go_there(linear: Any) -> None:
    gate_up, x = linear(2 * 1536, 128, torch.bfloat16), torch.zeros(96, 128, dtype=torch.bfloat16)
    with pytest.raises(Called) as called:
        gate_up.gated(x)
    assert called.value.args[:2] == ((96, 1536), torch.bfloat16)
    many = torch.zeros(1024, 128, dtype=torch.bfloat16)
    with pytest.raises(Called) as called:
        gate_up.by_our_own(many, True, 0)
    assert called.value.args[:2] == ((1024, 1536), torch.bfloat16)
    head = linear(64 * 140, 128, torch.bfloat16)
    with pytest.raises(Called) as called:
        head.wide(x)
    assert called.value.args[:2] == ((96, 64 * 140), torch.float32)


@pytest.mark.parametrize(
    ("rows", "inputs", "dtype", "bias"),
    [
        (96, 124, torch.bfloat16, False),
        (96, 128, torch.float32, False),
        (96, 128, torch.bfloat16, True),
    ],
    ids=["not described", "float32", "bias"],
)
def test_what_it_cannot_compute_stays_with_triton(
    linear: Any, rows: int, inputs: int, dtype: torch.dtype, bias: bool
) -> None:
    x = torch.zeros(rows, inputs, dtype=dtype)
    assert linear(2 * 256, inputs, dtype, bias).cuda_plan(x, True) is None
    assert linear(64 * 140, inputs, dtype, bias).cuda_plan(x, False) is None


def test_products_that_are_neither_stay_with_triton(linear: Any) -> None:
    x, down = torch.zeros(96, 128, dtype=torch.bfloat16), linear(64 * 140, 128, torch.bfloat16)
    assert down(x).dtype == torch.bfloat16


def test_what_is_added_to_logits_stays_with_triton(linear: Any) -> None:
    x, head = torch.zeros(96, 128, dtype=torch.bfloat16), linear(64 * 140, 128, torch.bfloat16)
    assert torch.equal(head.wide(x, torch.ones(96, 64 * 140)), torch.ones(96, 64 * 140))


def no_library() -> None:
    raise RuntimeError("libnvrtc.so was not found")


WITHOUT_LIBRARY = SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=no_library))


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"cuda": None}, "cuda"),
        ({"cuda": Any, "cuda.bindings": WITHOUT_LIBRARY}, "libnvrtc.so was not found"),
    ],
    ids=["no bindings", "no library"],
)
def test_what_is_missing_is_said_once(
    modules: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.kernels.cuda import product

    warnings: list[str] = []
    monkeypatch.setattr(product, "hopper", lambda device: True)
    monkeypatch.setattr(product.logger, "warning", lambda text, *args: warnings.append(text % args))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    product.available.cache_clear()
    assert not product.available(torch.device("cpu"))
    assert not product.available(torch.device("cpu"))
    product.available.cache_clear()
    [line] = warnings
    assert words in line and "pip install cuda-bindings" in line


def test_on_other_devices_nobody_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.kernels.cuda import product

    monkeypatch.setitem(sys.modules, "cuda", None)
    assert not product.available(torch.device("cpu"))
