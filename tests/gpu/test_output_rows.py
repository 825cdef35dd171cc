"""Outputs of the sampled rows alone are the same bits as those of all rows, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from output_rows import check_output_rows
from surefoot.kernels.triton.backend import TritonBackend
from test_native_backend import Layout
from test_triton_kernels import TypedRunner

pytestmark = pytest.mark.gpu
bf16 = torch.bfloat16
LAYOUTS = {
    "bf16 heads of 64": Layout(192, 320, 9, 3, 64, dtype=bf16),
    "bf16 heads of 128, norms": Layout(256, 320, 8, 2, 128, dtype=bf16, qk_norm=True),
    "bf16 heads of 80, bias": Layout(160, 192, 4, 2, 80, dtype=bf16, bias=True),
    "fp32": Layout(64, 96, 4, 2, 16),
}


@pytest.mark.parametrize("most_keys", [40, 150])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_are_not_wanted_change_no_bit(name: str, most_keys: int) -> None:
    layout = LAYOUTS[name]
    runner = TypedRunner(layout, TritonBackend("cuda", layout.dtype))
    kv = [torch.randn_like(runner.kv[0]) for _ in range(3)]
    fresh = int(torch.seed() % 2**20)
    print("seed", fresh)
    for seed in range(fresh, fresh + 8):
        check_output_rows(
            runner.backend, runner.weights, kv, runner.rope, runner.tables, most_keys,
            layout.hidden, seed,
        )  # fmt: skip
