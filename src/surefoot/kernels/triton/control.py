"""Who drafts how much, on the device: three small kernels around a recorded round.

``split``: the rows that the host gave go to the most likely drafts. ``learn``: earlier offers are
judged by the new tokens, and the next ones taken in. ``keep``: each request's best offer, its
chances and the round's report. One program a span; twins: ``fill_rows`` and ``Controller`` in
``speculation.controller``, ``AcceptanceEstimator`` and ``speculation.books.OfferBooks``.

What all requests teach is added up in ``news`` and entered by the next round's ``split``, so that
programs need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.kernels.triton.launch import jit, next_power_of_2

COMPARED = 8192
"""Pairs of drafts that a program compares at a time."""


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
    all_ptr, news_ptr, entries, decay_log2,
    DRAFTS: tl.constexpr, SPANS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``all`` and ``news``: float32 [4, entries], as ``AcceptanceEstimator`` has them."""
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    quota = tl.load(quota_ptr + span)
    known, samples, alone = known_rows(slot, quota, length_ptr, computed_ptr, alive_ptr, slot >= 0)
    if span == 0:
        for base in range(0, entries, BLOCK):
            entry = base + tl.arange(0, BLOCK)
            inside = entry < entries
            trials = tl.load(news_ptr + entry, mask=inside, other=0.0)
            forget = tl.exp2(trials * decay_log2)
            for part in tl.static_range(4):
                place = part * entries + entry
                new = tl.load(news_ptr + place, mask=inside, other=0.0)
                old = tl.load(all_ptr + place, mask=inside, other=0.0)
                tl.store(all_ptr + place, old * forget + new, mask=inside)
                tl.store(news_ptr + place, 0.0, mask=inside)
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


@jit(
    do_not_specialize=["offers", "confidence_row", "confidence_column"],
    do_not_specialize_on_alignment=["slots_ptr", "offer_ptr", "offer_confidence_ptr"],
)
def learn_kernel(
    slots_ptr, idle, history_ptr, history_stride, length_ptr, limit_ptr, vocab,
    watched_ptr, watched_bins_ptr, watched_length_ptr, watched_start_ptr,
    hits_ptr, trials_ptr, all_ptr, news_ptr, entries, decay,
    offer_ptr, offers, offer_length_ptr, offer_confidence_ptr, confidence_row, confidence_column,
    allowed_ptr, draft_limit_ptr, token_ptr, token_length_ptr, confidence_ptr, width,
    BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    if slot == idle:
        return
    step = tl.arange(0, WIDTH)
    inside = step < width
    length = tl.load(length_ptr + slot)
    text_ptr = history_ptr + slot * history_stride
    # Judge the offer in view.
    start = tl.load(watched_start_ptr + slot)
    watched_length = tl.load(watched_length_ptr + slot)
    known = tl.minimum(length - start, watched_length)
    watched = tl.load(watched_ptr + slot * width + step, mask=inside, other=-1)
    text = tl.load(text_ptr + start + step, mask=inside & (step < known), other=-2)
    right = (text == watched) & inside & (step < known)
    run = tl.min(tl.where(right, WIDTH, step), axis=0)
    settled = (watched_length > 0) & ((run < known) | (known >= watched_length))
    tried = (step <= run) & (step < known) & settled & inside
    hit = tried & (step < run)
    bins = tl.load(watched_bins_ptr + slot * width + step, mask=inside, other=0)
    own = (slot * BINS + bins) * width + step
    trials = tl.load(trials_ptr + own, mask=tried, other=0.0)
    hits = tl.load(hits_ptr + own, mask=tried, other=0.0)
    tl.store(trials_ptr + own, trials * decay + 1.0, mask=tried)
    tl.store(hits_ptr + own, hits * decay + hit.to(tl.float32), mask=tried)
    cell = bins * width + step
    mean = tl.load(all_ptr + entries + cell, mask=tried, other=0.0)
    mean /= tl.load(all_ptr + cell, mask=tried, other=1.0)
    agreement = (hit.to(tl.float32) - mean) * (hits - trials * mean)
    tl.atomic_add(news_ptr + cell, 1.0, mask=tried, sem="relaxed")
    tl.atomic_add(news_ptr + entries + cell, 1.0, mask=hit, sem="relaxed")
    tl.atomic_add(news_ptr + 2 * entries + cell, agreement, mask=tried, sem="relaxed")
    tl.atomic_add(news_ptr + 3 * entries + cell, trials, mask=tried, sem="relaxed")
    watched_length = tl.where(settled, 0, watched_length)
    # Take the next offer, as far as it can be verified.
    given = inside & (step < offers)
    token = tl.load(offer_ptr + span * offers + step, mask=given, other=-1)
    valid = (token >= 0) & (token < vocab)
    size = tl.min(tl.where(valid, WIDTH, step), axis=0).to(tl.int64)
    size = tl.minimum(size, tl.load(offer_length_ptr + span))
    size = tl.minimum(size, tl.load(limit_ptr + slot) - length - 1)
    size = tl.maximum(tl.minimum(size, tl.load(draft_limit_ptr + slot)), 0)
    size = tl.where(tl.load(allowed_ptr + slot) != 0, size, 0)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    where = offer_confidence_ptr + span * confidence_row + step * confidence_column
    confidence = tl.load(where, mask=given, other=0.0)
    tl.store(token_ptr + slot * width + step, token, mask=inside)
    tl.store(token_length_ptr + slot, size)
    tl.store(confidence_ptr + slot * width + step, confidence, mask=inside)
    take = (watched_length == 0) & (size > 0)
    bins = tl.minimum(tl.maximum((confidence * BINS).to(tl.int64), 0), BINS - 1)
    tl.store(watched_ptr + slot * width + step, token, mask=inside & take)
    tl.store(watched_bins_ptr + slot * width + step, bins, mask=inside & take)
    if take:
        tl.store(watched_start_ptr + slot, length)
    tl.store(watched_length_ptr + slot, tl.where(take, size, watched_length))


@jit
def brought_up(all_ptr, news_ptr, place, forget, inside):
    """What all requests taught, the news included."""
    old = tl.load(all_ptr + place, mask=inside, other=1.0)
    return old * forget + tl.load(news_ptr + place, mask=inside, other=0.0)


@jit
def keep_kernel(
    slots_ptr, going_ptr, idle, slots, proposers, awake,
    token_ptr, token_length_ptr, confidence_ptr, hits_ptr, trials_ptr, all_ptr, news_ptr,
    entries, decay_log2, least_prior, largest_prior, least, width,
    kept_token_ptr, kept_chance_ptr, kept_length_ptr, kept_proposer_ptr,
    report_ptr, columns, counts_ptr, accepted_ptr, ends_ptr, drafts_ptr, tokens_ptr, alive_ptr,
    KEEP: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``token``, ``hits`` and the like: [proposers, slots, ...]; ``all`` and ``news``: four parts,
    each [proposers, BINS, width]. Bit i of ``awake``: proposer i made offers in this round. The
    report's columns are those of ``speculation.books.ReportColumns``."""
    span = tl.program_id(0)
    slot = tl.load(slots_ptr + span)
    going = tl.load(going_ptr + span)
    step = tl.arange(0, WIDTH)
    inside = step < width
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
    if KEEP:
        best = tl.zeros([], tl.float32) - 1.0
        for index in range(0, proposers):
            place = index * slots + slot
            size = tl.load(token_length_ptr + place)
            size = tl.where(((awake >> index) & 1) != 0, size, 0)
            tl.store(token_length_ptr + place, size, mask=slot != idle)
            sure = tl.load(confidence_ptr + place * width + step, mask=inside, other=0.0)
            bins = tl.minimum(tl.maximum((sure * BINS).to(tl.int64), 0), BINS - 1)
            shared = (index * BINS + bins) * width + step
            forget = tl.exp2(tl.load(news_ptr + shared, mask=inside, other=0.0) * decay_log2)
            tries = brought_up(all_ptr, news_ptr, shared, forget, inside)
            mean = brought_up(all_ptr, news_ptr, shared + entries, forget, inside) / tries
            together = brought_up(all_ptr, news_ptr, shared + 2 * entries, forget, inside)
            together /= brought_up(all_ptr, news_ptr, shared + 3 * entries, forget, inside)
            prior = mean * (1.0 - mean) / tl.maximum(together, 1e-6) - 1.0
            prior = tl.minimum(tl.maximum(prior, least_prior), largest_prior)
            own = (place * BINS + bins) * width + step
            hits = tl.load(hits_ptr + own, mask=inside, other=0.0) + prior * mean
            rate = hits / (tl.load(trials_ptr + own, mask=inside, other=0.0) + prior)
            offered = inside & (step < size)
            found = tl.cumprod(tl.where(offered, rate, 0.0), axis=0)
            total = tl.sum(found, axis=0)
            better = total > best
            whose = tl.where(better, index, whose)
            length = tl.where(better, size, length)
            kept = tl.where(offered, tl.maximum(found, least), 0.0)
            chances = tl.where(better, kept, chances)
            best = tl.maximum(total, best)
        if going != idle:
            token = tl.load(token_ptr + (whose * slots + slot) * width + step, mask=inside, other=0)
            tl.store(kept_token_ptr + slot * width + step, token, mask=inside)
            tl.store(kept_chance_ptr + slot * width + step, chances, mask=inside)
            tl.store(kept_length_ptr + slot, length)
            tl.store(kept_proposer_ptr + slot, whose)
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


def split(
    slots: torch.Tensor,
    quota: torch.Tensor,
    state: Any,
    chances: torch.Tensor,
    tokens: torch.Tensor,
    rows: int,
    sampled_rows: int,
    all_seen: torch.Tensor,
    news: torch.Tensor,
    decay_log2: float,
    drafting: bool,
) -> RoundSpans:
    """``slots`` and ``quota`` int64 [B]; ``state``: a ``SlotState``; by slot, ``chances`` float32
    and ``tokens`` int64 [slots, K]. ``all_seen`` and ``news`` float32 [4, …]. Puts the offers
    behind the committed tokens."""
    spans, width = slots.shape[0], max(chances.shape[1], 1)
    known, drafts, samples = (torch.empty_like(slots) for _ in range(3))
    history = state.history
    split_kernel[(spans,)](
        slots, quota, spans, state.idle_slot, state.alive, state.computed, chances, tokens, width,
        history, history.stride(0), state.length, rows, sampled_rows, known, drafts, samples,
        all_seen, news, all_seen.numel() // 4, decay_log2,
        drafting, next_power_of_2(spans), width_of(width), COMPARED // width_of(width),
        num_warps=4,
    )  # fmt: skip
    return RoundSpans(slots, known, drafts, samples)


@dataclass(frozen=True)
class Learner:
    """One proposer's tables, by slot unless it says otherwise."""

    watched: torch.Tensor
    watched_bins: torch.Tensor
    watched_length: torch.Tensor
    watched_start: torch.Tensor
    hits: torch.Tensor
    """float32 [slots, bins, K], as are ``trials``."""
    trials: torch.Tensor
    seen: torch.Tensor
    """This proposer's part of what all taught, as of the round before, and of the ``news``: trials,
    ``entries`` further on the hits, and so on."""
    news: torch.Tensor
    entries: int
    allowed: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    confidence: torch.Tensor


def learn(
    learner: Learner,
    slots: torch.Tensor,
    idle: int,
    history: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    vocab_size: int,
    draft_limit: torch.Tensor,
    offers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: float,
) -> None:
    """Judge the watched offers of ``slots`` int64 [B], then enter ``offers``: tokens int64 [B, n],
    lengths int64 [B], confidence float32 [B, n]."""
    tokens, lengths, confidence = offers[0].contiguous(), offers[1].contiguous(), offers[2]
    width, bins = learner.watched.shape[1], learner.hits.shape[1]
    learn_kernel[(slots.shape[0],)](
        slots, idle, history, history.stride(0), length, limit, vocab_size,
        learner.watched, learner.watched_bins, learner.watched_length, learner.watched_start,
        learner.hits, learner.trials, learner.seen, learner.news, learner.entries, decay,
        tokens, tokens.shape[1], lengths, confidence, confidence.stride(0), confidence.stride(1),
        learner.allowed, draft_limit, learner.tokens, learner.lengths, learner.confidence, width,
        bins, width_of(width), num_warps=1,
    )  # fmt: skip


def keep(
    slots: torch.Tensor,
    idle: int,
    offers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    hits: torch.Tensor,
    trials: torch.Tensor,
    all_seen: torch.Tensor,
    news: torch.Tensor,
    decay_log2: float,
    prior_range: tuple[float, float],
    least: float,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    report: torch.Tensor,
    verdict: RoundVerdict,
    drafts: torch.Tensor,
    alive: torch.Tensor,
    awake: Sequence[int],
) -> None:
    """Choose among the proposers' ``offers`` (tokens [P, slots, K], lengths [P, slots], confidence
    [P, slots, K]) into ``kept`` (tokens, chances, lengths, proposer), mark ends in ``alive``, and
    write ``report`` int32 [B, 8 + 3 K]. Offers of proposers that are not ``awake`` are dropped."""
    proposers, count, bins, width = hits.shape
    keep_kernel[(slots.shape[0],)](
        slots, verdict.going, idle, count, proposers, sum(1 << index for index in awake),
        *offers, hits, trials, all_seen, news,
        all_seen.numel() // 4, decay_log2, *prior_range, least, width,
        *kept, report, report.stride(0),
        verdict.counts, verdict.accepted, verdict.ends, drafts, verdict.tokens, alive,
        bool(awake), bins, width_of(width), num_warps=1,
    )  # fmt: skip
