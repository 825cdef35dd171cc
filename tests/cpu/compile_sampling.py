"""Compiles the kernels that sample for Hopper, without a GPU (``test_gluon.py``): what Triton's
interpreter runs, a constant that rules a branch out for one, need not compile.

A program of its own: what is defined while Triton interprets does not compile.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from surefoot.kernels.draws import Maxima
from surefoot.kernels.logprobs import ScoredSpans
from surefoot.kernels.triton.logprobs import row_logprobs
from surefoot.kernels.triton.sampling import draw
from surefoot.sampling.params import SlotParams
from surefoot.sampling.sampler import SampleRows, draws_of

TYPES = {torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
OPTIONS = "num_warps", "enable_fp_fusion"
ROWS, VOCAB, TILES = 8, 49152, 256


def compile_only(kernel: Any, *args: Any, grid: Any, **named: Any) -> None:
    """In place of a launch."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    del named["warmup"]
    given = inspect.signature(kernel.fn).bind(*args, **named).arguments
    signature, constants = {}, {}
    for place, (name, value) in enumerate(given.items()):
        if kernel.params[place].is_constexpr or value is None:
            signature[name], constants[place,] = "constexpr", value
        else:
            signature[name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    source = ASTSource(kernel, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.fn.__name__)


if __name__ == "__main__":
    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    logits, index = torch.zeros(ROWS, VOCAB), torch.arange(ROWS)
    params = SlotParams(ROWS, VOCAB, torch.device("cpu"))
    rows = SampleRows(index, index, index.unsqueeze(1), 1)
    told = Maxima(torch.zeros(ROWS, TILES), torch.zeros(ROWS, TILES, dtype=torch.int32))
    draw(logits, draws_of(rows, params))
    draw(logits, draws_of(rows, params, False, told))
    row_logprobs(logits, index, 2)
    for steps in (None, index.unsqueeze(1)):
        row_logprobs(logits, index, 2, ScoredSpans(index, index[:1], 1, steps))
