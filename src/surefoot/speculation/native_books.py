"""The book-keeping around a round in C, for slots that live on the CPU.

A round of eight requests is some sixty tensor operations of a few bytes each; on a CPU their
launches cost more than a tenth of a small model's forward. Each method here is one C call
(``kernels/cpu/round.c``, ``learn.c``). What is done for trees alone is done in torch.

Between two rounds the weights have passed through the processor's caches, and even to allocate a
tensor and to ask for its address takes microseconds then. So what a round makes of its spans is
written where the last round of the same size had it: it is valid until the next round.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, cast

import torch

from surefoot.kernels.backend import Backend
from surefoot.kernels.batch import FlatBatch
from surefoot.kernels.cpu.backend import NativeBackend
from surefoot.kernels.cpu.structs import BooksStruct, LayoutStruct
from surefoot.kernels.rounds import RoundLayout, RoundSpans, RoundVerdict
from surefoot.speculation.books import LEAST, BookKeeping
from surefoot.speculation.controller import Controller
from surefoot.speculation.estimator import BINS, GLOBAL_DECAY, PRIOR_RANGE, SLOT_DECAY
from surefoot.speculation.proposer import Drafts
from surefoot.speculation.state import SlotState

if TYPE_CHECKING:
    from surefoot.speculation.size import Size


_FEW_ROWS = 64
"""Rows of a round up to which its tables are kept for the next one of that size."""
_MOST_LAYOUTS = 256
"""Sizes of which they are."""


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


class NativeBooks(BookKeeping):
    """``BookKeeping`` by the compiled library of a ``NativeBackend``."""

    def __init__(
        self, backend: Backend, state: SlotState, controller: Controller, spans: int
    ) -> None:
        super().__init__(backend, state, controller, spans)
        self._library = cast(NativeBackend, backend).library
        self._struct = self._tables()
        self._address = ctypes.addressof(self._struct)
        self._splits: dict[int, tuple[RoundSpans, tuple[int, ...], tuple[torch.Tensor, ...]]] = {}
        self._verdicts: dict[int, tuple[RoundVerdict, tuple[int, ...]]] = {}
        """By requests."""
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        """By requests, rows, and rows that sample."""

    def _tables(self) -> BooksStruct:
        """Where everything lies: none of these tensors is ever replaced by another."""
        state, controller, offers = self.state, self.controller, self.offers
        records = controller.records
        return BooksStruct(
            *map(_address, (state.history, state.length, state.computed, state.limit)),
            *map(_address, (state.alive, controller.draft_limit, controller.tokens)),
            *map(_address, (controller.lengths, controller.confidence, controller.parents)),
            *map(_address, (controller.allowed, records.watched, records.watched_bins)),
            *map(_address, (records.watched_parents, records.watched_length)),
            *map(_address, (records.watched_start, records.hits, records.trials, records.seen)),
            *map(_address, (offers.tokens, offers.lengths, offers.proposer, offers.parents)),
            *map(_address, (offers.chances, self.report)),
            *(state.history.shape[1], state.slots, state.padding_slot, len(controller.names)),
            *(state.max_drafts, records.hits.shape[2], BINS, state.vocab_size, self.columns.count),
            *(SLOT_DECAY, GLOBAL_DECAY, *PRIOR_RANGE, LEAST),
        )

    def split(self, slots: torch.Tensor, quota: torch.Tensor, size: Size) -> RoundSpans:
        batch = slots.shape[0]
        found = self._splits.get(batch)
        if found is None or found[0].slots is not slots:
            *own, scratch = _integers(4, batch)
            scratch = scratch, torch.empty(batch * self.state.max_drafts)
            addresses = tuple(tensor.data_ptr() for tensor in (*own, *scratch))
            self._splits[batch] = found = RoundSpans(slots, *own), addresses, scratch
        spans, addresses, _ = found
        self._library.sf_split(
            self._address,
            slots.data_ptr(),
            quota.data_ptr(),
            batch,
            size.rows,
            size.samples,
            size.verifies,
            *addresses,
        )
        return spans

    def lay_out(self, spans: RoundSpans, size: Size, max_keys: int) -> RoundLayout:
        key = batch, rows, sampled = spans.slots.shape[0], size.rows, size.samples
        if (layout := self._layouts.get(key)) is None:
            few = rows <= _FEW_ROWS
            layout = _Layout(self.state, key, self.state.history.shape[1] if few else max_keys)
            if few:
                if len(self._layouts) >= _MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = layout
        self._library.sf_lay_out(
            self._address,
            spans.slots.data_ptr(),
            spans.known.data_ptr(),
            spans.drafts.data_ptr(),
            spans.samples.data_ptr(),
            batch,
            rows,
            sampled,
            layout.address,
        )
        return layout.round

    def write_drafts(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        tokens = tokens.contiguous()
        self._library.sf_write_drafts(
            self._address, slots.data_ptr(), len(slots), tokens.data_ptr(), tokens.shape[1]
        )

    def judge(
        self, spans: RoundSpans, first_sample: torch.Tensor, sampled: torch.Tensor
    ) -> RoundVerdict:
        batch, stop_ids = spans.slots.shape[0], self.state.params.stop_ids
        if (found := self._verdicts.get(batch)) is None:
            out = _integers(batch, self.state.max_drafts + 1), *_integers(5, batch)
            addresses = tuple(tensor.data_ptr() for tensor in out)
            self._verdicts[batch] = found = RoundVerdict(*out), addresses
        verdict, addresses = found
        self._library.sf_judge(
            self._address,
            spans.slots.data_ptr(),
            spans.known.data_ptr(),
            spans.drafts.data_ptr(),
            spans.samples.data_ptr(),
            batch,
            sampled.data_ptr(),
            sampled.shape[0],
            first_sample.data_ptr(),
            stop_ids.data_ptr(),
            stop_ids.shape[1],
            *addresses,
        )
        return verdict

    def learn(self, index: int, slots: torch.Tensor, drafts: Drafts | None) -> None:
        if drafts is None:
            nothing = None, None, None, None, 0
            self._library.sf_learn(self._address, index, slots.data_ptr(), slots.shape[0], *nothing)
            return
        tokens, lengths = drafts.tokens.contiguous(), drafts.lengths.contiguous()
        confidence, parents = drafts.confidence.contiguous(), drafts.parents
        if parents is not None:
            parents = parents.contiguous()
        self._library.sf_learn(
            self._address,
            index,
            slots.data_ptr(),
            slots.shape[0],
            tokens.data_ptr(),
            lengths.data_ptr(),
            confidence.data_ptr(),
            _address(parents),
            tokens.shape[1],
        )

    def choose_and_report(
        self, slots: torch.Tensor, drafts: torch.Tensor, verdict: RoundVerdict, proposing: bool
    ) -> None:
        self._library.sf_report(
            self._address,
            slots.data_ptr(),
            slots.shape[0],
            drafts.data_ptr(),
            verdict.counts.data_ptr(),
            verdict.accepted.data_ptr(),
            verdict.ends.data_ptr(),
            verdict.going.data_ptr(),
            verdict.tokens.data_ptr(),
            proposing,
        )


class _Layout:
    """Tables of a round's rows, and where they are."""

    def __init__(self, state: SlotState, key: tuple[int, int, int], max_keys: int) -> None:
        """``key``: requests, rows, and rows that sample. ``max_keys`` as of ``lay_out``."""
        batch, rows, sampled = key
        sizes = (rows, rows, rows, batch, sampled, sampled, sampled, batch)
        out = _integers(sum(sizes)).split(sizes)
        tokens, positions, row_slot, first_row, index, sample_slots, sample_positions, first = out
        flat = FlatBatch(
            tokens=tokens,
            positions=positions,
            key_index=positions,
            row_slot=row_slot,
            block_tables=state.block_tables,
            span_start=state.computed,
            max_keys=max_keys,
        )
        self.round = RoundLayout(flat, first_row, index, sample_slots, sample_positions, first)
        self._struct = LayoutStruct(*(tensor.data_ptr() for tensor in out))
        self.address = ctypes.addressof(self._struct)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
