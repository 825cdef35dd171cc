"""From slots to the rows of a round and back, one small kernel each.

Twins: ``kernels.rounds``. Entries of a plan without known rows are unused (their slot may be -1):
they get no rows and change nothing, so that a captured graph serves fewer spans than it was
captured for.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.kernels.rounds import RoundLayout, RoundSpans
from surefoot.kernels.triton.launch import SPAN_COLUMNS, cdiv, jit, next_power_of_2

TILE = 16


@jit
def owners(ends, entry, index, spans):
    """Which row each of a tile is, those beyond the last end repeating it, and the entry that it
    belongs to, one-hot [rows, B]."""
    total = tl.max(ends, axis=0)
    index = tl.maximum(tl.minimum(index, total - 1), 0)
    owner = tl.sum((ends[None, :] <= index[:, None]).to(tl.int32), axis=1)
    owner = tl.minimum(owner, spans - 1)
    return index, entry[None, :] == owner[:, None]


@jit
def pick(values, chosen):
    """values [B] by a one-hot ``chosen`` [rows, B]."""
    return tl.sum(tl.where(chosen, values[None, :], 0), axis=1)


@jit(
    do_not_specialize=["spans", "rows", "sampled_rows"],
    do_not_specialize_on_alignment=SPAN_COLUMNS,
)
def lay_out_kernel(
    slots_ptr, known_ptr, drafts_ptr, samples_ptr, spans,
    history_ptr, history_stride, computed_ptr,
    token_ptr, position_ptr, row_slot_ptr, rows,
    sample_index_ptr, sample_slot_ptr, sample_position_ptr, sampled_rows,
    first_row_ptr, count_ptr, first_sample_ptr,
    SPANS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of rows, then tiles of sampled rows, then one for the spans."""
    entry = tl.arange(0, SPANS)
    inside = entry < spans
    known = tl.load(known_ptr + entry, mask=inside, other=0).to(tl.int32)
    drafts = tl.load(drafts_ptr + entry, mask=inside, other=0).to(tl.int32)
    samples = tl.load(samples_ptr + entry, mask=inside, other=0).to(tl.int32)
    slots = tl.maximum(tl.load(slots_ptr + entry, mask=inside, other=0).to(tl.int32), 0)
    start = tl.load(computed_ptr + slots, mask=inside, other=0).to(tl.int32)
    counts = tl.where(known > 0, known + drafts, 0)
    sampled = tl.where((known > 0) & (samples > 0), drafts + 1, 0)
    ends, sample_ends = tl.cumsum(counts, axis=0), tl.cumsum(sampled, axis=0)

    row_tiles, sample_tiles = tl.cdiv(rows, TILE), tl.cdiv(sampled_rows, TILE)
    tile = tl.program_id(0)
    if tile < row_tiles:
        row = tile * TILE + tl.arange(0, TILE)
        index, chosen = owners(ends, entry, row, spans)
        slot = pick(slots, chosen).to(tl.int64)
        position = pick(start - ends + counts, chosen) + index
        valid = row < tl.max(ends, axis=0)
        token = tl.load(history_ptr + slot * history_stride + position)
        tl.store(token_ptr + row, token, mask=row < rows)
        tl.store(position_ptr + row, position, mask=row < rows)
        tl.store(row_slot_ptr + row, tl.where(valid, slot, -1), mask=row < rows)
    elif tile < row_tiles + sample_tiles:
        row = (tile - row_tiles) * TILE + tl.arange(0, TILE)
        index, chosen = owners(sample_ends, entry, row, spans)
        # A span samples its last rows.
        within = pick(counts - sample_ends, chosen) + index
        first = pick(ends - counts, chosen)
        place = tl.minimum(first + within, rows - 1)
        tl.store(sample_index_ptr + row, place, mask=row < sampled_rows)
        tl.store(sample_slot_ptr + row, pick(slots, chosen), mask=row < sampled_rows)
        position = pick(start, chosen) + within + 1
        tl.store(sample_position_ptr + row, position, mask=row < sampled_rows)
    else:
        tl.store(first_row_ptr + entry, ends - counts, mask=inside)
        tl.store(count_ptr + entry, counts, mask=inside)
        tl.store(first_sample_ptr + entry, sample_ends - sampled, mask=inside)


def lay_out(
    spans: RoundSpans,
    history: torch.Tensor,
    computed: torch.Tensor,
    block_tables: torch.Tensor,
    rows: int,
    sampled_rows: int,
    max_keys: int,
    max_span_rows: int,
) -> RoundLayout:
    """``history`` int64 [slots, width] with the drafts in place, ``computed`` int64 [slots],
    ``block_tables`` int32 [slots, blocks]. ``rows``, ``sampled_rows``, ``max_keys`` and
    ``max_span_rows`` bound what the device finds; rows beyond it are padding, sampled rows beyond
    it repeat the last."""
    entries = spans.slots.shape[0]
    flat = [history.new_empty(rows) for _ in range(3)]
    samples = [history.new_empty(sampled_rows) for _ in range(3)]
    by_span = [history.new_empty(entries) for _ in range(3)]
    programs = cdiv(rows, TILE) + cdiv(sampled_rows, TILE) + 1
    lay_out_kernel[(programs,)](
        spans.slots, spans.known, spans.drafts, spans.samples, entries,
        history, history.stride(0), computed,
        *flat, rows, *samples, sampled_rows, *by_span,
        next_power_of_2(entries), TILE, num_warps=4,
    )  # fmt: skip
    tokens, positions, row_slot = flat
    first_row, counts, first_sample = by_span
    batch = FlatBatch(
        tokens=tokens,
        positions=positions,
        key_index=positions,
        row_slot=row_slot,
        block_tables=block_tables,
        span_start=computed,
        max_keys=max_keys,
        spans=SpanTable(first_row, counts, spans.slots, max_span_rows),
    )
    index, slots, sample_positions = samples
    return RoundLayout(batch, first_row, index, slots, sample_positions, first_sample)
