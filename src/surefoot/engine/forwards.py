"""The target's forward in rounds that the host plans, as CUDA graphs by number of rows.

Rounds with prompts or grammars are planned by the host, and their kernels would be launched one by
one: hundreds, each of which takes the host longer than the GPU. Everything up to
the last layer depends on the plan only through a few tables, so that part is recorded; what
follows (sampling, verdict, drafts) is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from surefoot.engine.capture import capture
from surefoot.kernels.batch import FlatBatch, SpanTable
from surefoot.models.decoder import Decoder, ForwardResult
from surefoot.speculation.state import SlotState


def row_counts(most: int) -> list[int]:
    """Numbers of rows that forwards are padded to: up by a third to a half each."""
    counts, power = [], 16
    while power < most:
        counts += [power, power * 3 // 2]
        power *= 2
    return [count for count in counts if count < most] + [most]


class PaddedForward:
    """``Decoder.forward`` for batches over the slots of ``state``, padded to one of few sizes:
    unused rows belong to nobody, unused spans have no rows. Here it is run as it is called."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[Any],
        capture: Sequence[int],
        state: SlotState,
        most: int,
    ) -> None:
        """``most``: rows of the largest batch; larger ones run unpadded."""
        self.decoder = decoder
        self.kv = kv
        self.capture = capture
        self.state = state
        self.counts = row_counts(most)
        device = state.device
        self.rows = torch.zeros((5, most), dtype=torch.int64, device=device)
        """Tokens, positions, key indices, slots and masks of the rows."""
        self.spans = torch.zeros((3, state.slots), dtype=torch.int64, device=device)
        """First rows, numbers of rows and slots of the spans."""

    def __call__(self, batch: FlatBatch) -> ForwardResult:
        """As ``Decoder.forward``; the tensors are valid until the next call."""
        count = batch.tokens.shape[0]
        size = next((size for size in self.counts if size >= count), None)
        if size is None or batch.spans is None or batch.first_key:
            return self.decoder.forward(batch, self.kv, self.capture)
        self.rows[3, count:size] = -1
        parts = [batch.tokens, batch.positions, batch.key_index, batch.row_slot]
        if batch.mask is not None:
            parts.append(batch.mask)
        self.rows[: len(parts), :count] = torch.stack(parts)
        entries = batch.spans.rows.shape[0]
        self.spans[1, entries:] = 0
        self.spans[:, :entries] = torch.stack(
            (batch.spans.first_row, batch.spans.rows, batch.spans.slot)
        )
        result = self.run(size, batch.mask is not None)
        return ForwardResult(result.hidden[:count], result.features[:count])

    def batch(self, size: int, masked: bool) -> FlatBatch:
        """The tables as a batch of ``size`` rows, bounded by nothing but the slots themselves."""
        tokens, positions, key_index, row_slot, mask = self.rows[:, :size]
        first_row, rows, slot = self.spans
        return FlatBatch(
            tokens=tokens,
            positions=positions,
            key_index=key_index,
            row_slot=row_slot,
            block_tables=self.state.block_tables,
            span_start=self.state.computed,
            max_keys=self.state.history.shape[1],
            mask=mask if masked else None,
            spans=SpanTable(first_row, rows, slot, max_rows=size),
        )

    def run(self, size: int, masked: bool) -> ForwardResult:
        return self.decoder.forward(self.batch(size, masked), self.kv, self.capture)


class RecordedForward(PaddedForward):
    """Recorded by size, in ``pool``."""

    def __init__(self, *arguments: Any, pool: Any) -> None:
        super().__init__(*arguments)
        self.pool = pool
        self.stream = torch.cuda.Stream(self.state.device)
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, ForwardResult]] = {}
        self.capture_seconds = 0.0

    def record_all(self) -> None:
        """Record every size, without masks: trees record theirs when they first grow."""
        for size in self.counts:
            self._recorded(size, False)

    def run(self, size: int, masked: bool) -> ForwardResult:
        graph, result = self._recorded(size, masked)
        graph.replay()
        return result

    def _recorded(self, size: int, masked: bool) -> tuple[torch.cuda.CUDAGraph, ForwardResult]:
        known = self.graphs.get((size, masked))
        if known is None:
            known = self.graphs[size, masked] = self._record(size, masked)
        return known

    def _record(self, size: int, masked: bool) -> tuple[torch.cuda.CUDAGraph, ForwardResult]:
        started = time.perf_counter()
        kept = self.rows.clone(), self.spans.clone()
        # Nobody's rows: they write nothing.
        self.rows[3].fill_(-1)
        self.spans[1].zero_()
        recorded = capture(partial(super().run, size, masked), self.pool, self.stream)
        for table, before in zip((self.rows, self.spans), kept, strict=True):
            table.copy_(before)
        self.capture_seconds += time.perf_counter() - started
        return recorded
