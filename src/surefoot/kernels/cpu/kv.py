"""Keys and values as the compiled kernels keep them."""

from __future__ import annotations

import ctypes

import torch

from surefoot.kernels.backend import AttentionShape
from surefoot.kernels.cpu.huge_pages import in_huge_pages
from surefoot.kernels.cpu.linear import LANES
from surefoot.kernels.cpu.structs import KVStruct


class NativeKV:
    """Keys and values of one layer (``native.h`` has the layout)."""

    def __init__(self, data: torch.Tensor, block_size: int, shape: AttentionShape) -> None:
        self.data = data
        self.shape = shape
        self.block_size = block_size
        self.struct = KVStruct(data.data_ptr(), block_size, -(-block_size // LANES))
        self.address = ctypes.addressof(self.struct)
        self._pointer = ctypes.c_void_p(self.address)
        self.table = ctypes.addressof(self._pointer)
        """Of the addresses of one layer's."""


def bytes_per_block(block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Of one layer. Blocks are stored in tiles of 16 keys: other sizes are rounded up to that."""
    keys = -(-block_size // LANES) * LANES
    return 2 * keys * shape.kv_heads * shape.head_dim * dtype.itemsize


def allocate(
    layers: int, blocks: int, block_size: int, shape: AttentionShape, dtype: torch.dtype
) -> list[NativeKV]:
    """One for each layer. ValueError for a head_dim that is not a multiple of 16 up to 256."""
    if shape.head_dim % LANES or not 0 < shape.head_dim <= 256:
        raise ValueError(f"head_dim {shape.head_dim} is not a multiple of 16 up to 256")
    size = blocks * bytes_per_block(block_size, shape, dtype)
    return [NativeKV(in_huge_pages(size), block_size, shape) for _ in range(layers)]


def move_keys(
    library: ctypes.CDLL,
    kv: NativeKV,
    dtype: torch.dtype,
    tables: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Copy keys and values of one layer from key index ``source`` to ``target``, int64 [B, n], of
    the requests whose block tables are ``tables`` int32 [B, blocks]. Targets rise along a row and
    are not above their sources; equal ones change nothing. ValueError for tables that are not
    int32."""
    tables, source, target = tables.contiguous(), source.contiguous(), target.contiguous()
    if tables.dtype is not torch.int32:
        raise ValueError(f"tables are {tables.dtype}, expected int32")
    library.sf_move_keys(
        kv.address,
        kv.shape.kv_heads,
        kv.shape.head_dim,
        dtype.itemsize,
        tables.data_ptr(),
        tables.shape[1],
        source.data_ptr(),
        target.data_ptr(),
        *source.shape,
    )
