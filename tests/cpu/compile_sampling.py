"""Compiles the kernels that sample and that pick drafts for Hopper, without a GPU
(``test_gluon.py``): what Triton's interpreter runs, a constant that rules a branch out for one,
need not compile.

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
from surefoot.kernels.triton import drawn_picks
from surefoot.kernels.triton.logprobs import row_logprobs
from surefoot.kernels.triton.markov import add_looked_up
from surefoot.kernels.triton.markov_picks import draw_markov, walk
from surefoot.kernels.triton.products import TritonLinear
from surefoot.kernels.triton.sampling import draw
from surefoot.kernels.triton.several import draw_several
from surefoot.sampling.params import SamplingStages, SlotParams
from surefoot.sampling.sampler import SampleRows, adjustments_of, draws_of

TYPES = {
    torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.bfloat16: "*bf16"
}  # fmt: skip
OPTIONS = "num_warps", "enable_fp_fusion"
ROWS, VOCAB, TILES = 8, 49152, 256
STEPS, WIDTH, RANK = 1, 8192, 64


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
    before = torch.zeros(VOCAB, RANK, dtype=torch.bfloat16)
    after = TritonLinear(before[:WIDTH], None)
    drafts = torch.zeros(STEPS, ROWS, WIDTH)
    tokens, chances = index.repeat(STEPS, 1), torch.zeros(STEPS, ROWS)
    add_looked_up(drafts[0], after.weight, before, index)
    walk(drafts, before, after.weight, index, index, tokens, chances)
    stages = SamplingStages(penalties=True, bias=True)
    adjustments = adjustments_of(rows, params, stages, index.int())
    draw_markov(
        drafts, before, after, index, index, draws_of(rows, params), adjustments, tokens,
        rows.history, tokens, chances,
    )  # fmt: skip
    drawn_picks.draw(drafts[0], index, draws_of(rows, params), rows.history, index, chances[0])
    draw_several(drafts[0], index, draws_of(rows, params), 4, 2)
