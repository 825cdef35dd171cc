"""What proposers ask of the native CPU backend beside what targets do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.linear import DENSE_KINDS, KINDS, input_of
from surefoot.kernels.cpu.prepare import prepare_keys
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.lookup import Matches

if TYPE_CHECKING:
    from surefoot.kernels.backend import LayerWeights, RopeTable
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

    def write_keys(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: NativeKV,
        rope: RopeTable,
    ) -> None:
        """MemoryError when scratch memory cannot be had."""
        backend, prepared = self.backend, weights.kv.prepared
        if prepared is None or prepared.weights is not weights or prepared.rope is not rope:
            prepared = prepare_keys(weights, rope, KINDS[DENSE_KINDS[backend.dtype]])
        inputs = input_of(inputs, weights.kv)
        if backend.library.sf_write_keys(
            backend.context_address,
            prepared.address,
            backend.prepared_batch(batch).address,
            kv.address,
            inputs.data_ptr(),
            backend.thread_count,
        ):
            raise MemoryError("no memory for the keys of a layer")
