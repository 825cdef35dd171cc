"""The paths of trees in a chain's order: what lets a node have the bits of a chain.

The keys of a node's path lie scattered among those of its span, in the order of rows. Attention
that loads key by key (``attention``) is told their places; where it copies whole pages
(``chunk_attention``), they are laid out in one piece.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import jit
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next


@jit(do_not_specialize_on_alignment=["mask_ptr"])
def path_places_kernel(mask_ptr, places_ptr, PDL: tl.constexpr):
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 64)
    await_inputs(PDL)
    seen = ((tl.load(mask_ptr + row) >> place) & 1).to(tl.int32)
    step = tl.cumsum(seen, axis=0) - seen
    tl.store(places_ptr + row * 64 + step, place, mask=seen == 1)


def path_places(mask: torch.Tensor) -> torch.Tensor:
    """Of rows with the masks ``mask`` int64 [N] of a ``FlatBatch``: int32 [N, 64], which keys of
    the span each sees, in order; unspecified beyond them."""
    places = mask.new_empty((len(mask), 64), dtype=torch.int32)
    path_places_kernel[(len(mask),)](mask, places, num_warps=1, **pdl(mask.device))
    return places


@jit
def copy_keys(
    source_ptr, table, target_ptr, block, old, new, used, part,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One head of the keys ``old`` [N] of a request to the places ``new``, which count from the
    beginning of ``block``, where they are ``used``."""
    column = tl.arange(0, HEAD_DIM)[None, :]
    from_block = tl.load(table + old // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    origin = (from_block * KV_HEADS + part) * BLOCK_SIZE + old % BLOCK_SIZE
    place = ((block + new // BLOCK_SIZE) * KV_HEADS + part) * BLOCK_SIZE + new % BLOCK_SIZE
    values = tl.load(source_ptr + origin[:, None] * HEAD_DIM + column, mask=used[:, None])
    tl.store(target_ptr + place[:, None] * HEAD_DIM + column, values, mask=used[:, None])


@jit(
    do_not_specialize=["table_stride", "value_offset", "path_offset"],
    do_not_specialize_on_alignment=["mask_ptr"],
)
def path_keys_kernel(
    kv_ptr, path_ptr, items_ptr, mask_ptr, tables_ptr, table_stride, value_offset, path_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NODES: tl.constexpr, ENTRY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: items of ``chunk_attention``'s list, of which nodes have paths; heads of keys and
    values."""
    release_next(PDL)
    item = tl.program_id(0)
    entry = items_ptr + ENTRY + item * ENTRY
    path = -1
    if item < tl.load(items_ptr):
        path = tl.load(entry + 10)
    await_inputs(PDL)
    if path < 0:
        return
    start = tl.load(entry + 8)
    table = tables_ptr + tl.load(entry + 3) * table_stride
    kind = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    source, target = kv_ptr + kind * value_offset, path_ptr + kind * path_offset
    part, block, begin = tl.program_id(1) % KV_HEADS, path.to(tl.int64), start % BLOCK_SIZE
    before = tl.arange(0, BLOCK_SIZE)
    copy_keys(
        source, table, target, block, start - begin + before, before, before < begin, part,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip
    node = tl.arange(0, NODES)
    seen = ((tl.load(mask_ptr + tl.load(entry)) >> node) & 1).to(tl.int32)
    step = tl.cumsum(seen, axis=0) - seen
    copy_keys(
        source, table, target, block, start + node, begin + step, seen == 1, part,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip
