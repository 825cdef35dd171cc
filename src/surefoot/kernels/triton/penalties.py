"""What changes logits before anything is drawn: penalties, bias, masked ends; all in place.

A row's occurrences are counted in a scratch table of zeros, and the first to take a count out
(leaving zero again) applies it, so that a row costs its history and not the vocabulary: a program
for each, in which both follow one another without another launch.
Twins: ``apply_penalties``, ``apply_bias`` and ``mask_ends`` of ``sampling.sampler``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

TILE = 2048
SEEN, COUNTED = tl.constexpr(1), tl.constexpr(2)


@jit
def columns_of(tokens, vocab, column_ptr, MAPPED: tl.constexpr):
    """Where the logits of these tokens stand in a row; -1: nowhere."""
    if MAPPED:
        known = (tokens >= 0) & (tokens < vocab)
        return tl.load(column_ptr + tokens, mask=known, other=-1)
    return tl.where(tokens < vocab, tokens, -1).to(tl.int32)


@jit
def entries_of(
    ids_ptr, slot, count, vocab, column_ptr, MAPPED: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """``columns_of`` the tokens in a slot's row of a table [slots, count], padded to WIDTH."""
    entry = tl.arange(0, WIDTH)
    tokens = tl.load(ids_ptr + slot * count + entry, mask=entry < count, other=-1)
    return columns_of(tokens, vocab, column_ptr, MAPPED)


@jit
def columns_before(
    position, first, history_ptr, vocab, column_ptr, MAPPED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Of a text's tokens from place ``first`` on: these places, the columns of their logits, and
    which of them stand before ``position`` and have any."""
    index = first + tl.arange(0, TILE)
    token = tl.load(history_ptr + index, mask=index < position, other=-1)
    column = columns_of(token, vocab, column_ptr, MAPPED)
    return index, column, (index < position) & (column >= 0)


@jit
def count_tokens(
    count_ptr, vocab, column_ptr, position, history_ptr, prompt_length,
    MAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row's counts, from zero: ``SEEN`` if the token was in the prompt, plus ``COUNTED`` for
    each time in the output."""
    for first in range(0, position, TILE):
        index, column, there = columns_before(
            position, first, history_ptr, vocab, column_ptr, MAPPED, TILE
        )  # fmt: skip
        in_output = index >= prompt_length
        tl.atomic_or(count_ptr + column, SEEN, mask=there & ~in_output, sem="relaxed")
        tl.atomic_add(count_ptr + column, COUNTED, mask=there & in_output, sem="relaxed")


@jit
def penalised(logit, found, repetition, presence, frequency):
    """A logit whose token was ``found`` so often, as ``count_tokens`` has it, at least once."""
    count = (found // COUNTED).to(tl.float32)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = logit - frequency * count
    return logit - tl.where(count > 0, presence, 0.0)


@jit
def penalise(
    logits_ptr, scratch_ptr, vocab, column_ptr, position, history_ptr, prompt_length, repetition,
    presence, frequency, MAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row."""
    count_tokens(
        scratch_ptr, vocab, column_ptr, position, history_ptr, prompt_length, MAPPED, TILE
    )  # fmt: skip
    tl.debug_barrier()
    for first in range(0, position, TILE):
        _, column, there = columns_before(
            position, first, history_ptr, vocab, column_ptr, MAPPED, TILE
        )  # fmt: skip
        found = tl.atomic_xchg(scratch_ptr + column, 0, mask=there, sem="relaxed")
        owner = there & (found != 0)
        logit = tl.load(logits_ptr + column, mask=owner, other=0.0)
        logit = penalised(logit, found, repetition, presence, frequency)
        tl.store(logits_ptr + column, logit, mask=owner)
    tl.debug_barrier()


@jit
def adjust_kernel(
    logits_ptr, width, scratch_ptr, vocab, column_ptr, slot_ptr, position_ptr,
    history_ptr, history_stride, max_history, prompt_length_ptr,
    repetition_ptr, presence_ptr, frequency_ptr,
    bias_ids_ptr, bias_ptr, biases, stop_ids_ptr, stops, min_length_ptr,
    PENALTIES: tl.constexpr, BIAS: tl.constexpr, ENDS: tl.constexpr, MAPPED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    position = tl.load(position_ptr + row)
    logits_ptr += row * width
    if PENALTIES:
        repetition = tl.load(repetition_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            penalise(
                logits_ptr, scratch_ptr + row * width, vocab, column_ptr,
                tl.minimum(position, max_history).to(tl.int32), history_ptr + slot * history_stride,
                tl.load(prompt_length_ptr + slot), repetition, presence, frequency, MAPPED, TILE,
            )  # fmt: skip
    stop = entries_of(stop_ids_ptr, slot, stops, vocab, column_ptr, MAPPED, STOPS)
    masked = (stop >= 0) & (position < tl.load(min_length_ptr + slot))
    if BIAS:
        column = entries_of(bias_ids_ptr, slot, biases, vocab, column_ptr, MAPPED, WIDTH)
        entry = tl.arange(0, WIDTH)
        valid = column >= 0
        logit = tl.load(logits_ptr + column, mask=valid, other=0.0)
        logit += tl.load(bias_ptr + slot * biases + entry, mask=entry < biases, other=0.0)
        if ENDS:
            # Another thread masks the same token, in whichever order: both must write the same.
            ends = (column[:, None] == stop[None, :]) & masked[None, :]
            logit = tl.where(tl.max(ends.to(tl.int32), axis=1) > 0, float("-inf"), logit)
        tl.store(logits_ptr + column, logit, mask=valid)
    if ENDS:
        tl.store(logits_ptr + stop, tl.full([STOPS], float("-inf"), tl.float32), mask=masked)


def arguments_of(rows: Adjustments, width: int) -> tuple[Any, ...]:
    """What kernels are told of the adjustments of rows of ``width`` logits, from ``vocab`` on."""
    vocab = width if rows.columns is None else len(rows.columns)
    biases, stops = rows.bias_ids.shape[1], rows.stop_ids.shape[1]
    return (
        vocab, rows.columns, rows.slots, rows.positions, rows.history, rows.history.stride(0),
        rows.max_history, rows.prompt_length, rows.repetition, rows.presence, rows.frequency,
        rows.bias_ids, rows.bias, biases, rows.stop_ids, stops, rows.min_length,
        rows.penalties, rows.biased, rows.min_tokens, rows.columns is not None,
        TILE, next_power_of_2(biases), next_power_of_2(stops),
    )  # fmt: skip


class Adjuster:
    """``Backend.adjust``. Holds the scratch table of the penalties, made when first needed and
    grown with the rows. Tables that were outgrown are kept: a recorded round goes on with the one
    it was recorded with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, adjustments: Adjustments) -> bool:
        rows, (count, width) = adjustments, logits.shape
        scratch = self._table(count, width) if rows.penalties else None
        adjust_kernel[(count,)](
            logits, width, scratch, *arguments_of(rows, width),
            num_warps=8, enable_fp_fusion=False, **pdl(logits.device),
        )  # fmt: skip
        return True

    def _table(self, rows: int, width: int) -> torch.Tensor:
        if not self._tables or len(self._tables[-1]) < rows * width:
            # By powers of two, so that all together take at most twice the largest.
            size = next_power_of_2(rows) * width
            self._tables.append(torch.zeros(size, dtype=torch.int32, device=self.device))
        return self._tables[-1]
