"""What proposers ask of the native CPU backend beside what targets do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.block_drafting import BlockWeights
from surefoot.kernels.cpu.blocks import NativeBlockDrafter, write_features
from surefoot.kernels.cpu.linear import DENSE_KINDS, KINDS, NativeLinear, floats, input_of
from surefoot.kernels.cpu.prepare import keys_struct, prepare_attention
from surefoot.kernels.cpu.structs import BAD_INDEX, LiveStruct
from surefoot.kernels.drafter_parts import (
    BlockRows,
    EntryWeights,
    FeatureWeights,
    LiveRows,
    Scratch,
)
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.lookup import Matches

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape, LayerWeights, RopeTable
    from surefoot.kernels.cpu.backend import NativeBackend, NativeKV


class NativeDrafting(Drafting):
    """In C where many small tensor operations would cost too much."""

    backend: NativeBackend

    def __init__(self, backend: NativeBackend) -> None:
        super().__init__(backend)
        self._matches: Matches | None = None
        """Of the last lookup: the next one of as many texts and drafts writes there."""

    def ngram_lookup(
        self,
        history: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        min_ngram: int,
        max_ngram: int,
        window: int,
        drafts: int,
    ) -> Matches:
        """Valid until the next lookup."""
        found, shape = self._matches, (slots.shape[0], drafts)
        if found is None or found.tokens.shape != shape:
            lengths = torch.empty(shape[0], dtype=torch.int64)
            tokens, confidence = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
            self._matches = found = Matches(tokens, lengths, confidence)
        self.backend.library.sf_ngram(
            history.data_ptr(),
            history.shape[1],
            length.data_ptr(),
            slots.data_ptr(),
            shape[0],
            min_ngram,
            max_ngram,
            window,
            drafts,
            found.tokens.data_ptr(),
            found.lengths.data_ptr(),
            found.confidence.data_ptr(),
        )
        return found

    def live_rows(
        self,
        slots: torch.Tensor,
        before: torch.Tensor | None,
        history: torch.Tensor,
        length: torch.Tensor,
        block_tables: torch.Tensor,
        scratch: Scratch,
        steps: int,
        behind: int,
        last_position: int,
    ) -> LiveRows:
        count, pages = len(slots), scratch.pages
        tokens = torch.empty_like(slots)
        keys, positions = torch.empty((2, steps + 1, count), dtype=torch.int64)
        tables = torch.empty((count, pages), dtype=torch.int32)
        struct = LiveStruct(
            *(each.data_ptr() for each in (history, length, block_tables)),
            *(history.shape[1], block_tables.shape[1], scratch.first, scratch.blocks),
            *(scratch.block_size, pages, steps, behind, last_position),
        )
        self.backend.library.sf_live_rows(
            ctypes.addressof(struct),
            slots.data_ptr(),
            count,
            *(each.data_ptr() for each in (tokens, keys, positions, tables)),
        )
        features = None if before is None else before[slots]
        return LiveRows(tokens, features, keys, positions, tables)

    def block_rows(self, live: LiveRows, rows: int, filler: int) -> BlockRows:
        count = len(live.tokens)
        out = torch.empty((4, count * rows), dtype=torch.int64)
        spans = torch.empty((2, count), dtype=torch.int64)
        keys, positions = live.keys.contiguous(), live.positions.contiguous()
        self.backend.library.sf_block_rows(
            *(each.data_ptr() for each in (live.tokens, keys, positions)),
            *(count, rows, filler, out.data_ptr(), spans.data_ptr()),
        )
        return BlockRows(*out, *spans)

    def entry_inputs(
        self, weights: EntryWeights, tokens: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """IndexError for a token outside the table."""
        features, table = floats(features), weights.table
        out = torch.empty(len(features), 2 * features.shape[1])
        code = self.backend.library.sf_entry(
            ctypes.addressof(table.segments),
            tokens.data_ptr(),
            tokens.stride(0),
            features.data_ptr(),
            len(features),
            weights.embedding_norm.data_ptr(),
            weights.hidden_norm.data_ptr(),
            weights.eps,
            out.data_ptr(),
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {table.shape[0]}")
        return out

    def likeliest(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor,
    ) -> None:
        logits = floats(logits)
        self.backend.library.sf_likeliest(
            logits.data_ptr(),
            *logits.shape,
            None if ids is None else ids.data_ptr(),
            tokens.data_ptr(),
            tokens.stride(0),
            chances.data_ptr(),
            chances.stride(0),
        )

    def markov(
        self,
        logits: torch.Tensor,
        before: NativeLinear,
        after: NativeLinear,
        current: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor | None,
    ) -> None:
        """IndexError for a token outside ``before``, MemoryError when scratch memory cannot be
        had."""
        backend, (steps, rows) = self.backend, tokens.shape
        code = backend.library.sf_markov(
            backend.context_address,
            ctypes.addressof(before.segments),
            after.address,
            current.data_ptr(),
            None if ids is None else ids.data_ptr(),
            logits.data_ptr(),
            steps,
            rows,
            tokens.data_ptr(),
            backend.thread_count,
        )
        if code == BAD_INDEX:
            raise IndexError(f"a token is outside the vocabulary of {before.shape[0]}")
        if code:
            raise MemoryError("no memory for the input of a linear")
        if chances is not None:
            flat = tokens.view(-1), chances.view(-1)
            self.likeliest(logits.view(steps * rows, -1), ids, *flat)

    def store_keys(
        self,
        projected: torch.Tensor,
        shape: AttentionShape,
        k_norm: torch.Tensor | None,
        eps: float,
        batch: FlatBatch,
        kv: NativeKV,
        rope: RopeTable,
    ) -> None:
        backend, width = self.backend, 2 * shape.kv_heads * shape.head_dim
        if projected.shape[1] != width:
            raise ValueError(f"keys and values are {projected.shape[1]} wide, expected {width}")
        struct = keys_struct(shape, k_norm, eps, rope, KINDS[DENSE_KINDS[backend.dtype]])
        if projected.dtype is not torch.float32 or projected.stride(1) != 1:
            projected = floats(projected)
        backend.library.sf_store_keys(
            ctypes.addressof(struct),
            backend.prepared_batch(batch).address,
            kv.address,
            projected.data_ptr(),
            projected.stride(0),
            backend.thread_count,
        )

    def write_features(
        self,
        weights: FeatureWeights,
        features: torch.Tensor,
        batch: FlatBatch,
        served: torch.Tensor | None,
        last_position: int,
        kv: Sequence[NativeKV],
        rope: RopeTable,
        settled: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        write_features(
            self.backend, weights, features, batch, served, last_position, kv, rope, settled
        )

    def keep_rows(
        self,
        features: torch.Tensor,
        batch: FlatBatch,
        slots: torch.Tensor,
        settled: tuple[torch.Tensor, torch.Tensor],
        kept: torch.Tensor,
        table: torch.Tensor,
        at: int,
        most: int,
    ) -> int:
        features = floats(features)
        found: int = self.backend.library.sf_keep_rows(
            features.data_ptr(),
            features.shape[1],
            batch.tokens.data_ptr(),
            batch.key_index.data_ptr(),
            slots.data_ptr(),
            *(each.data_ptr() for each in settled),
            len(slots),
            kept.data_ptr(),
            table.data_ptr(),
            len(kept),
            at,
            most,
        )
        return found

    def block_drafter(
        self,
        weights: BlockWeights,
        kv: Sequence[NativeKV],
        history: torch.Tensor,
        length: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> NativeBlockDrafter:
        return NativeBlockDrafter(self.backend, weights, kv, history, length, block_tables)

    def attention(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: NativeKV,
        rope: RopeTable,
    ) -> torch.Tensor:
        """MemoryError when scratch memory cannot be had."""
        backend, prepared = self.backend, weights.o.prepared
        if prepared is None or prepared.weights is not weights or prepared.rope is not rope:
            prepared = prepare_attention(weights, rope, KINDS[DENSE_KINDS[backend.dtype]])
        inputs = input_of(inputs, weights.qkv)
        out = torch.zeros(len(inputs), weights.o.shape[0])
        return backend.run(prepared, kv.table, out, batch, inputs)
