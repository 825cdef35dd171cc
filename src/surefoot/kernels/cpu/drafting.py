"""What proposers ask of the native CPU backend beside what targets do."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.linear import DENSE_KINDS, KINDS, input_of
from surefoot.kernels.cpu.prepare import keys_struct, prepare_attention
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.lookup import Matches

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape, LayerWeights, RopeTable
    from surefoot.kernels.cpu.backend import NativeBackend, NativeKV


class NativeDrafting(Drafting):
    """In C where many small tensor operations would cost too much."""

    backend: NativeBackend

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
        shape = len(slots), drafts
        found = Matches(
            torch.empty(shape, dtype=torch.int64), torch.empty_like(slots), torch.empty(shape)
        )
        self.backend.library.sf_ngram(
            history.data_ptr(),
            history.shape[1],
            length.data_ptr(),
            slots.data_ptr(),
            len(slots),
            min_ngram,
            max_ngram,
            window,
            drafts,
            *(tensor.data_ptr() for tensor in found),
        )
        return found

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
            projected = projected.float().contiguous()
        backend.library.sf_store_keys(
            ctypes.addressof(struct),
            backend.prepared_batch(batch).address,
            kv.address,
            projected.data_ptr(),
            projected.stride(0),
            backend.thread_count,
        )

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
        return backend.run_layer(prepared, out, batch, kv, inputs)
