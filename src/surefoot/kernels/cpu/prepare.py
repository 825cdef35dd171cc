"""Layers and batches as the C code reads them: structures of addresses, checked once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch

from surefoot.kernels.backend import AttentionShape, FlatBatch, LayerWeights, RopeTable
from surefoot.kernels.cpu.kv import NativeKV
from surefoot.kernels.cpu.structs import (
    BatchStruct,
    CaptureStruct,
    LayerStruct,
    LinearStruct,
    table_of,
)

_address_of = attrgetter("address")


class PreparedLayer:
    """A layer's struct, and what it was made of (by identity)."""

    def __init__(self, weights: LayerWeights, rope: RopeTable, struct: LayerStruct) -> None:
        self.weights = weights
        self.rope = rope
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self._pointer = ctypes.c_void_p(self.address)
        self.table = ctypes.addressof(self._pointer)
        """Of the addresses of one layer."""


class PreparedLayers:
    """Tables of the addresses of several layers, and of their keys and values, which are not kept
    alive: what lies at the same addresses is the same to the C code."""

    def __init__(self, layers: Sequence[PreparedLayer], kv: Sequence[NativeKV]) -> None:
        self.layers = layers
        self._weights = [layer.weights for layer in layers]
        self._addresses = list(map(_address_of, kv))
        self._tables = table_of(layers), table_of(kv)
        self.table, self.kv_table = map(ctypes.addressof, self._tables)
        self._capture = CaptureStruct()
        self._columns: ctypes.Array[ctypes.c_int64] | None = None
        self._captured: Sequence[int] = ()

    def are(self, weights: Sequence[LayerWeights], kv: Sequence[NativeKV], rope: RopeTable) -> bool:
        """Whether they are made of just these."""
        return (
            len(weights) == len(self._weights)
            and self.layers[0].rope is rope
            and all(map(is_, weights, self._weights))
            and list(map(_address_of, kv)) == self._addresses
        )

    def capture(self, wanted: Sequence[int], hidden: int, features: torch.Tensor) -> int:
        """The address of what has a call write what enters the layers ``wanted``, those past the
        last left out, into ``features`` [N, wanted * hidden]."""
        if self._columns is None or wanted != self._captured:
            columns = [-1] * len(self.layers)
            for place, index in enumerate(wanted):
                if index < len(columns):
                    columns[index] = place * hidden
            self._columns = (ctypes.c_int64 * len(columns))(*columns)
            self._captured = wanted[:]
            self._capture.column = ctypes.addressof(self._columns)
            self._capture.stride = len(wanted) * hidden
        self._capture.features = features.data_ptr()
        return ctypes.addressof(self._capture)


@dataclass
class PreparedBatch:
    """A batch's struct, what it was made of (by identity), and the tensors it points at."""

    batch: FlatBatch
    struct: BatchStruct
    address: int
    tensors: list[torch.Tensor]


def prepare_layer(weights: LayerWeights, rope: RopeTable, kv_kind: int) -> PreparedLayer:
    """Kept with the layer's weights. ValueError where shapes do not fit together."""
    shape = weights.shape
    hidden, inner = weights.o.shape[0], weights.down.shape[1]
    width = weights.qkv.shape[1] if weights.input_norm is None else hidden
    expected = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, width),
        "o": (hidden, shape.heads * shape.head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, size in expected.items():
        if getattr(weights, name).shape != size:
            raise ValueError(f"{name} is {getattr(weights, name).shape}, expected {size}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} heads do not divide among {shape.kv_heads} kv heads")
    for factors in (rope.cos, rope.sin):
        if factors.dtype != torch.float32 or not factors.is_contiguous():
            raise ValueError("rotary tables must be contiguous float32")

    def norm(weight: torch.Tensor | None) -> int | None:
        return None if weight is None else weight.data_ptr()

    struct = LayerStruct(
        hidden,
        inner,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        kv_kind,
        weights.eps,
        shape.scale,
        norm(weights.input_norm),
        norm(weights.post_norm),
        norm(weights.q_norm),
        norm(weights.k_norm),
        rope.cos.data_ptr(),
        rope.sin.data_ptr(),
        weights.qkv.struct,
        weights.o.struct,
        weights.gate_up.struct,
        weights.down.struct,
    )
    prepared = PreparedLayer(weights, rope, struct)
    weights.qkv.prepared = prepared
    return prepared


def keys_struct(
    shape: AttentionShape, k_norm: torch.Tensor | None, eps: float, rope: RopeTable, kv_kind: int
) -> LayerStruct:
    """What writing keys and values needs to know of a layer."""
    return LayerStruct(
        heads=0,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        kv_kind=kv_kind,
        eps=eps,
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        cos=rope.cos.data_ptr(),
        sin=rope.sin.data_ptr(),
    )


def prepare_attention(weights: LayerWeights, rope: RopeTable, kv_kind: int) -> PreparedLayer:
    """A layer of which only the attention is wanted; kept with ``weights.o``."""
    whole = prepare_layer(weights, rope, kv_kind)
    weights.qkv.prepared = None
    whole.struct.gate_up = whole.struct.down = LinearStruct()
    weights.o.prepared = whole
    return whole


def prepare_batch(batch: FlatBatch) -> PreparedBatch:
    """The struct holds addresses only: changed contents are seen by the next call. ValueError for
    tensors of another type or layout."""
    if batch.block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables is {batch.block_tables.dtype}, expected int32")
    if batch.block_tables.stride(1) != 1 and batch.block_tables.shape[1] > 1:
        raise ValueError("rows of block_tables must be contiguous")
    names = ["positions", "key_index", "row_slot", "span_start"]
    tensors = [getattr(batch, name) for name in names]
    if batch.mask is not None:
        tensors.append(batch.mask)
        names.append("mask")
    if batch.oldest is not None:
        tensors.append(batch.oldest)
        names.append("oldest")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int64, is {tensor.dtype}")
    struct = BatchStruct(
        batch.tokens.shape[0],
        batch.block_tables.stride(0),
        *(tensor.data_ptr() for tensor in tensors[:4]),
        None if batch.mask is None else batch.mask.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.first_key,
        None if batch.oldest is None else batch.oldest.data_ptr(),
    )
    return PreparedBatch(batch, struct, ctypes.addressof(struct), tensors)
