"""Accept drafts, cut at ends, commit: one program a span. Twin: ``kernels.rounds``."""

from __future__ import annotations

import torch
import triton.language as tl

from surefoot.kernels.rounds import RoundSpans, RoundVerdict
from surefoot.kernels.triton.launch import SPAN_COLUMNS, jit, next_power_of_2


@jit(do_not_specialize=["sampled_rows"], do_not_specialize_on_alignment=SPAN_COLUMNS)
def verdict_kernel(
    slots_ptr, known_ptr, drafts_ptr, samples_ptr, first_sample_ptr, sampled_ptr, sampled_rows,
    history_ptr, history_stride, length_ptr, computed_ptr, limit_ptr, stop_ids_ptr, stops,
    token_ptr, accepted_ptr, count_ptr, end_ptr, settled_ptr, going_ptr, nobody,
    max_drafts,
    WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    known = tl.load(known_ptr + span)
    slot = tl.maximum(tl.load(slots_ptr + span), 0)
    drafts = tl.where(known > 0, tl.load(drafts_ptr + span), 0)
    samples = (known > 0) & (tl.load(samples_ptr + span) > 0)
    length = tl.load(length_ptr + slot)
    computed = tl.load(computed_ptr + slot)

    step = tl.arange(0, WIDTH).to(tl.int64)
    row = tl.minimum(tl.load(first_sample_ptr + span) + step, sampled_rows - 1)
    token = tl.load(sampled_ptr + row)
    text = history_ptr + slot * history_stride + length + step
    drafted = step < tl.minimum(drafts, max_drafts)
    equal = drafted & (tl.load(text, mask=drafted, other=-1) == token)
    accepted = tl.min(tl.where(equal, WIDTH, step), axis=0)
    accepted = tl.where(samples, accepted, 0)
    count = tl.where(samples, accepted + 1, 0)

    entry = tl.arange(0, STOPS)
    stop = tl.load(stop_ids_ptr + slot * stops + entry, mask=entry < stops, other=-1)
    hits = tl.max((token[:, None] == stop[None, :]).to(tl.int32), axis=1) > 0
    hits = hits & (step < count)
    before_end = tl.min(tl.where(hits, step, max_drafts + 1), axis=0)
    room = tl.load(limit_ptr + slot) - length
    kept = tl.maximum(tl.minimum(tl.minimum(count, before_end + 1), room), 0)
    stopped = (kept > 0) & (kept > before_end)
    code = tl.where(stopped, 1, tl.where((kept >= room) & (count > 0), 2, 0))

    columns = max_drafts + 1
    tl.store(token_ptr + span * columns + step, token, mask=step < columns)
    tl.store(accepted_ptr + span, accepted)
    tl.store(count_ptr + span, kept)
    tl.store(end_ptr + span, code.to(tl.int64))
    after = tl.where(kept > 0, length + kept - 1, computed + known)
    tl.store(settled_ptr + span, tl.where(known > 0, after - computed, 0))
    going = tl.where((kept > 0) & (code == 0), slot, nobody)
    tl.store(going_ptr + span, going.to(tl.int64))
    if known > 0:
        tl.store(text, token, mask=step < kept)
        tl.store(length_ptr + slot, length + kept)
        tl.store(computed_ptr + slot, after)


def judge_and_advance(
    spans: RoundSpans,
    first_sample: torch.Tensor,
    sampled: torch.Tensor,
    history: torch.Tensor,
    length: torch.Tensor,
    computed: torch.Tensor,
    limit: torch.Tensor,
    stop_ids: torch.Tensor,
    max_drafts: int,
) -> RoundVerdict:
    """``first_sample`` int64 [B] and ``sampled`` int64 [M] of the round; the state by slot:
    ``history`` int64 [slots, width] with the drafts in place, ``length``, ``computed``, ``limit``
    int64 [slots], ``stop_ids`` int64 [slots, n] padded with -1. Updates history, length and
    computed."""
    entries = spans.slots.shape[0]
    tokens = history.new_empty((entries, max_drafts + 1))
    outcome = [history.new_empty(entries) for _ in range(5)]
    stops = stop_ids.shape[1]
    verdict_kernel[(entries,)](
        spans.slots, spans.known, spans.drafts, spans.samples,
        first_sample, sampled, sampled.shape[0],
        history, history.stride(0), length, computed, limit, stop_ids, stops,
        tokens, *outcome, history.shape[0] - 1, max_drafts,
        next_power_of_2(max_drafts + 1), next_power_of_2(stops), num_warps=1,
    )  # fmt: skip
    return RoundVerdict(tokens, *outcome)
