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

from surefoot.kernels.attention import torch_paged
from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton import attention
from surefoot.kernels.triton.prompt_attention import list_tiles, rows_per_tile, worth_tiles
from test_triton_kernels import attention_case, close_attention
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
GROUPED = AttentionShape(8, 2, 128, 1.0)


def batch_of(spans: list[tuple[int, int]]) -> FlatBatch:
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
        spans=SpanTable(rows.cumsum(0) - rows, rows, slots, max_rows=300),
    )


SPANS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 32, 64, 100, 320]) | st.integers(0, 400),
        st.sampled_from([0, 1, 32, 33, 64, 65, 128, 200]) | st.integers(0, 150),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("shape", [GROUPED, AttentionShape(9, 3, 64, 1.0)])
@settings(deadline=None, max_examples=25)
@given(spans=SPANS, least=st.sampled_from([1, 65]))
def test_every_tile_is_listed_once_and_long_ones_come_first(
    shape: AttentionShape, spans: list[tuple[int, int]], least: int
) -> None:
    batch, step = batch_of(spans), rows_per_tile(shape)
    found = list_tiles(batch, shape, least).tolist()
    expected, row = [], 0
    for index, (first, count) in enumerate(spans):
        for at in range(0, count if count >= least else 0, step):
            slot, rows = len(spans) - 1 - index, min(step, count - at)
            expected.append([row + at, rows, first + at, slot, first + count])
        row += count
    listed = [entry[:5] for entry in found[1 : 1 + found[0][0]]]
    assert sorted(listed) == sorted(expected)
    lengths = [key + rows for _, rows, key, _, _ in listed]
    assert lengths == sorted(lengths, reverse=True)


def test_only_long_spans_in_number_are_worth_tiles() -> None:
    shape = AttentionShape(32, 8, 128, 1.0)
    usual = dict(shape=shape, dtype=torch.bfloat16, block_size=16, sms=132)
    assert worth_tiles(2048, 2048, **usual) and worth_tiles(2048 + 63, 2048, **usual)
    assert not worth_tiles(2048, 64, **usual), "verified drafts"
    assert not worth_tiles(128, 128, **usual), "few tiles: keys are to be split"
    for odd in (
        {"dtype": torch.float32},
        {"block_size": 24},
        {"shape": AttentionShape(32, 8, 96, 1.0)},
        {"shape": AttentionShape(32, 8, 80, 1.0)},
    ):
        assert not worth_tiles(2048, 2048, **{**usual, **odd})


@pytest.mark.parametrize("tiles", [0, 2])
def test_longer_spans_may_be_left_out(tiles: int) -> None:
    shape = AttentionShape(2, 1, 16, 0.25)
    q, kv, batch = attention_case([(5, 9), (4, 20), (30, 8)], shape, torch.float32, True)
    programs = 3 * tiles if tiles else 3  # None for tiles of the long span.
    plan = attention.AttentionPlan(16, 32, 2, tiles, programs, 4, 2)
    own = kv.transpose(2, 3).contiguous()
    found = attention.span_attention(q, own, batch, shape, plan, longest=9)
    expected = torch_paged.span_attention(q, kv, batch, shape)
    short = torch.cat([torch.arange(9), torch.arange(29, 37)])
    close_attention(found[short], expected[short])
