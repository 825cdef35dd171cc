"""What drafters ask of a backend, by Triton kernels. Twins: ``kernels.drafting``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.drafter_parts import FeatureWeights
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.triton import blocks, live, picks
from surefoot.kernels.triton.attend import attend_inputs, work_of
from surefoot.kernels.triton.lookup import ngram_lookup
from surefoot.kernels.triton.norm import rms_norm
from surefoot.kernels.triton.rope_kv import rope_and_write, write_context

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape, LayerWeights, RopeTable
    from surefoot.kernels.triton.backend import TritonBackend
    from surefoot.kernels.triton.products import TritonLinear


class TritonDrafting(Drafting):
    """The operations as kernels; those of trees in torch."""

    backend: TritonBackend
    ngram_lookup = staticmethod(ngram_lookup)
    likeliest = staticmethod(picks.likeliest)
    draw = staticmethod(picks.draw)
    live_rows = staticmethod(live.live_rows)
    entry_inputs = staticmethod(live.entry_inputs)
    block_rows = staticmethod(blocks.block_rows)
    convolve = staticmethod(blocks.convolve)

    def store_keys(
        self,
        projected: torch.Tensor,
        shape: AttentionShape,
        k_norm: torch.Tensor | None,
        eps: float,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
    ) -> None:
        norms = None if k_norm is None else (k_norm, k_norm)
        rope_and_write(projected, kv, batch, replace(shape, heads=0), rope, norms, eps)

    def write_features(
        self,
        weights: FeatureWeights,
        features: torch.Tensor,
        batch: FlatBatch,
        served: torch.Tensor | None,
        last_position: int,
        kv: Sequence[torch.Tensor],
        rope: RopeTable,
        settled: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        context = weights.context
        fused = rms_norm(weights.fuse(features.contiguous()), weights.norm, context.eps)
        write_context(
            context.kv(fused), kv, batch, last_position, context.shape, rope,
            context.stacked_norms, context.eps, served,
        )  # fmt: skip

    def attention(
        self,
        weights: LayerWeights,
        inputs: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
    ) -> torch.Tensor:
        inputs = inputs.to(self.backend.dtype).contiguous()
        work = work_of(batch, weights.shape, kv)
        return weights.o(attend_inputs(weights, inputs, batch, kv, rope, work))

    def mlp(self, weights: LayerWeights, inputs: torch.Tensor) -> torch.Tensor:
        return weights.down(weights.gate_up.gated(inputs.to(self.backend.dtype).contiguous()))

    def add_linear(
        self, logits: torch.Tensor, linear: TritonLinear, x: torch.Tensor
    ) -> torch.Tensor:
        return linear.wide(x.to(self.backend.dtype).contiguous(), logits)

    def layer_and_head(
        self,
        weights: LayerWeights,
        x: torch.Tensor,
        batch: FlatBatch,
        kv: torch.Tensor,
        rope: RopeTable,
        inputs: torch.Tensor,
        norm: torch.Tensor,
        head: TritonLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class, but the end of the layer is one kernel with the norm."""
        backend = self.backend
        x = x.to(backend.dtype).contiguous()
        normed = inputs.to(backend.dtype).contiguous()
        # A drafter's masks are those of a frontier: all its spans are trees.
        work = work_of(batch, weights.shape, kv) if batch.mask is None else None
        x, hidden = backend.up_to_down(weights, x, normed, batch, kv, rope, work)
        x, normed = weights.down.added_normed(hidden, x, (norm, weights.eps))
        return x, head.wide(normed)

    def likeliest_by_head(
        self,
        norm: torch.Tensor,
        eps: float,
        head: TritonLinear,
        hidden: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor,
        most: int,
    ) -> None:
        found = head.largest_of_tiles(rms_norm(hidden, norm, eps), totals=True)
        if found is None:
            super().likeliest_by_head(norm, eps, head, hidden, ids, tokens, chances, most)
            return
        values, index, totals = found
        assert totals is not None
        width = head.weight.shape[0]
        picks.likeliest_of_parts(values, index, totals, width, ids, tokens, chances)

    def shift_features(
        self,
        features: torch.Tensor,
        before: torch.Tensor,
        last_of_block: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        batch: FlatBatch,
        block_size: int,
        last_position: int,
        served: torch.Tensor | None = None,
        above: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rest = batch, block_size, last_position, served
        if above is None and last is None:
            return live.shift_features(features, before, last_of_block, rows, counts, *rest)
        return super().shift_features(
            features, before, last_of_block, slots, rows, counts, *rest, above, last
        )
