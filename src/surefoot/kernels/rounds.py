"""From slots to the rows of a round and back, without the host: the torch twins.

The host gives the slots; everything else (how many rows each span has, where it stands, where it
ends) is read from device tensors, so that a captured round can be replayed as requests grow, and
with fewer spans than it was captured for: entries without known rows get no rows and change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from surefoot.kernels.acceptance import accept_chain, cut_at_end
from surefoot.kernels.batch import FlatBatch, OutputRows, SpanTable


@dataclass(frozen=True)
class RoundSpans:
    """The spans of a round, on the device: int64 [B] each.

    ``known``: rows of known tokens, 0 for an unused entry; ``drafts``: rows of drafts after them;
    ``samples``: 1 where the last known row and the drafts are sampled, else 0.
    """

    slots: torch.Tensor
    known: torch.Tensor
    drafts: torch.Tensor
    samples: torch.Tensor


@dataclass(frozen=True)
class RoundLayout:
    """``first_row`` int64 [B]: each span's first row. ``sample_index`` int64 [M]: flat rows to
    sample, span by span; ``sample_slots`` and ``sample_positions`` int64 [M]: whose they are and
    where the sampled token would stand; ``first_sample`` int64 [B]: each span's first among M."""

    batch: FlatBatch
    first_row: torch.Tensor
    sample_index: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    first_sample: torch.Tensor


@dataclass(frozen=True)
class RoundVerdict:
    """int64 [B] each, but for the tokens. ``accepted``: drafts accepted, before the cut at an end;
    ``counts``: tokens committed, 0 for spans that sample nothing; ``ends``: 0 runs on, 1 ended by a
    stop id, 2 by the token limit; ``settled``: rows whose KV is final now; ``going``: the slots
    that got tokens and did not end, elsewhere the last slot, which is nobody's.
    """

    tokens: torch.Tensor
    """int64 [B, max_drafts + 1], valid up to ``counts``."""
    accepted: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    settled: torch.Tensor
    going: torch.Tensor


def lay_out_spans(
    spans: RoundSpans,
    history: torch.Tensor,
    computed: torch.Tensor,
    block_tables: torch.Tensor,
    rows: int,
    sampled_rows: int,
    max_keys: int,
    max_span_rows: int,
) -> RoundLayout:
    """``history`` int64 [slots, width] with the drafts in place, ``computed`` int64 [slots],
    ``block_tables`` int32 [slots, blocks]. ``rows``, ``sampled_rows``, ``max_keys`` and
    ``max_span_rows`` bound what the device finds; rows beyond it are padding, sampled rows beyond
    it repeat the last."""
    slots, used = spans.slots, spans.known > 0
    counts = torch.where(used, spans.known + spans.drafts, 0)
    sampled = torch.where(used & (spans.samples > 0), spans.drafts + 1, 0)
    start = computed[slots]
    owner, offset, valid, ends = _ragged(counts, rows)
    positions = start[owner] + offset
    batch = FlatBatch(
        tokens=history[slots[owner], positions],
        positions=positions,
        key_index=positions,
        row_slot=torch.where(valid, slots[owner], -1),
        block_tables=block_tables,
        span_start=computed,
        max_keys=max_keys,
        spans=SpanTable(ends - counts, counts, slots, max_span_rows),
    )
    s_owner, s_offset, _, s_ends = _ragged(sampled, sampled_rows)
    within = (counts - sampled)[s_owner] + s_offset
    return RoundLayout(
        batch=batch,
        first_row=ends - counts,
        sample_index=((ends - counts)[s_owner] + within).clamp(max=rows - 1),
        sample_slots=slots[s_owner],
        sample_positions=start[s_owner] + within + 1,
        first_sample=s_ends - sampled,
    )


def sampled_rows(spans: RoundSpans, layout: RoundLayout, max_span_rows: int) -> OutputRows:
    """The rows that are sampled, as a batch of their own: at most ``max_span_rows`` of a span."""
    batch, index = layout.batch, layout.sample_index
    sampled = torch.where((spans.known > 0) & (spans.samples > 0), spans.drafts + 1, 0)
    rows = replace(
        batch,
        tokens=batch.tokens[index],
        positions=batch.positions[index],
        key_index=batch.key_index[index],
        row_slot=batch.row_slot[index],
        mask=None if batch.mask is None else batch.mask[index],
        spans=SpanTable(layout.first_sample, sampled, spans.slots, max_span_rows),
    )
    return OutputRows(index, rows)


def _ragged(
    counts: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Spread ``total`` rows over ragged counts [B]: (owner [total], offset within it, whether the
    row belongs to anyone, running ends [B]). Rows beyond the sum repeat the last one."""
    ends = counts.cumsum(0)
    index = torch.arange(total, device=counts.device)
    valid = index < ends[-1]
    index = torch.minimum(index, ends[-1] - 1).clamp(min=0)
    owner = torch.searchsorted(ends, index, right=True).clamp(max=len(counts) - 1)
    return owner, index - (ends - counts)[owner], valid, ends


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
    """Accept drafts that equal what their rows sampled, cut at ends, commit.

    ``first_sample`` int64 [B] and ``sampled`` int64 [M] of the round; the state by slot:
    ``history`` int64 [slots, width] with the drafts in place, ``length``, ``computed``, ``limit``
    int64 [slots], ``stop_ids`` int64 [slots, n] padded with -1. Updates history, length and
    computed."""
    slots, device = spans.slots, history.device
    used = spans.known > 0
    sampling = used & (spans.samples > 0)
    steps = torch.arange(max_drafts + 1, device=device)
    index = first_sample.unsqueeze(1) + steps
    tokens = sampled[index.clamp(max=len(sampled) - 1)]
    old_length, first = length[slots], computed[slots]
    columns = old_length.unsqueeze(1) + steps
    text = history[slots.unsqueeze(1), columns]
    accepted = accept_chain(tokens, text[:, :max_drafts], torch.where(sampling, spans.drafts, 0))
    counts = torch.where(sampling, accepted + 1, 0)
    kept, ends = cut_at_end(tokens, counts, limit[slots] - old_length, stop_ids[slots])
    after = torch.where(kept > 0, old_length + kept - 1, first + spans.known)
    # Unused entries may share a slot, with each other or with a used one: they add nothing.
    added = torch.where(steps < kept.unsqueeze(1), tokens - text, 0)
    history.index_put_((slots.unsqueeze(1), columns), added, accumulate=True)
    length.index_put_((slots,), torch.where(used, kept, 0), accumulate=True)
    settled = torch.where(used, after - first, 0)
    computed.index_put_((slots,), settled, accumulate=True)
    going = torch.where((kept > 0) & (ends == 0), slots, len(history) - 1)
    return RoundVerdict(tokens, accepted, kept, ends, settled, going)
