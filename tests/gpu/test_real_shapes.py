"""The Triton kernels compiled, on a real model's shapes and fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from surefoot.bench.cuda_shapes import BLOCK, QWEN3_4B, make_batch
from surefoot.kernels import reference as ops
from surefoot.kernels.attention import torch_paged
from surefoot.kernels.backend import AttentionShape, FlatBatch, RopeTable
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.kernels.triton import pdl
from surefoot.kernels.triton.attention import span_attention
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.matmul_plan import TUNED_ON, default_plan
from surefoot.kernels.triton.products import TritonLinear, matmul
from surefoot.kernels.triton.qkv import project_qkv
from surefoot.kernels.triton.rope_kv import rope_and_write
from surefoot.models.config import ModelConfig
from surefoot.models.decoder import Decoder
from surefoot.models.dummy import DummyWeights

pytestmark = pytest.mark.gpu
SHAPES = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
SHAPE = AttentionShape(32, 8, 128, 128**-0.5)
bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """New numbers in every run, printed when a test fails; NaN in whatever is not written."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to the row; NaN does not pass a comparison."""
    error = (found.double() - expected.double()).flatten(1).norm(dim=1)
    return float((error / expected.double().flatten(1).norm(dim=1)).max())


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_few_rows(name: str) -> None:
    outputs, inputs = SHAPES[name]
    weight = torch.randn(outputs, inputs, dtype=bf16) * 0.02
    packed = TritonLinear(weight, None)
    norm = torch.rand(outputs, dtype=bf16) + 0.5, 1e-6
    for rows in (1, 2, 5, 16, 17, 33, 64, 72, 96, 100, 128):
        x = torch.randn(rows, inputs, dtype=bf16)
        residual = torch.randn(rows, outputs, dtype=bf16)
        exact = x.float() @ weight.float().T
        assert relative(packed.wide(x), exact) < 1e-5
        assert relative(packed(x), exact) < 4e-3
        total, normed = packed.added_normed(x, residual, norm)
        assert relative(total, exact.to(bf16).float() + residual.float()) < 4e-3
        assert relative(normed, ops.rms_norm(total, *norm)) < 4e-3
        gate, up = exact.chunk(2, dim=1)
        assert relative(packed.gated(x), torch.nn.functional.silu(gate) * up) < 8e-3
        untuned = default_plan(rows, outputs, inputs, False, 2, *TUNED_ON)
        assert relative(matmul(x, weight, plan=untuned), exact) < 4e-3


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "width"), [(576, 9, 3, 64), (2560, 32, 8, 128)]
)
def test_one_kernel_projects_rotates_and_writes(
    hidden: int, heads: int, kv_heads: int, width: int
) -> None:
    """As torch's product and the kernel for the rest; a row's bits are its own."""
    shape = AttentionShape(heads, kv_heads, width, 1.0)
    weight = torch.randn((heads + 2 * kv_heads) * width, hidden, dtype=bf16) * 0.05
    angles = torch.rand(4096, width // 2) * 6
    rope = RopeTable(angles.cos(), angles.sin())
    x, alone = torch.randn(128, hidden, dtype=bf16), None
    for rows in (1, 5, 16, 31, 64, 75, 96, 128):
        batch = ragged(make_batch(rows, 1, 900, 1000), 900)
        pools = [torch.zeros(2, rows * 57 + 1, kv_heads, BLOCK, width, dtype=bf16) for _ in "12"]
        found = project_qkv(x[:rows], weight, None, pools[0], batch, shape, rope)
        product = (x[:rows].float() @ weight.float().T).to(bf16)
        expected = rope_and_write(product, pools[1], batch, shape, rope)
        assert relative(found, expected) < 6e-3
        assert relative(*(pool.view(1, -1) for pool in pools)) < 6e-3
        assert pools[0].count_nonzero() == pools[1].count_nonzero()
        alone = found[:1] if alone is None else alone
        assert torch.equal(found[:1], alone), rows  # Its position is always the same.


# --- attention ----------------------------------------------------------------------------------


def ragged(batch: FlatBatch, context: int) -> FlatBatch:
    """The batch with every span at a place of its own, between the first key and ``context``."""
    starts = torch.randint(0, context, batch.span_start.shape)
    starts[0] = context
    keys = starts[batch.row_slot] + batch.key_index - batch.span_start[batch.row_slot]
    return replace(batch, span_start=starts, key_index=keys, positions=keys)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 16, 64])
def test_span_attention(requests: int, masked: bool) -> None:
    context = 1024
    for rows in (1, 4, 5, 16, 63):
        batch = ragged(make_batch(requests, rows, context, 1000), context)
        if masked:
            within = batch.key_index - batch.span_start[batch.row_slot]
            bits = torch.randint(0, 2**62, within.shape) & ((2 << within) - 1)
            batch = replace(batch, mask=bits | (1 << within))
        blocks = requests * (-(-(context + rows) // BLOCK)) + 1
        kv = torch.randn(2, blocks, 8, BLOCK, 128, dtype=bf16)
        q = torch.randn(requests * rows, 32, 128, dtype=bf16)
        found = span_attention(q, kv, batch, SHAPE)
        wide = kv.float().transpose(2, 3).contiguous()
        expected = torch_paged.span_attention(q.float(), wide, batch, SHAPE)
        assert relative(found, expected) < 6e-3, rows
        searched = replace(batch, spans=None)
        assert relative(span_attention(q, kv, searched, SHAPE), expected) < 6e-3, rows


# --- a step -------------------------------------------------------------------------------------


def small_decoder(dtype: torch.dtype, layers: int = 3) -> Decoder:
    """Real widths, few layers."""
    sizes = dict(layers=layers, vocab_size=8000, max_positions=4096)
    config = ModelConfig(**{**QWEN3_4B, **sizes})
    backend = TritonBackend("cuda", dtype)
    return Decoder(config, DummyWeights(config, torch.device("cuda"), bf16), backend)


@pytest.mark.parametrize("requests", [1, 5, 40, 130])
def test_a_step_equals_torch_in_float32(requests: int) -> None:
    context, found = 200, small_decoder(bf16)
    config = found.config
    torch_backend = TorchBackend("cuda", torch.float32)
    exact = Decoder(config, DummyWeights(config, torch.device("cuda"), bf16), torch_backend)
    fill = make_batch(requests, context, 0, 8000)
    batch = replace(make_batch(requests, 3, context, 8000), block_tables=fill.block_tables)
    pages = -(-(context + 3) // BLOCK)
    order = 1 + torch.randperm(requests * pages)
    batch.block_tables[:, :pages] = order.view(requests, -1)
    results = []
    for decoder in (found, exact):
        kv = decoder.backend.allocate_kv(3, requests * pages + 1, BLOCK, decoder.shape)
        decoder.forward(fill, kv)
        results.append(decoder.logits(decoder.forward(batch, kv).hidden))
    assert relative(*results) < 2e-2


def test_replays_with_growing_lengths_equal_eager_steps() -> None:
    """Two requests grow by 1 and 3 rows a round, captured once, over 2,000 tokens; and dependent
    launches change no bit."""
    torch.use_deterministic_algorithms(False)  # Filling new tensors would keep launches apart.
    decoder, rounds = small_decoder(bf16, layers=2), 667
    batch = make_batch(2, 3, 0, 8000)
    pages = batch.block_tables.shape[1]
    batch.block_tables.copy_((1 + torch.randperm(2 * pages)).view(2, -1))
    batch = replace(batch, max_keys=4096)
    pools = [decoder.backend.allocate_kv(2, 2 * pages + 1, BLOCK, decoder.shape) for _ in "12"]
    graph = torch.cuda.CUDAGraph()
    for kv in pools:
        decoder.forward(batch, kv)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = decoder.forward(batch, pools[0]).hidden
    plain = {"PDL": False}
    with pytest.MonkeyPatch.context() as patch:
        for module in ("matmul", "large_matmul", "norm", "rope_kv", "attention", "activation"):
            patch.setattr(f"surefoot.kernels.triton.{module}.pdl", lambda _: plain)
        for round_ in range(rounds):
            batch.tokens.copy_(torch.randint(0, 8000, (6,)))
            graph.replay()
            eager = decoder.forward(batch, pools[1]).hidden
            assert torch.equal(captured, eager), f"round {round_}"
            for rows in (batch.positions, batch.span_start):
                rows[: rows.shape[0] // 2] += 1
                rows[rows.shape[0] // 2 :] += 3
    assert int(batch.span_start[1]) == 3 * rounds
    assert pdl.overlaps(torch.device("cuda")) == (torch.cuda.get_device_capability()[0] >= 9)
