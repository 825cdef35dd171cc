"""From slots to the rows of one forward, and from sampled rows back to slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.kernels.backend import FlatBatch
from surefoot.speculation.state import SlotState


@dataclass(frozen=True)
class RoundPlan:
    """What the host decided about a round. B spans, in this order: prefill chunks that end short
    of the current token, those that reach it, spans of requests with a current token."""

    slots: torch.Tensor
    """int64 [B]."""
    known: torch.Tensor
    """int64 [B]: rows of known tokens: the chunk, or 1 for the current token."""
    drafts: torch.Tensor
    """int64 [B]: drafts to verify after them."""
    rows: int
    """Rows of the flat batch: at least the sum of ``known`` and ``drafts``."""
    sampled_rows: int
    """Rows to sample: at least one, plus the drafts, for each span that samples."""
    first_sampling: int
    """Spans before this one sample nothing."""
    first_decoding: int
    """Spans before this one are prefill chunks."""
    max_keys: int
    every_row_samples: bool = False
    """The rows to sample are all rows of the flat batch, in its order."""


@dataclass(frozen=True)
class Layout:
    """``first_row`` int64 [B]: each span's first row. ``sample_index`` int64 [M]: flat rows to
    sample, span by span; ``sample_slots`` and ``sample_positions`` int64 [M]: whose they are and
    where the sampled token would stand; ``first_sample`` int64 [B]: each span's first among M."""

    batch: FlatBatch
    first_row: torch.Tensor
    sample_index: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    first_sample: torch.Tensor


def lay_out(state: SlotState, plan: RoundPlan) -> Layout:
    """Build the flat batch from the slots; drafts already stand in ``state.history``."""
    if state.native is None:
        return lay_out_reference(state, plan)
    tensors = state.native.lay_out(
        plan.slots, plan.known, plan.drafts, plan.first_sampling, plan.rows, plan.sampled_rows
    )
    tokens, positions, row_slot, first_row, index, sample_slots, sample_positions, first = tensors
    batch = FlatBatch(
        tokens=tokens,
        positions=positions,
        key_index=positions,
        row_slot=row_slot,
        block_tables=state.block_tables,
        span_start=state.computed,
        max_keys=plan.max_keys,
    )
    return Layout(batch, first_row, index, sample_slots, sample_positions, first)


def lay_out_reference(state: SlotState, plan: RoundPlan) -> Layout:
    """``lay_out`` in plain torch, on any device."""
    slots, device = plan.slots, state.device
    counts = plan.known + plan.drafts
    start = state.computed[slots]
    owner, offset, valid, ends = _ragged(counts, plan.rows)
    row_slot = slots[owner]
    positions = start[owner] + offset
    batch = FlatBatch(
        tokens=state.history[row_slot, positions],
        positions=positions,
        key_index=positions,
        row_slot=torch.where(valid, row_slot, -1),
        block_tables=state.block_tables,
        span_start=state.computed,
        max_keys=plan.max_keys,
    )
    samples = torch.arange(len(slots), device=device) >= plan.first_sampling
    sampled = torch.where(samples, plan.drafts + 1, 0)
    s_owner, s_offset, _, s_ends = _ragged(sampled, plan.sampled_rows)
    within = (counts - sampled)[s_owner] + s_offset
    return Layout(
        batch=batch,
        first_row=ends - counts,
        sample_index=(ends - counts)[s_owner] + within,
        sample_slots=slots[s_owner],
        sample_positions=start[s_owner] + within + 1,
        first_sample=s_ends - sampled,
    )


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
