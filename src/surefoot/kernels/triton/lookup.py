"""Prompt lookup: one program a slot. Twin: ``kernels.lookup``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.lookup import Matches
from surefoot.kernels.triton.launch import jit, next_power_of_2

TILE = 1024


@jit(do_not_specialize_on_alignment=["slots_ptr"])
def lookup_kernel(
    history_ptr, history_stride, length_ptr, slots_ptr, token_ptr, found_ptr,
    confidence_ptr, min_ngram, window, drafts, largest,
    MAX_NGRAM: tl.constexpr, TILE: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    slot = tl.load(slots_ptr + entry)
    used = slot >= 0
    slot = tl.maximum(slot, 0)
    length = tl.load(length_ptr + slot)
    text = history_ptr + slot * history_stride
    first = tl.maximum(length - window, 0)
    last = length - 1
    # The longest match and, among equals, the latest: the largest of size * width + index.
    width = history_stride + 1
    best = last - last
    for base in range(first, last, TILE):
        index = base + tl.arange(0, TILE)
        inside = index < last
        alive = inside
        size = tl.zeros([TILE], tl.int64)
        for back in tl.static_range(MAX_NGRAM):
            # A match reads no token before the window.
            reached = inside & (index - back >= first)
            earlier = tl.load(text + index - back, mask=reached, other=-1)
            own = tl.load(text + last - back, mask=last >= back, other=-2)
            alive = alive & reached & (earlier == own)
            size += alive.to(tl.int64)
        found = tl.where(size > 0, size * width + index, 0)
        best = tl.maximum(best, tl.max(found, axis=0))
    size = best // width
    at = best % width
    size = tl.where(used & (size >= min_ngram), size, 0)
    tl.store(found_ptr + entry, tl.where(size > 0, drafts, 0))
    step = tl.arange(0, DRAFTS)
    period = tl.maximum(last - at, 1)
    token = tl.load(text + tl.maximum(tl.minimum(at + 1 + step % period, last), 0))
    tl.store(token_ptr + entry * drafts + step, token, mask=step < drafts)
    confidence = tl.div_rn(size.to(tl.float32), largest)
    tl.store(confidence_ptr + entry * drafts + step, confidence, mask=step < drafts)


def ngram_lookup(
    history: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    min_ngram: int,
    max_ngram: int,
    window: int,
    drafts: int,
) -> Matches:
    """As ``kernels.lookup.ngram_lookup``: ``history`` int64 [slots, width], ``length`` int64
    [slots], ``slots`` int64 [B], where -1 finds nothing."""
    entries = slots.shape[0]
    tokens, lengths = history.new_empty((entries, drafts)), history.new_empty(entries)
    confidence = torch.empty_like(tokens, dtype=torch.float32)
    window = min(window, history.shape[1])
    tile = min(TILE, next_power_of_2(window, 16))
    lookup_kernel[(entries,)](
        history, history.stride(0), length, slots, tokens, lengths,
        confidence, min_ngram, window, drafts, max_ngram + 1.0,
        min(max_ngram, max(window - 1, 1)), tile, next_power_of_2(drafts), num_warps=4,
    )  # fmt: skip
    return Matches(tokens, lengths, confidence)
