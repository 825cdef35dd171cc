"""Who drafts how much, on the device: three small kernels around a recorded round.

``split``: the rows that the host gave go to the most likely drafts. ``learn``: earlier offers are
judged by the new tokens, and the next ones taken in. ``keep``: each request's best offer, its
chances and the round's report. One program a span; twins: ``speculation.torch_books`` and
``AcceptanceEstimator``.

What all requests teach is added up in ``news`` and entered by the next round's ``split``, so that
programs need not wait for each other. Sums there are whole numbers, of 2^-32 each: these add up to
the same in any order, and so decisions are the same on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.trees import at

COMPARED = 8192
"""Pairs of drafts that a program compares at a time."""
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
def known_rows(slots, quota, length_ptr, computed_ptr, alive_ptr, mask):
    """(Rows of known tokens, whether the current token is among them, whether it is all) of spans;
    ``mask``: which there are."""
    missing = tl.load(length_ptr + slots, mask=mask, other=1)
    missing -= tl.load(computed_ptr + slots, mask=mask, other=0)
    known = tl.minimum(quota, missing) * tl.load(alive_ptr + slots, mask=mask, other=0)
    samples = (known == missing) & (known > 0)
    return known, samples, samples & (missing == 1)


@jit(do_not_specialize=["spans", "rows", "sampled_rows"])
def split_kernel(
    slots_ptr, quota_ptr, spans, idle, alive_ptr, computed_ptr, chance_ptr, token_ptr, width,
    history_ptr, history_stride, length_ptr, rows, sampled_rows,
    known_ptr, drafts_ptr, samples_ptr,
    seen_ptr, news_ptr, entries, cells, decay_log2,
    DRAFTS: tl.constexpr, SPANS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``seen`` float32 as ``speculation.estimator.OfferRecords`` has it, ``news`` int64 likewise:
    ``cells`` for each of four parts of each proposer, ``entries`` for each part in all."""
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    quota = tl.load(quota_ptr + span)
    known, samples, alone = known_rows(slot, quota, length_ptr, computed_ptr, alive_ptr, slot >= 0)
    if span == 0:
        for base in range(0, entries, BLOCK):
            entry = base + tl.arange(0, BLOCK)
            inside = entry < entries
            place = entry + entry // cells * cells * 3
            trials = tl.load(news_ptr + place, mask=inside, other=0)
            forget = tl.exp2(trials.to(tl.float32) / ONE * decay_log2)
            for part in tl.static_range(4):
                new = tl.load(news_ptr + place + part * cells, mask=inside, other=0)
                old = tl.load(seen_ptr + place + part * cells, mask=inside, other=0.0)
                tl.store(seen_ptr + place + part * cells, entered(old, forget, new), mask=inside)
                tl.store(news_ptr + place + part * cells, tl.zeros_like(new), mask=inside)
    drafts = tl.zeros([], tl.int64)
    if DRAFTS:
        others = tl.arange(0, SPANS)
        there = others < spans
        other_slots = tl.load(slots_ptr + others, mask=there, other=0)
        quotas = tl.load(quota_ptr + others, mask=there, other=0)
        needed, sampled, unused = known_rows(
            other_slots, quotas, length_ptr, computed_ptr, alive_ptr, there
        )
        room = rows - tl.sum(needed, axis=0)
        room = tl.minimum(room, sampled_rows - tl.sum(sampled.to(tl.int64), axis=0))
        step = tl.arange(0, WIDTH)
        mine = tl.load(chance_ptr + slot * width + step, mask=step < width, other=0.0)
        mine = tl.where(alone, mine, 0.0)
        before = tl.zeros([WIDTH], tl.int32)
        for base in range(0, spans * width, BLOCK):
            flat = base + tl.arange(0, BLOCK)
            inside = flat < spans * width
            owner = tl.load(slots_ptr + flat // width, mask=inside, other=0)
            share = tl.load(quota_ptr + flat // width, mask=inside, other=0)
            has_known, has_sample, drafting = known_rows(
                owner, share, length_ptr, computed_ptr, alive_ptr, inside
            )
            chance = tl.load(chance_ptr + owner * width + flat % width, mask=inside, other=0.0)
            chance = tl.where(drafting, chance, 0.0)
            earlier = flat[None, :] < (span * width + step)[:, None]
            ahead = chance[None, :] > mine[:, None]
            ahead = ahead | ((chance[None, :] == mine[:, None]) & earlier)
            before += tl.sum((ahead & inside[None, :]).to(tl.int32), axis=1)
        taken = (before < room) & (mine > 0) & (step < width)
        drafts = tl.sum(taken.to(tl.int64), axis=0)
        # Columns beyond the drafts that are verified are never read.
        token = tl.load(token_ptr + slot * width + step, mask=step < width, other=0)
        text = history_ptr + slot * history_stride + tl.load(length_ptr + slot) + step
        tl.store(text, token, mask=(step < width) & (slot != idle))
    tl.store(known_ptr + span, known)
    tl.store(drafts_ptr + span, drafts)
    tl.store(samples_ptr + span, samples.to(tl.int64))


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
    TREES: tl.constexpr, JUMPS: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
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
    tl.store(watched_bins_ptr + row, bins_of(confidence, BINS), mask=inside & take)
    if TREES:
        tl.store(watched_parent_ptr + row, up, mask=inside & take)
    if take:
        tl.store(watched_start_ptr + slot, length)
    tl.store(watched_length_ptr + slot, tl.where(take, size, watched_length))


@jit
def brought_up(seen_ptr, news_ptr, place, forget, inside):
    """A part of what all requests taught, the news included."""
    old = tl.load(seen_ptr + place, mask=inside, other=1.0)
    return entered(old, forget, tl.load(news_ptr + place, mask=inside, other=0))


@jit
def keep_kernel(
    slots_ptr, going_ptr, idle, slots, proposers,
    token_ptr, token_length_ptr, confidence_ptr, parent_ptr,
    hits_ptr, trials_ptr, seen_ptr, news_ptr,
    decay_log2, least_prior, largest_prior, least, width,
    kept_token_ptr, kept_chance_ptr, kept_length_ptr, kept_proposer_ptr, kept_parent_ptr,
    report_ptr, columns, counts_ptr, accepted_ptr, ends_ptr, drafts_ptr, tokens_ptr, alive_ptr,
    PROPOSING: tl.constexpr, TREES: tl.constexpr, JUMPS: tl.constexpr, BINS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """``token``, ``hits`` and the like: [proposers, slots, ...]; parents only where ``TREES``. The
    report's columns are those of ``speculation.books.ReportColumns``."""
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    going = tl.load(going_ptr + span)
    step = tl.arange(0, WIDTH)
    inside = step < width
    part = BINS * width
    row_ptr = report_ptr + span * columns
    count = tl.load(counts_ptr + span)
    end = tl.load(ends_ptr + span)
    tl.store(row_ptr, count.to(tl.int32))
    tl.store(row_ptr + 1, tl.load(accepted_ptr + span).to(tl.int32))
    tl.store(row_ptr + 2, end.to(tl.int32))
    tl.store(row_ptr + 3, tl.load(drafts_ptr + span).to(tl.int32))
    tl.store(row_ptr + 4, tl.load(kept_proposer_ptr + slot).to(tl.int32))
    last = tl.load(tokens_ptr + span * (width + 1) + width)
    sampled = tl.load(tokens_ptr + span * (width + 1) + step, mask=inside, other=0)
    tl.store(row_ptr + 7 + step, sampled.to(tl.int32), mask=inside)
    tl.store(row_ptr + 7 + width, last.to(tl.int32))
    if slot != idle:
        alive = tl.load(alive_ptr + slot)
        tl.store(alive_ptr + slot, tl.where(end == 0, alive, 0))
    length = tl.zeros([], tl.int64)
    whose = tl.zeros([], tl.int64)
    chances = tl.zeros([WIDTH], tl.float32)
    token = tl.zeros([WIDTH], tl.int64)
    if PROPOSING:
        best = tl.zeros([], tl.float32) - 1.0
        for index in range(0, proposers):
            place = index * slots + slot
            size = tl.load(token_length_ptr + place)
            offered = inside & (step < size)
            depth = step + 1
            if TREES:
                up = tl.load(parent_ptr + place * width + step, mask=inside, other=-1)
                masks, depth = lineage(up, JUMPS, WIDTH)
            sure = tl.load(confidence_ptr + place * width + step, mask=inside, other=0.0)
            cell = bins_of(sure, BINS) * width + depth - 1
            shared = index * 4 * part + cell
            trials = tl.load(news_ptr + shared, mask=inside, other=0)
            forget = tl.exp2(trials.to(tl.float32) / ONE * decay_log2)
            tries = brought_up(seen_ptr, news_ptr, shared, forget, inside)
            mean = brought_up(seen_ptr, news_ptr, shared + part, forget, inside) / tries
            together = brought_up(seen_ptr, news_ptr, shared + 2 * part, forget, inside)
            together /= brought_up(seen_ptr, news_ptr, shared + 3 * part, forget, inside)
            prior = mean * (1.0 - mean) / tl.maximum(together, 1e-6) - 1.0
            prior = tl.minimum(tl.maximum(prior, least_prior), largest_prior)
            own = place * part + cell
            hits = tl.load(hits_ptr + own, mask=inside, other=0.0) + prior * mean
            rate = hits / (tl.load(trials_ptr + own, mask=inside, other=0.0) + prior)
            if TREES:
                member = ((masks[:, None] >> step[None, :]) & 1) != 0
                steps = tl.log2(tl.maximum(rate, 1e-9))
                path = tl.exp2(tl.sum(tl.where(member, steps[None, :], 0.0), axis=1))
                # Along the row it never rises, so that the best drafts are leading ones.
                earlier = (step[None, :] <= step[:, None]) & offered[None, :]
                found = tl.min(tl.where(earlier, path[None, :], 1.0), axis=1)
                found = tl.where(offered, found, 0.0)
            else:
                found = tl.cumprod(tl.where(offered, rate, 0.0), axis=0)
            total = tl.sum(found, axis=0)
            better = total > best
            whose = tl.where(better, index, whose)
            length = tl.where(better, size, length)
            kept = tl.where(offered, tl.maximum(found, least), 0.0)
            chances = tl.where(better, kept, chances)
            best = tl.maximum(total, best)
        if going != idle:
            chosen = (whose * slots + slot) * width + step
            token = tl.load(token_ptr + chosen, mask=inside, other=0)
            tl.store(kept_token_ptr + slot * width + step, token, mask=inside)
            tl.store(kept_chance_ptr + slot * width + step, chances, mask=inside)
            tl.store(kept_length_ptr + slot, length)
            tl.store(kept_proposer_ptr + slot, whose)
            if TREES:
                up = tl.load(parent_ptr + chosen, mask=inside, other=0)
                tl.store(kept_parent_ptr + slot * width + step, up, mask=inside)
                tl.store(row_ptr + 8 + 3 * width + step, up.to(tl.int32), mask=inside)
        else:
            length = tl.zeros([], tl.int64)
            chances = tl.zeros([WIDTH], tl.float32)
    elif slot != idle:
        # Offers of earlier rounds do not follow these tokens.
        for index in range(0, proposers):
            tl.store(token_length_ptr + index * slots + slot, length)
        tl.store(kept_chance_ptr + slot * width + step, chances, mask=inside)
        tl.store(kept_length_ptr + slot, length)
    tl.store(row_ptr + 5, length.to(tl.int32))
    tl.store(row_ptr + 6, whose.to(tl.int32))
    bits = chances.to(tl.int32, bitcast=True)
    tl.store(row_ptr + 8 + width + step, bits, mask=inside)
    tl.store(row_ptr + 8 + 2 * width + step, token.to(tl.int32), mask=inside)


def width_of(drafts: int) -> int:
    """Lanes for so many drafts."""
    return next_power_of_2(drafts, 2)


def warps_of(drafts: int, trees: bool) -> int:
    """Trees compare all nodes with all."""
    return 4 if trees and drafts > 16 else 1


def jumps_of(drafts: int) -> int:
    """Doublings that reach from any node to the root."""
    return max(drafts - 1, 0).bit_length()


def split(
    books: Any,
    news: torch.Tensor,
    slots: torch.Tensor,
    quota: torch.Tensor,
    rows: int,
    sampled_rows: int,
    decay_log2: float,
    drafting: bool,
) -> RoundSpans:
    """``books``: a ``speculation.books.BookKeeping``; ``news`` int64 in the shape of its
    ``OfferRecords.seen``; ``slots`` and ``quota`` int64 [B]. Puts the offers behind the committed
    tokens, and enters the news."""
    state, offers, seen = books.state, books.offers, books.controller.records.seen
    spans, width = slots.shape[0], max(state.max_drafts, 1)
    known, drafts, samples = (torch.empty_like(slots) for _ in range(3))
    history = state.history
    split_kernel[(spans,)](
        slots, quota, spans, state.idle_slot, state.alive, state.computed,
        offers.chances, offers.tokens, width,
        history, history.stride(0), state.length, rows, sampled_rows, known, drafts, samples,
        seen, news, seen.numel() // 4, max(seen[:1, :1].numel(), 1), decay_log2,
        drafting, next_power_of_2(spans), width_of(width), COMPARED // width_of(width),
        num_warps=4,
    )  # fmt: skip
    return RoundSpans(slots, known, drafts, samples)


def learn(
    books: Any,
    news: torch.Tensor,
    index: int,
    slots: torch.Tensor,
    offers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    decay_log2: float,
) -> None:
    """Judge the watched offers of proposer ``index`` for ``slots`` int64 [B], then enter
    ``offers``: tokens int64 [B, n], lengths int64 [B], confidence float32 [B, n], and parents int64
    [B, n] if it offers trees; None: it offers nothing. Otherwise as ``split``."""
    state, controller = books.state, books.controller
    records, trees = controller.records, controller.trees[index]
    history, width, bins = state.history, state.max_drafts, records.hits.shape[2]
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
        slots, state.idle_slot, history, history.stride(0), state.length, state.limit,
        state.vocab_size, records.watched[index], records.watched_bins[index],
        records.watched_parents[index] if trees else None,
        records.watched_length[index], records.watched_start[index],
        records.hits[index], records.trials[index], records.seen[index], news[index], decay_log2,
        tokens, columns, lengths, confidence, confidence.stride(0), confidence.stride(1),
        parents, controller.allowed[index], controller.draft_limit,
        controller.tokens[index], controller.lengths[index], controller.confidence[index],
        controller.parents[index] if trees else None, width,
        trees, jumps_of(width), bins, width_of(width), num_warps=warps_of(width, trees),
    )  # fmt: skip


def keep(
    books: Any,
    news: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    verdict: RoundVerdict,
    proposing: bool,
    decay_log2: float,
    prior_range: tuple[float, float],
    least: float,
) -> None:
    """Choose among the proposers' offers (if somebody was ``proposing``), mark ends, and write the
    report. ``drafts`` int64 [B]: those verified. Otherwise as ``split``."""
    state, controller, offers, report = books.state, books.controller, books.offers, books.report
    records, trees = controller.records, controller.parents is not None
    proposers, count, bins, width = records.hits.shape
    keep_kernel[(slots.shape[0],)](
        slots, verdict.going, state.idle_slot, count, proposers,
        controller.tokens, controller.lengths, controller.confidence, controller.parents,
        records.hits, records.trials, records.seen, news,
        decay_log2, *prior_range, least, width,
        offers.tokens, offers.chances, offers.lengths, offers.proposer, offers.parents,
        report, report.stride(0),
        verdict.counts, verdict.accepted, verdict.ends, drafts, verdict.tokens, state.alive,
        proposing, trees, jumps_of(width), bins, width_of(width),
        num_warps=warps_of(width, trees),
    )  # fmt: skip
