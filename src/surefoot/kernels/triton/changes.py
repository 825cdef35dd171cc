"""What changes the logits of drafts that follow each other, made ready before the first of them.

Twin: ``penalties``, step by step. Counts of tokens and shifts of logits lie in tables, which a step
reads with its logits; whoever draws a token counts it. Launched as ``pdl`` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from surefoot.kernels.draws import Adjustments
from surefoot.kernels.triton.launch import jit
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next
from surefoot.kernels.triton.penalties import arguments_of, count_tokens, entries_of, penalised

PENALISED, SHIFTED = tl.constexpr(1), tl.constexpr(2)


@jit
def changed(
    logits, row, inside, column, width, slot, kind_ptr, count_ptr, shift_ptr,
    repetition_ptr, presence_ptr, frequency_ptr,
):  # fmt: skip
    """A tile of logits [rows, columns], of slots ``slot`` [rows], with what ``changes_kernel`` left
    for them."""
    kind = tl.load(kind_ptr + row, mask=inside, other=0)
    if tl.max(kind, axis=0) > 0:
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        there = (column < width)[None, :]
        counted = (kind & PENALISED != 0)[:, None] & there
        found = tl.load(count_ptr + place, mask=counted, other=0)
        shifted = (kind & SHIFTED != 0)[:, None] & there
        shift = tl.load(shift_ptr + place, mask=shifted, other=0.0)
        repetition = tl.load(repetition_ptr + slot, mask=inside, other=1.0)
        presence = tl.load(presence_ptr + slot, mask=inside, other=0.0)
        frequency = tl.load(frequency_ptr + slot, mask=inside, other=0.0)
        once = penalised(
            logits, found, repetition[:, None], presence[:, None], frequency[:, None]
        )  # fmt: skip
        logits = tl.where(found != 0, once, logits) + shift
    return logits


@jit
def clear(row_ptr, width, zero, TILE: tl.constexpr):
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        tl.store(row_ptr + column, zero, mask=column < width)
    tl.debug_barrier()


@jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def changes_kernel(
    kind_ptr, count_ptr, shift_ptr, width, vocab, column_ptr, slot_ptr, position_ptr,
    history_ptr, history_stride, max_history, prompt_length_ptr,
    repetition_ptr, presence_ptr, frequency_ptr,
    bias_ids_ptr, bias_ptr, biases, stop_ids_ptr, stops, min_length_ptr,
    PENALTIES: tl.constexpr, BIAS: tl.constexpr, ENDS: tl.constexpr, MAPPED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): what ``Changes`` says."""
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    position = tl.load(position_ptr + row)
    count_ptr += row * width
    shift_ptr += row * width
    kind = 0
    if PENALTIES:
        repetition = tl.load(repetition_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            kind += PENALISED
            clear(count_ptr, width, 0, TILE)
            count_tokens(
                count_ptr, vocab, column_ptr, tl.minimum(position, max_history).to(tl.int32),
                history_ptr + slot * history_stride, tl.load(prompt_length_ptr + slot), MAPPED,
                TILE,
            )  # fmt: skip
    if BIAS | ENDS:
        stop = entries_of(stop_ids_ptr, slot, stops, vocab, column_ptr, MAPPED, STOPS)
        ends = (stop >= 0) & (position < tl.load(min_length_ptr + slot)) & ENDS
        column = entries_of(bias_ids_ptr, slot, biases, vocab, column_ptr, MAPPED, WIDTH)
        entry = tl.arange(0, WIDTH)
        biased = (column >= 0) & BIAS
        if tl.max(ends.to(tl.int32), axis=0) + tl.max(biased.to(tl.int32), axis=0) > 0:
            kind += SHIFTED
            clear(shift_ptr, width, 0.0, TILE)
            bias = tl.load(bias_ptr + slot * biases + entry, mask=biased, other=0.0)
            tl.store(shift_ptr + column, bias, mask=biased)
            tl.debug_barrier()
            tl.store(shift_ptr + stop, tl.full([STOPS], float("-inf"), tl.float32), mask=ends)
    tl.store(kind_ptr + row, kind)


class Changes(NamedTuple):
    """``Adjustments`` of rows as tables, for drafts of the same rows that follow each other. Ends
    are masked as at the first of these."""

    kinds: torch.Tensor
    """int32 [R]: whether a row has counts (``PENALISED``) and shifts (``SHIFTED``)."""
    counts: torch.Tensor
    """int32 [R, width], as ``count_tokens`` has them."""
    shifts: torch.Tensor
    """float32 [R, width]: biases, and -inf for masked ends."""
    repetition: torch.Tensor
    """float32 [slots], as are ``presence`` and ``frequency``."""
    presence: torch.Tensor
    frequency: torch.Tensor


def changes_of(adjustments: Adjustments, width: int) -> Changes:
    """Of rows of ``width`` logits."""
    rows, count, device = adjustments, len(adjustments.slots), adjustments.slots.device
    kinds = torch.empty(count, dtype=torch.int32, device=device)
    counts = torch.empty((count, width), dtype=torch.int32, device=device)
    shifts = torch.empty((count, width), device=device)
    changes_kernel[(count,)](
        kinds, counts, shifts, width, *arguments_of(rows, width), num_warps=8, **pdl(device)
    )
    return Changes(kinds, counts, shifts, rows.repetition, rows.presence, rows.frequency)
