"""Span attention's fixed order: a row's bits are a function of its own text, run by Triton's
interpreter. ``test_triton_kernels`` holds the same kernels to torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton import attention
from test_triton_kernels import close_attention

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu/test_attention_invariant.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
Spans = Sequence[tuple[int, int]]
BLOCK = 8
CHUNK = 32
LENGTH = 107
"""Keys of the request that is looked at: more than three chunks."""
CASES = [
    (torch.bfloat16, AttentionShape(6, 2, 16, 0.25)),
    (torch.bfloat16, AttentionShape(1, 1, 80, 0.11)),
    (torch.float32, AttentionShape(5, 1, 96, 0.1)),
    (torch.float32, AttentionShape(4, 1, 16, 0.25)),
]


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer keys than a GPU is given, so that texts of several chunks are soon computed."""
    monkeypatch.setattr(attention, "MOST_CHUNK_KEYS", CHUNK)


class Text:
    """A request: queries, keys and values of every position."""

    def __init__(self, length: int, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.q = torch.randn(length, shape.heads, shape.head_dim).to(dtype)
        self.kv = torch.randn(2, length, shape.kv_heads, shape.head_dim).to(dtype)


def lay_out(
    texts: Sequence[Text],
    spans: Spans,
    block_size: int,
    max_keys: int,
    padding: int = 0,
    masks: Sequence[torch.Tensor] | None = None,
    table: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, FlatBatch]:
    """(q, KV, batch) of the rows of a span (first key, rows) of each text. Blocks lie in any
    order, and whatever no row has written is NaN. No ``table``: kernels look for the spans."""
    rows = torch.tensor([rows for _, rows in spans])
    starts, slots = torch.tensor([first for first, _ in spans]), torch.arange(len(spans))
    pages, one = -(-max_keys // block_size), texts[0].kv
    tables = 1 + torch.randperm(pages * len(spans)).view(-1, pages).int()
    size = (2, pages * len(spans) + 1, one.shape[2], block_size, one.shape[3])
    kv = torch.full(size, float("nan"), dtype=one.dtype)
    for text, (first, count), pages_of in zip(texts, spans, tables, strict=True):
        at = torch.arange(first + count)
        places = pages_of[at // block_size].long(), slice(None), at % block_size
        kv[:, *places] = text.kv[:, at].transpose(0, 1)
    ends = rows.cumsum(0)
    keys = torch.cat([torch.arange(first, first + count) for first, count in spans])
    keys = torch.cat([keys, keys.new_zeros(padding)])
    q = torch.cat([t.q[first : first + n] for t, (first, n) in zip(texts, spans, strict=True)])
    batch = FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys,
        key_index=keys,
        row_slot=torch.cat([slots.repeat_interleave(rows), slots.new_full((padding,), -1)]),
        block_tables=tables,
        span_start=starts,
        max_keys=max_keys,
        mask=None if masks is None else torch.cat([*masks, keys.new_full((padding,), -1)]),
        spans=SpanTable(ends - rows, rows, slots, max_rows=int(rows.max())) if table else None,
    )
    return torch.cat([q, q.new_zeros((padding, *q.shape[1:]))]), kv, batch


def attend(
    texts: Sequence[Text],
    spans: Spans,
    shape: AttentionShape,
    sms: int,
    padding: int = 0,
    masks: Sequence[torch.Tensor] | None = None,
    max_keys: int = LENGTH + 5,
    table: bool = True,
) -> list[torch.Tensor]:
    """What the rows of each span get, in one batch on ``sms`` multiprocessors."""
    q, kv, batch = lay_out(texts, spans, BLOCK, max_keys, padding, masks, table)
    counts = [count for _, count in spans]
    most = max(counts) if table else len(q)
    plan = attention.plan_attention(
        len(q), len(spans), most, max_keys, shape, sms, q.dtype.itemsize, paths=batch.has_paths
    )
    found = attention.span_attention(q, kv, batch, shape, plan)
    return list(found[: sum(counts)].split(counts))


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_a_row_s_bits_are_its_own(dtype: torch.dtype, shape: AttentionShape) -> None:
    """However its prompt is cut, whatever prefix was there, whoever is beside it, behind however
    much padding, and on however many multiprocessors."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    chance = random.Random(seed)
    own, other = Text(LENGTH, shape, dtype), Text(LENGTH, shape, dtype)
    [whole] = attend([own], [(0, LENGTH)], shape, sms=1)
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    exact = [x.double().transpose(0, 1) for x in (own.q, *own.kv)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *exact, attn_mask=visible, scale=shape.scale, enable_gqa=True
    )
    close_attention(whole, expected.transpose(0, 1).to(dtype))
    splits = set()
    places = [(0, 1), (31, 3), (60, 9), (LENGTH - 1, 1), (97, 10)]
    for (first, rows), left_out in zip(places, (1000, 1, 13, 1000, 1), strict=True):
        for sms in {1, 13, 1000} - {left_out}:
            company = [
                (chance.randrange(80), chance.choice([1, 4, 9]))
                for _ in range(chance.randint(0, 2))
            ]
            place = chance.randint(0, len(company))
            spans = [*company[:place], (first, rows), *company[place:]]
            texts = [own if index == place else other for index in range(len(spans))]
            masks = [torch.full((n,), -1) for _, n in spans] if chance.random() < 0.3 else None
            found = attend(
                texts, spans, shape, sms, chance.randint(0, 5), masks,
                LENGTH + chance.randint(0, 100), table=chance.random() < 0.7,
            )[place]  # fmt: skip
            assert torch.equal(found, whole[first : first + rows]), (spans, place, sms)
            count = sum(n for _, n in spans)
            most = max(n for _, n in spans)
            size = dtype.itemsize
            plan = attention.plan_attention(count, len(spans), most, 999, shape, sms, size)
            splits.add(plan.splits)
    assert len(splits) > 2, "keys were shared out in several ways"


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
@pytest.mark.parametrize("first", [0, 3, 29, 60, 63])
def test_a_tree_s_nodes_have_the_bits_of_chains(
    dtype: torch.dtype, shape: AttentionShape, first: int
) -> None:
    """Alone and beside chains and other trees, keys shared out or not, wherever a chunk ends."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    chance = random.Random(seed)
    text, other = Text(LENGTH, shape, dtype), Text(LENGTH, shape, dtype)
    for sms in (1, 1000):
        mask = grown(chance, chance.choice([2, 6, 17]))
        nodes = len(mask)
        crowd = [(3, 20), (first, nodes), (40, 3), (100, 1)]
        masks = [torch.full((n,), -1) for _, n in crowd]
        masks[1], masks[2] = mask, torch.tensor([1, 3, 5])
        alone = attend([text], [(first, nodes)], shape, sms, masks=[mask])[0]
        found = attend([other, text, other, other], crowd, shape, sms, 2, masks)
        assert torch.equal(alone, found[1]), "company"
        for node in range(nodes):
            path = path_of(text, first, int(mask[node]))
            [chain] = attend([path], [(len(path.q) - 1, 1)], shape, 1)
            assert torch.equal(alone[node], chain[0]), (seed, node, int(mask[node]))


def grown(chance: random.Random, nodes: int) -> torch.Tensor:
    """The masks of a random tree, if it has any nodes."""
    masks = [1]
    for node in range(1, nodes):
        masks.append(masks[chance.randrange(node)] | 1 << node)
    return torch.tensor([mask - (mask >> 63 << 64) for mask in masks[:nodes]])


def places_of(first: int, mask: int) -> list[int]:
    """Where the keys of a node's path lie: those before its tree, which begins at ``first``."""
    return [*range(first), *(first + bit for bit in range(64) if mask >> bit & 1)]


def path_of(text: Text, first: int, mask: int) -> Text:
    """The request that ends with a node's path, as a chain."""
    places, chain = places_of(first, mask), copy.copy(text)
    chain.kv, chain.q = text.kv[:, places], text.q[places]
    return chain


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "spans", "max_rows", "splits"),
    [(1, 1, 1, 8), (16, 1, 16, 8), (8, 8, 1, 2), (17, 17, 1, 1), (1024, 64, 16, 1)],
)
def test_keys_are_split_only_to_fill_the_gpu(
    rows: int, spans: int, max_rows: int, splits: int
) -> None:
    shape = AttentionShape(32, 8, 128, 1.0)
    plan = attention.plan_attention(rows, spans, max_rows, 1024, shape, 132)
    assert plan.splits == splits
    assert plan.programs == spans * -(-max_rows // 8)


def test_nothing_is_split_without_room_for_partial_results() -> None:
    plan = partial(attention.plan_attention, shape=AttentionShape(32, 8, 128, 1.0), sms=132)
    assert plan(4, 1, 4, 100_000).splits > 1
    assert plan(16, 1, 16, 100_000).splits == 1


@given(
    st.integers(1, 300), st.integers(1, 64), st.sampled_from([1, 3, 4, 5, 7, 8, 12, 32]),
    st.sampled_from([64, 80, 96, 128, 256]), st.sampled_from([2, 4]),
    st.sampled_from([30, 132]), st.sampled_from([101_376, 232_448]),
)  # fmt: skip
def test_what_decides_bits_is_the_same_for_every_load(
    rows: int, spans: int, group: int, head_dim: int, itemsize: int, sms: int, shared: int
) -> None:
    shape = AttentionShape(2 * group, 2, head_dim, 1.0)
    one = attention.plan_attention(1, 1, 1, 100, shape, 132, itemsize)
    plan = attention.plan_attention(rows * spans, spans, rows, 9000, shape, sms, itemsize, shared)
    assert (plan.block_m, plan.chunk, plan.num_warps) == (one.block_m, one.chunk, one.num_warps)
    assert plan.block_m >= max(group, 16)
    width = max(16, 1 << (head_dim - 1).bit_length())
    buffers = 2 * (plan.num_stages - 1) * plan.chunk * width + plan.block_m * width
    assert buffers * itemsize <= shared - 5_000, "shared memory of a processor"


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.sampled_from([1, 3, 4, 7, 8]))
def test_a_plan_has_a_program_for_every_tile(counts: list[int], group: int) -> None:
    if not any(counts):
        return
    shape = AttentionShape(2 * group, 2, 64, 1.0)
    for bound in (max(counts), 70):
        plan = attention.plan_attention(sum(counts), len(counts), bound, 500, shape, 132)
        per_tile = plan.block_m // group
        if plan.tiles:
            assert plan.programs == plan.tiles * len(counts)
            assert plan.tiles * per_tile >= max(counts)
        else:
            assert plan.programs >= sum(-(-count // per_tile) for count in counts)
