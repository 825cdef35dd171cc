"""Attention over short spans on Hopper GPUs, balanced by chunks of keys (``chunk_list``): launches.

A tree's node reads the keys of its path in a chain's order (``paths``), so that its bits are those
of the chain that leads to it.
Twin: ``kernels.attention.torch_paged.span_attention``.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from surefoot.kernels.backend import AttentionShape, FlatBatch
from surefoot.kernels.triton.attention import LOG2_E
from surefoot.kernels.triton.chunk_kernel import NODE, chunk_kernel, combine_chunks_kernel
from surefoot.kernels.triton.chunk_list import (
    QUERY_ROWS,
    TOGETHER,
    ChunkWork,
    packed_heads,
    programs_of,
)
from surefoot.kernels.triton.launch import next_power_of_2, processors
from surefoot.kernels.triton.paths import path_keys_kernel
from surefoot.kernels.triton.pdl import pdl
from surefoot.kernels.triton.prompt_attention import BLOCK_N, CHUNK_KEYS, PAGES, QUERIES, STAGES

REGISTERS = {64: 128, 128: 144}
"""Of a thread, at most: so many that none is spilt, and as few as these programs leave."""
FEW_PARTS, MANY_PARTS = 4, 16
"""Partial results of a query that are asked for at a time."""
COMBINE_REGISTERS = 128
"""Of a thread that adds them up. Where none is said, ptxas takes few, and has each wait for the one
before."""
COPYING = 12
"""Programs of a multiprocessor that copy paths: so many are there at once. Mostly there is nothing
to copy, and more would take their time to find that out."""
MOST_COPIED = 64
"""Keys of a path that a program copies at a time."""


def chunk_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: FlatBatch,
    shape: AttentionShape,
    work: ChunkWork,
) -> torch.Tensor:
    """``attention.span_attention`` on a Hopper GPU, for what ``fits``: q [N, heads, head_dim] bf16
    -> [N, heads, head_dim], unspecified for rows that are not in the ``work``. That is as
    ``list_chunks`` has it.

    The bits of a row are those that ``prompt_attention`` gives it.
    """
    out = torch.empty_like(q)
    (pack, used), width, block_size = packed_heads(shape), shape.head_dim, kv.shape[3]
    units = shape.heads // used
    paths = path_keys(kv, batch, work) if work.path_blocks else kv
    keys, own = kv.view(-1, width), paths.view(-1, width)
    size = (max(1, work.parts), units, work.part_rows)
    part = q.new_empty((*size, width), dtype=torch.float32)
    sums = q.new_empty((*size, 2), dtype=torch.float32)
    programs = min(programs_of(q.device, shape), (work.items.shape[0] - 1) * units)
    page = [min(block_size, BLOCK_N), width]
    chunk_kernel[(programs,)](
        TensorDescriptor.from_tensor(q, [QUERY_ROWS // pack, pack, width], QUERIES),
        TensorDescriptor.from_tensor(keys, page, PAGES),
        TensorDescriptor.from_tensor(own, page, PAGES),
        out, part, sums, work.items, batch.block_tables, batch.block_tables.stride(0),
        keys.shape[0] // 2, own.shape[0] // 2, shape.scale * LOG2_E, batch.first_key,
        work.part_rows, shape.heads, shape.kv_heads, pack, used, width, block_size, BLOCK_N,
        CHUNK_KEYS // BLOCK_N, STAGES, work.path_blocks > 0,
        num_warps=4, maxnreg=REGISTERS[width], launch_pdl=True,
    )  # fmt: skip
    if work.parts:
        together = min(TOGETHER, work.part_rows)
        pieces = max(1, pack // together)
        combine_chunks_kernel[(len(work.split) * pieces, units)](
            part, sums, work.split, out, shape.scale * LOG2_E,
            shape.heads, pack, used, width, work.part_rows, together, FEW_PARTS, MANY_PARTS,
            num_warps=together, maxnreg=COMBINE_REGISTERS, launch_pdl=True,
        )  # fmt: skip
    return out


def path_keys(kv: torch.Tensor, batch: FlatBatch, work: ChunkWork) -> torch.Tensor:
    """The keys and values along each path, in blocks as those of ``kv``: [2, path blocks, kv_heads,
    block_size, head_dim], from the block on that a tree begins in."""
    kv_heads, block_size, width = kv.shape[2:]
    nodes = len(work.nodes) - 1
    paths = kv.new_empty((2, nodes * work.path_blocks, kv_heads, block_size, width))
    keys = min(MOST_COPIED, next_power_of_2(block_size - 1 + batch.tree_rows))
    programs = min(nodes, max(1, COPYING * processors(kv.device) // kv_heads))
    path_keys_kernel[(programs, kv_heads)](
        kv, paths, work.nodes, work.places, batch.block_tables, batch.block_tables.stride(0),
        kv.stride(0), paths.stride(0), kv_heads, width, block_size, keys, work.path_blocks,
        NODE.value, num_warps=4, **pdl(kv.device),
    )  # fmt: skip
    return paths
