"""Drafters of blocks on the native CPU backend: a call to draft, and one to catch up."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.block_drafting import BlockDrafter, BlockWeights
from surefoot.kernels.cpu.linear import DENSE_KINDS, KINDS, floats
from surefoot.kernels.cpu.prepare import keys_struct, prepare_layer
from surefoot.kernels.cpu.structs import (
    BAD_INDEX,
    BlockStruct,
    FeaturesStruct,
    LayerStruct,
    LiveStruct,
    VisibleStruct,
    table_of,
)
from surefoot.kernels.drafter_parts import FeatureWeights, Scratch

if TYPE_CHECKING:
    from surefoot.kernels.backend import RopeTable
    from surefoot.kernels.cpu.backend import NativeBackend, NativeKV


class NativeBlockDrafter(BlockDrafter):
    """Everything's addresses, found once."""

    def __init__(
        self,
        backend: NativeBackend,
        weights: BlockWeights,
        kv: Sequence[NativeKV],
        history: torch.Tensor,
        length: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        self.backend = backend
        self.vocabulary = weights.before.shape[0]
        kind = KINDS[DENSE_KINDS[backend.dtype]]
        layers = [prepare_layer(each, weights.rope, kind) for each in weights.layers]
        masks = [torch.cat(tuple(seen.masks)) for seen in weights.seen]
        visible = [
            VisibleStruct(mask.data_ptr(), seen.window, seen.from_anchor)
            for mask, seen in zip(masks, weights.seen, strict=True)
        ]
        tables = table_of(layers), table_of(kv), (VisibleStruct * len(layers))(*visible)
        embedding = weights.mask_embedding
        if embedding is not None:
            embedding = floats(embedding)
        live = LiveStruct(
            *(each.data_ptr() for each in (history, length, block_tables)),
            *(history.shape[1], block_tables.shape[1]),
            behind=weights.behind,
            last_position=weights.last_position,
        )
        self._struct = BlockStruct(
            live,
            ctypes.addressof(weights.table.segments),
            _address(embedding),
            *(ctypes.addressof(table) for table in tables),
            weights.norm.data_ptr(),
            weights.head.address,
            ctypes.addressof(weights.before.segments),
            weights.after.address,
            *map(_address, (weights.ids, weights.of_hidden, weights.of_token)),
            *(len(layers), weights.norm.shape[0], weights.first_row, weights.filler),
            *(weights.first_key, weights.most_rows),
            *(weights.eps, weights.embedding_scale),
        )
        self._address = ctypes.addressof(self._struct)
        self._kept_alive = (weights, kv, history, length, block_tables, layers, masks, tables)
        self._embedding = embedding
        self._drafts = torch.empty((0, 0), dtype=torch.int64), torch.empty((0, 0))
        """The last ones: the next of as many requests and steps are written there."""

    def draft(
        self, slots: torch.Tensor, steps: int, scratch: Scratch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Valid until it is called again. IndexError for a token outside an embedding, MemoryError
        when scratch memory cannot be had."""
        backend, count = self.backend, slots.shape[0]
        tokens, chances = self._drafts
        if tokens.shape != (count, steps):
            tokens = torch.empty((count, steps), dtype=torch.int64)
            self._drafts = tokens, chances = tokens, torch.empty((count, steps))
        live = self._struct.live
        live.first, live.own, live.block_size = scratch.first, scratch.blocks, scratch.block_size
        code = count and backend.library.sf_draft_blocks(
            backend.context_address,
            backend.work_address,
            self._address,
            slots.data_ptr(),
            count,
            steps,
            scratch.pages,
            tokens.data_ptr(),
            chances.data_ptr(),
            backend.thread_count,
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {self.vocabulary}")
        if code:
            raise MemoryError("no memory for a block's intermediate results")
        return tokens, chances


class NativeFeatures:
    """``FeatureWeights`` as the C code reads them; kept with their linear."""

    def __init__(self, weights: FeatureWeights, rope: RopeTable, kind: int) -> None:
        context = weights.context
        layers = [
            keys_struct(context.shape, norm, context.eps, rope, kind) for norm in context.k_norms
        ]
        self.weights = weights
        self.rope = rope
        self._pools: tuple[Sequence[NativeKV], Any] | None = None
        self.keys = (LayerStruct * len(layers))(*layers)
        self.struct = FeaturesStruct(
            weights.fuse.address,
            context.kv.address,
            weights.norm.data_ptr(),
            ctypes.addressof(self.keys),
            len(layers),
            context.eps,
        )
        self.address = ctypes.addressof(self.struct)

    def table(self, kv: Sequence[NativeKV]) -> Any:
        """The addresses of the pools of its layers."""
        if self._pools is None or self._pools[0] is not kv:
            self._pools = kv, table_of(kv)
        return self._pools[1]


def write_features(
    backend: NativeBackend,
    weights: FeatureWeights,
    features: torch.Tensor,
    batch: FlatBatch,
    served: torch.Tensor | None,
    last_position: int,
    kv: Sequence[NativeKV],
    rope: RopeTable,
    settled: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """``Drafting.write_features``. MemoryError when scratch memory cannot be had."""
    prepared: Any = weights.fuse.prepared
    if prepared is None or prepared.weights is not weights or prepared.rope is not rope:
        prepared = NativeFeatures(weights, rope, KINDS[DENSE_KINDS[backend.dtype]])
        weights.fuse.prepared = prepared
    if features.shape[1] != weights.fuse.shape[1]:
        raise ValueError(f"{features.shape[1]} features, expected {weights.fuse.shape[1]}")
    features = floats(features)
    spans, first, counts = 0, None, None
    if settled is not None:
        first, counts = settled
        spans = counts.shape[0]
    if backend.library.sf_write_features(
        backend.context_address,
        backend.work_address,
        prepared.address,
        backend.prepared_batch(batch).address,
        features.data_ptr(),
        _address(served),
        *(_address(first), _address(counts), spans),
        last_position,
        prepared.table(kv),
        backend.thread_count,
    ):
        raise MemoryError("no memory for a drafter's keys")


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
