"""The span table of a flat batch that came without one."""

from __future__ import annotations

import triton.language as tl

from surefoot.kernels.backend import FlatBatch, SpanTable
from surefoot.kernels.triton.launch import jit, next_power_of_2


@jit(do_not_specialize=["rows"])
def span_table_kernel(row_slot_ptr, rows, first_ptr, count_ptr, slot_ptr, TILE: tl.constexpr):
    slot = tl.program_id(0)
    first = rows + tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for base in range(0, rows, TILE):
        index = base + tl.arange(0, TILE)
        own = tl.load(row_slot_ptr + index, mask=index < rows, other=-1) == slot
        first = tl.minimum(first, tl.min(tl.where(own, index, rows), axis=0))
        count += tl.sum(own.to(tl.int32), axis=0)
    tl.store(first_ptr + slot, first.to(tl.int64))
    tl.store(count_ptr + slot, count.to(tl.int64))
    tl.store(slot_ptr + slot, slot.to(tl.int64))


def span_table(batch: FlatBatch) -> SpanTable:
    """``batch.spans``, or one entry per slot found by searching ``batch.row_slot``."""
    if batch.spans is not None:
        return batch.spans
    slots, rows = batch.block_tables.shape[0], batch.row_slot.shape[0]
    found = [batch.row_slot.new_empty(slots) for _ in range(3)]
    tile = min(1024, next_power_of_2(rows, 32))
    span_table_kernel[(slots,)](batch.row_slot, rows, *found, tile, num_warps=1)
    return SpanTable(*found, max_rows=rows)
