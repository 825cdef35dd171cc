"""The loss of a drafter's head and its gradient. Twin: ``kernels.losses.row_losses``.

A program takes a row. What it reads again after the first pass lies in the L2 cache.
"""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.losses import Objective, RowLosses
from surefoot.kernels.triton.launch import jit, next_power_of_2

_BLOCK = 4096


@jit
def row_losses_kernel(
    logits_ptr, teacher_ptr, place_ptr, label_ptr, weight_ptr,
    loss_ptr, overlap_ptr, best_ptr, slope_ptr, width, to_label, to_distance, to_teacher,
    LABELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    slope_ptr += row * width
    teacher_ptr += tl.load(place_ptr + row) * width
    most = float("-inf")
    total = 0.0
    best = 0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + column, mask=column < width, other=float("-inf"))
        top = tl.max(z, axis=0)
        first = tl.min(tl.where(z == top, column, width), axis=0)
        best = tl.where(top > most, first, best)
        raised = tl.maximum(most, top)
        total = total * tl.exp(most - raised) + tl.sum(tl.exp(z - raised), axis=0)
        most = raised
    norm = most + tl.log(total)
    # Sums over the row: abs(q - p), q * sign(q - p), p * log q.
    distance = tl.zeros([BLOCK], tl.float32)
    signed = tl.zeros([BLOCK], tl.float32)
    crossed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        log_q = tl.load(logits_ptr + column, mask=inside, other=0.0) - norm
        q = tl.where(inside, tl.exp(log_q), 0.0)
        log_p = tl.load(teacher_ptr + column, mask=inside, other=0.0).to(tl.float32)
        p = tl.where(inside, tl.exp(log_p), 0.0)
        apart = q - p
        distance += tl.abs(apart)
        signed += tl.where(apart > 0, q, tl.where(apart < 0, -q, 0.0))
        crossed += tl.where(inside, p * log_q, 0.0)
    whole = tl.sum(distance, axis=0)
    balance = tl.sum(signed, axis=0)
    loss = to_distance * whole - to_teacher * tl.sum(crossed, axis=0)
    label = 0
    if LABELS:
        label = tl.load(label_ptr + row)
        loss -= to_label * (tl.load(logits_ptr + label) - norm)
    weight = tl.load(weight_ptr + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        q = tl.exp(tl.load(logits_ptr + column, mask=inside, other=0.0) - norm)
        p = tl.exp(tl.load(teacher_ptr + column, mask=inside, other=0.0).to(tl.float32))
        apart = q - p
        sign = tl.where(apart > 0, 1.0, tl.where(apart < 0, -1.0, 0.0))
        slope = to_teacher * apart + to_distance * q * (sign - balance)
        if LABELS:
            slope += to_label * (q - tl.where(column == label, 1.0, 0.0))
        slope *= weight
        tl.store(slope_ptr + column, slope.to(slope_ptr.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + row, loss)
    tl.store(overlap_ptr + row, 1 - whole / 2)
    tl.store(best_ptr + row, best.to(tl.int64))


def row_losses(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    places: torch.Tensor,
    labels: torch.Tensor | None,
    weights: torch.Tensor,
    objective: Objective,
    dtype: torch.dtype,
) -> RowLosses:
    """As the twin; tensors are contiguous."""
    rows, width = logits.shape
    losses, overlap = (torch.empty(rows, device=logits.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    slope = torch.empty_like(logits, dtype=dtype)
    row_losses_kernel[(rows,)](
        logits, teacher, places, labels, weights, losses, overlap, best, slope, width,
        objective.label, objective.distance, objective.cross_entropy,
        labels is not None, min(_BLOCK, next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return RowLosses(losses, overlap, best, slope)
