"""What changes logits before anything is drawn: penalties, bias, masked ends; all in place.

A row's occurrences are counted in a scratch table of zeros, and the first to take a count out
(leaving zero again) applies it, so that a row costs its history and not the vocabulary.
Twins: ``apply_penalties``, ``apply_bias`` and ``mask_ends`` of ``sampling.sampler``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2

TILE = 1024
SEEN, COUNTED = tl.constexpr(1), tl.constexpr(2)


@jit
def penalties_kernel(
    logits_ptr, scratch_ptr, vocab, slot_ptr, position_ptr, history_ptr, history_stride,
    prompt_length_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    APPLY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts (APPLY off), then applies the counts. A scratch entry is ``SEEN`` if the token was in
    the prompt, plus ``COUNTED`` for each time in the output."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    position = tl.load(position_ptr + row)
    repetition = tl.load(repetition_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    if tl.program_id(1) * TILE >= position:
        return
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    before = index < position
    token = tl.load(history_ptr + slot * history_stride + index, mask=before, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    entry = scratch_ptr + row * vocab + token
    if APPLY:
        found = tl.atomic_xchg(entry, 0, mask=before, sem="relaxed")
        owner = before & (found != 0)
        count = tl.where(owner, found // COUNTED, 0).to(tl.float32)
        logit = tl.load(logits_ptr + row * vocab + token, mask=owner, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = logit - frequency * count
        logit = logit - tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + row * vocab + token, logit, mask=owner)
    else:
        in_output = index >= tl.load(prompt_length_ptr + slot)
        tl.atomic_or(entry, SEEN, mask=before & ~in_output, sem="relaxed")
        tl.atomic_add(entry, COUNTED, mask=before & in_output, sem="relaxed")


@jit
def bias_and_ends_kernel(
    logits_ptr, vocab, slot_ptr, position_ptr, bias_ids_ptr, bias_ptr, biases,
    stop_ids_ptr, stops, min_length_ptr,
    BIAS: tl.constexpr, ENDS: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    logits_ptr += row * vocab
    entry = tl.arange(0, STOPS)
    stop = tl.load(stop_ids_ptr + slot * stops + entry, mask=entry < stops, other=-1)
    early = tl.load(position_ptr + row) < tl.load(min_length_ptr + slot)
    masked = (stop >= 0) & (stop < vocab) & early
    if BIAS:
        entry = tl.arange(0, WIDTH)
        token = tl.load(bias_ids_ptr + slot * biases + entry, mask=entry < biases, other=-1)
        valid = (token >= 0) & (token < vocab)
        logit = tl.load(logits_ptr + token, mask=valid, other=0.0)
        logit += tl.load(bias_ptr + slot * biases + entry, mask=entry < biases, other=0.0)
        if ENDS:
            # Another thread masks the same token, in whichever order: both must write the same.
            ends = (token[:, None] == stop[None, :]) & masked[None, :]
            logit = tl.where(tl.max(ends.to(tl.int32), axis=1) > 0, float("-inf"), logit)
        tl.store(logits_ptr + token, logit, mask=valid)
    if ENDS:
        tl.store(logits_ptr + stop, tl.full([STOPS], float("-inf"), tl.float32), mask=masked)


class Adjuster:
    """``Backend.adjust``. Holds the scratch table of the penalties, made when first needed and
    grown with the rows. Tables that were outgrown are kept: a recorded round goes on with the one
    it was recorded with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, adjustments: Adjustments) -> bool:
        if adjustments.penalties:
            apply_penalties(logits, self._table(*logits.shape), adjustments)
        if adjustments.biased or adjustments.min_tokens:
            apply_bias_and_ends(logits, adjustments)
        return True

    def _table(self, rows: int, vocab: int) -> torch.Tensor:
        if not self._tables or self._tables[-1].shape[0] < rows:
            # By powers of two, so that all together take at most twice the largest.
            shape = next_power_of_2(rows), vocab
            self._tables.append(torch.zeros(shape, dtype=torch.int32, device=self.device))
        return self._tables[-1]


def apply_penalties(logits: torch.Tensor, scratch: torch.Tensor, rows: Adjustments) -> None:
    """``logits`` float32 [M, vocab], contiguous; ``scratch`` int32 [>= M, vocab] of zeros, and
    zeros again afterwards."""
    count, vocab = logits.shape
    for apply in (False, True):
        penalties_kernel[(count, cdiv(rows.max_history, TILE))](
            logits, scratch, vocab, rows.slots, rows.positions, rows.history,
            rows.history.stride(0), rows.prompt_length, rows.repetition, rows.presence,
            rows.frequency, apply, TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def apply_bias_and_ends(logits: torch.Tensor, rows: Adjustments) -> None:
    """Biases are added; stop ids are ruled out below the least length. ``logits`` as above."""
    biases, stops = rows.bias_ids.shape[1], rows.stop_ids.shape[1]
    bias_and_ends_kernel[(logits.shape[0],)](
        logits, logits.shape[1], rows.slots, rows.positions, rows.bias_ids, rows.bias, biases,
        rows.stop_ids, stops, rows.min_length, rows.biased, rows.min_tokens,
        next_power_of_2(biases), next_power_of_2(stops), num_warps=1,
    )  # fmt: skip
