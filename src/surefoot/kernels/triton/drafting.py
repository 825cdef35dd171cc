"""What a drafter does beside its network's products, one small kernel each.

Twins: ``kernels.drafting``. They are launched as ``pdl`` says; what they write of batches is
read behind a product or ``entry_inputs_kernel``, when it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.drafter_parts import EntryWeights, FeatureWeights, LiveRows, Scratch
from surefoot.kernels.drafting import Drafting
from surefoot.kernels.triton import (
    blocks,
    drawn_picks,
    growth,
    markov,
    markov_picks,
    picks,
    several,
)
from surefoot.kernels.triton.attend import attend_inputs, work_of
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.lookup import ngram_lookup
from surefoot.kernels.triton.norm import rms_norm
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.rope_kv import rope_and_write, write_context

if TYPE_CHECKING:
    from surefoot.kernels.backend import AttentionShape, LayerWeights, RopeTable
    from surefoot.kernels.triton.backend import TritonBackend
    from surefoot.kernels.triton.products import TritonLinear

PAGES = 256
"""Entries of a block table that a program writes at a time."""


@jit
def entry_inputs_kernel(
    token_ptr, token_stride, table_ptr, embedding_norm_ptr, feature_ptr, hidden_norm_ptr,
    out_ptr, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, half): the embedding, then the feature. Lets the next kernel in as a product
    does: ``qkv_kernel`` may follow, which reads the batch before it waits."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if half == 0:
        weight = tl.load(embedding_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        await_inputs(PDL)
        release_next(PDL)
        token = tl.load(token_ptr + row * token_stride).to(tl.int64)
        x = tl.load(table_ptr + token * width + column, mask=inside, other=0.0)
    else:
        weight = tl.load(hidden_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        await_inputs(PDL)
        release_next(PDL)
        x = tl.load(feature_ptr + row * width + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    place = out_ptr + (row * 2 + half) * width + column
    tl.store(place, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["served_ptr"])
def shift_kernel(
    feature_ptr, before_ptr, last_of_block_ptr, width, row_slot_ptr, key_ptr,
    tables_ptr, table_stride, row_ptr, count_ptr, spans, served_ptr, above_ptr, last_ptr,
    shifted_ptr, position_ptr, out_slot_ptr, last_position,
    MASKED: tl.constexpr, TREES: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPANS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; the first of a span replaces ``before`` when it has read it."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot_ptr + row)
    if MASKED:
        serves = tl.load(served_ptr + slot, mask=slot >= 0, other=0).to(tl.int32)
        slot = tl.where(serves != 0, slot, -1)
        tl.store(out_slot_ptr + row, slot)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < width
    if TREES:
        above = tl.load(above_ptr + row)
    else:
        previous = tl.load(row_slot_ptr + row - 1, mask=row > 0, other=-1)
        above = tl.where(previous == slot, row - 1, -1)
    key = tl.load(key_ptr + row)
    tl.store(position_ptr + row, tl.minimum(tl.maximum(key - 1, 0), last_position))
    if above >= 0:
        x = tl.load(feature_ptr + above * width + column, mask=inside)
        tl.store(shifted_ptr + row * width + column, x, mask=inside)
    else:
        x = tl.load(before_ptr + slot * width + column, mask=inside)
        tl.store(shifted_ptr + row * width + column, x, mask=inside)
        entry = tl.arange(0, SPANS)
        first = tl.load(row_ptr + entry, mask=entry < spans, other=-1)
        count = tl.load(count_ptr + entry, mask=entry < spans, other=0)
        last = first + count - 1
        if TREES:
            last = tl.load(last_ptr + entry, mask=entry < spans, other=-1)
        live = tl.max(tl.where((first == row) & (count > 0), last, -1), axis=0)
        if live >= 0:
            x = tl.load(feature_ptr + live * width + column, mask=inside)
            # Other threads may have yet to read what is replaced.
            tl.debug_barrier()
            tl.store(before_ptr + slot * width + column, x, mask=inside)
    if key % BLOCK_SIZE == BLOCK_SIZE - 1:
        block = tl.load(tables_ptr + slot * table_stride + key // BLOCK_SIZE).to(tl.int64)
        x = tl.load(feature_ptr + row * width + column, mask=inside)
        tl.store(last_of_block_ptr + block * width + column, x, mask=inside)


@jit(
    do_not_specialize=["first_block", "scratch_blocks", "behind", "steps", "requests", "pages"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def live_rows_kernel(
    slots_ptr, requests, before_ptr, width, history_ptr, history_stride, length_ptr,
    tables_ptr, table_stride, table_width, first_block, scratch_blocks, steps, behind,
    last_position, token_ptr, feature_ptr, key_ptr, position_ptr, out_tables_ptr, out_stride, pages,
    FEATURES: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEPS: tl.constexpr, PAGES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    current = tl.maximum(length - 1, 1)
    tl.store(token_ptr + row, tl.load(history_ptr + slot * history_stride + current))
    step = tl.arange(0, STEPS)
    key = current + step
    position = tl.minimum(tl.maximum(key - behind, 0), last_position)
    tl.store(key_ptr + step * requests + row, key, mask=step <= steps)
    tl.store(position_ptr + step * requests + row, position, mask=step <= steps)
    for base in range(0, pages, PAGES):
        page = base + tl.arange(0, PAGES)
        beyond = page - ((current - 1) // BLOCK_SIZE + 1)
        own = tl.load(
            tables_ptr + slot * table_stride + tl.minimum(page, table_width - 1),
            mask=page < pages, other=0,
        )  # fmt: skip
        scratch = first_block + slot * scratch_blocks
        scratch = scratch + tl.minimum(tl.maximum(beyond, 0), scratch_blocks - 1)
        chosen = tl.where(beyond < 0, own, scratch.to(tl.int32))
        tl.store(out_tables_ptr + row * out_stride + page, chosen, mask=page < pages)
    if FEATURES:
        column = tl.arange(0, BLOCK)
        x = tl.load(before_ptr + slot * width + column, mask=column < width)
        tl.store(feature_ptr + row * width + column, x, mask=column < width)


class TritonDrafting(Drafting):
    """The operations as kernels."""

    backend: TritonBackend
    ngram_lookup = staticmethod(ngram_lookup)
    likeliest = staticmethod(picks.likeliest)
    draw = staticmethod(drawn_picks.draw)
    draw_markov = staticmethod(markov_picks.draw_markov)
    likeliest_several = staticmethod(several.likeliest_several)
    draw_several = staticmethod(several.draw_several)
    branch = staticmethod(growth.branch)
    best_nodes = staticmethod(growth.best_nodes)
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

    def add_looked_up(
        self, logits: torch.Tensor, linear: TritonLinear, table: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        if not markov.takes(len(tokens), linear.weight):
            return super().add_looked_up(logits, linear, table, tokens)
        return markov.add_looked_up(logits, linear.weight, table, tokens)

    def markov(
        self,
        logits: torch.Tensor,
        before: torch.Tensor,
        after: TritonLinear,
        current: torch.Tensor,
        ids: torch.Tensor | None,
        tokens: torch.Tensor,
        chances: torch.Tensor | None,
    ) -> None:
        if not markov.takes(len(current), after.weight):
            return super().markov(logits, before, after, current, ids, tokens, chances)
        markov_picks.walk(logits, before, after.weight, current, ids, tokens, chances)

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
        work = work_of(batch, weights.shape, kv)
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

    def entry_inputs(
        self, weights: EntryWeights, tokens: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        rows, width = features.shape
        features = features.contiguous()
        out = features.new_empty((rows, 2 * width))
        block = next_power_of_2(width)
        entry_inputs_kernel[(rows, 2)](
            tokens, tokens.stride(0), weights.table, weights.embedding_norm, features,
            weights.hidden_norm, out, width, weights.eps, block,
            num_warps=min(8, max(1, block // 256)), **pdl(features.device),
        )  # fmt: skip
        return out

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
        count, width = features.shape
        features = features.contiguous()
        shifted, positions = torch.empty_like(features), torch.empty_like(batch.key_index)
        masked = batch.row_slot if served is None else torch.empty_like(batch.row_slot)
        block = next_power_of_2(width)
        shift_kernel[(count,)](
            features, before, last_of_block, width, batch.row_slot, batch.key_index,
            batch.block_tables, batch.block_tables.stride(0), rows, counts, rows.shape[0], served,
            above, last, shifted, positions, masked, last_position,
            served is not None, above is not None, block_size, next_power_of_2(rows.shape[0]),
            block, num_warps=min(8, max(1, block // 512)), **pdl(features.device),
        )  # fmt: skip
        return shifted, positions, masked

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
        count = slots.shape[0]
        width = 1 if before is None else before.shape[1]
        # Attention is compiled for rows of tables that lie 64 bytes apart or a multiple of it.
        tables = block_tables.new_empty((count, cdiv(scratch.pages, 16) * 16))
        live = LiveRows(
            tokens=slots.new_empty(count),
            features=None if before is None else before.new_empty((count, width)),
            keys=slots.new_empty((steps + 1, count)),
            positions=slots.new_empty((steps + 1, count)),
            tables=tables[:, : scratch.pages],
        )
        live_rows_kernel[(count,)](
            slots, count, before, width, history, history.stride(0), length,
            block_tables, block_tables.stride(0), block_tables.shape[1],
            scratch.first, scratch.blocks, steps, behind, last_position,
            live.tokens, live.features, live.keys, live.positions,
            tables, tables.stride(0), scratch.pages,
            before is not None, scratch.block_size, next_power_of_2(steps + 1), PAGES,
            next_power_of_2(width), num_warps=4, **pdl(slots.device),
        )  # fmt: skip
        return live
