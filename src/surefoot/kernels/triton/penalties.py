"""What changes logits before anything is drawn: penalties, bias, masked ends; all in place.

A row's occurrences are counted in a scratch table of zeros, and the first to take a count out
(leaving zero again) applies it, so that a row costs its history and not the vocabulary: a program
for each, in which both follow one another without another launch.
Twins: ``apply_penalties``, ``apply_bias`` and ``mask_ends`` of ``sampling.sampler``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

TILE = 2048
SEEN, COUNTED = tl.constexpr(1), tl.constexpr(2)


@jit
def penalise(
    logits_ptr, scratch_ptr, vocab, position, history_ptr, prompt_length, repetition, presence,
    frequency, TILE: tl.constexpr,
):  # fmt: skip
    """One row. A scratch entry is ``SEEN`` if the token was in the prompt, plus ``COUNTED`` for each
    time in the output."""
    for first in range(0, position, TILE):
        index = first + tl.arange(0, TILE)
        before = index < position
        token = tl.load(history_ptr + index, mask=before, other=0)
        entry = scratch_ptr + tl.minimum(tl.maximum(token, 0), vocab - 1)
        in_output = index >= prompt_length
        tl.atomic_or(entry, SEEN, mask=before & ~in_output, sem="relaxed")
        tl.atomic_add(entry, COUNTED, mask=before & in_output, sem="relaxed")
    tl.debug_barrier()
    for first in range(0, position, TILE):
        index = first + tl.arange(0, TILE)
        before = index < position
        token = tl.load(history_ptr + index, mask=before, other=0)
        token = tl.minimum(tl.maximum(token, 0), vocab - 1)
        found = tl.atomic_xchg(scratch_ptr + token, 0, mask=before, sem="relaxed")
        owner = before & (found != 0)
        count = tl.where(owner, found // COUNTED, 0).to(tl.float32)
        logit = tl.load(logits_ptr + token, mask=owner, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = logit - frequency * count
        logit = logit - tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + token, logit, mask=owner)
    tl.debug_barrier()


@jit
def adjust_kernel(
    logits_ptr, scratch_ptr, vocab, slot_ptr, position_ptr, history_ptr, history_stride,
    max_history, prompt_length_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    bias_ids_ptr, bias_ptr, biases, stop_ids_ptr, stops, min_length_ptr,
    PENALTIES: tl.constexpr, BIAS: tl.constexpr, ENDS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    position = tl.load(position_ptr + row)
    logits_ptr += row * vocab
    if PENALTIES:
        repetition = tl.load(repetition_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            penalise(
                logits_ptr, scratch_ptr + row * vocab, vocab,
                tl.minimum(position, max_history).to(tl.int32), history_ptr + slot * history_stride,
                tl.load(prompt_length_ptr + slot), repetition, presence, frequency, TILE,
            )  # fmt: skip
    entry = tl.arange(0, STOPS)
    stop = tl.load(stop_ids_ptr + slot * stops + entry, mask=entry < stops, other=-1)
    early = position < tl.load(min_length_ptr + slot)
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
        rows, (count, vocab) = adjustments, logits.shape
        scratch = self._table(count, vocab) if rows.penalties else None
        biases, stops = rows.bias_ids.shape[1], rows.stop_ids.shape[1]
        adjust_kernel[(count,)](
            logits, scratch, vocab, rows.slots, rows.positions, rows.history,
            rows.history.stride(0), rows.max_history, rows.prompt_length, rows.repetition,
            rows.presence, rows.frequency, rows.bias_ids, rows.bias, biases, rows.stop_ids, stops,
            rows.min_length, rows.penalties, rows.biased, rows.min_tokens,
            TILE, next_power_of_2(biases), next_power_of_2(stops),
            num_warps=8, enable_fp_fusion=False, **pdl(logits.device),
        )  # fmt: skip
        return True

    def _table(self, rows: int, vocab: int) -> torch.Tensor:
        if not self._tables or self._tables[-1].shape[0] < rows:
            # By powers of two, so that all together take at most twice the largest.
            shape = next_power_of_2(rows), vocab
            self._tables.append(torch.zeros(shape, dtype=torch.int32, device=self.device))
        return self._tables[-1]
