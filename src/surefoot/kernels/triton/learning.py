"""What offers were worth, learnt on the device: earlier offers are judged by the new tokens, and
the next ones taken in. One program a span; twins: ``speculation.torch_books`` and
``AcceptanceEstimator``.

What all requests teach is added up in ``news`` and entered by the next round's ``control.split``,
so that programs need not wait for each other. Sums there are whole numbers, of 2^-32 each: these
add up to the same in any order, and so decisions are the same on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.trees import at

ONE = tl.constexpr(2.0**32)
"""1 in ``news``."""


@jit
def fixed(x):
    """float32 as ``news`` has it; its sums stay far from the end of int64."""
    return (x * ONE).to(tl.int64)


@jit
def entered(old, forget, news):
    """What all requests taught, the news included."""
    return old * forget + news.to(tl.float32) / ONE


@jit
def lineage(parents, JUMPS: tl.constexpr, WIDTH: tl.constexpr):
    """Masks of nodes, of which bit i says that node i is the node itself or an ancestor, and depths
    from 1, of parents int64 [WIDTH], -1 for the text."""
    masks = tl.full([WIDTH], 1, tl.int64) << tl.arange(0, WIDTH)
    depth = tl.full([WIDTH], 1, tl.int64)
    up = parents + 1
    for _ in range(JUMPS):
        masks = masks | at(masks, up - 1, WIDTH)
        depth = depth + at(depth, up - 1, WIDTH)
        up = at(up, up - 1, WIDTH)
    return masks, depth


@jit
def bins_of(confidence, BINS: tl.constexpr):
    return tl.minimum(tl.maximum((confidence * BINS).to(tl.int64), 0), BINS - 1)


@jit(
    do_not_specialize=["offers", "confidence_row", "confidence_column"],
    do_not_specialize_on_alignment=[
        "slots_ptr", "offer_ptr", "offer_length_ptr", "offer_confidence_ptr", "offer_parent_ptr",
    ],
)  # fmt: skip
def learn_kernel(
    slots_ptr, idle, history_ptr, history_stride, length_ptr, limit_ptr, vocab,
    watched_ptr, watched_bins_ptr, watched_parent_ptr, watched_length_ptr, watched_start_ptr,
    hits_ptr, trials_ptr, seen_ptr, news_ptr, decay_log2,
    offer_ptr, offers, offer_length_ptr, offer_confidence_ptr, confidence_row, confidence_column,
    offer_parent_ptr, allowed_ptr, draft_limit_ptr,
    token_ptr, token_length_ptr, confidence_ptr, parent_ptr, width,
    TREES: tl.constexpr, JUMPS: tl.constexpr, BINS: tl.constexpr, SURE_BINS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Tables of one proposer; parents only where ``TREES``."""
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    if slot == idle:
        return
    step = tl.arange(0, WIDTH)
    inside = step < width
    own = tl.full([WIDTH], 1, tl.int64) << step
    row = slot * width + step
    length = tl.load(length_ptr + slot)
    text_ptr = history_ptr + slot * history_stride
    # Judge the offer in view.
    start = tl.load(watched_start_ptr + slot)
    watched_length = tl.load(watched_length_ptr + slot)
    known = length - start
    offered = step < watched_length
    if TREES:
        up = tl.load(watched_parent_ptr + row, mask=inside, other=-1)
        masks, depth = lineage(up, JUMPS, WIDTH)
    else:
        depth = step + 1
    there = offered & (depth <= known)
    watched = tl.load(watched_ptr + row, mask=inside, other=-1)
    text = tl.load(text_ptr + start + depth - 1, mask=there, other=-2)
    right = (text == watched) & there
    if TREES:
        bits = tl.sum(tl.where(right, own, 0), axis=0)
        reached = tl.max(tl.where(offered & ((masks & ~bits) == 0), depth, 0), axis=0)
        deepest = tl.max(tl.where(offered, depth, 0), axis=0)
        on_path = (masks & ~own & ~bits) == 0
    else:
        reached = tl.min(tl.where(right, WIDTH, step), axis=0).to(tl.int64)
        deepest = watched_length
        on_path = step <= reached
    settled = (watched_length > 0) & ((known > reached) | (reached >= deepest))
    tried = there & on_path & settled
    hit = tried & right
    bins = tl.load(watched_bins_ptr + row, mask=inside, other=0)
    cell = bins * width + depth - 1
    count, won = tried.to(tl.float32), hit.to(tl.float32)
    if TREES:
        # Nodes of one cell are entered by the first of them.
        same = (cell[:, None] == cell[None, :]) & tried[None, :] & tried[:, None]
        count = tl.sum(same.to(tl.float32), axis=1)
        won = tl.sum((same & hit[None, :]).to(tl.float32), axis=1)
        earlier = tl.sum((same & (step[None, :] < step[:, None])).to(tl.int32), axis=1)
        tried = tried & (earlier == 0)
    place = slot * BINS * width + cell
    trials = tl.load(trials_ptr + place, mask=tried, other=0.0)
    hits = tl.load(hits_ptr + place, mask=tried, other=0.0)
    forget = tl.exp2(count * decay_log2)
    # Several warps may hold the same numbers: all are to have read them before one writes.
    tl.debug_barrier()
    tl.store(trials_ptr + place, trials * forget + count, mask=tried)
    tl.store(hits_ptr + place, hits * forget + won, mask=tried)
    part = BINS * width
    mean = tl.load(seen_ptr + part + cell, mask=tried, other=0.0)
    mean /= tl.load(seen_ptr + cell, mask=tried, other=1.0)
    agreement = (won - count * mean) * (hits - trials * mean)
    tl.atomic_add(news_ptr + cell, fixed(count), mask=tried, sem="relaxed")
    tl.atomic_add(news_ptr + part + cell, fixed(won), mask=tried, sem="relaxed")
    tl.atomic_add(news_ptr + 2 * part + cell, fixed(agreement), mask=tried, sem="relaxed")
    tl.atomic_add(news_ptr + 3 * part + cell, fixed(count * trials), mask=tried, sem="relaxed")
    watched_length = tl.where(settled, 0, watched_length)
    # Take the next offer, as far as it can be verified.
    given = inside & (step < offers)
    token = tl.load(offer_ptr + span * offers + step, mask=given, other=-1)
    if TREES:
        up = tl.load(offer_parent_ptr + span * offers + step, mask=given, other=-1)
        up = tl.maximum(tl.minimum(up, step - 1), -1)
        masks, depth = lineage(up, JUMPS, WIDTH)
        tl.store(parent_ptr + row, up, mask=inside)
    room = tl.load(limit_ptr + slot) - length - 1
    valid = (token >= 0) & (token < vocab) & (depth <= room)
    size = tl.min(tl.where(valid, WIDTH, step), axis=0).to(tl.int64)
    size = tl.minimum(size, tl.load(offer_length_ptr + span))
    size = tl.maximum(tl.minimum(size, tl.load(draft_limit_ptr + slot)), 0)
    size = tl.where(tl.load(allowed_ptr + slot) != 0, size, 0)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    where = offer_confidence_ptr + span * confidence_row + step * confidence_column
    confidence = tl.load(where, mask=given, other=0.0)
    tl.store(token_ptr + row, token, mask=inside)
    tl.store(token_length_ptr + slot, size)
    tl.store(confidence_ptr + row, confidence, mask=inside)
    take = (watched_length == 0) & (size > 0)
    tl.store(watched_ptr + row, token, mask=inside & take)
    tl.store(watched_bins_ptr + row, bins_of(confidence, SURE_BINS), mask=inside & take)
    if TREES:
        tl.store(watched_parent_ptr + row, up, mask=inside & take)
    if take:
        tl.store(watched_start_ptr + slot, length)
    tl.store(watched_length_ptr + slot, tl.where(take, size, watched_length))


def width_of(drafts: int) -> int:
    """Lanes for so many drafts."""
    return next_power_of_2(drafts, 2)


def warps_of(drafts: int, trees: bool) -> int:
    """Trees compare all nodes with all."""
    return min(8, max(1, width_of(drafts) ** 2 // 512)) if trees else 1


def jumps_of(drafts: int) -> int:
    """Doublings that reach from any node to the root."""
    return max(drafts - 1, 0).bit_length()


def learn(
    books: Any,
    news: torch.Tensor,
    index: int,
    slots: torch.Tensor,
    offers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    decay_log2: float,
    sure_bins: int,
) -> None:
    """Judge the watched offers of proposer ``index`` for ``slots`` int64 [B], then enter
    ``offers``: tokens int64 [B, n], lengths int64 [B], confidence float32 [B, n], and parents int64
    [B, n] if it offers trees; None: it offers nothing. ``sure_bins``: of confidence. Otherwise as
    ``control.split``."""
    state, controller = books.state, books.controller
    records, trees = controller.records, controller.trees[index]
    history, width = state.history, state.max_drafts
    if offers is None:
        # No columns: nothing of these is read but a length, of which none is left.
        tables = controller.tokens[index], slots, controller.confidence[index]
        tokens, lengths, confidence = tables
        parents, columns = controller.parents[index] if trees else None, 0
    else:
        tokens, lengths, confidence, parents = offers
        tokens, lengths = tokens.contiguous(), lengths.contiguous()
        parents, columns = None if parents is None else parents.contiguous(), tokens.shape[1]
    learn_kernel[(slots.shape[0],)](
        slots, state.padding_slot, history, history.stride(0), state.length, state.limit,
        state.vocab_size, records.watched[index], records.watched_bins[index],
        records.watched_parents[index] if trees else None,
        records.watched_length[index], records.watched_start[index],
        records.hits[index], records.trials[index], records.seen[index], news[index], decay_log2,
        tokens, columns, lengths, confidence, confidence.stride(0), confidence.stride(1),
        parents, controller.allowed[index], controller.draft_limit,
        controller.tokens[index], controller.lengths[index], controller.confidence[index],
        controller.parents[index] if trees else None, width,
        trees, jumps_of(width), records.hits.shape[2], sure_bins, width_of(width),
        num_warps=warps_of(width, trees),
    )  # fmt: skip
