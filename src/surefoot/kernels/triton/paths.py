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
    # Kernels behind this one may read the places before they wait.
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 64)
    seen = ((tl.load(mask_ptr + row) >> place) & 1).to(tl.int32)
    step = tl.cumsum(seen, axis=0) - seen
    tl.store(places_ptr + row * 64 + step, place, mask=seen == 1)


def path_places(mask: torch.Tensor) -> torch.Tensor:
    """Of rows with the masks ``mask`` int64 [N] of a ``FlatBatch``: int32 [N, 64], which keys of
    the span each sees, in order; unspecified beyond them."""
    places = mask.new_empty((len(mask), 64), dtype=torch.int32)
    path_places_kernel[(len(mask),)](mask, places, num_warps=1, **pdl(mask.device))
    return places


@jit(do_not_specialize=["table_stride", "value_offset", "path_offset"])
def path_keys_kernel(
    kv_ptr, path_ptr, nodes_ptr, places_ptr, tables_ptr, table_stride, value_offset, path_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    PATH: tl.constexpr, NODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: nodes of ``chunk_list``, each as many as there are programs apart; kv heads.
    ``KEYS`` are copied at a time. A path's last block is filled up with zeros."""
    release_next(PDL)
    node, head = tl.program_id(0), tl.program_id(1)
    nodes = tl.load(nodes_ptr)
    while node < nodes:
        entry = nodes_ptr + NODE + node * NODE
        row, slot = tl.load(entry), tl.load(entry + 1)
        start, last = tl.load(entry + 2), tl.load(entry + 3)
        begin = start % BLOCK_SIZE
        table = tables_ptr + slot * table_stride
        places = places_ptr + row.to(tl.int64) * 64
        path = node.to(tl.int64) * PATH
        await_inputs(PDL)
        filled = ((begin + last - start) // BLOCK_SIZE + 1) * BLOCK_SIZE
        for base in range(0, filled, KEYS):
            target = base + tl.arange(0, KEYS)
            step = target - begin
            used = step <= last - start
            own = used & (step >= 0)
            key = start + tl.where(own, tl.load(places + step, mask=own, other=0), step)
            block = tl.load(table + key // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
            origin = (block * KV_HEADS + head) * BLOCK_SIZE + key % BLOCK_SIZE
            new = (path + target // BLOCK_SIZE) * KV_HEADS + head
            new = new * BLOCK_SIZE + target % BLOCK_SIZE
            inside = (target < filled)[:, None]
            column = tl.arange(0, HEAD_DIM)[None, :]
            source = kv_ptr + origin[:, None] * HEAD_DIM + column
            keys = tl.load(source, mask=used[:, None], other=0.0)
            values = tl.load(source + value_offset, mask=used[:, None], other=0.0)
            goal = path_ptr + new[:, None] * HEAD_DIM + column
            tl.store(goal, keys, mask=inside)
            tl.store(goal + path_offset, values, mask=inside)
        node += tl.num_programs(0)
    await_inputs(PDL)
