"""Which spans are cut into tiles, and their list, run by Triton's interpreter.

What computes the tiles is written in Gluon, which has no interpreter: tests/gpu hold it to torch.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton import backend as triton_backend
from surefoot.kernels.triton.attend import worth_tiles
from surefoot.kernels.triton.backend import TritonBackend
from surefoot.kernels.triton.prompt_attention import fits, list_tiles, rows_per_tile
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
GROUPED = AttentionShape(8, 2, 128, 1.0)


def batch_of(spans: list[tuple[int, int]], trees: list[bool] | None = None) -> FlatBatch:
    """Spans (first key, rows) by slot, the slots in falling order, with two rows of padding."""
    rows = torch.tensor([rows for _, rows in spans], device=DEVICE)
    slots = torch.arange(len(spans), device=DEVICE).flip(0)
    keys = [torch.arange(first, first + count, device=DEVICE) for first, count in spans]
    keys = torch.cat([*keys, torch.zeros(2, dtype=torch.int64, device=DEVICE)])
    row_slot = torch.cat([slots.repeat_interleave(rows), slots.new_full((2,), -1)])
    return FlatBatch(
        tokens=torch.zeros_like(keys),
        positions=keys,
        key_index=keys,
        row_slot=row_slot,
        block_tables=torch.zeros((len(spans), 1), dtype=torch.int32, device=DEVICE),
        span_start=torch.tensor([first for first, _ in spans], device=DEVICE).flip(0),
        max_keys=999,
        mask=None if trees is None else masks_of(rows, trees),
        spans=SpanTable(rows.cumsum(0) - rows, rows, slots, max_rows=300),
    )


def masks_of(rows: torch.Tensor, trees: list[bool]) -> torch.Tensor:
    """Of chains and trees; a tree's last row may see 64 keys of it."""
    masks = [torch.full((count,), -1, device=DEVICE) for count in rows.tolist()]
    for mask, tree in zip(masks, trees, strict=True):
        mask[:-1] = 1 if tree else -1
        if tree and len(mask) == 1:
            mask[0] = 1
    return torch.cat([*masks, torch.full((2,), -1, device=DEVICE)])


SPANS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 32, 64, 100, 320]) | st.integers(0, 400),
        st.sampled_from([0, 1, 32, 33, 64, 65, 128, 200]) | st.integers(0, 150),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("shape", [GROUPED, AttentionShape(9, 3, 64, 1.0)])
@settings(max_examples=25)
@given(spans=SPANS, trees=st.none() | st.lists(st.booleans(), min_size=9, max_size=9))
def test_every_tile_is_listed_once_and_long_ones_come_first(
    shape: AttentionShape, spans: list[tuple[int, int]], trees: list[bool] | None
) -> None:
    trees = None if trees is None else trees[: len(spans)]
    batch, step = batch_of(spans, trees), rows_per_tile(shape)
    found = list_tiles(batch, shape).tolist()
    expected, row = [], 0
    for index, (first, count) in enumerate(spans):
        for at in range(0, 0 if trees and trees[index] else count, step):
            slot, rows = len(spans) - 1 - index, min(step, count - at)
            expected.append([row + at, rows, first + at, slot, first + count])
        row += count
    listed = [entry[:5] for entry in found[1 : 1 + found[0][0]]]
    assert sorted(listed) == sorted(expected)
    lengths = [key + rows for _, rows, key, _, _ in listed]
    assert lengths == sorted(lengths, reverse=True)


def test_only_long_spans_in_number_are_worth_tiles() -> None:
    shape = AttentionShape(32, 8, 128, 1.0)
    assert worth_tiles(2048, 1, 2048, shape, 132) and worth_tiles(2048 + 63, 64, 2048, shape, 132)
    assert not worth_tiles(2048, 512, 64, shape, 132), "verified drafts"
    assert not worth_tiles(128, 1, 128, shape, 132), "few tiles: keys are to be split"


def test_heads_that_are_packed_in_chunks_only_are_worth_tiles_where_few_spans_have_most_rows() -> (
    None
):
    threes = AttentionShape(9, 3, 64, 1.0)
    assert worth_tiles(2048, 16, 2048, threes, 132), "prompts"
    assert not worth_tiles(1024, 512, 1024, threes, 132), "most are single rows"
    assert worth_tiles(1024, 512, 1024, AttentionShape(32, 8, 128, 1.0), 132), "packed in both"


def test_heads_and_blocks_that_the_kernels_take() -> None:
    def taken(heads: int, kv_heads: int, width: int, block_size: int, dtype: torch.dtype) -> bool:
        kv = torch.zeros(2, 1, kv_heads, block_size, width, dtype=dtype)
        return fits(AttentionShape(heads, kv_heads, width, 1.0), kv)

    assert taken(32, 8, 128, 16, torch.bfloat16) and taken(9, 3, 64, 16, torch.bfloat16)
    assert not taken(32, 8, 128, 16, torch.float32)
    assert not taken(32, 8, 128, 24, torch.bfloat16)
    assert not taken(8, 2, 96, 16, torch.bfloat16) and not taken(8, 2, 80, 16, torch.bfloat16)


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_blocks_that_are_allowed_go_through_the_same_kernels(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others give other bits: a block size must not choose between them."""
    monkeypatch.setattr(triton_backend, "hopper", lambda _: True)
    shape = AttentionShape(8, 2, width, 1.0)
    backend = TritonBackend(DEVICE, dtype)
    least = backend.smallest_block(shape)
    allowed = range(1, 65) if least == 1 else (least, 2 * least, 4 * least, 8 * least)
    taken = {fits(shape, kv) for size in allowed for kv in backend.allocate_kv(1, 1, size, shape)}
    assert len(taken) == 1
