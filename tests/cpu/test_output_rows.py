"""The last layer computes only the rows that are sampled, and these to the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness import needs_native
from output_rows import check_output_rows
from surefoot.kernels.backend import Backend
from surefoot.kernels.torch_backend import TorchBackend
from test_native_backend import LAYOUTS, POSITIONS, Layout, Runner, threaded


def check(
    layout: Layout, backend: Backend, seed: int, block_size: int = 16, tolerance: float = 0.0
) -> None:
    runner = Runner(layout, backend, block_size=block_size, seed=seed)
    weights, kv = runner.weights, [*runner.kv, *runner.kv[:1]]
    most = min(POSITIONS, 30)
    hidden, rope = layout.hidden, runner.rope
    check_output_rows(backend, weights, kv, rope, runner.tables, most, hidden, seed, tolerance)


@needs_native
@pytest.mark.parametrize("name", ["fp32", "bf16 group of 10", "Q4_1", "mixed"])
def test_the_native_backend(name: str) -> None:
    for seed in range(12):
        check(LAYOUTS[name], threaded(LAYOUTS[name].dtype), seed)


def test_the_torch_backend() -> None:
    layout = replace(LAYOUTS["fp32 odd, bias, norms"], dtype=torch.float64)
    for seed in range(12):
        check(layout, TorchBackend("cpu", torch.float64), seed, tolerance=1e-4)


def test_the_triton_backend() -> None:
    pytest.importorskip("triton")
    import triton_interpreter
    from surefoot.kernels.triton.backend import TritonBackend

    if triton_interpreter.ON_GPU:
        pytest.skip("tests/gpu run the same checks compiled")
    for seed in range(4):
        check(LAYOUTS["fp32"], TritonBackend("cpu", torch.float32), seed, 4, tolerance=1e-5)
