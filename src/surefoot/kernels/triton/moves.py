"""Keys and values of accepted paths moved within the paged pools of ``rope_kv``, of all layers at
once. Twin: ``TorchBackend.move_paths``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton.language as tl

from surefoot.kernels.batch import AcceptedPaths
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2

COLUMNS = 32
"""Of a head, moved by one program."""


@jit(do_not_specialize_on_alignment=["slots_ptr"])
def move_kernel(
    kv_ptr, layers_ptr, tables_ptr, table_stride, slots_ptr, start_ptr, rows_ptr, lengths_ptr,
    moves, value_offset,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MOVES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Programs: requests; the heads of keys and values, and columns of each; layers, which lie so
    many elements behind ``kv_ptr`` as ``layers_ptr`` says. Of one warp each, for Triton 3.6 does
    not compile this for several and more than 16 moves."""
    request, part = tl.program_id(0), tl.program_id(1) // PARTS
    depth = 1 + tl.arange(0, MOVES)
    row = tl.load(rows_ptr + request * (moves + 1) + depth, mask=depth <= moves, other=0)
    moved = (depth <= tl.load(lengths_ptr + request)) & (depth <= moves) & (row != depth)
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return
    slot = tl.load(slots_ptr + request)
    root = tl.load(start_ptr + slot)
    source, target = root + row, root + depth
    table = tables_ptr + slot * table_stride
    layer = tl.multiple_of(tl.load(layers_ptr + tl.program_id(2)), 8)
    base = kv_ptr + layer + part // KV_HEADS * value_offset
    head = part % KV_HEADS
    block = tl.load(table + source // BLOCK_SIZE, mask=moved, other=0).to(tl.int64)
    origin = ((block * KV_HEADS + head) * BLOCK_SIZE + source % BLOCK_SIZE) * HEAD_DIM
    block = tl.load(table + target // BLOCK_SIZE, mask=moved, other=0).to(tl.int64)
    place = ((block * KV_HEADS + head) * BLOCK_SIZE + target % BLOCK_SIZE) * HEAD_DIM
    column = tl.program_id(1) % PARTS * WIDTH + tl.arange(0, WIDTH)
    inside = moved[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(base + origin[:, None] + column[None, :], mask=inside, other=0.0)
    # A place may be both a source and a target: everything is read before anything is written.
    tl.debug_barrier()
    tl.store(base + place[:, None] + column[None, :], values, mask=inside)


@functools.cache
def _layer_offsets(places: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """int64 [layers]: how many elements of ``size`` bytes these addresses lie behind the first."""
    offsets = [(place - places[0]) // size for place in places]
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def move_paths(layers: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
    """As ``Backend.move_paths``, of ``layers`` [2, blocks, kv_heads, block_size, head_dim] each, of
    one shape."""
    kv, tables = layers[0], paths.tables
    kv_heads, block_size, head_dim = kv.shape[2:]
    rows, lengths = paths.rows.contiguous(), paths.lengths.contiguous()
    batch, moves = rows.shape[0], rows.shape[1] - 1
    width = min(COLUMNS, next_power_of_2(head_dim))
    parts = cdiv(head_dim, width)
    places = tuple(layer.data_ptr() for layer in layers)
    # Made when a round is first called: there is none to make while it is recorded.
    offsets = _layer_offsets(places, kv.element_size(), kv.device)
    move_kernel[(batch, 2 * kv_heads * parts, len(layers))](
        kv, offsets, tables, tables.stride(0), paths.slots, paths.start, rows, lengths,
        moves, kv.stride(0),
        kv_heads, head_dim, block_size, next_power_of_2(moves), width, parts,
        num_warps=1,
    )  # fmt: skip
