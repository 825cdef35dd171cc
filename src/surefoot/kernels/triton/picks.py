"""The likeliest drafts of a drafter's logits. Twin: ``kernels.drafting.Drafting.likeliest``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.triton.argmax import largest
from surefoot.kernels.triton.launch import cdiv, jit, next_power_of_2
from surefoot.kernels.triton.pdl import await_inputs, pdl, release_next

PART = 2048
"""Logits that a program compares."""


@jit
def partial_likeliest_kernel(
    logits_ptr, stride, width, value_ptr, index_ptr, total_ptr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits_ptr + row * stride + column, mask=column < width, other=float("-inf")
    )  # fmt: skip
    best, index = largest(values, column, width - 1)
    # A part may hold nothing but -inf; its sum then counts nothing.
    pivot = tl.where(best == float("-inf"), 0.0, best)
    place = row * tl.num_programs(1) + part
    tl.store(value_ptr + place, best)
    tl.store(index_ptr + place, index)
    tl.store(total_ptr + place, tl.sum(tl.exp(values - pivot), axis=0))


@jit(
    do_not_specialize=["token_stride", "chance_stride"],
    do_not_specialize_on_alignment=["token_ptr", "chance_ptr"],
)
def final_likeliest_kernel(
    value_ptr, index_ptr, total_ptr, parts, width, ids_ptr,
    token_ptr, token_stride, chance_ptr, chance_stride,
    MAPPED: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    inside = part < parts
    values = tl.load(value_ptr + row * parts + part, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=inside, other=width - 1)
    totals = tl.load(total_ptr + row * parts + part, mask=inside, other=0.0)
    best, found = largest(values, index, width - 1)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(totals * tl.exp(values - pivot), axis=0)
    token = found.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row * token_stride, token)
    tl.store(chance_ptr + row * chance_stride, tl.exp(best - pivot) / total)


def room_for_largest(
    rows: int, parts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each part of rows: the largest logit, its column int32, and the sum of the part's
    exponentials less the largest, [rows, parts] each."""
    values, totals = (torch.empty((rows, parts), device=device) for _ in range(2))
    return values, torch.empty((rows, parts), dtype=torch.int32, device=device), totals


def likeliest(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> None:
    """``kernels.drafting.Drafting.likeliest``."""
    rows, width = logits.shape
    parts = cdiv(width, PART)
    values, index, totals = room_for_largest(rows, parts, logits.device)
    partial_likeliest_kernel[rows, parts](
        logits, logits.stride(0), width, values, index, totals, PART,
        num_warps=4, **pdl(logits.device),
    )  # fmt: skip
    likeliest_of_parts(values, index, totals, width, ids, tokens, chances)


def likeliest_of_parts(
    values: torch.Tensor,
    index: torch.Tensor,
    totals: torch.Tensor,
    width: int,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> None:
    """``likeliest`` of rows of ``width`` logits, from what ``room_for_largest`` is for."""
    parts = values.shape[1]
    final_likeliest_kernel[(len(values),)](
        values, index, totals, parts, width, ids, tokens, tokens.stride(0),
        chances, chances.stride(0), ids is not None, next_power_of_2(parts),
        num_warps=1 if parts <= 128 else 4, **pdl(values.device),
    )  # fmt: skip
