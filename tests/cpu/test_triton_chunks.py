"""How attention over short spans is shared out, run by Triton's interpreter.

What computes the chunks and adds them up is written in Gluon, which has no interpreter: tests/gpu
hold it to torch.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton_interpreter  # isort: skip

from surefoot.kernels.backend import AttentionShape, FlatBatch, SpanTable
from surefoot.kernels.triton import chunk_attention, chunk_list
from surefoot.kernels.triton.chunk_attention import path_keys
from surefoot.kernels.triton.chunk_kernel import BLOCKS
from surefoot.kernels.triton.chunk_list import list_chunks, packed_heads, rows_together
from surefoot.kernels.triton.prompt_attention import BLOCK_N, CHUNK_KEYS
from test_triton_attention import Text, grown, lay_out, places_of
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


def batch_of(spans: list[tuple[int, int]], longest: int) -> FlatBatch:
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
        spans=SpanTable(rows.cumsum(0) - rows, rows, slots, max_rows=40),
    )


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""Each example is hundreds of interpreted programs: smaller ones that fail are not looked for."""
FIRST = st.sampled_from([0, 1, 500, 511, 512, 1000, 9000, 40000]) | st.integers(0, 3000)
ROWS = st.sampled_from([0, 1, 1, 4, 16, 17, 33]) | st.integers(0, 40)


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that there is not always room to split all."""
    monkeypatch.setattr(chunk_list, "MOST_PARTS", 200)


STEP = CHUNK_KEYS // BLOCK_N


@pytest.mark.parametrize("shape", [SHAPE, THREES], ids=str)
@settings(max_examples=15, phases=PHASES)
@given(
    spans=st.lists(st.tuples(FIRST, ROWS), min_size=1, max_size=9),
    programs=st.sampled_from([5, 12, 66]),
    both_ways=st.booleans(),
)
def test_every_key_of_every_tile_is_worked_on_once(
    shape: AttentionShape,
    spans: list[tuple[int, int]],
    programs: int,
    both_ways: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_list, "programs_of", lambda *_: programs)
        batch = replace(batch_of(spans, 1 << 16), both_ways=both_ways)
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
        for at in range(0, count, TILE_ROWS):
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


@pytest.mark.parametrize("shape", [SHAPE, THREES], ids=str)
@settings(max_examples=10, phases=PHASES)
@given(
    spans=st.lists(st.tuples(FIRST, st.sampled_from([0, 1, 6, 17, 33])), min_size=1, max_size=4),
    trees=st.lists(st.booleans(), min_size=4, max_size=4),
    programs=st.sampled_from([5, 12, 66]),
    only_trees=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_nodes_share_what_lies_before_their_tree(
    shape: AttentionShape,
    spans: list[tuple[int, int]],
    trees: list[bool],
    programs: int,
    only_trees: bool,
    chance: Random,
) -> None:
    """Every chunk that a node sees is worked on once, with the keys of its path in its own blocks,
    and partial results are added up for each node by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_list, "programs_of", lambda *_: programs)
        batch, masks = batch_of(spans, 1 << 16), []
        for tree, (_, count) in zip(trees, spans, strict=False):
            masks += grown(chance, count).tolist() if tree else [-1] * count
        mask = torch.tensor([*masks, -1, -1], device=DEVICE)
        batch = replace(batch, mask=mask, tree_rows=chance.choice([40, 64]))
        work = list_chunks(batch, shape, KV_BLOCK, only_trees)
    found = work.items.tolist()
    assert found[0][0] < len(found)
    items = found[1 : 1 + found[0][0]]
    pieces = {entry[0]: entry[1:5] for entry in work.split.tolist() if entry[1] > 0}
    row, parts, listed, paths = 0, [], 0, []
    for index, (first, count) in enumerate(spans):
        slot = len(spans) - 1 - index
        own = [item for item in items if item[3] == slot]
        listed += len(own)
        if not trees[index]:
            assert not own if only_trees else all(item[9:11] == [0, -1] for item in own)
            row += count
            continue
        nodes = [item for item in own if item[10] >= 0]
        assert sorted(item[0] for item in nodes) == list(range(row, row + count))
        tiles = [item for item in own if item[10] < 0]
        shared = nodes[0][6] // STEP if nodes else 0
        assert shared in (0, first // CHUNK_KEYS) and bool(shared) == bool(tiles)
        for item in nodes:
            node = item[0] - row
            last = first + masks[item[0]].bit_count()
            step_end = -(-last // BLOCK_N) * BLOCK_N
            assert item[1:5] == [1, last - 1, slot, step_end] and item[8] == first
            assert item[6:8] == [shared * STEP, -(-last // BLOCK_N)]
            blocks = -(-(last - first // KV_BLOCK * KV_BLOCK) // KV_BLOCK)
            paths.append(item[10] // work.path_blocks)
            assert item[10] % work.path_blocks == 0 and blocks <= work.path_blocks
            assert work.nodes[1 + paths[-1]].tolist() == [item[0], slot, first, last - 1]
            for page, block in enumerate(item[BLOCKS.value : BLOCKS.value + 2], 2 * item[6]):
                page = min(page, (last - 1) // KV_BLOCK)
                beyond = page - first // KV_BLOCK
                own_block = -1 - item[10] - beyond
                expected = own_block if beyond >= 0 else int(batch.block_tables[slot, page])
                assert block == expected
            if not shared:
                assert item[5] == -1 and item[0] not in pieces
                continue
            together = [t for t in tiles if t[0] == row + node // TILE_ROWS * TILE_ROWS]
            together.sort(key=lambda t: t[6])
            assert [t[6] for t in together] == [0, *(t[7] for t in together[:-1])]
            assert together[-1][7] == shared * STEP
            rows = min(TILE_ROWS, count - node // TILE_ROWS * TILE_ROWS)
            assert all(t[1:5] == [rows, first, slot, first + count] for t in together)
            part = together[0][5]
            assert all(t[5] == part + t[6] // STEP for t in together)
            assert item[5] == part + shared and item[9] == node % TILE_ROWS
            chunks = -(-last // CHUNK_KEYS)
            assert pieces.pop(item[0]) == [1, part, chunks, item[9]]
            parts += [(part + chunk, item[9]) for chunk in range(chunks)]
        row += count
    assert listed == len(items)
    assert len(set(parts)) == len(parts) and all(part < work.parts for part, _ in parts)
    assert sorted(paths) == list(range(int(work.nodes[0, 0]))) and len(paths) < len(work.nodes)
    if only_trees:
        assert not pieces


@pytest.mark.parametrize("copying", [12, 0])
def test_the_keys_of_each_path_are_laid_out_in_a_line(
    copying: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning of the block that the tree begins in, wherever that is, by as many
    programs as there are nodes or by one."""
    monkeypatch.setattr(chunk_attention, "COPYING", copying)
    torch.manual_seed(1)
    chance, shape = Random(1), AttentionShape(2, 2, 64, 1.0)
    spans = [(37, 9), (5, 1), (8, 17), (0, 3), (30, 4)]
    masks = [grown(chance, count) for _, count in spans]
    masks[3] = torch.full((3,), -1)
    texts = [Text(46, shape, torch.bfloat16) for _ in spans]
    _, kv, batch = lay_out(texts, spans, 8, 46, 2, masks)
    batch = replace(batch, tree_rows=17)
    work = list_chunks(batch, shape, 8)
    paths = path_keys(kv, batch, work)
    owner, first_row = batch.row_slot.tolist(), [0, 9, 10, 27, 30]
    nodes = work.nodes[1 : 1 + int(work.nodes[0, 0])].tolist()
    assert len(nodes) == 9 + 1 + 17 + 4
    for node, (row, *_) in enumerate(nodes):
        span = owner[row]
        first, mask = spans[span][0], int(masks[span][row - first_row[span]])
        places = places_of(first, mask)[first // 8 * 8 :]
        found = paths[:, node * work.path_blocks :].transpose(2, 3).flatten(1, 2)
        assert torch.equal(found[:, : len(places)], texts[span].kv[:, places]), spans[span]
        assert not found[:, len(places) : -(-len(places) // 8) * 8].any(), "zeros behind it"


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
    monkeypatch.setattr(chunk_list, "MOST_PARTS", 40)
    work = list_chunks(batch_of([(8191, 1), (5000, 1), (8000, 1)], 8192), SHAPE, KV_BLOCK)
    assert work.parts == 40
    assert sum(entry[3] for entry in work.split.tolist() if entry[1] and not entry[4]) <= 40
    monkeypatch.setattr(chunk_list, "MOST_PARTS", 0)
    work = list_chunks(batch_of([(8191, 1), (5000, 1), (8000, 1)], 8192), SHAPE, KV_BLOCK)
    assert work.parts == 0 and int(work.items[0, 0]) == 3 and not work.split[:, 1].any()


def test_groups_are_padded_to_a_power_of_two() -> None:
    found = [packed_heads(AttentionShape(2 * n, 2, 64, 1.0)) for n in (1, 3, 4, 7, 12, 64, 65)]
    assert found == [(1, 1), (4, 3), (4, 4), (8, 7), (16, 12), (64, 64), (1, 1)]
