"""Attention over long spans, compiled, on fresh random inputs; NaN wherever no key was written."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_real_shapes import relative

from surefoot.kernels.attention import torch_paged
from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton.attend import LONG_SPAN, TileWork, attend, work_of
from surefoot.kernels.triton.launch import hopper
from surefoot.kernels.triton.prompt_attention import (
    CHUNK_KEYS,
    list_tiles,
    prompt_attention,
)

pytestmark = pytest.mark.gpu
bf16 = torch.bfloat16
Spans = Sequence[tuple[int, int]]


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


def pool(spans: Spans, shape: AttentionShape, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(KV, block tables) with blocks in any order and NaN behind each span's last key."""
    pages = [-(-(first + rows) // block_size) for first, rows in spans]
    kv = torch.randn(2, sum(pages) + 1, shape.kv_heads, block_size, shape.head_dim, dtype=bf16)
    order = iter(1 + torch.randperm(sum(pages)))
    tables = torch.zeros(len(spans), max(pages), dtype=torch.int32)
    for slot, (first, rows) in enumerate(spans):
        for page in range(pages[slot]):
            tables[slot, page] = next(order)
        known = (first + rows - 1) % block_size + 1
        kv[:, tables[slot, pages[slot] - 1].long(), :, known:] = float("nan")
    return kv, tables


def batch_of(spans: Spans, tables: torch.Tensor, padding: int = 3) -> FlatBatch:
    rows = torch.tensor([rows for _, rows in spans])
    slots = torch.arange(len(spans))
    starts = torch.tensor([first for first, _ in spans])
    ends = rows.cumsum(0)
    keys = torch.arange(int(ends[-1])) + (starts - ends + rows).repeat_interleave(rows)
    keys = torch.cat([keys, keys.new_zeros(padding)])
    return FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys,
        key_index=keys,
        row_slot=torch.cat([slots.repeat_interleave(rows), slots.new_full((padding,), -1)]),
        block_tables=tables,
        span_start=starts,
        max_keys=max(first + rows for first, rows in spans),
        spans=SpanTable(ends - rows, rows, slots, max_rows=int(rows.max())),
    )


def exact(q: torch.Tensor, kv: torch.Tensor, batch: FlatBatch, shape: AttentionShape):
    wide = kv.float().transpose(2, 3).contiguous()
    return torch_paged.span_attention(q.float(), wide, batch, shape)


SHAPES = [
    AttentionShape(32, 8, 128, 128**-0.5),
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(4, 4, 128, 0.1),
    AttentionShape(16, 2, 64, 0.125),
    AttentionShape(10, 2, 128, 0.09),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_prompts_equal_the_twin(shape: AttentionShape, block_size: int) -> None:
    length = 3 * CHUNK_KEYS
    spans = [(random.randrange(length), random.randint(1, 700)) for _ in range(5)]
    spans += [(0, random.randint(1, 200)), (random.randrange(length), 1), (0, CHUNK_KEYS)]
    kv, tables = pool(spans, shape, block_size)
    for first_key in (0, 1):
        batch = replace(batch_of(spans, tables), first_key=first_key)
        q = torch.randn(batch.tokens.shape[0], shape.heads, shape.head_dim, dtype=bf16)
        found = prompt_attention(q, kv, batch, shape, list_tiles(batch, shape))[:-3]
        expected = exact(q, kv, batch, shape)[:-3]
        if first_key:
            nothing = batch.key_index[:-3] == 0
            assert (found[nothing] == 0).all()
            found, expected = found[~nothing], expected[~nothing]
        assert relative(found, expected) < 6e-3, spans


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_row_s_bits_are_its_own(shape: AttentionShape) -> None:
    """However a prompt is cut, and whoever is there."""
    length = 5 * CHUNK_KEYS + random.randint(1, 300)
    kv, tables = pool([(0, length), (0, 700)], shape, 16)
    q = torch.randn(length, shape.heads, shape.head_dim, dtype=bf16)
    batch = batch_of([(0, length)], tables, padding=0)
    whole = prompt_attention(q, kv, batch, shape, list_tiles(batch, shape))
    first = 0
    while first < length:
        rows = min(length - first, random.choice([1, 5, 33, 100, 257, 640, 1500]))
        company = [(random.randint(0, 400), random.randint(1, 300)) for _ in range(3)]
        place = random.randint(0, 3)
        spans = [*company[:place], (first, rows), *company[place:]]
        # All of the company reads the keys of the same other request.
        own = torch.tensor([0 if index == place else 1 for index in range(4)])
        batch = batch_of(spans, tables[own], padding=random.randint(0, 9))
        before = sum(count for _, count in company[:place])
        others = torch.randn(batch.tokens.shape[0], *q.shape[1:], dtype=bf16)
        others[before : before + rows] = q[first : first + rows]
        found = prompt_attention(others, kv, batch, shape, list_tiles(batch, shape))
        assert torch.equal(found[before : before + rows], whole[first : first + rows]), spans
        first += rows


def test_prompts_among_trees() -> None:
    shape = SHAPES[0]
    spans = [(300, 9), (random.randint(0, 900), 700), (40, LONG_SPAN), (0, LONG_SPAN + 1)]
    kv, tables = pool(spans, shape, 16)
    batch = batch_of(spans, tables)
    within = batch.key_index - batch.span_start[batch.row_slot]
    bits = torch.randint(0, 2**62, within.shape) & ((2 << within.clamp(max=61)) - 1)
    bits |= 1 << within.clamp(max=62)
    long = (batch.row_slot == 1) | (batch.row_slot == 3)
    batch = replace(batch, mask=torch.where(long, -1, bits))
    q = torch.randn(batch.tokens.shape[0], 32, 128, dtype=bf16)
    work = work_of(batch, shape, kv)
    assert isinstance(work, TileWork) and work.trees is not None
    assert int(work.tiles[0, 0]) == -(-700 // 32) + -(-(LONG_SPAN + 1) // 32)
    found = attend(q, kv, batch, shape, work)
    assert relative(found[:-3], exact(q, kv, batch, shape)[:-3]) < 6e-3


def test_recorded_once_for_all_partitions() -> None:
    """A graph for so many rows and spans gives what eager calls give, whatever the spans are."""
    torch.use_deterministic_algorithms(False)  # Filling new tensors is no part of the graph.
    shape, rows = SHAPES[0], 640

    def draw() -> list[tuple[int, int]]:
        cuts = sorted(random.sample(range(rows), 5))
        counts = [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]
        return [(random.randint(0, 900), count) for count in counts]

    kv, tables = pool([(0, 1600)] * 6, shape, 16)
    batch = replace(batch_of(draw(), tables, padding=0), max_keys=1600)
    q = torch.randn(rows, 32, 128, dtype=bf16)

    def run() -> torch.Tensor:
        return prompt_attention(q, kv, batch, shape, list_tiles(batch, shape))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(5):
        other = batch_of(draw(), tables, padding=0)
        q.normal_()
        for name in ("key_index", "row_slot", "span_start"):
            getattr(batch, name).copy_(getattr(other, name))
        for name in ("first_row", "rows", "slot"):
            getattr(batch.spans, name).copy_(getattr(other.spans, name))
        graph.replay()
        assert torch.equal(captured, run())
        assert relative(captured, exact(q, kv, batch, shape)) < 6e-3
