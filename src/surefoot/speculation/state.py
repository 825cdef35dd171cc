"""Running requests on the device: one row (slot) each in every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from surefoot.kernels.draws import TokenMasks
from surefoot.kernels.upload import Uploads, places_of
from surefoot.request import Request
from surefoot.sampling.params import SlotParams

_ZEROED = 64
"""Rows of ``SlotState.zeroed``, in all."""


def slots_of(requests: Sequence[Request]) -> np.ndarray:
    """int64 [n]; below 0: those that do not run."""
    return np.array([request.slot for request in requests], dtype=np.int64)


class SlotState:
    """``requests`` requests of at most ``max_length`` tokens, and one slot more, the last, that is
    never a request's: what a round has no request for stands on it.

    ``history`` int64 [slots, max_length + max_drafts + 1]: committed tokens, then tentative
    drafts. ``length`` int64 [slots]: committed tokens; the last one is the current token.
    ``computed`` int64 [slots]: leading positions whose KV is written. ``limit`` int64 [slots]:
    bound of ``length``. ``alive`` int64 [slots]: 1 until a round ends the request.
    ``block_tables`` int32 [slots, blocks].
    """

    def __init__(
        self,
        requests: int,
        max_length: int,
        max_drafts: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.slots = slots = requests + 1
        self.padding_slot = requests
        self.max_drafts = max_drafts
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        width = max_length + max_drafts + 1
        self.history = torch.zeros((slots, width), dtype=torch.int64, device=device)
        self._counts = torch.zeros((5, slots), dtype=torch.int64, device=device)
        self.length, self.computed, self.limit, self.alive, self.structured = self._counts
        self.length[self.padding_slot] = 1
        self.mask_bits = torch.zeros((0, 0), dtype=torch.int32, device="cpu")
        """int32 [slots * (1 + max_drafts), ceil(vocab / 32)], as in ``TokenMasks``: what the rows
        of a slot that is ``structured`` (1) may sample. Made when the first such request comes.
        Whoever is under a grammar takes part in one round at a time: the host writes what the next
        one reads, in its own memory, and a GPU's kernels read it there."""
        blocks = -(-width // block_size)
        self.block_tables = torch.zeros((slots, blocks), dtype=torch.int32, device=device)
        self.params = SlotParams(slots, vocab_size, device)
        self._zeros = torch.zeros((_ZEROED, slots), dtype=torch.int64, device=device)
        self._zeroed = 0
        """Rows of it that somebody has."""
        self._blocks_written: list[list[int]] = [[] for _ in range(slots)]

    def zeroed(self, rows: int) -> torch.Tensor:
        """A new table int64 [rows, slots]: 0 at first, and whenever a request enters a slot."""
        before, self._zeroed = self._zeroed, self._zeroed + rows
        if self._zeroed > len(self._zeros):
            raise ValueError(f"at most {len(self._zeros)} rows are zeroed")
        return self._zeros[before : self._zeroed]

    def admit(self, requests: Sequence[Request], uploads: Uploads) -> np.ndarray:
        """Have ``uploads`` enter requests, new or resumed, into their slots, int64 [B], which are
        returned."""
        # One copy for all of them: a wave of hundreds would wait for thousands, and where some
        # request ends every other round, everybody waits for each.
        slots = slots_of(requests)
        known = [np.array(request.tokens, dtype=np.int64) for request in requests]
        lengths = [len(text) for text in known]
        counts = np.array(
            [
                lengths,
                [request.computed for request in requests],
                [request.max_length for request in requests],
                [1] * len(slots),
                [request.grammar is not None for request in requests],
            ],
            dtype=np.int64,
        )
        places = np.repeat(slots * self.history.shape[1], lengths) + _count_up(lengths)
        texts = np.concatenate(known)
        uploads.write(self.history, places, texts)
        uploads.write(self._counts, places_of(slots, self._counts.shape, 1), counts)
        if self._zeroed:
            uploads.clear(self._zeros[: self._zeroed], slots, 1)
        self.params.enter(requests, slots, uploads)
        self.params.write_biases(requests)
        if any(request.grammar is not None for request in requests):
            self._make_masks()
        for slot in slots.tolist():
            self._blocks_written[slot] = []
        return slots

    def forget_written(self) -> None:
        """Nobody knows what arrived of what was to be entered."""
        self.params.forget_written()
        self._blocks_written = [[] for _ in range(self.slots)]

    def _make_masks(self) -> None:
        if not len(self.mask_bits):
            shape = self.slots * (1 + self.max_drafts), -(-self.vocab_size // 32)
            pinned = self.device.type == "cuda"
            self.mask_bits = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=pinned)

    def token_masks(self, slots: torch.Tensor, first: torch.Tensor) -> TokenMasks:
        """The grammar masks of rows that sample, which belong to ``slots`` int64 [M], each span's
        from ``first`` int64 [B] on: entry j of a slot's for the j-th row of its span."""
        return TokenMasks(self.mask_bits, 1 + self.max_drafts, slots, first, self.structured)

    def set_blocks(self, leases: Iterable[tuple[int, Sequence[int]]], uploads: Uploads) -> None:
        """Have ``uploads`` mirror the blocks of leases, by slot: what changed since the last
        call."""
        slots, counts, first, changed = [], [], [], []
        for slot, blocks in leases:
            common = self._common_blocks(slot, blocks)
            if common < len(blocks):
                slots.append(slot)
                counts.append(len(blocks) - common)
                first.append(common)
                changed.append(np.array(blocks[common:], dtype=np.int32))
        if changed:
            columns = _count_up(counts) + np.repeat(first, counts)
            places = np.repeat(slots, counts) * self.block_tables.shape[1] + columns
            ids = np.concatenate(changed)
            uploads.write(self.block_tables, places, ids)

    def _common_blocks(self, slot: int, blocks: Sequence[int]) -> int:
        """How many of a lease's leading blocks the device has already; the rest is noted as
        written."""
        written = self._blocks_written[slot]
        self._blocks_written[slot] = list(blocks)
        common = min(len(written), len(blocks))
        if written[:common] == blocks[:common]:
            return common
        # Given back and reserved again, blocks may change in the middle and end the same.
        pairs = enumerate(zip(written, blocks, strict=False))
        return next(at for at, (old, new) in pairs if old != new)


def _count_up(lengths: Sequence[int]) -> np.ndarray:
    """int64: 0, 1, … for each of ``lengths``, one after the other."""
    each = np.array(lengths, dtype=np.int64)
    ends = each.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - each, each)
