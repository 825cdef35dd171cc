"""Attention over short spans by chunks of keys, compiled, on fresh random inputs; NaN wherever no
key was written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_prompt_attention import batch_of, exact, pool
from test_real_shapes import relative

from surefoot.kernels.backend import AttentionShape
from surefoot.kernels.triton.attend import attend, work_of
from surefoot.kernels.triton.chunk_attention import chunk_attention
from surefoot.kernels.triton.chunk_kernel import combine_chunks_kernel
from surefoot.kernels.triton.chunk_list import ChunkWork, list_chunks
from surefoot.kernels.triton.launch import hopper
from surefoot.kernels.triton.prompt_attention import CHUNK_KEYS, list_tiles, prompt_attention

pytestmark = pytest.mark.gpu
SHAPES = [
    AttentionShape(32, 8, 128, 128**-0.5),
    AttentionShape(4, 4, 128, 0.1),
    AttentionShape(16, 2, 64, 0.125),
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(10, 2, 128, 0.09),
    AttentionShape(12, 1, 64, 0.125),
]


@pytest.fixture(autouse=True)
def _fresh_numbers() -> Iterator[None]:
    """New numbers in every run, printed when a test fails; NaN in whatever is not written."""
    if not hopper(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs a Hopper GPU")
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    random.seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.use_deterministic_algorithms(False)


def draw(count: int, longest: int) -> list[tuple[int, int]]:
    """Spans (first key, rows): single tokens, chains, and a few longer ones."""
    spans = []
    for _ in range(count):
        rows = random.choice([1, 1, 1, 4, 4, 9, 16, 17, 64])
        spans.append((random.randint(0, longest), rows))
    return spans


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("count", [1, 3, 11, 40])
def test_chunks_equal_the_twin_and_prompts_to_the_bit(
    shape: AttentionShape, block_size: int, count: int
) -> None:
    spans = [*draw(count, random.choice([300, 5 * CHUNK_KEYS])), (CHUNK_KEYS - 1, 2)]
    kv, tables = pool(spans, shape, block_size)
    for first_key in (0, 1):
        batch = replace(batch_of(spans, tables), first_key=first_key)
        q = torch.randn(batch.tokens.shape[0], shape.heads, shape.head_dim, dtype=torch.bfloat16)
        work = list_chunks(batch, shape, block_size)
        found = chunk_attention(q, kv, batch, shape, work)[:-3]
        prompts = prompt_attention(q, kv, batch, shape, list_tiles(batch, shape))[:-3]
        assert torch.equal(found, prompts), (spans, (found != prompts).float().mean())
        expected = exact(q, kv, batch, shape)[:-3]
        if first_key:
            nothing = batch.key_index[:-3] == 0
            assert (found[nothing] == 0).all()
            found, expected = found[~nothing], expected[~nothing]
        assert relative(found, expected) < 6e-3, spans


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 11, 130])
def test_blocks_in_both_directions_equal_the_twin(shape: AttentionShape, count: int) -> None:
    longest = random.choice([300, 5 * CHUNK_KEYS])
    spans = [(random.randint(0, longest), random.choice([2, 7, 16, 31, 63])) for _ in range(count)]
    spans.append((CHUNK_KEYS - 1, 16))
    kv, tables = pool(spans, shape, 16)
    batch = batch_of(spans, tables)
    rows = torch.tensor([n for _, n in spans])
    bits = ((torch.ones_like(rows) << rows) - 1).repeat_interleave(rows)
    mask = torch.cat([bits, torch.zeros(len(batch.tokens) - len(bits), dtype=torch.int64)])
    batch = replace(batch, mask=mask, all_masked=True, both_ways=True)
    q = torch.randn(len(batch.tokens), shape.heads, shape.head_dim, dtype=torch.bfloat16)
    work = work_of(batch, shape, kv)
    assert isinstance(work, ChunkWork)
    found = attend(q, kv, batch, shape, work)[: len(bits)]
    expected = exact(q, kv, batch, shape)[: len(bits)]
    assert relative(found, expected) < 6e-3, spans


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_company_and_splits_change_no_bit(
    shape: AttentionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (random.randint(2 * CHUNK_KEYS, 6 * CHUNK_KEYS), random.choice([1, 4]))
    others = draw(random.choice([3, 30, 150]), 2000)
    kv, tables = pool([own, *others], shape, 16)
    alone = batch_of([own], tables[:1], padding=0)
    count = own[1] + sum(n for _, n in others)
    q = torch.randn(count, shape.heads, shape.head_dim, dtype=torch.bfloat16)
    work = list_chunks(alone, shape, 16)
    assert int(work.split[0, 3]) > 1, "one request's keys are shared out"
    assert int(work.items[0, 0]) > 1
    expected = chunk_attention(q[: own[1]], kv, alone, shape, work)
    batch = batch_of([own, *others], tables)
    work = list_chunks(batch, shape, 16)
    q = torch.cat([q, q.new_zeros(3, *q.shape[1:])])
    found = chunk_attention(q, kv, batch, shape, work)
    assert torch.equal(found[: own[1]], expected), others
    # Nobody's keys are shared out where there is no room for parts.
    monkeypatch.setattr("surefoot.kernels.triton.chunk_list.MOST_PARTS", 0)
    whole = list_chunks(replace(batch, max_keys=1), shape, 16)
    assert whole.parts == 0
    found = chunk_attention(q, kv, batch, shape, whole)
    assert torch.equal(found[: own[1]], expected), others


def test_recorded_once_for_all_lengths() -> None:
    """A graph for so many spans gives what eager calls give, whatever their lengths are."""
    torch.use_deterministic_algorithms(False)  # Filling new tensors is no part of the graph.
    shape = SHAPES[0]

    def lengths() -> list[tuple[int, int]]:
        return [(random.choice([0, 3, 600, 4000]) + random.randint(0, 90), 4) for _ in range(9)]

    kv, tables = pool([(0, 4200)] * 9, shape, 16)
    batch = replace(batch_of(lengths(), tables, padding=0), max_keys=4200)
    q = torch.randn(36, 32, 128, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return chunk_attention(q, kv, batch, shape, list_chunks(batch, shape, 16))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(5):
        other = batch_of(lengths(), tables, padding=0)
        q.normal_()
        for name in ("key_index", "row_slot", "span_start"):
            getattr(batch, name).copy_(getattr(other, name))
        for name in ("first_row", "rows", "slot"):
            getattr(batch.spans, name).copy_(getattr(other.spans, name))
        graph.replay()
        assert torch.equal(captured, run())
        assert relative(captured, exact(q, kv, batch, shape)) < 6e-3


@pytest.mark.parametrize("used", [4, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8, 9, 10, 20])
def test_partial_results_are_added_up_in_ascending_order(chunks: int, used: int) -> None:
    pack, units, part_rows, width, rows = 4, 2, 8, 64, 2
    part = torch.randn(3 + chunks, units, part_rows, width)
    best = 3 * torch.randn(3 + chunks, units, part_rows)
    best[3 + chunks // 2] = float("-inf")  # A chunk of which nothing is seen.
    total = torch.rand_like(best) + 0.5
    part[3 + chunks // 2] = total[3 + chunks // 2] = 0.0
    if chunks == 1:
        best[3], part[3], total[3] = 1.0, 2.0, 4.0
    sums = torch.stack((best, total), dim=-1).contiguous()
    split = [[0, 1, 3, chunks, 0, 0, 0, 0], [1, 1, 3, chunks, 1, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]]
    out = torch.full((3, units * used, width), 7.0)
    scale = 0.7
    entries = torch.tensor(split, dtype=torch.int32)
    combine_chunks_kernel[(len(split), units)](
        part, sums, entries, out, scale, units * used, pack, used, width, part_rows, 4, 2, 8,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    own = slice(3, 3 + chunks)
    weights = torch.exp2((best[own] - best[own].amax(dim=0)) * scale)
    expected = (part[own] * weights[..., None]).sum(dim=0)
    expected /= (total[own] * weights).sum(dim=0)[..., None]
    for row in range(rows):
        found = out[row].view(units, used, width)
        torch.testing.assert_close(found, expected[:, row * pack : row * pack + used])
    assert (out[2] == 7.0).all(), "no tile of its own"
