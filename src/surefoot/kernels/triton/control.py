"""Who drafts how much, on the device: two small kernels around a recorded round; a third is in
``learning``.

``split``: the rows that the host gave go to the most likely drafts. ``keep``: each request's best
offer, its chances and the round's report. One program a span; twins: ``speculation.torch_books``
and ``AcceptanceEstimator``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.kernels.triton.launch import jit, next_power_of_2
from surefoot.kernels.triton.learning import (
    ONE,
    bins_of,
    entered,
    jumps_of,
    lineage,
    warps_of,
    width_of,
)

COMPARED = 8192
"""Pairs of drafts that a program compares at a time."""
ENTERED = tl.constexpr(512)
"""Sums that are brought up to date at a time."""


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
        for base in range(0, entries, ENTERED):
            entry = base + tl.arange(0, ENTERED)
            inside = entry < entries
            place = entry + entry // cells * cells * 3
            # Read and cleared at once: one thread may load what another one clears, and neither
            # would wait for the other.
            nothing = tl.zeros([ENTERED], tl.int64)
            trials = tl.atomic_xchg(news_ptr + place, nothing, mask=inside, sem="relaxed")
            forget = tl.exp2(trials.to(tl.float32) / ONE * decay_log2)
            for part in tl.static_range(4):
                new, at = trials, place + part * cells
                if part:
                    new = tl.atomic_xchg(news_ptr + at, nothing, mask=inside, sem="relaxed")
                old = tl.load(seen_ptr + at, mask=inside, other=0.0)
                tl.store(seen_ptr + at, entered(old, forget, new), mask=inside)
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


@jit(do_not_specialize=["cuts", "proposers"], do_not_specialize_on_alignment=["cut_ptr"])
def cut_kernel(
    cut_ptr, cuts, slots, proposers, width, offer_length_ptr, chance_ptr, length_ptr,
    watched_length_ptr, watched_start_ptr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (cut)."""
    at = tl.program_id(0)
    slot = tl.load(cut_ptr + at)
    whose = tl.load(cut_ptr + cuts + at)
    left = tl.load(cut_ptr + 2 * cuts + at)
    tl.store(offer_length_ptr + slot, left)
    step = tl.arange(0, WIDTH)
    beyond = (step >= left) & (step < width)
    tl.store(chance_ptr + slot * width + step, tl.zeros([WIDTH], tl.float32), mask=beyond)
    if whose < proposers:
        place = whose * slots + slot
        if tl.load(watched_start_ptr + place) == tl.load(length_ptr + slot):
            watched = tl.load(watched_length_ptr + place)
            tl.store(watched_length_ptr + place, tl.minimum(watched, left))


@jit
def brought_up(seen_ptr, news_ptr, place, forget, inside):
    """A part of what all requests taught, the news included."""
    old = tl.load(seen_ptr + place, mask=inside, other=1.0)
    return entered(old, forget, tl.load(news_ptr + place, mask=inside, other=0))


@jit
def keep_kernel(
    slots_ptr, going_ptr, idle, slots, proposers,
    token_ptr, token_length_ptr, confidence_ptr, parent_ptr,
    watched_bins_ptr, watched_start_ptr, length_ptr,
    hits_ptr, trials_ptr, seen_ptr, news_ptr,
    decay_log2, least_prior, largest_prior, least, width,
    kept_token_ptr, kept_chance_ptr, kept_length_ptr, kept_proposer_ptr, kept_parent_ptr,
    report_ptr, columns, counts_ptr, accepted_ptr, ends_ptr, drafts_ptr, tokens_ptr, alive_ptr,
    PROPOSING: tl.constexpr, TREES: tl.constexpr, JUMPS: tl.constexpr, BINS: tl.constexpr,
    SURE_BINS: tl.constexpr, WIDTH: tl.constexpr, PROPOSERS: tl.constexpr,
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
        each = tl.arange(0, PROPOSERS)
        there = each < proposers
        offering = tl.load(token_length_ptr + each * slots + slot, mask=there, other=0) > 0
        begins = tl.load(token_ptr + (each * slots + slot) * width, mask=offering, other=-1)
        committed = tl.load(length_ptr + slot)
        for index in range(0, proposers):
            place = index * slots + slot
            size = tl.load(token_length_ptr + place)
            offered = inside & (step < size)
            depth = step + 1
            if TREES:
                up = tl.load(parent_ptr + place * width + step, mask=inside, other=-1)
                masks, depth = lineage(up, JUMPS, WIDTH)
            sure = tl.load(confidence_ptr + place * width + step, mask=inside, other=0.0)
            first = tl.load(token_ptr + place * width)
            rival = offering & (each != index)
            agreed = tl.max((rival & (begins == first)).to(tl.int64), axis=0)
            apart = tl.where(agreed > 0, 1, tl.max(rival.to(tl.int64), axis=0) * 2) * SURE_BINS
            # Of what was taken in view just now, it is known only here what else is on offer.
            watched = inside & (tl.load(watched_start_ptr + place) == committed)
            bins = tl.load(watched_bins_ptr + place * width + step, mask=watched, other=0)
            # Several warps may hold the same numbers, as in ``learning.learn_kernel``.
            tl.debug_barrier()
            new = bins % SURE_BINS + apart
            tl.store(watched_bins_ptr + place * width + step, new, mask=watched & (going != idle))
            cell = (bins_of(sure, SURE_BINS) + apart) * width + depth - 1
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
        slots, quota, spans, state.padding_slot, state.alive, state.computed,
        offers.chances, offers.tokens, width,
        history, history.stride(0), state.length, rows, sampled_rows, known, drafts, samples,
        seen, news, seen.numel() // 4, max(seen[:1, :1].numel(), 1), decay_log2,
        drafting, next_power_of_2(spans), width_of(width), COMPARED // width_of(width),
        num_warps=4,
    )  # fmt: skip
    return RoundSpans(slots, known, drafts, samples)


def cut(books: Any, cuts: torch.Tensor) -> None:
    """``BookKeeping.cut``."""
    offers, records = books.offers, books.controller.records
    proposers, slots = records.watched_length.shape
    width, count = offers.chances.shape[1], cuts.shape[1]
    cut_kernel[(count,)](
        cuts, count, slots, proposers, width, offers.lengths, offers.chances, books.state.length,
        records.watched_length, records.watched_start, width_of(width), num_warps=1,
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
    sure_bins: int,
) -> None:
    """Choose among the proposers' offers (if somebody was ``proposing``), mark ends, and write the
    report. ``drafts`` int64 [B]: those verified. ``sure_bins``: of confidence. Otherwise as
    ``split``."""
    state, controller, offers, report = books.state, books.controller, books.offers, books.report
    records, trees = controller.records, controller.parents is not None
    proposers, count, bins, width = records.hits.shape
    keep_kernel[(slots.shape[0],)](
        slots, verdict.going, state.padding_slot, count, proposers,
        controller.tokens, controller.lengths, controller.confidence, controller.parents,
        records.watched_bins, records.watched_start, state.length,
        records.hits, records.trials, records.seen, news,
        decay_log2, *prior_range, least, width,
        offers.tokens, offers.chances, offers.lengths, offers.proposer, offers.parents,
        report, report.stride(0),
        verdict.counts, verdict.accepted, verdict.ends, drafts, verdict.tokens, state.alive,
        proposing, trees, jumps_of(width), bins, sure_bins, width_of(width),
        next_power_of_2(proposers, 2),
        num_warps=warps_of(width, trees),
    )  # fmt: skip
