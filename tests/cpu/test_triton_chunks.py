"""How attention over short spans is shared out, run by Triton's interpreter.

What computes the chunks and adds them up is written in Gluon, which has no interpreter: tests/gpu
hold it to torch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton import chunk_attention
from surefoot.kernels.triton.chunk_attention import list_chunks, packed_heads, rows_together
from surefoot.kernels.triton.chunk_kernel import BLOCKS
from surefoot.kernels.triton.prompt_attention import BLOCK_N, CHUNK_KEYS
from test_triton_prompts import masks_of
from triton_interpreter import DEVICE

pytestmark = [
    pytest.mark.skipif(triton_interpreter.ON_GPU, reason="tests/gpu run the same checks compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SHAPE = AttentionShape(32, 8, 128, 1.0)
THREES = AttentionShape(9, 3, 64, 1.0)
"""Three heads take the place of four."""
KV_BLOCK = 64
"""Keys of a block of the KV pool; two make a step."""
TILE_ROWS = 16
"""Rows of a tile: 64 queries of four heads each."""


def batch_of(
    spans: list[tuple[int, int]], longest: int, trees: list[bool] | None = None
) -> FlatBatch:
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
        block_tables=torch.randint(
            1 << 20, (len(spans), longest // KV_BLOCK), dtype=torch.int32, device=DEVICE
        ),
        span_start=torch.tensor([first for first, _ in spans], device=DEVICE).flip(0),
        max_keys=longest,
        mask=None if trees is None else masks_of(rows, trees),
        spans=SpanTable(rows.cumsum(0) - rows, rows, slots, max_rows=40),
    )


FIRST = st.sampled_from([0, 1, 500, 511, 512, 1000, 9000, 40000]) | st.integers(0, 3000)
ROWS = st.sampled_from([0, 1, 1, 4, 16, 17, 33]) | st.integers(0, 40)


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that there is not always room to split all."""
    monkeypatch.setattr(chunk_attention, "MOST_PARTS", 200)


STEP = CHUNK_KEYS // BLOCK_N


@pytest.mark.parametrize("shape", [SHAPE, THREES], ids=str)
@settings(max_examples=15)
@given(
    spans=st.lists(st.tuples(FIRST, ROWS), min_size=1, max_size=9),
    trees=st.none() | st.lists(st.booleans(), min_size=9, max_size=9),
    programs=st.sampled_from([5, 12, 66]),
    both_ways=st.booleans(),
)
def test_every_key_of_every_tile_is_worked_on_once(
    shape: AttentionShape,
    spans: list[tuple[int, int]],
    trees: list[bool] | None,
    programs: int,
    both_ways: bool,
) -> None:
    trees = None if trees is None or both_ways else trees[: len(spans)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "programs_of", lambda *_: programs)
        batch = replace(batch_of(spans, 1 << 16, trees), both_ways=both_ways)
        work = list_chunks(batch, shape, KV_BLOCK)
    found = work.items.tolist()
    assert found[0][0] < len(found)
    items = found[1 : 1 + found[0][0]]
    pack = packed_heads(shape)[0]
    together = rows_together(pack)
    pieces = [entry[:5] for entry in work.split.tolist() if entry[1] > 0]
    assert all(entry[1] <= together for entry in pieces)
    split: dict[int, list[list[int]]] = {}
    for piece in pieces:
        split.setdefault(piece[0] - piece[4], []).append(piece)
    row, parts, tiles = 0, [], 0
    for index, (first, count) in enumerate(spans):
        for at in range(0, 0 if trees and trees[index] else count, TILE_ROWS):
            rows, slot = min(TILE_ROWS, count - at), len(spans) - 1 - index
            own = sorted((item for item in items if item[0] == row + at), key=lambda i: i[6])
            tiles += len(own)
            sees = first + count - 1 if both_ways else first + at
            expected = [row + at, rows, sees, slot, first + count]
            assert all(item[:5] == expected and item[8] == first for item in own)
            end = first + (count if both_ways else at + rows)
            last = -(-end // BLOCK_N)
            for item in own:
                # Pages behind the last are that one once more.
                pages = [min(2 * item[6] + page, (end - 1) // KV_BLOCK) for page in (0, 1)]
                blocks = item[BLOCKS.value : BLOCKS.value + 2]
                assert blocks == batch.block_tables[slot, pages].tolist()
            if row + at not in split:
                assert [item[5:8] for item in own] == [[-1, 0, last]]
                continue
            # Each of its rows is added up once, from all of its partial results.
            added = sorted(split[row + at])
            assert [n for piece in added for n in range(piece[0], piece[0] + piece[1])] == list(
                range(row + at, row + at + rows)
            )
            [(first_part, chunks)] = {(piece[2], piece[3]) for piece in added}
            assert chunks == -(-last // STEP)
            parts += range(first_part, first_part + chunks)
            seen = [item for item in own if item[5] >= 0]
            # Together they have every step, and each begins with a chunk of its own.
            assert [item[6] for item in seen] == [0, *(item[7] for item in seen[:-1])]
            assert seen[-1][7] == last and len(own) > 1
            assert all(item[5] == first_part + item[6] // STEP for item in seen)
            assert all(item[6] % STEP == 0 for item in seen)
            for item in own[len(seen) :]:
                assert item[5] == -2 and item[6] >= last and item[7] == item[6] + 1
        row += count
    assert tiles == len(items)
    assert len(set(parts)) == len(parts) <= work.parts and max(parts, default=0) < work.parts
    lengths = [-(-(item[7] - item[6]) // STEP) for item in items if item[5] != -2]
    longest = max(lengths, default=0)
    # A tile may end a chunk before its span does, by which the list is ordered.
    assert not items or items[0][5] == -2 or lengths[0] >= longest - 1


def test_one_long_text_is_shared_out_and_a_crowd_of_equals_is_not() -> None:
    alone = list_chunks(batch_of([(8191, 1)], 8192), SHAPE, KV_BLOCK)
    assert int(alone.items[0, 0]) == 16 and alone.split[0, :5].tolist() == [0, 1, 0, 32, 0]
    crowd = list_chunks(batch_of([(767, 1)] * 32, 8192), SHAPE, KV_BLOCK)
    assert int(crowd.items[0, 0]) == 32 and not crowd.split[:, 1].any()
    longer = list_chunks(batch_of([(767, 1)] * 31 + [(20000, 1)], 40960), SHAPE, KV_BLOCK)
    assert longer.split[0].tolist()[3] == 79
    runs = longer.items[1 : 1 + int(longer.items[0, 0]), 0] == 31
    assert 12 <= int(runs.sum()) <= 18
    assert list_chunks(batch_of([(767, 1)] * 128, 2560), SHAPE, KV_BLOCK).parts == 0


def test_too_little_room_for_parts_splits_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "MOST_PARTS", 40)
    work = list_chunks(batch_of([(8191, 1), (5000, 1), (8000, 1)], 8192), SHAPE, KV_BLOCK)
    assert work.parts == 40
    assert sum(entry[3] for entry in work.split.tolist() if entry[1] and not entry[4]) <= 40
    monkeypatch.setattr(chunk_attention, "MOST_PARTS", 0)
    work = list_chunks(batch_of([(8191, 1), (5000, 1), (8000, 1)], 8192), SHAPE, KV_BLOCK)
    assert work.parts == 0 and int(work.items[0, 0]) == 3 and not work.split[:, 1].any()


def test_groups_are_padded_to_a_power_of_two() -> None:
    found = [packed_heads(AttentionShape(2 * n, 2, 64, 1.0)) for n in (1, 3, 4, 7, 12, 64, 65)]
    assert found == [(1, 1), (4, 3), (4, 4), (8, 7), (16, 12), (64, 64), (1, 1)]
